"""What is not trained is held in autocast's own precision: the same bits in less memory, and results without loss."""

import ctypes
import dataclasses
import gc
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peer.contracts import LatentBatch
from peer.launch.starting_model import load_model
from peer.rooms import load_part
from swarm.digest import digest_model
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.machine.shallow import shallow_family, tiny_model, with_one_level  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.peer.test_alone import CPU, RUN, flat, start  # noqa: F401

BF16 = torch.bfloat16
METHODS = {
    "full": {},
    "lora": {"method": "lora", "rank": 2},
    "lora with text encoder": {"method": "lora", "rank": 2, "train_text_encoder": True},
    "textual_inversion": {"placeholder_token": "<dicoo>", "initializer_token": "toy"},
}

WHOLE = ("sd", "flux")
"""Families of which a whole denoiser is trained here: it stays as it is, by its name; all other parts are held as for adapters, which all families train."""


def placed(folder, dtype, device=None, **options):
    """A model as a peer has it, with its method and what that trains."""
    run = RunConfig(model=str(folder), **options)
    method, model = load_part("methods", run.method).build(run), load_model(run, {}, device)
    model.place(CPU, dtype, method.whole(model))
    return model, method, method.attach(model)


def bytes_of(model):
    return sum(parameter.nbytes for part in model.parts.values() for parameter in part.parameters() if not parameter.requires_grad)


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family in tiny.ONE_OF_EACH for method in METHODS if tiny.takes(family, method) and (method != "full" or family in WHOLE)],
)
def test_losses_and_gradients_have_the_same_bits_in_less_memory(family, method, shallow_family):  # noqa: F811
    found = []
    for dtype in (None, BF16):
        model, _, params = placed(shallow_family(family), dtype, **METHODS[method])
        pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
        with torch.autocast("cpu", dtype=BF16):
            latents, text = model.encode_pixels(pixels).chunk(2, dim=1)[0], model.encode_text(["a cat", "<dicoo>"])
            loss = model.loss(LatentBatch(latents, text), torch.Generator().manual_seed(2))
        loss.sum().backward()
        assert {parameter.dtype for parameter in params.values()} == {torch.float32}
        found.append(
            (
                loss.detach(),
                flat({name: parameter.grad for name, parameter in params.items() if parameter.grad is not None}),
                bytes_of(model),
            )
        )
    (loss, gradients, before), (held_loss, held_gradients, after) = found
    assert torch.equal(loss, held_loss) and torch.equal(gradients, held_gradients) and gradients.any()
    assert after < before


def test_a_vae_that_overflows_stays_as_it_is_and_others_do_not(shallow_family, tmp_path):  # noqa: F811
    pipeline = tiny.build("sdxl")
    pipeline.vae.register_to_config(force_upcast=False)
    pipeline.save_pretrained(tmp_path)
    kinds = [
        {p.dtype for p in placed(folder, torch.float16)[0].vae.encoder.conv_in.parameters()} for folder in (shallow_family("sdxl"), tmp_path)
    ]
    assert kinds == [{torch.float32}, {torch.float16}]


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_a_folder_in_half_precision_is_read_as_it_is_and_trained_in_float32(dtype, tmp_path):
    tiny.build("flux").to(dtype).save_pretrained(tmp_path)
    read = load_model(RunConfig(model=str(tmp_path)), {}, None)
    assert {parameter.dtype for name in ("transformer", "vae") for parameter in read.parts[name].parameters()} == {dtype}
    model, *_ = placed(tmp_path, None, method="full")
    for name, part in load_model(RunConfig(model=str(tmp_path)), {}, CPU).parts.items():
        for (key, parameter), ours in zip(part.named_parameters(), model.parts[name].parameters(), strict=True):
            assert ours.dtype is parameter.dtype is torch.float32 and torch.equal(parameter, ours), key


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_a_pipeline_is_saved_with_its_frozen_parts_as_their_source_has_them(family, shallow_family, tmp_path):  # noqa: F811
    model, *_ = placed(shallow_family(family), BF16)
    held = {name: [(p.data_ptr(), p.dtype) for p in part.parameters()] for name, part in model.parts.items()}
    assert any(dtype is BF16 for part in held.values() for _, dtype in part)
    model.save(tmp_path / "out")
    placed(shallow_family(family), None)[0].save(tmp_path / "plain")
    assert digest_model(tmp_path / "out") == digest_model(tmp_path / "plain")
    assert {name: [(p.data_ptr(), p.dtype) for p in part.parameters()] for name, part in model.parts.items()} == held


def test_a_pipeline_with_a_new_word_is_saved_as_its_source_has_it_but_for_the_word(shallow_family, tmp_path):  # noqa: F811
    model, method, params = placed(shallow_family("sd"), BF16, **METHODS["textual_inversion"])
    params["text_encoder.learned_embeds"].data.fill_(1 / 3)
    method.complete(model, params)
    model.save(tmp_path / "out")
    ours, source = (load_file(folder / "text_encoder" / "model.safetensors") for folder in (tmp_path / "out", shallow_family("sd")))
    for name, tensor in source.items():
        mine = next(own for key, own in ours.items() if key.removeprefix("text_model.") == name.removeprefix("text_model."))
        assert mine.dtype is torch.float32 and torch.equal(mine[: len(tensor)], tensor)
        assert len(mine) == len(tensor) or (mine[-1] == torch.tensor(1 / 3)).all()


@pytest.mark.parametrize("what", ["gone", "another"])
def test_when_the_source_is_gone_or_another_the_result_is_written_all_the_same_and_says_so(what, shallow_family, tmp_path, caplog):  # noqa: F811
    base = shutil.copytree(shallow_family("sd"), tmp_path / "base")
    model, _, params = placed(base, BF16)
    shutil.rmtree(base)
    if what == "another":
        with_one_level(tiny.build("sd", seed=1)).save_pretrained(base)
    model.save(tmp_path / "out")
    assert ("as this peer held" in caplog.text) and not any(p.isnan().any() for p in params.values())
    saved = load_file(tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(saved["conv_in.weight"], params["unet.conv_in.weight"])
    assert load_model(RunConfig(model=str(tmp_path / "out")), {}, CPU).parts["text_encoder"].dtype is torch.float32


@pytest.fixture
def nothing_left():
    """What other tests have left is given back first: it would go while something is measured. What is there then is looked through once."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def own_bytes():
    """What this process holds that is in no file."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Anonymous:")]
    return int(line.split()[1]) * 1024


def test_a_folder_in_the_precision_that_is_computed_in_stays_in_its_files(tmp_path, nothing_left):
    """No part is in memory twice, nor once: its pages are the files', which the kernel may drop. In float32 it is there once."""
    pipeline = tiny.build("flux")
    wide = {**{name: value for name, value in pipeline.transformer.config.items() if name[0] != "_"}, "num_attention_heads": 32}
    pipeline.register_modules(transformer=type(pipeline.transformer)(**wide))
    pipeline.to(BF16).save_pretrained(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    del pipeline
    load_model(RunConfig(model=str(tmp_path)), {}, None)  # imports what reads it
    for dtype, least, most in ((BF16, 0, 0.2), (None, 1.5, 2.5)):
        before = own_bytes()
        model = load_model(RunConfig(model=str(tmp_path)), {}, None)
        model.place(CPU, dtype)
        assert least * size <= own_bytes() - before < most * size and size > 25e6


def test_a_run_has_the_same_bits_with_and_without_and_goes_on_with_them(start, monkeypatch):  # noqa: F811
    peer = {"mixed_precision": "bf16", "cache_text": True, "run": dataclasses.replace(RUN, total_samples=12)}
    held = start("held", **peer).run()
    assert BF16 in {p.dtype for p in held.trainer.model.parts["text_encoder"].parameters()}
    first = start("parts", stop_after=1, **peer).run()
    second = start("parts", resume_from_checkpoint="latest", **peer).run()
    from peer.models.diffusion.model import DiffusionModel

    place = DiffusionModel.place
    monkeypatch.setattr(DiffusionModel, "place", lambda self, device, *_, **__: place(self, device))
    plain = start("plain", **peer).run()
    assert {p.dtype for p in plain.trainer.model.parts["text_encoder"].parameters()} == {torch.float32}
    assert held.losses == plain.losses == first.losses + second.losses
    assert torch.equal(flat(held.trainer.params), flat(plain.trainer.params))
    assert torch.equal(flat(second.trainer.params), flat(plain.trainer.params))
