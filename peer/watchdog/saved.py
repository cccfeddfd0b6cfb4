"""Which checkpoints of an --output_dir are of the training that its supervisor keeps alive: those that it has not found there."""

from pathlib import Path

from peer.results.output_folder import EARLIER


class Saved:
    """What was saved since this was made. Renamed or numbered anew, as when a run is set aside and comes back, a checkpoint stays the one it was."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._before = _whole(folder) | {known for place in folder.glob(f"{EARLIER}/*") for known in _whole(place)}

    def __bool__(self) -> bool:
        return not _whole(self._folder) <= self._before


def _whole(folder: Path) -> set[tuple[int, int]]:
    """By the manifest's inode and time of writing, which renaming its folder changes neither of."""
    manifests = [path.stat() for path in folder.glob("checkpoint-*/manifest.json")]
    return {(manifest.st_ino, manifest.st_mtime_ns) for manifest in manifests}
