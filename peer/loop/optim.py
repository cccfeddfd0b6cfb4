"""The local optimizer; its state is this machine's own and is never averaged."""

import importlib.metadata
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from packaging.requirements import Requirement

from peer.contracts import Params
from peer.machine.device import emulates_bf16
from swarm.errors import UserError
from swarm.run.optimizer import AUTO, OPTIMIZERS
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


def kind_of(run: RunConfig, device: torch.device) -> str:
    """What the run's optimizer is on this device: `auto` is 8-bit AdamW (bitsandbytes) on a GPU and torch's own elsewhere."""
    return run.optimizer if run.optimizer != AUTO else ("adamw8bit" if device.type == "cuda" else "adamw")


def check_here(run: RunConfig, weights: str, device: torch.device) -> None:
    """Raise UserError where this machine cannot step with the run's optimizer; asked before a model is loaded. weights: --weights.

    Warns where bf16 weights are computed with in an emulation of bf16.
    """
    facts = OPTIMIZERS[kind_of(run, device)]
    if device.type == "xla" and not facts.on_xla:
        tried = " or ".join(name for name, its in OPTIMIZERS.items() if its.on_xla)
        raise UserError(f"{facts.title} does not run on XLA.", fix=f"Use --optimizer {tried}.")
    if weights == "bf16" and not facts.by_tensor:
        raise UserError(
            f"{facts.title} steps all tensors at once, but --weights bf16 steps some at a time.",
            fix="Remove --weights; or use another --optimizer.",
        )
    if weights == "bf16" and emulates_bf16(device):
        log.warning("weights=bf16: this GPU has no bf16 and emulates it, so that steps take longer; without --weights it computes in fp16 or float32")
    if facts.package and not _is_there(Requirement(facts.package)):
        raise UserError(f"{facts.title} needs {facts.package}.", fix=f"pip install '{facts.package}'; or use another --optimizer.")
    if facts.matrices and not hasattr(torch.optim, "Muon"):
        raise UserError(f"{facts.title} needs torch 2.9 or later, and this is {torch.__version__}.", fix="pip install --upgrade torch")


def _is_there(wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def build_optimizer(run: RunConfig, params: Params, device: torch.device) -> Any:
    """What the run wants, for float32 `params`. Raises as `check_here`.

    A group of parameters whose rate is not the schedule's has its `share` of that. On a CPU 8-bit Adam is right to 1 % and needs a
    quarter of the memory, but takes about 30 times as long.
    """
    check_here(run, "fp32", device)
    return _BUILDERS[kind_of(run, device)](run, params, device)


def told(optimizer: Any) -> str:
    """What an optimizer's state fits: one of which the same is told."""
    return " ".join([type(optimizer).__name__, *(f"{group['share']:g}" for group in optimizer.param_groups if "share" in group)])


# ---------------------------------------------------------------- by name


def _adamw(run: RunConfig, params: Params, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(run, params), fused=device.type != "xla", **_adams(run))  # XLA fuses what it compiles


def _adamw8bit(run: RunConfig, params: Params, device: torch.device) -> torch.optim.Optimizer:
    return _bitsandbytes().AdamW8bit(_groups(run, params), **_adams(run))


def _lion8bit(run: RunConfig, params: Params, device: torch.device) -> torch.optim.Optimizer:
    return _bitsandbytes().Lion8bit(_groups(run, params), **_any(run))


def _ademamix8bit(run: RunConfig, params: Params, device: torch.device) -> torch.optim.Optimizer:
    """Its third decay is the library's, 0.9999: what it remembers is a peer's own 10,000 steps."""
    slow = 0.9999
    return _bitsandbytes().AdEMAMix8bit(_groups(run, params), **{**_adams(run), "betas": (run.adam_beta1, run.adam_beta2, slow)})


def _adafactor(run: RunConfig, params: Params, device: torch.device) -> torch.optim.Optimizer:
    """A row and a column of sums for each matrix instead of two numbers for each parameter; its rate is the schedule's, not one of its own."""
    from transformers.optimization import Adafactor

    return Adafactor(_groups(run, params), scale_parameter=False, relative_step=False, warmup_init=False, **_any(run))


def _prodigy(run: RunConfig, params: Params, device: torch.device) -> torch.optim.Optimizer:
    """With what its page recommends for diffusion models. It finds its rate from how far gradients point back to where this peer began.
    That bounds the distance from there to the optimum. Who moved the parameters since does not matter, so a round's mean does not spoil it."""
    from prodigyopt import Prodigy

    with redirect_stdout(io.StringIO()):  # it prints that weight decay is decoupled
        return Prodigy(_groups(run, params), **_adams(run), use_bias_correction=True, safeguard_warmup=True)


def _adamw_schedulefree(run: RunConfig, params: Params, device: torch.device) -> "ScheduleFree":
    from schedulefree import AdamWScheduleFree

    return ScheduleFree(AdamWScheduleFree(_groups(run, params), **_adams(run), foreach=False))  # else 4 bytes a weight more in each step


def _came(run: RunConfig, params: Params, device: torch.device) -> torch.optim.Optimizer:
    from came_pytorch import CAME

    return CAME(_groups(run, params), **_any(run))


def _muon(run: RunConfig, params: Params, device: torch.device) -> "MuonAndAdamW":
    """Matrices by Muon, as far as AdamW would move them (arXiv:2502.16982), all else by AdamW: vectors, convolutions, and tables of
    embeddings, of whose rows a step has gradients for a few."""
    matrices = {name: parameter for name, parameter in params.items() if parameter.ndim == 2 and not _embeds(name)}
    rest = {name: parameter for name, parameter in params.items() if name not in matrices}
    own = {"lr": run.learning_rate, "weight_decay": run.adam_weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    parts = [torch.optim.Muon(_groups(run, matrices), **own)] if matrices else []
    return MuonAndAdamW([*parts, *([_adamw(run, rest, device)] if rest else [])])


_BUILDERS = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "lion8bit": _lion8bit,
    "ademamix8bit": _ademamix8bit,
    "adafactor": _adafactor,
    "prodigy": _prodigy,
    "adamw_schedulefree": _adamw_schedulefree,
    "came": _came,
    "muon": _muon,
}


def _groups(run: RunConfig, params: Params) -> list[dict[str, Any]]:
    if not run.text_encoder_lr:
        return [{"params": [*params.values()]}]
    texts = {name: parameter for name, parameter in params.items() if name.startswith("text_encoder")}
    rest = [parameter for name, parameter in params.items() if name not in texts]
    groups = [{"params": rest}, {"params": [*texts.values()], "share": run.text_encoder_lr / run.learning_rate}]
    return [group for group in groups if group["params"]]


def _any(run: RunConfig) -> dict[str, Any]:
    return {"lr": run.learning_rate, "weight_decay": run.adam_weight_decay}


def _adams(run: RunConfig) -> dict[str, Any]:
    return {**_any(run), "betas": (run.adam_beta1, run.adam_beta2), "eps": run.adam_epsilon}


def _bitsandbytes() -> Any:
    # Its import reports optional 4-bit kernels as missing, which no optimizer uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes.optim


def _embeds(name: str) -> bool:
    """Whether a tensor or the module that owns it is called an embedding."""
    return any("embed" in part for part in name.split(".")[-2:])


# ---------------------------------------------------------------- those that are more than one of a library's


class ScheduleFree:
    """schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682) whose parameters are x, the average, wherever others look at them.

    Gradients are taken at y, between x and z, the steps that are averaged. The library's parameters are y while it trains, with z beside
    them. Here they are y within `gradient_point` alone; else they are x, and beside them is z - x, so that whoever moves the parameters
    (a round's mean) moves all three by the same.
    """

    def __init__(self, inner: Any):
        self._inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    @contextmanager
    def gradient_point(self) -> Iterator[None]:
        """Within it, the parameters are where gradients are to be taken, and `step` may be called."""
        self._shift(1)
        self._inner.train()
        try:
            yield
        finally:
            self._inner.eval()
            self._shift(-1)

    def step(self) -> None:
        self._inner.step()

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(dict(state))

    @torch.no_grad()
    def _shift(self, sign: int) -> None:
        for parameter, own in self._inner.state.items():
            if "z" in own:  # it was stepped
                own["z"].add_(parameter, alpha=sign)


class MuonAndAdamW:
    """One optimizer for matrices and one for all else, or one of the two, as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)
