"""The training loop. It knows the contracts and nothing behind them."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peer.contracts import LatentBatch, Model, Params, PixelBatch, Sync, SyncReport
from swarm.digest import seed_of
from swarm.errors import ExitCode, UserError

if TYPE_CHECKING:
    from peer.accounts import Accounts
    from peer.device import Precision, RankGroup
    from peer.ema import Ema
    from peer.feed import Feed, Work
    from peer.metrics import Progress
    from peer.occasions import Occasions

log = logging.getLogger(__name__)

MAX_BAD_STEPS = 10


@dataclass(kw_only=True)
class Trainer:
    """Trains `params` on what `feed` brings until the data, the run or the user's patience ends.

    All ranks of a launch run the same loop in step; rank 0 alone has accounts, writes checkpoints and talks to the swarm.
    """

    model: Model
    encode: Callable[[PixelBatch, torch.Generator], LatentBatch]
    """With the model's frozen parts, and with those of its text encoders that are trained."""
    params: Params
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    """From samples in the committed state."""
    max_grad_norm: float
    precision: "Precision"
    sync: Sync
    feed: "Feed"
    accounts: "Accounts"
    group: "RankGroup"
    progress: "Progress"
    stopping: Callable[[], bool]
    save: Callable[[Mapping[str, Any], Mapping[str, Any]], None]
    """Writes a checkpoint of (state, what to say about it); may raise UserError when the disk is full."""
    occasions: "Occasions"
    """What else is done every so many global steps."""
    by_rounds: bool
    """Whether a global step is a committed round, as in a swarm, or an optimizer step of ours."""
    average: "Ema | None" = None
    """Of the weights, where one is kept: rank 0 alone."""
    noise_seed: str
    """Differs between peers: equal noise would correlate their gradients."""
    step: int = 0
    trained: int = 0
    """Samples of this peer's counted steps."""
    _bad_steps: int = 0
    _scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        self._scaler = torch.amp.GradScaler(self.precision.device.type, enabled=self.precision.scaled)

    def run(self) -> None:
        """Train to the end, leave the swarm and save. Raises UserError when training cannot go on."""
        done = self._follow(self.sync.catch_up())
        self.occasions.start(self.global_step)
        for work in self.feed if not done else ():
            loss = self._train(work)
            samples = len(work.keys) if loss is not None else 0
            self.trained += samples
            done = self._follow(self.sync.step(samples, loss))
            self.progress.stepped(
                step=self.step,
                samples=samples,
                loss=loss,
                learning_rate=self.optimizer.param_groups[0]["lr"],
                round=self.sync.round,
                committed=self.sync.samples,
                peers=self.sync.peers,
            )
            self.occasions.reach(self.global_step, end=done)
            if done:
                break
        self._leave()
        self.checkpoint()
        self.accounts.give_back_aside()

    @property
    def global_step(self) -> int:
        return self.sync.round if self.by_rounds else self.step

    def _train(self, work: "Work") -> float | None:
        """One local step: forward, backward and, when the strategy says so, the optimizer. Returns the mean loss, None if it did not count."""
        self.step += 1
        self.accounts.unusable(work.bad)
        if not work.keys:
            return None
        loss = self._accumulate(work)
        if not math.isfinite(loss):
            self.optimizer.zero_grad()
            self.accounts.set_aside(work.keys)
            return self._count_bad(f"the loss is {loss}")
        if not self._use_gradients(len(work.keys)):
            self.accounts.lost(work.keys)
            return None if self.precision.scaled else self._count_bad("a gradient is not finite")
        self._bad_steps = 0
        self.accounts.trained(work.keys)
        return loss

    def _accumulate(self, work: "Work") -> float:
        """Add the gradient of the SUM of this step's losses, over all ranks, to the parameters' `.grad`; returns their mean."""
        total = torch.zeros((), device=self.precision.device)
        for number, pixels in enumerate(work.batches, start=work.first):
            losses = self._losses(pixels, number)
            self._scaler.scale(losses.sum()).backward()
            total += losses.detach().sum()
        for parameter in self.params.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.group.sum_([total, *(parameter.grad for parameter in self.params.values())])
        return float(total) / len(work.keys)

    def _losses(self, pixels: PixelBatch, number: int) -> Tensor:
        """(B,); every random number in it follows from the peer, the step and the micro-batch, so a resumed run repeats them."""
        seed = seed_of(self.noise_seed, self.step, number)
        torch.manual_seed(seed)  # for whatever draws without being handed a generator: dropout
        rng = torch.Generator(self.precision.device).manual_seed(seed)
        with self.precision.autocast():
            losses = self.model.loss(self.encode(pixels, rng), rng)
        return losses if pixels.weights is None else losses * pixels.weights.to(losses.device)

    def _use_gradients(self, samples: int) -> bool:
        """Hand the step's gradients to the strategy, or step the optimizer; False when they are not finite and nothing was changed."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.sync.samples)
        self._scaler.unscale_(self.optimizer)
        finite = bool(self._clip(math.inf).isfinite())
        if finite and self.sync.before_step():
            torch._foreach_div_([parameter.grad for parameter in self.params.values()], samples)
            self._clip(self.max_grad_norm or math.inf)
            self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()
        return finite

    def _clip(self, max_norm: float) -> Tensor:
        """Clip the gradients to this norm; returns the norm they had."""
        return torch.nn.utils.clip_grad_norm_(self.params.values(), max_norm)

    def _count_bad(self, what: str) -> None:
        self._bad_steps += 1
        log.warning("skipped step=%d because %s", self.step, what)
        if self._bad_steps >= MAX_BAD_STEPS:
            raise UserError(
                f"{MAX_BAD_STEPS} steps in a row failed: {what}.",
                fix="Lower --learning_rate, try --mixed_precision no, and look at the pictures of the last lines.",
                code=ExitCode.FAILED,
            )

    def _follow(self, report: SyncReport) -> bool:
        """Do what the swarm's report says, waiting while it says so; whether the run is done."""
        report = self._settle(report)
        while report.wait or report.frozen is not None:
            if report.frozen is None and self.group.broadcast_object(self.stopping()):
                break
            report = self._settle(self.sync.step(0))
        return report.done

    def _leave(self) -> None:
        report = self._settle(self.sync.leave())
        while report.wait:
            report = self._settle(self.sync.leave())

    def _settle(self, report: SyncReport) -> SyncReport:
        """Tell the source what became of our samples; a contribution that it refuses is withdrawn, and the answer to that returned."""
        if report.frozen is not None and not self.group.broadcast_object(self.accounts.register(report.frozen)):
            report = self.sync.withdraw(report.frozen)
        self.accounts.apply(report)
        return report

    def checkpoint(self) -> None:
        if self.group.is_main:
            self.save(
                self.state_dict(), {"round": self.sync.round, "samples": self.sync.samples, "step": self.step, "trained": self.trained}
            )

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on as if this one had never stopped. Rank 0 only."""
        return {
            "step": self.step,
            "trained": self.trained,
            "params": {name: parameter.detach() for name, parameter in self.params.items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "sync": self.sync.state_dict(),
            "feed": self.feed.state_dict(),
            "accounts": self.accounts.state_dict(),
            "average": self.average.state_dict() if self.average else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, the same on all ranks. Raises UserError when it is of other parameters."""
        load_params(self.params, state["params"])
        self.step, self.trained = state["step"], state["trained"]
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self.sync.load_state_dict(state["sync"])
        self.feed.load_state_dict(state["feed"])
        self.accounts.load_state_dict(state["accounts"])
        if self.average and state.get("average"):
            self.average.load_state_dict(state["average"])


@torch.no_grad()
def load_params(params: Params, saved: Mapping[str, Tensor]) -> None:
    """Overwrite `params` in place. Raises UserError naming the first tensor that differs in name or shape."""
    names = [*params, *(name for name in saved if name not in params)]
    for name in names:
        if name not in params or name not in saved or params[name].shape != saved[name].shape:
            raise UserError(
                f"The checkpoint is not of this model: tensor {name} differs.", fix="Give the --model and --method it was made with."
            )
    for name, parameter in params.items():
        parameter.copy_(saved[name])
