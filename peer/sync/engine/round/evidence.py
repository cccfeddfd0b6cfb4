"""What those whom we have not met can show for their states. Asked only where their votes decide: of a newcomer, and of a peer that was away for long."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection

from peer.sync.engine.certificate import NOTHING, Judgement, Seals, Shown, is_on, judged
from peer.sync.engine.net.messages import Certified
from peer.sync.engine.net.streams import Channel, PeerLost, Streams
from peer.sync.engine.round.certificates import Certificates
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)

CERTIFICATE = "distributed-diffusion.certificate.1"
ANSWER_SECONDS = 5.0
MOST_ASKED = 32
"""At once. One answer has 150 kB at most, and takes 30 ms to check."""
_AGAIN_SECONDS = 60.0
"""After which a peer is asked once more, which bounds what its answers cost."""


class Evidence:
    """came: called when answers have come."""

    def __init__(
        self,
        streams: Streams,
        seals: Seals,
        certificates: Certificates,
        came: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._streams, self._seals, self._certificates, self._came, self._clock = streams, seals, certificates, came, clock
        self._told: dict[str, tuple[Shown, float, str]] = {}
        """What each has shown, when, and what was countersigned then."""
        self._wanted: list[str] = []
        self._is_wanted = asyncio.Event()

    async def serve(self) -> None:
        await self._streams.serve(CERTIFICATE, self._answer)

    @property
    def is_pending(self) -> bool:
        """Whether somebody's vote may count of whom nothing is known yet."""
        return any(peer not in self._told for peer in self._wanted)

    def judge(self, strangers: Collection[str]) -> Judgement:
        """Which of these count. Who has not been asked yet does not; it will be."""
        if not self._seals.needed:
            return Judgement(strangers)
        now = self._clock()
        self._told = {peer: self._told[peer] for peer in strangers if peer in self._told}
        self._wanted = [peer for peer in strangers if peer not in self._told or now - self._told[peer][1] >= _AGAIN_SECONDS]
        if self._wanted:
            self._is_wanted.set()
        # A later one may be on none of the lines that we were shown, but that of a liar who waited for it.
        _, _, countersigned = min(self._told.values(), key=lambda told: told[1], default=(NOTHING, now, ""))
        return judged({peer: shown for peer, (shown, *_) in self._told.items()}, self._certificates.shown, countersigned)

    @property
    def countersigned(self) -> str:
        """Digest of the state that the host has just countersigned, as far as we have heard; '' for none."""
        return self._seals.countersigned

    @property
    def signers(self) -> Collection[str]:
        """Of our own certificate, other than ourselves; nobody without one. A later one that we alone have sealed changes nothing."""
        return self._certificates.others

    def holds_us(self, judgement: Judgement) -> bool:
        """Whether our own state is on or after those that judge."""
        return all(is_on(self._certificates.shown.line, digest) for digest in judgement.states)

    async def ask_forever(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            peers, countersigned = self._wanted[:MOST_ASKED], self._seals.countersigned
            shown, now = await ask(self._streams, self._seals, peers), self._clock()
            self._told |= {peer: (shown[peer], now, countersigned) for peer in peers}
            self._wanted = [peer for peer in self._wanted if peer not in shown]
            if self._wanted:
                self._is_wanted.set()
            self._came()

    async def _answer(self, channel: Channel) -> None:
        shown = self._certificates.shown
        await channel.send(Certified(certificate=shown.certificate, line=shown.line), seconds=ANSWER_SECONDS)


async def ask(streams: Streams, seals: Seals, peers: Collection[str]) -> dict[str, Shown]:
    """What each of these shows; NOTHING for a peer that does not answer within ANSWER_SECONDS, or whose certificate does not hold."""
    asking = {asyncio.create_task(_ask(streams, seals, peer)): peer for peer in peers}
    if asking:
        await asyncio.wait(asking, timeout=ANSWER_SECONDS)
        await end_tasks(*asking)
    told = {peer: task.result() for task, peer in asking.items() if not task.cancelled() and task.exception() is None}
    return {peer: told.get(peer, NOTHING) for peer in peers}


async def _ask(streams: Streams, seals: Seals, peer: str) -> Shown:
    try:
        with contextlib.closing(await streams.open(peer, CERTIFICATE)) as channel:
            said, _ = await channel.receive(Certified, seconds=ANSWER_SECONDS)
    except PeerLost as error:
        log.debug("%s shows no certificate: %s", peer[-6:], error)
        return NOTHING
    given = said.certificate
    certificate = seals.checked(given) if given is not None else None
    if given is not None and (certificate is None or not is_on(said.line, given.made.digest)):
        log.info("%s shows a certificate of %s that does not hold", peer[-6:], given.made.digest[:8])
        return NOTHING
    return Shown(certificate, said.line)
