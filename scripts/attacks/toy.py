"""A peer that learns a toy with a real `SwarmSync`: `python -m scripts.attacks.toy OUT STRATEGY [PEER ...] [--key=value ...]`.

A trainer, its sidecar and a p2pd, as everywhere; the model is one vector that follows a target, which moves round once in two minutes, so
that parameters that were overwritten, or do not move any more, show as a loss. Prints it every two seconds. Lives until it is killed.
--host_key=FILE: the run is for members, and this peer has its membership from whoever made that key, and a receipt for what it trained.
--averaging=NAME, --clip_members=N: the run's. --rate=R: the share of its way to the target that a step goes. --seconds=S: how long one takes.
--labels=turned: it learns the opposite.
"""

import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peer.config import PeerConfig
from peer.contracts import Params, Sync, SyncContext, SyncReport
from swarm.dht import Identity
from swarm.errors import run_program
from swarm.logs import setup_logging
from swarm.members import Members, sign_membership
from swarm.receipts import sign_receipt
from swarm.run_config import RunConfig
from swarm.signing import HostKey

BATCH, TARGET = 8, 48
PERIOD_SECONDS = 120.0
_TOLD_EVERY_SECONDS = 2.0
_ROWS = 1500
"""Of 100 elements: a state of 0.6 MB travels in three pieces."""
Receipt = Callable[[int, int], str]
"""(number, samples) of a contribution -> the host's word for it."""


def run_config(strategy: str, members_of: str = "", averaging: str = "mean", **given: Any) -> RunConfig:
    # An end, far away: a made-up state that is said to be beyond it would be the last. Betas: with the usual ones `gradients` follows the
    # target with a loss of 0.1 to 0.4, so nobody could tell a model that does not move any more (1); with these of 0.002.
    return RunConfig(
        model="toy", sync=strategy, target_batch_size=TARGET, total_samples=10**9, learning_rate=0.1, adam_beta1=0.5, adam_beta2=0.9,
        adam_weight_decay=0.0, members_of=members_of, averaging=averaging, **given,
    )  # fmt: skip


def read_run(strategy: str, host_key: HostKey | None, options: Mapping[str, str]) -> RunConfig:
    """As the command line has it."""
    clip = {"clip_members": float(options["clip_members"])} if "clip_members" in options else {}
    return run_config(strategy, host_key.public if host_key else "", options.get("averaging", "mean"), **clip)


def new_params() -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.zeros(_ROWS, 100)), "b": nn.Parameter(torch.zeros(7))}


def build(out: Path, run: RunConfig, peers: list[str], host_key: HostKey | None) -> tuple[Params, Sync, Receipt | None]:
    """The parameters, what averages them, and what stands in for the host's server in a run for members: it signs all that this peer says."""
    params, config = new_params(), PeerConfig(output_dir=str(out), host_maddrs=("/ip4/127.0.0.1/tcp/0",))
    members, receipt = Members(run), None
    if host_key:
        identity = Identity(config.identity_file)
        identity.close()
        members.own = sign_membership(host_key, run, identity.peer_id)
        receipt = partial(sign_receipt, host_key, run, identity.peer_id)
    context = SyncContext(run=run, peer=config, params=params, output_dir=out, initial_peers=tuple(peers), members=members)
    return params, importlib.import_module(f"peer.sync.{run.sync}").build(context), receipt


class Toy:
    """rate: the share of the way to its target that `move` goes; sign: -1 for the opposite target."""

    def __init__(self, params: Params, rate: float = 0.5, sign: int = 1):
        self._params, self._rate, self._sign = params, rate, sign
        phases = torch.Generator().manual_seed(0)
        self._phases = {name: torch.rand(p.shape, generator=phases) * 2 * math.pi for name, p in params.items()}
        self._told = 0.0

    @torch.no_grad()
    def gradients(self, now: float) -> float:
        """Set them, for the target at `now` (UNIX seconds); returns the loss."""
        turn, squares, count = 2 * math.pi * (now / PERIOD_SECONDS % 1), 0.0, 0
        for name, parameter in self._params.items():
            parameter.grad = parameter - self._sign * torch.sin(self._phases[name] + turn)
            squares, count = squares + float(parameter.grad.double().square().sum()), count + parameter.numel()
        return squares / count

    def tell(self, loss: float) -> None:
        if time.time() > self._told + _TOLD_EVERY_SECONDS:
            self._told = time.time()
            # JSON has no infinity; a loss that overflowed is as bad as any.
            print(json.dumps({"event": "loss", "time": self._told, "loss": loss if math.isfinite(loss) else 1e300}), flush=True)

    @torch.no_grad()
    def move(self) -> None:
        for parameter in self._params.values():
            parameter.add_(parameter.grad, alpha=-self._rate)
            parameter.grad = None


class Registered:
    """A sync whose contributions each have a receipt for exactly what was trained."""

    def __init__(self, sync: Sync, receipt: Receipt | None):
        self._sync, self._receipt, self._open = sync, receipt, 0

    def step(self, samples: int, loss: float | None = None) -> SyncReport:
        self._open += samples
        report = self._sync.step(samples, loss)
        if report.frozen is not None:
            if self._receipt:
                self._sync.registered(report.frozen, self._receipt(report.frozen, self._open))
            self._open = 0
        elif 0 in report.dropped:
            self._open = 0
        return report


def main() -> None:
    torch.set_num_threads(1)
    options = dict(argument[2:].split("=") for argument in sys.argv[1:] if argument.startswith("--"))
    out, strategy, *peers = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    setup_logging(name=Path(out).name)
    host_key = HostKey(Path(options["host_key"])) if "host_key" in options else None
    run = read_run(strategy, host_key, options)
    params, sync, receipt = build(Path(out), run, peers, host_key)
    print(json.dumps({"event": "run", "run_id": run.run_id}), flush=True)
    toy = Toy(params, float(options.get("rate", 0.5)), -1 if options.get("labels") == "turned" else 1)
    registered, report = Registered(sync, receipt), sync.catch_up()
    while not report.done:
        while report.wait or report.frozen is not None:
            report = registered.step(0)
            toy.tell(toy.gradients(time.time()))
        if report.done:
            break
        time.sleep(float(options.get("seconds", 0.4)))
        toy.tell(toy.gradients(time.time()))
        if sync.before_step():
            toy.move()
        report = registered.step(BATCH, 1.0)
    print(json.dumps({"event": "done"}), flush=True)
    sync.close()


if __name__ == "__main__":
    sys.exit(run_program(main))
