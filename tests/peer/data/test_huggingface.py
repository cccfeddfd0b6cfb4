"""Datasets that `datasets` streams: from a folder here, and from a small stand-in of the Hub; the real one was never asked."""

import dataclasses
import io
import re
import shutil
from itertools import islice
from operator import length_hint

import numpy as np
import pytest
from PIL import Image

from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data import huggingface
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.datasetserver.test_ingest_hub import hub, told_of  # noqa: F401
from tests.peer.data.sources import Row, encoded, plain, write_parquet
from tests.peer.test_alone import RUN, start  # noqa: F401


def picture(number):
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A folder of three Parquet files with 10, 11 and 12 rows; their captions are numbers."""
    import datasets

    folder = tmp_path_factory.mktemp("dataset")
    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "tags": datasets.List(datasets.Value("string"))}
    )
    first = 0
    for number, count in enumerate((10, 11, 12)):
        numbers = list(range(first, first + count))
        rows = {
            "image": [{"bytes": picture(n), "path": None} for n in numbers],
            "text": [str(n) for n in numbers],
            "tags": [[f"a{n}", f"b{n}"] for n in numbers],
        }
        (folder / "data").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "data" / f"train-{number}-of-3.parquet")
        first += count
    return folder


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(huggingface, "WINDOW_ROWS", 4)


def source(folder, epochs=1, seed=42, peer_id="alone", **options):
    peer = PeerConfig(dataset_name=str(folder), **options)
    context = SourceContext(run=RunConfig(seed=seed), peer=peer, peer_id=peer_id, epochs=epochs)
    return huggingface.build(context)


def captions(samples):
    return [sample.caption for sample in samples]


ALL = sorted(map(str, range(33)))


def test_every_row_comes_once_an_epoch_in_an_order_of_the_epochs_own(dataset):
    samples = list(source(dataset, epochs=2))
    first, second = captions(samples[:33]), captions(samples[33:])
    assert sorted(first) == sorted(second) == ALL and first != second
    assert len({sample.key for sample in samples}) == 66
    assert all(sample.image == picture(int(sample.caption)) for sample in samples)


def test_the_order_depends_on_the_seed_and_the_peer(dataset):
    assert captions(source(dataset)) == captions(source(dataset)) != captions(source(dataset, seed=1))
    assert captions(source(dataset, peer_id="another")) != captions(source(dataset))


@pytest.mark.parametrize("masked", [0, 3])
def test_of_a_stream_the_first_rows_masks_are_counted_once_for_a_run_that_has_a_use_for_them(tmp_path, caplog, masked):
    rows = [Row(f"{n}.png", encoded(plain(n) if n >= masked else np.dstack([plain(n), plain(n)[..., :1]])), ("x",)) for n in range(4)]
    folder = write_parquet([*rows, Row("none.png", b"no picture", ("x",))], tmp_path / "rows")
    context = {"peer": PeerConfig(dataset_name=str(folder)), "peer_id": "alone", "epochs": 2}
    with caplog.at_level("INFO", "peer.data.huggingface"):
        list(huggingface.build(SourceContext(run=RunConfig(), **context)))
        assert "masks=" not in caplog.text
        list(huggingface.build(SourceContext(run=RunConfig(masked_loss=True), **context)))
    (told,) = [record for record in caplog.records if "masks=" in record.getMessage()]
    seen = int(re.search("masks=([0-9])", told.getMessage())[1])
    assert (told.levelname == "INFO") == bool(masked) and bool(seen) == bool(masked) and seen <= masked


@pytest.mark.parametrize("count", [2, 3, 5])
def test_peers_with_parts_share_no_row_and_have_all_of_them_together(dataset, count):
    """Whole files while there are enough, rows of each file when there are more parts than files."""
    parts = [captions(source(dataset, peer_id=str(i), dataset_part=f"{i + 1}/{count}")) for i in range(count)]
    assert sorted(caption for part in parts for caption in part) == ALL and all(parts)


@pytest.mark.parametrize("drawn", [0, 1, 9, 33, 40])
@pytest.mark.parametrize("part", ["", "2/2", "1/5"])
def test_a_source_goes_on_exactly_where_its_state_was_taken(dataset, drawn, part):
    data = source(dataset, epochs=4, dataset_part=part)
    samples = iter(data)
    seen = list(islice(samples, drawn))
    state = data.state_dict()
    other = source(dataset, epochs=4, dataset_part=part)
    other.load_state_dict(state)
    other.give_back([sample.key for sample in seen[-5:]])
    assert list(islice(other, 30)) == [*seen[-5:], *islice(samples, 30 - len(seen[-5:]))]


@pytest.mark.parametrize("drawn", [3, 6])
def test_a_small_dataset_goes_on_where_an_epoch_has_just_ended(tmp_path, drawn):
    import datasets

    rows = {"image": [{"bytes": picture(i), "path": None} for i in range(3)], "text": list("abc")}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    data = source(tmp_path, epochs=None)
    samples = iter(data)
    list(islice(samples, drawn))
    other = source(tmp_path, epochs=None)
    other.load_state_dict(data.state_dict())
    assert list(islice(other, 6)) == list(islice(samples, 6))


def test_samples_given_back_come_again_from_windows_long_past(dataset):
    data = source(dataset, epochs=1)
    samples = iter(data)
    seen = list(islice(samples, 30))
    data.give_back([seen[17].key, seen[2].key])
    assert list(samples)[:2] == [seen[17], seen[2]]


def test_a_sample_that_is_fetched_anew_while_a_checkpoint_is_made_is_still_to_come(dataset, monkeypatch):
    data, states = source(dataset), []
    samples = iter(data)
    given_back = next(samples).key
    list(islice(samples, 30))
    data.give_back([given_back])
    read = huggingface.HuggingFace._read
    monkeypatch.setattr(huggingface.HuggingFace, "_read", lambda its, name: (states.append(its.state_dict()), read(its, name))[1])
    assert next(samples).key == given_back and states[0]["again"] == [given_back]
    assert data.state_dict()["again"] == []


def test_a_limit_takes_the_first_rows_and_says_how_many_there_are(dataset):
    data = source(dataset, max_train_samples=7)
    assert sorted(captions(data)) == sorted(map(str, range(7)))
    parts = [captions(source(dataset, max_train_samples=7, dataset_part=f"{i}/2")) for i in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sorted(map(str, range(7)))
    assert length_hint(source(dataset)) in (0, 33)


def test_of_several_captions_in_a_row_all_are_handed_on(dataset):
    sample = next(iter(source(dataset, caption_column="tags")))
    assert isinstance(sample.caption, tuple) and len(sample.caption) == 2 and sample.caption[0][1:] == sample.caption[1][1:]


def test_a_row_without_picture_or_caption_is_left_out_like_a_broken_picture(tmp_path, caplog):
    import datasets

    rows = {"image": [{"bytes": picture(0), "path": None}, None, {"bytes": picture(1), "path": None}], "text": [None, "x", "y"]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    assert sorted(sample.image for sample in source(tmp_path)) == [b"", b"", picture(1)] and "caption is empty" in caplog.text
    assert sorted(captions(sample for sample in source(tmp_path, instance_prompt="sks") if sample.image)) == ["sks", "y"]


@pytest.mark.parametrize("as_text", [False, True], ids=["image", "text"])
def test_a_row_that_names_a_file_of_this_machine_is_left_out(tmp_path, caplog, as_text):
    import datasets
    import pyarrow
    import pyarrow.parquet

    secret, folder = tmp_path / "secret.png", tmp_path / "dataset"
    secret.write_bytes(picture(1))
    folder.mkdir()
    (folder / "own.png").write_bytes(picture(2))
    paths = [str(secret), f"file://{secret}", "../secret.png", str(folder / "own.png")]
    kind = datasets.Value("string") if as_text else datasets.Image()
    rows = {"image": paths if as_text else [{"bytes": None, "path": path} for path in paths], "text": list("abcd")}
    schema = datasets.Features({"image": kind, "text": datasets.Value("string")}).arrow_schema
    pyarrow.parquet.write_table(pyarrow.Table.from_pydict(rows, schema=schema), folder / "train.parquet")
    found = sorted((sample.caption, sample.image) for sample in source(folder))
    assert found == [*[("", b"")] * 3, ("d", picture(2))]
    assert caplog.text.count("a path that leads out of the dataset") == 2 and "row 0:0:0:0: " in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"caption_column": "words"}, "no column 'words'; it has image, text, tags. Give one of them as --caption_column"),
        ({"image_column": "picture"}, "no column 'picture'"),
        ({"dataset_split": "test"}, "cannot be read"),
        ({"dataset_part": "0/2"}, "dataset_part is '0/2'"),
        ({"dataset_part": "3/2"}, "dataset_part is '3/2'"),
        ({"dataset_part": "half"}, "dataset_part is 'half'"),
    ],
)
def test_a_dataset_that_cannot_be_read_as_asked_is_an_error_that_says_why(dataset, options, said):
    with pytest.raises(UserError, match=said):
        source(dataset, **options)


def test_bare_pictures_need_no_column_of_captions_when_there_is_a_prompt(dataset):
    assert set(captions(source(dataset, caption_column="words", instance_prompt="sks"))) == {"sks"}


def test_there_must_be_a_dataset(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        source(tmp_path / "missing")


def test_a_part_that_has_no_rows_is_an_error_instead_of_an_endless_search(dataset):
    with pytest.raises(UserError, match="No row of the dataset"):
        next(iter(source(dataset, epochs=None, max_train_samples=1, dataset_part="2/2")))


def test_a_column_without_text_is_an_error_unless_there_is_a_prompt(tmp_path):
    import datasets

    rows = {"image": [{"bytes": picture(1), "path": None}], "label": [0]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat"])})
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "data" / "train-0-of-1.parquet")
    with pytest.raises(UserError, match=r"The column 'label' of .* holds no text"):
        source(tmp_path, caption_column="label")
    assert captions(source(tmp_path, caption_column="label", instance_prompt="sks")) == ["sks"]


def test_a_dataset_of_which_no_row_can_be_used_is_an_error_instead_of_an_endless_search(tmp_path):
    import datasets

    rows = {"image": [{"bytes": b"", "path": None}] * 3, "text": ["a", "b", "c"]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "data" / "train-0-of-1.parquet")
    with pytest.raises(UserError, match=r"No row of the dataset .* can use"):
        list(source(tmp_path, epochs=None))


def test_a_run_on_a_stream_with_buckets_ends_with_its_epochs_and_resumes_to_the_bit(start, dataset):  # noqa: F811
    run = dataclasses.replace(RUN, total_samples=0, lr_scheduler="constant", num_buckets=5)
    options = {"train_data_dir": "", "dataset_name": str(dataset), "max_train_samples": 18}
    whole = start("whole", run=run, **options).run()
    assert whole.trainer.trained == 18
    first = start("parts", run=run, stop_after=2, **options).run()
    second = start("parts", run=run, resume_from_checkpoint="latest", **options).run()
    assert first.losses + second.losses == whole.losses and len(first.losses) == 2


PROGRAM = """
from pathlib import Path
from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data import huggingface
from swarm.run_config import RunConfig
peer = PeerConfig(dataset_name="user/pictures")
source = huggingface.build(SourceContext(run=RunConfig(), peer=peer, peer_id="alone", epochs=1))
print(sorted((sample.caption, sample.image[1:4] == b'PNG') for sample in source))
"""


def test_a_dataset_of_the_hub_is_streamed(tmp_path, hub):  # noqa: F811
    url, _ = hub
    done = told_of(url, tmp_path / "home", PROGRAM)
    assert done.stdout.strip() == str(sorted([("", False), *((f"picture {n}", True) for n in range(5))])), done.stderr


def test_a_run_goes_on_with_other_data_from_their_beginning(start, dataset, tmp_path, caplog):  # noqa: F811
    """Their places mean nothing in each other; between two datasets of the Hub one's were taken for the other's."""
    other = shutil.copytree(dataset, tmp_path / "other")
    start(stop_after=1).run()
    streams = [{"train_data_dir": "", "dataset_name": str(folder)} for folder in (dataset, other)]
    for step, data in enumerate([*streams, {}], start=1):
        caplog.clear()
        resumed = start(resume_from_checkpoint="latest", stop_after=step + 1, **data)
        assert resumed.trainer.step == step and "the data are not those of" in caplog.text
        source = resumed.trainer.feed._source
        assert source.state_dict()["epoch"] == source.state_dict()["position"] == 0
        assert resumed.run().trainer.step == step + 1
    caplog.clear()
    start(resume_from_checkpoint="latest")
    assert "the data are not those of" not in caplog.text
