"""Sets of samples as bit masks per unit (bit i: sample i of the shard), and the keys that peers write for them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from datasetserver.refused import Refused

UnitId = tuple[int, int]
"""(epoch, shard)"""
Masks = dict[UnitId, int]
_ONE = ord("1")


def parse_keys(keys: Sequence[str], samples: Callable[[UnitId], int]) -> Masks:
    """Masks per unit; samples: of a unit, 0 where there is no such unit. Refused (422) for a key that the dataset does not have or that is given twice."""
    masks: Masks = {}
    for unit, indices in _by_unit(keys).items():
        uid, mask = _parse_unit(unit, list(map(int, indices)), samples)
        if masks.get(uid, 0) & mask:  # the same unit, written in two ways
            raise _given_twice(f"{unit}:{indices[0]}")
        masks[uid] = masks.get(uid, 0) | mask
    return masks


def _by_unit(keys: Sequence[str]) -> dict[str, list[str]]:
    """Indices by unit."""
    unit = keys[0].rpartition(":")[0] if keys else ""
    rest = "\n".join(["", *keys]).replace(f"\n{unit}:", "\n")
    if keys and ":" not in rest:  # all of one unit, as most are: half the time of the other way
        return {unit: rest[1:].split("\n")}
    by_unit: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        unit, _, index = key.rpartition(":")
        by_unit[unit].append(index)
    return by_unit


def _parse_unit(unit: str, indices: list[int], samples: Callable[[UnitId], int]) -> tuple[UnitId, int]:
    epoch, shard = map(int, unit.split(":"))
    last = max(indices)
    if last >= samples((epoch, shard)):
        raise Refused(422, "no_such_sample", f"The dataset has no sample {unit}:{last}.", "Check which run this is.")
    digits = bytearray(b"0") * (last + 1)  # half the time of adding up numbers of 256 bits
    for index in indices:
        digits[index] = _ONE
    if digits.count(b"1") < len(indices):
        raise _given_twice(f"{unit}:{Counter(indices).most_common(1)[0][0]}")
    return (epoch, shard), int(digits[::-1], 2)


def _given_twice(key: str) -> Refused:
    return Refused(422, "key_twice", f"Sample {key} is given twice.", "Give each key once.")


def full(samples: int) -> int:
    return (1 << samples) - 1


def indices(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


def union(masks: Iterable[int]) -> int:
    together = 0
    for mask in masks:
        together |= mask
    return together


def size(masks: Masks) -> int:
    """How many samples there are in all units together."""
    return sum(mask.bit_count() for mask in masks.values())
