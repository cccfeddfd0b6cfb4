"""Which options a peer takes by itself when memory runs out."""

import pytest
import torch

from peer.config import PeerConfig
from peer.machine.making_room import useless, ways_left
from swarm.run_config import RunConfig


@pytest.mark.parametrize(
    ("options", "device", "ways"),
    [
        ({}, "cuda", ["offload", "gradient_checkpointing"]),
        ({"gradient_checkpointing": True}, "cuda", ["offload"]),
        ({"cache_latents": True}, "cuda", ["offload", "gradient_checkpointing"]),
        ({"cache_latents": True, "cache_text": True}, "cuda", ["gradient_checkpointing"]),  # parts take turns already
        ({"compile": True}, "cuda", ["gradient_checkpointing"]),  # with which --offload was not tried
        ({}, "cpu", ["gradient_checkpointing"]),
        ({"gradient_checkpointing": True, "offload": True}, "cuda", []),
    ],
)
def test_ways_that_keep_what_is_trained_the_cheapest_first(options, device, ways):
    left = ways_left(RunConfig(method="lora"), PeerConfig(**options), torch.device(device))
    assert left == [{way: True} for way in ways]


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_that_emulates_bf16_is_not_put_onto_it(monkeypatch, has_bf16):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or has_bf16)
    run, peer = RunConfig(method="lora"), PeerConfig(fit="auto")
    assert ("weights" not in useless(run, peer, torch.device("cuda"))) == has_bf16
    assert ({"weights": "bf16"} in ways_left(run, peer, torch.device("cuda"))) == has_bf16
    assert "weights" not in useless(run, peer, torch.device("cpu"))
