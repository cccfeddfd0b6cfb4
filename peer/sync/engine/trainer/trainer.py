"""The training process as the replica knows it: what it last said, what it has frozen, and which state it was told of.

One end of the conversation whose words are in `messages.py`; the other is `SwarmSync`. Nothing here blocks, and nothing decides when a
round is due: that is the replica's matter.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from peer.contracts import CommittedRound, Member
from peer.sync.engine.cell import Bell, Cell
from peer.sync.engine.outer import Strategy
from peer.sync.engine.state import State
from peer.sync.engine.trainer.local_work import follows
from peer.sync.engine.trainer.messages import Final, Freeze, Leave, Message, News, Nothing, Offer, Progress, Rebase, Sends, Train

POSTPONED_SECONDS = 30.0
"""A contribution that came late for its round waits for the next one that is full or called, but no longer than this."""


@dataclass
class Contribution:
    """What the trainer froze: its bytes never change, whatever becomes of the attempts to average it."""

    member: Member
    encoded: Tensor | None
    """None: this peer assists, and brings nothing."""
    parent: str
    """The state that the trainer stood on when it offered this."""
    receipt: str = ""
    """The host's for it; '' without one."""
    failures: int = 0
    norm: asyncio.Future[float] | None = field(default=None, compare=False)
    """L2 norm of its decoded values, on its way from a thread; None: not asked for yet."""
    next_attempt: float | None = None
    """None: nobody has decided yet whether it is averaged now."""


class Trainer:
    """line: takes the messages to it. issued: the number of the last contribution that it ever made; None where that is not known."""

    def __init__(
        self,
        line: Sends,
        state: Cell[State],
        strategy: Strategy,
        peer_id: str,
        bell: Bell,
        clock: Callable[[], float],
        issued: int | None = None,
    ):
        self._line, self._state, self._strategy, self._peer_id, self._bell, self._clock = line, state, strategy, peer_id, bell, clock
        self.progress, self.contribution, self.issued = Progress(), None, issued
        self.leaving = False
        self._asked, self._told, self._last_news = False, "", ""
        self._heard = clock()

    # ---------------------------------------------------------------- what it says

    def hear(self, message: Progress | Offer | Nothing | Leave) -> None:
        match message:
            case Progress():
                self.progressed(message)
            case Offer(number, samples, parent, encoded, receipt):
                self.offered(Contribution(Member(self._peer_id, number, samples), encoded.bytes(), parent, receipt))
            case Nothing():
                self.has_nothing()
            case Leave():
                self.leaving = True
                self._bell.ring()

    def progressed(self, progress: Progress) -> None:
        """Before it stands on our state, what it says is waiting may be in that state already."""
        if progress.stands_on != self._state.value.digest:
            progress = replace(progress, waiting=self.progress.waiting)
        self._heard = self._clock()
        if progress != self.progress:  # one that waits says the same once a second
            self.progress = progress
            self._bell.ring()

    def offered(self, contribution: Contribution) -> None:
        """It froze this, or says after a rebase that it still has it."""
        self._asked = False
        if not self._counts(contribution):
            return  # it hears of our state soon, and finds the same
        known = self.contribution
        if known is not None and known.member == contribution.member:
            known.parent = contribution.parent
            if not known.failures:
                known.next_attempt = None
        else:
            self.contribution = contribution
        self.issued = max(contribution.member.number, self.issued or 0)
        self._bell.ring()

    def has_nothing(self) -> None:
        self._asked = False
        if self.contribution is None:
            self.progress = replace(self.progress, waiting=0)

    @property
    def silent_seconds(self) -> float:
        """Since it last said how far it is."""
        return self._clock() - self._heard

    @property
    def goes(self) -> bool:
        """Whether it makes no more samples for now: what it has is averaged, however little it is."""
        return self.leaving or self.progress.paused

    def stands_on(self, state: State) -> bool:
        return self.progress.stands_on == state.digest

    def _counts(self, contribution: Contribution) -> bool:
        """Whether it is not in our state, and was made on that or on one shortly before."""
        state = self._state.value
        included = state.header.included.get(self._peer_id, 0) >= contribution.member.number
        return not included and follows(state.digest, state.header, contribution.parent, self._strategy)

    # ---------------------------------------------------------------- what it is told

    @property
    def may_freeze(self) -> bool:
        """Whether it may be asked for what it has: where it stands on our state, and was not asked yet.

        Asked before a rebase it would point to what it has frozen already, the rebase would count that, and neither would come (seed 108 of
        5 peers: it waited to be asked, we for its answer, for ever).
        """
        return not self._asked and self.progress.waiting > 0 and self.stands_on(self._state.value)

    def freeze(self) -> None:
        """Ask for what it has, once: it answers by an offer, or that it has nothing."""
        if self.may_freeze:
            self._asked = True
            self._line.send(Freeze())

    def postpone(self, contribution: Contribution) -> None:
        """Not now: it trains on meanwhile."""
        contribution.next_attempt = self._clock() + POSTPONED_SECONDS
        self.train()

    def train(self) -> None:
        self._line.send(Train())

    def moved(self) -> None:
        """Our state was replaced: what is in the new one waits no longer, and what was not made on its lineage is lost."""
        held, waiting = self.contribution, self.progress.waiting
        if held is not None:
            if self._state.value.header.included.get(self._peer_id, 0) >= held.member.number:
                waiting = max(waiting - held.member.samples, 0)
            if self._counts(held):
                held.failures, held.next_attempt = 0, self._clock() + POSTPONED_SECONDS
            else:
                self.contribution = None
        # Its last word was that it waits. It trains on as soon as it is rebased, and the record that says so is published now.
        self.progress = replace(self.progress, waiting=waiting, waits=self.goes)
        self._asked = False

    def was_told_of(self, state: State) -> bool:
        return self._told == state.digest

    @property
    def may_rebase(self) -> bool:
        """Whether it is to be told of our state. One at a time: a trainer that is busy or stopped hears of the last one only, and no memory
        waits in its queue."""
        return self._told != self._state.value.digest and (not self._told or self.progress.stands_on == self._told)

    def rebase(self) -> None:
        """Tell it of our state, once."""
        state = self._state.value
        if self.may_rebase:
            self._told = state.digest
            self._line.send(Rebase(state.digest, state.header.to_json(), state.buffer))

    def final(self, final_rounds: list[CommittedRound]) -> None:
        for committed_round in final_rounds:
            self._line.send(Final.of(committed_round))

    def news(self, text: str) -> None:
        """For its log; the same words once."""
        if text != self._last_news:
            self._last_news = text
            self._line.send(News(text))

    def send(self, message: Message) -> None:
        self._line.send(message)
