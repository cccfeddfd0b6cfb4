from functools import partial
from types import SimpleNamespace

import pytest
import torch

from peer import wiring
from peer.config import PeerConfig
from peer.loop.occasions import Occasion, Occasions, seldom
from peer.machine.device import Rank, RankGroup
from tests.clock import Clock


def test_each_is_done_when_a_multiple_of_its_steps_was_reached_or_passed():
    done = []
    occasions = Occasions([Occasion(2, done.append), Occasion(3, lambda step: done.append(-step), at_end=False), Occasion(0, done.append)])
    occasions.start(1)
    for step in (1, 2, 2, 5):
        occasions.reach(step)
    occasions.reach(6, end=True)
    assert done == [2, 5, -5, 6]


def test_what_is_done_seldom_takes_no_more_than_its_share_of_the_time():
    clock, done = Clock(100.0), []

    def save(step: int) -> None:
        clock.now += 2.0
        done.append(step)

    save_seldom = seldom(save, 0.01, clock)
    for step in range(1000):  # one second each
        save_seldom(step)
        clock.now += 1.0
    assert done == [0, 198, 396, 594, 792, 990] and clock.now == pytest.approx(1112)


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({"datasetserver": "http://localhost:8080"}, [1, 102]),
        ({"datasetserver": "http://localhost:8080", "checkpointing_steps": 50}, [50, 100, 150]),
    ],
)
def test_a_swarms_checkpoints_take_a_hundredth_of_the_time_unless_told_otherwise(options, rounds, monkeypatch, tmp_path):
    clock, saved = Clock(100.0), []
    monkeypatch.setattr(wiring, "seldom", partial(seldom, clock=clock))

    def checkpoint() -> None:
        clock.now += 0.99
        saved.append(round_ + 1)

    occasions = built(checkpoint, RankGroup(Rank(), torch.device("cpu")), tmp_path, **options)
    for round_ in range(150):
        occasions.reach(round_ + 1)
        clock.now += 0.98
    assert saved == rounds


def built(checkpoint, group, output, **options):
    """A swarm peer's occasions, of which checkpoints alone do anything."""
    run = SimpleNamespace(resolution=64, seed=1, target_batch_size=32, run_id="run", validation_split=0.0)
    peer, device = PeerConfig(**options), SimpleNamespace(type="cpu")
    launch = SimpleNamespace(run=run, peer=peer, device=device, group=group, output=output, joined=SimpleNamespace(server_url=""))
    trainer = SimpleNamespace(checkpoint=checkpoint, average=None, model=None, precision=None)
    return wiring.build_occasions(launch, trainer, SimpleNamespace(save=None, weights=None), None, "me", None)


def test_other_ranks_wait_whenever_rank_0_saves_a_checkpoint_whatever_their_own_clocks_say(monkeypatch, tmp_path):
    """A checkpoint of 10 minutes ended the launch: the others waited for rank 0 in the next step, and that for 600 s at most."""
    monkeypatch.setattr(wiring, "seldom", partial(seldom, clock=Clock(100.0)))
    said, did = iter([True, False, True]), []
    group = SimpleNamespace(world=2, is_main=False, broadcast_object=lambda due: next(said), barrier=lambda: did.append("waited"))
    occasions = built(lambda: did.append("left to rank 0"), group, tmp_path, datasetserver="http://localhost:8080")
    for round_ in (1, 2, 3):
        occasions.reach(round_)
    assert did == ["left to rank 0", "waited"] * 2 and next(said, None) is None
