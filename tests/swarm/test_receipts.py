"""The host's receipts for contributions: what each is worth, and to whom."""

import dataclasses

import pytest

from swarm.receipts import Receipts, sign_receipt
from swarm.run_config import RunConfig
from swarm.signing import HostKey

MINE = "QmAlice", 4, 512


@pytest.fixture
def run(key) -> RunConfig:
    return RunConfig(run_name="one", members_of=key.public)


def test_a_receipt_holds_for_its_peer_number_and_samples_and_for_nothing_else(key, run):
    receipts, receipt = Receipts.of(run), sign_receipt(key, run, *MINE)
    assert receipts.hold(*MINE, receipt)
    for other in (("QmBob", 4, 512), ("QmAlice", 5, 512), ("QmAlice", 4, 513), ("QmAlice", 4, 511)):
        assert not receipts.hold(*other, receipt), other


def test_a_receipt_of_another_run_another_host_or_another_signature_of_the_host_is_none(key, run, tmp_path):
    stranger, receipts = HostKey(tmp_path / "other.key"), Receipts.of(run)
    another = dataclasses.replace(run, run_name="another")
    false = [sign_receipt(key, another, *MINE), sign_receipt(stranger, run, *MINE), key.sign("member", "0" * 64), "0" * 128, "no hex", ""]
    assert not any(receipts.hold(*MINE, receipt) for receipt in false)


def test_a_successor_of_a_lost_key_gives_receipts_in_its_place(key, run, tmp_path):
    key.write_successor(tmp_path / "spare.key")
    assert Receipts.of(run).hold(*MINE, sign_receipt(HostKey(tmp_path / "spare.key"), run, *MINE))


def test_a_run_that_is_not_for_members_believes_no_receipt(key):
    run = RunConfig(run_name="one")
    assert not Receipts.of(run).hold(*MINE, sign_receipt(key, run, *MINE))
