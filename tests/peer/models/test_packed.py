"""Packing a model layer by layer: what it leaves of the process's own memory."""

import re
from pathlib import Path

import torch
from torch import nn

from peer.models.diffusion import packed

LAYERS, WIDTH = 48, 1024


def own_bytes():
    """What this process holds that is in no file, freed or not."""
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


def test_the_holes_that_layers_leave_are_given_back(tmp_path, monkeypatch):
    """As of a folder in bf16, whose pages are the file's: each layer is in float32 for a moment, and 8 bits of each weight stay."""
    monkeypatch.setattr(packed, "_GIVE_BACK", WIDTH * WIDTH)
    with torch.device("meta"):
        part = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    filed = torch.from_file(str(tmp_path / "weights"), shared=True, size=WIDTH * WIDTH, dtype=torch.bfloat16).normal_().view(WIDTH, WIDTH)
    for layer in part:
        layer.weight = nn.Parameter(filed, requires_grad=False)
    packed.give_back()
    before = own_bytes()
    layers, _ = packed.pack(nn.ModuleDict({"blocks": part}), [str(number) for number in range(LAYERS)], "int8", torch.device("cpu"), torch.Tensor.clone)
    made = sum(layer.bits.nbytes for layer in layers.values())
    assert len(layers) == LAYERS and made == LAYERS * WIDTH * WIDTH
    assert made * 0.9 < own_bytes() - before < 1.5 * made
