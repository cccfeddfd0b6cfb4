"""What one contribution alone makes of the run's loss: the loss of some pictures before and after it, at the same noise and timesteps.

After it is the state that the round would have made of this contribution alone, as far as the excerpt goes: the rest of the parameters stays
as it was. It shows whether the contribution points where the model gets better. Not what it does together with others.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

import torch
from torch import Tensor

from peer.audit.orders import Losses
from peer.contracts import Model, Params, Sample
from peer.drawing.held_out import encoded, losses_of
from peer.drawing.validation import evaluated
from peer.machine.device import Precision
from peer.rooms import load_part
from peer.sync.engine.codec import Part, add_up, rough_square
from peer.sync.engine.outer import RoundInfo
from peer.sync.engine.state import State
from peer.sync.engine.vectors import Flat
from swarm.run_config import RunConfig

PICTURES, OWN_PICTURES, DRAWS = 16, 8, 4
"""Pictures of the run and of a contribution, and draws of noise and timestep for each. Their chance is the same before and after, so that it says little of the difference."""
_MOST_TIMES = 100.0
"""A loss that grew further, or is no number any more, says no more than this."""


@dataclass(kw_only=True)
class Measuring:
    """params: of `model`, which is theirs alone; samples: captioned pictures, of which each measurement takes some by `rng`."""

    model: Model
    params: Params
    precision: Precision
    run: RunConfig
    samples: Sequence[Sample]
    rng: random.Random

    def losses(
        self, state: State, parts: Sequence[Part], excerpts: Mapping[str, Tensor], own: Mapping[str, Sequence[Sample]] = MappingProxyType({})
    ) -> dict[str, Losses]:
        """By member; without those whose excerpt cannot be decoded.

        state: what the contributions were averaged onto; `params` hold its anchor, now and afterwards. parts: consecutive ones of the
        vector; excerpts: what each member sent for them, (num_bytes,) uint8. own: samples that a member had leased for its contribution.
        """
        chosen = self.rng.sample(self.samples, min(PICTURES, len(self.samples)))
        seed = self.rng.getrandbits(63)
        flat, old = Flat(self.params), state.vectors(sum(p.numel() for p in self.params.values()))
        found: dict[str, Losses] = {}
        with evaluated(self.model, self.precision.device):
            before = self._loss(chosen, seed)
            own_before = {peer: self._loss(own[peer], seed) for peer in excerpts if own.get(peer)}
            for peer, encoded in excerpts.items():
                try:
                    after_it = self._stepped(state, old, parts, encoded)
                except ValueError:  # its reducer has told what is wrong with it, and the round is not made
                    continue
                self._write(flat, after_it)
                found[peer] = Losses(before, _bounded(self._loss(chosen, seed), before))
                if peer in own_before:
                    after = _bounded(self._loss(own[peer], seed), own_before[peer])
                    found[peer] = found[peer]._replace(own_before=own_before[peer], own_after=after)
                self._write(flat, ((part, part.of(old[0])) for part in parts))
        return found

    def _loss(self, samples: Sequence[Sample], seed: int) -> float:
        rng = torch.Generator().manual_seed(seed)
        batches = encoded(samples, model=self.model, run=self.run, precision=self.precision)
        each = [losses_of(batch, DRAWS, rng, model=self.model, precision=self.precision) for batch in batches]
        return fmean(loss for some in each for loss in some) if any(each) else math.nan

    def _stepped(self, state: State, old: Sequence[Tensor], parts: Sequence[Part], encoded: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Each part of the anchor after a round of this contribution alone. Raises ValueError for what is not finite."""

        def values(part: Part) -> Tensor:
            return part.decode(encoded[part.begin - parts[0].begin : part.stop - parts[0].begin])

        norm = math.sqrt(add_up(rough_square(values(part)) for part in parts))
        info = RoundInfo(state.header.round + 1, state.header.samples, norm)
        strategy = load_part("sync", self.run.sync).strategy(self.run)
        return ((part, strategy.outer_step([part.of(vector) for vector in old], values(part), info)[0]) for part in parts)

    def _write(self, flat: Flat, pieces: Iterator[tuple[Part, Tensor]]) -> None:
        with torch.no_grad():
            for part, values in pieces:
                flat.write(part.start, values)


def _bounded(after: float, before: float) -> float:
    return after if after < _MOST_TIMES * before else _MOST_TIMES * before  # also of a NaN

