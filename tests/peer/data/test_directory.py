import os
import re
from itertools import islice

import pytest
from PIL import Image

from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data import directory
from swarm.errors import UserError
from swarm.run_config import RunConfig


def source(folder, epochs=1, seed=42, run=None, cache_dir=None, **peer):
    peer = PeerConfig(train_data_dir=str(folder), cache_dir=str(cache_dir or cache_of(folder)), **peer)
    return directory.build(SourceContext(run=run or RunConfig(seed=seed), peer=peer, peer_id="alone", epochs=epochs))


def cache_of(folder):
    return folder.with_name(f"{folder.name}.cache")


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


@pytest.mark.parametrize("drawn", [0, 5, 12])
@pytest.mark.parametrize("yielded", [False, True])
def test_a_sample_that_is_read_while_a_checkpoint_is_made_comes_once_after_a_resume(pictures, monkeypatch, drawn, yielded):
    """yielded: it came right after the source's state was taken, so that the checkpoint has it among those drawn as well."""
    data, states = source(pictures, epochs=2), []
    samples = iter(data)
    before = keys(islice(samples, drawn))
    read = directory.Directory._read
    monkeypatch.setattr(directory.Directory, "_read", lambda its, key: (states.append(its.state_dict()), read(its, key))[1])
    being_read = next(samples).key
    monkeypatch.undo()
    other = source(pictures, epochs=2)
    other.load_state_dict(states[0])
    if yielded:
        other.give_back([being_read])
    rest = keys(other)
    assert rest[0] == being_read and sorted(before + rest) == sorted(keys(source(pictures, epochs=2)))


def test_what_is_held_out_or_gone_since_a_checkpoint_is_not_trained_once_more(pictures):
    data = source(pictures)
    drawn = keys(islice(iter(data), 12))
    data.give_back(drawn)
    (pictures / "000.png").unlink()
    after = source(pictures, run=RunConfig(validation_split=0.3))
    held_out = {sample.key.partition(":")[2] for sample in after.held_out()}
    after.load_state_dict(data.state_dict())
    after.give_back(drawn)  # what the feed had drawn ahead
    again = keys(islice(iter(after), len(drawn) - 1 - len(held_out)))
    assert held_out and again == [key for key in drawn if key.partition(":")[2] not in {*held_out, "000.png"}]


def test_a_sample_that_was_read_is_none_that_is_still_to_come(pictures):
    data = source(pictures)
    next(iter(data))
    assert data.state_dict()["again"] == []


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
    assert "files=4 of pictures=13" in line and "000.png: no caption" in line and "001.png: caption is not UTF-8" in line
    assert "002.png: cannot be decoded" in line and "003.jpg: cannot be decoded" in line


@pytest.fixture
def decoded(monkeypatch):
    """Names of the pictures that were decoded to their end since it was asked last."""
    names, decode = [], directory._decode
    monkeypatch.setattr(directory, "_decode", lambda pair: names.append(pair.name) or decode(pair))

    def since():
        found = sorted(names)
        names.clear()
        return found

    return since


def test_a_picture_that_was_decoded_is_not_decoded_again_until_it_changes(pictures, decoded, caplog):
    names = sorted(path.name for path in pictures.glob("*.png"))
    first = keys(source(pictures))
    assert decoded() == names
    assert keys(source(pictures)) == first and decoded() == []
    (pictures / "003.png").write_bytes(b"broken")
    about = (pictures / "005.png").stat()
    os.utime(pictures / "005.png", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    Image.new("RGB", (16, 16)).save(pictures / "new.png")
    (pictures / "new.txt").write_text("new")
    assert len(source(pictures)) == 12 and "003.png: is none of PNG, JPEG" in caplog.text
    assert decoded() == ["003.png", "005.png", "new.png"]
    source(pictures)
    assert decoded() == ["003.png"]  # what is broken is looked at each time


def test_a_start_that_breaks_off_keeps_what_it_decoded_and_what_was_known_before(pictures, decoded, monkeypatch):
    source(pictures)
    decoded()
    os.utime(pictures / "000.png", ns=(1, 1))
    decode = directory._decode
    monkeypatch.setattr(directory, "_decode", lambda pair: breaks() if pair.name == "new.png" else decode(pair))

    def breaks():
        raise KeyboardInterrupt

    Image.new("RGB", (16, 16)).save(pictures / "new.png")
    (pictures / "new.txt").write_text("new")
    with pytest.raises(KeyboardInterrupt):
        source(pictures)
    monkeypatch.setattr(directory, "_decode", decode)
    assert decoded() == ["000.png"]
    source(pictures)
    assert decoded() == ["new.png"]


def test_what_was_decoded_is_kept_now_and_then_for_a_start_that_is_killed(pictures, tmp_path, monkeypatch, decoded):
    monkeypatch.setattr(directory, "_KEEP_EVERY", 5)
    pairs = directory.list_dataset(pictures, [], "text", False)
    killed = directory.Whole(pictures, tmp_path)
    for pair in pairs[:8]:
        killed.check(pair)
        killed.keep_some()
    decoded()
    again = directory.Whole(pictures, tmp_path)
    for pair in pairs:
        again.check(pair)
    assert decoded() == sorted(pair.name for pair in pairs[5:])


def test_two_folders_share_a_cache_and_take_nothing_for_each_others(pictures, tmp_path, decoded):
    other = tmp_path / "other"
    other.mkdir()
    draw(other / "000.png", "another")
    for _ in range(2):
        source(pictures, cache_dir=tmp_path / "cache")
        source(other, cache_dir=tmp_path / "cache")
    assert decoded() == sorted(["000.png", *(path.name for path in pictures.glob("*.png"))])


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b"\xff", b'{"000.png": 7, "001.png": [1]}'])
def test_a_torn_list_of_what_was_decoded_is_made_anew(pictures, decoded, torn):
    source(pictures)
    (kept,) = cache_of(pictures).iterdir()
    kept.write_bytes(torn)
    decoded()
    source(pictures)
    assert len(decoded()) == 12
    source(pictures)
    assert decoded() == []


def test_where_nothing_can_be_kept_all_is_decoded_each_time(pictures, tmp_path, decoded, caplog):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        source(pictures, cache_dir=tmp_path / "file" / "below")
        assert len(decoded()) == 12
    assert "so the next start decodes all pictures again" in caplog.text


def test_only_a_few_of_many_bad_pictures_are_named(pictures, caplog):
    for caption in sorted(pictures.glob("*.txt"))[:9]:
        caption.unlink()
    source(pictures)
    assert "004.png" in caplog.text and "005.png" not in caplog.text and "and 4 more" in caplog.text


def test_a_folder_with_nothing_to_train_on_is_an_error_that_says_what_to_do(tmp_path, pictures):
    with pytest.raises(UserError, match="There is no folder"):
        source(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no picture that can be trained on"):
        source(tmp_path / "empty")
    for caption in pictures.glob("*.txt"):
        caption.unlink()
    with pytest.raises(UserError, match=r"12 were left out \(000.png: no caption"):
        source(pictures)


def draw(path, caption=None, suffix=".txt"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16)).save(path)
    if caption is not None:
        path.with_suffix(suffix).write_text(caption)


def captions(samples):
    return {sample.key.partition(":")[2]: sample.caption for sample in samples}


def test_captions_come_from_files_beside_the_pictures_in_folders_of_any_depth(tmp_path):
    draw(tmp_path / "a.png", " a cat\n")
    draw(tmp_path / "deep" / "er" / "b.png", "\ufeffa dog", ".caption")
    draw(tmp_path / ".trash" / "c.png", "gone")
    assert captions(source(tmp_path)) == {"a.png": "a cat", "deep/er/b.png": "a dog"}


def test_captions_come_from_metadata_files_of_each_folder(tmp_path, caplog):
    for name in ("a.png", "sub/b.png", "sub/c.png"):
        draw(tmp_path / name, "beside")
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": ["one", "two "]}\n\n{"file_name": "sub/c.png", "text": "seen"}\n{"file_name": "no.png", "text": ""}\n'
    )
    (tmp_path / "sub" / "metadata.csv").write_text('file_name,text\nb.png,"a, b"\n')
    assert captions(source(tmp_path)) == {"a.png": ("one", "two"), "sub/b.png": "a, b", "sub/c.png": "seen"}
    assert "metadata.jsonl, line 4: there is no picture no.png" in caplog.text


def test_a_metadata_row_without_a_caption_leaves_it_to_the_file_beside(tmp_path):
    draw(tmp_path / "a.png", "beside")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "prompt": null}')
    assert captions(source(tmp_path, caption_column="prompt")) == {"a.png": "beside"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metadata.jsonl", b"{broken", "metadata.jsonl, line 1: no JSON"),
        ("metadata.jsonl", b"[1]", "line 1: no file_name"),
        (
            "metadata.jsonl",
            b'{"file_name": "a.png", "words": "x"}',
            "line 1: no caption: it has words, not text or caption or prompt; give the captions' column as --caption_column",
        ),
        ("metadata.csv", b"picture,text\na.png,x\n", "line 2: no file_name"),
        ("metadata.csv", b"file_name,text\na.png,caf\xe9\n", "cannot be read: 'utf-8'"),
    ],
)
def test_what_a_metadata_file_says_wrongly_is_listed_with_its_row(tmp_path, caplog, name, content, said):
    draw(tmp_path / "a.png")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"2 were left out .*{re.escape(said)}"):
        source(tmp_path)
    draw(tmp_path / "b.png", "beside")
    assert captions(source(tmp_path)) == {"b.png": "beside"} and said in caplog.text


def test_a_folder_of_kohya_repeats_its_pictures_and_names_those_without_a_caption(tmp_path):
    draw(tmp_path / "3_sks dog" / "a.png")
    draw(tmp_path / "3_sks dog" / "b.png", "its own")
    draw(tmp_path / "2022_trip" / "c.png", "a year is no count")
    data = source(tmp_path, repeats=2)
    seen = list(data)
    names = [sample.key.partition(":")[2] for sample in seen]
    assert len(data) == len(seen) == len({sample.key for sample in seen}) == 14
    assert {name: names.count(name) for name in names} == {"3_sks dog/a.png": 6, "3_sks dog/b.png": 6, "2022_trip/c.png": 2}
    assert captions(seen) == {"3_sks dog/a.png": "sks dog", "3_sks dog/b.png": "its own", "2022_trip/c.png": "a year is no count"}


def test_bare_pictures_take_the_instance_prompt(tmp_path):
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png", "its own")
    assert captions(source(tmp_path, instance_prompt="sks")) == {"a.png": "sks", "b.png": "its own"}
    assert captions(source(tmp_path)) == {"b.png": "its own"}


def test_textual_inversion_takes_bare_pictures(tmp_path):
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png", "a <dog>")
    run = RunConfig(method="textual_inversion", placeholder_token="<dog>", initializer_token="dog")
    assert captions(source(tmp_path, run=run)) == {"a.png": "", "b.png": "a <dog>"}


def test_a_subset_is_decided_by_the_seed(pictures):
    some = captions(source(pictures, max_train_samples=4))
    assert len(some) == 4 and some == captions(source(pictures, max_train_samples=4)) != captions(
        source(pictures, max_train_samples=4, seed=1)
    )
    assert len(captions(source(pictures, max_train_samples=99))) == 12


def test_a_repeated_source_goes_on_exactly_where_its_state_was_taken(pictures):
    data = source(pictures, epochs=2, repeats=3)
    samples = iter(data)
    keys(islice(samples, 50))
    other = source(pictures, epochs=2, repeats=3)
    other.load_state_dict(data.state_dict())
    assert keys(other) == keys(samples)


def test_what_was_ahead_at_a_checkpoint_comes_before_what_was_given_back_earlier(pictures):
    data = source(pictures)
    data.give_back(["0:001.png"])
    data.give_back(["0:002.png", "0:003.png"])
    assert keys(islice(iter(data), 3)) == ["0:002.png", "0:003.png", "0:001.png"]


def test_a_picture_that_is_gone_since_the_start_is_left_out_like_a_broken_one(pictures, caplog):
    data = source(pictures)
    (pictures / "003.png").unlink()
    assert [sample.key for sample in data if not sample.image] == ["0:003.png"] and "cannot read 003.png" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"max_train_samples": -1}, "max_train_samples is -1"),
        ({"train_data_dir": "a", "dataset_name": "b"}, "Two datasets"),
        ({"train_data_dir": "a", "dataset_part": "1/2"}, "Add --dataset_name"),
    ],
)
def test_options_of_the_data_that_make_no_sense_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        PeerConfig(**options)


def test_where_pictures_went_since_the_checkpoint_its_epoch_begins_anew(pictures, caplog):
    data = source(pictures, epochs=None)
    first = [sample.key for sample in islice(data, 10)]
    data.give_back(first[:2])
    state = data.state_dict()
    for key in [first[0], *first[4:7]]:
        (pictures / key.partition(":")[2]).unlink()
    other = source(pictures, epochs=None)
    other.load_state_dict(state)
    assert "not those of the checkpoint; epoch 1 begins again" in caplog.text
    keys = [sample.key for sample in islice(other, 9)]
    assert keys[0] == first[1] and len(set(keys[1:])) == 8 and all(sample.startswith("0:") for sample in keys)
