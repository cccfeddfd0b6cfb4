"""A step that is counted on shortened chains takes what a count of all blocks says."""

import pytest
import torch
from torch import nn

from benchmarks.device_memory import batch_of, prepared
from peer.machine.chains import chains, scaled
from peer.machine.counting import count_step
from tests import tiny

META = torch.device("meta")


@pytest.mark.parametrize(
    ("checkpointing", "double", "single", "lengths"), [(False, 4, 5, [4, 5, 5, 9]), (True, 1, 5, [3, 4, 6])], ids=["", "checkpointing"]
)
def test_a_loras_step_on_shortened_chains_is_that_of_all_blocks_which_are_all_there_afterwards(checkpointing, double, single, lengths):
    """Of chains of two kinds, and of one kind beside a block that is in none."""
    small = tiny.build("flux").transformer
    with META:
        denoiser = type(small).from_config({**small.config, "num_layers": double, "num_single_layers": single})
    model, _ = prepared("flux", "lora", META, torch.bfloat16, denoiser=denoiser)
    if not checkpointing:
        denoiser.disable_gradient_checkpointing()
    batch = batch_of((4, 8, 8), {"states": (32, 16), "pooled": (16,)}, 2, META)
    blocks, counts = [*model.blocks()], []

    def step():
        counts.append(len(model.blocks()))
        return count_step(model, batch, dtype=torch.bfloat16)

    assert scaled(denoiser, step) == pytest.approx(step(), rel=0.01)
    assert counts == lengths and [*model.blocks()] == blocks


def test_a_chain_ends_where_another_kind_of_block_comes_and_short_ones_are_counted_as_they_are():
    part = nn.Module()
    part.blocks = nn.ModuleList([*(nn.Linear(2, 2) for _ in range(4)), nn.Linear(2, 3)])
    part.few = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    ((found,),) = chains(part).values()
    assert (found.name, found.begin, found.length) == ("blocks", 0, 4)
    lengths = []
    assert scaled(part, lambda: lengths.append(len(part.blocks)) or 10 * len(part.blocks)) == 50 and lengths == [3, 4]
    del part.blocks
    assert scaled(part, lambda: 7) == 7
