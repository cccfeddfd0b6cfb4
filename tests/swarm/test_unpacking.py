"""Msgpack that strangers sent."""

import msgpack
import pytest

from swarm.records import BadRecord, PeerRecord, RunRecord
from swarm.unpacking import DEEPEST, unpack


def nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\x01"


def test_what_we_say_is_unpacked_as_it_was():
    value = {"header": {"ancestors": [{"members": [{"peer": "a", "number": 1, "samples": 2}]}], "mean": ""}, "x": [b"1", 2.5, None]}
    assert unpack(msgpack.packb(value)) == value
    assert str(unpack(nested(DEEPEST)))


@pytest.mark.parametrize("levels", [DEEPEST + 1, 1000, 1023, 1024, 100_000])
@pytest.mark.parametrize("before", [b"", b"\x81\xa1a", b"\x92\x01"])
def test_what_is_nested_deeper_is_refused(levels, before):
    with pytest.raises(ValueError):
        unpack(before + nested(levels))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\x01\x01", b"\x81\x90\x01", b"\x80\x80", b"\xdd\xff\xff\xff\xff", b"\xa4\xff\xff\xff\xff"])
def test_what_is_no_msgpack_of_ours_is_refused(data):
    with pytest.raises(ValueError):
        unpack(data)


@pytest.mark.parametrize("field", ["config", "phase", "note", "round", "peer_id", "maddrs"])
def test_a_record_with_a_deeply_nested_value_is_a_bad_one_and_hides_no_other(field):
    """`str` of it was a RecursionError, which ended the look at all records: one stranger's made everybody invisible."""
    record = PeerRecord(peer_id="a", config="c", schema="s", round=0, samples=0, digest="d")
    whole = record.asdict()
    packed = b"".join(msgpack.packb(name) + (nested(1000) if name == field else msgpack.packb(value)) for name, value in whole.items())
    with pytest.raises(BadRecord):
        PeerRecord.unpack(b"\xde" + len(whole).to_bytes(2, "big") + packed, owner="a")
    with pytest.raises(BadRecord):
        RunRecord.unpack(b"\xde" + len(whole).to_bytes(2, "big") + packed)
