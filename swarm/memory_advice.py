"""What to try when memory does not suffice, that of a machine or of its GPU: the cheapest first, in the same words everywhere.

What each saves and costs is in docs/hardware.md. Whether it is enough is not known here.
"""

from collections.abc import Container, Mapping

# Fewer samples at a time cost the least: accumulated, they make the same step. Then what costs time: activations computed twice a third, parts that
# move once in 64 samples, blocks that move twice in each. The last two round weights: first those that are not trained.
A_STEP: Mapping[str, str] = {
    "train_batch_size": "lower --train_batch_size",
    "gradient_accumulation_steps": "raise --gradient_accumulation_steps instead",
    "gradient_checkpointing": "add --gradient_checkpointing",
    "offload": "on a GPU add --offload",
    "blocks_to_swap": "of a transformer that is not trained itself add --blocks_to_swap 12",
    "base_precision": "where the denoiser is not trained add --base_precision int8 or nf4",
    "weights": "add --weights bf16",
}
"""Of a training step, by the option that does it."""
A_DRAWING: Mapping[str, str] = {
    "programs": "end other programs and start this one again",
    "num_validation_images": "lower --num_validation_images",
    "offload": "on a GPU add --offload",
    "validation_prompts": "remove --validation_prompts",
}
"""Of pictures."""
_NOTHING_LEFT = "End other programs that use this memory, or use a device with more of it."


def memory_advice(ways: Mapping[str, str] = A_STEP, useless: Container[str] = ()) -> str:
    """One sentence; useless: the names of `ways` that are taken already, or make no room here."""
    left = [way for name, way in ways.items() if name not in useless]
    return f"The cheapest first: {', '.join(left)}." if left else _NOTHING_LEFT
