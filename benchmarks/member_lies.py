"""What one liar costs honest members, by arithmetic: the members' rows of `scripts/strangers`, without processes.

    .venv/bin/python benchmarks/member_lies.py
    .venv/bin/python benchmarks/member_lies.py --steps 40,4,4,4 --rules mean@20,centered@20

The toy of the rows (scripts/attacks/toy.py), the product's own clip, weights and centre, and the rows' measure of progress (progress.py). Each
round every honest member makes its steps, the liar contributes, and all go on from the average. A rule is an average and its
`--clip_members`. Printed are shares of the progress. `nobody`: what the rule takes in an honest run, where a mean without a clip takes nothing.
The others: what that liar takes from the honest run of the same rule. One process, no timing: what a liar costs in rounds, only the rows show.
"""

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import argument_parser, print_result
from peer.sync.engine.round.centering import centre, products
from scripts.attacks.progress import RATE, lost, progress
from scripts.attacks.toy import BATCH, PERIOD_SECONDS
from swarm.weights import counted, even_shares, factors

ROUND_SECONDS = 1.6
"""As the rows have them on two cores: 37 in a minute."""
_SIZE = 2000
_ROUNDS = 75
"""Two minutes, which is once round for the target; the first ten bring the swarm to it, as the rows' start does."""
_SETTLED = 10


@dataclass(frozen=True)
class Rule:
    """averaging, clip_members: of a run."""

    averaging: str
    clip_members: float

    def average(self, vectors: Tensor, samples: Sequence[int]) -> Tensor:
        """(size,): as reducers do with a vector of one part. vectors: (members, size); samples: as many as each counts."""
        clipped = vectors * torch.tensor(factors(vectors.norm(dim=1).tolist(), samples, self.clip_members))[:, None]
        shares = even_shares(list(samples)) if self.averaging == "centered" else None
        if shares is None:
            return torch.tensor([count / sum(samples) for count in samples]) @ clipped
        return centre(shares, products(clipped)).float() @ clipped


Lie = Callable[["Swarm"], Tensor]
"""What the liar contributes; it knows the last average, and where the target is."""


def noise(swarm: "Swarm") -> Tensor:
    """Ten times as long as the last average."""
    drawn = torch.randn(_SIZE, generator=swarm.rng)
    return drawn * (10 * swarm.last.norm() / drawn.norm())


LIES: dict[str, Lie] = {
    "sign-flip": lambda swarm: -swarm.last,
    "opposite": lambda swarm: -20 * swarm.last,
    "x10": lambda swarm: 10 * swarm.last,
    "x1e6": lambda swarm: 1e6 * swarm.last,
    "random": noise,
    "copies": lambda swarm: swarm.last,
    "over-claimed": lambda swarm: 0 * swarm.last,
    "wrong-labels": lambda swarm: swarm.learned(-1, swarm.usual),
}


class Swarm:
    """Honest members that make `steps` steps a round each, and perhaps a liar."""

    def __init__(self, rule: Rule, steps: Sequence[int], lie: Lie | None, seed: int):
        self.rng = torch.Generator().manual_seed(seed)
        self._rule, self._steps, self._lie = rule, steps, lie
        self._phases = torch.rand(_SIZE, generator=self.rng) * 2 * math.pi
        self._at, self._state, self.last = float(seed), torch.zeros(_SIZE), torch.zeros(_SIZE)
        self.usual = sorted(steps)[(len(steps) - 1) // 2]
        """Steps of the lower median: as much as a member without a receipt counts at most."""

    def target(self) -> Tensor:
        return torch.sin(self._phases + 2 * math.pi * self._at / PERIOD_SECONDS)

    def learned(self, sign: int, steps: int) -> Tensor:
        """What `steps` steps move towards the target (1), or towards its opposite (-1)."""
        return (sign * self.target() - self._state) * (1 - (1 - RATE) ** steps)

    def round(self) -> float:
        """Train, average, and go on from there. Returns the mean square of what the state was off when it began."""
        self._at += ROUND_SECONDS
        loss = float((self._state - self.target()).square().mean())
        vectors = [self.learned(1, steps) for steps in self._steps]
        samples, proved = [BATCH * steps for steps in self._steps], [True] * len(self._steps)
        if self._lie:
            # As the rows' do: two rounds' samples, without a receipt. It counts like the usual member.
            vectors, samples, proved = [*vectors, self._lie(self)], [*samples, 2 * sum(samples)], [*proved, False]
        self.last = self._rule.average(torch.stack(vectors), counted(samples, proved))
        self._state = self._state + self.last
        self._state.clamp_(-1e15, 1e15)  # nothing is left to be lost, and a float32 still holds its square
        return loss

    def progress(self) -> float:
        losses = [self.round() for _ in range(_ROUNDS)]
        return progress([losses[_SETTLED:]])


def costs(rule: Rule, steps: Sequence[int], seeds: Sequence[int]) -> dict[str, float]:
    """The share of the progress that each liar takes, by name; `nobody`: that the rule itself takes in an honest run."""

    def made(averaged_by: Rule, lie: Lie | None = None) -> float:
        return fmean(Swarm(averaged_by, steps, lie, seed).progress() for seed in seeds)

    honest = made(rule)
    own = {"nobody": lost(honest, made(Rule("mean", 0.0)))}
    return own | {name: lost(made(rule, lie), honest) for name, lie in LIES.items()}


def rule_of(text: str) -> Rule:
    averaging, _, clip = text.partition("@")
    return Rule(averaging, float(clip))


def main() -> None:
    parser = argument_parser(__doc__)
    rules = ["@".join(pair) for pair in itertools.product(("mean", "centered"), ("20", "3", "1"))]
    parser.add_argument("--rules", default=",".join(rules), help="AVERAGING@CLIP_MEMBERS, with commas between them")
    parser.add_argument("--steps", default="4,4,4,4", help="of each honest member in a round")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, found = [int(count) for count in args.steps.split(",")], {}
    print(f"{'':14}" + "".join(f"{name:>13}" for name in ("nobody", *LIES)))
    for rule in args.rules.split(","):
        found[rule] = costs(rule_of(rule), steps, range(args.seeds))
        print(f"{rule:14}" + "".join(f"{share:13.3f}" for share in found[rule].values()), flush=True)
    rounded = {rule: {name: round(share, 3) for name, share in shares.items()} for rule, shares in found.items()}
    print_result({"progress_lost": rounded, **vars(args)})


if __name__ == "__main__":
    main()
