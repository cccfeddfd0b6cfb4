"""What strangers sent: msgpack no deeper than anything that we write, and in one line what is wrong with it."""

from typing import Any

import msgpack
from pydantic import ValidationError

DEEPEST = 16
"""A state's header, the deepest that we send, has 6 levels. msgpack itself takes 1,023, which Python can then neither print nor pack
again: `str` of such a value is a RecursionError wherever a log line quotes it."""

MOST_FAULTS = 16
"""More than these are counted and not described: describing 100,000 takes a second, and those of 1.6 MB of a run 3 s and 918 MB."""
_CONTAINERS = (dict, list)
"""All that msgpack makes, and nothing derived from them."""
_OPENING = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
"""One of these begins each of them. Of most messages a glance at the bytes tells that too few do: that takes a fifth of the time."""


def unpack(data: bytes | bytearray) -> Any:
    """Raises ValueError when it is no msgpack, or nested deeper than DEEPEST."""
    try:
        value = msgpack.unpackb(data)
    except msgpack.exceptions.UnpackException as error:
        raise ValueError(f"no msgpack: {error!r}") from None
    if len(data) - len(data.translate(None, _OPENING)) > DEEPEST and _deeper(value, DEEPEST):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return value


def fault(error: ValidationError) -> str:
    """The first thing that is wrong, where, and what was there instead; one line."""
    if error.error_count() > MOST_FAULTS:
        return f"{error.error_count()} values that do not fit"
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:80]
    if first["type"] == "missing":
        return f"without {where}"
    return f"{_quoted(where) or 'it'}: {first['msg'][:80]} ({_quoted(str(first['input']))})"


def _quoted(text: str) -> str:
    """The begin of what somebody else wrote, as a log line may hold it."""
    return ascii(text[:60])[1:-1][:60]


def _deeper(value: Any, levels: int) -> bool:
    """Whether containers lie within each other more than `levels` deep."""
    level = [value] if type(value) in _CONTAINERS else []
    while level and levels:
        inside = [outer.values() if type(outer) is dict else outer for outer in level]
        level, levels = [inner for values in inside for inner in values if type(inner) in _CONTAINERS], levels - 1
    return bool(level)
