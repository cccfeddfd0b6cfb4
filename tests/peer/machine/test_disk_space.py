import logging
import shutil
from types import SimpleNamespace

import pytest
import torch

from peer.config import PeerConfig
from peer.machine.disk_space import SPARE_BYTES, check_disk, check_space, needed_bytes
from peer.results.checkpoint import Checkpoints
from swarm.errors import ExitCode, UserError

GB = 10**9
NEEDED = needed_bytes(4 * GB, checkpoints=2, there=1, average=False, swarming=True)


@pytest.fixture
def free(monkeypatch):
    """`free(gigabytes)`: what the disk has from now on."""
    return lambda count: monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(count * GB)))


def test_what_a_run_writes_is_counted_by_what_it_is_for():
    assert {name: count / GB for name, count in NEEDED.items()} == {
        "a checkpoint beside the last one": 12, "further checkpoints": 12, "the swarm's states": 32, "the result": 4,
    }  # fmt: skip
    alone = needed_bytes(4 * GB, checkpoints=2, there=5, average=True, swarming=False)
    assert list(alone.values()) == [16 * GB, 0, 0, 4 * GB]
    sizes = [next(iter(needed_bytes(4 * GB, checkpoints=1, there=0, average=False, swarming=False, optimizer=name).values())) / GB for name in ("lion8bit", "prodigy")]
    assert sizes == [5, 20]


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_training(tmp_path, free):
    free(15)
    with pytest.raises(UserError, match=r"15 GB free.*checkpoint beside the last one 12 GB.*left for other programs 67\.1 MB\), 16\.1 GB at least\. ") as refused:
        check_space(tmp_path, NEEDED)
    assert refused.value.code == ExitCode.DISK
    free(40)
    fits, told = check_space(tmp_path, NEEDED)
    assert not fits and "40 GB free, and this run needs up to 60." in told
    free(60 + SPARE_BYTES / GB)
    assert check_space(tmp_path, NEEDED)[0]


def test_a_trainer_whose_disk_will_be_full_before_the_end_says_so_and_trains(tmp_path, free, caplog):
    free(20)
    check_disk(tmp_path, PeerConfig(), GB)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "20 GB free, and this run needs up to 40." in caplog.text
    caplog.clear()
    free(41)
    check_disk(tmp_path, PeerConfig(), GB)
    assert not caplog.records


def test_a_checkpoint_that_cannot_fit_is_not_begun_and_the_last_one_stays(tmp_path, free):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save({"w": torch.zeros(1000)}, {"round": 1})
    free(0.01)
    with pytest.raises(UserError, match="No space left on device") as refused:
        checkpoints.save({"w": torch.ones(1000)}, {"round": 2})
    assert refused.value.code == ExitCode.DISK
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert checkpoints.load("latest")[1]["w"].sum() == 0
