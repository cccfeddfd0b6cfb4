"""The peer's entry: `torchrun peer/finetune.py ...`, `mpirun ... python peer/finetune.py ...`, or `python peer/finetune.py ...`."""

import dataclasses
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

# Started as a script, Python puts this file's folder first on sys.path, where our modules' names would stand for top-level ones.
# The repository root takes its place, so that the launch works from any folder and without an installation.
_ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path and os.path.realpath(sys.path[0] or ".") == os.path.join(_ROOT, "peer"):
    sys.path[0] = _ROOT

from peer.config import PeerConfig  # noqa: E402
from peer.launch.command_line import parse  # noqa: E402
from peer.launch.launcher import Rank  # noqa: E402
from peer.launch.resolving import resolve_run  # noqa: E402
from peer.machine.allocator import keep_freed_memory  # noqa: E402
from peer.results.output_folder import link_result  # noqa: E402
from swarm.errors import ExitCode, UserError, circumstances, run_program, tell_error  # noqa: E402
from swarm.life import Life  # noqa: E402
from swarm.lifeline import die_with_parent  # noqa: E402
from swarm.logs import setup_logging  # noqa: E402
from swarm.subsets import folders_of  # noqa: E402

if TYPE_CHECKING:
    from peer.loop.train import Trainer
    from peer.results.writer import Results

log = logging.getLogger("peer.finetune")


def main(argv: Sequence[str]) -> int:
    if "--assist" in argv and {"--help", "-h"} & set(argv):
        from peer.assist import HELP

        print(HELP, end="")
        return ExitCode.OK
    peer, given = parse(argv)
    if peer.hub_token:  # for gated models and datasets too, which libraries fetch for us
        os.environ["HF_TOKEN"] = peer.hub_token
    if peer.dry_run:
        print(json.dumps({"run": dataclasses.asdict(resolve_run(peer.unmeasured, given).run), "peer": peer.shown()}, indent=2))
        return ExitCode.OK
    _die_with_launcher()
    if peer.assist:
        from peer.assist import assist

        return assist(peer, lambda: resolve_run(peer, given), given)
    return _train(peer, given)


def _train(peer: PeerConfig, given: dict) -> int:
    from peer.launch.stopping import Stop
    from peer.machine.device import RankGroup, choose_device, describe, set_threads

    rank = Rank.from_environment()
    setup_logging(debug=peer.debug, name=Path(peer.output_dir).name if peer.swarming else "", log_format=peer.log_format)
    if rank.index:
        logging.getLogger("peer").setLevel(logging.ERROR)
    alive = Life.of_process()
    alive("starting")
    asked = Stop().listen()
    stop = alive.while_asked(asked)
    if rank.index == 0:
        _check_pictures(peer)
    device = choose_device(peer.device, rank)
    threads = set_threads(peer.num_threads, rank, bind=device.type == "cpu")
    if device.type == "cpu" and (advice := keep_freed_memory()):
        log.info("a CPU trains faster with tcmalloc: %s", advice)
    with ExitStack() as closing:
        group = RankGroup(rank, device)
        closing.callback(group.close)
        begins = asked.before_it_begins if rank.world == 1 else nullcontext  # where one of several ranks ended, the others would fail
        with begins():
            joined = group.broadcast_object(resolve_run(peer.unmeasured, given) if group.is_main else None)
        log.info("%s: loading %s", f"the run '{joined.run.run_name}'" if peer.swarming else "training alone", joined.run.model)
        from peer.launch.fitted import advised, fitted

        peer = fitted(peer, joined, given, device, rank)
        repository = _prepare_hub(peer) if group.is_main else ""
        with advised(peer, joined, given, device) if rank.world == 1 else nullcontext():
            if peer.train_batch_size is None:
                from peer.launch.measured_batch import with_largest

                peer = with_largest(peer, joined, given, device, rank, stop)
                joined = joined if peer.swarming else resolve_run(peer, given)  # alone, a step's samples are in the run
            from peer.launch.launch import Launch
            from peer.wiring import assemble

            launch = Launch(joined=joined, peer=peer, given=given, group=group, device=device, stopping=stop, closing=closing)
            with begins():
                trainer, results = assemble(launch)
            about = f"method={joined.run.method} learning_rate={joined.run.learning_rate:g}"
            machine = describe(rank, trainer.precision, threads, trainer.params, trainer.model.parts)
            log.info("training %s %s %s", joined.run.run_name, about, machine)
            trainer.alive = alive
            gc.collect()
            gc.freeze()  # all that was loaded stays: to look through it once more takes 0.33 s, every few hundred steps
            ended = trainer.run()
        if group.is_main and trainer.has_learned:
            alive("exporting")
            folder = _export(peer, trainer, results, ended)
        elif group.is_main:
            log.warning("nothing is exported: this peer never had a state of the run, and the base model alone is not a result")
        group.barrier()
        if repository and trainer.has_learned:
            from peer.results.hub import by_hand, push

            if ended:
                alive("uploading")
                push(folder, repository, peer.hub_token)
            else:
                log.warning("not uploaded, because training was stopped before its end; to upload it: %s", by_hand(folder, repository))
    return ExitCode.OK


def _export(peer: PeerConfig, trainer: "Trainer", results: "Results", ended: bool) -> Path:
    """The folder of the result, which is written."""
    folder = Path(peer.output_dir) / "model"
    results.export(folder)
    link_result(folder.parent)
    again = "the same command" if peer.swarming else "the same command with --resume_from_checkpoint latest"
    how = "finished" if ended else f"stopped before the end ({again} goes on)"
    log.info("%s samples=%d round=%d result=%s", how, trainer.trained, trainer.sync.round, folder)
    return folder


def _check_pictures(peer: PeerConfig) -> None:
    """Raises UserError where the pictures are not there, before a model is fetched and loaded for them. Rank 0's: others need not have them."""
    for folder in folders_of(Path(peer.train_data_dir)) if peer.train_data_dir else ():
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}.", fix="Check --train_data_dir.")


def _prepare_hub(peer: PeerConfig) -> str:
    """The repository for the result, which we may write to; '' when it stays here. Raises UserError before a day's training is done for it."""
    if not peer.push_to_hub:
        return ""
    from peer.results.hub import prepare

    return prepare(peer.hub_model_id or Path(peer.output_dir).resolve().name, peer.hub_token)


def _die_with_launcher() -> None:
    """As one of several ranks: stop cleanly when what started us is killed. torchrun starts us in a session of our own."""
    if "TORCHELASTIC_RUN_ID" in os.environ or Rank.from_environment().world > 1:
        die_with_parent(signal.SIGTERM)


def cli() -> int:
    argv = sys.argv[1:]
    debug = "--debug" in argv
    try:
        rank = Rank.from_environment()
    except UserError as error:
        tell_error(error)
        return error.code
    if rank.index == 0 or debug:
        return run_program(lambda: main(argv), debug=debug)
    try:  # one line of error for each host, not one for each rank
        with circumstances():
            return main(argv)
    except UserError as error:
        if rank.local == 0:
            tell_error(error, f"{socket.gethostname()}, rank {rank.index}: ")
        return error.code


if __name__ == "__main__":
    sys.exit(cli())
