"""`--method loha`: beside each of the chosen layers the element-wise product of two products of narrow matrices
(arXiv:2108.06098), as peft has it."""

from peer.methods.shared.products import Products
from swarm.run_config import RunConfig


def build(run: RunConfig) -> Products:
    from peft import LoHaConfig

    return Products(run, LoHaConfig)
