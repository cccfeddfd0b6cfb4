"""Rooms of facts: a folder of modules, each of which says in one object what a part of a run is. A new file is known the day it appears."""

import functools
import importlib
import pkgutil
from types import ModuleType


@functools.cache
def modules(room: str) -> dict[str, ModuleType]:
    """The modules of `swarm/run/<room>` by name."""
    package = importlib.import_module(f"swarm.run.{room}")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return {name: importlib.import_module(f"swarm.run.{room}.{name}") for name in names}
