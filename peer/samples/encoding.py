"""From pixels and captions to what the denoiser is trained on. Nothing that is frozen is computed twice while it is at hand."""

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peer.contracts import LatentBatch, Model, PixelBatch, Text
from peer.samples.caches import Caches
from swarm.digest import digest_bytes

log = logging.getLogger(__name__)

_TEXT_CACHE_BYTES = 64 << 20
_LEAST_CAPTIONS = 64
"""Kept also where they take more: eight of FLUX fill 64 MiB (512 states of 4096 numbers each), and then T5 would read the captions of a
DreamBooth's 20 pictures anew at every step. 64 take 0.5 GiB, beside weights of 34."""
_SAY_SECONDS = 10.0
"""On a CPU a VAE takes seconds for a picture, and there is no step before 64 are encoded."""


class Encoder:
    """Encodes batches with the model's frozen parts; what text encoders say of captions that repeat is kept, the least used dropped.

    caches: what is kept on disk as well. lazy: the model's device, where it compiles a program for every new shape (XLA): the model is then
    asked the same of every batch, whatever is known of it, and what is known waits on the host.
    """

    def __init__(self, model: Model, caches: Caches | None = None, lazy: torch.device | None = None):
        self._model, self._caches, self._lazy = model, caches or Caches(), lazy
        self._known: OrderedDict[str, Text] = OrderedDict()
        self._trained = False
        """Whether something in the text encoders is trained, as their answers show."""

    def __call__(self, batch: PixelBatch, rng: torch.Generator) -> LatentBatch:
        """rng: on the model's device, on the CPU where that has none; draws one latent of each picture."""
        home, there = rng.device, self._lazy or rng.device  # where what is known waits, and where it is trained on
        mean, std = self._encode_pixels(batch, home).to(there).chunk(2, dim=1)
        noise = torch.randn(mean.shape, generator=rng, device=rng.device).to(mean.device)
        mask = torch.stack([_shrunk(mask, mean) for mask in batch.masks]) if batch.masks else None
        text = batch.text or self._encode_text(batch.captions, home, home)
        return LatentBatch(mean + std * noise, {name: states.to(there) for name, states in text.items()}, batch.geometry, mask)

    @torch.no_grad()
    def ahead(self, batches: Sequence[PixelBatch], device: torch.device, *, texts: bool) -> list[PixelBatch]:
        """The batches with all that the frozen parts say of them, on the host: each part is asked of all batches before the next one is.

        device: the model's. texts: whether the text encoders are frozen. What is then trained has the bits that it would have without.
        """
        host = torch.device("cpu")
        told = [self._told(batch.captions, device, host) if texts else None for batch in batches]
        seen = [self._encode_pixels(batch, host).to(host) for batch in _announced(batches)]
        return [
            dataclasses.replace(batch, pixels=None, latents=dict(enumerate(rows)), text=text)
            for batch, rows, text in zip(batches, seen, told, strict=True)
        ]

    def _encode_pixels(self, batch: PixelBatch, device: torch.device) -> Tensor:
        """(B, 2C, h, w): what is known of them, and encoded what is not, which the cache then keeps."""
        if not (batch.names or batch.latents):
            return self._model.encode_pixels(batch.pixels)
        rows = dict(batch.latents)
        fresh = iter(batch.pixels if batch.pixels is not None else ())
        for place, name in enumerate(batch.names):
            if place in rows:
                continue
            assert self._caches.latents is not None
            # One by one: in a batch its last bits would depend on which others were not found, and so on when the run was resumed.
            (rows[place],) = self._model.encode_pixels(next(fresh)[None]).to(device)
            geometry = {} if batch.geometry is None else {"geometry": batch.geometry[place]}
            mask = {"mask": _shrunk(batch.masks[place], rows[place])} if batch.masks else {}
            self._caches.latents.put(name, {"latents": rows[place], **geometry, **mask})
        return torch.stack([rows[place].to(device) for place in range(len(batch.captions))])

    def _told(self, captions: Sequence[str], device: torch.device, home: torch.device) -> Text:
        """As `_encode_text`, at `home` in any case."""
        return {name: states.to(home) for name, states in self._encode_text(captions, device, home).items()}

    def _encode_text(self, captions: Sequence[str], device: torch.device, home: torch.device) -> Text:
        """The text encoders' answer; from memory or disk for captions that were encoded before, unless something in the encoders is trained.

        device: the model's. home: where the answer is to be, and what is known waits.
        """
        if self._lazy and self._caches.texts is None:
            return self._model.encode_text(captions)
        rows = {caption: self._known.pop(caption) for caption in set(captions) if caption in self._known}
        rows.update(self._kept(set(captions) - rows.keys(), home))
        fresh = sorted(set(captions) - rows.keys())
        if fresh:
            # One by one where it costs nothing, or only once: as above.
            apart = not self._trained and (device.type == "cpu" or self._caches.texts is not None)
            for group in [[caption] for caption in fresh] if apart else [fresh]:
                text = self._model.encode_text(group)
                if any(states.requires_grad for states in text.values()):
                    return self._encode_trained(captions, text if group == fresh else None)
                text = {name: states.to(home) for name, states in text.items()}
                rows.update((caption, {name: states[i] for name, states in text.items()}) for i, caption in enumerate(group))
            for caption in fresh if self._caches.texts else ():
                self._caches.texts.put(digest_bytes(caption.encode()), rows[caption])
        self._known.update(rows)
        # Texts of some families are as long as their captions. The shorter ones are padded with zeros, which the family's mask passes over.
        stacked = {name: pad_sequence([rows[caption][name] for caption in captions], batch_first=True) for name in rows[captions[0]]}
        known = sum(map(_num_bytes, self._known.values()))
        while known > _TEXT_CACHE_BYTES and len(self._known) > _LEAST_CAPTIONS:
            known -= _num_bytes(self._known.popitem(last=False)[1])
        return stacked

    def _encode_trained(self, captions: Sequence[str], text: Text | None) -> Text:
        """What encoders say that say something else after each step. text: of these captions, each once, sorted, where that is at hand."""
        self._trained = True
        fresh = sorted(set(captions))
        text = text or self._model.encode_text(fresh)
        where = torch.tensor([fresh.index(caption) for caption in captions])
        return {name: states[where.to(states.device)] for name, states in text.items()}

    def _kept(self, captions: Iterable[str], device: torch.device) -> dict[str, Text]:
        """Of these captions those that are on disk."""
        if self._caches.texts is None:
            return {}
        found = {caption: self._caches.texts.get(digest_bytes(caption.encode())) for caption in captions}
        return {caption: {name: states.to(device) for name, states in text.items()} for caption, text in found.items() if text}


def _announced(batches: Sequence[PixelBatch]) -> Iterator[PixelBatch]:
    """Each of them; what takes long says every ten seconds how far it is."""
    total, done, said = sum(len(batch.captions) for batch in batches), 0, time.monotonic()
    for batch in batches:
        if time.monotonic() - said >= _SAY_SECONDS:
            log.info("encoded %d of the next %d pictures", done, total)
            said = time.monotonic()
        yield batch
        done += len(batch.captions)


def _shrunk(mask: Tensor, latents: Tensor) -> Tensor:
    """(1, h, w) of a mask (1, H, W): for each place of the latents, on their device, the mean of the pixels that it stands for."""
    return torch.nn.functional.interpolate(mask[None], latents.shape[-2:], mode="area")[0].to(latents.device)


def _num_bytes(text: Text) -> int:
    return sum(states.nbytes for states in text.values())
