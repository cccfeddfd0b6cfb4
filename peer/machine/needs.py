"""What a run takes of a device's memory with given options of a machine, counted without the device on the run's own model.

A family tells nothing for it: its own code says how large texts and latents are, on tensors without numbers. Captions have the most tokens that it
reads; pictures are squares of the run's resolution. What is not counted: peer/machine/counting.py.
"""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from peer.config import PeerConfig
from peer.contracts import LatentBatch, Method, Model, Params, Text, parts_of
from peer.loop.optim import kind_of
from peer.loop.rounding import keep_in_bf16
from peer.machine.chains import scaled
from peer.machine.counting import away, bytes_of, count_held, count_step, flow_through, ids
from peer.machine.device import precision_of
from peer.machine.swap import spread
from peer.machine.turns import in_turns
from peer.rooms import load_part
from swarm.errors import UserError
from swarm.run.method import method_named
from swarm.run.optimizer import OPTIMIZERS
from swarm.run_config import RunConfig

_META = torch.device("meta")
CAPTION = "a picture of everything " * 200
"""Longer than any family reads."""


@dataclass(frozen=True)
class Turns:
    """Bytes that lie on a device, and the most that flows through each part's turn beside them."""

    trained: int
    """With the optimizer's state, and the average of --use_ema."""
    denoiser: int
    """What of it is not trained, without blocks that wait elsewhere."""
    texts: int
    vae: int
    step: int = 0
    reading: int = 0
    """Through the text encoders."""
    encoding: int = 0
    """Through the VAE."""
    texts_stay: bool = False
    """Whether a text encoder is trained, so that all of them stay in each turn."""
    beginning: int = 0
    """What is trained, before --weights bf16 halves it: a swarm's first state is made of it in float32. Nothing flows then, nor has a part its turn."""

    def worst(self, *, turned: bool) -> int:
        """At the worst moment: of the largest turn, or of all parts at once where they take none."""
        if not turned:
            return self.denoiser + self.texts + self.vae + max(self.beginning, self.trained + max(self.step, self.reading, self.encoding))
        staying, coming = (self.texts, 0) if self.texts_stay else (0, self.texts)
        turns = (self.denoiser + self.step, coming + self.reading, self.vae + self.encoding)
        return staying + max(self.beginning, self.trained + max(turns))


class Needs:
    """Answers for one run on one device. Each answer is counted once: a step of a LoRA in seconds, one that trains a whole denoiser in a minute."""

    def __init__(self, run: RunConfig, load: Callable[[], Model], device: torch.device):
        """load: reads the run's model, unplaced; its weights are given up at once."""
        self._run, self._device = run, device
        self._model = without_weights(load())
        self._known: dict[Any, Any] = {}

    @property
    def blocks(self) -> int:
        """How many blocks the denoiser has that can be swapped."""
        return len(self._model.blocks())

    def of(self, peer: PeerConfig) -> int:
        """Bytes at the worst moment. Raises UserError for blocks that cannot be swapped."""
        return self.turns(peer).worst(turned=in_turns(peer, self._device))

    def lying(self, peer: PeerConfig) -> int:
        """The same without what flows through the layers, which takes no time to count."""
        return self._lying(peer).worst(turned=in_turns(peer, self._device))

    def turns(self, peer: PeerConfig) -> Turns:
        lying = self._lying(peer)
        reading, text = self._texts(peer)
        encoding, latents = self._pictures(peer)
        return dataclasses.replace(lying, step=self._step(peer, text, latents, reads=lying.texts_stay), reading=reading, encoding=encoding)

    def _lying(self, peer: PeerConfig) -> Turns:
        model, params = self._prepared(peer)
        optimizer = OPTIMIZERS[kind_of(self._run, self._device)]
        parts, trained, states = self._once(("held", *self._weights(peer)), lambda: count_held(model, params, optimizer))
        denoiser = parts[model.facts.denoiser]
        if peer.blocks_to_swap:
            denoiser -= away(spread(model, peer.blocks_to_swap), but=ids(params))
        texts = sum(parts.get(name, 0) for name in model.facts.text_encoders)
        stay = bool(parts_of(params) & model.facts.text_encoders.keys())
        in_float32 = 4 * sum(parameter.numel() for parameter in params.values())
        average = in_float32 if peer.use_ema else 0  # rank 0's alone, whatever --weights are
        beginning = in_float32 if peer.weights == "bf16" else 0
        return Turns(trained + states + average, denoiser, texts, parts["vae"], texts_stay=stay, beginning=beginning)

    def params(self, peer: PeerConfig) -> Params:
        """What is trained: names and shapes."""
        return self._prepared(peer)[1]

    def _prepared(self, peer: PeerConfig) -> tuple[Model, Params]:
        """The model placed, and its method attached, without numbers."""
        return self._once(("model", *self._weights(peer)), lambda: self._prepare(peer))

    def weights(self, peer: PeerConfig) -> int:
        """Bytes of the model's parts once they are placed, before anything is trained: of every method, also one that is not counted."""
        model, _ = self._placed(peer)
        return sum(sum(bytes_of(part).values()) for part in model.parts.values())

    def _placed(self, peer: PeerConfig) -> tuple[Model, Method]:
        model, method = copy.deepcopy(self._model), load_part("methods", self._run.method).build(self._run)
        if peer.base_precision != "auto":
            model.pack(peer.base_precision, _META)
        model.place(_META, self._dtype(peer), method.whole(model))
        return model, method

    def _prepare(self, peer: PeerConfig) -> tuple[Model, Params]:
        model, method = self._placed(peer)
        if peer.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        params = method.attach(model)
        inside = {id(parameter) for part in model.parts.values() for parameter in part.parameters()}
        if not ids(params) <= inside:
            raise UserError(f"What --method {self._run.method} trains is in none of the model's parts, and is not counted.", fix="Choose the options yourself.")
        if peer.weights == "bf16":
            keep_in_bf16(params)
        return model, params

    def _texts(self, peer: PeerConfig) -> tuple[int, Text]:
        """The most that flows through the text encoders for a batch, and the shapes of what they say of a caption."""
        model, _ = self._prepared(peer)
        captions = [CAPTION] * _pictures(peer)
        return self._once(("texts", *self._flow(peer)), lambda: flow_through(model, lambda shape: model.encode_text(captions), **self._rules(peer)))

    def _pictures(self, peer: PeerConfig) -> tuple[int, tuple[int, ...]]:
        """The most that flows through the VAE for a batch, and the shape of its latents."""
        side = self._run.resolution
        pixels = torch.empty(_pictures(peer), 3, side, side, device=_META)
        model, _ = self._prepared(peer)

        def counted() -> tuple[int, tuple[int, ...]]:
            most, both = flow_through(model, lambda shape: model.encode_pixels(shape(pixels)), **self._rules(peer))
            count, channels, *sides = both.shape
            return most, (count, channels // 2, *sides)

        return self._once(("pictures", *self._flow(peer)), counted)

    def _step(self, peer: PeerConfig, text: Text, latents: tuple[int, ...], *, reads: bool) -> int:
        model, _ = self._prepared(peer)
        batch = LatentBatch(torch.empty(latents, device=_META), text, torch.empty(latents[0], 6, dtype=torch.int64, device=_META))
        options = {"micro_batches": peer.gradient_accumulation_steps, "fused": peer.fused_step, "captions": [CAPTION] * latents[0] if reads else ()}

        def counted() -> int:
            return count_step(model, batch, **options, **self._rules(peer))

        # Packed weights are unpacked to the same float32 from 8 bits and from 4: one count is for all.
        _, packed, *others = self._weights(peer)
        key = ("step", packed != "auto", *others, *self._flow(peer), min(peer.gradient_accumulation_steps, 2), peer.fused_step)
        return self._once(key, counted if method_named(self._run.method).whole else lambda: scaled(model.parts[model.facts.denoiser], counted))

    def _once(self, key: Any, count: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = count()
        return self._known[key]

    def _weights(self, peer: PeerConfig) -> tuple[Any, ...]:
        return self._dtype(peer), peer.base_precision, peer.weights, peer.gradient_checkpointing

    def _flow(self, peer: PeerConfig) -> tuple[Any, ...]:
        return self._dtype(peer), _pictures(peer)

    def _rules(self, peer: PeerConfig) -> dict[str, Any]:
        return {"dtype": self._dtype(peer), "on_gpu": self._device.type == "cuda"}

    def _dtype(self, peer: PeerConfig) -> torch.dtype | None:
        computing = sum(parameter.numel() for parameter in self._model.parts[self._model.facts.denoiser].parameters())
        return precision_of(peer, self._run, self._device, computing).dtype


def _pictures(peer: PeerConfig) -> int:
    """In a micro-batch."""
    return peer.train_batch_size * (2 if peer.with_prior_preservation else 1)


@torch.no_grad()
def without_weights(model: Model) -> Model:
    """The model on the meta device; tied weights stay tied."""
    made: dict[int, Any] = {}
    for store, is_parameter in [(s, p) for part in model.parts.values() for m in part.modules() for s, p in ((m._parameters, True), (m._buffers, False))]:
        for name, tensor in store.items():
            if tensor is not None and id(tensor) not in made:
                bare = tensor.data.to(_META)
                made[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
            store[name] = made.get(id(tensor))
    return model
