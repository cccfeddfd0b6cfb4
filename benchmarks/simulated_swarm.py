"""How many samples a swarm would need, simulated: its replicas one after the other in one process, without a network.

    .venv/bin/python benchmarks/simulated_swarm.py --peers 2 --batch 16 --sync diloco --round 512 --rate 2e-3 --seeds 1 2

The quickstart's model, digits, judge and optimizer, and the product's own outer steps; exact wire. One core, no timing: figures are samples
until 95 % of 200 drawn digits are read right, judged as in parity.py. For what is too slow to try with real peers. Prints a line per look
and, as its last line, one JSON object.
"""

import argparse
import copy
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from benchmarks import parity
from benchmarks.common import argument_parser, print_result
from peer.contracts import LatentBatch, Member
from peer.loop.schedule import build_schedule
from peer.models import stable_diffusion
from peer.sync.diloco import DiLoCo
from peer.sync.engine.codec import Wire
from peer.sync.engine.outer import RoundInfo
from peer.sync.engine.round.centering import centre, products
from peer.sync.engine.round.clipping import Clipping
from peer.sync.parameters import Parameters
from scripts.demo import digits, quickstart, tiny_model
from swarm.run_config import RunConfig
from swarm.weights import even_shares


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples per local step")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--warmup", type=int, default=0, help="samples of the swarm over which the rate rises")
    parser.add_argument("--horizon", type=int, default=0, help="samples of the swarm over which the rate falls to nothing")
    parser.add_argument("--falls", choices=("linear", "cosine"), default="linear", help="how it falls")
    parser.add_argument("--late", type=int, default=0, help="after N samples a peer with new moments replaces the first one; 0: nobody")
    parser.add_argument("--late_rate", choices=("rises", "full"), default="rises", help="its rate: rises over --warmup as the product's, or is the run's at once")
    parser.add_argument("--sync", choices=("none", "parameters", "diloco"), default="parameters")
    parser.add_argument("--outer_rate", type=float, default=0.7)
    parser.add_argument("--outer_momentum", type=float, default=0.9)
    parser.add_argument("--round", type=int, default=2048)
    parser.add_argument("--averaging", choices=("mean", "centered"), default="mean")
    parser.add_argument("--clip", type=float, default=20.0, help="--clip_members")
    parser.add_argument("--liar", type=float, default=1.0, help="the last peer contributes what it learned times this: -1 the opposite, -20 as far as the clip lets it")
    parser.add_argument("--mislabelled", action="store_true", help="the last peer learns every digit as another one")
    parser.add_argument("--ema", type=float, default=0, help="judge a running mean of the states over about N samples; 0: the states")
    parser.add_argument("--look_from", type=int, default=8192)
    parser.add_argument("--total_samples", type=int, default=57_344)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    torch.set_num_threads(1)
    quickstart.quiet_libraries()
    found = {}
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        quickstart.prepare(Path(folder))
        school = School.open(Path(folder) / "base")
        for seed in args.seeds:
            seen = []
            for samples, share in looks(school, args, seed):
                seen.append((samples, share))
                print(f"seed {seed}  {samples:6,} samples  {share:.1%}", flush=True)
            found[seed] = parity.crossing(seen, parity.WANTED)
    print_result({"samples": found, **vars(args)})


def looks(school: "School", args: argparse.Namespace, seed: int) -> Iterator[tuple[int, float]]:
    """(samples, share read right) from `look_from` on, until WANTED was seen."""
    swarm = Swarm(school, args, seed)
    due, share = args.look_from, 0.0
    while share < parity.WANTED and swarm.samples < args.total_samples:
        swarm.round()
        if swarm.samples >= due:
            share = school.exam(swarm.judged)
            due = parity.next_look(swarm.samples, share)
            yield swarm.samples, share


class Swarm:
    """Replicas that train and average; `vectors` is what they agree on: the anchor and the outer step's tensors."""

    def __init__(self, school: "School", args: argparse.Namespace, seed: int):
        self._school, self._args, self.samples, self._number = school, args, 0, 0
        self._pupils = [school.pupil() for _ in range(args.peers)]
        self._optimizers = [torch.optim.AdamW(one.parameters(), lr=args.rate, betas=(0.9, args.beta2), fused=True) for one in self._pupils]
        self._begun = [0] * args.peers
        lessons = school.lessons(args.batch, torch.Generator().manual_seed(seed))
        self._lessons = [lessons] * args.peers
        if args.mislabelled:
            self._lessons[-1] = school.lessons(args.batch, torch.Generator().manual_seed(-seed), shift=3)
        self._clipping = Clipping(args.clip)
        self._rate = build_schedule(
            RunConfig(
                learning_rate=args.rate, lr_warmup_samples=args.warmup, target_batch_size=args.round,
                **({"lr_scheduler": args.falls, "total_samples": args.horizon} if args.horizon else {}),
            )
        )  # fmt: skip
        self._outer = DiLoCo(args.outer_rate, args.outer_momentum) if args.sync == "diloco" else Parameters()
        anchor = vector(self._pupils[0])
        self.vectors = [anchor, *(torch.zeros_like(anchor) for _ in range(self._outer.slots))]
        self.judged = anchor

    @torch.no_grad()
    def round(self) -> None:
        """Each replica's local steps, then the outer step; one machine (`none`) goes on where it is."""
        args, anchor, before = self._args, self.vectors[0], self.samples
        steps = max(1, round(args.round / args.peers / args.batch))
        if args.late and not any(self._begun) and before >= args.late:
            self._begun[0] = before
            self._optimizers[0].state.clear()
        for pupil, optimizer, lessons, begun in zip(self._pupils, self._optimizers, self._lessons, self._begun, strict=True):
            optimizer.param_groups[0]["lr"] = self._rate(before, begun if args.late_rate == "rises" else 0)
            for _ in range(steps):
                self._school.teach(pupil, optimizer, next(lessons))
        self.samples, self._number = before + steps * args.batch * args.peers, self._number + 1
        learned = torch.stack([vector(pupil) - anchor for pupil in self._pupils])
        learned[-1] *= args.liar
        mean = self._average(learned, steps * args.batch)
        self.vectors = self._outer.outer_step(self.vectors, mean, RoundInfo(self._number, before, float(mean.norm())))
        for pupil in self._pupils:
            vector_to_parameters(self.vectors[0].clone(), pupil.parameters())
        # As diffusers' EMAModel begins: with little weight on what was before anything was learned.
        keep = min(math.exp((before - self.samples) / args.ema), (1 + self._number) / (10 + self._number)) if args.ema else 0.0
        self.judged = self.judged * keep + self.vectors[0] * (1 - keep)

    def _average(self, learned: Tensor, samples: int) -> Tensor:
        """As the product's reducers do, each with a part. learned: (peers, size), in place."""
        members = [Member(str(number), 1, samples) for number in range(len(learned))]
        learned *= torch.tensor(self._clipping.factors(members, learned.norm(dim=1).tolist()))[:, None]
        shares = even_shares([samples] * len(learned)) if self._args.averaging == "centered" else None
        if shares is None:
            return learned.mean(0)
        parts = [learned[:, part.start : part.end] for part in Wire("fp32", learned.shape[1]).parts]
        return torch.cat([torch.mv(part.T, centre(shares, products(part)).float()) for part in parts])


def vector(pupil: nn.Module) -> Tensor:
    return parameters_to_vector(pupil.parameters()).detach().clone()


@dataclass
class School:
    """The quickstart's model and digits, encoded once."""

    model: stable_diffusion.StableDiffusion
    mean: Tensor
    std: Tensor
    """(1500, C, H, W) of the latents."""
    text: Tensor
    """(11, 77, width): the ten digits' captions, and none."""
    labels: Tensor
    judge: digits.Judge
    fresh: nn.Module
    """The UNet that has learned nothing: `model.unet` is whoever is being taught."""

    @classmethod
    @torch.no_grad()
    def open(cls, base: Path) -> "School":
        model = stable_diffusion.load(base, torch.device("cpu"), RunConfig())
        ink, labels = digits.load()
        pixels = tiny_model.to_pixels(digits.pictures(ink[: digits.TRAIN_COUNT]))
        mean, std = model.encode_pixels(pixels).chunk(2, dim=1)
        captions = [digits.caption(digit) for digit in range(10)] + [""]
        text = model.encode_text(captions)["states"]
        known = torch.from_numpy(labels[: digits.TRAIN_COUNT])
        return cls(model, mean, std, text, known, digits.Judge.from_real_digits(), copy.deepcopy(model.unet))

    def pupil(self) -> nn.Module:
        return copy.deepcopy(self.fresh).train()

    def lessons(self, batch: int, rng: torch.Generator, ucg: float = 0.1, shift: int = 0) -> Iterator[tuple[LatentBatch, torch.Generator]]:
        """Batches for ever, each picture once an epoch; shift: how many digits further each is said to be than it is."""
        order = torch.empty(0, dtype=torch.long)
        while True:
            if len(order) < batch:
                order = torch.cat([order, torch.randperm(len(self.labels), generator=rng)])
            some, order = order[:batch], order[batch:]
            latents = self.mean[some] + self.std[some] * torch.randn(self.mean[some].shape, generator=rng)
            asked = torch.where(torch.rand(batch, generator=rng) < ucg, 10, (self.labels[some] + shift) % 10)
            yield LatentBatch(latents, {"states": self.text[asked]}), rng

    @torch.enable_grad()
    def teach(self, pupil: nn.Module, optimizer: torch.optim.Optimizer, lesson: tuple[LatentBatch, torch.Generator]) -> None:
        self.model.unet = pupil
        self.model.loss(*lesson).mean().backward()
        clip_grad_norm_(pupil.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def exam(self, params: Tensor) -> float:
        """The share of drawn digits that are read right with these parameters."""
        pipeline = self.model.pipeline
        vector_to_parameters(params.clone(), pipeline.unet.parameters())
        return parity.read_right(pipeline, self.judge)


if __name__ == "__main__":
    main()
