"""A tiny pipeline's folder is read once and copied for each test that wants it: a copy takes 0.1 s, diffusers and transformers take 0.3 s to read it."""

import copy

import pytest

from peer.models.diffusion import pipeline

_MOST_BYTES = 8 << 20
"""Of a folder that is kept. Tests of memory have larger ones, and count what a reading takes."""
_READ: dict[tuple, object] = {}


def _content(folder):
    """What tells a folder from itself after a file in it was changed."""
    found = {str(file): file.stat() for file in sorted(folder.rglob("*")) if file.is_file()}
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found.items())


@pytest.fixture(autouse=True)
def folders_are_read_once(monkeypatch):
    """For all tests of the module that imports it. What cannot be read is tried each time; what is read with other parts is not kept."""
    read = pipeline._read_folder

    def once(kind, family, path, **given):
        content = _content(path)
        if given or sum(size for *_, size in content) > _MOST_BYTES:
            return read(kind, family, path, **given)
        key = (kind, family.name, content)
        if key not in _READ:
            _READ[key] = read(kind, family, path)
        return copy.deepcopy(_READ[key])

    monkeypatch.setattr(pipeline, "_read_folder", once)
