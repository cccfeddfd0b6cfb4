"""Proofs that a peer signed two means of one share of a group: with its own key, so nobody else can make one. The proof alone bans the peer.

A proof holds for ever, whoever brings it, so what peers know is a union, like the host's words (`bans.py`). Only runs for members have proofs:
elsewhere another key costs nothing (docs/decisions/0028). Not promised: that everybody who lies signs two means.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from swarm import files
from swarm.digest import digest_json
from swarm.peer_key import has_signed
from swarm.records import Text
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)
MOST_PROOFS = 128
"""Of 1.5 kB each: as many as one message holds."""
FIX = "If another program has its identity.key, delete that file and start again as a new peer."
"""For the owner of a peer that a proof bans."""
HasSigned = Callable[[str, bytes, str, str], bool]
"""Whether a peer signed a statement: (peer, statement, key, signature)."""
Signature = Annotated[str, Field(strict=True, max_length=700, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]
"""Of a peer's key, in base64; '' for none."""
Key = Annotated[str, Field(strict=True, max_length=1000, pattern=r"^(ssh-rsa [!-~]+)?$")]
"""Of a peer, public, in OpenSSH's words; '' for none."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """accused: the peer that signed both; key: its public key, which its id is the hash of; group: whose share it is; digests, signatures: of
    the two means."""

    accused: Text
    key: Key
    group: Text
    digests: tuple[Text, Text]
    signatures: tuple[Signature, Signature]


PROOFS: TypeAdapter[tuple[Proof, ...]] = TypeAdapter(Annotated[tuple[Proof, ...], Field(max_length=MOST_PROOFS)])


class Proofs:
    """is_member: whether a peer is a member now, as far as we know; path: where they are kept; None: nowhere."""

    def __init__(
        self, run: RunConfig, signed: HasSigned = has_signed, is_member: Callable[[str], bool] = lambda peer: True, *, path: Path | None = None
    ):
        self._run, self._signed, self._is_member, self._path = run, signed, is_member, path
        # Those kept were of members when we heard of them; who is one now, nobody has told us yet.
        self._known = {proof.accused: proof for proof in (_read(path) if path is not None else ()) if self.holds(proof)}

    @property
    def all(self) -> tuple[Proof, ...]:
        return tuple(self._known.values())

    def reason(self, peer: str) -> str:
        """Why `peer` is banned; '' when nothing is proven of it."""
        return "it signed two different means of one share" if peer in self._known else ""

    def hear(self, proofs: Iterable[Proof]) -> bool:
        """Take over what holds and is news; whether anything was.

        Only of members: keys that nobody lets in cost nothing, and would leave no room for others. Of several proofs of one peer the first is
        looked at: a message full of false ones costs 10 ms.
        """
        said = {proof.accused: proof for proof in reversed([*proofs])}
        news = [proof for peer, proof in said.items() if peer not in self._known and self._is_member(peer) and self.holds(proof)]
        news = news[: self._room(len(news))]
        for proof in news:
            self._known[proof.accused] = proof
            log.warning("proven: %s signed two different means of one share: it takes part no more", proof.accused, extra={"proven": proof.accused})
        if news and self._path is not None:
            try:
                files.replace(self._path, json.dumps([vars(proof) for proof in self.all]).encode())
            except OSError as error:
                log.warning("cannot keep the proofs in %s: %s", self._path, error.strerror)
        return bool(news)

    def _room(self, wanted: int) -> int:
        """For how many more there is room. Where they are too many, those whose membership has ended give way."""
        if len(self._known) + wanted > MOST_PROOFS:
            self._known = {peer: proof for peer, proof in self._known.items() if self._is_member(peer)}
        return max(MOST_PROOFS - len(self._known), 0)

    def holds(self, proof: Proof) -> bool:
        """Whether both signatures are of the accused, for two means of one share of this run."""
        one, other = proof.digests
        signed = zip(proof.digests, proof.signatures, strict=True)
        return (
            bool(self._run.members_of)
            and one != other
            and all(self._signed(proof.accused, statement(self._run.digest, proof.group, digest), proof.key, by) for digest, by in signed)
        )


def statement(run: str, group: str, digest: str) -> bytes:
    """What a reducer signs of the mean of its share. run: the run's digest."""
    return f"distributed-diffusion share {digest_json({'run': run, 'group': group, 'digest': digest})}".encode()


def _read(path: Path) -> tuple[Proof, ...]:
    """Those kept in a file; none where it is missing or damaged: whoever has them says them again."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        return PROOFS.validate_python(values)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        log.warning("cannot read the proofs in %s: %s", path, str(error)[:200])
        return ()
