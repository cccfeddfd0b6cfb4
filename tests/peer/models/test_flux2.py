"""FLUX.2 dev and klein: the loss, single files, a processor's folder, distilled checkpoints, the names of a LoRA's layers, and the real sizes."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from safetensors.torch import save_file

from peer.contracts import LatentBatch
from peer.launch.starting_model import complete, load_model
from peer.models import flux2, flux2_klein
from swarm.digest import digest_model
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import flux2_file, tiny
from tests.peer.models.reading import plain
from tests.peer.models.test_families import lora_layers

CPU = torch.device("cpu")
BOTH = {"flux2": (flux2, Flux2Pipeline), "klein": (flux2_klein, Flux2KleinPipeline)}
every_model = pytest.mark.parametrize("name", BOTH)
DEV = {  # "flux2-dev" of diffusers' scripts/convert_flux2_to_diffusers.py at 58eb52c
    "patch_size": 1, "in_channels": 128, "num_layers": 8, "num_single_layers": 48, "attention_head_dim": 128, "num_attention_heads": 48,
    "joint_attention_dim": 15360, "timestep_guidance_channels": 256, "mlp_ratio": 3.0, "axes_dims_rope": (32, 32, 32, 32), "rope_theta": 2000,
}  # fmt: skip
KLEIN_4B = DEV | {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
KLEIN_9B = DEV | {"num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288, "guidance_embeds": False}


@pytest.mark.parametrize(
    ("config", "parameters", "published"),
    [
        (DEV, 32_223_281_152, 32e9),  # "32 billion": the model card of black-forest-labs/FLUX.2-dev
        (KLEIN_4B, 3_875_544_576, 4e9),  # "4 billion": that of FLUX.2-klein-4B
        (KLEIN_9B, 9_078_581_248, 9e9),  # "9 billion": that of FLUX.2-klein-9B
    ],
)
def test_the_real_transformers_have_the_published_number_of_parameters(config, parameters, published):
    with torch.device("meta"):
        transformer = Flux2Transformer2DModel(**config)
    assert sum(parameter.numel() for parameter in transformer.parameters()) == parameters == pytest.approx(published, rel=0.05)
    layers = {layer for layer, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)}
    trained = flux2.FAMILY.lora if config is DEV else flux2_klein.FAMILY.lora
    blocks = range(config["num_single_layers"])
    assert {f"single_transformer_blocks.{block}.attn.{layer}" for block in blocks for layer in ("to_out", "to_qkv_mlp_proj")} == {
        layer for layer in layers if layer.startswith("single_") and layer.endswith(tuple(trained))
    }


def run_of(name, **options):
    return RunConfig(**tiny.MODELS[name].run, **options)


def pixels():
    return torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1


def loss_of(model, rng):
    with torch.no_grad():
        text = model.encode_text(["a toy", "", "a cat"])
        return model.loss(LatentBatch(model.encode_pixels(pixels()).chunk(2, dim=1)[0], text), rng)


# -- the loss


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"])
@every_model
@torch.no_grad()
def test_the_loss_is_that_of_diffusers_dreambooth_scripts(tiny_family, name, scheme):
    """train_dreambooth_lora_flux2.py and its like for klein: latents in normalised patches, whose places and the caption's have numbers."""
    options = {"guidance_scale": 2.5} if name == "flux2" else {}
    run = run_of(name, weighting_scheme=scheme, logit_mean=0.5, logit_std=0.8, mode_scale=1.1, **options)
    (module, kind), draw = BOTH[name], torch.Generator().manual_seed(5)
    pipeline, scheduler = plain(tiny_family(name), kind), FlowMatchEulerDiscreteScheduler()  # shifted as it draws, not as it trains
    states, places = pipeline.encode_prompt(["a toy", "", "a cat"], **tiny.drawing(pipeline))
    mean, deviation = pipeline.vae.bn.running_mean, (pipeline.vae.bn.running_var + pipeline.vae.config.batch_norm_eps).sqrt()
    latents = pipeline._patchify_latents(pipeline.vae.encode(pixels()).latent_dist.mode())
    latents = (latents - mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1)
    noise = torch.randn(latents.shape, generator=draw)
    timesteps = scheduler.timesteps[(compute_density_for_timestep_sampling(scheme, 3, 0.5, 0.8, 1.1, generator=draw) * 1000).long()]
    sigmas = (timesteps / 1000).view(-1, 1, 1, 1)
    ids = pipeline._prepare_latent_ids(latents)
    answer = pipeline.transformer(
        pipeline._pack_latents((1 - sigmas) * latents + sigmas * noise),
        states,
        timesteps / 1000,
        ids,
        places,
        guidance=torch.full((3,), 2.5) if name == "flux2" else None,
    ).sample
    off = pipeline._unpack_latents_with_ids(answer, ids) - (noise - latents)
    expected = (compute_loss_weighting_for_sd3(scheme, sigmas) * off.square()).mean((1, 2, 3))
    model = module.load(tiny_family(name), CPU, run)
    torch.testing.assert_close(loss_of(model, torch.Generator().manual_seed(5)), expected)


def test_the_guidance_that_is_told_matters(tiny_family):
    losses = [
        loss_of(flux2.load(tiny_family("flux2"), CPU, run_of("flux2", guidance_scale=scale)), torch.Generator().manual_seed(1))
        for scale in (1.0, 4.0)
    ]
    assert not torch.allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize("distilled", [True, False])
def test_a_distilled_checkpoint_is_named_as_such(tmp_path, caplog, distilled):
    pipeline = tiny.build("klein")
    pipeline.register_to_config(is_distilled=distilled)
    pipeline.save_pretrained(tmp_path / "klein")
    model = flux2_klein.load(tmp_path / "klein", CPU, run_of("klein"))
    assert ("was distilled to draw in a few steps" in caplog.text) == distilled
    model.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "model_index.json").read_text())["is_distilled"] == distilled


# -- folders and files


def test_of_a_processor_the_tokenizer_is_read(tiny_family, tmp_path):
    """FLUX.2-dev's folder has a PixtralProcessor, whose class needs torchvision."""
    folder = shutil.copytree(tiny_family("flux2"), tmp_path / "flux2")
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PixtralProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "tokenizer" / "processor_config.json").write_text(json.dumps({"processor_class": "PixtralProcessor", "patch_size": 14}))
    models = [flux2.load(source, CPU, run_of("flux2")) for source in (folder, tiny_family("flux2"))]
    with torch.no_grad():
        torch.testing.assert_close(*(model.encode_text(["a toy [IMG]cat", ""]) for model in models))
    models[0].save(tmp_path / "saved")
    assert Flux2Pipeline.from_pretrained(tmp_path / "saved").tokenizer.chat_template == models[1].pipeline.tokenizer.chat_template


@pytest.mark.parametrize(
    ("form", "dtype"), [("original", torch.bfloat16), ("original", torch.float8_e4m3fn), ("comfyui", torch.bfloat16), ("diffusers", torch.bfloat16)]
)
@every_model
def test_a_file_is_the_transformer_and_the_rest_is_the_config_folders(tmp_path, tiny_family, name, form, dtype):
    whole, beside, path = tiny.build(name, seed=1), tiny_family(name), tmp_path / "flux2.safetensors"
    tensors = whole.transformer.state_dict() if form == "diffusers" else flux2_file.transformer_tensors(whole.transformer)
    prefix = "model.diffusion_model." if form == "comfyui" else ""
    save_file({prefix + key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}, path)
    run = complete(replace(run_of(name), model=str(path), model_config=str(beside)), digest=True)
    assert run.family == tiny.FAMILIES[name] and run.model_digest == digest_model(path)
    model, other = load_model(run, {}, CPU), BOTH[name][0].load(beside, CPU, run_of(name))
    for part, module in model.parts.items():
        expected = other.parts[part].state_dict()
        if part == "transformer":
            expected = {key: tensor.to(dtype).float() for key, tensor in whole.transformer.state_dict().items()}
        ours = module.state_dict()
        assert ours.keys() == expected.keys() and all(torch.equal(ours[key], tensor) for key, tensor in expected.items()), part
    assert loss_of(model, torch.Generator()).isfinite().all()
    model.save(tmp_path / "saved")
    kept = Flux2Transformer2DModel.from_pretrained(tmp_path / "saved", subfolder="transformer").state_dict()
    assert all(torch.equal(tensor, kept[key]) for key, tensor in model.denoiser.state_dict().items())


@every_model
def test_a_file_alone_or_one_that_lacks_tensors_is_refused(tmp_path, tiny_family, name):
    path, tensors = tmp_path / "flux2.safetensors", flux2_file.transformer_tensors(tiny.build(name).transformer)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items() if key != "img_in.weight"}, path)
    with pytest.raises(UserError, match=r"holds no vae and no text_encoder\. Add --model_config with a diffusers folder of a FLUX\.2"):
        load_model(replace(run_of(name), model=str(path)), {}, CPU)
    with pytest.raises(UserError, match=r"does not load as a FLUX\.2.* pipeline: .*(x_embedder|meta|missing)"):
        load_model(replace(run_of(name), model=str(path), model_config=str(tiny_family(name))), {}, CPU)


# -- a LoRA's file


@every_model
def test_a_loras_layers_have_names_that_comfyui_knows(tiny_family, tmp_path, name):
    """`transformer.` and the names that flux_to_diffusers has (comfy/utils.py at 09708ea; comfy/lora.py at 17358c8): all that are trained are in it."""
    run = run_of(name, method="lora", rank=2)
    layers = lora_layers(BOTH[name][0].load(tiny_family(name), CPU, run), run, tmp_path)
    double = {f"transformer.transformer_blocks.0.attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")}
    assert layers == double | {f"transformer.single_transformer_blocks.0.attn.{layer}" for layer in ("to_qkv_mlp_proj", "to_out")}
