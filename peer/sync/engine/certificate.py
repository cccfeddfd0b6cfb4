"""A commit certificate: evidence that a state was committed by more than half of its members by samples, which outlives their being there.

A state is numbers that anybody can make up, and who is alive now may be a few that lie. So in a run for members each member seals the state
that its work is in: it signs what the round was. The seals of most make a certificate (docs/decisions/0026). Not promised: that the numbers
are right, or that the members did not lie together. In an open run a member costs a key, so nobody seals anything there.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from peer.contracts import CommittedRound
from peer.sync.engine.state import State
from swarm.digest import ELDER_CHARACTERS, digest_json
from swarm.members import Members
from swarm.records import Membership, PeerRecord
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

MOST_SIGNERS = 128
"""Of a certificate: those with the most samples. It has 140 kB then, and takes 30 ms to check."""


@dataclass(frozen=True)
class Signer:
    """One member's seal. key: its public key, whose hash its id is; membership: the host's word that it is a member of the run."""

    peer: str
    key: str
    seal: str
    membership: Membership


@dataclass(frozen=True)
class Certificate:
    """made: the round that made the state; signers: in the order of their ids."""

    made: CommittedRound
    signers: tuple[Signer, ...]

    @property
    def peers(self) -> set[str]:
        return {signer.peer for signer in self.signers}

    def to_json(self) -> dict[str, Any]:
        made = {**vars(self.made), "members": [dict(vars(member)) for member in self.made.members]}
        signers = [{**vars(signer), "membership": dict(vars(signer.membership))} for signer in self.signers]
        return {"made": made, "signers": signers}


class Shown(NamedTuple):
    """What a peer says of its state. line: the state and its ancestors, ELDER_CHARACTERS of each digest."""

    certificate: Certificate | None
    line: str


NOTHING = Shown(None, "")


class Judgement(NamedTuple):
    """Which of the peers that we have not met count. best, countersigned: the certificate, and the state that the host countersigned, that say so;
    where there is neither, all do. signed: whether they are signers of that certificate."""

    peers: Collection[str]
    best: Certificate | None = None
    countersigned: str = ""
    signed: bool = False

    @property
    def states(self) -> list[str]:
        """Digests of the states that the right one is on or after."""
        return [digest for digest in (self.best.made.digest if self.best else "", self.countersigned) if digest]


class Signs(Protocol):
    """What seals need of a node: `swarm.dht.SwarmNode`, or one of the simulator's."""

    peer_id: str

    def sign(self, statement: bytes) -> str: ...

    def key_of(self, peer: str) -> str: ...

    def has_signed(self, peer: str, statement: bytes, key: str, signature: str) -> bool: ...

    def lot(self, statement: bytes) -> str: ...

    def is_lot(self, peer: str, statement: bytes, key: str, lot: str) -> bool: ...


class Seals:
    """The seals of one run: our own are made, and others' are checked."""

    def __init__(self, run: RunConfig, node: Signs, members: Members):
        self._run, self._node, self._members = run.digest, node, members

    @property
    def peer_id(self) -> str:
        """Ours."""
        return self._node.peer_id

    @property
    def countersigned(self) -> str:
        """Digest of the state that the host has just countersigned, as far as we have heard; '' for none."""
        return self._members.countersigned

    @property
    def needed(self) -> bool:
        """Whether anybody seals anything: in a run for members only."""
        return self._members.needed

    def own(self, made: CommittedRound) -> Signer | None:
        """Ours for a state; None where our work is not in it, or where nobody would take it."""
        membership, peer = self._members.own, self._node.peer_id
        if not self.needed or membership is None or peer not in {member.peer for member in made.members}:
            return None
        return Signer(peer, self._node.key_of(peer), self._node.sign(_statement(self._run, made)), membership)

    def of(self, record: PeerRecord, made: CommittedRound) -> Signer | None:
        """What `record`, of a member of that round, brings; None where it is no seal of that state."""
        if not record.seal or record.membership is None:
            return None
        signer = Signer(record.peer_id, self._node.key_of(record.peer_id), record.seal, record.membership)
        return signer if self._is_sealed(made, signer) else None

    def checked(self, certificate: Certificate) -> Certificate | None:
        """`certificate` without those who are no members of the run any more, or banned; None where too few are left, or one has not sealed it."""
        if not self.needed or not all(self._is_sealed(certificate.made, signer) for signer in certificate.signers):
            return None
        for signer in certificate.signers:
            self._members.hear(signer.peer, signer.membership)
        left = tuple(signer for signer in certificate.signers if not self._members.refusal(signer.peer))
        return replace(certificate, signers=left) if is_enough(certificate.made, {signer.peer for signer in left}) else None

    def _is_sealed(self, made: CommittedRound, signer: Signer) -> bool:
        return self._node.has_signed(signer.peer, _statement(self._run, made), signer.key, signer.seal)


def certified(made: CommittedRound, signers: Mapping[str, Signer]) -> Certificate | None:
    """The certificate that these make, by their ids; None while they are too few."""
    most = sorted((member for member in made.members if member.peer in signers), key=lambda member: (-member.samples, member.peer))
    peers = sorted(member.peer for member in most[:MOST_SIGNERS])
    return Certificate(made, tuple(signers[peer] for peer in peers)) if is_enough(made, peers) else None


def is_enough(made: CommittedRound, peers: Collection[str]) -> bool:
    """Whether they have more than half of the round's samples."""
    return 2 * sum(member.samples for member in made.members if member.peer in peers) > sum(member.samples for member in made.members)


def strongest(certificates: Iterable[Certificate]) -> Certificate | None:
    """The one to go by: of those that have more than half as many signers as the largest, the one with the most samples.

    Samples alone can be made up, by a single member that makes a round of its own. To outdo a state that `n` have sealed, more than n / 2 must lie together.
    """
    given = list(certificates)
    most = max((len(certificate.signers) for certificate in given), default=0)
    large = [certificate for certificate in given if 2 * len(certificate.signers) > most]
    return max(large, key=lambda each: (each.made.samples, len(each.signers), each.made.digest), default=None)


def judged(shown: Mapping[str, Shown], ours: Shown = NOTHING, countersigned: str = "") -> Judgement:
    """Which of those who have shown this count: the signers of the strongest certificate; where none of them is here, those on or after its state.

    A line may be seconds old, and a liar shows the newest certificate first: so signers count whatever their line says. Where nobody is left,
    as when only we have that certificate, all count as they do without one. countersigned: whoever is on or after that state comes first.
    """
    if sure := {peer: each for peer, each in shown.items() if countersigned and is_on(each.line, countersigned)}:
        among = judged(sure, ours if is_on(ours.line, countersigned) else NOTHING)
        return among._replace(countersigned=countersigned)
    best = strongest(each.certificate for each in (*shown.values(), ours) if each.certificate is not None)
    if best is None:
        return Judgement(shown.keys())
    if signers := shown.keys() & best.peers:
        return Judgement(signers, best, signed=True)
    after = {peer for peer, each in shown.items() if is_on(each.line, best.made.digest)}
    return Judgement(after, best) if after else Judgement(shown.keys())


def line_of(state: State) -> str:
    return "".join(digest[:ELDER_CHARACTERS] for digest in (state.digest, *state.header.past()))


def is_on(line: str, digest: str) -> bool:
    """Whether the state of that digest is on a line."""
    return any(line.startswith(digest[:ELDER_CHARACTERS], at) for at in range(0, len(line), ELDER_CHARACTERS))


def _statement(run: str, made: CommittedRound) -> bytes:
    members = [[member.peer, member.number, member.samples] for member in made.members]
    said = {"run": run, "digest": made.digest, "parent": made.parent, "round": made.round, "samples": made.samples, "members": members}
    return f"distributed-diffusion state {digest_json(said)}".encode()
