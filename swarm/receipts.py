"""A receipt: the host's word that its server had leased all samples of a contribution to the peer that brings it, which says that they are trained.

It names run, peer, number and samples, so it is worth nothing to another peer, or for another contribution. Not promised: that the samples were
trained. What a receipt costs is their lease: the server counts them, under that peer's name and its owner's (docs/decisions/0023).
"""

import functools
from dataclasses import dataclass

from swarm.digest import digest_json
from swarm.run_config import RunConfig
from swarm.signing import BadSignature, HostKey, check_signature

_MOST_REMEMBERED = 4096


def sign_receipt(key: HostKey, run: RunConfig, peer: str, number: int, samples: int) -> str:
    """128 hex digits; 320 where a successor signs."""
    return key.sign("receipt", _digest(run.digest, peer, number, samples))


@dataclass(frozen=True)
class Receipts:
    """The receipts of one run, as a peer reads them. run: its digest.

    host_key: the one that the configuration of a run for members names, so that all peers know it; '' in other runs, which have no receipts:
    a peer that joined by another's address could not tell a forged one.
    """

    run: str = ""
    host_key: str = ""

    @classmethod
    def of(cls, run: RunConfig) -> "Receipts":
        return cls(run.digest, run.members_of)

    def hold(self, peer: str, number: int, samples: int, receipt: str) -> bool:
        """Whether the host gave `receipt` for exactly this."""
        return bool(self.host_key and receipt) and _is_signed(self.run, self.host_key, peer, number, samples, receipt)


@functools.lru_cache(_MOST_REMEMBERED)  # 0.1 to 0.3 ms each, and every attempt at a round brings the same ones
def _is_signed(run: str, key: str, peer: str, number: int, samples: int, receipt: str) -> bool:
    try:
        check_signature("receipt", _digest(run, peer, number, samples), receipt, key)
    except BadSignature:
        return False
    return True


def _digest(run: str, peer: str, number: int, samples: int) -> str:
    return digest_json({"run": run, "peer": peer, "number": number, "samples": samples})
