"""The family of a base model, without loading it."""

import json

import pytest
import torch
from safetensors.torch import save_file

from datasetserver.founding import run_to_serve
from peer.launch.starting_model import complete
from swarm.base_model import could_be_on_hub, family_of, shown_model
from swarm.digest import digest_model
from swarm.errors import UserError
from swarm.founding import check_founding, with_noise
from swarm.run.family import families, titles
from swarm.run_config import RunConfig
from tests import tiny

KEYS = {model.family: model.keys for model in tiny.MODELS.values()}
UNET, CLIP = KEYS["stable_diffusion"]


def write_file(path, keys, **metadata):
    save_file({key: torch.full((2,), float(i)) for i, key in enumerate(keys)}, path, metadata={"format": "pt", **metadata})
    return path


def write_index(folder, **index):
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("name", "family"), [(facts.pipeline, family) for family, facts in families().items()])
def test_a_folder_says_its_class(tmp_path, name, family):
    assert family_of(write_index(tmp_path, _class_name=name)) == family


@pytest.mark.parametrize("family", KEYS)
def test_a_file_is_known_by_its_keys(tmp_path, family):
    path = write_file(tmp_path / "model.safetensors", KEYS[family])
    assert family_of(path) == family
    if not any(key.startswith("model.diffusion_model.") for key in KEYS[family]):  # of the denoiser alone; ComfyUI's have the prefix
        assert family_of(write_file(tmp_path / "comfy.safetensors", [f"model.diffusion_model.{key}" for key in KEYS[family]])) == family


def test_what_is_of_no_known_family_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a StableCascadePipeline, which cannot be trained"):
        family_of(write_index(tmp_path, _class_name="StableCascadePipeline"))
    for content in ({}, {"_class_name": ["one", "two"]}):
        with pytest.raises(UserError, match=r"does not name its pipeline|is a \[") as raised:
            family_of(write_index(tmp_path, **content))
        assert "--" not in raised.value.fix, "dd-generate and dd-export have no --family"
    with pytest.raises(UserError, match=r"no model_index\.json"):
        family_of(tmp_path / "nowhere")
    for keys in ((UNET,), (CLIP,), ("lora_unet_down.weight",)):
        with pytest.raises(UserError, match=f"holds no {titles()} checkpoint"):
            family_of(write_file(tmp_path / "other.safetensors", keys))
    (tmp_path / "damaged.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="is damaged"):
        family_of(tmp_path / "damaged.safetensors")


def test_the_digest_of_a_file_is_of_its_tensors(tmp_path):
    one = write_file(tmp_path / "one.safetensors", KEYS["sdxl"])
    two = write_file(tmp_path / "two.safetensors", KEYS["sdxl"], title="the same")
    other = write_file(tmp_path / "other.safetensors", KEYS["flux"])
    assert digest_model(one) == digest_model(two) != digest_model(other)
    assert one.read_bytes() != two.read_bytes()


def test_the_digest_of_a_folder_is_of_its_variant_where_it_has_nothing_else(tmp_path):
    write_index(tmp_path, _class_name="StableDiffusionPipeline")
    (tmp_path / "unet").mkdir()
    half = write_file(tmp_path / "unet" / "model.fp16.safetensors", ("half",))
    digests = [digest_model(tmp_path)]
    write_file(tmp_path / "unet" / "model.safetensors", ("whole",))
    digests.append(digest_model(tmp_path))
    half.unlink()
    assert digests[0] != digests[1] == digest_model(tmp_path)


def test_a_host_that_founds_a_run_finds_the_family_out(tmp_path):
    path = write_file(tmp_path / "model.safetensors", KEYS["sdxl"])
    run = run_to_serve({"model": str(path)}, None)
    assert (run.family, run.model_digest) == ("sdxl", digest_model(path))
    given = run_to_serve({"model": "somebody/something", "model_digest": "a" * 64, "family": "flux"}, None)
    assert given.family == "flux"  # nothing is fetched for it


def test_who_leaves_the_family_to_the_founder_agrees_with_it():
    run = RunConfig(family="sdxl")
    run.refuse_differences({"family": "auto", "model": "here", "model_config": "there"})
    with pytest.raises(UserError, match="has family = sdxl, but this peer was started with flux"):
        run.refuse_differences({"family": "flux"})


def write_scheduler(folder, **config):
    (folder / "scheduler").mkdir(parents=True, exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": "DDIMScheduler", **config}))
    return folder


V_PREDICTION = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}


@pytest.mark.parametrize(
    ("config", "given", "found"),
    [
        ({}, {}, ("epsilon", False)),
        (V_PREDICTION, {}, ("v_prediction", True)),
        (V_PREDICTION, {"prediction_type": "sample", "rescale_betas_zero_snr": False}, ("sample", False)),
        (V_PREDICTION, {"prediction_type": "v_prediction"}, ("v_prediction", True)),
        ({"prediction_type": "flow"}, {"prediction_type": "epsilon"}, ("epsilon", False)),
    ],
)
def test_who_founds_a_run_reads_from_the_scheduler_what_is_predicted(tmp_path, config, given, found):
    """A joiner's scheduler, which no digest covers, may say otherwise: it trains what the run says."""
    folder = write_scheduler(write_index(tmp_path, _class_name="StableDiffusionPipeline"), **config)
    (folder / "unet").mkdir()
    write_file(folder / "unet" / "model.safetensors", ("w",))
    values = {"model": str(folder), **given}
    host, peer = run_to_serve(values, None), complete(RunConfig(**values), digest=True)
    assert host == peer and (host.prediction_type, host.rescale_betas_zero_snr) == found
    alone = complete(RunConfig(**values))
    assert (alone.prediction_type, alone.rescale_betas_zero_snr) == (given.get("prediction_type", "auto"), given.get("rescale_betas_zero_snr"))


def test_what_no_run_can_predict_is_refused_where_it_is_founded(tmp_path):
    folder = write_scheduler(write_index(tmp_path, _class_name="StableDiffusionPipeline"), prediction_type="flow")
    with pytest.raises(UserError, match=r"the model predicts 'flow', which cannot be trained\. Use another model, or set it with --prediction_type"):
        with_noise(RunConfig(family="stable_diffusion"), folder)
    write_scheduler(folder)
    with pytest.raises(UserError, match="rescale_betas_zero_snr needs a model that does not predict the noise"):
        check_founding(with_noise(RunConfig(family="stable_diffusion", rescale_betas_zero_snr=True), folder))


def test_a_file_leaves_it_to_the_scheduler_of_its_model_config_and_flux_has_no_such_thing(tmp_path, monkeypatch):
    path = write_file(tmp_path / "model.safetensors", KEYS["sdxl"])
    configs = write_scheduler(tmp_path / "configs", **V_PREDICTION)
    run = RunConfig(family="sdxl", model_config=str(configs))
    assert with_noise(run, path).prediction_type == "v_prediction"
    monkeypatch.chdir(configs)
    for config in ("", "somebody/something", str(path)):
        assert with_noise(RunConfig(family="sdxl", model_config=config), path).prediction_type == "auto"
    flux = RunConfig(family="flux")
    assert with_noise(flux, configs) == flux
    (configs / "scheduler" / "scheduler_config.json").write_text("[]")
    assert with_noise(run, path) == run


SAYS_V = {"modelspec.prediction_type": "v"}
SAYS_EPSILON = {"modelspec.prediction_type": "epsilon"}


@pytest.mark.parametrize(
    ("keys", "header", "config", "found"),
    [
        (("v_pred", "ztsnr"), {}, {}, ("v_prediction", True)),
        (("v_pred",), SAYS_EPSILON, {}, ("v_prediction", False)),
        ((), SAYS_V, {}, ("v_prediction", False)),
        (("v_pred", "ztsnr"), SAYS_V, None, ("v_prediction", True)),
        (("v_pred",), {}, None, ("v_prediction", None)),
        ((), SAYS_EPSILON, V_PREDICTION, ("v_prediction", True)),  # tools write it where nobody told them otherwise
        ((), SAYS_EPSILON, None, ("epsilon", None)),
        (("ztsnr",), {}, {}, ("epsilon", False)),
    ],
)
def test_a_file_that_says_what_it_predicts_is_believed_over_its_model_config(tmp_path, keys, header, config, found):
    path = write_file(tmp_path / "model.safetensors", (*KEYS["sdxl"], *keys), **header)
    folder = "" if config is None else str(write_scheduler(tmp_path / "configs", **config))
    run = with_noise(RunConfig(family="sdxl", model_config=folder), path)
    assert (run.prediction_type, run.rescale_betas_zero_snr) == found
    given = {"prediction_type": "sample", "rescale_betas_zero_snr": False}
    run = with_noise(RunConfig(family="sdxl", model_config=folder, **given), path)
    assert (run.prediction_type, run.rescale_betas_zero_snr) == ("sample", False)


def test_a_host_of_a_run_from_before_goes_on_with_it(tmp_path):
    """It left to each peer's scheduler what is predicted; also where the host's file says that in so many words."""
    folder = write_scheduler(write_index(tmp_path, _class_name="StableDiffusionPipeline"), **V_PREDICTION)
    (folder / "unet").mkdir()
    write_file(folder / "unet" / "model.safetensors", ("w",))
    before = RunConfig(model=str(folder), family="stable_diffusion", model_digest=digest_model(folder))
    now = run_to_serve({"model": str(folder)}, None)
    assert now.prediction_type == "v_prediction" and now.digest != before.digest
    for values in ({}, {"model": str(folder)}, {"model": str(folder), "prediction_type": "auto", "rescale_betas_zero_snr": None}):
        assert run_to_serve(values, before) == before and run_to_serve(values, now) == now
    with pytest.raises(UserError, match="prediction_type was v_prediction, now epsilon"):
        run_to_serve({"model": str(folder), "prediction_type": "epsilon"}, now)


def test_who_leaves_the_prediction_to_the_founder_agrees_with_it():
    RunConfig(**V_PREDICTION).refuse_differences({"prediction_type": "auto", "rescale_betas_zero_snr": None})


@pytest.mark.parametrize(
    ("model", "could", "shown"),
    [
        ("owner/name-1.5", True, "owner/name-1.5"),
        ("my-model/", False, "my-model"),
        ("my-model", False, "my-model"),
        ("./my-model", False, "my-model"),
        ("../model", False, "model"),
        ("/models/mine", False, "mine"),
        ("~/model", False, "model"),
        ("models/mine.safetensors", False, "mine.safetensors"),
    ],
)
def test_a_model_on_the_hub_has_an_owner_and_a_folder_is_called_by_its_last_name(model, could, shown):
    assert (could_be_on_hub(model), shown_model(model)) == (could, shown)
