"""A real peer but for its model: dataset server, accounts, loop and swarm as in `peer/finetune.py`, while computing is a sleep.

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

from peer import finetune
from peer.accounts import Accounts
from peer.batches import Decoder
from peer.buckets import Buckets
from peer.contracts import LatentBatch, PixelBatch
from peer.device import Precision, Rank, RankGroup
from peer.feed import Feed
from peer.metrics import Progress
from peer.occasions import Occasions
from peer.ranked import RankedSync
from peer.stopping import Stop
from peer.train import Trainer
from swarm.errors import run_program
from swarm.logs import setup_logging

PARAMETERS = 65_536


class Sleep:
    """A model without parts: its loss takes as long as it is told to, and pulls the parameters at random."""

    def __init__(self, weight: nn.Parameter, sample_seconds: float):
        self._weight, self._seconds = weight, sample_seconds

    def encode(self, batch: PixelBatch, rng: torch.Generator) -> LatentBatch:
        return LatentBatch(batch.pixels, {})

    def loss(self, batch: LatentBatch, rng: torch.Generator) -> Tensor:
        count = len(batch.latents)
        time.sleep(self._seconds * count)
        return (self._weight * torch.randn(self._weight.shape, generator=rng)).mean().expand(count)


def main(argv: Sequence[str]) -> None:
    at = list(argv).index("--sample_seconds")
    sample_seconds = float(argv[at + 1])
    peer, given = finetune.parse([*argv[:at], *argv[at + 2 :]])
    torch.set_num_threads(1)
    setup_logging(debug=peer.debug, name=Path(peer.output_dir).name)
    stop, device = Stop().listen(), torch.device("cpu")
    joined = finetune.resolve_run(peer, given)
    output = finetune.prepare_output(peer)
    with ExitStack() as closing:
        group = RankGroup(Rank(), device)
        closing.callback(group.close)
        own_id = finetune.peer_id(peer, output)
        params = {"weight": nn.Parameter(torch.zeros(PARAMETERS // 64, 64)), "bias": nn.Parameter(torch.zeros(7))}
        source = finetune.build_source(joined, peer, group, output, own_id)
        closing.callback(source.close)
        sync = finetune.build_sync(joined, peer, params, group, output)
        closing.callback(sync.close)
        micro = {"batch_samples": peer.train_batch_size, "accumulation": peer.gradient_accumulation_steps}
        feed = Feed(source, Decoder(joined.run), group, stopping=stop, buckets=Buckets.of(joined.run, 1), **micro)
        closing.callback(feed.close)
        progress = Progress(output / "metrics.jsonl", total_samples=joined.run.total_samples)
        closing.callback(progress.close)
        model = Sleep(params["weight"], sample_seconds)
        Trainer(
            model=model,
            encode=model.encode,
            params=params,
            optimizer=torch.optim.SGD(params.values(), lr=1.0),
            learning_rate=lambda samples: 1.0,
            max_grad_norm=1.0,
            precision=Precision(device, None, scaled=False, reason=""),
            sync=RankedSync(sync, group, params),
            feed=feed,
            accounts=Accounts(source),
            group=group,
            progress=progress,
            stopping=stop,
            save=lambda state, about: None,  # the swarm's own states are what a killed peer goes on from
            occasions=Occasions(),
            by_rounds=True,
            noise_seed=own_id,
        ).run()


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
