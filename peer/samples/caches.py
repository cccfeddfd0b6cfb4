"""Latents and texts kept on disk, under names that say all that they depend on: what another model, size or crop made is never found.

Entries are safetensors files with a digest of what is in them: a torn or damaged one is noticed and made again. Several processes may share
a folder. Kept is float32, as it was computed. With a cache a picture is encoded alone, so that runs with one equal each other to the bit,
however much of it was there; and runs without one up to rounding (1e-6 of the loss; to the bit with batches of one).
"""

import fcntl
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor, nn

from peer.contracts import Model
from peer.samples.pictures import Frame, read_otherwise
from swarm.digest import digest_json
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]


class TensorCache:
    """Tensors by name, in `folder`/`fingerprint`; all fingerprints in `folder` together take at most `limit_bytes`.

    When it is full, what was made under other fingerprints that no process uses goes first, the longest unused; then nothing more is kept:
    an epoch asks for everything once, so that whatever were dropped for the new would be missed as soon.
    """

    def __init__(self, folder: Path, fingerprint: str, limit_bytes: int):
        self._root, self._folder, self._limit = folder, folder / fingerprint[:32], limit_bytes
        try:
            weakref.finalize(self, os.close, _hold(self._folder))
            os.utime(self._folder)  # the age that eviction goes by
        except OSError as error:
            raise UserError(
                f"Cannot write in {self._folder}: {error.strerror}.",
                fix="Free some space, or choose another --cache_dir.",
                code=ExitCode.DISK,
            ) from None
        self._bytes, self._uncounted, self._full = _size(folder), 0, False

    def get(self, name: str) -> Tensors | None:
        """What is kept under `name`, on the CPU; None when there is nothing, or when it is damaged."""
        path = self._path(name)
        try:
            tensors = load(path.read_bytes())
            if torch.equal(tensors.pop("digest"), _digest(name, tensors)):
                return tensors
        except FileNotFoundError:
            return None
        except Exception as error:  # safetensors raises its own error, ValueError, KeyError, ... on damaged files
            log.debug("%s: %r", path, error)
        log.warning("the cached %s is damaged; it is made again", path)
        path.unlink(missing_ok=True)
        return None

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep copies of `tensors`, if there is room; a full disk is no reason to end."""
        kept = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        data = save({**kept, "digest": _digest(name, kept)})
        if not self._room_for(len(data)):
            return
        path = self._path(name)
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # a run on another machine, whose locks are not seen here, may have dropped them
            part.write_bytes(data)  # not flushed: what a power cut tears is found by its digest
            part.replace(path)
        except OSError as error:
            log.warning("stopped caching in %s: %s", self._folder, error.strerror)
            self._full = True
            part.unlink(missing_ok=True) if part.parent.is_dir() else None
        self._bytes, self._uncounted = self._bytes + len(data), self._uncounted + len(data)

    def _room_for(self, count: int) -> bool:
        if self._full:
            return False
        if self._uncounted > self._limit // 64:  # others write, too
            self._bytes, self._uncounted = _size(self._root), 0
        if self._bytes + count > self._limit:
            self._drop_others()
            self._full = self._bytes + count > self._limit
            if self._full:
                log.warning("%s is full; computing the rest each time it is needed (raise --cache_gib)", self._root)
        return not self._full

    def _drop_others(self) -> None:
        others = [folder for folder in self._root.iterdir() if folder.is_dir() and folder != self._folder]
        for folder in sorted(others, key=_last_used):
            if _drop(folder):
                self._bytes = _size(self._root)
            if self._bytes <= self._limit // 2:
                return

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.safetensors"


@dataclass(frozen=True)
class Caches:
    """This machine's; None: not kept."""

    latents: TensorCache | None = None
    texts: TensorCache | None = None


def open_caches(
    model: Model,
    run: RunConfig,
    dtype: torch.dtype | None,
    folder: Path,
    limit_bytes: int,
    *,
    latents: bool,
    texts: bool,
    trained: Collection[str] = (),
) -> Caches:
    """dtype: autocast's; limit_bytes: of each; trained: the parts in which something is. Raises UserError where texts are trained, or the folder cannot be written."""
    if texts and {*trained} & {*model.facts.text_encoders}:
        raise UserError(
            "--cache_text keeps the text encoder's output, but this run trains the encoder, so its output changes with each step.",
            fix="Remove --cache_text; or --train_text_encoder.",
        )
    if latents and not run.center_crop:
        log.info("caching latents, so each picture always has the same crop, which its content decides")
    return Caches(
        TensorCache(folder / "latents", _of_pictures(model, dtype), limit_bytes) if latents else None,
        TensorCache(folder / "texts", _of_texts(model, run, dtype), limit_bytes) if texts else None,
    )


def latents_name(image: bytes, frame: Frame, mask: bytes = b"") -> str:
    """What a picture's latents depend on, besides the VAE. A crop that is not of the centre is the content's, see `content_seed`."""
    crop = "center" if frame.center_crop else frame.seed
    said = [blake3(image).hexdigest(), frame.width, frame.height, crop, frame.mirrored, frame.interpolation]
    said += ["masked", blake3(mask).hexdigest()] if mask else ["masked"] if frame.masked else []
    return digest_json(said + read_otherwise(image))  # named only where there is any: what was kept of all other pictures before is found again


def content_seed(seed: int, image: bytes) -> str:
    """Decides where a picture is cropped when that must not change from epoch to epoch."""
    return f"{seed}:{blake3(image).hexdigest()}"


def _of_pictures(model: Model, dtype: torch.dtype | None) -> str:
    vae = model.parts["vae"]
    return digest_json(["latents", _digest_weights(vae), str(getattr(vae, "config", "")), str(dtype)])


def _of_texts(model: Model, run: RunConfig, dtype: torch.dtype | None) -> str:
    facts = model.facts
    encoders = {name: _digest_weights(model.parts[name]) for name in facts.text_encoders if name in model.parts}
    tokenizers = {facts.text_encoders[name].tokenizer for name in encoders}
    words = {name: sorted(getattr(model.pipeline, name).get_vocab().items()) for name in tokenizers}
    read = [getattr(run, name) for name in facts.text_options]
    # Language models are told captions in the form of a chat, which is the tokenizer's; CLIP and T5 have none, and keep the names that they had.
    chats = [chat for name in sorted(tokenizers) if (chat := getattr(getattr(model.pipeline, name), "chat_template", None))]
    return digest_json(["texts", encoders, digest_json(words), read, str(dtype), *chats])


def _digest_weights(part: nn.Module) -> str:
    return _hashed(part.state_dict()).hexdigest()


def _digest(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """(32,) uint8: of the entry's name and its tensors."""
    return torch.frombuffer(bytearray(_hashed(tensors, name).digest()), dtype=torch.uint8)


def _hashed(tensors: Mapping[str, Tensor], start: str = "") -> Any:
    """The hasher after `start` and the tensors' names, dtypes, shapes and bytes."""
    hasher = blake3(start.encode())
    for key, tensor in sorted(tensors.items()):
        hasher.update(f"{key}:{tensor.dtype}:{tuple(tensor.shape)}\0".encode())
        hasher.update(_bytes(tensor))
    return hasher


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _hold(folder: Path) -> int:
    """Make `folder`, and keep other processes from dropping it until the descriptor that is returned is closed. Raises OSError.

    The lock is the folder's own: a file for it would be in the way of what lists and deletes the entries.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # dropped since
            continue
        _lock(descriptor, fcntl.LOCK_SH)
        if folder.is_dir() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
        os.close(descriptor)  # of a folder that was dropped while we waited for its lock


def _drop(folder: Path) -> bool:
    """Delete it with all that is in it, unless a process holds it; returns whether."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # another process was faster
        return True
    try:
        free = _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if free:
            shutil.rmtree(folder, ignore_errors=True)
        return free
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """False: another process has it. Where the file system knows no locks, everybody gets it."""
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(folder: Path) -> int:
    """Bytes of all files below; files that vanish meanwhile count nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue
    return total
