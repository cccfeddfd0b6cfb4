"""The cheapest of this machine's options with which a run fits on its device, found by counting: `--fit auto`, `--blocks_to_swap auto`, and advice.

Only what each machine may choose for itself is changed, and only where it was left at its default: what the peers average stays the same.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peer.config import PeerConfig
from peer.machine.making_room import changed, useless
from peer.machine.needs import Needs
from peer.machine.swap import LEAST
from peer.watchdog.policy import smaller
from peer.watchdog.room import as_flags
from swarm.errors import ExitCode, UserError
from swarm.memory_advice import WAYS
from swarm.run_config import RunConfig

NAMES = tuple(dict.fromkeys(way.option for way in WAYS))
"""Of what a `Fit` changes."""
STEP = ("train_batch_size", "gradient_accumulation_steps")
"""Of these the two together make a step, and are changed together."""
ALL = tuple(name for name in NAMES if name != STEP[1])
"""Ways that can be taken."""
_TIMES: Mapping[str, Mapping[Any, float]] = {
    name: {way.value: way.times for way in WAYS if way.option == name} for name in NAMES
}
"""How many times as long a step takes, by option and value."""
_HALVED, _SWAPPED = _TIMES["train_batch_size"][None], _TIMES["blocks_to_swap"][None]
"""A micro-batch of half the size, its gradients accumulated; blocks that travel, and in addition their share of all blocks."""
_CARDS = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180)
"""GB of the GPUs that people have."""
_NOT_OURS = 1e9
"""Bytes of a card for CUDA's context and the desktop."""


@dataclass(frozen=True)
class Fit:
    """changes: of PeerConfig, the cheapest that fit, or those that take the least. need, before: bytes with and without them; there: that are free."""

    changes: Mapping[str, Any]
    need: float
    before: float
    there: float

    @property
    def fits(self) -> bool:
        return self.need <= self.there

    @property
    def flags(self) -> str:
        return " ".join(as_flags(self.changes))

    def __str__(self) -> str:
        """'9.2 of 11.4 GB are needed with --offload, 14.0 without it'."""
        if not self.changes:
            return f"{_gb(self.need)} of {_gb(self.there)} GB are needed"
        return f"{_gb(self.need)} of {_gb(self.there)} GB are needed with {self.flags}, {_gb(self.before)} without"

    def check(self) -> None:
        """Raises UserError where nothing fits, with the smallest card that this run fits on."""
        if self.fits:
            return
        least = f"needs {_gb(self.need)} GB" + (f" with {self.flags}" if self.changes else "")
        card = next((size for size in _CARDS if size * 1e9 - _NOT_OURS >= self.need), None)
        where = f"Use a GPU of {card} GB or more" if card else "No single GPU has that much memory"
        raise UserError(
            f"This run {least}, counted, and {_gb(self.there)} GB are free here: no options of this machine make it fit.",
            fix=f"{where}; or end other programs, or found a run with a smaller --resolution, model or --method lora.",
            code=ExitCode.MEMORY,
        )

    def advice(self) -> str:
        """What to do about it, one sentence."""
        if not self.changes:
            return f"Counted, it fits: {self}. End other programs that use this memory."
        return f"Add {self.flags}: counted, {_gb(self.need)} GB are then needed of {_gb(self.there)}, and {_gb(self.before)} as it is."


def fit(run: RunConfig, peer: PeerConfig, device: torch.device, needs: Needs, there: float, ways: Collection[str] = ALL) -> Fit:
    """The cheapest changes with which the run fits, or nearly those with which it needs the least where none do. there: bytes that are free."""
    blocks = needs.blocks if "blocks_to_swap" in {*ways} - useless(run, peer, device) and needs.blocks >= LEAST else 0
    tried = sorted(_candidates(run, peer, device, {*ways}), key=lambda one: one[0])

    def with_blocks(changes: Mapping[str, Any], count: int) -> PeerConfig | None:
        """None where the peer's other options do not go with them."""
        more = {"blocks_to_swap": count} if count else {}
        return changed(peer, {**changes, **more})

    def fitted(its: PeerConfig) -> Fit:
        return Fit({name: getattr(its, name) for name in NAMES if getattr(its, name) != getattr(peer, name)}, needs.of(its), before, there)

    before = needs.of(peer)
    utmost = {"fused_step" in changes: with_blocks(changes, blocks) or with_blocks(changes, 0) for _, changes in tried}  # the last, so the dearest
    least = min(map(fitted, utmost.values()), key=lambda one: one.need)
    if not least.fits:
        return least
    best, its_times = least, float("inf")
    for times, changes in tried:
        if times >= its_times:
            break
        most_room = with_blocks(changes, blocks) or with_blocks(changes, 0)
        if needs.lying(most_room) > there:  # whatever flows
            continue
        counts = [0, *range(LEAST, blocks + 1)] if most_room.blocks_to_swap else [0]
        enough = (count for count in counts if needs.of(with_blocks(changes, count)) <= there)
        if (count := next(enough, None)) is not None and (whole := times * _times_of_blocks(count, blocks)) < its_times:
            best, its_times = fitted(with_blocks(changes, count)), whole
    return best


def _times_of_blocks(count: int, blocks: int) -> float:
    return _SWAPPED + count / blocks if count else 1.0


def _candidates(run: RunConfig, peer: PeerConfig, device: torch.device, ways: set[str]) -> Iterator[tuple[float, dict[str, Any]]]:
    """How many times as long a step takes, and what is changed, without swapped blocks."""
    ways = ways - useless(run, peer, device)
    # What is first in the list changes fastest: of two that cost the same, the earlier one is tried first.
    valued = [name for name in reversed(NAMES) if name in ways and None not in _TIMES[name]]
    choices = [[(1.0, {}), *((times, {name: value}) for value, times in _TIMES[name].items())] for name in valued]
    choices.append([(1.0, {}), *_batches(peer)] if "train_batch_size" in ways else [(1.0, {})])
    for chosen in itertools.product(*choices):
        times, changes = 1.0, {}
        for factor, change in chosen:
            times *= factor
            changes |= change
        if not ("fused_step" in changes and "train_batch_size" in changes) and changed(peer, changes):
            yield times, changes


def _batches(peer: PeerConfig) -> Iterator[tuple[float, dict[str, int]]]:
    """Smaller micro-batches of the same step."""
    step, times = (peer.train_batch_size, peer.gradient_accumulation_steps), 1.0
    while not peer.fused_step and (step := smaller(*step)):
        times *= _HALVED
        yield times, {"train_batch_size": step[0], "gradient_accumulation_steps": step[1]}


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"
