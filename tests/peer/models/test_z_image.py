"""Z-Image: the loss, texts of different lengths, single files, the names of a LoRA's layers, and the real size."""

import functools
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from safetensors.torch import save_file

from peer.contracts import LatentBatch
from peer.launch.starting_model import complete, load_model
from peer.models import z_image
from peer.results.forms.single_file import vae_name
from swarm.base_model import family_of
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.models.reading import plain
from tests.peer.models.test_families import lora_layers

CPU = torch.device("cpu")
RUN = RunConfig(max_sequence_length=32)
REAL = {  # transformer/config.json of Tongyi-MAI/Z-Image and of Z-Image-Turbo
    "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30,
    "n_kv_heads": 30, "norm_eps": 1e-5, "qk_norm": True, "cap_feat_dim": 2560, "rope_theta": 256.0, "t_scale": 1000.0,
    "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512],
}  # fmt: skip


def test_the_real_transformer_has_the_published_number_of_parameters():
    with torch.device("meta"):
        transformer = ZImageTransformer2DModel(**REAL)
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count == 6_154_908_736 == pytest.approx(6e9, rel=0.05)  # "6B parameters": README.md of github.com/Tongyi-MAI/Z-Image


# -- the loss


def latents():
    return torch.randn(3, 16, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """`shifted(6.0)`: the folder of a model whose scheduler shifts so."""

    def write(shift):
        pipeline, folder = tiny.build("z_image"), tmp_path_factory.mktemp("shifted") / "model"
        pipeline.register_modules(scheduler=FlowMatchEulerDiscreteScheduler(shift=shift))
        pipeline.save_pretrained(folder)
        return folder

    return functools.cache(write)


@pytest.mark.parametrize("shift", [3.0, 6.0])  # of Turbo and of Z-Image, as their schedulers' configs have them
@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"])
@torch.no_grad()
def test_the_loss_is_that_of_diffusers_dreambooth_script(shifted, scheme, shift):
    """train_dreambooth_lora_z_image.py: the transformer is told the share of the picture, and answers with the way away from the noise."""
    pipeline, run = plain(shifted(shift)), replace(RUN, weighting_scheme=scheme, logit_mean=0.5, logit_std=0.8, mode_scale=1.1)
    model, draw = z_image.load(shifted(shift), CPU, run), torch.Generator().manual_seed(5)
    noise = torch.randn(3, 16, 8, 8, generator=draw)
    scheduler = pipeline.scheduler
    timesteps = scheduler.timesteps[(compute_density_for_timestep_sampling(scheme, 3, 0.5, 0.8, 1.1, generator=draw) * 1000).long()]
    sigmas = torch.stack([scheduler.sigmas[scheduler.timesteps == timestep][0] for timestep in timesteps]).view(-1, 1, 1, 1)
    seen = (1 - sigmas) * latents() + sigmas * noise
    captions = ["a toy", "", "photo of a cat"]
    told, _ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False, max_sequence_length=32)
    answer = -torch.stack(pipeline.transformer(list(seen.unsqueeze(2)), (1000 - timesteps) / 1000, told).sample).squeeze(2)
    expected = (compute_loss_weighting_for_sd3(scheme, sigmas) * (answer - (noise - latents())).square()).mean((1, 2, 3))
    ours = model.loss(LatentBatch(latents(), model.encode_text(captions)), torch.Generator().manual_seed(5))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(("shift", "turbo"), [(3.0, True), (6.0, False)])
def test_turbo_is_named_as_distilled(shifted, caplog, shift, turbo):
    model = z_image.load(shifted(shift), CPU, RUN)
    assert ("was distilled to draw in eight steps" in caplog.text) == turbo
    assert model.drawn_with == ({"guidance_scale": 0.0} if turbo else {})


# -- text


def test_a_text_is_as_long_as_its_caption_and_no_longer_than_the_run_reads(tiny_family):
    model = z_image.load(tiny_family("z_image"), CPU, RUN)
    text = model.encode_text(["a toy", "", "photo of a cat, style of a toy dog, and of a red dog"])
    short, empty, long = text["mask"].sum(dim=1).int().tolist()
    assert empty < short < long == 32 == text["states"].shape[1]
    assert all(not states[int(length) :].any() for states, length in zip(text["states"], (short, empty, long), strict=True))
    assert model.encode_text([""])["states"].shape[1] == empty
    less = z_image.load(tiny_family("z_image"), CPU, replace(RUN, max_sequence_length=30))
    torch.testing.assert_close(less.encode_text(["photo of a cat, style of a toy dog, and of a red dog"])["states"][0], text["states"][2, :30])


# -- one file

OWN = {"attention.out": "attention.to_out.0", "attention.q_norm": "attention.norm_q", "attention.k_norm": "attention.norm_k"}


def original(transformer):
    """The transformer's tensors under the names of the repository Tongyi-MAI/Z-Image, queries, keys and values in one."""
    ours, found = transformer.state_dict(), {}
    for name, tensor in ours.items():
        if name.endswith(".to_q.weight"):
            found[name.replace("to_q", "qkv")] = torch.cat([ours[name.replace("to_q", each)] for each in ("to_q", "to_k", "to_v")])
        elif not name.endswith((".to_k.weight", ".to_v.weight")):
            for theirs, own in (*OWN.items(), ("x_embedder", "all_x_embedder.2-1"), ("final_layer", "all_final_layer.2-1")):
                name = name.replace(own, theirs)
            found[name] = tensor
    return found


def write_file(path, pipeline, *, prefix="", vae=False, dtype=torch.float32):
    found = {prefix + name: tensor for name, tensor in original(pipeline.transformer).items()}
    if vae:
        levels = len(pipeline.vae.config.block_out_channels)
        found |= {f"vae.{vae_name(name, levels)}": tensor for name, tensor in pipeline.vae.state_dict().items()}
    save_file({name: tensor.detach().to(dtype).contiguous() for name, tensor in found.items()}, path)
    return path


@pytest.mark.parametrize(
    ("prefix", "vae", "dtype"),
    [("", False, torch.bfloat16), ("", False, torch.float8_e4m3fn), ("model.diffusion_model.", False, torch.bfloat16), ("model.diffusion_model.", True, torch.float8_e4m3fn)],
)
def test_a_file_is_the_transformer_and_all_else_is_the_config_folders(tmp_path, tiny_family, prefix, vae, dtype):
    whole, beside = tiny.build("z_image", seed=1), tiny_family("z_image")
    path = write_file(tmp_path / "z_image.safetensors", whole, prefix=prefix, vae=vae, dtype=dtype)
    run = complete(replace(RUN, model=str(path), model_config=str(beside)), digest=True)
    assert run.family == "z_image"
    model, other = load_model(run, {}, CPU), z_image.load(beside, CPU, RUN)
    for name, part in model.parts.items():
        ours, expected = part.state_dict(), other.parts[name].state_dict()
        if name == "transformer":
            expected = {key: tensor.to(dtype).float() for key, tensor in whole.transformer.state_dict().items()}
        assert ours.keys() == expected.keys() and all(torch.equal(ours[key], tensor) for key, tensor in expected.items()), name


def test_a_file_with_diffusers_own_names_is_read_too_and_one_alone_is_told_what_it_needs(tmp_path, tiny_family):
    whole, path = tiny.build("z_image", seed=1), tmp_path / "z_image.safetensors"
    save_file(whole.transformer.state_dict(), path)
    assert family_of(path) == "z_image"
    model = z_image.load(path, CPU, replace(RUN, model_config=str(tiny_family("z_image"))))
    assert all(torch.equal(tensor, model.denoiser.state_dict()[name]) for name, tensor in whole.transformer.state_dict().items())
    with pytest.raises(
        UserError, match=r"holds no vae and no text_encoder\. Add --model_config with a diffusers folder of a Z-Image model"
    ):
        z_image.load(path, CPU, RUN)


# -- a LoRA's file


def test_a_loras_layers_have_names_that_comfyui_knows(tiny_family, tmp_path):
    """`transformer.` and diffusers' names: z_image_to_diffusers in comfy/utils.py and model_lora_keys_unet in comfy/lora.py."""
    run = replace(RUN, method="lora", rank=2)
    layers = lora_layers(z_image.load(tiny_family("z_image"), CPU, run), run, tmp_path)
    blocks = ("layers.0", "layers.1", "noise_refiner.0", "context_refiner.0")
    assert layers == {f"transformer.{block}.attention.{layer}" for block in blocks for layer in ("to_q", "to_k", "to_v", "to_out.0")}
