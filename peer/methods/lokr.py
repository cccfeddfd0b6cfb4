"""`--method lokr`: beside each of the chosen layers the Kronecker product of a small matrix and a product of narrow ones
(arXiv:2212.10650), as peft has it."""

from peer.methods.shared.products import Products
from swarm.run_config import RunConfig


def build(run: RunConfig) -> Products:
    from peft import LoKrConfig

    return Products(run, LoKrConfig)
