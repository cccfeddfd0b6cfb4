"""How fast pictures become shards: images per second of one core, against reading the same pictures with `datasets` and with Pillow alone.

    .venv/bin/python benchmarks/ingest.py [--pictures 1000]

Ingest reads, decodes in full, checks, digests and writes shards to the disk, in this process and then with a process per core. `datasets` reads them
as an imagefolder, streaming, and decodes them to RGB; the bare loop opens, decodes and converts each with Pillow and does nothing else. Pictures
are synthetic JPEGs of 1024x768, in the page cache. `images/s per core`: by CPU time, user and system, of the process and its children;
`images/s`: by the clock. `png`: of the same pictures with an alpha channel, which ingest puts on white and writes again.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image

from benchmarks.common import argument_parser, print_result, print_table, start
from datasetserver.ingest import ingest
from swarm.errors import UserError


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--pictures", type=int, default=1000, help="JPEGs; a tenth as many PNGs [1000]")
    return start(parser, lambda options: measure(options.pictures))


def measure(count: int) -> None:
    if count < 10:
        raise UserError(f"{count} pictures are too few.", fix="Use 10 or more.")
    with tempfile.TemporaryDirectory(prefix="ingest-") as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")  # before it is imported
        import datasets

        from benchmarks.loader import write_dataset  # here: processes of the ingest import this file, and that one imports torch

        datasets.disable_progress_bars()
        write_dataset(folder / "jpeg", count)
        write_pngs(folder / "png", folder / "jpeg", count // 10)
        rows = []
        for kind in ("jpeg", "png"):
            source, work = folder / kind, folder / "work" / kind
            pictures = len(list(source.glob("*.txt")))
            one = row(kind, "ingest, in this process", pictures, lambda: ingest(source, work / "one", workers=0).manifest.total)  # noqa: B023
            many = row(kind, "ingest, a process per core", pictures, lambda: ingest(source, work / "many").manifest.total)  # noqa: B023
            theirs = row(kind, "datasets, imagefolder", pictures, lambda: with_datasets(source))  # noqa: B023
            bare = row(kind, "Pillow, bare loop", pictures, lambda: with_pillow(source))  # noqa: B023
            rows += [one, many, theirs, bare]
            for figures in rows[-4:]:
                figures["ratio to Pillow"] = figures["images/s per core"] / bare["images/s per core"]
    print_table(rows)
    speeds = [figures["images/s per core"] for figures in rows[:4]]
    result = {"images_per_core_second": speeds[0], "ratio_datasets": speeds[0] / speeds[2], "ratio_pillow": speeds[0] / speeds[3]}
    print_result({**result, "images_per_second_all_cores": rows[1]["images/s"], "pictures": count})


def row(kind: str, what: str, count: int, work: Callable[[], int]) -> dict[str, str | float]:
    """Do the work, which must find `count` pictures, and say how fast it was."""
    begun, before = time.perf_counter(), sum(os.times()[:4])
    found = work()
    spent, passed = sum(os.times()[:4]) - before, time.perf_counter() - begun
    if found != count:
        raise UserError(f"{what} found {found} of {count} pictures.", fix="This is a fault of the benchmark.")
    print(f"{kind}, {what}: {count} in {passed:.1f} s", file=sys.stderr, flush=True)
    return {"pictures": kind, "what": what, "images/s per core": count / spent, "images/s": count / passed}


def write_pngs(folder: Path, jpegs: Path, count: int) -> None:
    folder.mkdir()
    alpha = Image.radial_gradient("L").resize((1024, 768))
    for number in range(count):
        with Image.open(jpegs / f"{number}.jpg") as picture:
            picture.putalpha(alpha)
            picture.save(folder / f"{number}.png", compress_level=1)
        (folder / f"{number}.txt").write_text(f"picture {number}")


def with_datasets(folder: Path) -> int:
    import datasets

    rows = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train", streaming=True, drop_labels=True)
    return sum(row["image"].convert("RGB").width > 0 for row in rows)


def with_pillow(folder: Path) -> int:
    count = 0
    for path in sorted(folder.iterdir()):
        if path.suffix in (".jpg", ".png"):
            with Image.open(path) as picture:
                picture.convert("RGB")
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(main())
