"""Structured values, a little wrong: what a message becomes when its sender is of another version, broken, or a liar."""

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

import msgpack

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 1 << 53, (1 << 53) + 1, (1 << 64) - 1, -(1 << 63), 0.0, -0.5, 1e308, math.nan, math.inf, -math.inf, "", "1", "x" * 64,
    "x" * 65, "é", "\u2028\n\x00", "\U0010ffff" * 40, [], [[]], {}, {"wait": True},
]  # fmt: skip
"""What JSON and msgpack can both say."""
NAMES: list[Any] = ["x" * 100, "\u2028\n\x00\x1b", "é", "1"]
MSGPACK_VALUES = [*VALUES, b"", b"\xff", {1: 2}, msgpack.Timestamp(0, 0), msgpack.ExtType(5, b"x")]
MSGPACK_NAMES = [*NAMES, 5, b"head", 1.5, None]
_MOST_PLACES = 400
"""A longer value is not made longer: six hundred times a list that is long already takes minutes."""


def places(value: Any, path: tuple = ()) -> list[tuple]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in inside for place in places(inner, (*path, key)))]


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def mutated(values: Any, rng: random.Random, *, foreign: Sequence[Any] = VALUES, names: Sequence[Any] = NAMES) -> Any:
    """`values` with one place replaced, taken out, doubled, renamed, or swapped with another; itself is changed.

    foreign: what may stand in a place; names: what a key may become.
    """
    everywhere = places(values)
    path = rng.choice(everywhere)
    if not path:
        return copy.deepcopy(rng.choice(foreign))
    outer, key, what = at(values, path[:-1]), path[-1], rng.randrange(6)
    if what == 0:
        del outer[key]
    elif what == 1 and isinstance(outer, list) and len(everywhere) < _MOST_PLACES:
        outer[:] = outer * rng.choice([2, 600])
    elif what == 2:
        other = rng.choice(list(outer) if isinstance(outer, dict) else range(len(outer)))
        outer[key], outer[other] = outer[other], outer[key]
    elif what == 3 and isinstance(outer, dict):
        outer[rng.choice(names)] = outer.pop(key)
    elif what == 4 and type(outer[key]) is int:
        outer[key] += rng.choice([-1, 1, 7, 1 << 20])
    else:
        outer[key] = copy.deepcopy(rng.choice(foreign))
    return values


def spliced(values: Any, other: Any, rng: random.Random) -> Any:
    """`values` with a piece of `other` in one of its places."""
    path, piece = rng.choice(places(values)), copy.deepcopy(at(other, rng.choice(places(other))))
    if not path:
        return piece
    at(values, path[:-1])[path[-1]] = piece
    return values


def torn(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, taken out, put in or doubled."""
    torn = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        place, what = rng.randrange(len(torn) + 1), rng.randrange(5)
        if what == 0:
            del torn[place:]
        elif what == 1:
            del torn[place : place + rng.randrange(1, 9)]
        elif what == 2:
            torn[place:place] = rng.randbytes(rng.randrange(1, 9))
        elif what == 3:
            torn[place:place] = torn[place : place + rng.randrange(1, 65)]
        elif place < len(torn):
            torn[place] = rng.choice([0, 0x7F, 0x80, 0xFF, torn[place] ^ (1 << rng.randrange(8))])
    return bytes(torn)
