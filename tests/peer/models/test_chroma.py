"""Chroma: the loss, the padding that is not read, single files, the names of a LoRA's layers, and the real size."""

from dataclasses import replace

import pytest
import torch
from diffusers import ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from peer.contracts import LatentBatch
from peer.launch.starting_model import complete, load_model
from peer.models import chroma
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import flux_file, tiny
from tests.peer.models.reading import plain
from tests.peer.models.test_families import lora_layers

CPU = torch.device("cpu")
RUN = RunConfig(max_sequence_length=32)
CAPTIONS = ["a toy", "", "photo of a cat"]
HD = {  # transformer/config.json of lodestones/Chroma1-HD
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "axes_dims_rope": (16, 56, 56), "approximator_num_channels": 64, "approximator_hidden_dim": 5120,
    "approximator_layers": 5,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed")
def test_the_real_transformer_has_the_published_number_of_parameters():
    with torch.device("meta"):
        transformer = ChromaTransformer2DModel(**HD)
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count == 8_899_983_424 == pytest.approx(8.9e9, rel=0.001)  # "8.9 billion": the model card of lodestones/Chroma1-HD


def latents():
    return torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"])
@torch.no_grad()
def test_the_loss_is_the_pipelines_flow_with_a_mask_of_bools(tiny_family, scheme):
    run = replace(RUN, weighting_scheme=scheme, logit_mean=0.5, logit_std=0.8, mode_scale=1.1)
    pipeline, draw = plain(tiny_family("chroma")), torch.Generator().manual_seed(5)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    states, places, read, *_ = pipeline.encode_prompt(CAPTIONS, do_classifier_free_guidance=False, max_sequence_length=32)
    noise = torch.randn(latents().shape, generator=draw)
    index = (compute_density_for_timestep_sampling(scheme, 3, 0.5, 0.8, 1.1, generator=draw) * 1000).long()
    timesteps, sigmas = scheduler.timesteps[index], scheduler.sigmas[index].view(-1, 1, 1, 1)
    answer = pipeline.transformer(
        pipeline._pack_latents((1 - sigmas) * latents() + sigmas * noise, 3, 4, 8, 8),
        states,
        timesteps / 1000,
        pipeline._prepare_latent_image_ids(3, 4, 4, CPU, torch.float32),
        places,
        attention_mask=pipeline._prepare_attention_mask(3, 16, torch.float32, read.bool()),
    ).sample
    off = pipeline._unpack_latents(answer, 16, 16, 2) - (noise - latents())
    expected = (compute_loss_weighting_for_sd3(scheme, sigmas) * off.square()).mean((1, 2, 3))
    model = chroma.load(tiny_family("chroma"), CPU, run)
    torch.testing.assert_close(model.loss(LatentBatch(latents(), model.encode_text(CAPTIONS)), torch.Generator().manual_seed(5)), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_of_the_padding_one_token_is_read_also_where_blocks_are_computed_anew(tiny_family, checkpointing):
    model = chroma.load(tiny_family("chroma"), CPU, RUN)
    if checkpointing:
        model.enable_gradient_checkpointing()
    text = {name: states.detach() for name, states in model.encode_text(CAPTIONS).items()}
    lengths = model.pipeline.tokenizer(CAPTIONS, padding=True, return_tensors="pt").attention_mask.sum(1)
    assert torch.equal(text["mask"].sum(1), lengths + 1.0)
    found = []
    for place in (None, lengths + 1, lengths):
        states = text["states"].clone()
        for row, first in enumerate(place if place is not None else ()):
            states[row, first:] += 1.0
        batch = LatentBatch(latents(), {"states": states, "mask": text["mask"]})
        found.append(model.loss(batch, torch.Generator().manual_seed(5)))
        found[-1].sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.denoiser.parameters())
    assert torch.equal(found[0], found[1]) and not torch.isclose(found[0], found[2], rtol=1e-6).any()


# -- one file


@pytest.fixture
def write(monkeypatch, tmp_path):
    """`write(tensors, dtype)`: a file that is read as the real ones are, but for the width."""
    monkeypatch.setitem(
        SINGLE_FILE_LOADABLE_CLASSES["ChromaTransformer2DModel"], "checkpoint_mapping_fn", flux_file.converter(32, "chroma")
    )
    return lambda *given: flux_file.write(tmp_path / "chroma.safetensors", *given)


@pytest.mark.parametrize(
    ("form", "dtype"), [("original", torch.bfloat16), ("original", torch.float8_e4m3fn), ("comfyui", torch.bfloat16), ("diffusers", torch.bfloat16)]
)
def test_a_file_is_the_transformer_and_the_rest_is_the_config_folders(tmp_path, tiny_family, write, form, dtype):
    whole, beside = tiny.build("chroma", seed=1), tiny_family("chroma")
    tensors = whole.transformer.state_dict() if form == "diffusers" else flux_file.transformer_tensors(whole.transformer)
    path = write({("model.diffusion_model." if form == "comfyui" else "") + name: tensor for name, tensor in tensors.items()}, dtype)
    run = complete(replace(RUN, model=str(path), model_config=str(beside)))
    assert run.family == "chroma"
    model, other = load_model(run, {}, CPU), chroma.load(beside, CPU, RUN)
    for part, module in model.parts.items():
        expected = other.parts[part].state_dict()
        if part == "transformer":
            expected = {key: tensor.to(dtype).float() for key, tensor in whole.transformer.state_dict().items()}
        ours = module.state_dict()
        assert ours.keys() == expected.keys() and all(torch.equal(ours[key], tensor) for key, tensor in expected.items()), part
    assert model.loss(LatentBatch(latents(), model.encode_text(CAPTIONS)), torch.Generator()).isfinite().all()
    with pytest.raises(UserError, match=r"holds no vae and no text_encoder\. Add --model_config with a diffusers folder of a Chroma model"):
        chroma.load(path, CPU, RUN)


# -- a LoRA's file


def test_a_loras_layers_have_names_that_comfyui_knows(tiny_family, tmp_path):
    """`transformer.` and the names that flux_to_diffusers has (comfy/utils.py at 09708ea; comfy/lora.py at 17358c8), which is asked for Chroma, too."""
    run = replace(RUN, method="lora", rank=2)
    layers = lora_layers(chroma.load(tiny_family("chroma"), CPU, run), run, tmp_path)
    attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    double = {f"attn.{layer}" for layer in attention} | {f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")}
    assert layers == {f"transformer.transformer_blocks.0.{layer}" for layer in double} | {
        f"transformer.single_transformer_blocks.0.attn.{layer}" for layer in ("to_q", "to_k", "to_v")
    }
