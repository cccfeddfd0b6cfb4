"""One folder with everything that the page about data promises, read by a host and by a peer: both train the same pictures with the same captions."""

import io
import json
import random
from collections import Counter

from PIL import Image

from datasetserver.ingest import Policy, ingest, ingested, shard_path
from datasetserver.report import report
from datasetserver.sources import Folder
from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data import directory
from peer.data.shards import read_shard
from peer.samples.captions import choose_caption
from swarm.run_config import RunConfig


def put(path, number, caption=None, suffix=".txt", format=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("RGB", (16, 16), random.Random(number).randbytes(16 * 16 * 3)).save(path, format, **options)
    if caption is not None:
        path.with_suffix(suffix).write_text(caption, encoding="utf-8")


def everything(folder):
    put(folder / "plain.png", 1, "beside")
    put(folder / "loud.JPEG", 2, " upper\r\ncase\t", ".TXT")
    put(folder / "kept.webp", 3, "a caption file", ".caption", lossless=True)
    put(folder / "both.png", 4, ".caption", ".caption")
    (folder / "both.txt").write_text("txt first")
    put(folder / "bitmap.bmp", 5, "cafe\u0301")
    put(folder / "told.png", 6, "not this one")
    put(folder / "many.jpg", 7)
    put(folder / "null.png", 8, "the row says nothing")
    put(folder / "deep" / "listed.png", 9)
    put(folder / "deep" / "nearer.png", 10)
    put(folder / "3_sks dog" / "bare.png", 11)
    put(folder / "3_sks dog" / "empty.png", 12, " \n")
    put(folder / "3_sks dog" / "own.png", 13, "its own")
    put(folder / "2022_trip" / "year.png", 14, "a year is no count")
    put(folder / "exif.jpg", 15, "taken somewhere", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0")
    put(folder / "twin.png", 1, "the same picture in other words")
    put(folder / ".hidden" / "no.png", 20, "hidden")
    put(folder / "._plain.png", 21, "hidden", format="PNG")
    put(folder / "wordless.png", 22)
    (folder / "lonely.txt").write_text("whose?")
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
}


def pixels(data):
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def as_set(captions):
    return frozenset([captions] if isinstance(captions, str) else captions)


def of_a_peer(folder, **options):
    config = PeerConfig(train_data_dir=str(folder), **options)
    context = SourceContext(run=RunConfig(), peer=config, folder=folder, peer_id="a", cache_dir=folder.with_name("cache"), epochs=1)
    return Counter((pixels(sample.image), as_set(sample.caption)) for sample in directory.build(context))


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
    assert dict(result.rejected) == {
        "lonely.txt": "a caption, but no picture of that name",
        "moving.gif": "a GIF: convert it to PNG or JPEG",
        "wordless.png": "no caption: there is no .txt or .caption file of that name",
        "metadata.jsonl, line 6": "there is no picture gone.png",
    }
    assert [set(pair) for pair in result.duplicates] == [{"plain.png", "twin.png"}], "what comes several times an epoch is no duplicate"


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
