"""Rooms: a folder of modules of which an option names one (`--sync parameters` is `peer/sync/parameters.py`)."""

import importlib
import pkgutil
from types import ModuleType

from swarm.errors import UserError
from swarm.options import nearest


def parts(room: str) -> list[str]:
    """Names that may be chosen in `peer/<room>`: its modules, sub-packages left out."""
    package = importlib.import_module(f"peer.{room}")
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.ispkg)


def load_part(room: str, name: str) -> ModuleType:
    """Import the module an option names. Raises UserError naming the nearest right one."""
    choices = parts(room)
    if name not in choices:
        option = {"models": "family", "methods": "method"}.get(room, room)
        raise UserError(f"--{option} '{name}' is unknown.{nearest(name, choices)}", fix=f"Use one of {', '.join(choices)}.")
    return importlib.import_module(f"peer.{room}.{name}")
