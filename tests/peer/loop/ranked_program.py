"""What each rank of test_all_ranks.py runs: local steps on summed gradients, and a swarm that changes rank 0's parameters now and then.

Prints, at rank 0, one JSON line per call of the strategy: its name, the round, and each rank's digest of all parameters.
"""

import contextlib
import json
import time
from pathlib import Path

import torch
from blake3 import blake3

from peer.contracts import SyncReport
from peer.loop.all_ranks import RankedSync
from peer.machine.device import Rank, RankGroup

CPU = torch.device("cpu")


class Swarm:
    """The strategy at rank 0: every third step it lands on a new state, and says so as the real ones do, in one way or another."""

    round = samples = 0
    peers = 2

    def __init__(self, params):
        self._params, self._rng, self._steps = params, torch.Generator().manual_seed(7), 0

    def _land(self) -> None:
        for parameter in self._params.values():
            parameter.data.add_(torch.randn(parameter.shape, generator=self._rng))
        self.round, self.samples = self.round + 1, self.samples + 32

    def catch_up(self) -> SyncReport:
        self._land()
        return SyncReport()

    def before_step(self) -> bool:
        return True

    def step(self, samples, loss=None) -> SyncReport:
        self._steps += 1
        if self._steps % 3:
            return SyncReport()
        self._land()
        return SyncReport(final=(self.round,)) if self._steps % 2 else SyncReport()  # the round alone says that something changed

    def withdraw(self, number) -> SyncReport:
        """Only the parameters show that something changed."""
        at = self.round, self.samples
        self._land()
        self.round, self.samples = at
        return SyncReport()

    def leave(self, *, hurry) -> SyncReport:
        self._land()
        return SyncReport(done=True)

    def state_dict(self):
        return {}

    def load_state_dict(self, state) -> SyncReport:
        self._land()
        return SyncReport(dropped=(0,))


def main() -> None:
    torch.set_num_threads(1)
    group = RankGroup(rank := Rank.from_environment(), CPU, timeout_seconds=120)
    own = torch.Generator().manual_seed(rank.index)  # ranks differ in what they start from and in their gradients
    params = {name: torch.nn.Parameter(torch.randn(shape, generator=own)) for name, shape in (("a", (33, 7)), ("b", (5,)))}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
    sync = RankedSync(Swarm(params) if group.is_main else None, group, params)

    def say(call: str) -> None:
        digests = group.gather(blake3(b"".join(bytes(p.detach().numpy().tobytes()) for p in params.values())).hexdigest())
        if group.is_main:
            print(json.dumps({"call": call, "round": sync.round, "digests": digests}), flush=True)

    saved = {"step": 3, "pair": ("x", None), "half": torch.arange(6.0).to(torch.bfloat16).view(2, 3), "turned": torch.arange(6).view(2, 3).T}
    saved |= {"none": torch.empty(0), "one": torch.tensor(7), "eighth": torch.ones(3).to(torch.float8_e4m3fn)}
    told = group.broadcast_state(saved if group.is_main else None)
    for name, value in saved.items():
        there = told[name]
        same = there.dtype == value.dtype and torch.equal(there.float(), value.float()) if isinstance(value, torch.Tensor) else there == value
        assert same, f"rank {rank.index}: {name} is {there}"
    sync.catch_up()
    say("catch_up")
    for _ in range(10):
        for parameter in params.values():
            parameter.grad = torch.randn(parameter.shape, generator=own)
        group.sum_([parameter.grad for parameter in params.values()])
        if sync.before_step():
            optimizer.step()
        sync.step(4, 0.5)
        say("step")
    for call, arguments in (("withdraw", {"number": 3}), ("load_state_dict", {"state": {}}), ("leave", {"hurry": True})):
        getattr(sync, call)(**arguments)
        say(call)
    group.close()
    deadline = time.monotonic() + 60  # the kernel lists a thread for a moment after it has been joined
    while [name for name in threads() if "gloo" in name]:
        assert time.monotonic() < deadline, "a thread of the group that outlives it may abort the process at its end"
        time.sleep(0.01)


def threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text())
    return names


if __name__ == "__main__":
    main()
