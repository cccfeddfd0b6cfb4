"""A dataset of the Hugging Face Hub, or one that `datasets` reads from a folder, streamed: rows with a picture and a caption."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from datasetserver.sources import Faults, Listing, Pair, in_random_order
from swarm.dataset_rows import NoPicture, read_picture
from swarm.errors import ExitCode, UserError
from swarm.picture_folder import Captions, several

WINDOW_ROWS = 1024
WINDOW_BYTES = 256 << 20


@dataclass(frozen=True)
class HubDataset:
    """What to read, in the words of diffusers' training scripts. config, revision: empty for the default. max_samples: 0 for all rows.

    Rows are named by their number, and shuffled within windows that fit into memory.
    """

    name: str
    config: str = ""
    split: str = "train"
    revision: str = ""
    image_column: str = "image"
    caption_column: str = "text"
    max_samples: int = 0

    def __str__(self) -> str:
        return self.name

    def list(self) -> Listing:
        """Nothing is fetched before the first pair is asked for. Going through the pairs raises UserError as soon as a row cannot be had."""
        faults: Faults = []
        return Listing({"hub": asdict(self)}, self._pairs(faults), faults, self.max_samples or None)

    def _pairs(self, faults: Faults) -> Iterator[Pair]:
        window: list[Pair] = []
        size = 0
        for number, row in enumerate(_rows(self)):
            name = f"{self.split}/{number:09d}"
            try:
                picture = read_picture(row[self.image_column], self.name)
            except NoPicture as reason:
                faults.append((name, str(reason)))
                continue
            window.append(Pair(name, picture, _captions(row[self.caption_column])))
            size += len(picture)
            if len(window) == WINDOW_ROWS or size > WINDOW_BYTES:
                yield from in_random_order(window)
                window, size = [], 0
        yield from in_random_order(window)


def _captions(value: Any) -> Captions:
    """Empty where it is no text."""
    try:
        return several(value)
    except TypeError:
        return ()


def _rows(hub: HubDataset) -> Iterator[dict[str, Any]]:
    """Rows with the two columns, pictures not decoded. Raises UserError."""
    import datasets

    try:
        rows = datasets.load_dataset(hub.name, hub.config or None, split=hub.split, revision=hub.revision or None, streaming=True)
        features = rows.features or rows._resolve_features().features
        for option, column in (("image_column", hub.image_column), ("caption_column", hub.caption_column)):
            if column not in features:
                raise UserError(f"{hub} has no column '{column}'; it has {', '.join(features)}.", fix=f"Give one of them as --{option}.")
        rows = rows.select_columns([hub.image_column, hub.caption_column])
        if isinstance(features[hub.image_column], datasets.Image):
            rows = rows.cast_column(hub.image_column, datasets.Image(decode=False))
        yield from rows.take(hub.max_samples) if hub.max_samples else rows
    except UserError:
        raise
    except Exception as error:  # `datasets` raises FileNotFoundError, ValueError, HfHubHTTPError, ArrowInvalid, ConnectionError, ...
        first = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise UserError(
            f"The dataset {hub} cannot be read: {first}",
            fix="Check its name, split, revision and the connection; what was checked already is kept.",
            code=ExitCode.NETWORK,
        ) from None
