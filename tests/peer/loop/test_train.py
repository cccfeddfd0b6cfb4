"""The loop, with nothing behind its contracts."""

from types import SimpleNamespace
from unittest.mock import MagicMock, call

import torch

from peer.contracts import CommittedRound, SyncReport
from peer.loop.clipping import Clip
from peer.loop.train import Trainer
from peer.machine.device import Rank, RankGroup


class Swarm:
    """A sync that has made a round meanwhile, and asks for what was trained."""

    round = samples = 0
    peers = 1

    def __init__(self, *reports):
        self.reports, self.steps, self.receipts = list(reports), [], {}

    def catch_up(self):
        return SyncReport()

    def step(self, samples, loss=None):
        self.steps.append(samples)
        return self.reports.pop(0)

    def registered(self, number, receipt):
        self.receipts[number] = receipt

    def leave(self, *, hurry):
        return SyncReport()


def trainer(sync, feed, **values):
    rest = {
        name: MagicMock(return_value=False)
        for name in ("encode", "optimizer", "learning_rate", "feed", "accounts", "progress", "stopping", "save", "occasions")
    }
    model = SimpleNamespace(unread=list)
    precision = SimpleNamespace(device=torch.device("cpu"), scaled=False)
    made = {"model": model, "params": {}, "clip": Clip(), "precision": precision, "group": RankGroup(Rank(), "cpu"), "by_rounds": True}
    return Trainer(**(rest | made | {"sync": sync, "feed": feed, "noise_seed": "x"} | values))


def test_a_trainer_without_samples_hears_of_final_rounds_and_gives_what_it_has_and_ends_with_the_run():
    final = CommittedRound("d", "p", 1, 4, ())
    sync = Swarm(SyncReport(final_rounds=(final,)), SyncReport(frozen=3), SyncReport(final=(3,)), SyncReport(done=True))
    loop = trainer(sync, iter([None] * 10))
    loop.accounts.register.return_value = "the host's receipt"
    loop.run()
    assert sync.steps == [0, 0, 0, 0] and sync.receipts == {3: "the host's receipt"}
    assert final in loop.accounts.apply.call_args_list[1].args[0].final_rounds
    loop.accounts.register.assert_called_once_with(3)
    assert loop.step == 0


def test_the_rate_knows_when_the_moments_were_new_also_after_a_restart_and_never_later_than_the_state():
    rates = []

    def loop():
        sync = Swarm()
        sync.before_step = lambda: True
        sync.state_dict = sync.load_state_dict = MagicMock(return_value={})
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaled = SimpleNamespace(device=torch.device("cpu"), scaled=False)
        made = trainer(sync, MagicMock(), params={"unet.w": weight}, optimizer=optimizer, precision=scaled, learning_rate=lambda *told: rates.append(told) or 0.5)
        made.average = None
        return made

    def step(one, samples):
        one.sync.samples = samples
        one.params["unet.w"].grad = torch.ones(1)
        one._use_gradients(1, torch.ones(1))

    first = loop()
    step(first, 1000)
    step(first, 1500)
    resumed = loop()
    resumed.load_state_dict(first.state_dict())
    step(resumed, 2000)
    step(resumed, 600)  # the host discarded the state of round 2
    assert rates == [(1000, 1000), (1500, 1000), (2000, 1000), (600, 600)]


def test_a_trainer_without_samples_rests_when_its_owner_says_so():
    sync, asked = Swarm(*[SyncReport()] * 4, SyncReport(done=True)), []
    sync.rest = asked.append
    feed = MagicMock(__iter__=lambda self: iter([None] * 10))
    resting = iter([False, True, False, False])
    trainer(sync, feed, resting=lambda: next(resting, False)).run()
    assert asked == [True, False] and [call.args[0] for call in feed.rest.call_args_list] == [True, False]


class Committing(Swarm):
    """A round is committed at each step of ours, and the last one while we leave."""

    def step(self, samples, loss=None):
        self.round += 1
        return super().step(samples, loss)

    def leave(self, *, hurry):
        self.round += 1
        return SyncReport()


def test_rounds_that_are_committed_while_no_work_is_at_hand_are_averaged_drawn_and_measured():
    loop = trainer(Committing(SyncReport(), SyncReport(done=True)), iter([None] * 10))
    loop.run()
    assert loop.occasions.reach.call_args_list == [call(1, end=False), call(2, end=True)]


def test_the_average_follows_a_round_that_is_committed_while_the_peer_leaves():
    average = MagicMock()
    trainer(Committing(SyncReport(done=True)), iter([None]), average=average).run()
    average.follow.assert_called_once_with(2)


def test_each_micro_batch_is_a_sign_of_life_and_the_first_step_is_still_the_first():
    signs = []
    loop = trainer(Swarm(SyncReport(done=True)), iter([SimpleNamespace(batches=(None,) * 3, first=0, keys=("a", "b", "c"), bad=())]), averages=True, alive=signs.append)
    loop._backward, loop._use_gradients = lambda *_: torch.zeros(1), lambda *_: True
    loop.run()
    assert signs[signs.index("making the first step") :][1:5] == ["", "", "", "saving and drawing"]
