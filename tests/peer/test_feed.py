import threading

import pytest

from peer.batches import Decoder
from peer.buckets import Buckets
from peer.contracts import Sample
from peer.device import Rank, RankGroup
from peer.feed import Feed
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.test_batches import png, ramp


class Shelf:
    """A source of `count` samples; after them it ends, or has nothing more until it is closed."""

    def __init__(self, count, ends=True, fails=False):
        self.count, self.ends, self.fails = count, ends, fails
        self.closed, self.empty, self.back = threading.Event(), threading.Event(), []

    def __iter__(self):
        for i in range(self.count):
            yield Sample(str(i), png(ramp(16, 16)), "")
        self.empty.set()
        if self.fails:
            raise UserError("The server is gone.", fix="Start it.")
        if not self.ends:
            assert self.closed.wait(60)

    def give_back(self, keys):
        self.back += keys

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def feed(source, stopping=lambda: False, workers=0, **sizes):
    sizes = {"batch_samples": 4, "accumulation": 1, "buckets": Buckets([(16, 16)])} | sizes
    return Feed(source, Decoder(RunConfig(resolution=16), workers), RankGroup(Rank(), device="cpu"), stopping=stopping, **sizes)


def test_steps_hold_as_many_samples_as_asked_for_and_the_last_one_what_is_left():
    works = list(feed(Shelf(10)))
    assert [work.keys for work in works] == [tuple("0123"), tuple("4567"), tuple("89")]


def test_accumulation_splits_a_step_into_micro_batches():
    works = list(feed(Shelf(10), batch_samples=2, accumulation=3))
    assert [[len(batch.captions) for batch in work.batches] for work in works] == [[2, 2, 2], [2, 2]]


def test_a_stop_is_heard_while_the_source_has_nothing_and_what_was_drawn_is_given_back():
    source = Shelf(6, ends=False)
    steps = feed(source, stopping=source.empty.is_set)
    assert [work.keys for work in steps] == [tuple("0123")]
    assert steps.state_dict() == {"ahead": ["4", "5"], "pool": {"drawn": 4, "numbers": []}, "source": {"count": 6}}
    steps.close()
    source.closed.set()
    assert source.back == ["4", "5"]


@pytest.mark.parametrize("workers", [0, 1])
def test_no_step_is_handed_out_after_a_stop(workers, monkeypatch):
    monkeypatch.setattr("peer.feed._AHEAD_SECONDS", 60.0)  # what is to be drawn ahead is drawn, however busy the machine
    source, stopped = Shelf(100), []
    steps = feed(source, stopping=lambda: bool(stopped), workers=workers)
    works = iter(steps)
    assert next(works).keys == tuple("0123")
    stopped.append(True)
    assert next(works, None) is None
    steps.close()
    assert source.back == ([] if not workers else list("4567"))


def test_a_sources_error_ends_the_feed():
    works = iter(feed(Shelf(4, fails=True)))
    next(works)
    with pytest.raises(UserError, match="The server is gone"):
        next(works)


def test_what_was_ahead_at_a_checkpoint_comes_again_after_loading():
    source = Shelf(0)
    feed(source).load_state_dict({"ahead": ["a"], "pool": {"drawn": 0, "numbers": []}, "source": {"count": 3}})
    assert source.back == ["a"] and source.count == 3
