"""What a round must make of its members' bytes, and what a trainer's parameters must be, worked out beside the product.

A state's bytes are known once a trainer was told of it. Bits are compared: every operation is the same, in the same order.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peer.sync.engine.codec import Wire, add_up, square_norm
from peer.sync.engine.outer import RoundInfo, Strategy
from peer.sync.engine.round.centering import centre, products
from peer.sync.engine.state import Header, hash_chunks, mean_digest
from peer.sync.engine.trainer.local_work import REBASED_ANCESTORS
from swarm.weights import even_shares

_STATES_KEPT, _OFFERS_KEPT = 256, 2048
_ROUNDING = 4e-6
"""Of the largest number: some float32 operations at numbers of that size."""
_CODEC_ERROR = {"fp32": 1e-6, "fp16": 2e-3, "int8": 2e-2, "int4": 0.3}
"""Of the largest value: what a contribution may differ by from what was learned."""


class Arithmetic:
    """Of one run. clip: its `clip_members`; centered: whether its averaging is; checked: states whose bits were compared; clipped: contributions that counted less for that."""

    def __init__(self, wire: Wire, strategy: Strategy, clip: float = 0.0, centered: bool = False):
        self._wire, self._strategy, self._clip, self._centered, self.checked, self.clipped = wire, strategy, clip, centered, 0, 0
        self._states: OrderedDict[str, Tensor] = OrderedDict()
        self._offers: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self._proved: set[tuple[str, int]] = set()
        self.lessened = 0
        """Contributions that counted as fewer samples than they said, since others had a receipt and they had none."""

    def offered(self, peer: str, number: int, encoded: Tensor, receipt: str = "") -> None:
        self._offers[peer, number] = encoded.clone()
        if receipt:
            self._proved.add((peer, number))
        if len(self._offers) > _OFFERS_KEPT:
            self._proved.discard(self._offers.popitem(last=False)[0])

    def rebased(self, digest: str, header: Header, data: Tensor) -> str:
        """A trainer is told of a state: why it is not what its round makes of its parent; empty: it is, or that cannot be known."""
        if digest in self._states:
            return "" if torch.equal(self._states[digest], data) else f"the state {digest[:8]} has two contents"
        self._states[digest] = data.clone()
        if len(self._states) > _STATES_KEPT:
            self._states.popitem(last=False)
        parent = self._states.get(header.parents[0]) if header.round > 1 else torch.zeros_like(data)
        offers = [self._offers.get((member.peer, member.number)) for member in header.members]
        if not header.round or parent is None or any(offer is None for offer in offers):
            return ""
        self.checked += 1
        weights = self._weights([(member.samples, (member.peer, member.number) in self._proved) for member in header.members])
        self.lessened += sum(weight < member.samples for weight, member in zip(weights, header.members, strict=True)) if len(offers) > 1 else 0
        factors = self._factors(offers, [weight if self._strategy.steps_locally else 1 for weight in weights])
        self.clipped += sum(factor < 1 for factor in factors)
        mean = self._average(offers, factors, weights) if len(offers) > 1 else offers[0]  # alone, its bytes are the mean
        vectors, named = self._outer(parent, mean, header)
        right = torch.equal(vectors.view(torch.uint8), data) and header.mean in ("", named)
        return "" if right else f"the state {digest[:8]} is not its parent's after the weighted mean of its members"

    @staticmethod
    def _weights(said: list[tuple[int, bool]]) -> list[int]:
        """said: of each member its samples, and whether the host says so too. Who has no receipt counts no more than the
        lower median of who has, or of all."""
        proved, every = sorted(samples for samples, receipt in said if receipt), sorted(samples for samples, _ in said)
        most = max(proved[(len(proved) - 1) // 2], every[(len(every) - 1) // 2]) if proved else every[-1]
        return [samples if receipt else min(samples, most) for samples, receipt in said]

    def _factors(self, offers: list[Tensor], sizes: list[int]) -> list[float]:
        """What each counts of itself: none goes beyond `clip` times the lower median of all norms, each for its size."""
        norms = [self._wire.norm(offer) for offer in offers]
        ranked = sorted(norm / size for norm, size in zip(norms, sizes, strict=True) if norm)
        limit = self._clip * ranked[(len(ranked) - 1) // 2] if ranked else 0.0
        return [1.0 if not self._clip or norm <= limit * size else limit * size / norm for norm, size in zip(norms, sizes, strict=True)]

    def _average(self, offers: list[Tensor], factors: list[float], samples: list[int]) -> Tensor:
        """offers: in the order of their members' ids."""
        vectors = [self._wire.decode(offer) for offer in offers]
        shares = even_shares(samples) if self._centered else None
        if shares is not None:
            clipped = torch.stack([vector * factor for vector, factor in zip(vectors, factors, strict=True)])
            parts = [clipped[:, part.start : part.end] for part in self._wire.parts]
            return self._wire.encode(torch.cat([torch.mv(part.T, centre(shares, products(part)).float()) for part in parts]))
        weights = [count / sum(samples) * factor for count, factor in zip(samples, factors, strict=True)]
        vectors = [vector * weight for vector, weight in zip(vectors, weights, strict=True)]
        total = vectors[0]
        for vector in vectors[1:]:
            total = total + vector
        return self._wire.encode(total)

    def _outer(self, parent: Tensor, mean: Tensor, header: Header) -> tuple[Tensor, str]:
        decoded = self._wire.decode(mean)
        square = add_up(square_norm(part.of(decoded)) for part in self._wire.parts)
        old = list(parent.view(torch.float32).split(self._wire.size))
        before = header.samples - sum(member.samples for member in header.members)
        new = self._strategy.outer_step(old, decoded, RoundInfo(header.round, before, square**0.5))
        return torch.cat(new), mean_digest(square, hash_chunks(mean))


@dataclass
class _Frozen:
    number: int
    values: np.ndarray


class Learned:
    """One boot of a trainer: what it learned and no state has taken yet, for strategies that step locally. `ahead`: float64.

    In NumPy, whose calls take a third of torch's time for vectors as short as these.
    """

    def __init__(self, wire: Wire, params: Mapping[str, Tensor], peer: str):
        self._wire, self._params, self._peer = wire, params, peer
        # Their own memory. One that was given other memory (`.data = ...`) would be found to differ: the product never does that.
        self._values = [parameter.detach().numpy().reshape(-1) for parameter in params.values()]
        self.ahead = np.zeros(wire.size)
        self._state, self._anchor = "", self.now()
        self._told: list[tuple[str, Header, np.ndarray]] = []
        self._frozen: _Frozen | None = None
        self._checked: list[int] | None = None
        """How often torch had written into each parameter when they were compared; None: what they should be has changed since."""

    def now(self) -> np.ndarray:
        return np.concatenate(self._values, dtype=np.float64)

    def restarted(self, digest: str) -> None:
        """The sidecar is another one: what the last one said and nobody read is gone. digest: where the trainer stands."""
        self._land_up_to(digest)
        self._told.clear()

    def told(self, digest: str, header: Header, data: Tensor) -> None:
        self._told.append((digest, header, data[: 4 * self._wire.size].numpy().view(np.float32).astype(np.float64)))

    def stepped(self, before: np.ndarray) -> None:
        self._moved(self.now() - before)

    def _moved(self, by: np.ndarray) -> None:
        self.ahead, self._checked = self.ahead + by, None

    def _freeze(self, number: int, encoded: Tensor) -> str:
        """Why the contribution is not what was learned; empty: it is."""
        values = self._wire.decode(encoded).numpy().astype(np.float64)
        self._frozen = _Frozen(number, values)
        largest, differs = _largest(self.ahead), _largest(values - self.ahead)
        return "" if differs <= _CODEC_ERROR[self._wire.name] * largest + 1e-9 else f"contribution {number} differs by {differs:.2g} from what was learned"

    def withdrew(self) -> None:
        self._moved(-self._frozen.values)
        self._frozen = None

    def undone(self) -> None:
        """What no contribution holds is gone."""
        self._moved((self._frozen.values if self._frozen else 0.0) - self.ahead)

    def check(self, digest: str, frozen: tuple[int, Tensor] | None) -> str:
        """The trainer stands on the state `digest`: why its parameters are not that and what it learned since; empty: they are.

        frozen: number and bytes of its contribution that is in no state yet.
        """
        self._land_up_to(digest)
        wrong = self._freeze(*frozen) if frozen is not None and self._frozen is None else ""
        versions = [parameter._version for parameter in self._params.values()]
        if versions == self._checked:  # three looks of four: a trainer that waits for the swarm looks again and again
            return wrong
        params, anchor = self.now(), self._anchor
        differs, largest = _largest(params - (anchor + self.ahead)), max(_largest(params), _largest(anchor))
        if not differs <= _ROUNDING * (largest + 0.01):
            return f"the parameters differ by {differs:.2g} from the state {digest[:8]} and what was learned since"
        self.ahead = params - anchor  # so that rounding does not add up
        self._checked = versions
        return wrong

    def gave_up(self, digest: str) -> None:
        """The trainer is done, and has the parameters of the state `digest`: to the bit those that all others have."""
        self._land_up_to(digest)
        self.ahead, self._frozen = np.zeros(self._wire.size), None

    def _land_up_to(self, digest: str) -> None:
        places = [place for place, (told, _, _) in enumerate(self._told) if told == digest]
        read = places[-1] + 1 if places else 0
        for told, header, anchor in self._told[:read]:
            self._land(told, header, anchor)
        del self._told[:read]

    def _land(self, digest: str, header: Header, anchor: np.ndarray) -> None:
        if self._frozen is not None and header.included.get(self._peer, 0) >= self._frozen.number:
            self.withdrew()
        elif digest != self._state and self._state not in header.parents[:REBASED_ANCESTORS]:
            self.ahead = np.zeros(self._wire.size)
            self._frozen = None
        self._state, self._anchor, self._checked = digest, anchor, None


def _largest(values: np.ndarray) -> float:
    return float(np.maximum.reduce(np.abs(values)))  # as `max`, without a frame of Python


class Taken:
    """One boot of a trainer whose strategy averages gradients: how many samples since its last contribution were taken at which state."""

    def __init__(self) -> None:
        self._digest, self._samples = "", 0

    def stepped(self, digest: str, samples: int) -> None:
        """The gradients of `samples` samples were taken at the state `digest`."""
        if digest != self._digest:
            self._digest, self._samples = digest, 0
        self._samples += samples

    def check(self, digest: str, samples: int) -> str:
        """Why a contribution frozen at `digest` cannot have `samples` samples; empty: it can."""
        taken = self._samples if digest == self._digest else 0
        self._samples = 0
        return "" if samples <= taken else f"{samples} samples are in a contribution, and {taken} of them were taken at its state"
