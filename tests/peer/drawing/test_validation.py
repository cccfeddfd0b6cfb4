"""What is seen of a run while it trains, and the average of its weights: neither changes anything of the training."""

import dataclasses
import struct

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from diffusers.training_utils import EMAModel
from PIL import Image
from safetensors.torch import load_file

from peer.drawing.validation import check_steps, untouched
from peer.figures import trackers
from peer.loop.ema import Ema
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.datasetserver.hosting import until
from tests.peer.test_alone import CPU, SHORT, flat, start  # noqa: F401

FP16, BF16 = torch.float16, torch.bfloat16
DRAW = {
    "validation_prompts": ("a red square", "a blue one"),
    "num_validation_images": 3,
    "validation_steps": 2,
    "validation_inference_steps": 2,
}


def test_a_run_that_draws_while_it_trains_is_the_same_run_to_the_bit(start, tmp_path):  # noqa: F811
    plain = start("plain", run=SHORT).run()
    drawing = start("drawing", run=SHORT, **DRAW, use_ema=True)
    modes = [module.training for part in drawing.trainer.model.parts.values() for module in part.modules()]
    scheduler = drawing.trainer.model.pipeline.scheduler
    drawing.run()
    assert drawing.losses == plain.losses and torch.equal(flat(drawing.trainer.params), flat(plain.trainer.params))
    assert [module.training for part in drawing.trainer.model.parts.values() for module in part.modules()] == modes and any(modes)
    assert drawing.trainer.model.pipeline.scheduler is scheduler
    grids = sorted((tmp_path / "drawing" / "validation").iterdir())
    assert [path.name for path in grids] == ["step-000002.png", "step-000004.png"]
    assert {pixels(path).shape for path in grids} == {(32, 48, 3)}
    assert len({path.read_bytes() for path in grids}) == 2 and not (tmp_path / "plain" / "validation").exists()


def test_a_picture_shows_the_weights_of_its_step_and_the_same_ones_give_the_same_picture(start, tmp_path):  # noqa: F811
    draw = DRAW | {"validation_steps": 4, "use_ema": True, "ema_decay": 0.5}
    done = start("one", run=SHORT, **draw).run()
    start("two", run=SHORT, **draw | {"validation_steps": 0}).run()  # four steps: at the end, unasked
    one, two = ((tmp_path / name / "validation" / "step-000004.png").read_bytes() for name in ("one", "two"))
    assert one == two
    export(done, tmp_path / "result")
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "result", safety_checker=None)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(SHORT.seed)
    picture = pipeline("a red square", num_inference_steps=2, height=16, width=16, generator=generator).images[0]
    grid = pixels(tmp_path / "one" / "validation" / "step-000004.png")
    assert abs(grid[:16, :16] - np.asarray(picture, dtype=float)).max() <= 2


@pytest.mark.parametrize("draws", [DRAW, {"with_prior_preservation": True, "class_prompt": "a dog", "class_data_dir": "drawn"}])
def test_more_denoising_steps_than_the_noise_has_are_refused_before_training_begins(start, draws):  # noqa: F811
    with pytest.raises(UserError, match=r"validation_inference_steps is 1001, but the noise of this model has 1000 steps\. Use at most 1000"):
        start("out", run=SHORT, **draws | {"validation_inference_steps": 1001})


def test_a_scheduler_that_divides_the_noise_takes_any_number_of_steps():
    check_steps(tiny.build("flux").scheduler, "steps", 1001)


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_the_pictures_of_a_prompt_are_decoded_one_at_a_time_and_only_while_they_are_drawn(family):
    model, decoded = tiny.kind(family)(tiny.build(family), CPU, RunConfig(**tiny.MODELS[family].run)), []
    model.vae.decoder.register_forward_pre_hook(lambda _, inputs: decoded.append(len(inputs[0])))
    with torch.no_grad(), untouched(model, CPU):
        drawn = model.pipeline(**model.prompt_arguments(["a cat"] * 3), **model.drawn_with, num_inference_steps=2, height=16, width=16)
    assert decoded == [1, 1, 1] and len(drawn.images) == 3
    assert not model.vae.use_slicing


@pytest.mark.parametrize(("overflows", "dtype", "computed"), [(True, FP16, torch.float32), (False, FP16, FP16), (True, BF16, BF16)])
def test_a_vae_that_overflows_in_fp16_decodes_in_float32_where_autocast_is_in_fp16(overflows, dtype, computed):
    """As on a GPU without bf16, where SDXL's pictures were black."""
    pipeline, found = tiny.build("sdxl"), []
    pipeline.vae.register_to_config(force_upcast=overflows)
    model = tiny.kind("sdxl")(pipeline, None, RunConfig())
    model.place(CPU, dtype)
    model.vae.decoder.register_forward_hook(lambda _, __, output: found.append(output.dtype))
    with torch.no_grad(), torch.autocast("cpu", dtype), untouched(model, CPU):
        drawn = model.pipeline(**model.prompt_arguments(["a cat"] * 2), num_inference_steps=2, height=16, width=16, output_type="pt").images
    assert found == [computed, computed] and drawn.isfinite().all()
    assert "decode" not in vars(model.vae)


def export(done, folder):
    done.results.export(folder)


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture, dtype=float)


def test_the_average_is_diffusers_own_over_the_steps_and_is_what_is_exported(start, tmp_path):  # noqa: F811
    done = start("out", run=SHORT, use_ema=True, ema_decay=0.8)
    reference, params = EMAModel(done.trainer.params.values(), decay=0.8), done.trainer.params
    done.trainer.optimizer.register_step_post_hook(lambda *_: reference.step(params.values()))
    done.run()
    trained = flat(params).clone()
    export(done, tmp_path / "result")
    saved = load_file(tmp_path / "result" / "unet" / "diffusion_pytorch_model.safetensors")
    expected = dict(zip(params, reference.shadow_params, strict=True))
    assert all(torch.equal(saved[name.removeprefix("unet.")], tensor) for name, tensor in expected.items())
    assert torch.equal(flat(params), trained) and not torch.equal(flat(expected), trained)


def test_an_average_begins_with_the_state_that_is_taken_over_and_counts_the_rounds_it_missed():
    params = {"w": torch.nn.Parameter(torch.zeros(3))}
    average = Ema(params, 0.5)
    with average.applied():
        assert params["w"].tolist() == [0, 0, 0]
    with torch.no_grad():
        params["w"].fill_(8.0)  # a newcomer lands in round 40
    average.follow(40)
    with average.applied():
        assert params["w"].tolist() == [8, 8, 8]
    with torch.no_grad():
        params["w"].fill_(0.0)
    average.follow(43)  # decays (1 + n) / (10 + n) of steps 2, 3 and 4, none above 0.5
    with average.applied():
        torch.testing.assert_close(params["w"].detach(), torch.full((3,), 8.0 * (2 / 11) * (3 / 12) * (4 / 13)))
    assert params["w"].tolist() == [0, 0, 0]


def test_metrics_and_pictures_are_in_tensorboards_event_file(start, tmp_path):  # noqa: F811
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = dataclasses.replace(SHORT, total_samples=40)
    done = start("out", run=run, report_to="tensorboard", tracker_project_name="mine", **DRAW | {"validation_steps": 5}).run()
    done.trainer.progress.close()
    events = EventAccumulator(str(tmp_path / "out" / "logs" / "mine")).Reload()
    assert {"loss", "learning_rate", "samples_per_second", "round", "committed", "peers"} <= set(events.Tags()["scalars"])
    (loss,) = events.Scalars("loss")
    assert loss.step == 10 and loss.value == pytest.approx(sum(done.losses[:10]) / 10)
    pictures = events.Images("validation")
    assert [picture.step for picture in pictures] == [5, 10]
    assert struct.unpack(">II", pictures[0].encoded_image_string[16:24]) == (48, 32)


def test_wandb_gets_them_too(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    told = trackers.Trackers("wandb", tmp_path, "mine", {"run_name": "digits", "seed": 1})
    told.log(10, {"loss": 0.5})
    told.picture(10, "validation", Image.new("RGB", (4, 4)))
    told.close()
    (file,) = tmp_path.rglob("*.wandb")
    until(lambda: b"loss" in file.read_bytes())  # its own process writes it
    assert list(tmp_path.rglob("validation*.png"))


def test_a_tracker_that_is_not_installed_is_named_with_the_line_to_install_it(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    for name, line in (("wandb", "pip install wandb"), ("all", "pip install tensorboard wandb")):
        with pytest.raises(UserError, match=f"--report_to {name} needs a library that is not installed. {line}"):
            trackers.wanted(name)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name == "tensorboard" or None)
    assert trackers.wanted("all") == ["tensorboard"] and trackers.wanted("none") == []


def test_an_average_survives_a_stop_to_the_bit(start):  # noqa: F811
    whole = start("whole", run=SHORT, use_ema=True).run()
    start("parts", run=SHORT, use_ema=True, stop_after=3).run()
    second = start("parts", run=SHORT, use_ema=True, resume_from_checkpoint="latest").run()
    for one, other in zip(*(t.trainer.average.state_dict()["average"]["shadow_params"] for t in (whole, second)), strict=True):
        assert torch.equal(one, other)
