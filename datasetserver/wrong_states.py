"""States that proven wrong means have made: the server discards them by the host's signed word, without a person (docs/decisions/0031).

Who brings one shows the state's header, so nobody is believed. One is discarded while at most MOST_BEHIND rounds have followed: the peers still
have what was before it. What is older, or cannot be told from another state, is left to the host, and said.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasetserver.refused import Refused
from datasetserver.store import Store
from datasetserver.tree import State, StateTree
from swarm.errors import UserError
from swarm.records import MOST_BANS
from swarm.wrong_states import MOST_BEHIND, WrongState

if TYPE_CHECKING:
    from datasetserver.service import Service

log = logging.getLogger(__name__)
MOST_WORDS = MOST_BANS // 2
"""The server takes no place for a word of its own beyond these: those that lie must not keep the host from banning others."""


@dataclass(frozen=True, order=True)
class Wrong:
    """left: why it was left to the host; '' where it was discarded."""

    digest: str
    round: int
    left: str

    def __str__(self) -> str:
        """For the host."""
        what = f"it made state {self.digest} of round {self.round}"
        return f"{what}, which is left to you: {self.left}" if self.left else f"{what}, which is discarded"


class WrongStates:
    """The states that wrong means made, by their accused and who showed them, kept in the ledger. Of each accused one owner shows one state: a liar
    may show one that it has made up, and must not keep others from showing the right one."""

    def __init__(self, store: Store, tree: StateTree, sure: Callable[[], State | None]):
        """sure: the newest state that more than one owner's peers stand behind: a head is one peer's word, which may be of any round."""
        self._store, self._tree, self._sure, self._known = store, tree, sure, read_wrong(store)

    def all(self) -> dict[str, str]:
        """Accused -> what became of the states that it made, for the host."""
        return said_of(self._known)

    def judge(self, accused: str, owner: str, digest: str, number: int, *, room: bool = True) -> str:
        """Take note of the state of round `number`; why it is left to the host, for good, or '' if it is to be discarded. room: for one more word."""
        wrong = self._known.get((accused, owner))
        if wrong is not None and wrong.digest != digest:
            return "its owner has shown another one before"
        judged = (each for (one, _), each in self._known.items() if one == accused and each.digest == digest and each.left)
        wrong = next(judged, None) or Wrong(digest, number, self._fault(digest, number, room))
        self._known[accused, owner] = wrong
        self._store.set_wrong_state(accused, owner, wrong.digest, wrong.round, wrong.left)
        return wrong.left

    def _fault(self, digest: str, number: int, room: bool) -> str:
        if not room:
            return f"{MOST_WORDS} of your {MOST_BANS} words about peers and states are taken"
        sure = self._sure()
        if sure is not None and (behind := sure.round - number) > MOST_BEHIND:
            return f"{behind} rounds had followed it when it was shown"
        if twin := self._tree.twin(digest):
            return f"state {twin.digest} begins with the same digits"
        return ""


def read_wrong(store: Store) -> dict[tuple[str, str], Wrong]:
    """(accused, who showed it) -> the state, as the ledger has it."""
    return {(accused, owner): Wrong(*row) for accused, owner, *row in store.wrong_states()}


def said_of(known: Mapping[tuple[str, str], Wrong]) -> dict[str, str]:
    """Accused -> what became of the states that it made, each once."""
    texts: dict[str, dict[str, None]] = {}
    for (accused, _), wrong in sorted(known.items()):
        texts.setdefault(accused, {})[str(wrong)] = None
    return {accused: "; ".join(each) for accused, each in texts.items()}


async def bury(service: "Service", owner: str, state: WrongState) -> None:
    """Discard `state`, if a wrong mean of which the server has a proof made it. owner: who answers for the peer that shows it.

    Raises Refused: 403 where the proof is not of that state's group, or `owner` shows too many, 503 (disk). Raises sqlite3.Error (disk).
    """
    if service.bans.reason(state.digest):
        return
    number = service.proven.round_of(owner, state)
    if number is None:
        return
    room = len(service.bans.words) < MOST_WORDS
    if left := await service.ledger.call(lambda book: book.wrong.judge(state.accused, owner, state.digest, number, room=room)):
        log.warning("a wrong mean of %s made state %s of round %d, which is left to you: %s", state.accused, state.digest, number, left)
        return
    try:
        service.discard(state.digest, f"a wrong mean of {state.accused} made it")
    except UserError as error:
        raise Refused(503, "disk", error.message, error.fix) from None
    await service.ledger.call(lambda book: book.discard([state.digest]))  # by the orders it would be done within a second
    log.warning("discarded state %s of round %d: a wrong mean of %s made it", state.digest, number, state.accused)
