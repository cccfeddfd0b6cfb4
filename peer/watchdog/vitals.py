"""Whether a trainer stands still, and whether the kernel killed for want of memory."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from swarm.cgroups import MemoryGroups, line_of
from swarm.life import TRAINING, Sign

LONG = 6
"""Loading, drawing, saving and the first step may take this many times as long as a step."""
_PULSE_CPU_SECONDS, _PULSE_BYTES = 5.0, 4 << 20
_OOM_SECONDS = 10.0
_VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class Vitals:
    """What processes together have used since they began."""

    cpu_seconds: float = 0.0
    written_bytes: int = 0

    @classmethod
    def of(cls, processes: Sequence[psutil.Process]) -> "Vitals":
        cpu, written = 0.0, 0
        for process in processes:
            try:
                times = process.cpu_times()
                cpu += times.user + times.system
                written += process.io_counters().write_chars
            except (psutil.Error, OSError):
                continue
        return cls(cpu, written)

    def beyond(self, other: "Vitals") -> bool:
        """Whether something was done in between: a download writes, a compiler computes. One that ended in between counts, too."""
        cpu, written = abs(self.cpu_seconds - other.cpu_seconds), abs(self.written_bytes - other.written_bytes)
        return cpu >= _PULSE_CPU_SECONDS or written >= _PULSE_BYTES


class Watchdog:
    """Looks at one life. seconds: without a sign, after which a trainer that trains stands still; 0: never."""

    def __init__(self, seconds: float, began: float):
        self._seconds, self._sign = seconds, Sign("starting", began)
        self._vitals, self._pulse = Vitals(), began
        self._first_step: float | None = None

    def look(self, sign: Sign | None, vitals: Callable[[], Vitals], now: float) -> str:
        """Why the trainer is held to stand still, '' while it is not. vitals: asked only where the sign alone says too little."""
        if sign is not None and sign.at >= self._sign.at:
            self._sign = sign
            if sign.doing == TRAINING and self._first_step is None:
                self._first_step = sign.at
        silent = now - self._sign.at
        if not self._seconds or silent <= self._seconds:
            return ""
        if self._sign.doing == TRAINING:
            return f"no sign of life for {silent:.0f} s"
        if (seen := vitals()).beyond(self._vitals):
            self._vitals, self._pulse = seen, now
        idle = now - max(self._sign.at, self._pulse)
        return f"nothing was done for {idle:.0f} s while {self._sign.doing}" if idle > LONG * self._seconds else ""

    @property
    def trained_seconds(self) -> float:
        return 0.0 if self._first_step is None else self._sign.at - self._first_step


class OutOfMemory:
    """How often the kernel has killed a process for memory: in this process's control group, or else on this machine."""

    def __init__(self, vmstat: Path = _VMSTAT, groups: MemoryGroups | None = None, clock: Callable[[], float] = time.monotonic):
        self._vmstat, self._groups, self._clock = vmstat, groups or MemoryGroups(), clock
        self._seen: deque[tuple[float, int]] = deque()
        self.look()

    def look(self) -> bool:
        """Whether it did so in the last seconds; to be called every now and then."""
        now, kills = self._clock(), self._kills()
        self._seen.append((now, kills))
        while len(self._seen) > 1 and self._seen[1][0] <= now - _OOM_SECONDS:
            self._seen.popleft()
        return kills > self._seen[0][1]

    def _kills(self) -> int:
        kills = self._groups.kills()
        return (line_of(self._vmstat, "oom_kill") or 0) if kills is None else kills
