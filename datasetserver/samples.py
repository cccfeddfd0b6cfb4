"""Sets of samples as bit masks per shard epoch (bit i: sample i of the shard), and the keys that peers write for them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from datasetserver.refused import Refused

ShardEpochId = tuple[int, int]
"""(epoch, shard)"""
Masks = dict[ShardEpochId, int]
_ONE = ord("1")


def parse_keys(keys: Sequence[str], samples: Callable[[ShardEpochId], int]) -> Masks:
    """Masks per shard epoch; samples: of a shard epoch, 0 where there is none.

    Refused (422) for a key that the dataset does not have or that is given twice.
    """
    masks: Masks = {}
    for item, indices in _by_shard_epoch(keys).items():
        uid, mask = _parse_shard_epoch(item, list(map(int, indices)), samples)
        if masks.get(uid, 0) & mask:  # the same shard epoch, written in two ways
            raise _given_twice(f"{item}:{indices[0]}")
        masks[uid] = masks.get(uid, 0) | mask
    return masks


def _by_shard_epoch(keys: Sequence[str]) -> dict[str, list[str]]:
    """Indices by shard epoch."""
    item = keys[0].rpartition(":")[0] if keys else ""
    rest = "\n".join(["", *keys]).replace(f"\n{item}:", "\n")
    if keys and ":" not in rest:  # all of one shard epoch, as most are: half the time of the other way
        return {item: rest[1:].split("\n")}
    by_shard_epoch: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        item, _, index = key.rpartition(":")
        by_shard_epoch[item].append(index)
    return by_shard_epoch


def _parse_shard_epoch(item: str, indices: list[int], samples: Callable[[ShardEpochId], int]) -> tuple[ShardEpochId, int]:
    epoch, shard = map(int, item.split(":"))
    last = max(indices)
    if last >= samples((epoch, shard)):
        raise Refused(422, "no_such_sample", f"The dataset has no sample {item}:{last}.", "Check which run this is.")
    if len(indices) == 1:  # 200,000 keys, each of another shard epoch, took 1.1 s
        return (epoch, shard), 1 << last
    digits = bytearray(b"0") * (last + 1)  # half the time of adding up numbers of 256 bits
    for index in indices:
        digits[index] = _ONE
    if digits.count(b"1") < len(indices):
        raise _given_twice(f"{item}:{Counter(indices).most_common(1)[0][0]}")
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
    """How many samples there are in all shard epochs together."""
    return sum(mask.bit_count() for mask in masks.values())
