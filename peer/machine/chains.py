"""A denoiser is mostly chains of like blocks: what a step takes is counted for two and for three of a kind, and follows for all of them.

This holds where little is trained beside the frozen blocks, as adapters are. Where a whole denoiser is trained, its gradients grow while what flows
through the layers shrinks, and a count of all blocks is the only one that is right.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

_FEW = 3
"""A chain that is no longer gains nothing."""


@dataclass(frozen=True)
class Chain:
    """Blocks `begin` to `begin + length` of a part's list, each of them called after the one before it."""

    holder: nn.Module
    name: str
    begin: int
    length: int


def chains(part: nn.Module) -> dict[Hashable, list[Chain]]:
    """The chains in a part that are longer than three, by what their blocks are: their class, and the shapes of their weights."""
    found: dict[Hashable, list[Chain]] = {}
    for module in part.modules():
        for name, blocks in module.named_children():
            if isinstance(blocks, nn.ModuleList):
                for kind, chain in _runs(module, name, blocks):
                    found.setdefault(kind, []).append(chain)
    return found


def scaled(part: nn.Module, step: Callable[[], int]) -> int:
    """What `step` counts, in bytes, of `part` as it is; counted on shortened chains where it has any.

    Within 0.3 % of the whole count for LoRAs of SDXL, FLUX.1, Chroma and Z-Image at full size; FLUX.1's took 12 s of a CPU in place of 40.
    """
    kinds = chains(part)
    if not kinds:
        return step()
    with shortened(kinds, {}):
        least = step()
    each = 0.0
    for kind, its in kinds.items():
        with shortened(kinds, {kind: 3}):
            more = step() - least
        each += more / len(its) * sum(chain.length - 2 for chain in its)
    return least + round(each)


@contextmanager
def shortened(kinds: Mapping[Hashable, Sequence[Chain]], lengths: Mapping[Hashable, int]) -> Iterator[None]:
    """Within the block the chains of each kind have as many blocks as `lengths` says, or two."""
    whole = [(chain.holder, chain.name, getattr(chain.holder, chain.name)) for its in kinds.values() for chain in its]
    out: dict[tuple[nn.Module, str], set[int]] = {}
    for kind, its in kinds.items():
        for chain in its:
            out.setdefault((chain.holder, chain.name), set()).update(range(chain.begin + lengths.get(kind, 2), chain.begin + chain.length))
    try:
        for (holder, name), numbers in out.items():
            blocks = [block for number, block in enumerate(getattr(holder, name)) if number not in numbers]
            setattr(holder, name, nn.ModuleList(blocks))
        yield
    finally:
        for holder, name, blocks in whole:
            setattr(holder, name, blocks)


def _runs(holder: nn.Module, name: str, blocks: nn.ModuleList) -> Iterator[tuple[Hashable, Chain]]:
    begin = 0
    for kind, alike in groupby(blocks, _kind):
        length = len([*alike])
        if length > _FEW:
            yield kind, Chain(holder, name, begin, length)
        begin += length


def _kind(block: nn.Module) -> Any:
    return type(block), tuple((name, tensor.shape, tensor.requires_grad) for name, tensor in block.named_parameters())
