"""Qwen-Image: the loss, texts without their question, guided drawing, single files, the names of a LoRA's layers, and the real size."""

from dataclasses import replace

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from safetensors.torch import save_file

from peer import generate
from peer.contracts import LatentBatch
from peer.launch.starting_model import complete, load_model
from peer.models import qwen_image
from swarm.errors import UserError
from swarm.founding import resolution_multiple
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.models.reading import plain
from tests.peer.models.test_families import draw, lora_layers

CPU = torch.device("cpu")
RUN = RunConfig(max_sequence_length=32)
CAPTIONS = ["a toy", "", "photo of a cat"]
REAL = {  # transformer/config.json of Qwen/Qwen-Image and of Qwen-Image-2512
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 3584, "guidance_embeds": False, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip


def test_the_real_transformer_has_the_published_number_of_parameters():
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(**REAL)
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count == 20_430_401_088 == pytest.approx(20e9, rel=0.05)  # "20B MMDiT": README.md of github.com/QwenLM/Qwen-Image


# -- the loss


def latents():
    return torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"])
@torch.no_grad()
def test_the_loss_is_that_of_diffusers_dreambooth_script(tiny_family, scheme):
    """train_dreambooth_lora_qwen_image.py: the model's scheduler shifts by the size of pictures when it draws, and so not at all in training."""
    run = replace(RUN, weighting_scheme=scheme, logit_mean=0.5, logit_std=0.8, mode_scale=1.1)
    model, draw = qwen_image.load(tiny_family("qwen_image"), CPU, run), torch.Generator().manual_seed(5)
    pipeline = plain(tiny_family("qwen_image"))
    noise = torch.randn(3, 4, 8, 8, generator=draw)
    sigmas = 1 - (compute_density_for_timestep_sampling(scheme, 3, 0.5, 0.8, 1.1, generator=draw) * 1000).long() / 1000
    at = sigmas.view(-1, 1, 1, 1)
    seen = (1 - at) * latents() + at * noise
    states, mask = pipeline.encode_prompt(CAPTIONS, max_sequence_length=32)
    packed = pipeline.transformer(
        hidden_states=pipeline._pack_latents(seen, 3, 4, 8, 8),
        timestep=sigmas,
        encoder_hidden_states=states,
        encoder_hidden_states_mask=mask,
        img_shapes=[(1, 4, 4)] * 3,
    ).sample
    answer = pipeline._unpack_latents(packed, 16, 16, 2).squeeze(2)
    expected = (compute_loss_weighting_for_sd3(scheme, at) * (answer - (noise - latents())).square()).mean((1, 2, 3))
    ours = model.loss(LatentBatch(latents(), model.encode_text(CAPTIONS)), torch.Generator().manual_seed(5))
    torch.testing.assert_close(ours, expected)


# -- text, and drawing with it


def test_a_text_is_as_long_as_its_caption_and_no_longer_than_the_run_reads(tiny_family):
    model, words = qwen_image.load(tiny_family("qwen_image"), CPU, RUN), "photo of a cat, style of a toy dog, and a photo of a red dog"
    text = model.encode_text(["a toy", "", words])
    short, empty, long = text["mask"].sum(dim=1).int().tolist()
    assert empty < short < long == 32 == text["states"].shape[1]
    less = qwen_image.load(tiny_family("qwen_image"), CPU, replace(RUN, max_sequence_length=20)).encode_text([words])
    torch.testing.assert_close(less["states"][0], text["states"][2, :20])


def test_prompts_that_are_read_as_captions_are_guided_as_with_an_empty_negative_prompt(tiny_family):
    model = qwen_image.load(tiny_family("qwen_image"), CPU, RUN)
    model.denoiser.eval()
    with torch.no_grad():
        told = generate.told(model, ["a toy", "a cat"], "")
    guided = draw(model.pipeline, {**told, "true_cfg_scale": 30.0})
    prompts = {"prompt": ["a toy", "a cat"], "negative_prompt": ["", ""]}
    torch.testing.assert_close(guided, draw(model.pipeline, {**prompts, "true_cfg_scale": 30.0}))
    assert not torch.allclose(guided, draw(model.pipeline, {**prompts, "true_cfg_scale": 1.0}), atol=5e-4)
    assert model.facts.guided_by == "true_cfg_scale"


def test_a_text_that_is_longer_than_the_pipeline_usually_reads_is_drawn_whole(tiny_family):
    run = RunConfig(max_sequence_length=600)
    model = qwen_image.load(tiny_family("qwen_image"), CPU, run)
    captions = [" ".join(["toy"] * 590 + ["cat"]), " ".join(["toy"] * 590 + ["dog"])]
    assert model.encode_text(captions)["states"].shape[1] > 512
    with torch.no_grad():
        pictures = draw(model.pipeline, {**model.prompt_arguments(captions), **model.drawn_with})
        short = draw(model.pipeline, model.prompt_arguments(captions))
    assert not torch.equal(pictures, short)


# -- folders and files


def test_the_host_knows_what_sides_of_pictures_the_model_takes(tiny_family):
    assert resolution_multiple("qwen_image", tiny_family("qwen_image")) == 4
    assert qwen_image.load(tiny_family("qwen_image"), CPU, RUN).resolution_multiple == 4
    with pytest.raises(UserError, match="resolution is 18, but this model needs a multiple of 4"):
        complete(replace(RUN, model=str(tiny_family("qwen_image")), resolution=18))


@pytest.mark.parametrize(("prefix", "dtype"), [("", torch.bfloat16), ("", torch.float8_e4m3fn), ("model.diffusion_model.", torch.bfloat16)])
def test_a_file_is_the_transformer_and_all_else_is_the_config_folders(tmp_path, tiny_family, prefix, dtype):
    whole, beside, path = tiny.build("qwen_image", seed=1), tiny_family("qwen_image"), tmp_path / "qwen_image.safetensors"
    save_file({prefix + name: tensor.to(dtype) for name, tensor in whole.transformer.state_dict().items()}, path)
    run = complete(replace(RUN, model=str(path), model_config=str(beside)), digest=True)
    assert run.family == "qwen_image"
    model, other = load_model(run, {}, CPU), qwen_image.load(beside, CPU, RUN)
    for name, part in model.parts.items():
        ours, expected = part.state_dict(), other.parts[name].state_dict()
        if name == "transformer":
            expected = {key: tensor.to(dtype).float() for key, tensor in whole.transformer.state_dict().items()}
        assert ours.keys() == expected.keys() and all(torch.equal(ours[key], tensor) for key, tensor in expected.items()), name
    with pytest.raises(
        UserError, match=r"holds no vae and no text_encoder\. Add --model_config with a diffusers folder of a Qwen-Image model"
    ):
        qwen_image.load(path, CPU, RUN)


# -- a LoRA's file


def test_a_loras_layers_have_names_that_comfyui_and_kohya_know(tiny_family, tmp_path):
    """`transformer.` and diffusers' names: model_lora_keys_unet in comfy/lora.py, and convert_from_diffusers of kohya's musubi-tuner."""
    run = replace(RUN, method="lora", rank=2)
    layers = lora_layers(qwen_image.load(tiny_family("qwen_image"), CPU, run), run, tmp_path)
    assert layers == {
        f"transformer.transformer_blocks.{block}.attn.{layer}" for block in (0, 1) for layer in ("to_q", "to_k", "to_v", "to_out.0")
    }
