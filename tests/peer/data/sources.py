"""Small datasets for `test_every_source.py`, and how each source comes to one: a new source adds a function of its name at the end."""

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from datasetserver.ingest import ingest
from peer.config import PeerConfig
from peer.contracts import Source, SourceContext
from peer.data.client.runs import fetch_run
from peer.rooms import load_part
from swarm.run_config import RunConfig
from tests.identities import id_of, identity_file


@dataclass(frozen=True)
class Row:
    """image: its bytes; or a file of this machine, outside of the dataset. upright: (H, W, 3), what is trained; None: nothing is."""

    name: str
    image: bytes | Path
    captions: tuple[str, ...]
    upright: np.ndarray | None = None


def encoded(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def plain(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (8, 16, 3), np.uint8)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def good_rows() -> list[Row]:
    grey = np.arange(128, dtype=np.uint16).reshape(8, 16) * 512
    clear = np.dstack([plain(5), np.zeros((8, 16), np.uint8)])
    return [
        Row("plain.png", encoded(plain(0)), ("a caption",), plain(0)),
        Row("d\u00e9j\u00e0 vu.png", encoded(plain(1)), ("un cafe\u0301\nau lait \u732b",), plain(1)),
        Row("several.webp", encoded(plain(2), "WEBP", lossless=True), ("one", "two"), plain(2)),
        Row("on its side.png", encoded(plain(3), exif=turned(6)), ("upright",), np.rot90(plain(3), -1)),
        Row("no such turn.png", encoded(plain(4), exif=turned(9)), ("as it lies",), plain(4)),
        Row("grey.png", encoded(grey), ("16 bits",), np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=-1)),
        Row("clear.png", encoded(clear), ("white",), np.full((8, 16, 3), 255, np.uint8)),
        Row("bitmap.bmp", encoded(plain(6), "BMP"), ("a bitmap",), plain(6)),
    ]


def bad_rows(private: Path) -> list[Row]:
    """private: a picture of this machine."""
    whole = encoded(np.random.default_rng(7).integers(0, 256, (64, 64, 3), np.uint8))
    return [
        Row("no picture.png", b"no picture", ("words",)),
        Row("cut off.png", whole[: len(whole) // 2], ("words",)),
        Row("wordless.png", encoded(plain(8)), ()),
        Row("blank.png", encoded(plain(9)), (" \n",)),
        Row("elsewhere.png", private, ("words",)),
        Row("pixels.png", encoded(np.zeros((1, 40_000, 3), np.uint8)), ("too wide",)),
    ]


def write_folder(rows: list[Row], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    told = []
    for row in rows:
        path = folder / row.name
        path.symlink_to(row.image) if isinstance(row.image, Path) else path.write_bytes(row.image)
        if len(row.captions) > 1:
            told.append(json.dumps({"file_name": row.name, "text": row.captions}) + "\n")
        elif row.captions:
            path.with_suffix(".txt").write_text(row.captions[0], encoding="utf-8")
    (folder / "metadata.jsonl").write_text("".join(told))
    return folder


def write_toml(rows: list[Row], folder: Path, prefix: str) -> Path:
    """Two folders and the TOML file that names them, which says the `prefix` of all captions; each row has one that begins with it."""
    bare = [replace(row, captions=(row.captions[0].removeprefix(prefix).strip(),)) for row in rows]
    for name, some in {"first": bare[::2], "second": bare[1::2]}.items():
        write_folder(some, folder / name)
    subsets = "".join(f'[[datasets.subsets]]\nimage_dir = "{name}"\n' for name in ("first", "second"))
    (folder / "data.toml").write_text(f'[general]\ncaption_prefix = "{prefix}"\n[[datasets]]\n{subsets}')
    return folder / "data.toml"


def write_tar(rows: list[Row], folder: Path) -> Path:
    """Rows of one caption each, in a WebDataset tar."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "000.tar", "w") as tar:
        for row in rows:
            for name, data in {row.name: row.image, f"{Path(row.name).stem}.txt": row.captions[0].encode()}.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


def write_parquet(rows: list[Row], folder: Path) -> Path:
    import datasets
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    schema = datasets.Features({"image": datasets.Image(), "text": datasets.List(datasets.Value("string"))}).arrow_schema
    files = [rows[::2], rows[1::2]] if len(rows) > 1 else [rows]
    for number, some in enumerate(files):
        images = [
            {"bytes": None, "path": str(row.image)} if isinstance(row.image, Path) else {"bytes": row.image, "path": None} for row in some
        ]
        table = pyarrow.Table.from_pydict({"image": images, "text": [list(row.captions) for row in some]}, schema=schema)
        pyarrow.parquet.write_table(table, folder / f"train-{number}-of-{len(files)}.parquet")
    return folder


HOSTS = {"Folder": write_folder, "Hub": write_parquet}
"""By the name of a host's source: writes a dataset that it reads."""


# -- a peer's: each is handed rows, an empty folder and `serve`, and returns what makes the source of one peer, as often as it is called


def directory(rows: list[Row], place: Path, serve) -> Callable[[], Source]:
    return _local("directory", place, train_data_dir=str(write_folder(rows, place / "data")))


def toml(rows: list[Row], place: Path, prefix: str) -> Callable[[], Source]:
    return _local("directory", place, train_data_dir=str(write_toml(rows, place / "data", prefix)))


def tar(rows: list[Row], place: Path) -> Callable[[], Source]:
    return _local("directory", place, train_data_dir=str(write_tar(rows, place / "data")))


def huggingface(rows: list[Row], place: Path, serve) -> Callable[[], Source]:
    return _local("huggingface", place, dataset_name=str(write_parquet(rows, place / "data")))


def dataset_server(rows: list[Row], place: Path, serve) -> Callable[[], Source]:
    ingest(write_folder(rows, place / "host0" / "data"), place / "trial", workers=0)  # whose error is the host's, but in this process
    host = serve(samples=0, shard_samples=3)
    run = RunConfig.from_mapping(fetch_run(host.url, 20).run, where=host.url)
    context = {"run": run, "url": host.url, "peer_id": id_of("alice")}
    return _local("dataset_server", place, context, identity_path=str(identity_file(place / "alice.key", "alice")))


def _local(name: str, place: Path, context: Mapping[str, object] | None = None, **peer) -> Callable[[], Source]:
    peer = PeerConfig(cache_dir=str(place / "cache"), **peer)
    context = {"run": RunConfig(), "peer_id": "alone", "epochs": 3, "batch_samples": 2, **(context or {})}
    return lambda: load_part("data", name).build(SourceContext(peer=peer, **context))
