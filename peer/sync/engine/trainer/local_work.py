"""This peer's work between states: counted, frozen into a contribution, moved along when the swarm's state moves.

The rule kept here: every sample trained is in the state, waiting to be, or given back, and exactly one of the three.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.contracts import Params
from peer.sync.engine.buffers import IN_MEMORY, Buffers
from peer.sync.engine.codec import Wire, check_finite
from peer.sync.engine.outer import Strategy
from peer.sync.engine.state import Header
from peer.sync.engine.vectors import Flat, SharedBuffer

REBASED_ANCESTORS = 8
"""A contribution made from the state itself or one of this many ancestors moves along with the anchor; an older one is dropped. So a peer
whose step takes as long as several rounds of the others has a part in the swarm: its work is old then, but weighs little."""
_FINAL_KEPT = 64
OPEN = 0
"""Stands for the samples that are in no contribution yet, where numbers of contributions are reported."""


class NotFinite(Exception):
    """The local parameters went to infinity; there is nothing to contribute."""


@dataclass(frozen=True)
class Anchor:
    """A state as the trainer sees it."""

    digest: str
    header: Header
    buffer: SharedBuffer

    def vector(self, size: int) -> Tensor:
        """(size,) float32: what the parameters are measured from."""
        return self.buffer.floats()[:size]


@dataclass
class Frozen:
    """A contribution on its way: its bytes never change. receipt: the host's for it; '' without one."""

    number: int
    samples: int
    encoded: SharedBuffer
    receipt: str = ""


class LocalWork:
    """`params` on top of the state that they were last rebased onto.

    What a codec loses is kept where it was learned, without a vector of its own: a contribution that comes into the state takes only
    what its bytes say out of `params` (or out of the accumulated gradients), and the rest is part of the next one.
    """

    def __init__(self, params: Params, state: Anchor, strategy: Strategy, wire: Wire, buffers: Buffers = IN_MEMORY):
        """buffers: make the memory of contributions."""
        self._params, self._strategy, self._wire, self._buffers = params, strategy, wire, buffers
        self._flat = Flat(params)
        self.state = state
        self.open_samples = 0
        self.frozen: Frozen | None = None
        self.included: dict[int, int] = {}
        """Contributions of ours in a state that is not final yet, and that state's round."""
        self._final: deque[tuple[str, int]] = deque(maxlen=_FINAL_KEPT)
        self._spare: SharedBuffer | None = None
        """Of a contribution that came into a state: nobody reads it any more."""
        self._sums: Params = {}
        """Sums of the samples' gradients that no contribution holds, where the strategy accumulates them; empty: zeros."""

    @property
    def waiting_samples(self) -> int:
        """Trained, but in no state yet."""
        return self.open_samples + (self.frozen.samples if self.frozen else 0)

    def numbers(self) -> list[int]:
        """Our contributions that are in no final state yet."""
        return [*self.included, *([self.frozen.number] if self.frozen else [])]

    def freeze(self, number: int) -> Frozen:
        """Encode the open samples' work ONCE, as contribution `number`.

        Raises NotFinite, after setting `params` back to the anchor; the open samples are lost then.
        """
        assert self.frozen is None and self.open_samples > 0
        # What the last one took, when a state has it: new pages of 1.7 GB (SD 1.5, fp16) would hold training up for more than a second.
        encoded, self._spare = self._spare or self._buffers.shared(self._wire.num_bytes), None
        try:
            if self._strategy.steps_locally:
                self._encode_steps(encoded.bytes())
            else:
                self._encode_gradients(encoded.bytes())
        except ValueError:
            self.give_up()
            raise NotFinite from None
        self.frozen = Frozen(number, self.open_samples, encoded)
        self.open_samples = 0
        return self.frozen

    def _encode_steps(self, encoded: Tensor) -> None:
        anchor = self.state.vector(self._wire.size)
        with self._flat.in_order():
            for part in self._wire.parts:
                learned = self._flat.minus(part.start, part.of(anchor))
                check_finite(learned)
                part.encode(learned, part.bytes_of(encoded))

    def _encode_gradients(self, encoded: Tensor) -> None:
        sums = Flat(self._sums)
        with sums.in_order():
            for part in self._wire.parts:
                total, data = sums.read(part.start, part.end), part.bytes_of(encoded)
                check_finite(total)
                part.encode(total / self.open_samples, data)
                sums.write(part.start, total.sub_(part.decode(data).mul_(self.open_samples)))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Take over `params`' gradients, the sums over a step's samples."""
        for name, parameter in self._params.items():
            if name in self._sums:
                self._sums[name] += parameter.grad
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None

    def rebase(self, new: Anchor, own_number: int) -> list[int]:
        """Move `params` onto a state, whoever made it; returns the contributions (OPEN: the open samples) whose work is lost.

        own_number: our last contribution in that state.
        """
        old, self.state = self.state, new
        dropped = [number for number in self.included if number > own_number]
        self.included = {number: round for number, round in self.included.items() if number <= own_number}
        if self.frozen is not None and own_number >= self.frozen.number:
            self._move(old, new, self.frozen.encoded.bytes())
            self.included[self.frozen.number] = new.header.round
            self.frozen, self._spare = None, self.frozen.encoded
            if not self._strategy.steps_locally and self.open_samples:
                dropped += self._discard_open()
        elif follows(new.digest, new.header, old.digest, self._strategy):
            self._move(old, new)
        else:
            dropped += self.give_up()
        return dropped

    def withdraw(self) -> None:
        """The frozen contribution may not be offered: take its work out of `params`; what was trained since stays."""
        assert self.frozen is not None
        self._move(self.state, self.state, self.frozen.encoded.bytes())
        self.frozen = None

    def undo(self) -> list[int]:
        """Go back to the state and what the frozen contribution says, where half a step came after that; returns [OPEN] if samples are lost by it."""
        anchor = self.state.vector(self._wire.size)
        with self._flat.in_order():
            for part in self._wire.parts:
                start = part.of(anchor)
                if self.frozen is not None:
                    start = part.decode(part.bytes_of(self.frozen.encoded.bytes())).add_(start)
                self._flat.write(part.start, start)
        return self._discard_open()

    def final(self, digest: str, round: int) -> None:
        """The state named `digest`, of `round`, is final."""
        self._final.append((digest, round))

    def take_done(self) -> list[int]:
        """Our contributions that came into a final state, or into one before it; each once.

        Only a final state on which `params` stand, or stood before, says so: of another branch one may be heard before the rebase.
        """
        lineage = {self.state.digest, *self.state.header.parents}
        final = max((round for digest, round in self._final if digest in lineage), default=0)
        done = [number for number, included in self.included.items() if included <= final]
        for number in done:
            del self.included[number]
        return done

    def give_up(self) -> list[int]:
        """Go back to the state itself; returns the contributions that are lost by it."""
        lost = [self.frozen.number] if self.frozen is not None else []
        self.frozen = None
        self._flat.write(0, self.state.vector(self._wire.size))
        return lost + self._discard_open()

    def _discard_open(self) -> list[int]:
        lost = [OPEN] if self.open_samples else []
        self.open_samples = 0
        self._sums = {}
        return lost

    def _move(self, old: Anchor, new: Anchor, taken: Tensor | None = None) -> None:
        """Move `params` along from one anchor to another, less what the contribution `taken` says: new + (params - (old + taken)).

        Part by part. Where gradients are accumulated, `params` are always those of the anchor.
        """
        before, after = old.vector(self._wire.size), new.vector(self._wire.size)
        if not self._strategy.steps_locally:
            return self._flat.write(0, after)
        with self._flat.in_order():
            for part in self._wire.parts:
                start = part.of(before) if taken is None else part.decode(part.bytes_of(taken)).add_(part.of(before))
                self._flat.move(part.start, start, part.of(after))


def follows(digest: str, header: Header, before: str, strategy: Strategy) -> bool:
    """Whether work made on the state `before` still counts on the state `digest`; trainer and sidecar must agree on it."""
    return before == digest or before in header.parents[: REBASED_ANCESTORS if strategy.steps_locally else 0]
