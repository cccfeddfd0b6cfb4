from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from peer.contracts import SourceContext
from peer.data import directory
from swarm.errors import UserError
from swarm.run_config import RunConfig


def source(folder, epochs=1, seed=42):
    context = SourceContext(run=RunConfig(seed=seed), folder=folder, peer_id="alone", cache_dir=Path("unused"), epochs=epochs)
    return directory.build(context)


def keys(samples):
    return [sample.key for sample in samples]


def test_every_picture_comes_once_an_epoch_in_an_order_of_its_own(pictures):
    seen = keys(source(pictures, epochs=2))
    first, second = seen[:12], seen[12:]
    names = sorted(path.name for path in pictures.glob("*.png"))
    assert sorted(first) == [f"0:{name}" for name in names] and sorted(second) == [f"1:{name}" for name in names]
    assert [key.partition(":")[2] for key in first] != [key.partition(":")[2] for key in second]


def test_the_order_depends_on_the_seed_alone(pictures):
    assert keys(source(pictures)) == keys(source(pictures)) != keys(source(pictures, seed=43))


def test_without_epochs_the_samples_never_end(pictures):
    assert len(list(islice(source(pictures, epochs=None), 100))) == 100


def test_a_sample_is_the_files_bytes_and_its_caption(pictures):
    sample = next(iter(source(pictures)))
    path = pictures / sample.key.partition(":")[2]
    assert sample.image == path.read_bytes() and sample.caption == path.with_suffix(".txt").read_text()


def test_samples_given_back_come_again_and_those_acknowledged_do_not(pictures):
    data = source(pictures)
    samples = iter(data)
    first, second = next(samples).key, next(samples).key
    data.acknowledge([first])
    data.give_back([second])
    rest = keys(samples)
    assert rest[0] == second and first not in rest and len(rest) == 11


def test_a_source_goes_on_exactly_where_its_state_was_taken(pictures):
    data = source(pictures, epochs=3)
    samples = iter(data)
    drawn = keys(islice(samples, 17))
    data.give_back(drawn[-2:])
    other = source(pictures, epochs=3)
    other.load_state_dict(data.state_dict())
    assert keys(other) == keys(samples)


@pytest.mark.parametrize("suffix", [".PNG", ".jpg", ".JPEG", ".bmp", ".WebP"])
def test_pictures_of_every_format_are_found_whatever_the_case(tmp_path, suffix):
    Image.new("RGB", (16, 16)).save(tmp_path / f"one{suffix}")
    (tmp_path / "one.txt").write_text("black")
    assert keys(source(tmp_path)) == [f"0:one{suffix}"]


def spoil(pictures):
    (pictures / "000.txt").unlink()
    (pictures / "001.txt").write_bytes(b"caf\xe9")
    data = (pictures / "002.png").read_bytes()
    (pictures / "002.png").write_bytes(data[: len(data) // 2])
    noise = Image.effect_noise((256, 256), 50)
    noise.save(pictures / "003.jpg")
    data = (pictures / "003.jpg").read_bytes()
    (pictures / "003.jpg").write_bytes(data[: len(data) // 2])
    (pictures / "notes.md").write_text("not a picture")


def test_bad_pictures_are_skipped_and_listed_once_with_reasons(pictures, caplog):
    spoil(pictures)
    assert len(source(pictures)) == 9
    (line,) = [record.getMessage() for record in caplog.records]
    assert "pictures=4 of=13" in line and "000.png: no caption" in line and "001.png: caption is not UTF-8" in line
    assert "002.png: not readable" in line and "003.jpg: not readable" in line


def test_only_a_few_of_many_bad_pictures_are_named(pictures, caplog):
    for caption in sorted(pictures.glob("*.txt"))[:9]:
        caption.unlink()
    source(pictures)
    assert "004.png" in caplog.text and "005.png" not in caplog.text and "and 4 more" in caplog.text


def test_a_folder_with_nothing_to_train_on_is_an_error_that_says_what_to_do(tmp_path, pictures):
    with pytest.raises(UserError, match="There is no folder"):
        source(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no pictures"):
        source(tmp_path / "empty")
    for caption in pictures.glob("*.txt"):
        caption.unlink()
    with pytest.raises(UserError, match=r"none of its 12 pictures can be used \(000.png: no caption"):
        source(pictures)
