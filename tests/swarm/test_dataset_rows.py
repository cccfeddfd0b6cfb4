"""What a row of a dataset may open: what lies in the dataset itself."""

import io
import os
import random
import zipfile

import pytest

from swarm import dataset_rows
from swarm.dataset_rows import BadSample, read_picture
from tests.serving import Answer, serving

SECRET = random.Random(20).randbytes(40)


@pytest.fixture
def dataset(tmp_path):
    """A folder of one picture, and beside it what a stranger would like to have."""
    folder = tmp_path / "dataset"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.png").write_bytes(b"a picture")
    (tmp_path / "secret").write_bytes(SECRET)
    return folder


@pytest.fixture
def website():
    """A server that a row's URL leads to, and what it was asked for."""
    asked = []

    class Website(Answer):
        body = SECRET

        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        do_HEAD = do_GET

    with serving(Website) as url:
        yield f"{url}/a.png", asked


def refused(value, dataset):
    with pytest.raises(BadSample) as raised:
        read_picture(value, str(dataset))
    return str(raised.value)


def test_bytes_in_the_row_are_the_picture_whatever_path_stands_beside_them(dataset):
    assert read_picture(b"x", "user/pictures") == read_picture({"bytes": b"x", "path": "/etc/passwd"}, "user/pictures") == b"x"


def test_files_of_the_folder_are_read_by_absolute_and_relative_paths_and_from_its_zips(dataset):
    with zipfile.ZipFile(dataset / "more.zip", "w") as packed:
        packed.writestr("in/b.png", b"another")
    for path in (dataset / "data" / "a.png", "data/a.png", dataset / "data" / ".." / "data" / "a.png"):
        assert read_picture({"bytes": None, "path": str(path)}, str(dataset)) == b"a picture"
    assert read_picture(f"zip://in/b.png::{dataset / 'more.zip'}", str(dataset)) == b"another"


@pytest.mark.parametrize(
    "form", ["{}", "file://{}", "local://{}", "../secret", "data/../../secret", "zip://secret::{}", "zip://x::file://{}"]
)
@pytest.mark.parametrize("as_dict", [True, False])
def test_no_local_file_elsewhere_is_opened(dataset, tmp_path, form, as_dict):
    path = form.format(tmp_path / "secret")
    for name in (dataset, "user/pictures"):
        assert refused({"bytes": None, "path": path} if as_dict else path, name) in (
            "a path that leads out of the dataset",
            "no file, or a link that leads nowhere",
        )


def test_no_link_leads_out_of_the_folder(dataset, tmp_path):
    (dataset / "link.png").symlink_to(tmp_path / "secret")
    (dataset / "folder").symlink_to(tmp_path)
    assert "leads out" in refused("link.png", dataset) and "leads out" in refused(str(dataset / "folder" / "secret"), dataset)
    os.mkfifo(dataset / "pipe.png")
    assert "no file" in refused("pipe.png", dataset)
    zipped = dataset / "zip"
    zipped.symlink_to(tmp_path / "secret")
    assert "leads out" in refused(f"zip://x::{zipped}", dataset)


def test_a_snapshot_in_the_hubs_cache_has_its_files_among_the_blobs(dataset, tmp_path):
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_bytes(b"kept once")
    (snapshot / "a.png").symlink_to("../../blobs/123")
    assert read_picture("a.png", str(snapshot)) == b"kept once"
    (snapshot / "b.png").symlink_to(tmp_path / "secret")
    assert "leads out" in refused("b.png", snapshot)


def test_no_url_is_fetched(dataset, website):
    url, asked = website
    for path in (url, f"zip://a::{url}", f"simplecache::{url}", f"filecache::{url}", f"zip://a::zip://b::{url}"):
        for name in (dataset, "user/pictures"):
            refused({"bytes": None, "path": path}, name)
    assert asked == []


@pytest.mark.parametrize(
    "path",
    [
        "hf://datasets/other/pictures@main/a.png",
        "hf://datasets/user/pictures-private@main/a.png",
        "hf://datasets/user/pictures/a.png",
        "hf://datasets/user/pictures@main",
        "hf://datasets/user/pictures@main/../../other/a.png",
        "hf://datasets/user/pictures@main/x/../../../../a.png",
        "hf://user/model/a.png",
        "zip://a::hf://datasets/other/pictures@main/a.zip",
        "zip://a::simplecache::hf://datasets/user/pictures@main/a.zip",
        "a.png",
        "",
    ],
)
def test_of_the_hub_only_the_datasets_own_repository_is_read(path, monkeypatch):
    monkeypatch.setattr(dataset_rows, "_read", lambda path: pytest.fail(f"opened {path}"))
    refused(path, "user/pictures")


def test_files_of_the_datasets_own_repository_are_read(monkeypatch):
    opened = []
    monkeypatch.setattr(dataset_rows, "_read", lambda path: opened.append(path) or b"x")
    paths = ["hf://datasets/user/pictures@abc/train/a.png", "zip://in/b.png::hf://datasets/user/pictures@abc/more.zip"]
    assert [read_picture(path, "user/pictures") for path in paths] == [b"x", b"x"] and opened == paths


@pytest.mark.parametrize("value", [None, 7, [], {}, {"bytes": None, "path": None}, {"bytes": b"", "path": ""}, ["a.png"]])
def test_a_cell_that_is_no_picture_is_none(dataset, value):
    assert refused(value, dataset) == "no picture in this row"


def test_what_cannot_be_opened_or_is_too_large_is_no_picture(dataset, monkeypatch):
    (dataset / "broken.zip").write_bytes(b"no zip")
    assert "cannot be read" in refused(f"zip://a::{dataset / 'broken.zip'}", dataset)
    monkeypatch.setattr(dataset_rows, "MAX_FILE_BYTES", 5)
    assert "larger than" in refused("data/a.png", dataset)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("bomb.png", bytes(1 << 20))
    (dataset / "bomb.zip").write_bytes(packed.getvalue())
    assert "larger than" in refused(f"zip://bomb.png::{dataset / 'bomb.zip'}", dataset)
