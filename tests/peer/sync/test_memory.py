"""What averaging takes of the host's memory, and that nobody begins what cannot end well."""

import pytest
import torch
from torch import nn

from peer.config import PeerConfig
from peer.contracts import SyncContext
from peer.rooms import load_part
from peer.sync.engine.codec import PART_ELEMENTS, WIRES, Wire
from peer.sync.engine.memory import COUNTED_SENDERS, SIDECAR_BYTES, available_bytes, check_memory, host_bytes
from peer.sync.engine.round.averaging import PARTS_OF_A_SENDER
from peer.sync.engine.trainer import swarm_sync
from swarm.cgroups import MemoryGroups
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig

SD15_WITH_TEXT_ENCODER = 982_581_252


def total(sync: str, wire: str, size: int, **options) -> float:
    return sum(host_bytes(load_part("sync", sync).strategy(RunConfig(model="", sync=sync)), Wire(wire, size), **options).values())


def test_sd_15_full_fits_with_the_defaults_into_what_the_original_took():
    run = RunConfig(model="x")
    assert total(run.sync, run.wire, SD15_WITH_TEXT_ENCODER) + SIDECAR_BYTES <= 12.5e9


def test_accumulated_gradients_count_where_they_are():
    on_host, on_gpu = (total("gradients", "fp32", 1000, params_on_host=host) for host in (True, False))
    assert on_host - on_gpu == 4000


def test_who_only_assists_needs_two_states_a_mean_and_the_others_parts():
    parts = COUNTED_SENDERS * 4000
    assert total("diloco", "fp32", 1000, trains=False) == 2 * 8000 + 4000 + parts
    assert total("gradients", "fp32", 1000, trains=False) == 2 * 12000 + 4000 + parts


@pytest.mark.parametrize("wire", WIRES)
def test_what_a_reducer_holds_of_the_others_does_not_grow_with_the_model(wire):
    """Nine parts of each, as `Averager` makes room for."""
    strategy = load_part("sync", "parameters").strategy(RunConfig(model=""))
    few, many = (host_bytes(strategy, Wire(wire, parts * PART_ELEMENTS))["parts of the others"] for parts in (32, 3000))
    assert few == many == COUNTED_SENDERS * Wire(wire, PARTS_OF_A_SENDER * PART_ELEMENTS).num_bytes


def test_too_little_memory_is_said_before_any_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(swarm_sync, "available_bytes", lambda: 300e6)
    context = SyncContext(
        run=RunConfig(model="x"), peer=PeerConfig(output_dir=str(tmp_path)), params={"w": nn.Parameter(torch.zeros(9))}, output_dir=tmp_path
    )
    with pytest.raises(UserError, match=r"Averaging needs 400 MB .* 300 MB are free \(.*the next state 36 bytes") as error:
        load_part("sync", "parameters").build(context)
    assert error.value.code == ExitCode.MEMORY
    assert not any(tmp_path.iterdir()), "no process and no file was begun"


def test_enough_memory_is_enough():
    check_memory({"a state": 100.0}, 100.0 + SIDECAR_BYTES)


def test_a_limit_of_this_processs_group_counts(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert available_bytes(MemoryGroups(tmp_path, tmp_path / "own")) == 300
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(MemoryGroups(tmp_path, tmp_path / "own")) > 1e6
