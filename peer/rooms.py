"""Rooms: a folder of modules of which an option names one (`--sync parameters` is `peer/sync/parameters.py`)."""

import importlib
from types import ModuleType


def load_part(room: str, name: str) -> ModuleType:
    return importlib.import_module(f"peer.{room}.{name}")
