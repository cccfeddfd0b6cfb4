"""The training loop. It knows the contracts and nothing behind them."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peer.contracts import LatentBatch, Model, Params, PixelBatch, Sync, SyncReport
from swarm.digest import seed_of
from swarm.errors import ExitCode, UserError

if TYPE_CHECKING:
    from peer.figures.metrics import Progress
    from peer.loop.accounts import Accounts
    from peer.loop.clipping import Clip
    from peer.loop.ema import Ema
    from peer.loop.fused import FusedStep
    from peer.loop.occasions import Occasions
    from peer.machine.device import Precision, RankGroup
    from peer.samples.feed import Feed, Work

log = logging.getLogger(__name__)

MAX_BAD_STEPS = 10
_LEAST_SCALE = 1.0
"""Of fp16's losses: where the gradients overflow unscaled, fp16 cannot hold them, and a smaller scale would lose the small ones."""
_REST_SECONDS = 0.2
_OPTIMIZERS_OPTIONS = ("weight_decay", "betas", "eps")
"""Of a group of parameters, what --adam_weight_decay, --adam_beta1, --adam_beta2 and --adam_epsilon say. All else is the loop's (the rate) or
what the optimizer counts there, such as Prodigy's estimate `d` and the steps `k` of schedule-free AdamW."""


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
    learning_rate: Callable[[int, int], float]
    """From samples in the committed state, and those that it had when the optimizer began with new moments."""
    clip: "Clip"
    fused: "FusedStep | None" = None
    """What steps each tensor as its gradient comes, if not all are stepped together."""
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
    """What else is done every N global steps."""
    by_rounds: bool
    """Whether a global step is a committed round, as in a swarm, or an optimizer step of ours."""
    resting: Callable[[], bool] = lambda: False
    """Whether this machine's owner wants it for himself for a while."""
    gradient_point: Callable[[], AbstractContextManager] = nullcontext
    """Within it, the parameters are where the optimizer wants gradients taken: schedule-free AdamW's are elsewhere than its result."""
    trial: Callable[[Callable[[], object] | None], bool] | None = None
    """Tries a faster way to compute on this rank's first micro-batch (None: it has none); False: to be called again at the next step."""
    compare: Callable[[Callable[[], Tensor]], bool] | None = None
    """Asked for this rank's first micro-batch, with what computes the sum of its losses; False: to be asked again at the next step."""
    alive: Callable[[str], None] = lambda doing: None
    """Called as a sign of life, with what is being done now; "": the same as before."""
    boundary: Callable[[], None] = lambda: None
    """Where a device that only notes down what it is asked for (XLA) is to compute it: once per program."""
    stepped: Callable[[], None] = lambda: None
    """Told after every local step."""
    average: "Ema | None" = None
    """Of the weights, where one is kept: rank 0 alone."""
    averages: bool = False
    """Whether the parameters are worth what the swarm's state is; if not, what this peer trained is in them for good."""
    noise_seed: str
    """Differs between peers: equal noise would correlate their gradients."""
    step: int = 0
    trained: int = 0
    """Samples of this peer's counted steps."""
    _begun: int | None = None
    """Samples in the committed state when the optimizer began with new moments; None before its first step."""
    _bad_steps: int = 0
    _broke_off: bool = False
    """Whether steps that broke off took samples back since this peer's last contribution."""
    _scaler: torch.amp.GradScaler = field(init=False)
    _unread: Sequence[Tensor] = field(init=False)
    """Those of `params` that no loss depends on: their gradients are 0, and all that an optimizer would do is to decay them."""

    def __post_init__(self) -> None:
        places = {id(parameter) for module in self.model.unread() for parameter in module.parameters()}
        self._unread = [parameter for parameter in self.params.values() if id(parameter) in places]
        self._scaler = torch.amp.GradScaler(self.precision.device.type, enabled=self.precision.scaled)

    def run(self) -> bool:
        """Train to the end, leave the swarm and save; False if someone asked to stop before the end. Raises UserError when training cannot go on."""
        self.alive("catching up")
        done = self._follow(self.sync.catch_up())
        self.group.begin()
        self.alive("making the first step")
        self.occasions.start(self.global_step)
        done = done or self._rest()
        for work in self.feed if not done else ():
            done = self._advance(work) if work else self._follow(self.sync.step(0))
            self.alive("saving and drawing")
            self.occasions.reach(self.global_step, end=done)
            self.alive("training")
            if done := done or self._rest():
                break
        ended = done or not self.stopping()  # before we leave: to stop while we wait for the others' last round loses no step
        self._leave()
        if self.average:  # of the last rounds, which may have been committed while we left
            self.average.follow(self.global_step)
        self.alive("saving")
        if self.has_learned:
            self.checkpoint()
        self.accounts.give_back_aside()
        return ended

    @property
    def has_learned(self) -> bool:
        """Whether the parameters are more than the base model: a peer that came to no state of its run has nothing to save and to export."""
        return bool(self.sync.samples or (self.trained and not self.averages))

    @property
    def global_step(self) -> int:
        return self.sync.round if self.by_rounds else self.step

    def _advance(self, work: "Work") -> bool:
        """One local step, told to the swarm and shown; whether the run is done."""
        loss = self._train(work)
        samples = len(work.keys) if loss is not None else 0
        self.trained += samples
        done = self._follow(self.sync.step(samples, loss))
        group = self.optimizer.param_groups[0]
        self.progress.stepped(
            step=self.step,
            samples=samples,
            loss=loss,
            learning_rate=group["lr"] * group.get("d", 1.0),  # d: the rate that Prodigy found
            round=self.sync.round,
            committed=self.sync.samples,
            peers=self.sync.peers,
        )
        self.stepped()
        return done

    def _train(self, work: "Work") -> float | None:
        """One local step: forward, backward and, when the strategy says so, the optimizer. Returns the mean loss, None if it did not count."""
        self.step += 1
        self.accounts.unusable(work.bad)
        if not work.keys:
            return None
        with self.gradient_point():
            return self._learn(work)

    def _learn(self, work: "Work") -> float | None:
        if self.compare and work.batches and self.compare(lambda: self._scaler.scale(self._losses(work.batches[0], work.first).sum())):
            self.compare = None
        loss, use_gradients = self._prepare_by_tensor(work) if self.fused else self._prepare(work)
        if not math.isfinite(loss):
            self.optimizer.zero_grad()
            self.accounts.set_aside(work.keys)
            return self._count_bad(f"the loss is {loss}")
        if not use_gradients():
            if self._scaler.is_enabled() and self._scaler.get_scale() > _LEAST_SCALE:  # it seeks its scale: each such step halves it
                self.accounts.lost(work.keys)
                return None
            self.accounts.set_aside(work.keys)  # as they would break off the next step that they are in
            return self._count_bad("a gradient is not finite")
        if not self._broke_off:  # else a picture that breaks each tenth step off would undo all others for ever
            self._bad_steps = 0
        self.accounts.trained(work.keys)
        return loss

    def _prepare(self, work: "Work") -> tuple[float, Callable[[], bool]]:
        """The mean of this step's losses, whose gradients are there; and what uses these, False when they are not finite and nothing was changed."""
        loss, norms = self._accumulate(work)
        return loss, partial(self._use_gradients, len(work.keys), norms)

    def _prepare_by_tensor(self, work: "Work") -> tuple[float, Callable[[], bool]]:
        """As `_prepare`, of one micro-batch whose gradients are made when they are used."""
        (pixels,) = work.batches
        losses = self._losses(pixels, work.first)
        return losses.detach().sum().item() / len(work.keys), partial(self._step_by_tensor, losses, len(work.keys))

    def _accumulate(self, work: "Work") -> tuple[float, Tensor]:
        """Add the gradient of the SUM of this step's losses, over all ranks, to the parameters' `.grad`.

        Returns the losses' mean, and the gradients' norms, float32 on the CPU, as `clip` wants them.
        """
        if self.trial and self.trial(partial(self._backward, work.batches[0], work.first) if work.batches else None):
            self.trial = None
        total = torch.zeros((), device=self.precision.device)
        for number, pixels in enumerate(work.batches, start=work.first):
            if number > work.first:
                self.boundary()
            total += self._backward(pixels, number).sum()
            self.alive("")  # on a CPU, 32 micro-batches of 20 s take longer than --stall_seconds, 600; the first step stays the first one
        for parameter in self.params.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.params.values()]
        if self.group.world > 1:
            self.boundary()  # the other ranks' sums are added on the host
        self.group.sum_([total, *gradients])
        norms = self.clip.norms(gradients)
        self.boundary()
        # All at once: each question to a device waits for it.
        told = torch.cat([total[None], norms]).cpu()
        return told[0].item() / len(work.keys), told[1:]

    def _backward(self, pixels: PixelBatch, number: int) -> Tensor:
        """Add the gradient of the sum of a micro-batch's losses; returns these, (B,)."""
        losses = self._losses(pixels, number)
        self._scaler.scale(losses.sum()).backward()
        return losses.detach()

    def _losses(self, pixels: PixelBatch, number: int) -> Tensor:
        """(B,); every random number in it follows from the peer, the step and the micro-batch, so a resumed run repeats them."""
        seed = seed_of(self.noise_seed, self.step, number)
        # For whatever draws without being handed a generator: dropout. torch.manual_seed would note the stack of calls for each kind of
        # device that is not there, 0.5 ms here and 2 ms in a test.
        (torch.default_generator if self.precision.device.type == "cpu" else torch).manual_seed(seed)
        rng = torch.Generator(self.precision.rng_device).manual_seed(seed)
        with self.precision.autocast():
            losses = self.model.loss(self.encode(pixels, rng), rng)
        return losses if pixels.weights is None else losses * pixels.weights.to(losses.device)

    def _use_gradients(self, samples: int, norms: Tensor) -> bool:
        """Hand the step's gradients, of these norms, to the strategy, or step the optimizer; False when they are not finite and nothing was changed."""
        self._set_rates()
        finite, norms_of_mean = bool(norms.isfinite().all()), norms / self._scaler.get_scale() / samples
        self._scaler.unscale_(self.optimizer)
        if finite and self.sync.before_step():
            self.clip.average_([parameter.grad for parameter in self.params.values()], samples, norms_of_mean)
            for parameter in self._unread:
                parameter.grad = None  # passed over
            self._scaler.step(self.optimizer)
        self._scaler.update()
        if self._scaler.get_scale() < _LEAST_SCALE:
            self._scaler.update(_LEAST_SCALE)
        self.optimizer.zero_grad()
        self.boundary()
        return finite

    def _step_by_tensor(self, losses: Tensor, samples: int) -> bool:
        """As `_use_gradients`, with the gradients of the sum of `losses`, which this makes.

        Where one is not finite after others were used, a swarm's parameters go back to what others know of them.
        """
        self._set_rates()
        stepped = self.fused.backward(losses.sum(), samples, self._unread)
        self.boundary()
        if stepped.broken and stepped.tensors:
            log.warning(
                "step=%d broke off after %d tensors; its samples do not count, and a swarm trains its open samples again",
                self.step,
                stepped.tensors,
            )
            self._broke_off = self.averages
            self._take(self.sync.undo())
        return not stepped.broken

    def _set_rates(self) -> None:
        samples = self.sync.samples
        self._begun = samples if self._begun is None else min(self._begun, samples)  # less after a state was discarded
        rate = self.learning_rate(samples, self._begun)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)

    def _count_bad(self, what: str) -> None:
        self._bad_steps += 1
        log.warning("skipped step=%d because %s", self.step, what)
        if self._bad_steps >= MAX_BAD_STEPS:
            raise UserError(
                f"{MAX_BAD_STEPS} steps failed before a contribution was complete: {what}."
                if self._broke_off
                else f"{MAX_BAD_STEPS} steps in a row failed: {what}.",
                fix="Lower --learning_rate, try --mixed_precision bf16 or no, and look at the pictures that the last lines name.",
                code=ExitCode.FAILED,
            )

    def _follow(self, report: SyncReport) -> bool:
        """Do what the swarm's report says, waiting while it says so; whether the run is done."""
        report = self._take(report)
        while report.wait or report.frozen is not None:
            if report.frozen is None and self.group.broadcast_object(self.stopping()):
                break
            report = self._take(self.sync.step(0))
        return report.done

    def _rest(self) -> bool:
        """Wait while this machine's owner wants it: what was trained is averaged, what was leased goes to others; whether the run is done meanwhile."""
        report, resting = None, self.group.broadcast_object(self.resting())
        if not resting:
            return False
        self.sync.rest(True)
        self.feed.rest(True)
        while resting:
            self.alive("resting")
            report = self._take(self.sync.step(0))
            if not report.wait:
                time.sleep(_REST_SECONDS)
            resting = not report.done and self.group.broadcast_object(self.resting() and not self.stopping())
        self.sync.rest(False)
        self.feed.rest(False)
        self.alive("training")
        return self._follow(self.sync.step(0))

    def _leave(self) -> None:
        report = SyncReport(wait=True)
        while report.wait:
            report = self._take(self.sync.leave(hurry=self.group.broadcast_object(self.stopping())))

    def _take(self, report: SyncReport) -> SyncReport:
        """Tell the source what became of our samples; a contribution that it refuses is withdrawn, and the answer to that returned."""
        if report.frozen is not None:
            receipt = self.group.broadcast_object(self.accounts.register(report.frozen))
            if receipt is None:
                self.accounts.apply(report)
                report = self.sync.withdraw(report.frozen)
            else:
                self._broke_off, self._bad_steps = False, 0
                if receipt:
                    self.sync.registered(report.frozen, receipt)
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
            "begun": self._begun,
            "params": {name: parameter.detach() for name, parameter in self.params.items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "sync": self.sync.state_dict(),
            "feed": self.feed.state_dict(),
            "accounts": self.accounts.state_dict(),
            "average": self.average.state_dict() if self.average else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, the same on all ranks. Raises UserError when it is of other parameters, or of a run without a swarm."""
        if self.group.is_main and state["sync"].keys() != self.sync.state_dict().keys():
            raise UserError(
                "The checkpoint was made with another --sync: only one of the two runs has a swarm.",
                fix="Start without --resume_from_checkpoint, in another --output_dir; to build on it, give its result as the --model of a new run.",
            )
        load_params(self.params, state["params"])
        self.step, self.trained, self._begun = state["step"], state["trained"], state["begun"]
        load_moments(self.optimizer, state["optimizer"])
        if state["scaler"]:  # empty when that start computed in another precision
            self._scaler.load_state_dict(state["scaler"])
        self.feed.load_state_dict(state["feed"])
        self.accounts.load_state_dict(state["accounts"])
        self.accounts.apply(self.sync.load_state_dict(state["sync"]))
        if self.average and state.get("average"):
            self.average.load_state_dict(state["average"])


@torch.no_grad()
def load_params(params: Params, saved: Mapping[str, Tensor], fix: str = "Give the --model and --method it was made with.") -> None:
    """Overwrite `params` in place. Raises UserError naming the first tensor that differs in name or shape; fix: what to do then."""
    names = [*params, *(name for name in saved if name not in params)]
    for name in names:
        if name not in params or name not in saved or params[name].shape != saved[name].shape:
            raise UserError(f"The checkpoint is not of this model: tensor {name} differs.", fix=fix)
    for name, parameter in params.items():
        parameter.copy_(saved[name])


def load_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take over an optimizer's state, but for what this start's options say: a saved group brings back those of the start that saved it."""
    own = [{name: group[name] for name in _OPTIMIZERS_OPTIONS if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)


def load_result(params: Params, loaded: Mapping[str, Any]) -> None:
    """For `dd-export`: overwrite `params` by what the checkpoint's run would export, their average where one was kept (--use_ema).

    Raises as `load_params`.
    """
    average = (loaded.get("average") or {}).get("average")
    kept = average and average["optimization_step"]
    saved = dict(zip(loaded["params"], average["shadow_params"], strict=True)) if kept else loaded["params"]
    load_params(params, saved, fix="Give the base model it was made with as --model.")
