"""Runs that begin with a LoRA that others wrote (`--lora_weights`): the same strength in every form, equal bits at every peer, unfit files refused."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import nn

from datasetserver.founding import run_to_serve
from peer import export
from peer.launch.starting_model import complete, load_model
from peer.methods.lora import Lora
from peer.methods.shared.adapters import layers
from peer.results.loading import LORA as FILE
from swarm.errors import UserError
from swarm.options import build
from swarm.run_config import RunConfig
from tests import flux_file, tiny
from tests.conftest import ROOT
from tests.peer.machine.shallow import shallow_family, tiny_model  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.peer.results.test_results import CPU, LORA, Trained, picture, plain
from tests.peer.test_alone import RUN, flat, start  # noqa: F401


def begun(base, file, **options):
    """A model as a peer has it that begins with a LoRA, and what is trained of it."""
    said = {"model": str(base), "resolution": 16, "method": "lora", "lora_weights": str(file), **options}
    run = complete(build(RunConfig, said), given=said)
    model, method = load_model(run, {}, CPU), Lora(run)
    method.begin(model)
    return model, method.attach(model), run


@pytest.fixture(scope="module")
def written(shallow_family, tmp_path_factory):  # noqa: F811
    """`written("sd")`: the folder of a LoRA on all that its family trains, with kohya's form beside it where it has one."""
    made = {}

    def write(family, **options):
        key = (family, *options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            text = tiny.takes(family, "lora with text encoder")
            done = Trained(shallow_family(family), family, folder / "model", train_text_encoder=text, **LORA | options).written()
            if not {"use_dora"} & {*options}:
                export.main(["--state", str(folder), "--format", "lora_kohya", "--out", str(folder / "kohya.safetensors")])
            made[key] = done
        return made[key]

    return write


@pytest.mark.parametrize(
    ("family", "form"),
    [*((family, "model") for family in ("sd", "sdxl", "flux", "sd3", "flux2")), *((family, "kohya.safetensors") for family in ("sd", "sdxl", "flux2", "z_image"))],
)
def test_a_run_begins_as_strong_as_the_file_was_whatever_its_own_alpha(written, shallow_family, family, form):  # noqa: F811
    done = written(family)
    text = tiny.takes(family, "lora with text encoder")
    model, params, run = begun(shallow_family(family), done.folder.parent / form, train_text_encoder=text, lora_alpha=1.0)
    assert params.keys() == done.params.keys() and run.rank == 2
    for name, parameter in params.items():
        torch.testing.assert_close(parameter, done.params[name] * 3 if "lora_B" in name else done.params[name])  # alpha was 3, and is 1
    np.testing.assert_allclose(picture(model.pipeline), picture(done.model.pipeline), atol=1e-4)


def test_a_file_as_kohyas_scripts_leave_it_begins_with_one_matrix_for_all_layers_in_one(shallow_family, tmp_path):  # noqa: F811
    """Every linear layer of the blocks and of CLIP, an alpha of its own: what networks/lora_flux.py takes where nobody chooses (sd-scripts at 48d368f)."""
    rng, tensors = torch.Generator().manual_seed(1), {}
    original = flux_file.transformer_tensors(plain(shallow_family("flux")).transformer)
    clip = plain(shallow_family("flux")).text_encoder.state_dict()
    weights = {f"lora_unet_{name}": tensor for name, tensor in original.items() if "_blocks." in name}
    weights |= {f"lora_te1_text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in clip.items() if ".layers." in name}
    for name, weight in ((name.removesuffix(".weight"), tensor) for name, tensor in weights.items() if tensor.dim() == 2):
        ends = {"lora_down.weight": (4, weight.shape[1]), "lora_up.weight": (len(weight), 4)}
        tensors |= {f"{name.replace('.', '_')}.{end}": torch.randn(shape, generator=rng) * 0.1 for end, shape in ends.items()}
        tensors[f"{name.replace('.', '_')}.alpha"] = torch.tensor(2.0)
    save_file(tensors, tmp_path / "kohya.safetensors")
    model, params, run = begun(shallow_family("flux"), tmp_path / "kohya.safetensors", lora_targets="all-linear", train_text_encoder=True)
    assert run.rank == 4
    model.pipeline.fuse_lora(components=["transformer"])
    model.pipeline.unload_lora_weights()
    after = flux_file.transformer_tensors(model.pipeline.transformer)
    for name, before in ((name, tensor) for name, tensor in original.items() if "_blocks." in name and tensor.dim() == 2):
        down, up = (tensors[f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}.lora_{side}.weight"] for side in ("down", "up"))
        torch.testing.assert_close(after[name], before + up @ down / 2, atol=1e-5, rtol=1e-5)
    assert len(params) > 2 * len(tensors) / 3, "what was one layer is several"


@pytest.fixture
def without_t5(shallow_family, tmp_path):  # noqa: F811
    DiffusionPipeline.from_pretrained(shallow_family("sd3"), text_encoder_3=None, tokenizer_3=None).save_pretrained(tmp_path / "without")
    return tmp_path / "without"


@pytest.mark.parametrize(("family", "targets"), [("flux", "auto"), ("flux", "all-linear"), ("sd3", "all-linear")])
def test_kohyas_form_comes_back_also_where_parts_of_a_layer_are_not_trained_or_a_t5_is_not_there(shallow_family, written, without_t5, family, targets):  # noqa: F811
    done, base = written(family, lora_targets=targets), without_t5 if family == "sd3" else shallow_family(family)
    _, params, run = begun(base, done.folder.parent / "kohya.safetensors", lora_targets=targets, train_text_encoder=True)
    assert params.keys() == done.params.keys() and run.rank == 2
    for name, parameter in params.items():
        torch.testing.assert_close(parameter, done.params[name] * 1.5 if "lora_B" in name else done.params[name])


PARTS = ("attn.to_q", "attn.to_q attn.to_k attn.to_v", "proj_mlp", "attn.to_q attn.add_q_proj attn.add_k_proj", "attn.to_q attn.to_k attn.add_q_proj attn.add_k_proj attn.add_v_proj")


@pytest.mark.parametrize("targets", PARTS)
def test_layers_that_are_all_in_others_come_back_at_their_own_rank(shallow_family, tmp_path, targets):  # noqa: F811
    """The last: no layer of the file has the run's rank, and none of the others' ranks is a multiple of the least."""
    done = Trained(shallow_family("flux"), "flux", tmp_path / "model", lora_targets=targets, **LORA).written()
    with torch.no_grad():  # as peft begins: it adds nothing, and is trained all the same
        next(parameter for name, parameter in done.params.items() if "lora_B" in name).zero_()
    done.written()
    export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
    _, params, run = begun(shallow_family("flux"), tmp_path / "kohya.safetensors", lora_targets=targets)
    assert params.keys() == done.params.keys() and run.rank == 2
    for name, parameter in params.items():
        torch.testing.assert_close(parameter, done.params[name] * 1.5 if "lora_B" in name else done.params[name])


def test_the_founder_takes_several_ranks_only_where_the_header_says_the_layers_own(shallow_family, tmp_path, written):  # noqa: F811
    """Of a dense file, which no peer could take apart, too; and a header that does not fit the layers says nothing."""
    kohya = written("flux", lora_targets="auto").folder.parent / "kohya.safetensors"
    for header in (None, {"ss_network_dim": "1"}, {"ss_network_dim": "Dynamic"}, {"ss_network_dim": "9" * 5000}):
        save_file(load_file(kohya), tmp_path / "file.safetensors", header)
        with pytest.raises(UserError, match="has layers of 2 ranks"):
            complete(RunConfig(model=str(shallow_family("flux")), method="lora", lora_weights=str(tmp_path / "file.safetensors")))
    one = {name: tensor for name, tensor in load_file(kohya).items() if name.startswith("lora_te1")}
    save_file(one, tmp_path / "file.safetensors", {"ss_network_dim": "1"})
    run = RunConfig(model=str(shallow_family("flux")), method="lora", lora_weights=str(tmp_path / "file.safetensors"))
    assert complete(run).rank == 2, "of a file that was resized"


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_the_list_on_the_page_is_of_the_layers_that_kohyas_scripts_train_where_nobody_chooses(tiny_family, family):
    """UNET_TARGET_REPLACE_MODULE and TEXT_ENCODER_TARGET_REPLACE_MODULE of networks/lora.py, sd-scripts at 48d368f."""
    page = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    ends = [shown.split(",") for shown in re.findall(r"--lora_targets (\S*,ff\.net\.2,\S*)", page)]
    assert len(ends) == 2, "one for the denoiser alone, one for the text encoder as well"
    pipeline, kinds = plain(tiny_family(family)), (nn.Linear, nn.Conv2d)
    for part, blocks, chosen in ((pipeline.unet, ("Transformer2DModel",), ends[0]), (pipeline.unet, ("Transformer2DModel",), ends[1]), (pipeline.text_encoder, ("CLIPAttention", "CLIPMLP"), ends[1])):
        found = {f"{name}.{key}" for name, block in part.named_modules() if type(block).__name__ in blocks for key, each in block.named_modules() if isinstance(each, kinds)}
        assert {*layers(part, chosen)} == found != set()


def test_layers_in_one_that_do_not_come_apart_are_refused(shallow_family, written, tmp_path):  # noqa: F811
    kohya = load_file(written("flux", lora_targets="auto").folder.parent / "kohya.safetensors")
    qkv = next(name for name in kohya if name.endswith("qkv.lora_up.weight"))
    files = {
        r"has layers of rank 6 and of rank 2\. Give one whose layers": kohya | {qkv: torch.ones_like(kohya[qkv])},
        r"has lora_unet_other\S+, which this model does not have": kohya | {"lora_unet_other.lora_down.weight": torch.ones(2, 2)},
        r"has layers of 3 ranks": kohya | {"lora_unet_other.lora_down.weight": torch.ones(4, 2)},
    }
    for message, tensors in files.items():
        save_file(tensors, tmp_path / "file.safetensors", {"ss_network_dim": "2"})
        with pytest.raises(UserError, match=message):
            begun(shallow_family("flux"), tmp_path / "file.safetensors", train_text_encoder=True)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_targets": "all-linear+conv"}], ids=str)
def test_wider_loras_and_doras_go_on_too(written, shallow_family, options):  # noqa: F811
    done = written("sd", **options)
    model, _, _ = begun(shallow_family("sd"), done.folder, train_text_encoder=True, **options)
    np.testing.assert_allclose(picture(model.pipeline), picture(done.model.pipeline), atol=1e-4)


@pytest.mark.parametrize("form", ["kohya", "header"])
def test_an_alpha_that_is_not_the_rank_is_read_as_diffusers_reads_it(written, shallow_family, tmp_path, form):  # noqa: F811
    done, file = written("sd"), tmp_path / "file.safetensors"
    if form == "kohya":
        tensors = load_file(done.folder.parent / "kohya.safetensors")
        save_file({name: tensor * 3 if name.endswith("alpha") else tensor for name, tensor in tensors.items()}, file)
    else:
        tensors = load_file(done.folder / FILE)
        save_file(
            tensors,
            file,
            {"lora_adapter_metadata": '{"unet.r": 2, "unet.lora_alpha": 6, "text_encoder.r": 2, "text_encoder.lora_alpha": 6}'},
        )
    model, _, _ = begun(shallow_family("sd"), file, train_text_encoder=True)
    pipeline = plain(shallow_family("sd"))
    if form == "kohya":  # a header like this one lacks what peft needs to load it
        pipeline.load_lora_weights(tmp_path, weight_name=file.name)
    else:
        pipeline.load_lora_weights(done.folder)
        pipeline.set_adapters(["default_0"], [3.0])
    np.testing.assert_allclose(picture(model.pipeline), picture(pipeline), atol=1e-4)


def test_what_does_not_fit_is_refused_in_one_line(written, shallow_family, tmp_path):  # noqa: F811
    sd, base = written("sd"), shallow_family("sd")
    kohya = load_file(sd.folder.parent / "kohya.safetensors")
    files = {
        "dora": kohya | {"lora_unet_x.dora_scale": torch.ones(1)},
        "other": kohya | {"lora_unet_x.hada_w1_a": torch.ones(1)},
        "ranks": kohya | {"lora_unet_x.lora_down.weight": torch.ones(7, 7)},
        "nothing": {"x": torch.ones(1)},
        "scalar": {"lora_unet_x.lora_down.weight": torch.ones(())},
        "infinite": kohya | {next(name for name in kohya if "lora_up" in name): torch.full((32, 2), torch.inf)},
    }
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    save_file(load_file(sd.folder / FILE), tmp_path / "root.safetensors", {"lora_adapter_metadata": '{"unet.use_rslora": true}'})
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    texts = {"train_text_encoder": True}
    wrong = {
        r"and there is no such LoRA\. Give a \.safetensors file": ("/nowhere", texts),
        r"has text_encoder\.\S+, which the run does not train, and 15 more\. Choose its layers with --lora_targets, --train_text_encoder": (
            sd.folder,
            {},
        ),
        r"lacks text_encoder\S+fc1\S+, which the run trains, and \d+ more": (sd.folder, texts | {"lora_targets": "attention+ff"}),
        r"lacks \S*lora_magnitude_vector\S*, which the run trains": (sd.folder, texts | {"use_dora": True}),
        r"has \S*lora_magnitude_vector\S*, which the run does not train": (written("sd", use_dora=True).folder, texts),
        r"^rank is 4, but .*safetensors has 2\. Remove --rank": (sd.folder, texts | {"rank": 4}),
        r"is a DoRA in kohya's form": (tmp_path / "dora.safetensors", texts),
        r"other\.safetensors does not load as a LoRA of this model": (tmp_path / "other.safetensors", texts),
        r"has layers of 2 ranks": (tmp_path / "ranks.safetensors", texts),
        r"has layers of 0 ranks": (tmp_path / "nothing.safetensors", texts),
        r"scalar.* has layers of 0 ranks": (tmp_path / "scalar.safetensors", texts),
        r"infinite\.safetensors does not load .* numbers that are not finite": (tmp_path / "infinite.safetensors", texts),
        r"is scaled by the root of its rank": (tmp_path / "root.safetensors", texts),
        r"broken\.safetensors": (tmp_path / "broken.safetensors", texts),
        r"which the run does not train|of another shape": (written("sdxl").folder, texts),
    }
    for message, (file, options) in wrong.items():
        with pytest.raises(UserError) as caught:
            begun(base, file, **options)
        assert re.search(message, str(caught.value)) and "\n" not in str(caught.value), (message, str(caught.value))


def test_a_place_is_anybodys_word_and_only_the_file_of_the_runs_digest_counts(written, shallow_family):  # noqa: F811
    """A record of a run in the DHT says where its LoRA lies, and no id covers that."""
    _, _, run = begun(shallow_family("sd"), written("sd").folder, train_text_encoder=True)
    model = load_model(run, {}, CPU)
    for place in ("", "~nobody-of-that-name/x.safetensors", "x" * 5000 + ".safetensors", "\0.safetensors", str(written("sdxl").folder)):
        with pytest.raises(UserError, match="Ask the host for it, and give it with --lora_weights FILE"):
            Lora(dataclasses.replace(run, lora_weights=place)).begin(model)
    bare = Lora(dataclasses.replace(run, lora_weights_digest=""))
    bare.begin(model)
    assert bare._given is None, "the run does not begin with one, wherever one lies"


def test_the_files_digest_belongs_to_the_run_and_its_place_does_not(written, shallow_family, tmp_path):  # noqa: F811
    done = written("sd")
    said = {
        "model": str(shallow_family("sd")),
        "resolution": 16,
        "method": "lora",
        "lora_weights": str(done.folder),
        "train_text_encoder": True,
    }
    run = run_to_serve(said, None)
    elsewhere = tmp_path / "copy.safetensors"
    elsewhere.write_bytes((done.folder / FILE).read_bytes())
    assert run_to_serve(said | {"lora_weights": str(elsewhere)}, run).digest == run.digest and run.rank == 2
    assert run.digest != run_to_serve({name: value for name, value in said.items() if name != "lora_weights"} | {"rank": 2}, None).digest
    save_file(load_file(elsewhere), elsewhere, {"another": "header"})
    with pytest.raises(UserError, match=r"lora_weights_digest was "):
        run_to_serve(said | {"lora_weights": str(elsewhere)}, run)
    with pytest.raises(UserError, match=r"^lora_weights_digest is "):
        run_to_serve(said | {"lora_weights": str(elsewhere), "lora_weights_digest": run.lora_weights_digest}, None)
    for place, message in ((str(elsewhere), "that file is another here"), ("/nowhere", "there is none here")):
        with pytest.raises(UserError, match=rf"^The run begins with the LoRA .*, and {message}\. Ask the host"):
            Lora(dataclasses.replace(run, lora_weights=place)).begin(load_model(run, {}, CPU))


def test_a_peer_trains_on_from_the_file_however_it_holds_the_model(written, shallow_family, start):  # noqa: F811
    done = written("sd")
    said = {"method": "lora", "model": str(shallow_family("sd")), "lora_weights": str(done.folder), "train_text_encoder": True}
    run = complete(dataclasses.replace(RUN, **said))
    exact, rough = (start(name, run=run, mixed_precision=name).trainer for name in ("no", "bf16"))
    assert torch.equal(flat(exact.params), flat(rough.params)) and any(
        parameter.any() for name, parameter in exact.params.items() if "lora_B" in name
    )


def test_a_file_that_is_not_here_is_missed_before_the_model_is_loaded(start, monkeypatch):  # noqa: F811
    monkeypatch.setattr("peer.learner.load_model", lambda *_: pytest.fail("the model is loaded"))
    run = dataclasses.replace(RUN, method="lora", lora_weights="/nowhere", lora_weights_digest="0" * 64)
    with pytest.raises(UserError, match=r"^The run begins with the LoRA /nowhere, and there is none here\. Ask the host"):
        start("peer", run=run)
