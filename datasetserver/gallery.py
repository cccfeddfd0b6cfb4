"""What the model draws as it learns: pictures from one peer, decoded and encoded anew before anybody else gets to see them.

Bounded: when there are too many, every second round of the older half goes, so that the beginning stays to be seen.
"""

import base64
import io
import logging
import threading
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

from PIL import Image
from pydantic import TypeAdapter, ValidationError

from swarm import files, protocol
from swarm.digest import digest_bytes
from swarm.picture_file import BadSample
from swarm.protocol import DrawnPicture
from swarm.records import ASSIST

log = logging.getLogger(__name__)
MOST_PICTURES = 192
MAX_PIXELS = 2048 * 2048
SIDE_PIXELS = 1024
"""What is larger is made smaller."""
_FORMATS = ("PNG", "JPEG", "WEBP")
_PICTURES = TypeAdapter(list[DrawnPicture])


class Gallery:
    """The pictures in `folder`, which is made when the first one comes. Threads may use it."""

    def __init__(self, folder: Path, most: int = MOST_PICTURES):
        self._folder, self._most, self._lock = folder, most, threading.Lock()
        self._pictures: list[DrawnPicture] = self._read()
        self.version = len(self._pictures)
        """Changes with the pictures."""

    def pictures(self) -> list[DrawnPicture]:
        """The newest round's first."""
        return self._pictures

    def asked(self, here: Mapping[str, str]) -> Collection[str]:
        """Who may send where the host names nobody; here: live peers on its own machine, and what each does. Once one that assists drew, it alone."""
        return {picture.peer for picture in self._pictures if here.get(picture.peer) == ASSIST} or here.keys()

    def path(self, digest: str) -> Path | None:
        return self._folder / f"{digest}.webp" if any(picture.digest == digest for picture in self._pictures) else None

    def add(self, sent: protocol.PictureRequest, now: float) -> DrawnPicture:
        """Keep it, unless there is one of that prompt and round; returns the one that is kept. Raises BadSample, OSError."""
        data, (width, height) = encoded_anew(sent.picture)
        about = {"round": sent.round, "samples": sent.samples, "prompt": sent.prompt, "peer": sent.peer, "time": now}
        new = DrawnPicture(digest=digest_bytes(data), width=width, height=height, **about)
        with self._lock:
            for known in self._pictures:
                if (known.round, known.prompt) == (new.round, new.prompt):
                    return known
            self._folder.mkdir(exist_ok=True)
            files.replace(self._folder / f"{new.digest}.webp", data)
            self._keep(sorted([new, *self._pictures], key=lambda picture: -picture.round))
        return new

    def _keep(self, pictures: list[DrawnPicture]) -> None:
        while len(pictures) > self._most:
            rounds = sorted({picture.round for picture in pictures})
            if len(rounds) == 1:
                pictures = pictures[: self._most]
                break
            going = set(rounds[1 : max(2, len(rounds) // 2) : 2]) if len(rounds) > 2 else {rounds[0]}
            pictures = [picture for picture in pictures if picture.round not in going]
        files.replace(self._folder / "pictures.json", _PICTURES.dump_json(pictures))
        self._pictures = pictures
        self.version += 1
        kept = {f"{picture.digest}.webp" for picture in pictures}
        for path in self._folder.glob("*.webp"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _read(self) -> list[DrawnPicture]:
        path = self._folder / "pictures.json"
        try:
            pictures = _PICTURES.validate_json(path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            log.warning("cannot read %s, so the gallery starts empty: %s", path, str(error).splitlines()[0])
            return []
        return [picture for picture in pictures if (self._folder / f"{picture.digest}.webp").exists()]


def encoded_anew(picture: str) -> tuple[bytes, tuple[int, int]]:
    """A stranger's picture, in base64, as a WebP of ours, nothing but pixels, and its size. Raises BadSample."""
    try:
        data = base64.b64decode(picture)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                # Checked before decoding: the header of a bomb is cheap, its pixels are not.
                if image.width * image.height > MAX_PIXELS:
                    raise BadSample(f"{image.width}x{image.height} is more than {MAX_PIXELS:,} pixels")
                rgb = image.convert("RGB")
        rgb.thumbnail((SIDE_PIXELS, SIDE_PIXELS))
        out = io.BytesIO()
        Image.frombytes("RGB", rgb.size, rgb.tobytes()).save(out, "WEBP", quality=88)
        return out.getvalue(), rgb.size
    except BadSample:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, MemoryError, ...
        raise BadSample(f"it cannot be decoded: {error or type(error).__name__}"[:300]) from None
