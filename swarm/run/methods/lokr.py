"""Beside each of the chosen layers the Kronecker product of a small matrix and a product of narrow ones (arXiv:2212.10650)."""

from swarm.run import adapters
from swarm.run.method import Method, TextEncoders

METHOD = Method(
    since="0.1.1",
    learning_rate=1e-4,
    sections=(TextEncoders, adapters.Options),
    resolve=adapters.resolve,
    check_with=adapters.check_with,
    network=lambda run, family: adapters.lycoris(run, "lokr"),
    kind="LoKr weights",
    tags=("diffusers-training", "lokr"),
    loading=adapters.loading,
)
