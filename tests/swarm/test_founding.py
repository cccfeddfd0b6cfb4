"""What no peer could train is refused where the run is founded, without torch, and by the names that the trainer has."""

import subprocess
import sys

import pytest

from swarm import choices
from swarm.errors import UserError
from swarm.founding import check_family, check_founding
from swarm.options import build
from swarm.run_config import RunConfig
from tests.conftest import ROOT
from tests.sources import parts


@pytest.mark.parametrize(("room", "names"), [("models", choices.FAMILIES), ("methods", choices.METHODS), ("sync", choices.SYNCS)])
def test_the_names_are_those_of_the_modules(room, names):
    assert parts(room) == sorted(names)


def test_the_schedules_are_those_that_diffusers_has_for_one_rate():
    from diffusers.optimization import SchedulerType

    assert set(choices.LR_SCHEDULERS) == {kind.value for kind in SchedulerType} - {"piecewise_constant"}


@pytest.mark.parametrize(
    ("option", "wrong", "right"),
    [
        ("method", "lorra", "lora"),
        ("sync", "dilocco", "diloco"),
        ("family", "sdlx", "sdxl"),
        ("lr_scheduler", "cosin", "cosine"),
        ("wire", "int44", "int4"),
        ("optimizer", "Prodigy", "prodigy"),
        ("prediction_type", "v_predict", "v_prediction"),
    ],
)
def test_a_misspelt_name_is_one_line_with_the_right_one(option, wrong, right):
    with pytest.raises(UserError, match=rf"^{option} is '{wrong}'\. Did you mean '{right}'\? Use one of .*{right}"):
        build(RunConfig, {option: wrong})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr_scheduler": "cosine"}, "lr_scheduler 'cosine' must know where the run ends. Give --max_train_steps or --total_samples."),
        ({"num_buckets": 4, "bucket_side_min": 640}, "bucket_side_min is 640 and bucket_side_max 768, but resolution 512 must lie between"),
        ({"family": "flux", "snr_gamma": 5.0}, "snr_gamma is 5.0, but flux is trained by flow matching"),
        ({"family": "flux", "clip_skip": 1}, "clip_skip is 1, but flux reads captions with T5"),
        ({"sync": "gradients", "optimizer": "came"}, "optimizer is came, but with --sync gradients all peers take one step together, adamw's, with one"),
        (
            {"sync": "gradients", "train_text_encoder": True, "text_encoder_lr": 1e-5},
            "text_encoder_lr is 1e-05, but with --sync gradients all peers take one step together, adamw's, with one rate. Remove --text",
        ),
        ({"sync": "diloco", "optimizer": "adamw_schedulefree"}, "optimizer is adamw_schedulefree, whose weights are an average, but --sync diloco would"),
        ({"optimizer": "adamw_schedulefree", "lr_scheduler": "linear", "total_samples": 9}, "lr_scheduler is linear, but schedule-free AdamW averages"),
        ({"optimizer": "adamw_schedulefree", "adam_beta1": 0.0}, "adam_beta1 is 0, and schedule-free AdamW"),
        ({"optimizer": "prodigy", "learning_rate": 1e-4}, "learning_rate is 0.0001, but Prodigy finds the rate itself"),
        ({"optimizer": "prodigy", "train_text_encoder": True, "text_encoder_lr": 1e-5}, "text_encoder_lr is 1e-05, but Prodigy finds one rate"),
        ({"optimizer": "prodigy"}, "optimizer is prodigy, and clip_members 20: a newcomer's Prodigy begins with a rate of nearly 0"),
        ({"optimizer": "muon", "placeholder_token": "<x>", "initializer_token": "x"}, "optimizer is muon, which is for matrices"),
        ({"optimizer": "lion8bit", "adam_beta2": 0.9}, "adam_beta2 is 0.9, but has no effect without --optimizer auto or adamw or "),
        (
            {"family": "sdxl", "guidance_scale": 1.0},
            "guidance_scale is 1.0, but sdxl has no such thing. Remove --guidance_scale",
        ),
    ],
)
def test_what_every_peer_would_refuse_is_refused_before(values, message):
    with pytest.raises(UserError) as caught:
        check_founding(RunConfig(**values))
    assert str(caught.value).startswith(message)


def test_what_peers_can_train_is_not_refused():
    for values in (
        {"lr_scheduler": "cosine", "total_samples": 9, "lr_min_ratio": 0.1},
        {"sync": "gradients", "optimizer": "adamw"},
        {"optimizer": "adamw_schedulefree", "lr_scheduler": "constant_with_warmup", "lr_warmup_samples": 9},
        {"optimizer": "prodigy", "learning_rate": 0.5, "sync": "diloco", "clip_members": 0.0},
        {"optimizer": "prodigy", "sync": "none"},
        {"bucket_side_min": 640},
        {"family": "flux", "guidance_scale": 1.0},
    ):
        check_founding(RunConfig(**values))
    check_family("a family of one's own", RunConfig(snr_gamma=5.0))


def test_all_this_needs_no_torch():
    program = (
        "import sys, swarm.founding, datasetserver.founding; sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=240).returncode == 0
