"""Where a peer's state lies, and that a disk which is full, absent or in memory is said in one line."""

import errno
import logging
import os
import resource
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from peer.config import PeerConfig
from peer.contracts import Member, SyncContext
from peer.rooms import load_part
from peer.sync.engine import buffers
from peer.sync.engine.buffers import IN_MEMORY, OnDisk, buffers_on
from peer.sync.engine.codec import Wire
from peer.sync.engine.round.averaging import Mean
from peer.sync.engine.round.rounds import OuterStep
from peer.sync.engine.state import CHUNK_BYTES, hash_chunks
from peer.sync.engine.vectors import Reused
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from tests.peer.sync.replicas import Peer, check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import state_of, until

SIZE = 3 * CHUNK_BYTES // 8 + 5  # a state of two vectors has four chunks, and the second one has a part of both


def test_a_round_on_disk_gives_the_digest_that_it_gives_in_memory(tmp_path):
    wire, strategy = Wire("fp16", SIZE), load_part("sync", "diloco").strategy(RunConfig(model="x", sync="diloco"))
    base = state_of(torch.linspace(-1, 1, SIZE), slots=strategy.slots)
    encoded, states = wire.encode(torch.linspace(1, 3, SIZE)), []
    for kind in (IN_MEMORY, OnDisk(tmp_path)):
        mean = Reused(wire.num_bytes, kind.private).take().copy_(encoded)
        states.append(OuterStep(strategy, wire, kind)(base, Mean(mean, wire.square_norm(mean)), [Member("a", 1, 8)]))
    assert states[0].digest == states[1].digest != base.digest
    hashes = tuple(hash_chunks(states[0].buffer.bytes()))
    assert len(hashes) == 4 and [state.chunk_hashes for state in states] == [hashes, hashes]


@pytest.mark.parametrize("refused", [None, errno.EOPNOTSUPP])
def test_a_file_of_the_state_has_all_its_blocks_and_no_name(tmp_path, monkeypatch, refused):
    """refused: by a file system that knows no allocation, which gets its zeros written."""
    if refused:
        monkeypatch.setattr(os, "posix_fallocate", lambda *of: (_ for _ in ()).throw(OSError(refused, os.strerror(refused))))
    buffer = OnDisk(tmp_path).shared((5 << 20) // 2)
    assert os.fstat(buffer.fd).st_blocks * 512 >= buffer.num_bytes == (5 << 20) // 2
    assert not buffer.bytes().any() and not os.get_inheritable(buffer.fd)
    assert list(tmp_path.iterdir()) == [], "what has no name, a killed process leaves to nobody"


def test_a_disk_that_is_full_when_a_file_is_made_is_said_in_one_line(tmp_path, monkeypatch):
    on_disk, limits = OnDisk(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"state in .*: File too large, with 2.1 MB to be added.") as refused:
            on_disk.shared(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.code == ExitCode.DISK
    monkeypatch.setattr(os, "posix_fallocate", lambda *of: pytest.fail("it takes the whole disk for a moment"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(2 << 20) - 1))
    with pytest.raises(UserError, match="No space left on device"):
        on_disk.private(2 << 20)


def test_a_peer_whose_disk_cannot_hold_the_state_begins_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    peer = PeerConfig(output_dir=str(tmp_path), state_on="disk")
    context = SyncContext(run=RunConfig(model="x"), peer=peer, params={"w": nn.Parameter(torch.zeros(9))}, output_dir=tmp_path)
    with pytest.raises(UserError, match=r"Cannot keep the swarm's state in .*: 108 bytes are needed, and 100 bytes are free") as refused:
        load_part("sync", "parameters").build(context)
    assert refused.value.code == ExitCode.DISK and "--state_on disk" in refused.value.fix


def test_a_folder_that_lies_in_memory_itself_is_refused_and_one_on_a_network_disk_is_told_of(tmp_path, monkeypatch, caplog):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, pytest.raises(UserError, match=r"it lies in memory \(tmpfs\)"):
        buffers_on("disk", Path(name) / "state")
    with pytest.raises(UserError, match="Not a directory"):
        (tmp_path / "file").touch()
        OnDisk(tmp_path / "file" / "state")
    assert not caplog.records and buffers_on("memory", tmp_path / "file" / "state") is IN_MEMORY
    monkeypatch.setattr(buffers, "file_system", lambda folder: "nfs4")
    OnDisk(tmp_path, 1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "network disk (nfs4)" in caplog.text


class Full(OnDisk):
    """Once `full`, takes nothing more."""

    full = False

    def shared(self, num_bytes):
        if self.full:
            raise self._error(os.strerror(errno.ENOSPC))
        return super().shared(num_bytes)


def test_a_disk_that_fills_later_ends_its_peer_with_the_reason_and_stops_nobody_else(virtual, tmp_path):
    async def scenario(nodes):
        run, on_disk = make_run(), Full(tmp_path)
        (one,) = await peers(nodes, 1, run)
        other = await Peer(nodes, await nodes.node(), run, buffers=on_disk).start(nodes)
        await until(lambda: min(one.head.header.round, other.head.header.round) >= 2)
        check_invariants(one, other)
        on_disk.full = True
        await until(lambda: other.failures)
        assert isinstance(other.failures[0], UserError) and other.failures[0].code == ExitCode.DISK
        at = one.head.header.round
        await other.stop()
        await until(lambda: one.head.header.round > at)

    virtual(scenario)
