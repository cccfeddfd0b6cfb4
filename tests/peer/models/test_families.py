"""What every family promises, and the options that some have: a new module of peer/models needs one in tests/tiny/families, and is tested."""

import dataclasses
import functools
import warnings
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from peer.contracts import LatentBatch, PixelBatch
from peer.methods import full, lora
from peer.rooms import load_part
from peer.samples.encoding import Encoder
from swarm.base_model import family_of
from swarm.digest import read_header
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.models.reading import plain
from tests.sources import parts

CPU = torch.device("cpu")
CAPTIONS = ("a toy", "", "photo of a cat, style")
RUN = RunConfig()


def own(family, **options):
    """A run's configuration that the family takes."""
    return RunConfig(**tiny.MODELS[family].run, **options)


@pytest.fixture
def load(tiny_family):
    def load(family, folder=None, **options):
        model = load_part("models", tiny.FAMILIES[family]).load(folder or tiny_family(family), CPU, own(family, **options))
        full.build(RUN).attach(model)
        return model

    return load


@functools.cache
def pixels(size=3):
    return torch.rand(size, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1


@torch.no_grad()
def latents(model, size=3):
    text = model.encode_text(CAPTIONS[:size])
    return LatentBatch(model.encode_pixels(pixels()[:size]).chunk(2, dim=1)[0], text, None)


def draw(pipeline, prompt=None, **options):
    pipeline.set_progress_bar_config(disable=True)
    sizes = {"height": 16, "width": 16, "num_inference_steps": 3, "output_type": "np"}
    options |= {**tiny.drawing(pipeline), **({"prompt": ["a toy", "a cat"]} if prompt is None else prompt)}
    return torch.from_numpy(pipeline(generator=torch.Generator().manual_seed(3), **sizes, **options).images)


@functools.cache
def drawn(folder):
    """By plain diffusers, of a folder that stays as it is."""
    return draw(plain(folder))


def lora_layers(model, run, folder):
    """The names of the layers in the file of a LoRA of `run`, as others' key maps have them."""
    method = lora.build(run)
    method.export(model, method.attach(model), folder)
    return {name.removesuffix(".weight").rpartition(".lora_")[0] for name in load_file(folder / "pytorch_lora_weights.safetensors")}


every_family = pytest.mark.parametrize("family", tiny.FAMILIES)


def test_every_module_of_the_room_is_tested_here():
    assert parts("models") == sorted(set(tiny.FAMILIES.values()))


@every_family
def test_a_family_is_read_from_its_folder(tiny_family, family):
    assert family_of(tiny_family(family)) == tiny.FAMILIES[family]


@every_family
def test_a_model_is_moved_with_all_that_its_pipeline_computes_with(family):
    model = tiny.kind(family)(tiny.build(family), torch.device("meta"), own(family))
    modules = [part for part in model.pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert model.device.type == "meta" and len(modules) > 2
    assert {tensor.device.type for module in modules for tensor in (*module.parameters(), *module.buffers())} == {"meta"}


@every_family
def test_pixels_are_encoded_into_what_the_pipeline_decodes_and_without_a_gradient(load, family):
    model = load(family)
    mean, std = model.encode_pixels(pixels().clone().requires_grad_(True)).chunk(2, dim=1)
    assert mean.shape == std.shape and mean.dtype == torch.float32 and not mean.requires_grad
    with torch.no_grad():
        posterior = model.vae.encode(tiny.MODELS[family].framed(pixels())).latent_dist
        decoded = partial(tiny.MODELS[family].decoded, model.pipeline)
        torch.testing.assert_close(decoded(mean), posterior.mean)
        torch.testing.assert_close(decoded(std) - decoded(torch.zeros_like(std)), posterior.std)
    channels = model.vae.config.get("latent_channels") or model.vae.config["z_dim"]
    assert posterior.mean.flatten(2).shape == (3, channels, 8 * 8) and mean.dim() == 4


@every_family
def test_text_is_what_the_pipeline_makes_of_the_captions(load, tiny_family, family):
    pipeline, text = plain(tiny_family(family)), load(family).encode_text(CAPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(text, tiny.MODELS[family].encode(pipeline, CAPTIONS))


@every_family
def test_texts_that_were_read_one_by_one_make_the_same_batch(load, family):
    """Captions that are known wait each by itself, also where a long one has more tokens than a short one."""
    model = load(family)
    batch = PixelBatch(pixels(), CAPTIONS, torch.tensor([[16, 16, 0, 0, 16, 16]] * 3))
    apart, rng = Encoder(model), lambda: torch.Generator().manual_seed(0)
    first, again = apart(batch, rng()).text, apart(dataclasses.replace(batch, captions=CAPTIONS[::-1]), rng()).text
    torch.testing.assert_close(first, dict(model.encode_text(CAPTIONS)))
    assert all(torch.equal(first[name], states.flip(0)) for name, states in again.items())


@every_family
def test_text_has_a_gradient_when_an_encoder_is_trained_and_only_then(load, family):
    model = load(family)
    assert not any(states.requires_grad for states in model.encode_text(CAPTIONS).values())
    weights = [model.parts[name].get_input_embeddings().weight.requires_grad_(True) for name in model.facts.text_encoders]
    sum(states.square().sum() for states in model.encode_text(CAPTIONS).values()).backward()
    assert all(weight.grad.abs().sum() > 0 for weight in weights)


@every_family
def test_a_loss_is_each_samples_own_and_does_not_depend_on_the_others(load, family):
    model = load(family)
    batch, rng = latents(model), lambda: torch.Generator().manual_seed(4)
    losses = model.loss(batch, rng())
    assert losses.shape == (3,) and losses.dtype == torch.float32 and losses.requires_grad
    others = torch.randn(2, *batch.latents.shape[1:], generator=torch.Generator().manual_seed(5))
    changed = dataclasses.replace(
        batch, latents=torch.cat([batch.latents[:1], others]), text={k: v[[0, 2, 1]] for k, v in batch.text.items()}
    )
    again = model.loss(changed, rng())
    torch.testing.assert_close(again[0], losses[0])
    assert not torch.isclose(again[1:], losses[1:]).any()
    assert torch.equal(model.loss(batch, rng()), losses) and not torch.equal(model.loss(batch, rng().manual_seed(6)), losses)


@every_family
def test_the_loss_depends_on_the_caption(load, family):
    model = load(family)
    batch, rng = latents(model), lambda: torch.Generator().manual_seed(4)
    told = dataclasses.replace(batch, text={name: states.flip(0) for name, states in batch.text.items()})
    assert not torch.allclose(model.loss(batch, rng())[0], model.loss(told, rng())[0], rtol=1e-6)


@every_family
def test_every_parameter_of_the_denoiser_has_a_gradient_and_checkpointing_changes_none(load, family):
    found = []
    for checkpointing in (False, True):
        model = load(family)
        if checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what a library says of itself is nothing for who trains
                model.enable_gradient_checkpointing()
            encoders = [part.requires_grad_(False).train() for name, part in model.parts.items() if name.startswith("text_encoder")]
            assert not any(states.requires_grad for states in model.encode_text(["a cat"]).values()), "frozen: nothing goes backwards there"
            for encoder in encoders:
                encoder.eval()  # T5 has dropout
        model.loss(latents(model), torch.Generator().manual_seed(0)).mean().backward()
        unread = {id(parameter) for module in model.unread() for parameter in module.parameters()}
        read = [parameter for parameter in model.denoiser.parameters() if id(parameter) not in unread]
        found.append(torch.cat([parameter.grad.flatten() for parameter in read]))
        assert not any(p.grad is not None and p.grad.any() for p in model.denoiser.parameters() if id(p) in unread)
    torch.testing.assert_close(*found)


@every_family
def test_sides_that_the_resolution_multiple_divides_can_be_trained_and_squares_are_not_needed(load, family):
    model = load(family)
    side = model.resolution_multiple
    oblong = torch.zeros(1, 3, side * 2, side * 3)
    batch = LatentBatch(model.encode_pixels(oblong).chunk(2, dim=1)[0], model.encode_text(["a"]))
    assert model.loss(batch, torch.Generator().manual_seed(0)).isfinite().all()


@every_family
def test_what_is_saved_draws_the_same_pictures_in_plain_diffusers(load, family, tiny_family, tmp_path):
    model = load(family)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            parameter.mul_(1.05)
    model.denoiser.eval()
    model.save(tmp_path / "out")
    saved = plain(tmp_path / "out")
    pictures = draw(saved)
    assert torch.equal(pictures, draw(model.pipeline)) and not torch.equal(pictures, drawn(tiny_family(family)))
    assert dict(saved.scheduler.config) == dict(plain(tiny_family(family)).scheduler.config)
    # transformers 5 drops the prefix of CLIP's keys; release 4 and other tools find no weights without it
    clips = [name for name in model.facts.text_encoders if type(model.parts[name]).__name__.startswith("CLIP")]
    files = [read_header(tmp_path / "out" / name / "model.safetensors") for name in clips]
    assert all(name.startswith(("text_model.", "text_projection.")) for names in files for name in names)


@every_family
def test_under_autocast_a_family_trains_almost_as_in_float32(load, family):
    model, losses = load(family), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            batch = LatentBatch(model.encode_pixels(pixels()).chunk(2, dim=1)[0], model.encode_text(CAPTIONS))
            losses.append(model.loss(batch, torch.Generator().manual_seed(4)))
        assert {tensor.dtype for tensor in (batch.latents, *batch.text.values(), losses[-1])} == {torch.float32}
    torch.testing.assert_close(*losses, rtol=0.1, atol=0.0)
    assert not torch.equal(*losses)


@every_family
def test_the_pipeline_draws_from_prompts_that_are_read_as_captions_what_it_draws_from_the_prompts(load, tiny_family, family):
    model = load(family)
    model.denoiser.eval()
    with torch.no_grad():
        prompts = model.prompt_arguments(["a toy", "a cat"])
    torch.testing.assert_close(draw(model.pipeline, prompts), drawn(tiny_family(family)))
    if family in ("sd", "sd2v"):
        with torch.no_grad():
            prompts = load(family, clip_skip=1, max_token_chunks=2).prompt_arguments(["a toy", "a cat"])
        assert not torch.allclose(draw(model.pipeline, prompts), drawn(tiny_family(family)))


@every_family
def test_half_precision_weights_become_float32_whether_as_such_or_as_a_variant(load, family, tmp_path, tiny_family):
    half = plain(tiny_family(family)).to(dtype=torch.float16)
    half.save_pretrained(tmp_path / "plain")
    half.save_pretrained(tmp_path / "variant", variant="fp16")
    kept = [load(family, tmp_path / name) for name in ("plain", "variant")]
    for model in kept:
        assert all(parameter.dtype == torch.float32 for part in model.parts.values() for parameter in part.parameters())
    one, two = (torch.cat([parameter.flatten() for parameter in model.denoiser.parameters()]) for model in kept)
    assert torch.equal(one, two)


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_a_vae_stays_in_float32_unless_it_is_of_a_class_that_does_not_know_the_word(tiny_family, family):
    """As docs/hardware.md says. Configs of SD 1.x and 2.x on the Hub say nothing of it, and AutoencoderKL's default counts."""
    model = load_part("models", tiny.FAMILIES[family]).load(tiny_family(family), None, own(family))
    model.place(CPU, torch.bfloat16)
    stays = all(weight.dtype is torch.float32 for weight in model.vae.parameters())
    assert stays == (tiny.FAMILIES[family] not in ("flux2", "flux2_klein", "qwen_image"))
