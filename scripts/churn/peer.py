"""A real peer but for its model: all else is wired by `peer/wiring.py`, while computing is a sleep.

It starts in a third of the time, and several share a core without being late. Takes the peer's options, and:

    --sample_seconds S     how long one sample takes
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from peer.contracts import LatentBatch, PixelBatch
from peer.launch.command_line import parse
from peer.launch.launch import Launch
from peer.launch.resolving import resolve_run
from peer.launch.stopping import Stop
from peer.learner import Learner
from peer.machine.device import Precision, Rank, RankGroup
from peer.machine.placing import Placing
from peer.wiring import admitted, build_source, build_trainer, peer_id
from swarm.errors import run_program
from swarm.logs import setup_logging

PARAMETERS = 65_536


class Sleep:
    """A model without parts: its loss takes as long as it is told to, and pulls the parameters at random."""

    resolution_multiple = 1

    def __init__(self, weight: nn.Parameter, sample_seconds: float):
        self._weight, self._seconds = weight, sample_seconds

    def unread(self) -> tuple[nn.Module, ...]:
        return ()

    def encode(self, batch: PixelBatch, rng: torch.Generator) -> LatentBatch:
        return LatentBatch(batch.pixels, {})

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        count = len(batch.latents)
        time.sleep(self._seconds * count)
        return (self._weight * torch.randn(self._weight.shape, generator=rng)).mean().expand(count)


def main(argv: Sequence[str]) -> None:
    at = list(argv).index("--sample_seconds")
    sample_seconds = float(argv[at + 1])
    peer, given = parse([*argv[:at], *argv[at + 2 :]])
    torch.set_num_threads(1)
    setup_logging(debug=peer.debug, name=Path(peer.output_dir).name)
    stop, device = Stop().listen(), torch.device("cpu")
    joined = resolve_run(peer, given)
    with ExitStack() as closing:
        group = RankGroup(Rank(), device)
        closing.callback(group.close)
        launch = Launch(joined=joined, peer=peer, given=given, group=group, device=device, stopping=stop, closing=closing)
        own_id = peer_id(launch)
        launch = admitted(launch, own_id)
        trainer, _ = build_trainer(launch, sleeper(sample_seconds), build_source(launch, own_id), own_id)
        trainer.learning_rate = lambda samples, begun: 1.0
        trainer.run()  # without occasions: the swarm's own states are what a killed peer goes on from


def sleeper(sample_seconds: float) -> Learner:
    params = {"weight": nn.Parameter(torch.zeros(PARAMETERS // 64, 64)), "bias": nn.Parameter(torch.zeros(7))}
    model = Sleep(params["weight"], sample_seconds)
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    cpu = torch.device("cpu")
    precision = Precision(cpu, None, scaled=False, reason="it only sleeps")
    return Learner(model=model, encode=model.encode, params=params, optimizer=optimizer, precision=precision, place=Placing(cpu))


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
