"""Which pictures of a dataset are held out of training, so that the loss of pictures that nobody learns can be measured: --validation_split."""

from collections.abc import Collection

from blake3 import blake3

from swarm.errors import UserError

MOST_HELD_OUT = 256
"""Of 256 pictures' losses the mean is known to a sixteenth of their deviation, and more pictures would be missing in training."""
_BITS = 64


def rank_of(name: str) -> float:
    """A picture's place in [0, 1) by the hash of its name: it stays where it is when the dataset grows."""
    digest = blake3(b"held out:" + name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[: _BITS // 8], "big") / 2**_BITS


def held_out(names: Collection[str], share: float) -> list[str]:
    """Those of different `names` in the first `share` of places, in their order, at most MOST_HELD_OUT.

    Raises UserError where a share above 0 is none or all of them.
    """
    ranks = sorted((rank, name) for name in names if (rank := rank_of(name)) < share)
    found = [name for _, name in ranks[:MOST_HELD_OUT]]
    if share and not 0 < len(found) < len(names):
        raise unfit(share, len(found), len(names))
    return found


def unfit(share: float, found: int, of: int) -> UserError:
    return UserError(
        f"validation_split {share:g} holds out {found} of {of} pictures.",
        fix=f"{'Lower' if found else 'Raise'} --validation_split, or add pictures: the hash of a picture's name decides.",
    )
