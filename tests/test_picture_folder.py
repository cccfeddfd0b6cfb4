"""One folder with everything that the page about data promises, read by a host and by a peer: both train the same pictures with the same captions."""

import io
import json
import os
import random
import tarfile
from collections import Counter

from PIL import Image

from datasetserver.ingest import Policy, ingest
from datasetserver.prepared import ingested, shard_path
from datasetserver.report import report
from datasetserver.sources import Folder, Hub
from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data import directory
from peer.data.shards import read_shard
from peer.samples.decoding import choose_caption
from swarm.captions import one_line
from swarm.digest import digest_bytes
from swarm.run_config import RunConfig


def put(path, number, caption=None, suffix=".txt", format=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("RGB", (16, 16), random.Random(number).randbytes(16 * 16 * 3)).save(path, format, **options)
    if caption is not None:
        path.with_suffix(suffix).write_text(caption, encoding="utf-8")


def packed(path, numbers):
    """A WebDataset tar, of which only the first picture has a caption."""
    with tarfile.open(path, "w") as tar:
        for place, (name, number) in enumerate(numbers.items()):
            put(path.parent.parent / "unpacked" / name, number)
            tar.add(path.parent.parent / "unpacked" / name, name)
            if not place:
                caption = tarfile.TarInfo(name.replace(".png", ".txt"))
                caption.size = len(b"in a tar")
                tar.addfile(caption, io.BytesIO(b"in a tar"))


def everything(folder):
    put(folder / "plain.png", 1, "beside")
    put(folder / "loud.JPEG", 2, " upper\r\ncase\t", ".TXT")
    put(folder / "kept.webp", 3, "a caption file", ".caption", lossless=True)
    put(folder / "both.png", 4, ".caption", ".caption")
    (folder / "both.txt").write_text("txt first")
    put(folder / "blank.png", 26, "not the empty one", ".caption")
    (folder / "blank.txt").write_text("\ufeff \n")
    put(folder / "nothing.png", 27, "", ".caption")
    (folder / "nothing.txt").touch()
    put(folder / "bitmap.bmp", 5, "cafe\u0301")
    put(folder / "told.png", 6, "not this one")
    put(folder / "many.jpg", 7)
    put(folder / "null.png", 8, "the row says nothing")
    put(folder / "deep" / "listed.png", 9)
    put(folder / "deep" / "nearer.png", 10)
    put(folder / "3_sks dog" / "bare.png", 11)
    put(folder / "3_sks dog" / "empty.png", 12, " \n")
    put(folder / "3_sks dog" / "own.png", 13, "its own")
    put(folder / "0_never" / "zero.png", 25, "its folder says 0")
    put(folder / "2022_trip" / "year.png", 14, "a year is no count")
    put(folder / "exif.jpg", 15, "taken somewhere", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0")
    put(folder / "twin.png", 1, "the same picture in other words")
    put(folder / ".hidden" / "no.png", 20, "hidden")
    put(folder / "._plain.png", 21, "hidden", format="PNG")
    put(folder / "wordless.png", 22)
    put(folder / os.fsdecode(b"caf\xe9.png"), 16, "a name that is no text")
    put(folder / "d\u00e9j\u00e0 vu.png", 17, "a name of more than ASCII")
    put(folder.parent / "elsewhere" / "private.png", 23, "private")
    (folder / "link.png").symlink_to(folder.parent / "elsewhere" / "private.png")
    (folder / "link.txt").write_text("not ours to show")
    (folder / "again.png").symlink_to("plain.png")
    (folder / "again.txt").write_text("a link that stays inside")
    packed(folder / "more.tar", {"in/tar.png": 18, "in/bare.png": 24})
    (folder / "old.tar.gz").write_bytes(b"")
    (folder / "broken.png").write_bytes((folder / "plain.png").read_bytes()[:200])
    (folder / "broken.txt").write_text("cut off")
    (folder / "lonely.txt").write_text("whose?")
    Image.new("RGB", (1, 60)).save(folder / "narrow.png")
    (folder / "narrow.txt").write_text("a line")
    Image.new("RGB", (8, 8)).save(folder / "moving.gif")
    (folder / "moving.txt").write_text("a gif")
    rows = [
        {"file_name": "told.png", "text": "told"},
        {"file_name": "./many.jpg", "caption": ["one", "two ", ""]},
        {"file_name": "null.png", "text": None},
        {"file_name": "deep/listed.png", "prompt": "from above"},
        {"file_name": "deep/nearer.png", "text": "from above"},
        {"file_name": "gone.png", "text": "of nothing"},
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "deep" / "metadata.csv").write_text('\ufefffile_name,text\nnearer.png,"from, nearer"\n', encoding="utf-8")
    return folder


EXPECTED = {
    (1, ("beside",)): 1,
    (2, ("upper  case",)): 1,
    (3, ("a caption file",)): 1,
    (4, ("txt first",)): 1,
    (26, ("not the empty one",)): 1,
    (5, ("caf\u00e9",)): 1,
    (6, ("told",)): 1,
    (7, ("one", "two")): 1,
    (8, ("the row says nothing",)): 1,
    (9, ("from above",)): 1,
    (10, ("from, nearer",)): 1,
    (11, ("sks dog",)): 3,
    (12, ("sks dog",)): 3,
    (13, ("its own",)): 3,
    (14, ("a year is no count",)): 1,
    (15, ("taken somewhere",)): 1,
    (1, ("the same picture in other words",)): 1,
    (16, ("a name that is no text",)): 1,
    (17, ("a name of more than ASCII",)): 1,
    (1, ("a link that stays inside",)): 1,
    (18, ("in a tar",)): 1,
}
LEFT_OUT = {
    "lonely.txt": "a caption, but no picture of that name",
    "moving.gif": "a GIF: convert it to PNG or JPEG",
    "nothing.png": "caption is empty",
    "wordless.png": "no caption: there is no .txt or .caption file of that name",
    "metadata.jsonl, line 6": "there is no picture gone.png",
    "link.png": "a link that leads out of the folder",
    "more.tar/in/bare.png": "no caption: there is no .txt or .caption file of that name",
    "old.tar.gz": "a compressed tar: unpack it to a plain one",
    "broken.png": "cannot be decoded: image file is truncated",
    "0_never/zero.png": "its folder's name says 0 repeats: never trained",
    "narrow.png": "1x60 is too narrow: one side is more than 50 times the other",
}


def pixels(data):
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def as_set(captions):
    return frozenset([captions] if isinstance(captions, str) else captions)


def peers_source(folder, epochs=1, **options):
    config = PeerConfig(train_data_dir=str(folder), cache_dir=str(folder.with_name("cache")), **options)
    return directory.build(SourceContext(run=RunConfig(), peer=config, peer_id="a", epochs=epochs))


def of_a_peer(folder, **options):
    return Counter((pixels(sample.image), as_set(sample.caption)) for sample in peers_source(folder, **options))


def rows_of(work, result):
    return [row for shard in result.manifest.shards for row in read_shard(shard_path(work, shard.digest), shard.samples)]


def of_a_host(work, result):
    return Counter((pixels(image), as_set(caption)) for image, caption in rows_of(work, result))


def test_a_host_and_a_peer_read_a_folder_with_everything_in_the_same_way(tmp_path):
    folder = everything(tmp_path / "data")
    result = ingest(folder, tmp_path / "work", workers=0, shard_samples=8)
    host, peer = of_a_host(tmp_path / "work", result), of_a_peer(folder)
    assert host == peer and host.total() == sum(EXPECTED.values())
    assert Counter(captions for _, captions in host.elements()) == Counter(
        {frozenset(captions): sum(n for (_, other), n in EXPECTED.items() if other == captions) for _, captions in EXPECTED}
    )
    assert {name: reason.partition(" (")[0] for name, reason in result.rejected} == LEFT_OUT
    assert {name for pair in result.duplicates for name in pair} == {"plain.png", "twin.png", "again.png"}, "what comes several times an epoch is no duplicate"


def test_a_host_and_a_peer_leave_out_the_same_files_for_the_same_reasons(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("swarm.picture_folder._NAMED_FAULTS", 99)
    folder = everything(tmp_path / "data")
    rejected = ingest(folder, tmp_path / "work", workers=0).rejected
    of_a_peer(folder)
    (line,) = [record.getMessage() for record in caplog.records if record.name == directory.log.name]
    assert line.startswith(f"left out files={len(LEFT_OUT)} of pictures=26 ")
    assert sorted(line.split(" ", 5)[5].split("; ")) == sorted(f"{name}: {reason}" for name, reason in rejected)


def test_a_caption_keeps_what_joins_letters_and_emoji():
    assert [one_line(text) for text in ("\u0645\u06cc\u200c\u062e", "\U0001f469\u200d\U0001f680", "a\u200eb\tc")] == ["\u0645\u06cc\u200c\u062e", "\U0001f469\u200d\U0001f680", "a b c"]


def test_a_snapshot_in_the_hubs_cache_has_its_files_behind_links(tmp_path):
    put(tmp_path / "blobs" / "b10b", 1, format="PNG")
    put(tmp_path / "other" / "b10b", 2, format="PNG")
    folder = tmp_path / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (folder / "a.png").symlink_to("../../blobs/b10b")
    (folder / "b.png").symlink_to("../../other/b10b")
    (folder / "metadata.csv").write_text("file_name,text\na.png,a\nb.png,b\n")
    result = ingest(folder, tmp_path / "work", workers=0)
    assert of_a_host(tmp_path / "work", result) == of_a_peer(folder) and result.manifest.total == 1
    assert dict(result.rejected)["b.png"] == "a link that leads out of the folder"


# -- what began with an earlier version goes on with this one


def unchanging(folder):
    """Names, sizes and times that are the same on every machine; no pictures."""
    files = {
        "a.png": "a", "a.txt": "beside", "b.JPG": "b", "b.caption": "b", "3_sks dog/c.webp": "c", "3_sks dog/d.bmp": "d", "3_sks dog/d.txt": "d",
        "metadata.jsonl": '{"file_name": "b.JPG", "text": ["one", "two"]}\n', "sub/e.png": "e", "sub/e.txt": "", "bad.gif": "", "lonely.txt": "x",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name, text in {"f.png": "f", "f.txt": "ff", "g.jpg": "g"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    for path in folder.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    return folder


def said_by(listing):
    return digest_bytes(b"".join(listing.identity()))


def test_a_folders_and_a_datasets_identity_is_what_it_was(tmp_path):
    listing = Folder(unchanging(tmp_path / "data")).list()
    assert said_by(listing) == "870e6bea99d305ad4bc3827cb207c1d64a9a9f804e869b0a84bcea2b6c74aa77"
    assert [pair.name for pair in listing.pairs] == [
        "a.png", "3_sks dog/c.webp", "x.tar/f.png", "b.JPG", "3_sks dog/d.bmp#3", "3_sks dog/d.bmp#2", "sub/e.png", "3_sks dog/c.webp#2",
        "3_sks dog/c.webp#3", "x.tar/g.jpg", "3_sks dog/d.bmp",
    ]  # fmt: skip
    assert said_by(Hub("u/p", max_samples=5).list()) == "50cb4a2995901387822b2e9de3466abea087fef60a0861960c1d3fade59f4a23"


def test_a_peer_that_resumes_alone_finds_its_pictures_in_the_order_of_before(tmp_path):
    for name in ("a.png", "2_x/b.png", "z/c.png", "d\u00e9.png"):
        put(tmp_path / "data" / name, 1, name)
    source = peers_source(tmp_path / "data", epochs=2, repeats=2)
    assert source.state_dict()["pictures"] == "bbdcf6065dc91308dc45789e33b9ff0d242311c9d6d1aac246936a2b1565e474"
    assert [sample.key for sample in source][8:13] == ["0:d\u00e9.png", "0.1:2_x/b.png", "1:d\u00e9.png", "1.1:a.png", "1.3:2_x/b.png"]


def test_both_take_the_column_that_they_are_given(tmp_path):
    put(tmp_path / "data" / "a.png", 1)
    (tmp_path / "data" / "metadata.csv").write_text("file_name,text,words\na.png,not these,these\n")
    result = ingest(Folder(tmp_path / "data", "words"), tmp_path / "work", workers=0)
    assert of_a_host(tmp_path / "work", result) == of_a_peer(tmp_path / "data", caption_column="words")
    assert [caption for _, caption in rows_of(tmp_path / "work", result)] == ["these"]


def test_several_captions_of_a_shard_are_chosen_from_by_chance_like_those_of_a_folder(tmp_path):
    folder = everything(tmp_path / "data")
    result = ingest(folder, tmp_path / "work", workers=0)
    (several,) = [caption for _, caption in rows_of(tmp_path / "work", result) if not isinstance(caption, str)]
    assert several == ("one", "two")
    run = RunConfig(ucg=0.0)
    chosen = [choose_caption(f"{epoch}:0:0", several, run) for epoch in range(40)]
    assert set(chosen) == {"one", "two"} and chosen == [choose_caption(f"{epoch}:0:0", ["one", "two"], run) for epoch in range(40)]


def test_duplicates_are_dropped_and_repeats_are_not(tmp_path):
    folder = tmp_path / "data"
    put(folder / "4_cat" / "a.png", 1, "cat")
    put(folder / "4_cat" / "bad.png", 2)
    (folder / "4_cat" / "bad.png").write_bytes(b"no picture")
    put(folder / "2_dog" / "b.png", 1, "dog")
    result = ingest(folder, tmp_path / "work", workers=0, policy=Policy(duplicates="drop"))
    assert result.manifest.total in (2, 4), "one of the two, as often as its folder says"
    assert len(result.rejected) == 2, "each once"
    put(folder / "4_cat" / "new.png", 3, "new")
    assert ingest(folder, tmp_path / "work", workers=0, policy=Policy(duplicates="drop"), grow_from=1).manifest.total == result.manifest.total + 4


def test_the_report_counts_long_captions_and_small_pictures_and_knows_one_from_many(tmp_path):
    folder = tmp_path / "data"
    put(folder / "long.png", 1, "word, " * 37 + "don't end")  # 78 pieces; don't is two
    put(folder / "fits.png", 2, "word, " * 37 + "end")  # 75
    result = ingest(folder, tmp_path / "work", workers=0, resolution=17)
    assert Counter(note for _, note in result.notes) == {
        "a caption of more than 75 tokens: SDXL and Stable Diffusion do not read its end": 1,
        "a side shorter than 17 pixels: enlarged": 2,
    }
    assert len((tmp_path / "work" / "notes.csv").read_text().splitlines()) == 4
    lines = list(report("data", result, None))
    assert lines[0] == "dataset data: 2 samples in 1 shard (checked), 0 files left out"
    assert any(line.startswith("  1 picture with a caption of more than 75") for line in lines)
    assert any(line.startswith("  2 pictures with a side shorter than 17") for line in lines)
    assert ingest(folder, tmp_path / "large", workers=0, resolution=16).notes == [
        note for note in result.notes if "tokens" in note[1]
    ]


def test_the_report_can_be_printed_whatever_names_and_metadata_files_say(tmp_path):
    folder = tmp_path / "data"
    put(folder / "good.png", 1, "a caption")
    put(folder / os.fsdecode(b"caf\xe9.gif"), 2, format="GIF")
    (folder / "metadata.jsonl").write_text('{"file_name": "\\ud800.png", "text": "of nothing"}')
    lines = list(report("data", ingest(folder, tmp_path / "work", workers=0), None))
    assert lines[1:] == [
        "  left out caf\\udce9.gif: a GIF: convert it to PNG or JPEG",
        "  left out metadata.jsonl, line 1: there is no picture \\ud800.png",
    ]
    assert "\n".join(lines).encode()


def as_an_older_version_left_it(work):
    """ingest.json had no format, and the source's identity was another."""
    state = json.loads((work / "ingest.json").read_text())
    del state["format"]
    (work / "ingest.json").write_text(json.dumps(state | {"source": "0" * 64}))


def test_a_run_that_has_begun_keeps_the_bytes_of_an_older_version_and_grows_by_the_new_rules(tmp_path):
    folder, work = tmp_path / "data", tmp_path / "work"
    put(folder / "a.png", 1, "a")
    first = ingest(folder, work, workers=0)
    as_an_older_version_left_it(work)
    before = {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}
    put(folder / "2_new" / "b.png", 2)
    kept = ingest(folder, work, workers=0, frozen=True)
    assert (kept.digest, kept.fresh, kept.older) == (first.digest, False, True)
    assert before == {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}
    assert "older version" in list(report(folder, kept, work))[1]
    grown = ingest(folder, work, workers=0, frozen=True, grow_from=1)
    assert grown.manifest.shards[0] == first.manifest.shards[0] and grown.first == first.digest
    assert [caption for _, caption in rows_of(work, grown)] == ["a", "new", "new"]
    assert not ingested(work).older


def test_without_a_run_what_an_older_version_made_is_made_anew(tmp_path):
    put(tmp_path / "data" / "a.jpg", 1, "a", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0")
    ingest(tmp_path / "data", tmp_path / "work", workers=0)
    as_an_older_version_left_it(tmp_path / "work")
    assert ingest(tmp_path / "data", tmp_path / "work", workers=0).fresh
    assert b"Exif" not in rows_of(tmp_path / "work", ingested(tmp_path / "work"))[0][0]
