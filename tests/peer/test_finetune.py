"""The programs as people start them: real processes, real signals, several ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import MappingProxyType

import psutil
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from peer.finetune import main
from peer.launch.command_line import parse
from peer.launch.resolving import resolve_run
from peer.launch.starting_model import load_model
from peer.results.checkpoint import Checkpoints
from peer.watchdog.trainer_process import _places
from swarm.digest import digest_model
from swarm.errors import ExitCode, UserError, run_program
from swarm.run_config import RunConfig
from tests import tiny
from tests.conftest import ROOT
from tests.datasetserver.hosting import until
from tests.looking import alive
from tests.peer.samples.test_buckets import mixed_pictures  # noqa: F401
from tests.warm import Warm

pytestmark = pytest.mark.slow
SCRIPT = str(ROOT / "peer" / "finetune.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", SCRIPT]


def start(*argv, cwd="/", program=(sys.executable, SCRIPT), **options):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*program, *map(str, argv)]
    return subprocess.Popen(command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process, seconds=180):
    """Exit code, stdout and stderr; a process that does not end in time is killed and the test fails."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def forked(*argv, log, cwd="/", program=(SCRIPT,), env=MappingProxyType({})):
    """As `start`, with everything imported, which takes ten seconds of a core; its stdout and stderr are in `log`."""
    return Warm([*program, *map(str, argv)], cwd, log, env=env)


def ended(process, log, seconds=180):
    """Exit code of a forked program, and what it said."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    return code, log.read_text()


@pytest.fixture
def flags(tiny_model, pictures, tmp_path):
    return ["--train_data_dir", pictures, "--model", tiny_model, "--output_dir", tmp_path / "out", "--resolution", 16, "--num_threads", 1]


def params(folder):
    _, state = Checkpoints(folder, keep=2).load("latest")
    return torch.cat([tensor.flatten() for tensor in state["params"].values()])


def test_help_is_answered_without_torch():
    code = f"import sys, runpy; sys.argv = ['x', '--help']\ntry: runpy.run_path({SCRIPT!r}, run_name='__main__')\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "--train_data_dir" in done.stdout and done.stdout.rstrip().endswith("False")


def test_the_originals_flags_train_from_any_folder_and_the_result_draws(tiny_model, pictures, tmp_path):
    flags = ["--dataset", pictures, "--model", tiny_model, "--run_name", "mine", "--lr", 1e-3, "--epochs", 2, "--batch_size", 4]
    log = tmp_path / "log"
    code, err = ended(forked(*flags, "--output_dir", tmp_path / "out", "--resolution", 16, log=log), log)
    assert code == 0, err
    assert "training mine" in err and "autocast=no: " in err and "Traceback" not in err and "Warning" not in err
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "out" / "model")
    assert digest_model(tmp_path / "out" / "model") != digest_model(tiny_model)
    assert pipeline.unet.config.sample_size == 8

    draw = ["--model", tmp_path / "out", "--prompt", "a red square!", "--num_images", "3", "--steps", "2"]
    draw += ["--out", tmp_path / "drawn", "--batch_size", 2]
    code, out = ended(forked(*draw, log=tmp_path / "drawing", cwd=ROOT, program=["-m", "peer.generate"]), tmp_path / "drawing")
    assert code == 0, out
    paths = sorted((tmp_path / "drawn").iterdir())
    assert [path.name for path in paths] == ["a-red-square-000.png", "a-red-square-001.png", "a-red-square-002.png"]
    assert [line for line in out.splitlines() if line.endswith(".png")] == list(map(str, paths))
    for path in paths:
        with Image.open(path) as picture:
            assert picture.size == (16, 16) and picture.format == "PNG"


def test_dry_run_prints_both_configurations_and_starts_nothing(flags, tmp_path):
    (tmp_path / "run.toml").write_text('learning_rate = 1e-3\nrun_name = "from the file"\n')
    code, out, _ = finish(start(*flags, "--config", tmp_path / "run.toml", "--lr", 2e-3, "--dry_run"))
    printed = json.loads(out)
    assert code == 0 and printed["run"]["run_name"] == "from the file" and printed["run"]["learning_rate"] == 2e-3
    assert printed["run"]["sync"] == "none" and printed["peer"]["num_threads"] == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--train_batchsize", "4"], r"Unknown flag --train_batchsize\. Did you mean '--train_batch_size'\?"),
        (["--train_data_dir", "/nowhere"], r"There is no folder /nowhere\."),
        (["--train_data_dir", "/nowhere", "--model", "/no/model"], r"There is no folder /nowhere\. Check --train_data_dir\."),
        (["--model", "/nowhere"], r"There is no model /nowhere\."),
        (["--resolution", "18"], r"resolution is 18, but this model needs a multiple of 4\. Use 16\."),
        (["--sync", "parameters"], r"--sync parameters needs a swarm"),
        (["--method", "fll"], r"method is 'fll'\. Did you mean 'full'\?"),
        (["--device", "cuda:7"], r"asks for GPU 7, but this machine has|--device cuda:7 needs a GPU"),
        (["--output_dir", "/proc/out"], r"/proc/out cannot be made"),
    ],
)
def test_a_mistake_is_answered_with_one_line_that_says_what_to_do(flags, change, message, capsys):
    code = run_program(lambda: main([*map(str, flags), *change]))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == (ExitCode.DISK if "--output_dir" in change else ExitCode.CONFIG) and not out and "Traceback" not in err
    assert len(lines) == 1 and re.search(message, lines[0]), err


def test_the_program_itself_ends_with_the_line_and_the_code(flags):
    code, out, err = finish(start(*flags, "--sync", "parameters"))
    assert code == ExitCode.CONFIG and not out and "Traceback" not in err and "\nerror: --sync parameters needs a swarm" in f"\n{err}", err


def test_a_model_elsewhere_must_have_the_runs_weights(tiny_model, tmp_path):
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    other = tiny.write_model(tmp_path / "other", seed=1)
    run = RunConfig(model="owner/unreachable", model_digest=digest_model(tiny_model))
    assert load_model(run, {"model": str(copy)}, torch.device("cpu")).parts["unet"].config.sample_size == 8
    with pytest.raises(UserError, match="is not the base model of the run"):
        load_model(run, {"model": str(other)}, torch.device("cpu"))


def test_without_model_or_data_the_missing_flag_is_named():
    for argv, missing in ((["--train_data_dir", "x"], "--model"), (["--model", "x"], "--train_data_dir")):
        with pytest.raises(UserError, match=missing):
            resolve_run(*parse(argv))


def two_ranks(*flags, logs, cwds=("/", "/")):
    """Two forked programs that were told what torchrun tells its ranks."""
    return [forked(*flags, log=log, cwd=cwd, env=env) for log, cwd, env in zip(logs, cwds, _places(2), strict=True)]


def test_two_ranks_train_as_one_does_with_the_whole_batch(flags, mixed_pictures, tmp_path):  # noqa: F811
    """Two ranks with batches of 2 and one rank with two micro-batches of 2 do the same steps, on the same noise; also of buckets, caches, and
    a class. Its pictures are in rank 0's folder alone: rank 1, which may be another machine, has no such folder to look into."""
    common = ["--total_samples", 40, "--lr", 1e-3, "--batch_size", 2, "--target_batch_size", 8, "--num_buckets", 5]
    common += ["--cache_latents", "--cache_text", "--cache_dir", tmp_path / "kept", "--validation_inference_steps", 1]
    common += ["--with_prior_preservation", "--class_prompt", "a red square", "--num_class_images", 5]
    cwds = [tmp_path / "cwd" / str(rank) for rank in range(2)]
    for cwd in cwds:
        cwd.mkdir(parents=True)
    logs = [tmp_path / f"{cwd.name}.log" for cwd in cwds]
    ranks = two_ranks(*flags, *common, "--class_data_dir", "dogs", "--output_dir", tmp_path / "two", logs=logs, cwds=cwds)
    codes, said = zip(*(ended(rank, log) for rank, log in zip(ranks, logs, strict=True)), strict=True)
    assert codes == (0, 0), said
    assert "".join(said).count("finished samples=40") == 1 and "ranks=2" in said[0]
    assert not list((cwds[1] / "dogs").glob("*"))
    drawn = cwds[0] / "dogs"
    assert sorted(path.name for path in drawn.iterdir()) == [*(f"class-{number:05}.png" for number in range(5)), "class.json"]
    log, alone = tmp_path / "log", ["--class_data_dir", drawn, "--output_dir", tmp_path / "one", "--gradient_accumulation_steps", 2]
    code, said = ended(forked(*flags, *common, *alone, log=log), log)
    assert code == 0, said
    torch.testing.assert_close(params(tmp_path / "two"), params(tmp_path / "one"), rtol=1e-5, atol=1e-5)


def training(output):
    """Whether ten steps were made, which is when metrics.jsonl gets its first line."""
    return (output / "metrics.jsonl").exists() and (output / "metrics.jsonl").stat().st_size > 0


ASSEMBLES = f"""
import sys, time
from peer import finetune, wiring
wiring.assemble = lambda launch: print("assembling", flush=True) or time.sleep(1000)
sys.argv[0] = {SCRIPT!r}
sys.exit(finetune.cli())
"""


def test_ctrl_c_while_a_model_is_loaded_ends_a_peer_at_once(flags, tmp_path):
    log = tmp_path / "log"
    process = forked(*flags, log=log, program=["-c", ASSEMBLES])
    until(lambda: "assembling" in log.read_text() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    code, said = ended(process, log, 60)
    assert code == 0 and said.endswith("stopped before it began.\n"), said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_training_cleanly_with_a_checkpoint_and_a_result(flags, tmp_path, number):
    log = tmp_path / "log"
    process = forked(*flags, "--total_samples", 10**9, "--dataloader_num_workers", 1, log=log)
    until(lambda: training(tmp_path / "out") or process.poll() is not None)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert_ended_cleanly(*ended(process, log), tmp_path / "out", family)


def test_dd_peer_passes_sigterm_on_and_training_ends_as_cleanly(flags, tmp_path):
    """It passes either on as SIGTERM; that it hears SIGINT is said in test_assist.py."""
    log = tmp_path / "log"
    process = Warm(["-m", "peer.supervise", *flags, "--total_samples", 10**9, "--dataloader_num_workers", 1], ROOT, log, forks=True)
    until(lambda: training(tmp_path / "out") or process.poll() is not None)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process, log)
    assert_ended_cleanly(code, said, tmp_path / "out", family)
    assert "Warning" not in said


def assert_ended_cleanly(code, said, out, family):
    assert code == 0, said
    assert "stopped before the end (the same command with --resume_from_checkpoint latest goes on) samples=" in said
    assert "Traceback" not in said and "finished" not in said
    assert Checkpoints(out, keep=2).load("latest") and (out / "model" / "model_index.json").is_file()
    assert family
    until(lambda: not any(map(alive, family)))


def test_no_process_outlives_a_supervisor_or_a_launcher_that_was_killed(flags, tmp_path):
    flags += ["--total_samples", 10**9, "--dataloader_num_workers", 1, "--output_dir"]
    supervised, launched = tmp_path / "supervised", tmp_path / "launched"
    kill_alone(Warm(["-m", "peer.supervise", *flags, supervised], ROOT, tmp_path / "log", forks=True), supervised)
    torchrun = start(*flags, launched, program=TORCHRUN, cwd=ROOT)
    kill_alone(torchrun, launched)
    torchrun.communicate()


def kill_alone(process, out):
    until(lambda: training(out) or process.poll() is not None)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.kill()
    process.wait()
    until(lambda: not any(map(alive, family)))
    assert Checkpoints(out, keep=2).load("latest")


def test_when_one_rank_dies_the_launch_ends_and_says_why(flags, tmp_path):
    """Torchrun, which tests/test_swarm.py starts, asks the others to end as soon as one has died."""
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    first, second = two_ranks(*flags, "--total_samples", 10**9, logs=logs)
    until(lambda: training(tmp_path / "out") or first.poll() is not None)
    second.send_signal(signal.SIGKILL)
    second.wait(60)
    first.send_signal(signal.SIGTERM)
    code, said = ended(first, logs[0])
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert code != 0 and len(lines) == 1 and "Another rank of this launch ended" in lines[0], said
