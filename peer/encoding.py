"""From pixels and captions to what the denoiser is trained on. Nothing that is frozen is computed twice while it is at hand."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from peer.contracts import LatentBatch, Model, PixelBatch, Text

_TEXT_CACHE_BYTES = 64 << 20


class Encoder:
    """Encodes batches with the model's frozen parts; what text encoders say of captions that repeat is kept, the least used dropped."""

    def __init__(self, model: Model):
        self._model = model
        self._known: OrderedDict[str, Text] = OrderedDict()

    def __call__(self, batch: PixelBatch, rng: torch.Generator) -> LatentBatch:
        """rng: on the model's device; draws one latent of each picture."""
        mean, std = self._model.encode_pixels(batch.pixels).chunk(2, dim=1)
        noise = torch.randn(mean.shape, generator=rng, device=mean.device)
        return LatentBatch(mean + std * noise, self._encode_text(batch.captions), batch.geometry)

    def _encode_text(self, captions: Sequence[str]) -> Text:
        """The text encoders' answer; from memory for captions that were encoded before, unless something in the encoders is trained."""
        rows = {caption: self._known.pop(caption) for caption in set(captions) if caption in self._known}
        fresh = sorted(set(captions) - rows.keys())
        if fresh:
            text = self._model.encode_text(fresh)
            if any(states.requires_grad for states in text.values()):
                where = torch.tensor([fresh.index(caption) for caption in captions])
                return {name: states[where.to(states.device)] for name, states in text.items()}
            rows.update((caption, {name: states[i] for name, states in text.items()}) for i, caption in enumerate(fresh))
        self._known.update(rows)
        stacked = {name: torch.stack([rows[caption][name] for caption in captions]) for name in rows[captions[0]]}
        limit = max(1, _TEXT_CACHE_BYTES // sum(states.nbytes for states in rows[captions[0]].values()))
        while len(self._known) > limit:
            self._known.popitem(last=False)
        return stacked
