"""Which of this machine's options make room on its device for this run, the cheapest first. Whether it is enough is not known here."""

import dataclasses
from typing import Any

import torch

from peer.config import PeerConfig
from peer.loop.optim import kind_of
from swarm.errors import UserError
from swarm.run.family import family_named
from swarm.run.method import method_named
from swarm.run.optimizer import OPTIMIZERS
from swarm.run_config import RunConfig

_BY_ITSELF = ({"gradient_checkpointing": True}, {"offload": True})
"""What a peer may take without being asked: what is trained stays the same, and takes longer."""


def useless(run: RunConfig, peer: PeerConfig, device: torch.device) -> set[str]:
    """Options of swarm/memory_advice.py that are taken already, or make no room for this run on `device`."""
    whole, family = method_named(run.method).whole, family_named(run.family)
    here = {
        "train_batch_size": peer.train_batch_size == 1,
        "gradient_accumulation_steps": peer.train_batch_size == 1 or peer.fused_step,
        "gradient_checkpointing": peer.gradient_checkpointing,
        "offload": peer.offload or device.type != "cuda",
        "blocks_to_swap": peer.blocks_to_swap or device.type != "cuda" or whole or not (family and family.blocks),
        "base_precision": peer.base_precision != "auto" or whole,
        "weights": peer.weights == "bf16" or not OPTIMIZERS[kind_of(run, device)].by_tensor,
    }
    return {name for name, useless in here.items() if useless}


def ways_left(run: RunConfig, peer: PeerConfig, device: torch.device) -> list[dict[str, Any]]:
    """What the peer may still change of its own options after it ran out of memory, one after the other."""
    no_use = useless(run, peer, device)
    return [way for way in _BY_ITSELF if not way.keys() & no_use and _allowed(peer, way)]


def _allowed(peer: PeerConfig, way: dict[str, Any]) -> bool:
    """Whether the peer's other options go with it."""
    try:
        dataclasses.replace(peer, **way)
    except UserError:
        return False
    return True
