"""Where base models come from: folders, single files, and a small stand-in of the Hub; the real one was never asked."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
import torch
from diffusers import ChromaTransformer2DModel, DiffusionPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from peer.launch.command_line import parse
from peer.launch.resolving import resolve_run
from peer.launch.starting_model import complete, load_model, source_of
from peer.models import flux, sdxl, stable_diffusion
from peer.models.diffusion.pipeline import files_read
from peer.models.diffusion.source import locate
from peer.results.forms.single_file import write_single_file
from swarm.base_model import family_of
from swarm.digest import digest_model
from swarm.errors import ExitCode, UserError
from swarm.run.family import families
from swarm.run_config import RunConfig
from tests import flux_file as flux_files
from tests import tiny
from tests.datasetserver.test_ingest_hub import COMMIT, Hub, told_of
from tests.peer.models.test_chroma import HD
from tests.serving import serving

CPU = torch.device("cpu")
RUN = RunConfig()


class Models(Hub):
    """Knows owner/sd and one of each other family."""

    root: Path

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        asked = re.fullmatch(r"/(?:api/models/)?(owner/[^/]+)(?:/(revision|tree|resolve)/[^/]+)?(?:/(.+))?", path)
        folder = self.root / asked[1].split("/")[1] if asked else None
        if folder is None or not folder.is_dir():
            return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        if asked[2] in (None, "revision"):
            siblings = [{"rfilename": name} for name in files]
            self.answer(json.dumps({"id": asked[1], "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}).encode())
        elif asked[2] == "tree":
            entries = [{"type": "file", "oid": digest(file), "size": file.stat().st_size, "path": name} for name, file in files.items()]
            self.answer(json.dumps(entries).encode())
        elif asked[3] in files:
            self.answer(files[asked[3]].read_bytes(), headers={"ETag": f'"{digest(files[asked[3]])}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(b"{}", 404, {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET


def digest(file):
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path, tiny_family):
    """As repositories are: with a safety checker, pickles, half-precision twins, and the whole once more in one file."""
    root = tmp_path / "repositories"
    for name in tiny.ONE_OF_EACH:
        shutil.copytree(tiny_family(name), root / name)
        denoiser = families()[tiny.FAMILIES[name]].denoiser
        weights = root / name / denoiser / "diffusion_pytorch_model.safetensors"
        shutil.copy(weights, weights.with_suffix(".fp16.safetensors"))
        for extra in (f"{denoiser}/diffusion_pytorch_model.bin", "whole.safetensors", "README.md", "picture.png"):
            (root / name / extra).write_bytes(b"extra")
    index = json.loads((root / "sd" / "model_index.json").read_text())
    index |= {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"], "requires_safety_checker": True}
    index |= {"feature_extractor": ["transformers", "CLIPImageProcessor"]}
    (root / "sd" / "model_index.json").write_text(json.dumps(index))
    for extra in ("safety_checker/model.safetensors", "safety_checker/config.json", "feature_extractor/preprocessor_config.json"):
        (root / "sd" / extra).parent.mkdir(exist_ok=True)
        (root / "sd" / extra).write_bytes(b"{}")
    handler = type("KnowingModels", (Models,), {"root": root, "asked": []})
    with serving(handler) as url:
        yield url, handler.asked


PROGRAM = """
import sys
from peer.launch.starting_model import complete, load_model
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
for name in sys.argv[1:]:
    run = complete(RunConfig(model=f"owner/{name}"), digest=True)
    print(run.family, run.model_digest, *load_model(run, {}, "cpu").parts)
try:
    complete(RunConfig(model="owner/other"))
except UserError as error:
    print(error)
"""


def test_a_hub_id_is_fetched_once_and_without_what_training_has_no_use_for(hub, tmp_path, tiny_family):
    url, asked = hub
    done = told_of(url, tmp_path / "cache", PROGRAM, *tiny.ONE_OF_EACH)
    assert done.returncode == 0, done.stderr
    *read, refused = done.stdout.splitlines()
    for line, name in zip(read, tiny.ONE_OF_EACH, strict=True):
        facts = families()[tiny.FAMILIES[name]]
        assert line == " ".join([facts.name, digest_model(tiny_family(name)), facts.denoiser, "vae", *facts.text_encoders])
    fix = "Check the name and the network, and whether its licence must be accepted on the Hub (then HF_TOKEN); or give its folder with --model FOLDER."
    assert refused == f"There is no model 'owner/other' on this machine, and it could not be loaded from the Hub. {fix}"
    fetched = [path for path in asked if "/resolve/" in path]
    for name in tiny.ONE_OF_EACH:
        assert any(f"owner/{name}/" in path and path.endswith("/diffusion_pytorch_model.safetensors") for path in fetched)
    unused = ("fp16", ".bin", "whole", "README", ".png", "safety_checker/", "feature_extractor/")
    assert [path for path in fetched if any(part in path for part in unused)] == []
    assert not (tmp_path / "cache" / "token").exists()


def test_of_a_folder_with_several_variants_those_files_are_counted_that_are_read(tmp_path, tiny_family):
    """A helper took a clone of SD 1.5 for 11 GB instead of 4, and never drew."""
    folder = shutil.copytree(tiny_family("sd"), tmp_path / "model")
    read = sorted(files_read(folder))
    assert {file.parent.name for file in read} == {"unet", "text_encoder", "vae"}
    for file in read:
        shutil.copy(file, file.with_suffix(".fp16.safetensors"))
    (folder / "safety_checker").mkdir()
    shutil.copy(read[0], folder / "safety_checker" / "model.safetensors")
    assert sorted(files_read(folder)) == read and files_read(read[0]) == [read[0]]


def test_a_folder_that_has_its_weights_in_several_fp16_files_only_is_read(tmp_path):
    pipeline = tiny.build("sd")
    pipeline.to(torch.float16).save_pretrained(tmp_path / "model", variant="fp16", max_shard_size="40KB")
    assert (files := files_read(tmp_path / "model")) and any("fp16-00001-of" in file.name for file in files)
    assert load_model(RunConfig(model=str(tmp_path / "model")), {}, CPU).parts["unet"].conv_in.weight.shape[1] == 4


def test_a_model_of_the_hub_without_safe_weights_is_named_as_such(monkeypatch):
    def download(*_, **__):
        raise OSError("Could not find the necessary `safetensors` weights in {'unet/diffusion_pytorch_model.bin'} (variant=None)")

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    with pytest.raises(UserError, match=r"owner/name has no \.safetensors weights on the Hub"):
        locate("owner/name")


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_weights_that_a_folder_lacks_are_not_drawn_at_random(tmp_path, tiny_family, family):
    folder = shutil.copytree(tiny_family(family), tmp_path / "model")
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    del tensors["conv_out.weight"]
    save_file(tensors, weights)
    with pytest.raises(UserError, match=r"does not load as a .* pipeline: .*conv_out\.weight"):
        load_model(RunConfig(model=str(folder)), {}, CPU)


def test_a_model_that_fills_in_parts_of_pictures_is_refused(tmp_path):
    pipeline = tiny.build("sd")
    pipeline.register_modules(unet=tiny.unet(16, in_channels=9))
    pipeline.save_pretrained(tmp_path / "inpainting")
    with pytest.raises(UserError, match="UNet takes 9 channels instead of 4"):
        stable_diffusion.load(tmp_path / "inpainting", CPU, RUN)


def test_sdxls_refiner_is_refused(tmp_path):
    pipeline = tiny.build("sdxl")
    pipeline.register_modules(text_encoder=None, tokenizer=None)
    pipeline.save_pretrained(tmp_path / "refiner")
    with pytest.raises(UserError, match="is SDXL's refiner"):
        sdxl.load(tmp_path / "refiner", CPU, RUN)


@pytest.mark.parametrize(("module", "wrong"), [(stable_diffusion, "flux"), (sdxl, "sd"), (flux, "sdxl")])
def test_a_folder_of_another_family_is_refused_in_one_line(tiny_family, module, wrong):
    with pytest.raises(UserError, match=r"does not load as a .* check that it is of the family \w") as error:
        module.load(tiny_family(wrong), CPU, RUN)
    assert "\n" not in str(error.value) and "--" not in error.value.fix, "dd-generate and dd-export have no --family"


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "model.ckpt").write_bytes(b"a pickle")
    for source, reason in (
        (str(tmp_path / "model.ckpt"), "neither a folder nor a .safetensors file"),
        (str(tmp_path / "missing.safetensors"), "There is no model"),
        ("missing.safetensors", "There is no model"),
    ):
        with pytest.raises(UserError, match=reason):
            locate(source)


def test_whoever_starts_a_run_finds_the_family_out_and_says_it(tiny_family, pictures, caplog):
    caplog.set_level("INFO")
    run = resolve_run(*parse(["--model", str(tiny_family("sdxl")), "--train_data_dir", str(pictures)])).run
    assert run.family == "sdxl" and "is of family=sdxl" in caplog.text
    assert (
        resolve_run(*parse(["--model", str(tiny_family("sd2v")), "--found", "--train_data_dir", str(pictures)])).run.family
        == "stable_diffusion"
    )


def test_a_peers_own_copy_of_the_model_may_be_elsewhere(tiny_family, tmp_path):
    run = RunConfig(model="owner/name", family="flux", model_digest=digest_model(tiny_family("flux")), max_sequence_length=32)
    assert load_model(run, {"model": str(tiny_family("flux"))}, CPU).parts
    with pytest.raises(UserError, match="weights have another digest"):
        load_model(run, {"model": str(tiny_family("sdxl"))}, CPU)


def test_a_runs_model_that_only_its_host_has_is_asked_of_the_host(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("my-model", "my-model/", "./my-model", "/home/host/models/mine.safetensors", "~/models/mine"):
        with pytest.raises(UserError, match=rf"base model '{name}' is a folder or file on the host's machine\. Ask .* --model FOLDER\."):
            source_of(RunConfig(model=name, model_digest="a" * 64), {})
    with pytest.raises(UserError, match="There is no model /nowhere"):
        source_of(RunConfig(model="owner/name", model_digest="a" * 64), {"model": "/nowhere"})
    for name in ("/nowhere", "my-modle/"):
        with pytest.raises(UserError, match=f"There is no model {name}") as refused:
            source_of(RunConfig(model=name), {})
        assert refused.value.code == ExitCode.CONFIG, "dd-peer does not try it again"


def test_a_flux_file_alone_is_told_what_it_needs(tmp_path):
    path = tmp_path / "flux.safetensors"
    save_file({"double_blocks.0.img_mod.lin.weight": torch.zeros(2)}, path)
    assert family_of(path) == "flux"
    with pytest.raises(
        UserError,
        match=r"holds no vae and no text_encoder and no text_encoder_2\. Add --model_config with a diffusers folder of a FLUX model",
    ):
        flux.load(path, CPU, RUN)


FULL_SIZE = {  # "12 billion": the model card of FLUX.1-dev; "8.9 billion": that of Chroma1-HD
    "flux": (FluxTransformer2DModel, {"guidance_embeds": True}, 11_901_408_320),
    "chroma": (ChromaTransformer2DModel, HD, 8_899_983_424),
}


@pytest.fixture
def flux_file(monkeypatch, tmp_path):
    """`flux_file(tensors, dtype)`: a file that is read as the real ones are, but for the width."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    monkeypatch.setitem(SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"], "checkpoint_mapping_fn", flux_files.converter(32))
    return lambda *given: flux_files.write(tmp_path / "flux.safetensors", *given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("parts", ["the transformer", "everything"])
def test_a_flux_file_is_all_that_it_holds_and_the_rest_is_the_config_folders(tmp_path, tiny_family, flux_file, parts, dtype):
    whole, beside = tiny.build("flux", seed=1), tiny_family("flux")
    alone = parts == "the transformer"
    path = flux_file(flux_files.transformer_tensors(whole.transformer) if alone else flux_files.whole_tensors(whole), dtype)
    run = complete(RunConfig(model=str(path), model_config=str(beside), max_sequence_length=32))
    assert run.family == "flux"
    model, other = load_model(run, {}, CPU), load_model(replace(run, model=str(beside), model_config=""), {}, CPU)
    for name, part in model.parts.items():
        ours = part.state_dict()
        if alone and name != "transformer":
            expected = other.parts[name].state_dict()
        else:
            expected = {key: tensor.to(dtype).float() for key, tensor in getattr(whole, name).state_dict().items()}
        assert ours.keys() == expected.keys() and all(torch.equal(ours[key], tensor) for key, tensor in expected.items()), name
    assert model.encode_text(["a cat"])["states"].shape == (1, 32, 16)


@pytest.mark.filterwarnings("ignore:.FluxPosEmbed")
@pytest.mark.parametrize("family", FULL_SIZE)
def test_diffusers_own_reader_splits_a_full_size_file_where_its_layers_meet(family):
    """All blocks at full width, each layer with one input: the reader knows the real width alone, and splits outputs."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    kind, config, parameters = FULL_SIZE[family]
    with torch.device("meta"):
        model = kind(**config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    rng = torch.Generator().manual_seed(1)
    narrow = {name: torch.rand(tensor.shape[0], *(1 for _ in tensor.shape[1:]), generator=rng) for name, tensor in model.state_dict().items()}
    file = flux_files.transformer_tensors(SimpleNamespace(state_dict=lambda: narrow))
    read = SINGLE_FILE_LOADABLE_CLASSES[kind.__name__]["checkpoint_mapping_fn"](file)
    assert read.keys() == narrow.keys() and all(torch.equal(tensor, narrow[name]) for name, tensor in read.items())


def test_a_flux_file_and_a_config_folder_that_both_lack_a_part_are_refused(tmp_path, tiny_family, flux_file):
    path = flux_file(flux_files.transformer_tensors(tiny.build("flux", seed=1).transformer))
    folder = shutil.copytree(tiny_family("flux"), tmp_path / "configs")
    (folder / "text_encoder_2" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"The model's file holds no text_encoder_2, and .*configs has no weights of one"):
        flux.load(path, CPU, RunConfig(model_config=str(folder), max_sequence_length=32))


@pytest.mark.parametrize("name", ["scaled_fp8", "double_blocks.0.img_attn.qkv.scale_weight", "double_blocks.0.img_attn.qkv.weight.absmax"])
def test_quantized_weights_are_refused(tiny_family, flux_file, name):
    path = flux_file({"double_blocks.0.img_mod.lin.weight": torch.zeros(2), name: torch.ones(1)})
    with pytest.raises(UserError, match=f"is quantized: its weights need scale factors .{name}"):
        flux.load(path, CPU, RunConfig(model_config=str(tiny_family("flux"))))


def test_a_folder_with_a_quantized_part_is_refused(tmp_path, tiny_family):
    folder = shutil.copytree(tiny_family("flux"), tmp_path / "model")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}))
    with pytest.raises(UserError, match=r"transformer is quantized \(quantization_config\)"):
        flux.load(folder, CPU, RunConfig())


def test_the_config_of_a_file_is_a_diffusers_folder(tmp_path):
    path = tmp_path / "flux.safetensors"
    save_file({"double_blocks.0.img_mod.lin.weight": torch.zeros(2)}, path)
    with pytest.raises(UserError, match=r"model_config is .* not a diffusers folder"):
        flux.load(path, CPU, RunConfig(model_config=str(tmp_path)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", ["sd", "sd2v", "sdxl"])
def test_a_single_file_is_the_model_and_of_its_config_folder_no_weight_is_read(tmp_path, tiny_family, family, dtype):
    path, config = tmp_path / "model.safetensors", tiny.write_family(tmp_path / "config", family, seed=1)
    whole = load_model(RunConfig(model=str(tiny_family(family))), {}, CPU)
    write_single_file(whole.pipeline, path, dtype)
    run = complete(RunConfig(model=str(path), model_config=str(config)), digest=True)
    assert run.family == tiny.FAMILIES[family] and run.model_digest == digest_model(path)
    model = load_model(run, {}, CPU)
    for name, part in whole.parts.items():
        ours = model.parts[name].state_dict()
        assert ours.keys() == part.state_dict().keys()
        assert all(torch.equal(ours[key], tensor.to(dtype).float()) for key, tensor in part.state_dict().items())
    assert model.noising.prediction_type == whole.noising.prediction_type
    model.save(tmp_path / "folder")
    assert family_of(tmp_path / "folder") == run.family


def test_a_single_file_of_an_sdxl_that_predicts_v_is_trained_and_drawn_so_beside_configs_of_one_that_does_not(tmp_path, tiny_family):
    path, configs = tmp_path / "model.safetensors", tiny_family("sdxl")
    run = RunConfig(model=str(configs), prediction_type="v_prediction", rescale_betas_zero_snr=True)
    write_single_file(load_model(run, {}, CPU).pipeline, path)
    model = load_model(RunConfig(model=str(path), model_config=str(configs)), {}, CPU)
    assert model.trained_by == "prediction_type=v_prediction rescale_betas_zero_snr=True"
    drawn_with = model.pipeline.scheduler.config
    assert (drawn_with.prediction_type, drawn_with.rescale_betas_zero_snr, drawn_with.timestep_spacing) == ("v_prediction", True, "trailing")
    noise = load_model(RunConfig(model=str(path), model_config=str(configs), prediction_type="epsilon", rescale_betas_zero_snr=False), {}, CPU)
    assert noise.trained_by == "prediction_type=epsilon rescale_betas_zero_snr=False"


def test_a_file_that_lacks_a_part_takes_it_from_the_config_folder_and_one_that_lacks_a_tensor_is_refused(tmp_path, tiny_family):
    path, config = tmp_path / "model.safetensors", tiny_family("sd")
    write_single_file(tiny.build("sd", seed=1), path)
    tensors = load_file(path)
    run = RunConfig(model=str(path), model_config=str(config))
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("first_stage_model.")}, path)
    model, other = load_model(run, {}, CPU), load_model(RunConfig(model=str(config)), {}, CPU)
    assert all(torch.equal(*pair) for pair in zip(model.vae.parameters(), other.vae.parameters(), strict=True))
    assert not torch.equal(next(model.unet.parameters()), next(other.unet.parameters()))
    del tensors["model.diffusion_model.out.2.weight"]
    save_file(tensors, path)
    with pytest.raises(UserError, match="does not load as a Stable Diffusion pipeline: tensors are missing in it"):
        load_model(run, {}, CPU)
