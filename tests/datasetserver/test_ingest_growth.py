"""A dataset that grows while a run is under way."""

import json

import pytest

from datasetserver.ingest import Policy, ingest
from datasetserver.prepared import ingested, shard_path
from scripts.demo.stand_in import write_model
from swarm import files
from swarm.digest import canonical_json, digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.protocol import Manifest
from tests.datasetserver.hosting import Host, write_dataset
from tests.datasetserver.test_http import call, get_run, lease
from tests.datasetserver.test_ingest import Interrupted, cut_at, samples_of
from tests.datasetserver.test_program import complaint


def test_what_is_new_becomes_a_generation_and_what_was_there_stays(tmp_path):
    folder, work = write_dataset(tmp_path / "data", 10), tmp_path / "work"
    (folder / "bad.png").write_bytes(b"no picture")
    (folder / "bad.txt").write_text("later repaired")
    first = ingest(folder, work, workers=0, shard_samples=4)
    write_dataset(folder, 15)
    (folder / "bad.png").write_bytes((folder / "0012.png").read_bytes())
    (folder / "0003.png").unlink()
    (folder / "0004.txt").write_text("another caption")
    grown = ingest(folder, work, workers=0, shard_samples=4, grow_from=2)
    assert grown.manifest.shards[:3] == first.manifest.shards
    assert [(g.from_epoch, g.shards) for g in grown.manifest.generations] == [(0, 3), (2, 5)]
    assert (grown.first, grown.digest == first.digest) == (first.digest, False)
    assert digest_bytes(canonical_json(grown.manifest.first().model_dump())) == first.digest
    assert sorted(c for _, c in samples_of(work, grown.manifest)) == sorted(["later repaired", *(f"picture {n}" for n in range(15))])
    assert [set(pair) for pair in grown.duplicates] == [{"bad.png", "0012.png"}]
    assert ingested(work) == ingest(folder, work, workers=0, shard_samples=4, frozen=True)
    again = ingest(folder, work, workers=0, shard_samples=4, grow_from=5)
    assert (again.digest, again.fresh) == (grown.digest, False)
    write_dataset(folder, 16)
    third = ingest(folder, work, workers=0, shard_samples=4, grow_from=1, policy=Policy(duplicates="drop"))
    assert [(g.from_epoch, g.shards) for g in third.manifest.generations] == [(0, 3), (2, 5), (2, 6)], "no earlier than the one before"
    assert third.first == first.digest


def test_nothing_new_is_no_generation_and_equal_pictures_are_found_across_generations(tmp_path):
    folder, work = write_dataset(tmp_path / "data", 4), tmp_path / "work"
    first = ingest(folder, work, workers=0)
    (folder / "twin.png").write_bytes((folder / "0001.png").read_bytes())
    (folder / "twin.txt").write_text("again")
    grown = ingest(folder, work, workers=0, policy=Policy(duplicates="drop"), grow_from=1)
    assert (grown.digest, grown.manifest, grown.rejected) == (first.digest, first.manifest, [("twin.png", "the same picture as 0001.png")])


def test_names_that_are_no_text_are_known_again(tmp_path):
    folder, work = write_dataset(tmp_path / "data", 2), tmp_path / "work"
    for suffix in (".png", ".txt"):
        (folder / f"0001{suffix}").rename(f'{folder}/\udcff,\n"{suffix}')
    first = ingest(folder, work, workers=0)
    assert first.manifest.total == 2
    write_dataset(folder, 3)
    assert ingest(folder, work, workers=0, grow_from=1).manifest.total == 4, "0001 and 0002 are new"


def test_a_growth_that_was_cut_off_goes_on_and_gives_what_it_would_have_given(tmp_path):
    results = {}
    for name in ("whole", "work"):
        ingest(write_dataset(tmp_path / "data", 6), tmp_path / name, workers=0, shard_samples=4)
    folder = write_dataset(tmp_path / "data", 20)
    with pytest.raises(Interrupted):
        ingest(folder, tmp_path / "work", workers=0, shard_samples=4, grow_from=1, show=cut_at(9))
    for name in ("whole", "work"):
        results[name] = ingest(folder, tmp_path / name, workers=0, shard_samples=4, grow_from=1)
    assert results["whole"] == results["work"]
    samples_of(tmp_path / "work", results["work"].manifest)


@pytest.mark.parametrize("journal", [True, False])
def test_a_growth_that_was_killed_after_it_wrote_its_manifest_is_ended_at_the_next_start(tmp_path, monkeypatch, journal):
    for name in ("whole", "work"):
        ingest(write_dataset(tmp_path / "data", 6), tmp_path / name, workers=0, shard_samples=4)
    folder, work = write_dataset(tmp_path / "data", 14), tmp_path / "work"
    whole = ingest(folder, tmp_path / "whole", workers=0, shard_samples=4, grow_from=1)

    def killed(path, data):
        if path.name == "ingest.json":
            raise Interrupted
        files.replace(path, data)

    with monkeypatch.context() as patched:
        patched.setattr("datasetserver.prepared._replace", killed)
        with pytest.raises(Interrupted):
            ingest(folder, work, workers=0, shard_samples=4, grow_from=1)
    if not journal:
        (work / "ingest.journal").unlink()
    before = {path: path.read_bytes() for path in work.iterdir() if path.is_file()}
    dry = ingest(folder, work, workers=0, shard_samples=4, dry=True, grow_from=1)
    assert ingested(work).digest == dry.digest == whole.digest
    assert {path: path.read_bytes() for path in work.iterdir() if path.is_file()} == before, "who only reads changes nothing"

    if journal:
        assert ingest(folder, work, workers=0, shard_samples=4, frozen=True) == ingested(tmp_path / "whole")
    else:  # of what the manifest was made is not known any more
        with pytest.raises(UserError, match="how to read it has changed"):
            ingest(folder, work, workers=0, shard_samples=4, frozen=True)
        assert ingest(folder, work, workers=0, shard_samples=4, frozen=True, grow_from=2).digest == whole.digest
    assert (work / "ingest.json").read_bytes() == (tmp_path / "whole" / "ingest.json").read_bytes()
    assert not (work / "ingest.journal").exists()
    write_dataset(folder, 16)
    more = ingest(folder, work, workers=0, shard_samples=4, frozen=True, grow_from=2).manifest
    assert more.total == 16 and more.shards[:4] == whole.manifest.shards
    assert [(g.from_epoch, g.shards) for g in more.generations] == [(0, 2), (1, 4), (2, 5)]


def test_a_manifest_of_another_dataset_than_the_state_names_is_not_ready(tmp_path):
    for count in (4, 5):
        ingest(write_dataset(tmp_path / f"data{count}", count), tmp_path / f"work{count}", workers=0)
    (tmp_path / "work4" / "ingest.json").write_bytes((tmp_path / "work5" / "ingest.json").read_bytes())
    assert ingested(tmp_path / "work4") is None and ingested(tmp_path / "work5")


def test_a_run_under_way_keeps_its_dataset_until_it_is_told_to_grow(tmp_path, capsys):
    host = Host(tmp_path, samples=16, shard_samples=8).start()
    before = get_run(host)
    shard_epochs = [lease(host).shard_epochs[0] for _ in range(2)]
    assert host.stop() == 0
    write_dataset(host.dataset, 24)
    code, line = complaint(capsys, *host.flags, "--port", "0")
    assert code == ExitCode.CONFIG and "--grow" in line
    assert shard_path(host.dataset.with_name("data.datasetserver"), shard_epochs[0].digest).exists()
    host.flags.append("--grow")
    host.start()
    try:
        after = get_run(host)
        assert (after.run, after.run_id) == (before.run, before.run_id) and after.manifest != before.manifest
        manifest = Manifest.model_validate_json(call(host, f"/v1/manifest/{after.manifest}")[2])
        assert [(g.from_epoch, g.shards) for g in manifest.generations] == [(0, 2), (1, 3)]
        shard_epochs += [lease(host).shard_epochs[0] for _ in range(3)]
        assert sorted((item.epoch, item.shard) for item in shard_epochs) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
        for item in shard_epochs:
            assert call(host, f"/v1/blobs/{item.digest}.tar")[0] == 200
    finally:
        host.stop()
    host.flags.remove("--grow")
    host.start()
    assert get_run(host).manifest == after.manifest, "nothing has changed since"
    assert host.stop() == 0


def test_growing_without_the_list_of_what_is_known_is_a_users_error(tmp_path):
    folder, work = write_dataset(tmp_path / "data", 4), tmp_path / "work"
    ingest(folder, work, workers=0)
    write_dataset(folder, 5)
    known = (work / "samples.csv").read_text().rstrip()
    (work / "samples.csv").write_text(known[:-64] + "no digest\n")
    with pytest.raises(UserError, match=r"samples\.csv: non-hexadecimal"):
        ingest(folder, work, workers=0, grow_from=1)
    (work / "samples.csv").unlink()
    with pytest.raises(UserError, match=r"samples\.csv"):
        ingest(folder, work, workers=0, grow_from=1)


def test_a_list_of_what_is_known_that_is_too_short_is_a_users_error_and_lines_of_no_shard_are_read_over(tmp_path):
    folder, work = write_dataset(tmp_path / "data", 4), tmp_path / "work"
    ingest(folder, work, workers=0)
    before = (work / "samples.csv").read_text()
    write_dataset(folder, 5)
    grown = ingest(folder, work, workers=0, grow_from=1)
    ahead = (work / "samples.csv").read_text()
    (work / "samples.csv").write_text(before)
    write_dataset(folder, 6)
    with pytest.raises(UserError, match="it lists 4 of 5 samples") as raised:
        ingest(folder, work, workers=0, grow_from=2)
    assert "Restore it" in raised.value.fix and ingested(work).digest == grown.digest

    ingest(write_dataset(tmp_path / "data2", 4), tmp_path / "cut", workers=0)
    (tmp_path / "cut" / "samples.csv").write_text(ahead)  # as where it was killed before it wrote the manifest of five
    assert ingest(folder, tmp_path / "cut", workers=0, grow_from=1).manifest.total == 6, "also the fifth is new"


def test_what_is_ready_is_served_without_the_pictures(tmp_path, capsys):
    host = Host(tmp_path).start()
    before = get_run(host)
    assert host.stop() == 0
    work = host.dataset.with_name("data.datasetserver")
    host.dataset.rename(tmp_path / "gone")
    host.flags = ["--work_dir", str(work), "--no_dht"]
    host.start()
    assert get_run(host).run == before.run
    assert host.stop() == 0
    (work / "ingest.json").write_text(json.dumps({}))
    code, line = complaint(capsys, *host.flags, "--port", "0")
    assert code == ExitCode.CONFIG and "No dataset is ready" in line


def test_lost_shards_of_a_run_are_made_again_or_nothing_is_replaced(tmp_path):
    folder, work = write_dataset(tmp_path / "data", 8), tmp_path / "work"
    first = ingest(folder, work, workers=0, shard_samples=4)
    shard_path(work, first.manifest.shards[1].digest).unlink()
    assert ingest(folder, work, workers=0, shard_samples=4, frozen=True).digest == first.digest
    write_dataset(folder, 12)
    grown = ingest(folder, work, workers=0, shard_samples=4, grow_from=1)
    shard_path(work, grown.manifest.shards[1].digest).unlink()
    before = (work / "manifest.json").read_bytes()
    with pytest.raises(UserError, match="missing") as error:
        ingest(folder, work, workers=0, shard_samples=4, frozen=True)
    assert error.value.code == ExitCode.DISK
    assert (work / "manifest.json").read_bytes() == before and shard_path(work, grown.manifest.shards[2].digest).exists()


def test_another_shard_size_is_named_and_the_pictures_are_not_blamed(tmp_path):
    folder, work = write_dataset(tmp_path / "data", 20), tmp_path / "work"
    ingest(folder, work, workers=0, shard_samples=8)
    with pytest.raises(UserError, match=r"shard_samples is 5, and the run .* began with 8") as raised:
        ingest(folder, work, workers=0, shard_samples=5, frozen=True)
    assert "--shard_samples 8" in raised.value.fix


def test_what_is_held_out_is_in_no_epoch_and_stays_held_out_when_the_dataset_grows(tmp_path):
    folder, work, policy = write_dataset(tmp_path / "data", 12), tmp_path / "work", Policy(held_out=0.3)
    first = ingest(folder, work, workers=0, shard_samples=4, policy=policy)
    aside = samples_of(work, Manifest.of(first.manifest.held_out))
    trained = samples_of(work, first.manifest)
    assert aside and first.manifest.total == len(trained) == 12 - len(aside)
    assert {caption for _, caption in aside + trained} == {f"picture {n}" for n in range(12)}
    assert ingested(work) == ingest(folder, work, workers=0, shard_samples=4, policy=policy, frozen=True)
    write_dataset(folder, 24)
    grown = ingest(folder, work, workers=0, shard_samples=4, policy=policy, grow_from=1)
    assert grown.manifest.held_out == first.manifest.held_out and grown.manifest.total == 24 - len(aside)
    assert {caption for _, caption in aside} & {caption for _, caption in samples_of(work, grown.manifest)} == set()
    assert digest_bytes(canonical_json(grown.manifest.first().model_dump())) == first.digest
    plain = ingest(folder, tmp_path / "plain", workers=0)
    assert "held_out" not in plain.manifest.model_dump() and plain.manifest.total == 24


def test_an_ingest_that_was_cut_off_holds_out_the_same_pictures_and_none_is_an_error(tmp_path):
    folder, policy = write_dataset(tmp_path / "data", 12), Policy(held_out=0.3)

    with pytest.raises(Interrupted):
        ingest(folder, tmp_path / "cut", workers=0, shard_samples=2, policy=policy, show=cut_at(6))
    whole = ingest(folder, tmp_path / "whole", workers=0, shard_samples=2, policy=policy)
    assert ingest(folder, tmp_path / "cut", workers=0, shard_samples=2, policy=policy).digest == whole.digest
    dry = ingest(folder, tmp_path / "dry", workers=0, shard_samples=2, policy=policy, dry=True)
    assert dry.manifest == whole.manifest and not (tmp_path / "dry").exists()
    with pytest.raises(UserError, match="holds out 0 of 12") as raised:
        ingest(folder, tmp_path / "few", workers=0, policy=Policy(held_out=0.001))
    assert "Raise --validation_split" in raised.value.fix


@pytest.mark.parametrize(("prepared", "asked"), [(0.0, 0.3), (0.3, 0.5), (0.3, 0.0)])
def test_what_was_prepared_with_another_held_out_share_is_not_served_for_a_new_run(tmp_path, capsys, prepared, asked):
    work = ["--work_dir", str(tmp_path / "work")]
    first = ingest(write_dataset(tmp_path / "data", 12), tmp_path / "work", workers=0, policy=Policy(held_out=prepared))
    flags = ["--model", str(write_model(tmp_path / "model")), "--validation_split", str(asked), "--port", "0", "--ingest_workers", "0"]
    said = f"validation_split is {asked:g}, but the dataset was prepared with {prepared:g}. Give --validation_split {prepared:g}; or add"
    code, line = complaint(capsys, *work, *flags)
    assert code == ExitCode.CONFIG and said in line
    write_dataset(tmp_path / "data", 14)
    code, line = complaint(capsys, "--dataset", str(tmp_path / "data"), *work, "--grow", *flags)
    assert code == ExitCode.CONFIG and said in line, "what grows is all trained"
    grown = ingested(tmp_path / "work")
    assert (grown.held_out, grown.first) == (prepared, first.digest) and grown.digest != first.digest


def test_the_share_that_was_prepared_is_served_without_the_pictures_also_when_the_run_has_begun(tmp_path, capsys):
    host = Host(tmp_path, "--validation_split", "0.3", samples=12).start()
    before = get_run(host)
    assert host.stop() == 0
    host.flags = ["--work_dir", str(host.dataset.with_name("data.datasetserver")), "--no_dht"]
    host.start()
    assert get_run(host).run == before.run
    assert host.stop() == 0
    code, line = complaint(capsys, *host.flags, "--validation_split", "0.5", "--port", "0")
    assert code == ExitCode.CONFIG and "has validation_split = 0.3" in line


def test_a_host_cannot_have_peers_fetch_any_number_of_held_out_pictures(tmp_path):
    whole = ingest(write_dataset(tmp_path / "data", 12), tmp_path / "work", workers=0, policy=Policy(held_out=0.3)).manifest.model_dump()
    (shard,) = whole["held_out"]
    columns = {name: values * 100 for name, values in shard.items() if isinstance(values, list) and len(values) == shard["samples"]}
    with pytest.raises(ValueError, match="more than 256 samples are held out"):
        Manifest.model_validate(whole | {"held_out": [shard | columns | {"samples": 100 * shard["samples"]}]})
