"""`dd-peer`: keeps a trainer alive. Its flags are the trainer's; docs/operate.md says what it does when."""

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from peer.config import PeerConfig
from peer.launch.command_line import parse
from peer.launch.launcher import Rank
from peer.launch.resolving import no_model
from peer.launch.stopping import say, wishes
from peer.volunteer.commands import own_command
from peer.watchdog.log_file import LogFile
from peer.watchdog.policy import End, Policy, Verdict, smaller
from peer.watchdog.room import as_flags, forget_room, next_way, told_batch
from peer.watchdog.saved import Saved
from peer.watchdog.trainer_process import PROGRAM, Processes
from peer.watchdog.vitals import OutOfMemory, Vitals, Watchdog
from swarm.errors import ExitCode, UserError, run_program
from swarm.files import lock_folder
from swarm.life import last_sign
from swarm.lifeline import adopt_orphans
from swarm.logs import setup_logging

log = logging.getLogger("peer.supervise")  # __name__ may be "__main__", whose lines nobody sees

_FOLDER = "supervised"
_TICK_SECONDS, _LOOK_SECONDS = 0.2, 1.0
_SAME_WISH_SECONDS, _LAST_SECONDS = 1.0, 5.0
_ANSWERED_AT_ONCE = {"--help", "-h", "--version", "--dry_run"}
"""What the trainer answers and ends: nothing to keep alive."""


def main(argv: Sequence[str], program: Path = PROGRAM) -> int:
    """Keep the trainer alive until its run is done, someone asks to stop, or a restart can help no more; returns the exit code for that."""
    if command := own_command(argv):
        return command()
    if _ANSWERED_AT_ONCE & {flag.split("=")[0] for flag in argv}:
        os.execv(sys.executable, [sys.executable, str(program), *argv])
    if not argv:  # before a folder is made for it
        raise no_model()
    peer, _ = parse(argv)
    if Rank.from_environment().world > 1:
        raise UserError("dd-peer was started as one of several ranks.", fix="Start it once, with --nproc_per_node N: it starts the ranks.")
    output = Path(peer.output_dir)
    with _own_folder(output / _FOLDER) as folder, _log(peer, output.name) as log_file:
        adopt_orphans()
        code = Supervisor(argv, peer, folder, log_file, program).run()
    if code and log_file:
        log.error("ended with code %d: the last lines of %s say why", code, peer.log_file)
    return code


class Supervisor:
    """Starts a trainer, watches it, and starts it again."""

    def __init__(self, argv: Sequence[str], peer: PeerConfig, folder: Path, log_file: LogFile | None, program: Path = PROGRAM):
        self._argv, self._peer, self._folder, self._log_file, self._program = list(argv), peer, folder, log_file, program
        self._policy = Policy(peer.max_restarts)
        self._smaller: tuple[int, int] | None = None
        self._room: list[str] = []
        self._saved = Saved(Path(peer.output_dir))
        self._trainer: Processes | None = None
        self._asked: float | None = None
        self._told = False
        self._kill_at = math.inf

    def run(self) -> int:
        for number in wishes():
            signal.signal(number, self._hear)
        while True:
            end = self._live()
            if self._asked is not None:
                return _status(end.code) if self._told and not _as_asked(end) else ExitCode.OK
            batch, accumulation = self._step()
            less = smaller(batch, accumulation, fused=self._peer.fused_step) if batch else None
            way = next_way(self._folder, killed=end.code < 0)
            trains = not self._peer.assist
            verdict = self._policy.after(end, can_shrink=less is not None and trains, can_make_room=bool(way) and trains)
            if verdict.pause is None:
                if end.code:
                    log.error("not starting the trainer again: %s, and %s", end, verdict.why)
                return _status(end.code) if end.kind == ExitCode.FAILED else end.kind
            self._prepare_again(end, verdict, less, as_flags(way))
            self._pause(verdict.pause)
            if self._asked is not None:
                return ExitCode.OK

    def _prepare_again(self, end: End, verdict: Verdict, less: tuple[int, int] | None, way: list[str]) -> None:
        if verdict.smaller:
            before, self._smaller = self._step(), less
            log.warning(
                "out of memory: the micro-batch is now %d instead of %d, and gradients are accumulated over %d instead of %d: "
                "a step %s. To keep it so: --train_batch_size %d --gradient_accumulation_steps %d",
                less[0], before[0], less[1], before[1],
                "has fewer samples, since --fused_step accumulates nothing" if self._peer.fused_step else "keeps its samples", *less,
            )  # fmt: skip
        if verdict.roomier:
            self._room += way
            log.warning("out of memory: from now on with %s, which takes less of it and more time. To keep it so, give it yourself", " ".join(way))
        log.warning("the trainer ended: %s. Starting it again in %.0f s (%s; Ctrl-C ends it)", end, verdict.pause, verdict.why)

    def _step(self) -> tuple[int | None, int]:
        """Micro-batch and accumulation of a step now; a micro-batch of None was to be measured, and is not known yet."""
        return self._smaller or (told_batch(self._folder) or self._peer.train_batch_size, self._peer.gradient_accumulation_steps)

    def _arguments(self) -> list[str]:
        more = [*self._room]
        if self._smaller:
            more += ["--train_batch_size", str(self._smaller[0]), "--gradient_accumulation_steps", str(self._smaller[1])]
        # Asked for 'auto' or 'none', a swarm's trainer finds its own by itself, or begins with new moments each time. A named folder may have
        # made room for newer ones.
        asked = self._peer.resume_from_checkpoint in ("auto", "none")
        if self._saved and not (asked and self._peer.swarming):
            more += ["--resume_from_checkpoint", "latest"]
        return [*self._argv, *more]

    def _live(self) -> End:
        """One life of the trainer, from its start until nothing is left of it."""
        ranks = 1 if self._peer.assist else self._peer.nproc_per_node
        output = self._log_file.pipe if self._log_file else None
        forget_room(self._folder)
        self._trainer = trainer = Processes(self._arguments(), self._folder, ranks=ranks, output=output, tick=self._tick, program=self._program)
        if self._asked is not None:  # while it was being started
            self._tell_to_stop()
        watchdog, memory, stalled = Watchdog(self._peer.stall_seconds, time.monotonic()), OutOfMemory(), ""
        looked = time.monotonic()
        while (code := trainer.poll()) is None and not stalled and time.monotonic() < self._kill_at:
            self._tick()
            if (now := time.monotonic()) - looked >= _LOOK_SECONDS:
                # What stopped us stopped the trainer as well, or may have: it gets a tick to show life.
                if now - looked < 5 * _LOOK_SECONDS:
                    memory.look()
                    stalled = watchdog.look(last_sign(self._folder), lambda: Vitals.of(trainer.family()), now)
                looked = now
        if stalled:
            log.error("the trainer stands still: %s. Where it is:", stalled)
            for place in filter(None, trainer.stacks().splitlines()):  # a line each: the log shows a line's end within one as \n
                log.error("%s", place)
        out_of_memory = memory.look()
        trainer.end(at_once=bool(stalled) or code is None)
        watchdog.look(last_sign(self._folder), Vitals, time.monotonic())
        self._trainer = None
        self._tick(0)
        return End(code if code is not None else -signal.SIGKILL, bool(stalled), out_of_memory, watchdog.trained_seconds)

    def _tick(self, seconds: float = _TICK_SECONDS) -> None:
        time.sleep(seconds)
        if self._log_file:
            self._log_file.pump()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._asked is None and time.monotonic() < deadline:
            self._tick()

    def _hear(self, number: int, frame: object = None) -> None:
        """The trainer stops cleanly; on a second wish at once, and if it hangs it is killed.

        It hears SIGTERM also for Ctrl-C and a closed terminal: while it imports, for 5 to 10 s, that ends it without a traceback.
        """
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            if self._log_file:  # what the trainer says to it goes into the file
                say("stopping; once more to stop at once.")
        elif number == signal.SIGHUP:  # the terminal is closed after Ctrl-C: the trainer would take it for a second wish
            return
        elif now - self._asked >= _SAME_WISH_SECONDS:
            self._kill_at = min(self._kill_at, now + _LAST_SECONDS)
        self._tell_to_stop()

    def _tell_to_stop(self) -> None:
        if self._trainer and self._trainer.poll() is None:
            self._told = True
            self._trainer.signal(signal.SIGTERM)


def _as_asked(end: End) -> bool:
    """Whether who asked for the end has it: how it ended before it could hear of that would only have been a reason to start it again."""
    return end.code in (-signal.SIGTERM, -signal.SIGINT) or (end.kind == ExitCode.NETWORK and not end.trained_seconds)


def _status(code: int) -> int:
    """As a shell has it: 128 and the signal's number."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """Where the trainer shows life: ours alone, since two trainers with one --output_dir would write over each other's checkpoints."""
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise UserError(f"Another dd-peer is using {folder.parent}.", fix="Stop that one, or choose another --output_dir.") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.", fix="Choose another --output_dir.", code=ExitCode.DISK) from None
    with lock:
        yield folder


@contextlib.contextmanager
def _log(peer: PeerConfig, name: str) -> Iterator[LogFile | None]:
    setup_logging(debug=peer.debug, name=name if peer.swarming else "", log_format=peer.log_format)
    if not peer.log_file:
        yield None
        return
    (usual,) = logging.getLogger().handlers
    handler = LogFile(Path(peer.log_file), int(peer.log_file_mib * 2**20), peer.log_files)
    handler.setFormatter(usual.formatter)
    log.info("the log goes to %s", peer.log_file)
    logging.getLogger().handlers[:] = [handler]
    try:
        yield handler
    finally:
        logging.getLogger().handlers[:] = [usual]
        handler.close()


def cli(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return run_program(lambda: main(argv), debug="--debug" in argv)


if __name__ == "__main__":
    sys.exit(cli())
