"""Proofs that a peer lied about a mean, by what it signed with its own key, so nobody else can make one. The proof alone bans the peer.

It signed two means of one share of a group (`Proof`), or one that is not that of its inputs (`wrong_means.py`).

A proof holds for ever, whoever brings it, so what peers know is a union, like the host's words (`bans.py`). Only runs for members have proofs:
elsewhere another key costs nothing (docs/decisions/0028, 0030). Not promised: that everybody who lies is proven to.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from swarm import files
from swarm.peer_key import has_signed
from swarm.records import Text
from swarm.run_config import RunConfig
from swarm.statements import HasSigned, Key, Signature, statement
from swarm.wrong_means import WrongMean, proves

log = logging.getLogger(__name__)
MOST_PROOFS = 128
"""As many of two means, of 1.5 kB each, as one message holds. One of a wrong mean has 0.8 MB at most, and 0.1 of five members."""
FIX = "If another program has its identity.key, delete that file and start again as a new peer."
"""For the owner of a peer that a proof bans."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """accused: the peer that signed both; key: its public key, which its id is the hash of; group: whose share it is; digests, signatures: of
    the two means."""

    accused: Text
    key: Key
    group: Text
    digests: tuple[Text, Text]
    signatures: tuple[Signature, Signature]


AnyProof = Proof | WrongMean
PROOFS: TypeAdapter[tuple[AnyProof, ...]] = TypeAdapter(Annotated[tuple[AnyProof, ...], Field(max_length=MOST_PROOFS)])
_WHY = {Proof: "it signed two different means of one share", WrongMean: "it signed a mean that is not that of what members sent it"}


class Proofs:
    """is_member: whether a peer is a member now, as far as we know; path: where they are kept; None: nowhere."""

    def __init__(
        self, run: RunConfig, signed: HasSigned = has_signed, is_member: Callable[[str], bool] = lambda peer: True, *, path: Path | None = None
    ):
        self._run, self._signed, self._is_member, self._path = run, signed, is_member, path
        # Those kept were of members when we heard of them; who is one now, nobody has told us yet.
        self._known = {proof.accused: proof for proof in (_read(path) if path is not None else ()) if self.holds(proof)}

    @property
    def all(self) -> tuple[AnyProof, ...]:
        return tuple(self._known.values())

    @property
    def of_two_means(self) -> tuple[Proof, ...]:
        """Those that fit into one message together."""
        return tuple(proof for proof in self.all if isinstance(proof, Proof))

    @property
    def of_wrong_means(self) -> tuple[WrongMean, ...]:
        return tuple(proof for proof in self.all if isinstance(proof, WrongMean))

    def wrong_mean_of(self, peer: str) -> WrongMean | None:
        """The proof that `peer` gave a wrong mean."""
        proof = self._known.get(peer)
        return proof if isinstance(proof, WrongMean) else None

    def reason(self, peer: str) -> str:
        """Why `peer` is banned; '' when nothing is proven of it."""
        return _WHY[type(self._known[peer])] if peer in self._known else ""

    def hear(self, proofs: Iterable[AnyProof]) -> bool:
        """Take over what holds and is news; whether anything was.

        Only of members: keys that nobody lets in cost nothing, and would leave no room for others. Of several proofs of one peer the first is
        looked at: a message full of false ones costs 10 ms.
        """
        said = {proof.accused: proof for proof in reversed([*proofs])}
        news = [proof for peer, proof in said.items() if peer not in self._known and self._is_member(peer) and self.holds(proof)]
        news = news[: self._room(len(news))]
        for proof in news:
            self._known[proof.accused] = proof
            log.warning("proven: %s: %s; it takes part no more", proof.accused, _WHY[type(proof)], extra={"proven": proof.accused})
        if news and self._path is not None:
            try:
                files.replace(self._path, json.dumps([asdict(proof) for proof in self.all]).encode())
            except OSError as error:
                log.warning("cannot keep the proofs in %s: %s", self._path, error.strerror)
        return bool(news)

    def _room(self, wanted: int) -> int:
        """For how many more there is room. Where they are too many, those whose membership has ended give way."""
        if len(self._known) + wanted > MOST_PROOFS:
            self._known = {peer: proof for peer, proof in self._known.items() if self._is_member(peer)}
        return max(MOST_PROOFS - len(self._known), 0)

    def holds(self, proof: AnyProof) -> bool:
        """Whether the accused signed two means of one share of this run, or a wrong one."""
        if isinstance(proof, WrongMean):
            return proves(proof, self._run, self._signed)
        one, other = proof.digests
        signed = zip(proof.digests, proof.signatures, strict=True)
        return (
            bool(self._run.members_of)
            and one != other
            and all(self._signed(proof.accused, statement(self._run.digest, proof.group, digest), proof.key, by) for digest, by in signed)
        )


def _proof(value: Any) -> AnyProof | None:
    try:
        return PROOFS.validate_python((value,))[0]
    except ValueError as error:
        log.warning("ignored a proof that was kept: %s", " ".join(str(error).split())[:200])
        return None


def _read(path: Path) -> tuple[AnyProof, ...]:
    """Those kept in a file; none where it is missing or damaged: whoever has them says them again."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        return tuple(filter(None, map(_proof, values)))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        log.warning("cannot read the proofs in %s: %s", path, str(error)[:200])
        return ()
