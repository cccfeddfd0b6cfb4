"""A real swarm on this machine, and what it learned.

Real handwritten digits, a Stable Diffusion small enough for any laptop, a dataset server, and peers that join it with nothing but
its address, train, and average. At the end the model draws ten pictures of each digit, and a classifier that knows only real digits
reads them.
"""

import argparse
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from swarm.arguments import ArgumentParser
from swarm.errors import ExitCode, UserError, run_program

ROOT = Path(__file__).resolve().parents[2]
MARK = ".quickstart"
STRANGERS = ("sign-flip", "wrong-means")
"""Both destroy the model of a run that is open to everybody."""
HOSTED = "--resolution 16 --learning_rate 1e-3 --target_batch_size 512 --total_samples 4096"
"""What to host the quickstart's own dataset and model with."""
EPILOG = """\
It writes into FOLDER:
  samples.png   what the model draws: ten pictures of each digit
  loss.png      the loss of each peer while the swarm learned
  result.json   the numbers: accuracy, rounds, samples of each peer, memory, versions
and ends with status 0 only if at least 90 % of the digits are read right, the peers held equal models after every round, and
(without --churn) at least 90 % of the rounds were averaged by all peers with a fair share of the samples from each.

The first run makes .venv and installs everything; later runs skip that. PYTHON=/path/to/python3.X chooses the Python (3.10-3.13).
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="scripts/quickstart", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--churn", action="store_true", help="a peer comes late and catches up; then the first one is killed with SIGKILL")
    parser.add_argument(
        "--strangers", action="store_true", help="the run is for members; two attackers come who know a peer's address, and must change nothing"
    )
    parser.add_argument("--peers", type=int, default=2, metavar="N", help="peers at the start [2]")
    parser.add_argument(
        "--total_samples",
        type=int,
        default=32_768,
        metavar="N",
        help="end when N samples are in committed rounds; with far fewer the digits are not read right, and the status is 1 [32,768]",
    )
    parser.add_argument("--target_batch_size", type=int, default=1024, metavar="N", help="samples of the whole swarm per round [1,024]")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of the dataset server; 0: any free one [0]")
    parser.add_argument("--folder", type=Path, default=ROOT / "quickstart", help="where everything goes [quickstart, beside the code]")
    parser.add_argument("--keep", action="store_true", help="keep shards, caches and checkpoints as well")
    args = parser.parse_args(argv)
    least = 1 if args.churn else 2
    if args.peers < least:
        raise UserError(f"--peers is {args.peers}.", fix=f"Use {least} or more: it takes two to average.")
    if not 32 * args.peers <= args.target_batch_size <= args.total_samples:
        raise UserError(
            f"--target_batch_size is {args.target_batch_size}, --total_samples {args.total_samples}.",
            fix=f"A round needs one batch of 32 from each of {args.peers} peers, and the run at least one round.",
        )
    return args


def main(args: argparse.Namespace) -> int:
    folder = clean(args.folder.resolve())
    share_cores()
    quiet_libraries()
    from scripts.demo import results
    from scripts.demo.display import Display
    from scripts.demo.swarm_run import Plan, SwarmRun

    display = Display()
    display.say("1/4  real handwritten digits, and a small Stable Diffusion that knows nothing yet")
    prepare(folder, display.say)
    display.say(f"2/4  a swarm of {args.peers} peers" + (", one more later, and then one less" if args.churn else ""))
    plan = Plan(
        folder, args.peers, args.total_samples, args.target_batch_size, args.port, args.churn, STRANGERS if args.strangers else (),
        settings=recipe(args.total_samples),
    )  # fmt: skip
    with display, SwarmRun(plan, display) as swarm:
        story = swarm.run()
    held = results.survived(swarm.held(), story.killed_peer)
    display.say("3/4  the result draws ten pictures of each digit")
    models = [folder / name / "model" for name in swarm.peers if name != story.killed_peer]
    judged = judge(models[0])
    display.say("4/4  writing samples.png, loss.png, result.json")
    result = judged.pop("result") | results.summarize(held) | churn_story(plan, story, held) | {"models_equal": equal_models(models)}
    result["failures"] = results.shortcomings(result, churn=args.churn, strangers=args.strangers, total_samples=args.total_samples)
    write_files(folder, result, held, **judged)
    if not args.keep:
        tidy(folder, list(swarm.peers))
    conclude(display, folder, result, models[0])
    return ExitCode.FAILED if result["failures"] else ExitCode.OK


def clean(folder: Path) -> Path:
    """An empty folder of our own. Raises UserError rather than delete what an earlier quickstart did not make."""
    try:
        if folder.exists() and any(folder.iterdir()):
            if not (folder / MARK).is_file():
                raise UserError(f"{folder} holds files that are not a quickstart's.", fix="Give an empty or a new --folder.")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    except OSError as error:
        raise UserError(f"Cannot use the folder {folder}: {error.strerror}.", fix="Give another --folder.", code=ExitCode.DISK) from None
    return folder


def share_cores() -> None:
    """Have the threads that compute sleep soon when they wait for each other; before torch is loaded.

    By default GCC's OpenMP has them spin 300,000 turns, also where another program wants their core: with one other busy program on two
    cores, 20 steps of the VAE took 48 s; so, 11 s.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def quiet_libraries() -> None:
    """Keep what others print while loading, and their network look-ups, out of the demo."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error", "BITSANDBYTES_NOWELCOME": "1"}
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def prepare(folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Write `dataset/` (1,500 captioned digits) and `base/` (the model that knows nothing yet); `say` how far that is, minutes on a busy machine."""
    say("     loading torch and diffusers ...")
    from scripts.demo import digits, tiny_model

    digits.write_folder(folder / "dataset")
    ink, _ = digits.load()
    captions = [digits.caption(digit) for digit in range(10)]
    tiny_model.build(folder / "base", digits.pictures(ink[: digits.TRAIN_COUNT]), captions, show=every(40, say))


def every(steps: int, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """To be told each step: says every `steps`th of them, and the last."""
    return lambda step, of: say(f"     teaching its VAE: {step} of {of} steps") if step % steps == 0 or step == of else None


def recipe(total_samples: int) -> dict[str, Any]:
    """A learning rate that rises to 6e-3 and falls to nothing: half of the samples that a constant 1e-3 takes."""
    return {"learning_rate": 6e-3, "lr_scheduler": "cosine", "lr_warmup_samples": min(2048, total_samples // 8)}


def judge(model: Path) -> dict[str, Any]:
    """Pictures drawn by `model`, what the judge reads in each, and the numbers for result.json."""
    import torch

    from scripts.demo import report
    from scripts.demo.digits import Judge

    drawn = report.draw(model, device="cuda" if torch.cuda.is_available() else "cpu")
    the_judge, asked = Judge.from_real_digits(), report.asked_digits()
    read = the_judge.read(drawn)
    numbers = {
        "digit_accuracy": float((read == asked).mean()),
        "accuracy_by_digit": report.accuracy_by_digit(read, asked),
        "pictures": len(drawn),
        "judge_accuracy": round(the_judge.accuracy, 4),
    }
    return {"result": numbers, "drawn": drawn, "read": read, "asked": asked}


def churn_story(plan: Any, story: Any, held: Any) -> dict[str, Any]:
    """Who came and went, and what the machine had to give."""
    from scripts.demo import results

    late = f"peer-{plan.peers + 1}"
    rounds = results.distinct_rounds(held)
    return {
        "churn": plan.churn,
        "joined_at_round": story.joined_at_round,
        "caught_up": results.first_round_with(late, held) is not None,
        "caught_up_in_round": results.first_round_with(late, held),
        "killed_peer": story.killed_peer,
        "killed_at_round": story.killed_at_round,
        "rounds_after_kill": sum(line["round"] > story.killed_at_round for line in rounds) if story.killed_at_round is not None else 0,
        "strangers": story.strangers,
        "strangers_at_round": story.strangers_at_round,
        "rounds_with_strangers": [line["round"] for line in rounds if any(member[0] in story.strangers for member in line["members"])],
        "seconds_training": story.seconds_training,
        "peak_memory_gib": story.peak_memory_gib,
        "processes_left": story.processes_left,
    }


def equal_models(models: Sequence[Path]) -> bool:
    """Whether all these peers wrote the same weights."""
    from swarm.digest import digest_model

    return len({digest_model(model) for model in models}) == 1


def write_files(folder: Path, result: dict[str, Any], held: Any, *, drawn: Any, read: Any, asked: Any) -> None:
    from scripts.demo import report, results

    subtitle = (
        f"drawn by what {result['peers']} peers learned together in {result['rounds']} rounds; "
        f"a judge of real digits reads {result['digit_accuracy']:.0%} right"
    )
    report.grid(drawn, read, asked, title="“a handwritten ...”", subtitle=subtitle).save(folder / "samples.png")
    metrics = {name: results.read_lines(folder / name / "metrics.jsonl") for name in held}
    report.plot_loss(metrics, results.distinct_rounds(held), folder / "loss.png")
    report.write_json(result | {"versions": report.versions(ROOT)}, folder / "result.json")


def tidy(folder: Path, peers: Sequence[str]) -> None:
    """Remove what only a running swarm needs; logs, records and models stay."""
    shutil.rmtree(folder / "server", ignore_errors=True)
    for name in peers:
        for part in (folder / name / "cache", folder / name / "state", *(folder / name).glob("checkpoint-*")):
            shutil.rmtree(part, ignore_errors=True)


def conclude(display: Any, folder: Path, result: dict[str, Any], model: Path) -> None:
    display.say("")
    display.say(
        f"{result['digit_accuracy']:.0%} of {result['pictures']} drawn digits are read right, by a judge that reads "
        f"{result['judge_accuracy']:.0%} of real ones right; {result['rounds']} rounds, {result['samples']:,} samples, "
        f"{result['seconds_training']:.0f} s, at most {result['peak_memory_gib']:.1f} GiB"
    )
    for name, meaning in (("samples.png", "what it draws"), ("loss.png", "how it learned"), ("result.json", "all numbers")):
        display.say(f"  {shown(folder / name)}   {meaning}")
    if result["failures"]:
        display.say("\nNOT as it should be:")
        for failure in result["failures"]:
            display.say(f"  {failure}")
        display.say(f"  The programs' logs are in {shown(folder / 'logs')}.")
        return
    display.say("\nTry next:")
    display.say(f"  source {shown(ROOT / '.venv' / 'bin' / 'activate')}     in each new terminal, before what begins with dd-")
    display.say(f'  dd-generate --model {shown(model)} --prompt "a handwritten seven" --guidance 3 --out pictures/')
    if not result["churn"]:
        display.say("  ./scripts/quickstart --churn     a peer comes late, another is killed")
        display.say("  ./scripts/quickstart --strangers two attackers come to a run for members")
    display.say("  Host a run of this dataset and model yourself, then join it from another terminal:")
    display.say(f"  dd-datasetserver --dataset {shown(folder / 'dataset')} --model {shown(folder / 'base')} {HOSTED}")
    display.say("  dd-peer --datasetserver http://127.0.0.1:9090 --output_dir out")
    display.say("  README.md                        host a run of your own pictures, or join one")


def shown(path: Path) -> str:
    """The path as a person in the current folder would type it, where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def cli(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    return run_program(lambda: main(parse(argv)))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
