"""`--sync gradients` against one process that takes the whole batch: the same samples in every round, so the same parameters.

Real `SwarmSync` peers, each with its sidecar, meet on loopback; what they train is two small layers, so that it takes seconds. Which
sample is in which round is chance (peers differ in speed, and one comes late); so each peer notes what it put into which contribution, and
the one process is given, round by round, all samples of the contributions that the swarm says are in it.
"""

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peer.config import PeerConfig
from peer.contracts import SyncContext, SyncReport
from peer.sync import gradients
from scripts.demo.results import read_lines
from swarm.identity import Identity
from swarm.ports import free_port
from swarm.run_config import RunConfig

ROUNDS = 20
JOIN_AT_ROUND = 10
BATCHES = (3, 5, 8, 13, 7)  # samples per step: no two peers bring equally many
STEP_SECONDS = 0.02
DEADLINE_SECONDS = 240.0

RUN = RunConfig(model="two layers", sync="gradients", wire="fp32", target_batch_size=192, optimizer="adamw", learning_rate=1e-3)

Params = dict[str, nn.Parameter]
Contribution = tuple[str, int]
"""A peer's id and the number of its contribution."""


def max_relative_difference(peers: int, folder: Path) -> float:
    """`peers` peers from the start and one more from round JOIN_AT_ROUND on, until all have ROUNDS rounds behind them.

    Returns how far any peer's parameters are from the one process's after the same rounds: the largest difference in a tensor over its
    largest value. Raises TimeoutError, and AssertionError where the swarm was not the one that this is about.
    """
    swarm = run_swarm(peers, folder)
    made = {line["digest"]: line for one in swarm for line in one.rounds()}
    samples = {(peer.peer_id, number): indices for peer in swarm for number, indices in peer.contributions.items()}
    found = 0.0
    for peer in swarm:
        rounds = ancestry(peer.held_digest, made)
        late = [number for number, members in enumerate(rounds, 1) if any(member == swarm[-1].peer_id for member, _ in members)]
        assert late and JOIN_AT_ROUND < min(late) < ROUNDS, f"the late peer has a part in the rounds {late}"
        joint = sum(len(members) >= peers for members in rounds)
        assert joint > ROUNDS // 2, f"only {joint} of {len(rounds)} rounds are of {peers} peers or more"
        found = max(found, difference(peer.held, alone(rounds, samples)))
    return found


def ancestry(digest: str, made: Mapping[str, Mapping[str, Any]]) -> list[list[Contribution]]:
    """What is in each round, from the first to the state of this digest; made: the line that each state has in a peer's rounds.jsonl.

    By digest, not by the rounds' numbers: a state that was made and then lost to a better one has a number, too.
    """
    rounds = []
    while digest in made:
        rounds.append([(peer, number) for peer, number, _ in made[digest]["members"]])
        if made[digest]["round"] == 1:
            return rounds[::-1]
        digest = made[digest]["parent"]
    raise KeyError(f"nobody noted how the state {digest[:8]} was made")


def alone(rounds: Sequence[Sequence[Contribution]], samples: Mapping[Contribution, Sequence[int]]) -> dict[str, Tensor]:
    """One process with torch's own AdamW: a step for each round, on all the samples in it at once."""
    params = fresh_params()
    betas = (RUN.adam_beta1, RUN.adam_beta2)
    optimizer = torch.optim.AdamW(
        params.values(), lr=RUN.learning_rate, betas=betas, eps=RUN.adam_epsilon, weight_decay=RUN.adam_weight_decay
    )
    for members in rounds:
        batch = [index for contribution in members for index in samples[contribution]]
        optimizer.zero_grad()
        losses(params, batch).mean().backward()
        nn.utils.clip_grad_norm_(params.values(), RUN.max_grad_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in params.items()}


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


def fresh_params() -> Params:
    rng = torch.Generator().manual_seed(0)
    shapes = {"first": (64, 16), "bias": (64,), "second": (4, 64)}
    return {name: nn.Parameter(torch.randn(shape, generator=rng) / shape[-1] ** 0.5) for name, shape in shapes.items()}


def losses(params: Params, indices: Sequence[int]) -> Tensor:
    """(B,) one loss per sample; sample `index` is the same in every process."""
    drawn = torch.stack([torch.randn(20, generator=torch.Generator().manual_seed(index)) for index in indices])
    inputs, wanted = drawn[:, :16], drawn[:, 16:]
    guessed = torch.tanh(inputs @ params["first"].T + params["bias"]) @ params["second"].T
    return (guessed - wanted).square().mean(dim=1)


class Meeting:
    """Keeps the peers in step, however loaded the machine is: rounds of this toy take less time than a program takes to start."""

    def __init__(self, founders: int):
        self._founders = founders
        self.rounds: dict[str, int] = {}
        """Of each peer that is in the swarm: the round of the state that it stands on."""
        self.over = threading.Event()
        self._deadline = time.monotonic() + DEADLINE_SECONDS

    def may_train(self, round: int) -> bool:
        """Whether nobody is behind `round`; from JOIN_AT_ROUND on the late peer must be there as well."""
        expected = self._founders + (round >= JOIN_AT_ROUND)
        return len(self.rounds) >= expected and min(list(self.rounds.values())) >= round

    def stand(self, peer: str, round: int) -> None:
        self.rounds[peer] = round
        if len(self.rounds) > self._founders and min(list(self.rounds.values())) >= ROUNDS:
            self.over.set()

    def check_time(self) -> None:
        if time.monotonic() > self._deadline and not self.over.is_set():
            raise TimeoutError(f"the peers are in the rounds {self.rounds} after {DEADLINE_SECONDS:.0f} s")


class Peer(threading.Thread):
    """One peer's training, as a thread; its sidecar is a process of its own."""

    def __init__(self, number: int, folder: Path, join: str, meeting: Meeting):
        """join: the multiaddr of a peer of the run; '' for its first one."""
        super().__init__(name=f"peer-{number}", daemon=True)
        self._folder, self._join, self._meeting = folder / self.name, join, meeting
        self._folder.mkdir(parents=True)
        self._batch, self._next, self._open = BATCHES[number], number * 1_000_000, []
        self.contributions: dict[int, list[int]] = {}
        """By number: the samples in it."""
        self._params, self.held_digest = fresh_params(), ""
        self.held: dict[str, Tensor] = {}
        """The parameters at the first state from round ROUNDS on that this peer landed on; held_digest is that state's."""
        self.failure: BaseException | None = None
        with contextlib.closing(Identity(self._folder / "identity.key")) as identity:
            self.peer_id = identity.peer_id
        self._listen = f"/ip4/127.0.0.1/tcp/{free_port()}"
        self.address = f"{self._listen}/p2p/{self.peer_id}"

    def rounds(self) -> list[dict]:
        return read_lines(self._folder / "rounds.jsonl")

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # whoever joins this thread raises it
            self.failure = error
            self._meeting.over.set()

    def _run(self) -> None:
        config = PeerConfig(output_dir=str(self._folder), host_maddrs=(self._listen,))
        known = (self._join,) if self._join else ()
        context = SyncContext(run=RUN, peer=config, params=self._params, output_dir=self._folder, initial_peers=known)
        with contextlib.closing(gradients.build(context)) as sync:
            self._follow(sync, sync.catch_up())
            while not self._meeting.over.is_set():
                self._meeting.check_time()
                time.sleep(STEP_SECONDS)
                if not self._meeting.may_train(sync.round):
                    self._follow(sync, sync.step(0))
                elif not self.held:
                    self._train(sync)

    def _train(self, sync: gradients.Sync) -> None:
        batch = range(self._next, self._next + self._batch)
        self._next += self._batch
        for parameter in self._params.values():
            parameter.grad = None
        losses(self._params, batch).sum().backward()
        sync.before_step()
        self._open += batch
        self._follow(sync, sync.step(len(batch)))

    def _follow(self, sync: gradients.Sync, report: SyncReport) -> None:
        """Note what is in which contribution, and wait as long as the swarm asks for it."""
        self._note(report)
        while (report.wait or report.frozen is not None) and not self._meeting.over.is_set():
            self._meeting.check_time()
            report = sync.step(0)
            self._note(report)
        if sync.round >= ROUNDS and not self.held:
            self.held = {name: tensor.detach().clone() for name, tensor in self._params.items()}
            self.held_digest = sync.state_dict()["digest"]
        if not report.wait:
            self._meeting.stand(self.name, sync.round)

    def _note(self, report: SyncReport) -> None:
        if 0 in report.dropped:  # nobody will ever ask for these
            self._open = []
        if report.frozen is not None:
            self.contributions[report.frozen], self._open = self._open, []


def run_swarm(founders: int, folder: Path) -> list[Peer]:
    """The peers after their runs, the late one last. Raises what ended one of them."""
    meeting = Meeting(founders)
    first = Peer(0, folder, "", meeting)
    swarm = [first, *(Peer(number, folder, first.address, meeting) for number in range(1, founders))]
    for peer in swarm:
        peer.start()
    while meeting.rounds.get(first.name, 0) < JOIN_AT_ROUND and not meeting.over.wait(0.05):
        pass
    swarm.append(Peer(founders, folder, first.address, meeting))
    swarm[-1].start()
    for peer in swarm:
        peer.join()
    for peer in swarm:
        if peer.failure:
            raise peer.failure
    return swarm
