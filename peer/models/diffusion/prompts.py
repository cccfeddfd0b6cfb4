"""Captions as text encoders are to see them: CLIP's in chunks of 75 tokens, and read from a chosen layer; T5's in one piece."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peer.contracts import Text


def tokenize(pipeline: Any, tokenizer: Any, captions: Sequence[str], chunks: int = 1) -> Tensor:
    """(B, chunks, 77): each chunk is what the tokenizer makes of its 75 tokens: begin, tokens, end, padding. What is over is cut off."""
    length = tokenizer.model_max_length
    room = length - 2
    captions = written_out(pipeline, tokenizer, captions)
    if chunks == 1:
        ids = tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        return ids.unsqueeze(1)
    rows = []
    for tokens in tokenizer(captions, add_special_tokens=False).input_ids:
        pieces = [tokens[i * room : (i + 1) * room] for i in range(chunks)]
        filled = [[tokenizer.bos_token_id, *piece, tokenizer.eos_token_id] for piece in pieces]
        rows.append([piece + [tokenizer.pad_token_id] * (length - len(piece)) for piece in filled])
    return torch.tensor(rows)


def written_out(pipeline: Any, tokenizer: Any, captions: Sequence[str]) -> list[str]:
    """With an embedding of several vectors written out, `<m>` as `<m> <m>_1`, by pipelines that read such."""
    convert = getattr(pipeline, "maybe_convert_prompt", None)
    return convert(list(captions), tokenizer) if convert else list(captions)


def t5_states(pipeline: Any, tokenizer: Any, encoder: Any, captions: Sequence[str], length: int, device: torch.device) -> Tensor:
    """(B, T, width): what a T5 says on `device` of captions, padded and cut to `length` tokens, or to what the tokenizer takes at most."""
    ids = tokenizer(
        written_out(pipeline, tokenizer, captions),
        padding="max_length",
        max_length=min(length, tokenizer.model_max_length),
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return encoder(ids.to(device))[0]


def padded(states: Sequence[Tensor]) -> Text:
    """{"states": (B, T, width), "mask": (B, T), 1 where a token is and 0 where none is, in the states' dtype} of B captions' (tokens, width)."""
    told = {"states": list(states), "mask": [row.new_ones(len(row)) for row in states]}
    return {name: pad_sequence(each, batch_first=True) for name, each in told.items()}


def rows(text: Text) -> list[Tensor]:
    """The states that `padded` put together, without what it padded."""
    return [states[mask.bool()] for states, mask in zip(text["states"], text["mask"], strict=True)]


def between_layers(encoder: Any, ids: Tensor, mask: Tensor, layers: Sequence[int], device: torch.device) -> Tensor:
    """(B, T, layers * width): a language model's hidden states on `device` after each of these layers, side by side. ids, mask: (B, T)."""
    told = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    # Of the next tokens, which nobody reads, those after one place: all of them are 0.3 GB for each caption.
    found = encoder(**told, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
    return torch.cat([found[layer] for layer in layers], dim=-1)


def hidden_states(encoder: Any, ids: Tensor, layers_above: int) -> tuple[Tensor, Tensor]:
    """The states below the last `layers_above` layers, chunks one after the other, and the encoder's first output for the first chunk.

    ids: (B, chunks, 77). Returns (B, chunks * 77, width), not normalised unless it is the last layer, and what the encoder's own forward has first:
    a CLIPTextModelWithProjection's (B, width) embedding of the whole caption, a CLIPTextModel's last states.
    """
    batch, chunks, length = ids.shape
    output = encoder(ids.flatten(0, 1), output_hidden_states=True)
    states = output.hidden_states[-1 - layers_above]
    return states.reshape(batch, chunks * length, -1), output[0].unflatten(0, (batch, chunks))[:, 0]


def final_norm(encoder: Any) -> Any:
    """CLIP's last layer norm."""
    return _text_model(encoder).final_layer_norm


def last_layers(encoder: Any, count: int) -> list[Any]:
    """Those above the states that `hidden_states` reads below `count` layers."""
    layers = _text_model(encoder).encoder.layers
    return list(layers[len(layers) - count :])


def _text_model(encoder: Any) -> Any:
    """transformers 5 has no `.text_model` in a CLIPTextModel."""
    return getattr(encoder, "text_model", encoder)
