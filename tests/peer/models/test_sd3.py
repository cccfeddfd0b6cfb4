"""Stable Diffusion 3 and 3.5: the loss, the text with and without T5, single files, the names of a LoRA's layers, and the real sizes."""

import re
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from safetensors.torch import save_file

from peer.contracts import LatentBatch
from peer.launch.starting_model import complete, load_model
from peer.models import sd3
from peer.results.forms.single_file import vae_name
from swarm.digest import digest_model
from swarm.errors import UserError
from swarm.run.families.sd3 import FAMILY
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.models.test_families import lora_layers

CPU = torch.device("cpu")
RUN = RunConfig(max_sequence_length=32)
MEDIUM = {  # transformer/config.json of stabilityai/stable-diffusion-3.5-medium
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 24, "attention_head_dim": 64,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536, "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm",
}  # fmt: skip
LARGE = MEDIUM | {  # of stable-diffusion-3.5-large
    "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192, "dual_attention_layers": (),
}  # fmt: skip
SD3_MEDIUM = MEDIUM | {"pos_embed_max_size": 192, "dual_attention_layers": (), "qk_norm": None}  # of stable-diffusion-3-medium-diffusers


@pytest.mark.parametrize(
    ("config", "trained", "published"),
    [
        (MEDIUM, 2_243_171_520, 2.5e9),  # "2.5 billion": stability.ai/news/introducing-stable-diffusion-3-5
        (LARGE, 8_056_627_520, 8.1e9),  # "8.1 billion", the same page
        (SD3_MEDIUM, 2_028_328_000, 2.0e9),  # "2 billion": stability.ai/news/stable-diffusion-3-medium
    ],
)
def test_the_real_transformers_have_the_published_number_of_parameters(config, trained, published):
    """The table of places, which is not trained, is in the files and counts among the published ones."""
    with torch.device("meta"):
        transformer = SD3Transformer2DModel(**config)
    assert sum(parameter.numel() for parameter in transformer.parameters()) == trained
    assert sum(tensor.numel() for tensor in transformer.state_dict().values()) == pytest.approx(published, rel=0.05)


# -- the loss


def latents():
    return torch.randn(3, 16, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("precondition", [True, False])
@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"])
@torch.no_grad()
def test_the_loss_is_that_of_diffusers_dreambooth_script(tiny_family, scheme, precondition):
    """train_dreambooth_lora_sd3.py: with --precondition_outputs the transformer's answer is made a picture, and compared with the picture."""
    run = replace(RUN, weighting_scheme=scheme, logit_mean=0.5, logit_std=0.8, mode_scale=1.1, precondition_outputs=precondition)
    model, draw = sd3.load(tiny_family("sd3"), CPU, run), torch.Generator().manual_seed(5)
    text, scheduler = model.encode_text(["a toy", "", "a cat"]), FlowMatchEulerDiscreteScheduler(shift=3.0)
    noise = torch.randn(3, 16, 8, 8, generator=draw)
    timesteps = scheduler.timesteps[(compute_density_for_timestep_sampling(scheme, 3, 0.5, 0.8, 1.1, generator=draw) * 1000).long()]
    sigmas = torch.stack([scheduler.sigmas[scheduler.timesteps == timestep][0] for timestep in timesteps]).view(-1, 1, 1, 1)
    seen = (1 - sigmas) * latents() + sigmas * noise
    answer = model.denoiser(seen, text["states"], text["pooled"], timesteps).sample
    off = seen - sigmas * answer - latents() if precondition else answer - (noise - latents())
    expected = (compute_loss_weighting_for_sd3(scheme, sigmas) * off.square()).mean((1, 2, 3))
    torch.testing.assert_close(model.loss(LatentBatch(latents(), text), torch.Generator().manual_seed(5)), expected)


def test_timesteps_are_drawn_and_captions_read_as_for_sd3_where_nobody_says_otherwise(tiny_family):
    run = complete(RunConfig(model=str(tiny_family("sd3")), resolution=16), digest=True)
    assert (run.family, run.weighting_scheme, run.max_sequence_length, run.precondition_outputs) == ("sd3", "logit_normal", 256, True)
    said = complete(replace(RUN, model=str(tiny_family("sd3")), resolution=16), given=["weighting_scheme"])
    assert (said.weighting_scheme, said.max_sequence_length) == ("none", 32)


# -- text


@pytest.fixture
def without_t5(tmp_path):
    pipeline = tiny.build("sd3")
    pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
    pipeline.save_pretrained(tmp_path / "without")
    return tmp_path / "without"


def test_without_a_t5_its_states_are_zeros_as_in_the_pipeline(without_t5, tiny_family, tmp_path):
    model = sd3.load(without_t5, CPU, RUN)
    with torch.no_grad():
        text = model.encode_text(["a toy", ""])
        plain = StableDiffusion3Pipeline.from_pretrained(without_t5, text_encoder_3=None, tokenizer_3=None)
        torch.testing.assert_close(text, tiny.MODELS["sd3"].encode(plain, ["a toy", ""]))
    assert text["states"].shape == (2, 77 + 32, 48) and not text["states"][:, 77:].any()
    assert "text_encoder_3" not in model.parts and digest_model(without_t5) != digest_model(tiny_family("sd3"))
    model.save(tmp_path / "saved")
    assert sd3.load(tmp_path / "saved", CPU, RUN).pipeline.text_encoder_3 is None


# -- one file

ENDS = {
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
LAYERS = {
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.to_out.0": "x_block.attn2.proj",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    **{f"{ff}.net.{ours}": f"{block}.mlp.{theirs}" for ff, block in (("ff", "x_block"), ("ff_context", "context_block")) for ours, theirs in (("0.proj", "fc1"), ("2", "fc2"))},
}  # fmt: skip
JOINED = {  # three of diffusers' layers are one there
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
}


def original(transformer):
    """The transformer's tensors under the original names."""
    ours, last = transformer.state_dict(), transformer.config.num_layers - 1
    found = {"pos_embed": ours.pop("pos_embed.pos_embed")}
    for name, tensor in ours.items():
        layer, end = name.rsplit(".", 1)
        if match := re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", layer):
            block = f"joint_blocks.{match[1]}"
            if match[2] in LAYERS:
                halved = match[2] == "norm1_context.linear" and int(match[1]) == last
                found[f"{block}.{LAYERS[match[2]]}.{end}"] = torch.cat(tensor.chunk(2)[::-1]) if halved else tensor
            for joined, layers in JOINED.items():
                if match[2] == layers[0]:
                    found[f"{block}.{joined}.{end}"] = torch.cat([ours[f"transformer_blocks.{match[1]}.{each}.{end}"] for each in layers])
        else:
            found[f"{ENDS[layer]}.{end}"] = torch.cat(tensor.chunk(2)[::-1]) if layer == "norm_out.linear" else tensor
    return {f"model.diffusion_model.{name}": tensor for name, tensor in found.items()}


def write_file(path, pipeline, *parts, dtype=torch.float32):
    """A pipeline's transformer and these parts in one file, as Stability's are: sd3.5_medium (with "vae"), sd3_medium_incl_clips_t5xxl (with all)."""
    found, levels = original(pipeline.transformer), len(pipeline.vae.config.block_out_channels)
    for part in parts:
        tensors = getattr(pipeline, part).state_dict()
        if part == "vae":
            found |= {f"first_stage_model.{vae_name(name, levels)}": tensor for name, tensor in tensors.items()}
        else:
            (start,) = FAMILY.text_encoders[part].in_file
            found |= {f"{start}transformer.{name}": tensor for name, tensor in tensors.items() if name != "encoder.embed_tokens.weight"}
    save_file({name: tensor.detach().to(dtype).contiguous() for name, tensor in found.items()}, path)
    return path


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [(("vae",), torch.float16), (("vae", "text_encoder", "text_encoder_2"), torch.float16), *((("vae", *FAMILY.text_encoders), dtype) for dtype in (torch.float16, torch.float8_e4m3fn))],
)
def test_a_file_is_all_that_it_holds_and_the_rest_is_the_config_folders(tmp_path, tiny_family, parts, dtype):
    whole, beside = tiny.build("sd3", seed=1), tiny_family("sd3")
    path = write_file(tmp_path / "sd3.safetensors", whole, *parts, dtype=dtype)
    run = complete(replace(RUN, model=str(path), model_config=str(beside)), digest=True)
    assert run.family == "sd3" and run.model_digest == digest_model(path)
    model, other = load_model(run, {}, CPU), sd3.load(beside, CPU, RUN)
    for name, part in model.parts.items():
        if name == "transformer" or name in parts:
            expected = {key: tensor.to(dtype).float() for key, tensor in getattr(whole, name).state_dict().items()}
        else:
            expected = other.parts[name].state_dict()
        if name == "text_encoder" and name in parts:
            expected["text_projection.weight"] = torch.eye(16)  # diffusers': the original reads CLIP-L's embedding without it
        ours = part.state_dict()
        assert ours.keys() == expected.keys() and all(torch.equal(ours[key], tensor) for key, tensor in expected.items()), name
    assert model.loss(LatentBatch(latents(), model.encode_text(["a", "b", "c"])), torch.Generator()).isfinite().all()


def test_a_file_without_a_t5_and_a_config_folder_without_one_are_a_model_without_one(tmp_path, without_t5):
    path = write_file(tmp_path / "sd3.safetensors", tiny.build("sd3", seed=1), "vae", "text_encoder", "text_encoder_2")
    model = sd3.load(path, CPU, replace(RUN, model_config=str(without_t5)))
    assert list(model.parts) == ["transformer", "vae", "text_encoder", "text_encoder_2"]
    assert not model.encode_text(["a cat"])["states"][:, 77:].any()
    with pytest.raises(UserError, match=r"holds no text_encoder_3\. Add --model_config with a diffusers folder of a Stable Diffusion 3 model"):
        sd3.load(path, CPU, RUN)


def test_sd_3_medium_which_has_no_dual_attention_and_no_norms_is_trained_too(tmp_path):
    pipeline = tiny.build("sd3")
    pipeline.register_modules(transformer=SD3Transformer2DModel(**{**pipeline.transformer.config, "dual_attention_layers": (), "qk_norm": None}))
    pipeline.save_pretrained(tmp_path / "sd3")
    path = write_file(tmp_path / "sd3.safetensors", pipeline, "vae")
    losses = [
        model.loss(LatentBatch(latents(), model.encode_text(["a", "b", "c"])), torch.Generator().manual_seed(1))
        for model in (sd3.load(tmp_path / "sd3", CPU, RUN), sd3.load(path, CPU, replace(RUN, model_config=str(tmp_path / "sd3"))))
    ]
    assert torch.equal(*losses)


# -- a LoRA's file


def test_a_loras_layers_have_names_that_comfyui_knows(tiny_family, tmp_path):
    """`transformer.` and diffusers' names, `text_encoder.` for CLIP-L and `text_encoder_2.` for CLIP-G: mmdit_to_diffusers in comfy/utils.py and
    model_lora_keys_unet, model_lora_keys_clip in comfy/lora.py. Layers of the last block that answer for the text are in no file."""
    run = replace(RUN, method="lora", rank=2, train_text_encoder=True)
    layers = lora_layers(sd3.load(tiny_family("sd3"), CPU, run), run, tmp_path)
    of_pictures, of_text = ("to_q", "to_k", "to_v", "to_out.0"), ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    known = {f"transformer.transformer_blocks.{block}.attn.{layer}" for block in (0, 1) for layer in (*of_pictures, *of_text)}
    known -= {"transformer.transformer_blocks.1.attn.to_add_out"}
    clip = [f"text_model.encoder.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in ("q", "k", "v", "out")]
    assert layers == known | {f"{encoder}.{layer}" for encoder in ("text_encoder", "text_encoder_2") for layer in clip}
