"""The local optimizer; its state is this machine's own and is never averaged."""

import logging

import torch

from peer.contracts import Params
from swarm.errors import UserError
from swarm.run_config import RunConfig


def build_optimizer(run: RunConfig, params: Params, device: torch.device) -> torch.optim.Optimizer:
    """What the run wants; `auto` is 8-bit AdamW (bitsandbytes) on a GPU and torch's own elsewhere.

    On a CPU 8-bit Adam is right to 1 % and needs a quarter of the memory, but takes about 30 times as long. Adafactor keeps a row and a
    column of sums for each matrix instead of two numbers for each parameter; its rate is the schedule's, not one of its own.
    """
    kind = run.optimizer if run.optimizer != "auto" else ("adamw8bit" if device.type == "cuda" else "adamw")
    if kind == "adafactor":
        from transformers.optimization import Adafactor

        own = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
        return Adafactor(params.values(), lr=run.learning_rate, weight_decay=run.adam_weight_decay, **own)
    options = {
        "lr": run.learning_rate,
        "betas": (run.adam_beta1, run.adam_beta2),
        "eps": run.adam_epsilon,
        "weight_decay": run.adam_weight_decay,
    }
    if kind == "adamw8bit" and device.type == "xla":
        raise UserError("8-bit AdamW has no program for XLA.", fix="Use --optimizer adamw or adafactor.")
    if kind == "adamw8bit":
        return _bitsandbytes().optim.AdamW8bit(params.values(), **options)
    return torch.optim.AdamW(params.values(), fused=device.type != "xla", **options)  # XLA fuses what it compiles


def _bitsandbytes():
    # Its import reports optional 4-bit kernels as missing, which 8-bit Adam never uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError:
        raise UserError("8-bit AdamW needs bitsandbytes.", fix="pip install 'bitsandbytes>=0.48', or --optimizer adamw.") from None
    return bitsandbytes
