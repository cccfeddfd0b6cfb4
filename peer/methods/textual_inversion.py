"""`--method textual_inversion`: one new word is learned, as a few rows of the text encoders' embeddings (Gal et al. 2022, arXiv:2208.01618).

Nothing else moves: the rows are tensors of their own, laid over the frozen embedding, so neither a gradient nor an optimizer state of
the whole table exists, and in a swarm 3 KB travel (768 numbers for SD 1.x).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peer.contracts import Model, Params
from peer.methods.shared.parts import freeze, text_encoders, tokenizers
from swarm.errors import UserError
from swarm.run.methods.textual_inversion import file_of
from swarm.run_config import RunConfig


def build(run: RunConfig) -> "TextualInversion":
    return TextualInversion(run)


class TextualInversion:
    """The word's vectors, (num_vectors, width) for each text encoder."""

    def __init__(self, run: RunConfig):
        self._run = run
        more = range(1, run.num_vectors)
        self._tokens = [run.placeholder_token, *(f"{run.placeholder_token}_{number}" for number in more)]

    def whole(self, model: Model) -> tuple[str, ...]:
        return ()

    def begin(self, model: Model) -> None:
        return None

    def attach(self, model: Model) -> Params:
        """Raises UserError when the placeholder is known already or cannot be read, or the initializer is not one token."""
        freeze(model)
        readers = tokenizers(model)
        for tokenizer in readers.values():
            self._check(tokenizer)
        params: Params = {}
        for name, encoder in text_encoders(model).items():
            tokenizer = readers[name]
            start = encoder.get_input_embeddings().weight[self._ids(tokenizer)[0]].detach().float()
            tokenizer.add_tokens(self._tokens)
            self._check_reading(model.pipeline, tokenizer)
            vectors = nn.Parameter(start.repeat(self._run.num_vectors, 1))
            _lay_over(encoder, tokenizer.convert_tokens_to_ids(self._tokens), vectors, len(tokenizer))
            params[f"{name}.learned_embeds"] = vectors
            _recompute(encoder)
        return params

    def export(self, model: Model, params: Params, folder: Path) -> None:
        """A file for each text encoder that `load_textual_inversion` reads."""
        from safetensors.torch import save_file

        for name, vectors in self.vectors(params).items():
            save_file({self._run.placeholder_token: vectors}, folder / file_of(name), metadata={"format": "pt"})

    @torch.no_grad()
    def complete(self, model: Model, params: Params) -> None:
        """Put the learned vectors into the tables: what `model.save` then writes is a pipeline that knows the word."""
        readers = tokenizers(model)
        for name, encoder in text_encoders(model).items():
            table, ids = encoder.get_input_embeddings().weight, readers[name].convert_tokens_to_ids(self._tokens)
            table[ids] = params[f"{name}.learned_embeds"].to(table.dtype)

    def vectors(self, params: Params) -> dict[str, Tensor]:
        """Each text encoder's (num_vectors, width)."""
        return {key.removesuffix(".learned_embeds"): vectors.detach().cpu().contiguous() for key, vectors in params.items()}

    def _check(self, tokenizer: Any) -> None:
        known = [token for token in self._tokens if token in tokenizer.get_vocab()]
        if known:
            raise UserError(f"The model's tokenizer knows {known[0]} already.", fix="Choose another --placeholder_token.")
        count = len(self._ids(tokenizer))
        if count != 1:
            raise UserError(
                f"The initializer token '{self._run.initializer_token}' is {count} tokens to this model's tokenizer, not one.",
                fix="Choose a simpler --initializer_token, a common word.",
            )

    def _check_reading(self, pipeline: Any, tokenizer: Any) -> None:
        """Raises UserError when a caption does not bring every vector: CLIP's tokenizer lower-cases, so diffusers leaves `<DiCoo>` one token."""
        read = tokenizer.encode(pipeline.maybe_convert_prompt(self._run.placeholder_token, tokenizer), add_special_tokens=False)
        found = sum(id in read for id in tokenizer.convert_tokens_to_ids(self._tokens))
        if found < len(self._tokens):
            raise UserError(
                f"Of the {len(self._tokens)} vectors of '{self._run.placeholder_token}' the model's tokenizer would read {found}.",
                fix="Write --placeholder_token in lower case, or use --num_vectors 1.",
            )

    def _ids(self, tokenizer: Any) -> list[int]:
        return tokenizer.encode(self._run.initializer_token, add_special_tokens=False)


def _recompute(encoder: nn.Module) -> None:
    """transformers recomputes a layer only in training mode. Its parts stay in theirs, without dropout.

    Else gradient checkpointing did nothing here: T5-XXL kept 187 MB a layer for one caption of 512 tokens, and 27 with it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in encoder.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _lay_over(encoder: Any, ids: Sequence[int], vectors: nn.Parameter, size: int) -> None:
    """Make `encoder` read `vectors` (N, width) wherever its input has one of `ids`, N numbers in a row; `size`: of the vocabulary.

    The table gets rows for them, which keep the start value: it is what pipelines are saved with, once `complete` has filled them in.
    """
    _widen(encoder, encoder.get_input_embeddings().weight)
    table = encoder.get_input_embeddings()
    if table.num_embeddings < size:
        with torch.random.fork_rng(devices=[]):
            encoder.resize_token_embeddings(size, mean_resizing=False)
        encoder.requires_grad_(False)
        table = encoder.get_input_embeddings()
    first, count = ids[0], len(ids)
    assert list(ids) == list(range(first, first + count))
    vectors.data = vectors.data.to(table.weight.device)
    table.weight.data[first : first + count] = vectors.data

    def overlay(_table: nn.Module, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        rows = inputs[0] - first
        ours = (rows >= 0) & (rows < count)
        return torch.where(ours[..., None], vectors.to(embedded.dtype)[rows.clamp(0, count - 1)], embedded)

    # T5 reads its table by a second name: another module with the same weight in some releases of transformers.
    for module in {id(module): module for module in encoder.modules() if isinstance(module, nn.Embedding)}.values():
        if module is table or module.weight is table.weight:
            module.register_forward_hook(overlay)


def _widen(encoder: Any, words: nn.Parameter) -> None:
    """Have `encoder` hold its `words` in float32, wherever it reads them: they may be held in less, and what is learned is not rounded.

    They are another parameter then: who keeps the old one elsewhere (peer/machine/turns.py) does not bring it back.
    """
    if words.dtype is torch.float32:
        return
    wide = nn.Parameter(words.detach().float(), requires_grad=False)
    for module in encoder.modules():
        if getattr(module, "weight", None) is words:
            module.weight = wide
