"""How much one address may ask for: requests per second, requests at once, and bytes of bodies at once. Beyond: 429 with Retry-After.

An address is an IPv4 address or an IPv6 /64, which is what one customer gets. This machine itself is not limited: a proxy on it
names its callers (`X-Forwarded-For`). Nothing here tells peers behind one router apart, so the limits leave room for a hundred.
"""

import contextlib
import functools
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from datasetserver.addresses import parse
from datasetserver.answers import RefusedWith

AT_ONCE = 64
BODY_BYTES_AT_ONCE = 32 << 20
_MAX_ADDRESSES = 20_000  # remembered at a time, about 10 MB; those that ask for nothing are forgotten first


@dataclass
class _Caller:
    """tokens: requests that it may make now; as of: seconds of the clock."""

    tokens: float
    as_of: float
    at_once: int = 0
    body_bytes: int = 0


@dataclass
class Limits:
    """per_second: requests of one address, with a burst of ten seconds' worth; 0: no limit. clock: in seconds."""

    per_second: float = 50.0
    clock: Callable[[], float] = time.monotonic
    _callers: OrderedDict[str, _Caller] = field(default_factory=OrderedDict)

    @contextlib.contextmanager
    def admit(self, address: str, body_bytes: int = 0) -> Iterator[None]:
        """One request of a caller at `address`, which announces or may send `body_bytes`. Raises Refused (429)."""
        name = subject(address)
        if not self.per_second or name is None:
            yield
            return
        caller = self._caller(name)
        if caller.at_once >= AT_ONCE or caller.body_bytes + body_bytes > BODY_BYTES_AT_ONCE:
            raise _too_many(f"{caller.at_once} requests of {name} are being answered.", 1)
        if caller.tokens < 1:
            raise _too_many(f"More than {self.per_second:g} requests per second from {name}.", (1 - caller.tokens) / self.per_second)
        caller.tokens -= 1
        caller.at_once += 1
        caller.body_bytes += body_bytes
        try:
            yield
        finally:
            caller.at_once -= 1
            caller.body_bytes -= body_bytes

    def _caller(self, name: str) -> _Caller:
        now, burst = self.clock(), max(1.0, 10 * self.per_second)
        caller = self._callers.pop(name, None) or _Caller(burst, now)
        caller.tokens = min(burst, caller.tokens + (now - caller.as_of) * self.per_second)
        caller.as_of = now
        self._callers[name] = caller
        if len(self._callers) > _MAX_ADDRESSES:
            oldest = next((other for other, known in self._callers.items() if not known.at_once), name)
            del self._callers[oldest]
        return caller


@functools.lru_cache(maxsize=4096)
def subject(address: str) -> str | None:
    """Whom a limit is about; None for this machine."""
    parsed = parse(address)
    if parsed is None:
        return "elsewhere"
    if parsed.is_loopback:
        return None
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


def _too_many(message: str, seconds: float) -> RefusedWith:
    return RefusedWith(429, "too_many_requests", message, "Wait as Retry-After says.", {"Retry-After": str(max(1, math.ceil(seconds)))})
