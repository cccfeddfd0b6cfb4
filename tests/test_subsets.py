"""A dataset of several folders by a TOML file in kohya's form: the same for a host and for a peer."""

import csv
import json
import logging
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from datasetserver.__main__ import cli
from datasetserver.config import ServerConfig
from datasetserver.ingest import Policy, ingest
from datasetserver.kept import CAPTION, REPEATS
from datasetserver.prepared import ingested, shard_path
from datasetserver.report import report
from datasetserver.sources import Folder
from peer.config import PeerConfig
from peer.data.directory import Directory, Rules
from peer.data.shards import read_shard
from peer.samples.decoding import Decoder
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from swarm.subsets import list_dataset, read_subsets
from tests.datasetserver.hosting import write_dataset
from tests.datasetserver.test_program import complaint

KOHYAS = """
[general]
shuffle_caption = true
caption_extension = ".txt"
keep_tokens = 1
caption_suffix = ", photo"
color_aug = false

[[datasets]]
resolution = 512
batch_size = 4
caption_prefix = "sks,"

  [[datasets.subsets]]
  image_dir = "cats"
  num_repeats = 2

  [[datasets.subsets]]
  image_dir = "dogs"
  class_tokens = "a dog"
  caption_prefix = ""

[[datasets]]
[[datasets.subsets]]
image_dir = "more/cats"
caption_suffix = ""
"""


@pytest.fixture
def toml(tmp_path):
    for number, (name, caption) in enumerate({"cats/a": "cat", "cats/3_deep/b": None, "dogs/a": None, "dogs/c": "dog", "more/cats/a": "lion"}.items()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(tmp_path / f"{name}.png")
        if caption:
            (tmp_path / f"{name}.txt").write_text(caption)
    (tmp_path / "dogs" / "broken.png").write_bytes(b"no picture")
    (tmp_path / "dogs" / "lonely.txt").write_text("x")
    path = tmp_path / "data.toml"
    path.write_text(KOHYAS)
    return path


EXPECTED = {"sks, cat , photo": 2, "sks, deep , photo": 6, "a dog , photo": 1, "dog , photo": 1, "lion": 1}


def test_a_host_and_a_peer_read_the_folders_with_their_own_repeats_and_captions(toml, tmp_path, caplog):
    result = ingest(Folder(toml), tmp_path / "work", workers=0)
    rows = [row for shard in result.manifest.shards for row in read_shard(shard_path(tmp_path / "work", shard.digest), shard.samples)]
    assert Counter(caption for _, caption in rows) == EXPECTED
    assert [name for name, _ in result.rejected] == ["dogs/broken.png", "dogs/lonely.txt"]
    samples = list(Directory(toml, Rules(), tmp_path / "cache", epochs=1))
    assert Counter(sample.caption for sample in samples) == EXPECTED
    assert "more/cats/a.png" in {sample.key.partition(":")[2] for sample in samples} and "left out files=2 of pictures=6" in caplog.text
    assert not ingest(Folder(toml), tmp_path / "work", workers=0).fresh
    toml.write_text(KOHYAS.replace("photo", "drawing"))
    assert ingest(Folder(toml), tmp_path / "work", workers=0).fresh, "its captions are others"


@pytest.mark.parametrize(("extension", "caption"), [(None, "words"), (".txt", "words"), (".caption", "tags")])
def test_a_host_and_a_peer_take_the_caption_of_the_extension_that_the_file_names(tmp_path, extension, caption):
    both = {".txt": "words", ".caption": "tags"}
    files = {"a": both, "b": {".txt": "only words"}, "c": {".caption": "only tags"}, "d": {".txt": "filled", ".caption": ""}}
    folder, path = tmp_path / "pictures", tmp_path / "data.toml"
    for number, (name, captions) in enumerate(files.items()):
        captioned(folder / f"{name}.png", number, captions)
    with tarfile.open(folder / "more.tar", "w") as tar:
        captioned(tmp_path / "e.png", 9, {".txt": "packed words", ".caption": "packed tags"})
        for suffix in (".png", ".txt", ".caption"):
            tar.add(tmp_path / f"e{suffix}", f"e{suffix}")
    path.write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "pictures"\n' + (f'caption_extension = "{extension}"' if extension else ""))
    result = ingest(Folder(path), tmp_path / "work", workers=0)
    rows = [row for shard in result.manifest.shards for row in read_shard(shard_path(tmp_path / "work", shard.digest), shard.samples)]
    expected = Counter([caption, "only words", "only tags", "filled", f"packed {caption}"])
    assert Counter(text for _, text in rows) == expected and not result.rejected
    assert Counter(sample.caption for sample in Directory(path, Rules(), tmp_path / "cache", epochs=1)) == expected


def captioned(image, number, captions):
    image.parent.mkdir(exist_ok=True)
    Image.new("RGB", (16, 16), (number, 0, 0)).save(image)
    for suffix, text in captions.items():
        image.with_suffix(suffix).write_text(text)


def test_what_is_of_the_whole_run_here_is_named(toml, caplog):
    with caplog.at_level(logging.WARNING):
        list_dataset(toml, [])
    (line,) = [record.getMessage() for record in caplog.records if record.name == "swarm.subsets"]
    said = "ignored batch_size, keep_tokens, resolution, shuffle_caption: a run sets this for all pictures, with "
    assert line == f"{toml}: {said}--keep_tokens --resolution --shuffle_tags --train_batch_size"


SUBSET = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "cats"\n'


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[[datasets]", "is not valid TOML"),
        ("", "names no folder"),
        ("datasets = 3", "'datasets' is not a list of tables"),
        ("general = 3\n" + SUBSET, "'general' is not a table"),
        ("[[datasets]]\nsubsets = [1]", "'subsets' is not a list of tables"),
        ("[[dataset]]\n", "there is no option 'dataset'. Did you mean 'datasets'"),
        (SUBSET + "num_repeat = 2", "Did you mean 'num_repeats'"),
        ("[[datasets]]\nresolution = 512", "a [[datasets]] names no folder"),
        ("[[datasets]]\n[[datasets.subset]]\nimage_dir = 'cats'", "there is no option 'subset'. Did you mean 'subsets'"),
        ("[[datasets]]\nnum_repeat = 2\n[[datasets.subsets]]\nimage_dir = 'cats'", "Did you mean 'num_repeats'"),
        ("[general]\nnum_repeat = 2\n" + SUBSET, "Did you mean 'num_repeats'"),
        (SUBSET + SUBSET.replace("cats", "./cats/"), "names one folder twice: 'cats' and 'cats'"),
        (SUBSET + SUBSET.replace("cats", "link"), "names one folder twice: 'cats' and 'link'"),
        ("a = " + "[" * 5000, "is not valid TOML"),
        (SUBSET + "num_repeats = " + "9" * 5000, "is not valid TOML"),
        (SUBSET.replace("cats", "c" * 5000), "File name too long. Give it a folder"),
        (SUBSET.replace("cats", "a\\u0000b"), "embedded null byte. Give it a folder"),
        (SUBSET + "num_repeats = 0", "num_repeats is 0"),
        (SUBSET + "num_repeats = 1000", "num_repeats is 1000. Use 1 to 999"),
        (SUBSET + 'caption_separator = ";"', "there is no caption_separator here. Remove it"),
        (SUBSET + 'conditioning_data_dir = "m"', "Put each mask beside its picture as NAME.mask.png, and add --masked_loss"),
        (SUBSET + "loss_weight = 0", "loss_weight is 0. Use more than 0"),
        (SUBSET + "loss_weight = nan", "loss_weight is nan. Use more than 0"),
        (SUBSET + "loss_weight = true", "loss_weight is True"),
        (SUBSET + "validation_split = 1.5", "validation_split is 1.5. Use 0 to 1"),
        (SUBSET + "validation_split = -0.1", "validation_split is -0.1. Use 0 to 1"),
        (SUBSET + "validation_split = nan", "validation_split is nan. Use 0 to 1"),
        (SUBSET + "validation_split = true", "validation_split is True"),
        (SUBSET + "validation_seed = 42", "Remove it: the hash of a picture's name decides whether it is held out"),
        (SUBSET + 'num_repeats = "2"', "num_repeats is '2'"),
        (SUBSET + "num_repeats = true", "num_repeats is True"),
        (SUBSET + "is_reg = true", "there is no is_reg here. Give that folder as --class_data_dir"),
        (SUBSET + "color_aug = true", "there is no color_aug here. Remove it"),
        (SUBSET + 'caption_extension = ".tags"', "caption_extension is '.tags'"),
        ("[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 2", "a subset has no image_dir"),
        (SUBSET.replace("cats", "nowhere"), "There is no folder"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(toml, text, what):
    toml.write_text(text)
    (toml.parent / "link").symlink_to("cats")
    with pytest.raises(UserError) as caught:
        list_dataset(toml, [])
    assert what in str(caught.value) and "\n" not in str(caught.value) and caught.value.fix


def test_a_file_that_is_not_there_or_unreadable_is_told_so(tmp_path, capsys):
    with pytest.raises(UserError, match="There is no file"):
        read_subsets(tmp_path / "none.toml")
    code, line = complaint(capsys, "--dataset", str(tmp_path / "none.toml"), "--dry_run", "--ingest_workers", "0")
    assert code == ExitCode.CONFIG and "There is no file" in line and "none.toml" in line
    (tmp_path / "data.toml").write_text(SUBSET)
    code, line = complaint(capsys, "--dataset", str(tmp_path / "data.toml"), "--dry_run")
    assert code == ExitCode.CONFIG and f"There is no folder {tmp_path / 'cats'}." in line


def test_pictures_of_the_class_do_not_lie_in_a_folder_that_is_trained(toml):
    prior = {"with_prior_preservation": True, "class_prompt": "a cat"}
    with pytest.raises(UserError, match="class_data_dir lies in train_data_dir"):
        PeerConfig(train_data_dir=str(toml), class_data_dir=str(toml.parent / "more" / "cats" / "class"), **prior)
    assert PeerConfig(train_data_dir=str(toml), class_data_dir=str(toml.parent / "more" / "class"), **prior).own_data


def test_a_host_takes_the_file_by_kohyas_name(toml, capsys):
    assert cli(["--dataset_config", str(toml), "--dry_run", "--ingest_workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "11 samples" in out and "dogs/broken.png" in out


def names(toml, without=()):
    return {pair.name for pair in list_dataset(toml, [], without=without)}


def test_subsets_that_come_or_move_rename_no_picture(toml, tmp_path):
    """A run that grows knows its pictures by their names."""
    subset = SUBSET.replace("[[datasets]]\n", "")
    toml.write_text(SUBSET)
    before = names(toml)
    ingest(Folder(toml), tmp_path / "work", workers=0)
    toml.write_text(SUBSET.replace("cats", "more/cats") + subset.replace("cats", "dogs") + 'class_tokens = "a dog"\n' + subset)
    assert before == {"cats/a.png", "cats/3_deep/b.png"} < names(toml)
    grown = ingest(Folder(toml), tmp_path / "work", workers=0, grow_from=1)
    rows = [row for shard in grown.manifest.shards for row in read_shard(shard_path(tmp_path / "work", shard.digest), shard.samples)]
    assert Counter(caption for _, caption in rows) == {"cat": 1, "deep": 3, "lion": 1, "a dog": 1, "dog": 1}


def test_a_folder_in_another_ones_is_listed_once_and_the_same_from_anywhere(toml, monkeypatch):
    toml.write_text(SUBSET.replace("cats", "."))
    whole = names(toml)
    toml.write_text(SUBSET.replace("cats", ".") + SUBSET.replace("cats", "more/cats") + "num_repeats = 5")
    assert {pair.name: pair.repeats for pair in list_dataset(toml, [])}.items() >= {"more/cats/a.png": 5, "cats/a.png": 1}.items()
    assert names(toml) == whole and len(whole) == 6, "what was part of the outer folder keeps its names"
    monkeypatch.chdir(toml.parent)
    assert names(Path("data.toml")) == names(toml)


def test_a_work_folder_within_the_dataset_is_no_part_of_it(toml):
    toml.write_text(SUBSET.replace("cats", "."))
    config = ServerConfig(dataset=str(toml))
    ingest(config.source(False), config.work_folder(), workers=0, policy=Policy("empty"))
    assert config.work_folder().parent == toml.parent
    assert not ingest(config.source(False), config.work_folder(), workers=0, policy=Policy("empty")).fresh


def test_keys_that_say_what_is_so_without_them_are_read_over(toml):
    toml.write_text(SUBSET + 'caption_separator = ","\ntoken_warmup_min = 1\nnetwork_multiplier = 1.0\nnum_repeats = 999')
    assert [subset.num_repeats for subset in read_subsets(toml)] == [999]


def test_each_folder_has_its_loss_weight_at_a_peer_and_at_a_host(toml, tmp_path):
    weighted = KOHYAS.replace('"dogs"', '"dogs"\nloss_weight = 2').replace('"more/cats"', '"more/cats"\nloss_weight = 0.5')
    toml.write_text(weighted)
    own = list(Directory(toml, Rules(), tmp_path / "cache", epochs=1))
    weights = {sample.key.partition(":")[2]: sample.weight for sample in own}
    assert weights == {"cats/a.png": 1.0, "cats/3_deep/b.png": 1.0, "dogs/a.png": 2.0, "dogs/c.png": 2.0, "more/cats/a.png": 0.5}
    (shard,) = ingest(Folder(toml), tmp_path / "work", workers=0).manifest.shards
    assert sorted(shard.weights) == sorted(sample.weight for sample in own)
    toml.write_text(KOHYAS)
    (plain,) = ingest(Folder(toml), tmp_path / "work", workers=0).manifest.shards
    assert "weights" not in plain.model_dump() and plain.digest == shard.digest

    decoder = Decoder(RunConfig(resolution=16))
    batch = decoder.finish(decoder.start(own))
    assert batch.weights.tolist() == [weights[key.partition(":")[2]] for key in batch.keys]
    assert decoder.finish(decoder.start([sample for sample in own if sample.weight == 1])).weights is None
    with_class = Decoder(RunConfig(resolution=16), class_weight=0.25)
    assert with_class.finish(with_class.start(own[:1], beside=own[:1])).weights.tolist() == [own[0].weight, 0.25]


def weights_of(work):
    return sorted(weight for shard in ingested(work).manifest.shards for weight in shard.weights or [1.0] * shard.samples)


@pytest.mark.parametrize("split", [0.0, 0.4])
def test_a_run_that_grows_keeps_each_pictures_loss_weight_and_another_one_is_refused(tmp_path, split):
    toml, work, policy = tmp_path / "data.toml", tmp_path / "work", Policy(held_out=split)
    subsets = {"cats": "loss_weight = 2", "dogs": "", "birds": "loss_weight = 0.5"}
    for number, name in enumerate(subsets):
        write_dataset(tmp_path / name, 6 + number)

    def prepare(**options):
        toml.write_text("[[datasets]]\n" + "".join(f'[[datasets.subsets]]\nimage_dir = "{name}"\n{said}\n' for name, said in subsets.items()))
        return ingest(Folder(toml), work, workers=0, shard_samples=4, policy=policy, **options)

    birds = subsets.pop("birds")
    first = prepare()
    subsets["birds"] = birds
    prepare(grow_from=1)
    write_dataset(tmp_path / "dogs", 9)
    grown = prepare(grow_from=2)
    trained = weights_of(work)
    assert trained.count(0.5) == 8 and (trained.count(2.0) == 6) == (not split) and trained.count(1.0) >= 2
    assert len(grown.manifest.generations) == 3 and bool(grown.manifest.held_out) == bool(split)
    for name, said, told in (("cats", "", "is 1, but .* was prepared with 2"), ("dogs", "loss_weight = 3", "is 3"), ("birds", "loss_weight = 1", "with 0.5")):
        before = subsets[name]
        subsets[name] = said
        with pytest.raises(UserError, match=f"loss_weight of {name}/.*{told}") as raised:
            prepare(grow_from=3, frozen=True)
        assert "Set it back" in raised.value.fix and ingested(work).digest == grown.digest
        subsets[name] = before
    assert prepare(grow_from=3, frozen=True).digest == grown.digest and grown.first == first.digest


def test_a_picture_that_is_in_no_shard_yet_may_get_any_loss_weight(tmp_path):
    write_dataset(tmp_path / "cats", 3)
    (tmp_path / "cats" / "0001.txt").write_text("")
    (tmp_path / "data.toml").write_text(SUBSET)
    ingest(Folder(tmp_path / "data.toml"), tmp_path / "work", workers=0)
    for number in (0, 2):
        (tmp_path / "cats" / f"{number:04d}.png").unlink()
    (tmp_path / "cats" / "0001.txt").write_text("later captioned")
    (tmp_path / "data.toml").write_text(SUBSET + "loss_weight = 2")
    ingest(Folder(tmp_path / "data.toml"), tmp_path / "work", workers=0, grow_from=1)
    assert weights_of(tmp_path / "work") == [1.0, 1.0, 2.0]


HELD_OUT = """
[[datasets]]
validation_split = 0
[[datasets.subsets]]
image_dir = "cats"
[[datasets.subsets]]
image_dir = "dogs"
num_repeats = 2
validation_split = 1
"""


@pytest.fixture
def with_a_folder_held_out(tmp_path):
    """A TOML file of 6 cats, of which none is held out, and 3 dogs, which are all."""
    for name, count in {"cats": 6, "dogs": 3}.items():
        write_dataset(tmp_path / name, count)
    (tmp_path / "data.toml").write_text(HELD_OUT)
    return tmp_path / "data.toml"


def names_in(work, shards):
    """How often each picture is in these shards, by the list of what the work folder knows."""
    with (work / "samples.csv").open() as lines:
        known = [name for name, _ in csv.reader(lines)][1:]
    counts = {shard.digest: shard.samples for shard in shards}
    manifest, place, found = ingested(work).manifest, 0, []
    first = manifest.generations[0].shards
    for shard in [*manifest.shards[:first], *manifest.held_out, *manifest.shards[first:]]:
        found += known[place : place + shard.samples] if shard.digest in counts else []
        place += shard.samples
    return Counter(name.partition("/")[0] for name in found)


def test_a_folders_own_validation_split_is_the_same_at_a_host_and_at_a_peer(with_a_folder_held_out, tmp_path):
    source, policy, work = Folder(with_a_folder_held_out), Policy(held_out=0.5), tmp_path / "work"
    first = ingest(source, work, workers=0, policy=policy).manifest
    assert names_in(work, first.shards) == {"cats": 6} and names_in(work, first.held_out) == {"dogs": 3}
    own = Directory(with_a_folder_held_out, Rules(validation_split=0.5), tmp_path / "cache", epochs=1)
    assert Counter(sample.key.partition(":")[2].partition("/")[0] for sample in own) == {"cats": 6}
    assert [sample.key.partition("/")[0] for sample in own.held_out()] == 3 * ["held out:dogs"]

    write_dataset(tmp_path / "cats", 7)
    write_dataset(tmp_path / "dogs", 4)
    grown = ingest(source, work, workers=0, policy=policy, grow_from=1)
    assert names_in(work, grown.manifest.shards) == {"cats": 7} and grown.manifest.held_out == first.held_out
    assert grown.rejected == [("dogs/0003.png", "its folder is never trained (validation_split 1), and nothing more is held out")]
    with_a_folder_held_out.write_text(HELD_OUT.replace("= 1", "= 0.9"))
    with pytest.raises(UserError, match="how to read it has changed"):
        ingest(source, work, workers=0, policy=policy, frozen=True)


def test_a_folder_that_is_held_out_whole_is_not_trained_beyond_what_is_measured(with_a_folder_held_out, tmp_path, monkeypatch):
    for room in ("datasetserver.ingest", "swarm.held_out"):
        monkeypatch.setattr(f"{room}.MOST_HELD_OUT", 2)
    result = ingest(Folder(with_a_folder_held_out), tmp_path / "work", workers=0, policy=Policy(held_out=0.5))
    assert names_in(tmp_path / "work", result.manifest.held_out) == {"dogs": 2} and result.manifest.total == 6
    assert [name.partition("/")[0] for name, _ in result.rejected] == ["dogs"]
    own = Directory(with_a_folder_held_out, Rules(validation_split=0.5), tmp_path / "cache", epochs=1)
    assert len(own.held_out()) == 2 and len(own) == 6


def test_a_folders_own_validation_split_needs_a_run_that_measures_and_pictures_to_train(with_a_folder_held_out, tmp_path, caplog):
    alone, joins = Rules(), Rules(joining=True)
    for prepare in (
        lambda: ingest(Folder(with_a_folder_held_out), tmp_path / "work", workers=0),
        lambda: Directory(with_a_folder_held_out, alone, tmp_path / "cache", epochs=1),
    ):
        with pytest.raises(UserError, match="validation_split of a folder is 1, and the run's is 0") as raised:
            prepare()
        assert "--validation_split" in raised.value.fix
    assert len(Directory(with_a_folder_held_out, joins, tmp_path / "cache", epochs=1)) == 6
    assert "This peer measures no held-out loss" in caplog.text

    with_a_folder_held_out.write_text(HELD_OUT.replace("= 0", "= 1"))
    for prepare in (
        lambda: ingest(Folder(with_a_folder_held_out), tmp_path / "work", workers=0, policy=Policy(held_out=0.5)),
        lambda: Directory(with_a_folder_held_out, Rules(validation_split=0.5), tmp_path / "cache", epochs=1),
        lambda: Directory(with_a_folder_held_out, joins, tmp_path / "cache", epochs=1),
    ):
        with pytest.raises(UserError, match="holds out 9 of 9 pictures"):
            prepare()


def test_a_run_that_grows_says_which_captions_and_repeats_are_others_now_and_keeps_its_own(toml, tmp_path):
    work = tmp_path / "work"
    before = ingest(Folder(toml), work, workers=0).manifest
    kept = ["cats/3_deep/b.png", "cats/a.png", "dogs/a.png", "dogs/c.png"]
    toml.write_text(KOHYAS.replace("sks", "xyz").replace("num_repeats = 2", "num_repeats = 3").replace("a dog", "a wolf"))
    (tmp_path / "dogs" / "c.txt").write_text("")
    write_dataset(tmp_path / "dogs", 2)
    Image.new("RGB", (16, 16), (9, 9, 9)).save(tmp_path / "more" / "cats" / "new.png")
    (tmp_path / "more" / "cats" / "new.txt").write_text("a lioness")
    grown = ingest(Folder(toml), work, workers=0, grow_from=1)
    assert {name for name, note in grown.notes if note == CAPTION} == set(kept)
    assert {name for name, note in grown.notes if note == REPEATS} == {"cats/3_deep/b.png", "cats/a.png"}
    assert grown.manifest.shards[: len(before.shards)] == before.shards and grown.manifest.total == before.total + 3
    lines = [*report(toml, grown, work)]
    assert f"  4 pictures with {CAPTION}, see {work / 'notes.csv'}" in lines and f"  2 pictures with {REPEATS}, see {work / 'notes.csv'}" in lines
    assert f'cats/a.png,"{CAPTION}"' in (work / "notes.csv").read_text()


def test_a_run_that_grows_says_nothing_of_what_is_as_it_was_and_of_repeats_of_what_is_held_out(with_a_folder_held_out, tmp_path):
    source, policy = Folder(with_a_folder_held_out), Policy("empty", held_out=0.5)
    (tmp_path / "cats" / "0001.txt").unlink()
    ingest(source, tmp_path / "work", workers=0, policy=policy)
    write_dataset(tmp_path / "cats", 7)
    (tmp_path / "cats" / "0001.txt").unlink()
    with_a_folder_held_out.write_text(HELD_OUT.replace("num_repeats = 2", "num_repeats = 4"))
    grown = ingest(source, tmp_path / "work", workers=0, policy=policy, grow_from=1)
    assert grown.manifest.total == 7 and grown.notes == []

    known = json.loads((tmp_path / "work" / "ingest.json").read_text())
    (tmp_path / "work" / "ingest.json").write_text(json.dumps(known | {"format": 3}))  # by other rules, whose captions may be others
    with_a_folder_held_out.write_text(HELD_OUT.replace("num_repeats = 2", "caption_prefix = 'a dog'") + "caption_suffix = ''")
    write_dataset(tmp_path / "cats", 8)
    assert ingest(source, tmp_path / "work", workers=0, policy=policy, grow_from=2).notes == []


def test_a_damaged_shard_is_named_when_the_dataset_grows(tmp_path):
    folder, work = write_dataset(tmp_path / "data", 4), tmp_path / "work"
    (shard,) = ingest(folder, work, workers=0).manifest.shards
    write_dataset(folder, 5)
    for damage in (bytes(shard.bytes), b"x" * shard.bytes):
        shard_path(work, shard.digest).write_bytes(damage)
        with pytest.raises(UserError, match="is damaged") as raised:
            ingest(folder, work, workers=0, grow_from=1)
        assert "Restore that file" in raised.value.fix and raised.value.code == ExitCode.DISK
