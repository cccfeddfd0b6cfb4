"""What a host is told of its dataset once it was checked."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from datasetserver.cutting import MASK
from datasetserver.prepared import Ingested

_LISTED = 20  # rejected files shown on the terminal; all are in rejected.csv


def size(data: Ingested) -> str:
    held_out = sum(shard.samples for shard in data.manifest.held_out)
    beside = f", and {counted(held_out, 'picture')} held out" if held_out else ""
    return f"{counted(data.manifest.total, 'sample')} in {counted(len(data.manifest.shards), 'shard')}{beside}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def report(source: object, data: Ingested, tables: Path | None, masks: bool = False) -> Iterator[str]:
    """Lines for the terminal. tables: the folder with the whole lists; None where none were written. masks: whether the run has a use for them."""
    how = "checked" if data.fresh else "unchanged"
    yield f"dataset {source}: {size(data)} ({how}), {counted(len(data.rejected), 'file')} left out"
    if data.older:
        yield "  an older version of this program made these shards, and the run keeps them; --grow adds what is new in the dataset"
    for name, reason in data.rejected[:_LISTED]:
        # The reason may quote what a file says, as a name in a metadata file; a terminal takes no half of a surrogate pair.
        yield f"  left out {name}: {reason}".encode(errors="backslashreplace").decode()
    if len(data.rejected) > _LISTED:
        rest = f"; all of them are in {tables / 'rejected.csv'}" if tables else ""
        yield f"  ... and {len(data.rejected) - _LISTED} more{rest}"
    if masks and data.fresh and MASK not in (note for _, note in data.notes):
        yield "  no picture that was checked has a mask: --masked_loss changes nothing there; see docs/host.md"
    for note, number in Counter(note for _, note in data.notes).items():
        yield f"  {counted(number, 'picture')} with {note}{_see(tables, 'notes.csv')}"
    if data.duplicates:
        there = "is there twice" if len(data.duplicates) == 1 else "are there more than once"
        yield f"  {counted(len(data.duplicates), 'picture')} {there}{_see(tables, 'duplicates.csv')}; --duplicates drop keeps the first of each"


def _see(tables: Path | None, name: str) -> str:
    return f", see {tables / name}" if tables else ""
