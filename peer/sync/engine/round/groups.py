"""What is said before a round: who brings what, who takes part, and how much of a stranger's word about it is believed."""

import functools
import math
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from peer.contracts import Member
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.state import BadState, Head
from swarm.digest import digest_json

MAX_WAIT_SECONDS = 300.0
"""Nobody is waited for longer, whatever it says."""
MOST_NAMED = 8
"""Peers that one message accuses."""


@dataclass(frozen=True)
class Ticket:
    """A contribution that is ready to be averaged onto the state `parent`."""

    parent: str
    member: Member
    reduces: bool
    """Whether others can dial this peer: only such a one leads, and reduces if its leader wants it to."""
    without: tuple[str, ...] = ()
    """Peers with whom it averages in no group for now."""

    @property
    def assists(self) -> bool:
        """It brings no contribution: it reduces and leads for those who do, and is no member of the group."""
        return self.member.samples == 0


@dataclass(frozen=True)
class Group:
    """Members by peer id, and who reduces: members that can be dialled, and peers that assist; the same at all of them.

    silent: expected, but they never answered; culprits: what they did while it was formed cost us time; slow: those of them that may
    have meant well; late: as its leader says, they promised to come, and did not.
    """

    parent: str
    members: tuple[Member, ...]
    reducers: tuple[str, ...]
    attempt: str = ""
    """Drawn by the leader: a stream of a failed attempt must not be taken for one of the next, which may have the same members."""
    silent: frozenset[str] = field(default=frozenset(), compare=False)
    culprits: frozenset[str] = field(default=frozenset(), compare=False)
    slow: frozenset[str] = field(default=frozenset(), compare=False)
    late: tuple[str, ...] = field(default=(), compare=False)
    leader: str = field(default="", compare=False)

    @functools.cached_property
    def id(self) -> str:
        return digest_json([self.parent, [[m.peer, m.number, m.samples] for m in self.members], list(self.reducers), self.attempt])

    @property
    def samples(self) -> int:
        return sum(member.samples for member in self.members)

    @property
    def peers(self) -> set[str]:
        """All who take part, those who only reduce as well."""
        return {*self.reducers, *(member.peer for member in self.members)}

    def holds(self, ticket: Ticket) -> bool:
        takes_part = ticket.member.peer in self.reducers if ticket.assists else ticket.member in self.members
        return ticket.parent == self.parent and takes_part

    @classmethod
    def of(cls, tickets: Collection[Ticket], attempt: str, silent: Collection[str] = ()) -> "Group":
        ordered = sorted(tickets, key=lambda ticket: ticket.member.peer)
        reducers = tuple(ticket.member.peer for ticket in ordered if ticket.reduces)
        members = tuple(ticket.member for ticket in ordered if not ticket.assists)
        return cls(ordered[0].parent, members, reducers, attempt, frozenset(silent))

    def announcement(self) -> dict[str, Any]:
        members = [[m.peer, m.number, m.samples] for m in self.members]
        late = list(self.late[:MOST_NAMED])
        return {"members": members, "reducers": list(self.reducers), "attempt": self.attempt, "late": late}


@dataclass(frozen=True)
class Standing:
    """What this peer is doing, as its answer to a call.

    head, included: of its state; has_samples: whether it has something to offer, or will after the step it is in;
    ready_seconds: until then; busy: it is averaging in a group that is closed.
    """

    head: Head
    has_samples: bool
    ready_seconds: float
    included: Mapping[str, int] = field(default_factory=dict)
    busy: bool = False

    @property
    def digest(self) -> str:
        return self.head.digest


@dataclass(frozen=True)
class Answer:
    """What a peer that was called said. behind: it has work, but does not know our state yet; head: its own."""

    coming: bool
    ready_seconds: float
    head: Head
    busy: bool
    behind: bool
    reason: str


@functools.lru_cache(4096)  # each of a round's peers is ranked some twenty times
def rank(parent: str, peer: str) -> str:
    """The smaller, the better; another order for every parent."""
    return digest_json([parent, peer])


def leads_before(parent: str, peer: str, included: Container[str]) -> tuple[bool, str]:
    """The smaller, the sooner it leads. included: whose work is in the state `parent`.

    Everybody at a state has the same list and computes the same order. A key that ranks first for any state is found in no time; a
    place in the list costs a contribution.
    """
    return peer not in included, rank(parent, peer)


def parse_names(names: object) -> tuple[str, ...]:
    """The peers that a message names, as many as are believed."""
    return tuple(name for name in names[:MOST_NAMED] if isinstance(name, str)) if isinstance(names, list) else ()


def parse_head(values: object) -> Head:
    """Raises PeerLost."""
    try:
        return Head.from_json(values)
    except BadState as error:
        raise PeerLost(str(error)) from None


def parse_answer(answer: dict[str, Any]) -> Answer:
    """Raises KeyError, TypeError, ValueError, PeerLost."""
    return Answer(
        coming=answer["coming"] is True,
        ready_seconds=_seconds(answer["ready_seconds"]),
        head=parse_head(answer["head"]),
        busy=answer["busy"] is True,
        behind=answer["behind"] is True,
        reason=str(answer["reason"])[:200],
    )


def parse_ticket(request: dict[str, Any], peer: str, max_samples: int) -> Ticket:
    parent = request.get("parent")
    if not isinstance(parent, str):
        raise PeerLost("no parent")
    reduces = request.get("reduces") is True
    without = parse_names(request.get("without"))
    if reduces and [repr(request.get(name)) for name in ("number", "samples")] == ["0", "0"]:
        return Ticket(parent, Member(peer, 0, 0), True, without)
    return Ticket(parent, _member(peer, request.get("number"), request.get("samples"), max_samples), reduces, without)


def _member(peer: object, number: object, samples: object, max_samples: int) -> Member:
    """Raises PeerLost when a value is out of bounds."""
    if not isinstance(peer, str):
        raise PeerLost("no peer id")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 1 << 53:
        raise PeerLost(f"contribution number {str(number)[:40]}")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 0 < samples <= max_samples:
        raise PeerLost(f"{str(samples)[:40]} samples, 1 to {max_samples} are allowed")
    return Member(peer, number, samples)


def _seconds(value: object) -> float:
    """Somebody's claim about time, within what we would ever wait. Raises ValueError or TypeError."""
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError("no number of seconds")
    return min(max(seconds, 0.0), MAX_WAIT_SECONDS)


def parse_group(answer: dict[str, Any], ticket: Ticket, leader: str, standing: Standing, max_samples: int) -> Group:
    """The group a leader announced, checked as far as one member can: every other member checks its own place. Raises PeerLost."""
    try:
        members = tuple(_member(*values, max_samples) for values in answer["members"])
        reducers, attempt = tuple(answer["reducers"]), answer["attempt"]
        valid = all(isinstance(peer, str) for peer in reducers) and isinstance(attempt, str)
    except (KeyError, TypeError):
        valid = False
    except PeerLost as error:
        raise PeerLost(f"{leader[-6:]} announced a member with {error}") from None
    if not valid:
        raise PeerLost(f"{leader[-6:]} announced no group")
    peers = [member.peer for member in members]
    if (ticket.member not in members and not ticket.assists) or leader not in reducers or not members:
        raise PeerLost(f"{leader[-6:]} announced a group without us or itself")
    if peers != sorted(set(peers)) or list(reducers) != sorted(set(reducers)) or (ticket.assists and ticket.member.peer in peers):
        raise PeerLost(f"{leader[-6:]} announced a group out of order")
    we_reduce = ticket.member.peer in reducers
    if (we_reduce and not ticket.reduces) or (ticket.assists and not we_reduce):
        raise PeerLost(f"{leader[-6:]} announced a group with wrong roles")
    if any(member.number <= standing.included.get(member.peer, 0) for member in members):
        raise PeerLost(f"{leader[-6:]} announced a contribution that is in the state already")
    return Group(ticket.parent, members, reducers, attempt, late=parse_names(answer.get("late")), leader=leader)
