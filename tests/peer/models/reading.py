"""A tiny pipeline's folder is read once and cast anew for each test that wants it: diffusers and transformers take 0.3 s to read it."""

import functools
from pathlib import Path
from typing import Any

import pytest

from peer.models.diffusion import pipeline
from swarm.run.family import family_named
from tests.tiny.moulds import Mould

_MOST_BYTES = 8 << 20
"""Of a folder that is kept. Tests of memory have larger ones, and count what a reading takes."""
_MOST = 40
"""Folders that are kept: some of each family, about 1 MB each."""
_read_folder = pipeline._read_folder


def _content(folder: Path) -> tuple:
    """What tells a folder from itself after a file in it was changed."""
    found = {str(file): file.stat() for file in sorted(folder.rglob("*")) if file.is_file()}
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found.items())


@functools.lru_cache(_MOST)
def _ours(kind: Any, family: str, folder: Path, content: tuple) -> Mould:
    return Mould(_read_folder(kind, family_named(family), folder))


@functools.lru_cache(_MOST)
def _plain(kind: Any, folder: Path, content: tuple) -> Mould:
    return Mould(kind.from_pretrained(folder, local_files_only=True))


@pytest.fixture(autouse=True)
def folders_are_read_once(monkeypatch):
    """For all tests of the module that imports it. What cannot be read is tried each time; what is read with other parts is not kept."""

    def once(kind, family, path, **given):
        content = _content(path)
        if given or sum(size for *_, size in content) > _MOST_BYTES:
            return _read_folder(kind, family, path, **given)
        return _ours(kind, family.name, path, content).cast()

    monkeypatch.setattr(pipeline, "_read_folder", once)


def plain(folder: Path, kind: Any = None) -> Any:
    """What plain diffusers makes of a folder, of pipelines of any kind or of this one."""
    from diffusers import DiffusionPipeline

    return _plain(kind or DiffusionPipeline, folder, _content(folder)).cast()
