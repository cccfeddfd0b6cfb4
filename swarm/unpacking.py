"""Msgpack that strangers sent: no deeper than anything that we write."""

from typing import Any

import msgpack

DEEPEST = 16
"""A state's header, the deepest that we send, has 6 levels. msgpack itself takes 1,023, which Python can then neither print nor pack
again: `str` of such a value is a RecursionError wherever a log line quotes it."""


def unpack(data: bytes | bytearray) -> Any:
    """Raises ValueError when it is no msgpack, or nested deeper than DEEPEST."""
    try:
        value = msgpack.unpackb(data)
    except msgpack.exceptions.UnpackException as error:
        raise ValueError(f"no msgpack: {error!r}") from None
    if _deeper(value, DEEPEST):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return value


def _deeper(value: Any, levels: int) -> bool:
    """Whether containers lie within each other more than `levels` deep."""
    level = [value] if isinstance(value, dict | list) else []
    while level and levels:
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level, levels = [inner for inner in inside if isinstance(inner, dict | list)], levels - 1
    return bool(level)
