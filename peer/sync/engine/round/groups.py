"""A round before it begins: who brings what, who takes part, and whether a group that a leader announced can be one."""

import functools
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from peer.contracts import Member
from peer.sync.engine.codec import Part
from peer.sync.engine.net.messages import Announcement, Join
from peer.sync.engine.net.streams import PeerLost, Refused
from peer.sync.engine.state import MOST_COUNT, Head
from swarm.bans import TRUSTED_NEEDED
from swarm.digest import canonical_json, digest_bytes, digest_json
from swarm.receipts import Receipts
from swarm.weights import counted

NO_RECEIPTS = Receipts()


@dataclass(frozen=True)
class Ticket:
    """A contribution that is ready to be averaged onto the state `parent`."""

    parent: str
    member: Member
    reduces: bool
    """Whether others can dial this peer: only such a one leads, and reduces if its leader wants it to."""
    without: tuple[str, ...] = ()
    """Peers with whom it averages in no group for now."""
    norm: float = 0.0
    """L2 norm of what it brings, decoded: by this the members are held to each other (`clipping.py`)."""
    receipt: str = ""
    """The host's for its samples."""
    draw: str = ""
    """Drawn by this peer for one average: in the name of a group in which it reduces, so that no two averages of its have one name."""

    @property
    def assists(self) -> bool:
        """It brings no contribution: it reduces and leads for those who do, and is no member of the group."""
        return self.member.samples == 0


@dataclass(frozen=True)
class Group:
    """Members by peer id, and who reduces: members that can be dialled, and peers that assist; the same at all of them.

    norms: of the members' contributions, as they state them; zeros in a run that clips nobody, none for a group that nobody announced.
    receipts: of the members, '' where one has none; empty where nobody has. draws: of the reducers, likewise.
    silent: expected, but they never answered; culprits: what they did while it was formed cost us time; slow: those of them that may
    have meant well; late: as its leader says, they promised to come, and did not.
    """

    parent: str
    members: tuple[Member, ...]
    reducers: tuple[str, ...]
    attempt: str = ""
    """Drawn by the leader: a stream of a failed attempt must not be taken for one of the next, which may have the same members."""
    norms: tuple[float, ...] = ()
    receipts: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    silent: frozenset[str] = field(default=frozenset(), compare=False)
    culprits: frozenset[str] = field(default=frozenset(), compare=False)
    slow: frozenset[str] = field(default=frozenset(), compare=False)
    late: tuple[str, ...] = field(default=(), compare=False)
    leader: str = field(default="", compare=False)

    @functools.cached_property
    def described(self) -> str:
        """What its name is the digest of, as JSON: who has that name knows the group (`swarm/wrong_means.py`)."""
        members = [[m.peer, m.number, m.samples] for m in self.members]
        receipts = list(map(bool, self.receipts))
        return canonical_json([self.parent, members, list(self.reducers), list(self.draws), self.attempt, list(self.norms), receipts]).decode()

    @functools.cached_property
    def id(self) -> str:
        return digest_bytes(self.described.encode())

    @functools.cached_property
    def weighed(self) -> tuple[Member, ...]:
        """The members, each with the samples as which its contribution counts in the mean (`swarm/weights.py`)."""
        counts = counted([member.samples for member in self.members], list(map(bool, self.receipts)))
        return tuple(
            member if member.samples == count else replace(member, samples=count)
            for member, count in zip(self.members, counts, strict=True)
        )

    @property
    def samples(self) -> int:
        return sum(member.samples for member in self.members)

    @property
    def peers(self) -> set[str]:
        """All who take part, those who only reduce as well."""
        return {*self.reducers, *[member.peer for member in self.members]}

    def holds(self, ticket: Ticket) -> bool:
        takes_part = ticket.member.peer in self.reducers if ticket.assists else ticket.member in self.members
        return ticket.parent == self.parent and takes_part and self.draw_of(ticket.member.peer) in ("", ticket.draw)

    def shares(self, parts: Sequence[Part]) -> dict[str, list[int]]:
        """Which parts, by index, each reducer averages."""
        return share_out(self.parent, self.reducers, parts)

    def draw_of(self, peer: str) -> str:
        """What it drew; '' where it does not reduce."""
        return dict(zip(self.reducers, self.draws, strict=False)).get(peer, "")

    @classmethod
    def of(cls, tickets: Collection[Ticket], attempt: str, silent: Collection[str] = ()) -> "Group":
        ordered = sorted(tickets, key=lambda ticket: ticket.member.peer)
        reducing = [ticket for ticket in ordered if ticket.reduces]
        reducers, draws = tuple(ticket.member.peer for ticket in reducing), tuple(ticket.draw for ticket in reducing)
        bringing = [ticket for ticket in ordered if not ticket.assists]
        members, norms = tuple(ticket.member for ticket in bringing), tuple(ticket.norm for ticket in bringing)
        receipts = tuple(ticket.receipt for ticket in bringing)
        either = receipts if any(receipts) else (), draws if any(draws) else ()
        return cls(ordered[0].parent, members, reducers, attempt, norms, *either, frozenset(silent))

    def announcement(self) -> Announcement:
        members = tuple((m.peer, m.number, m.samples, norm) for m, norm in zip(self.members, self.norms, strict=True))
        return Announcement(members=members, receipts=self.receipts, reducers=self.reducers, draws=self.draws, attempt=self.attempt, late=self.late)


class NoGroup(Exception):
    """No group came about; the reason is for the log. silent: peers that did not answer at all; culprits: those who kept it from coming
    about, so that the next attempt begins at once, without them; slow: those of them that were too slow, as the honest may be; at_once:
    the next attempt begins at once although nobody is left out."""

    def __init__(
        self,
        reason: str,
        silent: Collection[str] = (),
        culprits: Collection[str] = (),
        slow: Collection[str] = (),
        *,
        at_once: bool = False,
    ):
        super().__init__(reason)
        self.silent, self.culprits, self.slow = frozenset(silent), frozenset(culprits), frozenset(slow)
        self.at_once = at_once or bool(culprits)


@dataclass
class Seen:
    """What came of an attempt to form a group so far. silent: they did not answer, or went away; culprits: strangers that wasted our
    time; slow: those of them that may have meant well; followed: we went to them; heard: we know from their answers where they stand."""

    silent: set[str] = field(default_factory=set)
    culprits: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    followed: set[str] = field(default_factory=set)
    heard: set[str] = field(default_factory=set)

    def too_slow(self, strangers: Collection[str]) -> None:
        self.culprits |= set(strangers)
        self.slow |= set(strangers)

    def no_group(self, reason: str, silent: Collection[str] = ()) -> NoGroup:
        return NoGroup(reason, self.silent | set(silent), self.culprits, self.slow)

    def of(self, group: Group) -> Group:
        return replace(group, silent=group.silent | self.silent, culprits=frozenset(self.culprits), slow=frozenset(self.slow))


@dataclass(frozen=True)
class Standing:
    """What this peer is doing, as its answer to a call, and what it averages with.

    head, included: of its state; has_samples: whether it has something to offer, or will after the step it is in;
    ready_seconds: until then; busy: it is averaging in a group that is closed. trusted: whom the host trusts to lead and reduce; has_roles:
    whether it may trust anybody, and others may have heard more of that than we.
    """

    head: Head
    has_samples: bool
    ready_seconds: float
    included: Mapping[str, int] = field(default_factory=dict)
    busy: bool = False
    trusted: Container[str] = frozenset()
    has_roles: bool = False
    highest_number: int = MOST_COUNT
    """Of a contribution that the next state may hold: nobody would take over one that holds a higher one."""

    @property
    def digest(self) -> str:
        return self.head.digest

    def leads_before(self, parent: str, peer: str) -> tuple[bool, bool, str]:
        """The smaller, the sooner `peer` leads onto the state `parent`.

        Everybody at a state has the same lists and computes the same order. A key that ranks first for any state is found in no time; a
        place among those whose work is in the state costs a contribution, and the host alone says whom it trusts.
        """
        return peer not in self.trusted, peer not in self.included, rank(parent, peer)

    def ranks_before(self, parent: str, one: str, other: str) -> bool:
        """Whether `one` leads before `other` onto the state `parent`."""
        return self.leads_before(parent, one) < self.leads_before(parent, other)


@functools.lru_cache(4096)  # each of a round's peers is ranked some twenty times
def rank(parent: str, peer: str) -> str:
    """The smaller, the better; another order for every parent."""
    return digest_json([parent, peer])


def share_out(parent: str, reducers: Collection[str], parts: Sequence[Part]) -> dict[str, list[int]]:
    """Which parts, by index, each reducer averages: consecutive ones, as nearly equal in bytes as parts allow.

    In another order for every parent: of fewer parts than reducers, each has some in turn, and no key that a stranger draws has more.
    """
    ordered = sorted(reducers, key=lambda peer: rank(parent, peer))
    shares: dict[str, list[int]] = {peer: [] for peer in reducers}
    total = parts[-1].stop if parts else 0
    for index, part in enumerate(parts):
        shares[ordered[(part.begin + part.stop) * len(ordered) // (2 * total)]].append(index)
    return shares


def may_reduce(peers: Collection[str], trusted: Container[str]) -> set[str]:
    """Of a group's peers that others can dial: those that the host trusts, if there are enough of them, else all."""
    named = {peer for peer in peers if peer in trusted}
    return named if len(named) >= TRUSTED_NEEDED else set(peers)


def ticket_of(join: Join, peer: str, max_samples: int, receipts: Receipts = NO_RECEIPTS) -> Ticket:
    """What `peer` brings. Raises PeerLost when it is more than a contribution may hold, or than its receipt says."""
    if join.reduces and join.number == join.samples == 0:
        return Ticket(join.parent, Member(peer, 0, 0), True, join.without, draw=join.draw)
    member = _member(peer, join.number, join.samples, max_samples)
    if join.receipt and not receipts.hold(peer, member.number, member.samples, join.receipt):
        raise PeerLost(f"this run's host did not sign its receipt for {member.samples} samples of its contribution {member.number}")
    return Ticket(join.parent, member, join.reduces, join.without, join.norm, join.receipt, join.draw)


def _member(peer: str, number: int, samples: int, max_samples: int) -> Member:
    """Raises PeerLost when a value is out of the run's bounds."""
    if not number:
        raise PeerLost("contribution number 0")
    if not 0 < samples <= max_samples:
        raise PeerLost(f"{samples} samples, 1 to {max_samples} are allowed")
    return Member(peer, number, samples)


def group_of(
    said: Announcement, ticket: Ticket, leader: str, standing: Standing, max_samples: int, receipts: Receipts = NO_RECEIPTS
) -> Group:
    """The group a leader announced, checked as far as one member can: every other member checks its own place.

    Raises PeerLost, which names the leader: no fault of a link makes a group that is none.
    """
    try:
        members = tuple(_member(*member, max_samples) for *member, _ in said.members)
    except PeerLost as error:
        raise PeerLost(f"{leader[-6:]} announced a member with {error}", [leader]) from None
    norms = tuple(norm for *_, norm in said.members)
    group = Group(ticket.parent, members, said.reducers, said.attempt, norms, said.receipts, said.draws, late=said.late, leader=leader)
    fault = _fault(members, norms, said.reducers, ticket, leader, standing) or _false_receipt(members, said.receipts, ticket, receipts)
    if fault := fault or _false_draw(group, ticket):
        raise PeerLost(f"{leader[-6:]} announced {fault}", [leader])
    if unwanted := sorted(group.peers.intersection(ticket.without)):
        raise Refused(f"{leader[-6:]} announced a group with {unwanted[0][-6:]}, which we leave out")
    if leader not in standing.trusted and len(may_reduce(said.reducers, standing.trusted)) < len(said.reducers):
        # A leader that is trusted may say who reduces: it, or we, may not have heard yet of one more or one less. For that nobody is blamed.
        raise Refused(f"{leader[-6:]} lets others reduce than those that the host trusts")
    return group


def _fault(
    members: tuple[Member, ...], norms: tuple[float, ...], reducers: tuple[str, ...], ticket: Ticket, leader: str, standing: Standing
) -> str:
    """What is wrong with a group; '' when nothing is."""
    peers, we_reduce = [member.peer for member in members], ticket.member.peer in reducers
    if (ticket.member not in members and not ticket.assists) or leader not in reducers or not members:
        return "a group without us or itself"
    if peers != sorted(set(peers)) or list(reducers) != sorted(set(reducers)) or (ticket.assists and ticket.member.peer in peers):
        return "a group out of order"
    if (we_reduce and not ticket.reduces) or (ticket.assists and not we_reduce):
        return "a group with wrong roles"
    if not ticket.assists and norms[members.index(ticket.member)] != ticket.norm:
        return "another norm of our contribution"
    if any(member.number <= standing.included.get(member.peer, 0) for member in members):
        return "a contribution that is in the state already"
    if any(member.number > standing.highest_number for member in members):
        return "a contribution whose number no state may hold"
    return ""


def _false_receipt(members: tuple[Member, ...], given: tuple[str, ...], ticket: Ticket, receipts: Receipts) -> str:
    """What is wrong with a group's receipts; '' when nothing is."""
    if not given:
        return "no receipts, and we brought one" if ticket.receipt else ""
    if len(given) != len(members):
        return f"{len(given)} receipts for {len(members)} members"
    if not ticket.assists and given[members.index(ticket.member)] != ticket.receipt:
        return "another receipt of ours"
    return next(
        (
            f"a false receipt of {m.peer[-6:]}"
            for m, receipt in zip(members, given, strict=True)
            if receipt and not receipts.hold(m.peer, m.number, m.samples, receipt)
        ),
        "",
    )


def _false_draw(group: Group, ticket: Ticket) -> str:
    """What is wrong with a group's draws; '' when nothing is. A leader that says an earlier group once more has an earlier draw of ours."""
    if group.draws and len(group.draws) != len(group.reducers):
        return f"{len(group.draws)} draws for {len(group.reducers)} reducers"
    we_reduce = ticket.member.peer in group.reducers
    return "another draw of ours" if we_reduce and group.draw_of(ticket.member.peer) != ticket.draw else ""
