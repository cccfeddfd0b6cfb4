"""A run's end: put off by its host alone, and never brought forward."""

import dataclasses

import pytest

from swarm.end import End, refuse_extension, sign_extension
from swarm.errors import UserError
from swarm.records import BadRecord, RunRecord
from swarm.run_config import RunConfig
from swarm.signing import MOST_SIGNATURE, HostKey

RUN = RunConfig(model="x", total_samples=1000)


def test_an_extension_of_the_host_puts_the_end_off_and_is_handed_on(key):
    end = End(RUN, key.public)
    assert end.total == 1000 and end.extension is None and end.may_be_extended
    assert end.extend(sign_extension(key, RUN, 3000)) and end.total == 3000
    assert End(RUN, key.public, end.extension).total == 3000


def test_an_extension_is_kept_for_a_start_when_nobody_tells_it_and_only_for_its_run(key, tmp_path):
    path = tmp_path / "a new folder" / "extension.json"
    End(RUN, key.public, path=path).extend(sign_extension(key, RUN, 3000))
    assert End(RUN, key.public, path=path).total == 3000
    assert End(RunConfig(model="x", seed=7, total_samples=1000), key.public, path=path).total == 1000
    for damaged in ("{", "[]", "{}"):
        path.write_text(damaged)
        assert End(RUN, key.public, path=path).total == 1000
    (tmp_path / "file").write_text("")
    assert End(RUN, key.public, path=tmp_path / "file" / "x").extend(sign_extension(key, RUN, 3000)), "a disk that refuses ends nothing"


def test_the_largest_counts_in_whatever_order_they_come(key):
    end = End(RUN, key.public)
    for total in (2000, 5000, 3000, 5000, 500):
        end.extend(sign_extension(key, RUN, total))
    assert end.total == 5000 == end.extension["total_samples"]


def test_nobody_elses_word_counts(key, tmp_path):
    stranger, good = HostKey(tmp_path / "other.key"), sign_extension(key, RUN, 3000)
    end = End(RUN, key.public)
    for wrong in (
        None,
        {},
        sign_extension(stranger, RUN, 3000),
        {**good, "total_samples": 4000},
        {**good, "total_samples": True},
        {**good, "total_samples": "3000"},
        {**good, "signature": ""},
        {**good, "signature": None},
        sign_extension(key, RunConfig(model="x", total_samples=1000, seed=7), 3000),
        {**good, "signature": key.sign("run", "0" * 64)},
    ):
        assert not end.extend(wrong) and end.total == 1000, wrong
    assert not End(RUN).extend(good), "who knows no host takes no host's word"


def test_a_run_without_an_end_or_with_a_rate_that_ends_is_not_extended(key):
    for run, why in [
        (RunConfig(model="x"), "has no end"),
        (RunConfig(model="x", total_samples=1000, lr_scheduler="cosine"), r"learning rate \(cosine\) ends with it"),
    ]:
        with pytest.raises(UserError, match=why):
            refuse_extension(run, 5000, run.total_samples)
        assert not End(run, key.public).extend(sign_extension(key, run, 5000))
    with pytest.raises(UserError, match="not later"):
        refuse_extension(RUN, 1000, 1000)
    refuse_extension(RunConfig(model="x", total_samples=10, lr_scheduler="constant_with_warmup"), 11, 10)


def test_a_runs_record_carries_it_within_bounds(key):
    record = RunRecord(run_id=RUN.run_id, run={"model": "x"}, extension=sign_extension(key, RUN, 3000))
    assert RunRecord.unpack(record.pack()) == record
    newer = dataclasses.replace(record, extension={**record.extension, "more": 1})
    assert RunRecord.unpack(newer.pack()) == record, "what a newer version says beyond that is ignored"
    for wrong in (
        {},
        [],
        {**record.extension, "signature": "x" * (MOST_SIGNATURE + 1)},
        {**record.extension, "total_samples": -1},
    ):
        with pytest.raises(BadRecord):
            RunRecord.unpack(RunRecord(run_id="a", run={}, extension=wrong).pack())
