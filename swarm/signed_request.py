"""How a peer signs what it asks of a dataset server: three headers beside the body, the same for every request that speaks in a peer's name.

The peer's RSA key signs method, path, time and the body's digest. The time makes a recorded request worthless after a minute; the server
remembers for as long which signatures it has seen. A peer with a wrong clock learns the server's when it is refused.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarm.digest import digest_bytes
from swarm.peer_key import PeerKey

KEY_HEADER, TIME_HEADER, SIGNATURE_HEADER = "X-Peer-Key", "X-Peer-Time", "X-Peer-Signature"
SERVER_TIME_HEADER = "X-Server-Time"
CLOCK_DIFFERS = "clock_differs"
"""The code of the refusal that comes with the server's time."""
WINDOW_SECONDS = 60.0
"""A request's time and the server's differ by at most this much: a body may take 30 s to arrive."""


def statement(method: str, path: str, at: str, body: bytes) -> bytes:
    """What is signed. path: as docs/http.md has it, without what a proxy puts before it."""
    return f"distributed-diffusion request {method} {path} {at} {digest_bytes(body)}".encode()


@dataclass
class Signer:
    """Signs as one peer. clock: UNIX seconds."""

    key: PeerKey
    clock: Callable[[], float] = time.time
    _ahead: float = field(default=0.0, init=False)
    _last: float = field(default=0.0, init=False)

    def headers(self, method: str, path: str, body: bytes) -> dict[str, str]:
        self._last = max(self.clock() + self._ahead, self._last + 1e-6)  # no two alike, or the second is taken for a copy of the first
        at = f"{self._last:.6f}"
        signature = self.key.sign(statement(method, path, at, body))
        return {KEY_HEADER: self.key.public, TIME_HEADER: at, SIGNATURE_HEADER: signature}

    def learn(self, headers: Mapping[str, str]) -> bool:
        """Take over the server's time from a refusal; whether it says one."""
        try:
            said = float(headers.get(SERVER_TIME_HEADER, ""))
        except ValueError:
            return False
        if not abs(said) < 1e11:
            return False
        self._ahead, self._last = said - self.clock(), 0.0
        return True
