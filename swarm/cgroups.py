"""What Linux's control groups say of memory: how much this process may still take, and how often the kernel killed in its group.

A container, a systemd unit and a batch system set such limits. Both of the kernel's versions are read (Documentation/admin-guide/cgroup-v2.rst,
cgroup-v1/memory.rst). A group of this process may lie in others, and each of their limits holds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _Names:
    """A version's files. cache: the line of memory.stat with the pages of files that give way first."""

    limit: str
    used: str
    cache: str
    kills: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Names("memory.max", "memory.current", "inactive_file", "memory.events")


class MemoryGroups:
    """mount: where groups are folders. own: the file with the names of this process's groups."""

    def __init__(self, mount: Path = _MOUNT, own: Path = _OWN):
        self._groups = list(_groups(mount, own))

    def free_bytes(self) -> float:
        """What all limits leave, infinity without one. Pages of files count as used there, but give way."""
        return min((_free(folder, names) for folder, names in self._groups), default=math.inf)

    def kills(self) -> int | None:
        """How many processes of this group the kernel has killed for memory; None where no group says so."""
        for folder, names in self._groups:
            if (kills := line_of(folder / names.kills, "oom_kill")) is not None:
                return kills
        return None


def _groups(mount: Path, own: Path) -> Iterator[tuple[Path, _Names]]:
    """This process's own group first, then those that it lies in. A container sees its own as the mount itself, whatever its name outside."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names = (mount / "memory", _V1) if controllers else (mount, _V2)
        group = base / path.lstrip("/")
        yield from ((folder, names) for folder in (group, *group.parents) if folder.is_relative_to(base) and folder.is_dir())


def _free(folder: Path, names: _Names) -> float:
    try:
        limit, used = int((folder / names.limit).read_text()), int((folder / names.used).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf
    return limit - used + (line_of(folder / "memory.stat", names.cache) or 0)


def line_of(path: Path, name: str) -> int | None:
    """The number in the line that begins with `name`; None where there is none."""
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name} ")), None)
    except (OSError, ValueError, IndexError):
        return None
