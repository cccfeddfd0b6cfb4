"""Beside each of the chosen layers the element-wise product of two products of narrow matrices (arXiv:2108.06098)."""

from swarm.run import adapters
from swarm.run.method import Method, TextEncoders

METHOD = Method(
    since="0.1.1",
    learning_rate=1e-4,
    sections=(TextEncoders, adapters.Options),
    resolve=adapters.resolve,
    check_with=adapters.check_with,
    network=lambda run, family: adapters.lycoris(run, "loha"),
    kind="LoHa weights",
    tags=("diffusers-training", "loha"),
    loading=adapters.loading,
)
