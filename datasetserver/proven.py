"""What peers have proven of each other, told by any of them: the server refuses whom a proof bans (docs/decisions/0028, 0030).

A proof is signed by the accused itself, so nobody need believe who brings it. Not promised: that the server hears of every proof.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from datasetserver.refused import Refused
from swarm.budget import Budgets
from swarm.peer_key import has_signed
from swarm.proofs import AnyProof, HasSigned, Proofs
from swarm.run_config import RunConfig
from swarm.wrong_means import WrongMean
from swarm.wrong_states import WrongState

PROOFS_FILE = "proofs.json"
MOST_OF_AN_OWNER = 16
"""Peers of one token, or of one address of an --open server: it may have 64, and two such tokens must not take all of the 128 places."""
_LOOKS_PER_SECOND, _LOOKS_AT_ONCE = 0.1, 32
"""At proofs that are news, for one owner who brings them: two signatures each, 0.1 ms, or up to 25 and 5 ms. What is known already costs nothing."""


class Proven:
    """path: where they are kept, 128 at most; None: nowhere. signed: see `swarm.proofs`. clock: in seconds."""

    def __init__(self, run: RunConfig, path: Path | None, signed: HasSigned = has_signed, clock: Callable[[], float] = time.monotonic):
        self._run = run
        self._owners: Mapping[str, str] = {}
        self._proofs = Proofs(run, signed, lambda peer: peer in self._owners, path=path)
        self._looks = Budgets(_LOOKS_PER_SECOND, _LOOKS_AT_ONCE, clock=clock)

    def reason(self, peer: str) -> str:
        """Why `peer` is banned; '' when nothing is proven of it."""
        return self._proofs.reason(peer)

    def reasons(self, wrong: Mapping[str, str]) -> dict[str, str]:
        """For the host, why a proof bans each peer, and what became of the state that it made (`wrong_states.py`)."""
        return {peer: "; ".join(filter(None, (self.reason(peer), wrong.get(peer)))) for peer in self.peers()}

    def peers(self) -> list[str]:
        return sorted(proof.accused for proof in self._proofs.all)

    @property
    def wrong_means(self) -> tuple[WrongMean, ...]:
        return self._proofs.of_wrong_means

    def hear(self, owner: str, owners: Mapping[str, str], said: Iterable[AnyProof]) -> None:
        """Take over what is news, holds, and is of a member. owner: who answers for the peer that brings them; owners: who answers for each
        member among the accused and among `peers()`.

        Raises Refused (403) at the first that does not hold, or when `owner` has brought too many; those before it are taken.
        """
        self._owners = owners
        for proof in said:
            if self.reason(proof.accused) or proof.accused not in owners:
                continue
            self._look(owner)
            if not self._proofs.holds(proof):
                raise Refused(403, "no_proof", f"It does not prove that {proof.accused} signed two means of one share in this run, or a wrong one.", "See docs/http.md.")
            if self._of(owners[proof.accused]) < MOST_OF_AN_OWNER:
                self._proofs.hear([proof])

    def round_of(self, owner: str, state: WrongState) -> int | None:
        """The round of a state that the wrong mean made of which we have a proof; None where we have none of that peer.

        Raises Refused (403) when that mean did not make it, or when `owner` shows too many.
        """
        proof = self._proofs.wrong_mean_of(state.accused)
        if proof is None:
            return None
        self._look(owner)
        if (number := state.round_by(proof, self._run)) is None:
            raise Refused(403, "no_wrong_state", f"It does not show that a mean of {state.accused} made state {state.digest[:16]}.", "See docs/http.md.")
        return number

    def _look(self, owner: str) -> None:
        """Raises Refused."""
        if not self._looks.take(owner):
            raise Refused(403, "too_many_proofs", "This token or address brings more proofs than the server looks at.", "Leave it to others.")

    def _of(self, owner: str) -> int:
        """How many of an owner's peers are proven to have lied."""
        return sum(self._owners.get(peer) == owner for peer in self.peers())
