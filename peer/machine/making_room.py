"""Which of this machine's options make room on its device for this run, the cheapest first. Whether it is enough is not known here."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from peer.config import PeerConfig
from peer.loop.fused import check_fused
from peer.loop.optim import kind_of
from peer.machine.device import emulates_bf16
from peer.machine.turns import in_turns
from swarm.errors import UserError
from swarm.memory_advice import WAYS
from swarm.run.family import family_named
from swarm.run.method import method_named
from swarm.run.optimizer import OPTIMIZERS
from swarm.run_config import RunConfig


def useless(run: RunConfig, peer: PeerConfig, device: torch.device) -> set[str]:
    """Options of swarm/memory_advice.py that are taken already, or make no room for this run on `device`."""
    whole, family = method_named(run.method).whole, family_named(run.family)
    here = {
        "fused_step": peer.fused_step or not whole or not _can_step_fused(run, peer, device),
        "train_batch_size": peer.train_batch_size == 1,
        "gradient_accumulation_steps": peer.train_batch_size == 1 or peer.fused_step,
        "gradient_checkpointing": peer.gradient_checkpointing,
        "offload": in_turns(peer, device) or device.type != "cuda",
        "blocks_to_swap": peer.blocks_to_swap or device.type != "cuda" or whole or not (family and family.blocks),
        "base_precision": peer.base_precision != "auto" or whole,
        "weights": peer.weights == "bf16" or not OPTIMIZERS[kind_of(run, device)].by_tensor or emulates_bf16(device),
    }
    return {name for name, useless in here.items() if useless}


def by_itself(changes: Mapping[str, Any], peer: PeerConfig) -> bool:
    """Whether the peer may change these of its own options without being asked: what is trained stays the same, or `--fit auto` asks for it."""
    return peer.fit == "auto" or not any(way.rounds and way.option in changes for way in WAYS)


def ways_left(run: RunConfig, peer: PeerConfig, device: torch.device) -> list[dict[str, Any]]:
    """What the peer may still change of its own options after it ran out of memory, one after the other."""
    no_use = useless(run, peer, device)
    ways = [{way.option: way.value} for way in WAYS if way.value is not None and way.option not in no_use]
    return [way for way in ways if by_itself(way, peer) and changed(peer, way)]


def _can_step_fused(run: RunConfig, peer: PeerConfig, device: torch.device) -> bool:
    try:
        check_fused(dataclasses.replace(peer, fused_step=True), run, device, peer.nproc_per_node)
    except UserError:
        return False
    return True


def changed(peer: PeerConfig, changes: Mapping[str, Any]) -> PeerConfig | None:
    """None where the peer's other options do not go with the changes."""
    try:
        return dataclasses.replace(peer, **changes)
    except UserError:
        return None
