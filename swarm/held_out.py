"""Which pictures of a dataset are held out of training, so that the loss of pictures that nobody learns can be measured: --validation_split.

A folder of a TOML file may have a share of its own in place of the run's. A folder whose share is 1 is never trained.
"""

from collections.abc import Iterable, Mapping

from blake3 import blake3

from swarm.errors import UserError

MOST_HELD_OUT = 256
"""Of 256 pictures' losses the mean is known to a sixteenth of their deviation, and more pictures would be missing in training."""
WHOLE = 1.0
"""The share of a folder that is never trained: what is beyond MOST_HELD_OUT is left out."""
_BITS = 64


def rank_of(name: str) -> float:
    """A picture's place in [0, 1) by the hash of its name: it stays where it is when the dataset grows."""
    digest = blake3(b"held out:" + name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[: _BITS // 8], "big") / 2**_BITS


def held_out(own: Mapping[str, float | None], share: float) -> list[str]:
    """Those of the pictures in the first part of places, in their order, at most MOST_HELD_OUT.

    own: by name the share of the picture's folder; None: the run's, `share`. Raises UserError where a run's share above 0 holds out none or
    leaves none to train, and where a folder has a share above 0 and the run has none.
    """
    refuse_own_share(own.values(), share)
    shares = {name: share if folders is None else folders for name, folders in own.items()}
    ranks = sorted((rank, name) for name, part in shares.items() if (rank := rank_of(name)) < part)
    found = [name for _, name in ranks[:MOST_HELD_OUT]]
    trained = len(shares.keys() - set(found) - {name for name, part in shares.items() if part == WHOLE})
    if share and not (found and trained):
        raise unfit(share, len(found), len(own))
    return found


def refuse_own_share(own: Iterable[float | None], share: float) -> None:
    """Raise UserError where a folder holds pictures out, and its run does not: nobody would measure them."""
    folders = next((part for part in own if part), None)
    if folders and not share:
        raise UserError(
            f"validation_split of a folder is {folders:g}, and the run's is 0.",
            fix="Remove it from the TOML file, or found the run with --validation_split SHARE, which is that of folders without one.",
        )


def unfit(share: float, found: int, of: int) -> UserError:
    return UserError(
        f"validation_split {share:g} holds out {found} of {of} pictures.",
        fix=f"{'Lower' if found else 'Raise'} --validation_split or its folders' own, or add pictures: the hash of a picture's name decides.",
    )
