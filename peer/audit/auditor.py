"""Whose contributions an assisting peer audits, and what comes of it: it draws them, keeps what they sent, and has a process measure it.

The rounds never wait for that. One round is measured at a time and one waits; a newer one takes the place of that.
"""

import asyncio
import logging
import math
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from peer.audit.orders import Losses, Order, read_answer
from peer.audit.tally import Tally
from peer.config import PeerConfig
from peer.contracts import Member
from peer.drawing.errand import HOPELESS, MEMORY_SHARE, Errand, begin, end, ending
from peer.launch.joining import Joined
from peer.sync.engine.memory import available_bytes
from peer.sync.engine.outer import load_strategy
from peer.sync.engine.round.excerpts import Excerpts
from peer.sync.engine.round.groups import Group
from swarm import files
from swarm.errors import ExitCode, UserError
from swarm.records import FINDINGS_PER_RECORD, Finding

log = logging.getLogger(__name__)

_LONGEST_SECONDS = 6 * 3600.0
"""A large model on a slow CPU takes an hour; what takes longer hangs."""
_MOST_SCALE = 4.0
"""What a few samples do to the loss is not taken for more than this many times as much as it is."""


class Auditor:
    """given: what the command line said of the run. command: is told an Errand, and Orders, on its stdin. Raises UserError (disk)."""

    def __init__(
        self,
        peer: PeerConfig,
        given: Mapping[str, Any],
        joined: Joined,
        *,
        rng: random.Random | None = None,
        command: tuple[str, ...] = ("-m", "peer.audit"),
    ):
        self._peer, self._given, self._joined, self._command = peer, given, joined, command
        self._rng = rng or random.SystemRandom()
        self._per_sample = load_strategy(f"peer.sync.{joined.run.sync}:strategy", joined.run).steps_locally
        self._states, self._folder = Path(peer.output_dir) / "state", Path(peer.output_dir) / "audit"
        self._tally, self._told = Tally(), set()
        self._waiting: tuple[Order, dict[str, float]] | None = None
        self._news, self._ended, self._passed_over = asyncio.Event(), False, 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob("*.state"):
                left.unlink()
        except OSError as error:
            raise UserError(f"{self._folder} cannot be used: {error.strerror}.", fix="Choose another --output_dir.", code=ExitCode.DISK) from None

    # ---------------------------------------------------------------- within the rounds

    def draw(self, members: Sequence[Member], num_bytes: int) -> list[str]:
        """--audit N of them by chance, rather those that were measured seldom: nobody can know before whether it is its turn.

        Fewer where memory is short: reducing needs it more.
        """
        if self._ended:
            return []
        most = min(self._peer.audit, int(MEMORY_SHARE * available_bytes() / num_bytes))
        luck = {member.peer: self._rng.random() ** (1 + self._tally.rounds(member.peer)) ** 2 for member in members}
        return sorted(luck, key=luck.__getitem__, reverse=True)[:most]

    def averaged(self, round: int, group: Group, excerpts: Excerpts) -> None:
        """Nothing is measured where the state before is not on disk: the first one never is, nor some of a swarm whose rounds take a second."""
        source = next(self._states.glob(f"samples-*-{group.parent[:12]}.state"), None)
        if self._ended or source is None or not excerpts.of:
            return
        kept = self._folder / f"{group.id[:12]}.state"
        try:
            files.link(source, kept)
        except OSError as error:
            log.warning("no audit of round=%d: %s", round, error)
            return
        if self._waiting is not None:
            self._waiting[0].state.unlink(missing_ok=True)
            self._passed_over += 1
        order = Order(
            round=round, state=kept, start=excerpts.parts[0].start, end=excerpts.parts[-1].end, excerpts=excerpts.of,
            numbers={member.peer: member.number for member in group.members if member.peer in excerpts.of},
        )
        self._waiting = order, self._scales(group)
        self._news.set()

    def findings(self) -> list[Finding]:
        return self._tally.findings()[:FINDINGS_PER_RECORD]

    def _scales(self, group: Group) -> dict[str, float]:
        """What makes each member's change that of a contribution with the group's mean of samples."""
        mean = fmean(member.samples for member in group.weighed)
        return {m.peer: min(mean / m.samples, _MOST_SCALE) if self._per_sample else 1.0 for m in group.weighed}

    # ---------------------------------------------------------------- beside them

    async def measure_forever(self) -> None:
        """Ends when there is no use in trying again; of that, and of what went wrong, the process has told."""
        process = None
        try:
            while not self._ended:
                await self._news.wait()
                self._news.clear()
                (order, scales), self._waiting = self._waiting, None
                try:
                    process = process or await self._begin()
                    line = await asyncio.wait_for(_ask(process, order), _LONGEST_SECONDS)
                    self._hear(order.round, read_answer(line), scales)
                except (OSError, EOFError, asyncio.TimeoutError) as error:
                    process = await self._failed(order.round, process, error)
                finally:
                    order.state.unlink(missing_ok=True)
        finally:
            if process is not None:
                await end(process)

    async def _begin(self) -> asyncio.subprocess.Process:
        """Raises OSError."""
        process = await begin(self._command, stdout=asyncio.subprocess.PIPE)
        errand = Errand(
            peer=self._peer, given=self._given, run=self._joined.run, server_url=self._joined.server_url,
            memory_bytes=MEMORY_SHARE * available_bytes(),
        )  # fmt: skip
        process.stdin.write(errand.to_json() + b"\n")
        return process

    async def _failed(self, round: int, process: asyncio.subprocess.Process | None, error: Exception) -> None:
        """The process is gone; the next order has a new one, unless that is of no use."""
        gone = isinstance(error, EOFError | ConnectionError) and process is not None
        how = await process.wait() if gone else error
        self._ended = how in HOPELESS
        if why := ending(how, "measures", f"it was not measured within {_LONGEST_SECONDS:.0f} s"):
            log.warning("no audit of round=%d: %s", round, why)
        if process is not None:
            await end(process)

    def _hear(self, round: int, answered: Mapping[str, Losses], scales: Mapping[str, float]) -> None:
        for peer, losses in answered.items():
            if not math.isfinite(losses.after):
                continue
            own = losses.own_after is not None and math.isfinite(losses.own_after)
            on_own = f" own_before={losses.own_before:.6f} own_after={losses.own_after:.6f}" if own else ""
            log.info(
                "audited round=%d member=%s loss_before=%.6f loss_after=%.6f%s passed_over=%d",
                round, peer[-6:], losses.before, losses.after, on_own, self._passed_over,
            )  # fmt: skip
            change = (losses.after - losses.before) * scales[peer]
            self._tally.add(peer, change, (losses.own_after - losses.own_before) * scales[peer] if own else None)
        self._tell(self._tally.findings())

    def _tell(self, findings: Collection[Finding]) -> None:
        """Once of each member that is reported."""
        for found in findings:
            if found.reported and found.peer not in self._told:
                self._told.add(found.peer)
                log.warning(
                    "the contributions of %s make the model worse: each changes the loss by %+.4g +- %.2g (%d rounds), unlike the others' "
                    "(docs/security.md)", found.peer, found.change, found.error, found.rounds,
                )  # fmt: skip


async def _ask(process: asyncio.subprocess.Process, order: Order) -> bytes:
    """The line with the process's answer. Raises EOFError, OSError when it is gone."""
    for piece in order.pieces():
        process.stdin.write(piece)
        await process.stdin.drain()
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):  # it was killed, perhaps while it wrote
        raise EOFError
    return line
