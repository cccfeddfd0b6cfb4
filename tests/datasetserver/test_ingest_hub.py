"""A dataset of the Hub, from a small stand-in of the Hub in this process; the real one was never asked."""

import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import warm
from tests.datasetserver.test_ingest_sources import picture, write_parquet
from tests.serving import serving

COMMIT, BLOB = "a" * 40, "b" * 40
READ_AGAIN = """
import importlib
from huggingface_hub import constants, hf_api
importlib.reload(constants)
hf_api.api.endpoint = constants.ENDPOINT
"""
PROGRAM = """
import sys
from pathlib import Path
from datasetserver.sources import Hub
from datasetserver.ingest import ingest
result = ingest(Hub("user/pictures"), Path(sys.argv[1]), workers=0)
print(result.manifest.total, result.rejected)
"""


class Hub(BaseHTTPRequestHandler):
    """Knows user/pictures at one commit: what `huggingface_hub` and `datasets` ask for to stream it."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    asked: list[str]

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        resolved = re.fullmatch(r"/datasets/user/pictures/resolve/[^/]+/(.+)", path)
        tree = re.fullmatch(rf"/api/datasets/user/pictures/tree/{COMMIT}/?(.*)", path)
        if re.fullmatch(rf"/api/datasets/user/pictures(/revision/(main|{COMMIT}))?", path):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer(json.dumps({"id": "user/pictures", "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}).encode())
        elif tree:
            entries = [{"type": "file", "oid": BLOB, "size": len(data), "path": name} for name, data in self.files.items()]
            folder = [{"type": "directory", "oid": BLOB, "size": 0, "path": "data"}]
            self.answer(json.dumps(entries if tree[1] == "data" else folder).encode())
        elif resolved and resolved[1] in self.files:
            self.file(self.files[resolved[1]])
        else:
            self.answer(b"{}", 404, {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def file(self, data):
        headers = {"ETag": f'"{BLOB}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(data, headers=headers)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        self.answer(data[first : last + 1], 206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def answer(self, body, status=200, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = {"image": [{"bytes": picture(n), "path": None} for n in range(6)], "text": [f"picture {n}" for n in range(5)] + [""]}
    folder = write_parquet(tmp_path / "repository", rows, features)
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}
    handler = type("KnowingHub", (Hub,), {"files": files, "asked": []})
    with serving(handler) as url:
        yield url, handler.asked


def told_of(url: str, home: Path, program: str, *words: str):
    """The program's end in an environment that has the Hub at `url`. The process that it is forked off has read another environment."""
    env = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    return warm.run(READ_AGAIN + program, *words, env=env)


def test_a_dataset_of_the_hub_is_streamed_into_shards(tmp_path, hub):
    url, asked = hub
    done = told_of(url, tmp_path / "home", PROGRAM, str(tmp_path / "work"))
    assert done.stdout.strip() == "5 [('train/000000005', 'caption is empty')]", done.stderr
    assert any(f"/resolve/{COMMIT}/data/" in path for path in asked)
    again = told_of("http://127.0.0.1:1", tmp_path / "home", PROGRAM, str(tmp_path / "work"))
    assert again.stdout.strip() == "5 []", "what is ready needs no Hub"
