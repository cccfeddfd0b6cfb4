"""Records: what comes from the network is within bounds, or it is no record."""

import contextlib
import dataclasses

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.records import MAX_RECORD_BYTES, BadRecord, Finding, PeerRecord, RunRecord, words

RECORD = PeerRecord(
    peer_id="QmPeer", config="c" * 64, schema="s" * 64, round=3, samples=120, digest="d" * 64, parents=("e" * 64,) * 8, waiting_samples=7,
    samples_per_second=1.5, loss=0.25, maddrs=("/ip4/127.0.0.1/tcp/1/p2p/QmPeer",), time=1e9,
)  # fmt: skip
RUN = RunRecord(
    run_id="r" * 16, run={"model": "x"}, server_url="http://h", head={"digest": "d", "round": 1, "samples": 2, "peers": ["QmPeer"]}
)
FOUND = {"peer": "QmPeer", "change": 0.5, "error": 0.25, "rounds": 7, "own": None, "reported": True}

BAD = {
    "round": [-1, 2**60, 1.5, True, "3", None],
    "samples": [-1, 2**60, float("nan")],
    "waiting_samples": [-1, 2**62],
    "samples_per_second": [-1.0, float("nan"), float("inf"), 1e9, True, "fast"],
    "time": [float("nan"), -1.0, 1e15],
    "loss": [float("nan"), float("inf"), "low"],
    "digest": ["d" * 65, 5, "a\nb", None, "\u00e9" * 64],  # of the last no message could be made that asks for that state
    "phase": ["x" * 17, 1, "dancing", None, [], {}],
    "name": ["x" * 33, "a\nb", "\x1b[2J", None],
    "hardware": ["x" * 65, 5],
    "note": ["x" * 161, "a\u202eb"],
    "parents": ["text", ["x"] * 9, [5], ["x" * 65], ["\u00e9"]],
    "maddrs": [["x"] * 7, ["x" * 257], 5],
    "sent_bytes": [-1, 1.5],
    "received_bytes": [2**60],
    "transfer_seconds": [-1.0, float("inf"), 1e7],
    "share_lost": [-0.1, 1.1, float("nan"), None],
    "client_mode": [1, "yes", None],
    "findings": [[FOUND] * 5, [{**FOUND, "change": float("nan")}], [{**FOUND, "error": -1.0}], [{**FOUND, "rounds": -1}], [{**FOUND, "peer": 5}], 5],
    "peer_id": ["QmSomebodyElse", None],
}


def test_a_record_comes_back_as_it_was_and_fits():
    data = RECORD.pack()
    assert PeerRecord.unpack(data, owner="QmPeer") == RECORD and len(data) < MAX_RECORD_BYTES
    assert RunRecord.unpack(RUN.pack()) == RUN
    found = dataclasses.replace(RECORD, findings=(Finding(**FOUND),))
    assert PeerRecord.unpack(found.pack(), owner="QmPeer") == found and found.asdict()["findings"] == [FOUND]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_out_of_bounds_is_refused(name, value):
    with pytest.raises(BadRecord):
        PeerRecord.unpack(msgpack.packb({**dataclasses.asdict(RECORD), name: value}), owner="QmPeer")


def test_words_become_one_line_of_a_length():
    assert words(" a\nb\x1b[2J\u202e ", 9) == "a b [2J"
    assert words("x" * 10, 10) == "x" * 10 and words("x" * 11, 10) == "x" * 9 + "…"


def test_a_record_of_another_version_is_read_for_what_we_know_of_it():
    newer = {**dataclasses.asdict(RECORD), "mood": "fine", "more": [1, {"deep": None}]}
    assert PeerRecord.unpack(msgpack.packb(newer), owner="QmPeer") == RECORD
    run = {**dataclasses.asdict(RUN), "mood": 1, "head": {**RUN.head, "mood": 1}, "extension": None}
    assert RunRecord.unpack(msgpack.packb(run)) == RUN
    older = {
        name: value
        for name, value in dataclasses.asdict(RECORD).items()
        if name in ("peer_id", "config", "schema", "round", "samples", "digest")
    }
    assert PeerRecord.unpack(msgpack.packb(older), owner="QmPeer") == PeerRecord(**older)
    assert RunRecord.unpack(msgpack.packb({"run_id": "r", "run": {}})) == RunRecord(run_id="r", run={})


@pytest.mark.parametrize("name", ["peer_id", "config", "schema", "round", "samples", "digest"])
def test_a_record_without_what_every_version_has_is_refused(name):
    values = dataclasses.asdict(RECORD)
    del values[name]
    with pytest.raises(BadRecord, match=f"without {name}"):
        PeerRecord.unpack(msgpack.packb(values), owner="QmPeer")


def test_what_is_wrong_is_said_in_one_short_line_however_long_the_value():
    with pytest.raises(BadRecord) as refusal:
        PeerRecord.unpack(msgpack.packb({**dataclasses.asdict(RECORD), "note": "\n\u202e" * 700}), owner="QmPeer")
    assert str(refusal.value).startswith("note: ") and str(refusal.value).isprintable() and len(str(refusal.value)) < 200


@pytest.mark.parametrize("extension", [5, {}, {"total_samples": 5}, {"total_samples": -1, "host_key": "a", "signature": "b", "more": 1}])
def test_a_run_with_a_bad_extension_is_refused(extension):
    with pytest.raises(BadRecord):
        RunRecord.unpack(msgpack.packb({**dataclasses.asdict(RUN), "extension": extension}))


@pytest.mark.parametrize("head", [5, {}, {"digest": "d"}, {"digest": "d", "round": -1, "samples": 2, "peers": []}])
def test_a_run_with_a_bad_head_is_refused(head):
    with pytest.raises(BadRecord):
        RunRecord.unpack(msgpack.packb({**dataclasses.asdict(RUN), "head": head}))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91" * 3000, msgpack.packb([1]), msgpack.packb({1: 2}), b"x" * (MAX_RECORD_BYTES + 1), None]
)
def test_garbage_is_refused(data):
    for unpack in (RunRecord.unpack, lambda data: PeerRecord.unpack(data, owner="QmPeer")):
        with pytest.raises(BadRecord):
            unpack(data)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_no_bytes_cause_another_error(data):
    for unpack in (RunRecord.unpack, lambda data: PeerRecord.unpack(data, owner="QmPeer")):
        with contextlib.suppress(BadRecord):
            unpack(data)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(PeerRecord)]), JUNK))
def test_no_values_cause_another_error(changes):
    with contextlib.suppress(BadRecord):
        PeerRecord.unpack(msgpack.packb({**dataclasses.asdict(RECORD), **changes}), owner="QmPeer")
