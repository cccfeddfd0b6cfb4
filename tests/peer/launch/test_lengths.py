"""Lengths in steps, other trainers' flags, and files of options: what a command line comes to."""

import dataclasses
import json
import logging
import shlex

import pytest

from peer.config import PeerConfig
from peer.finetune import main
from peer.launch import lengths, retired_flags
from peer.launch.command_line import parse
from peer.launch.resolving import resolve_run
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.conftest import ROOT

ALONE = ("--model", "x", "--train_data_dir", "y")


@pytest.fixture
def alone(tiny_model):
    def resolve(*argv):
        return resolve_run(*parse(["--model", str(tiny_model), "--train_data_dir", "y", *argv])).run

    return resolve


def test_alone_a_step_is_one_of_the_optimizer_over_all_ranks_and_what_became_of_steps_is_said(alone, monkeypatch, caplog):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    caplog.set_level(logging.INFO)
    run = alone("--max_train_steps", "50", "--lr_warmup_steps", "5", "--train_batch_size", "3", "--gradient_accumulation_steps", "4")
    assert (run.total_samples, run.lr_warmup_samples, run.target_batch_size) == (1200, 120, 24)
    (line,) = [record.getMessage() for record in caplog.records if "one step is" in record.getMessage()]
    assert line == "one step is 24 samples: total_samples=1200 lr_warmup_samples=120"


@pytest.mark.parametrize(("total_samples", "steps"), [(60, 15), (61, 16), (60000, 100), (0, 100)])
def test_alone_pictures_are_drawn_every_100_steps_and_at_the_end_of_a_shorter_run(total_samples, steps):
    peer = PeerConfig(validation_prompts=("a red square",), train_batch_size=2)
    run = RunConfig(total_samples=total_samples, validation_split=0.1)
    every = lengths.Every.of(peer, run, world=2)
    assert (every.validation, every.held_out) == (steps, steps)


def test_the_seeds_learning_rate_is_scaled_by_all_of_their_processes(alone, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "16")
    assert alone("--learning_rate=2.0e-03", "--scale_lr", "--train_batch_size=1").learning_rate == pytest.approx(3.2e-2)


def test_in_a_swarm_a_step_is_a_round_and_the_rate_is_scaled_once_by_its_founder():
    said = {"learning_rate": 1e-6, "target_batch_size": 512}
    peer = PeerConfig(found=True, max_train_steps=10, lr_warmup_steps=0.25, scale_lr=True, train_batch_size=4)
    run = RunConfig(**lengths.of_founder(said, peer))
    assert (run.total_samples, run.lr_warmup_samples, run.learning_rate) == (5120, 1280, 1e-6 * 512)
    joiner = PeerConfig(peers=("x",), max_train_steps=10, lr_warmup_steps=0.25, scale_lr=True, train_batch_size=1)
    run.refuse_differences(lengths.of_joiner(said, joiner, run))
    run.refuse_differences(lengths.of_joiner({"learning_rate": run.learning_rate}, PeerConfig(peers=("x",), lr_warmup_steps=0.25), run))
    for wrong in ({"max_train_steps": 11}, {"lr_warmup_steps": 3}):
        with pytest.raises(UserError, match="but this peer was started with"):
            run.refuse_differences(lengths.of_joiner({}, PeerConfig(peers=("x",), **wrong), run))
    with pytest.raises(UserError, match=r"has learning_rate = 0\.000512, but this peer was started with 0\.262144"):
        run.refuse_differences(lengths.of_joiner({"learning_rate": run.learning_rate}, joiner, run))


def test_a_share_of_a_run_without_end_is_refused_in_a_swarm():
    with pytest.raises(UserError, match=r"is a share of the run's length, and this run has no end\. Give whole steps"):
        lengths.of_founder({}, PeerConfig(found=True, lr_warmup_steps=0.05))


def test_one_length_in_two_units_is_refused_but_flags_overrule_a_file_in_either(tmp_path):
    with pytest.raises(UserError, match="--max_train_steps and --total_samples set the same thing in two units"):
        parse([*ALONE, "--max_train_steps", "5", "--total_samples", "5"])
    file = tmp_path / "run.toml"
    file.write_text("max_train_steps = 5\nlr_warmup_samples = 7\n")
    peer, given = parse([*ALONE, "--config", str(file), "--total_samples", "9", "--lr_warmup_steps", "2"])
    assert (peer.max_train_steps, given["total_samples"], peer.lr_warmup_steps, "lr_warmup_samples" in given) == (0, 9, 2.0, False)


def test_a_swarm_counts_no_epochs():
    assert parse([*ALONE, "--epochs", "3"])[0].num_train_epochs == 3
    with pytest.raises(UserError, match="A swarm does not count epochs"):
        parse(["--found", "--model", "x", "--epochs", "3"])


@pytest.mark.parametrize(
    ("argv", "where", "expected"),
    [
        (["--use_8bit_adam"], "run", {"optimizer": "adamw8bit"}),
        (["--use_8bit_adam=False"], "run", {"optimizer": "auto"}),
        (["--wandb=True"], "peer", {"report_to": "wandb"}),
        (["--use_ema=True", "--image_log_steps", "7"], "peer", {"use_ema": True, "validation_steps": 7}),
        (
            ["--image_log_amount", "2", "--image_log_inference_steps", "9"],
            "peer",
            {"num_validation_images": 2, "validation_inference_steps": 9},
        ),
        (["--fp16=True"], "peer", {"mixed_precision": "fp16"}),
        (["--lr_scheduler_warmup", "0.05"], "peer", {"lr_warmup_steps": 0.05}),
        (["--wantedimages=300"], "peer", {"lease_samples": 300}),
        (["--save_steps", "500"], "peer", {"save_steps": 500}),
    ],
)
def test_other_trainers_flags_are_understood(argv, where, expected):
    peer, given = parse([*ALONE, *argv])
    found = given if where == "run" else vars(peer)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("name", sorted(retired_flags.GONE))
def test_a_flag_without_meaning_is_answered_with_what_to_do(name, tmp_path):
    (tmp_path / "run.toml").write_text(f"{name} = true\n")
    with pytest.raises(UserError, match=f"--{name} has no meaning in this trainer"):
        parse([*ALONE, "--config", str(tmp_path / "run.toml")])
    with pytest.raises(UserError, match=f"--{name} has no meaning in this trainer"):
        parse([*ALONE, f"--{name}=True"])
    with pytest.raises(UserError, match=r"Unknown flag --\w+_nonsense"):
        parse([*ALONE, f"--{name}_nonsense"])


def test_no_flag_is_both_gone_and_there():
    for cls in (RunConfig, PeerConfig):
        names = {
            name for field in dataclasses.fields(cls) for name in (field.name, *field.metadata["aliases"], *field.metadata["switches"])
        }
        assert not names & retired_flags.GONE.keys()


def test_a_file_takes_the_names_of_all_flags_and_names_the_nearest_for_a_mistake(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('lr = 1e-3\nepochs = 2\ndataset = "z"\nuse_8bit_adam = true\n')
    peer, given = parse(["--config", str(file), "--train_data_dir", "y"])
    assert (peer.num_train_epochs, peer.train_data_dir) == (2, "y") and given == {"learning_rate": 1e-3, "optimizer": "adamw8bit"}
    for line, message in (
        ("train_batch_sise = 1", "no option 'train_batch_sise'. Did you mean 'train_batch_size'"),
        ("use_8bit_adam = 1", "use_8bit_adam is 1. Use true or false"),
        ("lr = 1e-3\nlearning_rate = 1e-4", "'learning_rate' is set under two of its names"),
    ):
        file.write_text(line)
        with pytest.raises(UserError, match=message):
            parse(["--config", str(file)])


INVERSION = (
    '--pretrained_model_name_or_path=MODEL --train_data_dir=DATA --learnable_property="object" --placeholder_token="<dicoo>" '
    '--initializer_token="toy" --resolution=512 --train_batch_size=1 --seed=7 --gradient_accumulation_steps=1 --max_train_steps={steps} '
    '--learning_rate=2.0e-03 --scale_lr --lr_scheduler="constant" --lr_warmup_steps={warmup} --output_dir=./textual_inversion_output '
    "--mixed_precision bf16 --save_as_full_pipeline"
)
XLA = (
    "--pretrained_model_name_or_path=MODEL --dataset_name=lambdalabs/naruto-blip-captions --resolution=1024 --center_crop --random_flip "
    "--train_batch_size=4  --max_train_steps=50 --learning_rate=1e-06 --mixed_precision=bf16 --profile_duration=80000 --output_dir=OUT "
    "--dataloader_num_workers=4 --loader_prefetch_size=4 --device_prefetch_size=4"
)


@pytest.mark.parametrize(("ranks", "steps", "warmup"), [(16, 200, 0), (3, 30, 3), (3, 30, 0)])
def test_the_textual_inversions_of_intel_aws_and_azure_are_what_they_were(tiny_model, monkeypatch, capsys, ranks, steps, warmup):
    """Their lines after the script's name, at rank 0 of their mpirun; only the folders are filled in."""
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", str(ranks))
    line = INVERSION.format(steps=steps, warmup=warmup).replace("MODEL", str(tiny_model)).replace("DATA", "dicoo")
    assert main([*shlex.split(line), "--dry_run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    run, peer = printed["run"], printed["peer"]
    assert (run["method"], run["placeholder_token"], run["initializer_token"]) == ("textual_inversion", "<dicoo>", "toy")
    assert run["learning_rate"] == pytest.approx(2e-3 * ranks) and run["total_samples"] == steps * ranks
    assert run["lr_warmup_samples"] == warmup * ranks and run["target_batch_size"] == ranks and run["seed"] == 7
    assert peer["save_as_full_pipeline"] and peer["mixed_precision"] == "bf16"


def test_the_flux_run_of_the_xla_page_is_understood(tiny_model, capsys):
    words = shlex.split(XLA.replace("MODEL", str(tiny_model)))
    assert main([*words, "--dry_run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["run"]["total_samples"] == 200 and printed["peer"]["dataset_name"] == "lambdalabs/naruto-blip-captions"
    sizes = [printed["peer"][name] for name in ("profile_duration", "loader_prefetch_size", "device_prefetch_size")]
    assert sizes == [80000, 4, 4]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_loads(path):
    peer, given = parse(["--config", str(path)])
    run = RunConfig(**lengths.of_founder(given, peer))
    assert run.model and run.total_samples and (peer.swarming or peer.own_data)
