"""Who may take part in a run: anybody, or in a run for members the peers that its host let in; never a peer that the host has banned.

A membership names a peer and a time. It is signed with the host's key, which the run's configuration names (`members_of`), so nobody can
put another key in its place. Each peer shows its own membership in its record and at the beginning of each stream (docs/decisions/0017).
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swarm.bans import Bans
from swarm.digest import digest_json
from swarm.proofs import Proofs
from swarm.records import Membership
from swarm.run_config import RunConfig
from swarm.signing import BadSignature, HostKey, check_signature

LIFE_SECONDS = 7 * 86_400.0
"""Peers renew daily, so the server may be away for 6 days. A removed token stops renewals: what it gave ends within 7 days."""
COUNTERSIGNED_SECONDS = 600.0
"""Who stands 512 rounds or more after a countersigned state cannot show that it does, and a liar can say so. Those take longer, with rounds of 1.2 s."""
_MOST_AHEAD_SECONDS = 60.0
"""A word that is dated later came of a clock that was ahead, and would count until its date has passed."""
NOT_A_MEMBER = "this run is for members, and you show no membership of it: join it through its dataset server"
MEMBERSHIP: TypeAdapter[Membership] = TypeAdapter(Membership)
_MOST_REMEMBERED = 4096


class Members:
    """The members that one peer knows. needed: whether the run is for members. own: its own membership, if it has one. wall: UNIX seconds.
    proofs: of what members did."""

    def __init__(
        self,
        run: RunConfig,
        bans: Bans | None = None,
        own: Membership | None = None,
        wall: Callable[[], float] = time.time,
    ):
        self.run, self._wall, self.needed = run, wall, bool(run.members_of)
        self.bans, self.own, self.proofs = bans or Bans(run), own, Proofs(run, is_member=self.has)
        self._until: dict[str, int] = {}

    @property
    def countersigned(self) -> str:
        """Digest of the state that the host has countersigned within COUNTERSIGNED_SECONDS; '' for none."""
        word = self.bans.countersigning
        return word.about if word is not None and -_MOST_AHEAD_SECONDS < self._wall() - word.at / 1000 < COUNTERSIGNED_SECONDS else ""

    def has_ended(self) -> bool:
        """Whether the others ignore us by now."""
        return self.needed and (self.own is None or self.own.until <= self._wall())

    def hear(self, peer: str, shown: Membership | None) -> None:
        """Note what `peer` has shown. The caller knows that it is `peer`: from the transport, or from a record's signature."""
        if shown is None or shown.until <= self._until.get(peer, 0) or not is_signed(self.run, peer, shown):
            return
        self._until[peer] = shown.until
        while len(self._until) > _MOST_REMEMBERED:
            del self._until[min(self._until, key=self._until.__getitem__)]

    def refusal(self, peer: str) -> str:
        """Why `peer` is ignored, as it is told; '' when it may take part."""
        if reason := self.bans.reason(peer):
            return f"you are banned by the host: {reason}"
        if reason := self.proofs.reason(peer):
            return f"you are banned by a proof: {reason}"
        return "" if not self.needed or self.has(peer) else NOT_A_MEMBER

    def has(self, peer: str) -> bool:
        """Whether `peer` is a member, or need not be one."""
        return not self.needed or self._until.get(peer, 0) > self._wall()


def sign_membership(key: HostKey, run: RunConfig, peer: str, wall: Callable[[], float] = time.time) -> Membership:
    """The host's word that `peer` may take part in `run` from now on."""
    until = int(wall() + LIFE_SECONDS)
    return Membership(until=until, signature=key.sign("member", _digest(run.digest, peer, until)))


def is_signed(run: RunConfig, peer: str, shown: Membership) -> bool:
    """Whether the host of `run` gave it to `peer`."""
    return _is_signed(run.digest, run.members_of, peer, shown.until, shown.signature)


def read_membership(values: Any) -> Membership | None:
    """From a file or another process; None for what is none."""
    try:
        return MEMBERSHIP.validate_python(values)
    except ValidationError:
        return None


def said(membership: Membership | None) -> Mapping[str, Any] | None:
    """As another process or a file is told of it."""
    return dict(vars(membership)) if membership else None


@functools.lru_cache(_MOST_REMEMBERED)  # 0.2 ms each, and every record brings the same one 12 times a minute
def _is_signed(run: str, key: str, peer: str, until: int, signature: str) -> bool:
    try:
        check_signature("member", _digest(run, peer, until), signature, key)
    except BadSignature:
        return False
    return True


def _digest(run: str, peer: str, until: int) -> str:
    return digest_json({"run": run, "peer": peer, "until": until})
