"""What to try when memory does not suffice, that of a machine or of its GPU: the cheapest first, in one order and in the same words everywhere.

`WAYS` is that order. Whether something is enough is not known here: `--fit auto` counts it (peer/machine/fitting.py), and what `dd-peer` adds after a peer
ran out of memory is in peer/machine/making_room.py. What each saves and costs is in docs/hardware.md.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Way:
    """One option of a machine with which a training step takes less memory."""

    option: str
    times: float
    """How many times as long a step takes, roughly: no GPU has confirmed it."""
    words: str = ""
    """'': those of the same option before it say this, too."""
    value: Any = None
    """None: a number that only a count knows, or that belongs to a step."""
    rounds: bool = False
    """Whether what is trained becomes another: a peer takes it only where its owner asks for whatever fits (`--fit auto`)."""


# In the order of their times; of swapped blocks their share comes on top, some 0.3 for 12 of 38. What rounds is to come after what rounds less, and has
# its time by that: int8 is off by 0.8 %, nf4 by 9 % (docs/hardware.md). fp8 is as large as int8 and three times as far off, so it is no way.
WAYS = (
    Way("train_batch_size", 1.05, "lower --train_batch_size"),
    Way("gradient_accumulation_steps", 1.05, "raise --gradient_accumulation_steps instead"),
    Way("fused_step", 1.05, "where the whole denoiser is trained and the run allows it add --fused_step", True),
    Way("offload", 1.05, "on a GPU add --offload", True),
    Way("base_precision", 1.1, "where the denoiser is not trained add --base_precision int8 or nf4", "int8", rounds=True),
    Way("gradient_checkpointing", 1.33, "add --gradient_checkpointing", True),
    Way("blocks_to_swap", 1.2, "of a transformer that is not trained itself add --blocks_to_swap 12"),
    Way("base_precision", 1.6, value="nf4", rounds=True),
    Way("weights", 1.7, "add --weights bf16", "bf16", rounds=True),
)
A_STEP: Mapping[str, str] = {way.option: way.words for way in WAYS if way.words}
"""Of a training step, by the option that does it."""
A_DRAWING: Mapping[str, str] = {
    "programs": "end other programs and start this one again",
    "num_validation_images": "lower --num_validation_images",
    "offload": "on a GPU add --offload",
    "validation_prompts": "remove --validation_prompts",
}
"""Of pictures."""
AN_AUDIT: Mapping[str, str] = {
    "programs": "end other programs and start this one again",
    "offload": "on a GPU add --offload",
    "audit": "remove --audit",
}
"""Of measuring what contributions do to the loss."""
_NOTHING_LEFT = "End other programs that use this memory, or use a device with more of it."


def memory_advice(ways: Mapping[str, str] = A_STEP, useless: Container[str] = ()) -> str:
    """One sentence; useless: the names of `ways` that are taken already, or make no room here."""
    left = [way for name, way in ways.items() if name not in useless]
    return f"The cheapest first: {', '.join(left)}." if left else _NOTHING_LEFT
