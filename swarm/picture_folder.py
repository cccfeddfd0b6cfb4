"""Which pictures a folder has, and which captions: one rule for the host that makes shards of it and for the peer that trains on it.

A picture's caption is the first that there is and that is not empty: its row in a metadata.jsonl or metadata.csv, the .txt or .caption of the
same stem beside it, and the name of its folder where that is like kohya's `10_sks dog`, whose pictures come ten times an epoch. Members of
the WebDataset tars there are pictures, too. Pictures are not opened here, and caption files are read only where a picture has two: both may be many.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarm.captions import CAPTION_COLUMNS, METADATA, Captions, Faults, Row, one_line, read_metadata
from swarm.errors import UserError
from swarm.picture_file import BadSample, with_mask
from swarm.protocol import MAX_CAPTION_BYTES
from swarm.tars import members

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
MAX_FILE_BYTES = 256 << 20
CAPTION_SUFFIXES = (".txt", ".caption")
_MASK_SUFFIX = ".mask.png"
_PACKED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_OTHER_PICTURES = (".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl")
_NAMED_FAULTS = 5
# Kohya's folders repeat what is in them; four digits begin a year more often than they count repeats.
_REPEATED = re.compile(r"(\d{1,3})_(.+)")
_OF_A_SERVER = {"ingest.json", "ledger.sqlite"}
"""Files of a server's work folder. Its tars hold the dataset's own pictures, once more."""


@dataclass(frozen=True)
class Piece:
    """`size` bytes of a file from `offset` on: a member of a tar."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class Pair:
    """A picture and its captions, not yet looked at; `name` is its path within the dataset.

    caption: itself, or several, of which chance takes one, or where it is; None where there is none. spare: instead of one that is missing or
    empty; '' for none. empty_ok: it may be empty or missing in the end. repeats: how often the picture comes in an epoch. mask: a picture of where
    the loss counts. masked: its transparency is such a mask. around: what comes before and after each of its captions.
    weight: what its loss is multiplied with. validation_split: of its folder's pictures, the share that is held out; None: the run's.
    """

    name: str
    image: Path | Piece | bytes
    caption: Path | Piece | Captions | None
    spare: str = ""
    empty_ok: bool = False
    repeats: int = 1
    mask: Path | Piece | None = None
    masked: bool = False
    around: tuple[str, str] = ("", "")
    weight: float = 1.0
    validation_split: float | None = None

    def read(self) -> bytes:
        """The picture's bytes; where it has a mask of its own, a PNG with that as its alpha channel. Raises BadSample."""
        data, mask = self.parts()
        return with_mask(data, mask) if mask else data

    def parts(self) -> tuple[bytes, bytes]:
        """The bytes of the picture, and of the mask that it has beside it; b'' for none. Raises BadSample."""
        mask = _read(self.mask, MAX_FILE_BYTES, "its mask is larger than") if self.mask else b""
        return _read(self.image, MAX_FILE_BYTES, "larger than"), mask

    def captions(self) -> Captions:
        """At least one, each of one line, together no longer than a shard's caption may be. Raises BadSample."""
        texts = self.caption if isinstance(self.caption, tuple) else (_read_text(self.caption),) if self.caption else ()
        captions = tuple(filter(None, map(one_line, texts))) or tuple(filter(None, [one_line(self.spare)]))
        if not captions and not self.empty_ok:
            raise BadSample("no caption: there is no .txt or .caption file of that name" if self.caption is None else "caption is empty")
        if any(self.around):
            before, after = map(one_line, self.around)
            captions = tuple(" ".join(filter(None, (before, caption, after))) for caption in captions or ("",))
        if len("\n".join(captions).encode()) > MAX_CAPTION_BYTES:
            raise BadSample(f"caption is longer than {MAX_CAPTION_BYTES >> 10} KiB")
        return captions or ("",)


def list_folder(
    folder: Path,
    faults: Faults,
    column: str = CAPTION_COLUMNS[0],
    masks: bool = False,
    without: Collection[Path] = (),
    extension: str = CAPTION_SUFFIXES[0],
) -> list[Pair]:
    """The pictures below `folder`, also those in its tars, by name; hidden files, and folders that are hidden or links, are left out.

    column: of metadata files, with the captions. faults: gets what is no picture: links that lead out of the folder, lines of metadata files
    that cannot be used or name no picture, captions without a picture, pictures of other formats, and what is wrong with tars.
    A server's work folder, a folder that cannot be read, and pictures in kohya's `0_name` are faults, too.
    masks: X.mask.png beside a picture X is its mask, and no picture. without: folders below `folder` that are left out, with links followed.
    extension: of the caption file that is taken where a picture has both kinds, unless it is empty.
    Raises UserError when the folder is missing or has no picture.
    """
    suffixes = sorted(CAPTION_SUFFIXES, key=extension.__ne__)
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Check the path: a folder of pictures, each with a .txt beside it.")
    pairs: list[Pair] = []
    rows: dict[str, Row] = {}
    for place, names in _walk(folder, without, faults):
        taken = [name for name in names if not _is_ours(name) or _may_be_read(folder, place / name, faults)]
        for name in METADATA:
            if name in taken and (place / name).is_file():  # reading a pipe would wait for ever
                rows.update(read_metadata(folder, place / name, column, faults))
        captions = [{Path(name).stem: name for name in taken if name.lower().endswith(suffix)} for suffix in suffixes]
        for name in taken:
            if name.lower().endswith(IMAGE_SUFFIXES):
                stem = Path(name).stem
                pairs.append(_pair(folder, place / name, _first_filled([place / named[stem] for named in captions if stem in named])))
            elif not _is_ours(name):
                pairs += _pairs_of_other(folder, place / name, faults, suffixes)
        stems = {Path(name).stem for name in names if not name.lower().endswith(CAPTION_SUFFIXES)}
        lonely = [name for named in captions for stem, name in named.items() if stem not in stems]
        faults += [(_name(folder, place / name), "a caption, but no picture of that name") for name in lonely]
    pairs = [replace(pair, caption=rows.pop(pair.name).captions or pair.caption) if pair.name in rows else pair for pair in pairs]
    faults += [(row.where, f"there is no picture {name}") for name, row in rows.items()]
    pairs = _masked(pairs, faults) if masks else [replace(pair, mask=None) if pair.mask else pair for pair in pairs]
    faults += [(pair.name, "its folder's name says 0 repeats: never trained") for pair in pairs if not pair.repeats]
    pairs = [pair for pair in pairs if pair.repeats]
    if not pairs:
        raise nothing_in(folder, faults)
    return sorted(pairs, key=lambda pair: pair.name)


def _masked(pairs: Sequence[Pair], faults: Faults) -> list[Pair]:
    """The pictures, those in tars as they are, and others with their masks."""
    masks = {pair.name[: -len(_MASK_SUFFIX)]: pair for pair in pairs if pair.name.lower().endswith(_MASK_SUFFIX)}
    pictures = {pair.name: pair for pair in pairs if not pair.name.lower().endswith(_MASK_SUFFIX)}
    stems = {name: os.path.splitext(name)[0] for name in pictures}
    faults += [(masks[stem].name, "a mask, but no picture of that name") for stem in sorted(masks.keys() - set(stems.values()))]
    return [replace(pair, mask=masks[stems[name]].image) if stems[name] in masks else pair for name, pair in pictures.items()]


def nothing_in(source: object, faults: Sequence[tuple[str, str]]) -> UserError:
    why = f"; {len(faults)} were left out ({listed(faults)})" if faults else ""
    return UserError(
        f"{source} holds no picture that can be trained on{why}.",
        fix=f"Put pictures ({', '.join(IMAGE_SUFFIXES)}) there, each with a .txt beside it, or describe them in a metadata.jsonl.",
    )


def listed(faults: Sequence[tuple[str, str]]) -> str:
    """The first of them in words, and how many more there are."""
    more = [f"and {len(faults) - _NAMED_FAULTS} more"] if len(faults) > _NAMED_FAULTS else []
    return "; ".join([*(f"{name}: {reason}" for name, reason in faults[:_NAMED_FAULTS]), *more])


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _walk(folder: Path, without: Collection[Path], faults: Faults) -> Iterator[tuple[Path, list[str]]]:
    """Each folder with its files, those above before those in them."""

    def cannot(error: OSError) -> None:
        faults.append((_name(folder, Path(error.filename)), f"a folder that cannot be read: {error.strerror}"))

    real = folder.resolve() if without else folder  # links within are not followed
    for root, folders, files in os.walk(folder, onerror=cannot):
        if Path(root) != folder and not _OF_A_SERVER.isdisjoint(files):
            faults.append((_name(folder, Path(root)), "the work folder of a dd-datasetserver"))
            folders.clear()
            continue
        below = real / os.path.relpath(root, folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and below / name not in without)
        yield Path(root), sorted(name for name in files if not name.startswith("."))


def _is_ours(name: str) -> bool:
    return name in METADATA or name.lower().endswith((*IMAGE_SUFFIXES, *CAPTION_SUFFIXES))


def _may_be_read(folder: Path, path: Path, faults: Faults) -> bool:
    """Whether it is no link that leads out of the folder, to a file that nobody meant to show; with a fault for one that is."""
    if not path.is_symlink() or leads_inside(folder, path):
        return True
    faults.append((_name(folder, path), "a link that leads out of the folder"))
    return False


def leads_inside(folder: Path, path: Path) -> bool:
    """Whether `path`, with links followed, is below `folder`, or in the `blobs` that the links of a snapshot in the Hub's cache lead to."""
    try:
        folder, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # a link to itself: reading it says so
        return True
    return real.is_relative_to(folder) or (folder.parent.name == "snapshots" and real.is_relative_to(folder.parent.parent / "blobs"))


def _pair(folder: Path, path: Path, beside: Path | Piece | None) -> Pair:
    name = _name(folder, path)
    repeated = [match for part in name.split("/")[:-1] if (match := _REPEATED.fullmatch(part))]
    spare, repeats = (one_line(repeated[-1][2]), int(repeated[-1][1])) if repeated else ("", 1)
    return Pair(name, path, beside, spare, repeats=repeats)


def _first_filled(places: Sequence[Path | Piece]) -> Path | Piece | None:
    """Of a picture's caption files the first that is not empty; the first of all where none is filled, and None where there is none."""
    if len(places) < 2:
        return places[0] if places else None
    return next((place for place in places if not _is_empty(place)), places[0])


def _is_empty(place: Path | Piece) -> bool:
    try:
        return not one_line(_read_text(place))
    except BadSample:  # it is told so when the caption is wanted
        return False


def _pairs_of_other(folder: Path, path: Path, faults: Faults, suffixes: Sequence[str]) -> list[Pair]:
    """The pictures of a tar; none, and a fault, of a file that we should read but do not."""
    name, suffix = _name(folder, path), path.suffix.lower()
    if suffix == ".tar" and _may_be_read(folder, path, faults):
        return _pairs_of_tar(path, name, faults, suffixes)
    if path.name.lower().endswith(_PACKED_SUFFIXES):
        faults.append((name, "a compressed tar: unpack it to a plain one"))
    elif suffix in _OTHER_PICTURES:
        faults.append((name, f"a {suffix[1:].upper()}: convert it to PNG or JPEG"))
    return []


# -- WebDataset tars


def _pairs_of_tar(path: Path, name: str, faults: Faults, suffixes: Sequence[str]) -> list[Pair]:
    """The pictures of a WebDataset tar as pieces of that file: members of one path up to its first dot are a sample.

    A tar that is damaged gives what it has before the damage.
    """
    groups: dict[str, dict[str, Piece]] = {}
    try:
        for member, piece in _pieces(path, name, faults):
            folder, _, file = member.rpartition("/")
            key, _, suffix = file.partition(".")
            group = groups.setdefault(f"{folder}/{key}" if folder else key, {})
            if group.setdefault(f".{suffix.lower()}", piece) is not piece:
                faults.append((f"{name}/{member}", "is there twice in the tar; the first was taken"))
    except Exception as error:  # tarfile raises ReadError, OSError, ValueError, UnicodeError, RecursionError, ... on hostile bytes
        faults.append((name, f"the tar is damaged, what comes after was not read: {error or type(error).__name__}"))
    return [pair for key, group in groups.items() for pair in _pairs_of_group(f"{name}/{key}", group, faults, suffixes)]


def _pairs_of_group(key: str, group: dict[str, Piece], faults: Faults, suffixes: Sequence[str]) -> Iterator[Pair]:
    """Of a sample without any picture, what looks like one is a fault: `v1.0_cat.png` is to all readers of WebDataset the `0_cat.png` of `v1`.

    It is not taken for a picture, since `a.seg.png` is none. Hidden files, whose names begin with the dot, are left out as in a folder.
    """
    if group.keys().isdisjoint(IMAGE_SUFFIXES) and not key.endswith("/"):
        reason = "has a second dot in its name, which a tar's pictures may not: rename it"
        faults += [(key + suffix, reason) for suffix in group if suffix.endswith(IMAGE_SUFFIXES)]
    caption = _first_filled([group[suffix] for suffix in suffixes if suffix in group])
    for suffix in IMAGE_SUFFIXES:
        if suffix in group:
            yield Pair(key + suffix, group[suffix], caption, mask=group.get(_MASK_SUFFIX))


def _pieces(path: Path, name: str, faults: Faults) -> Iterator[tuple[str, Piece]]:
    """Names and places of the pictures and captions in a tar. Raises what tarfile raises."""
    for member in members(path):
        if not member.name.lower().endswith((*IMAGE_SUFFIXES, *CAPTION_SUFFIXES)):
            continue
        if member.plain:
            yield member.name, Piece(path, member.offset, member.size)
        else:
            faults.append((f"{name}/{member.name}", "no plain file within the tar"))


# -- reading


def _read_text(place: Path | Piece) -> str:
    """Raises BadSample for a file that is too long or not UTF-8."""
    try:
        return _read(place, MAX_CAPTION_BYTES, "caption is longer than").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(f"caption is not UTF-8 (byte {error.start})") from None


def _read(place: Path | Piece | bytes, most: int, too_long: str) -> bytes:
    """Its bytes; BadSample when there are more than `most` or they cannot be had."""
    try:
        if isinstance(place, Path):
            if not place.is_file():  # reading a pipe would wait for ever
                raise BadSample("no file, or a link that leads nowhere")
            place = Piece(place, 0, place.stat().st_size)
        if (len(place) if isinstance(place, bytes) else place.size) > most:
            raise BadSample(f"{too_long} {most >> 10} KiB")
        return place if isinstance(place, bytes) else _read_piece(place)
    except OSError as error:
        raise BadSample(f"cannot be read: {error.strerror or error}") from None


def _read_piece(piece: Piece) -> bytes:
    with piece.path.open("rb") as file:
        file.seek(piece.offset)
        data = file.read(piece.size)
    if len(data) < piece.size:
        raise BadSample("became shorter while it was read")
    return data
