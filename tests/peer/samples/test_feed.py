import threading
import time
from dataclasses import replace

import pytest
import torch

from peer.contracts import Sample
from peer.machine.device import Rank, RankGroup
from peer.samples.buckets import Buckets
from peer.samples.decoding import Decoder
from peer.samples.feed import Feed
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.samples.test_decoding import png, ramp


class Shelf:
    """A source of `count` samples; after them it ends, or has nothing more until it is closed. Asked anew, it goes on where it was."""

    def __init__(self, count, ends=True, fails=False):
        self.count, self.ends, self.fails = count, ends, fails
        self.closed, self.empty, self.back, self.given = threading.Event(), threading.Event(), [], 0

    def __iter__(self):
        while self.given < self.count:
            self.given += 1
            yield Sample(str(self.given - 1), png(ramp(16, 16)), "")
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


def test_while_samples_are_waited_for_the_trainer_has_its_turn_and_the_other_ranks_hear_of_it(monkeypatch):
    """Seen in the code: after ten minutes of a host's pause the group took rank 0 for lost, and the peer ended.

    And seed 304052 of a campaign: a trainer without samples heard of no final round for 70 s, and a power cut took what it was to report.
    """
    monkeypatch.setattr("peer.samples.feed._PATIENCE_SECONDS", 0.1)
    source, told, turns = Shelf(4, ends=False), [], []
    steps = feed(source, stopping=lambda: turns.count(None) >= 3)
    broadcast = steps._group.broadcast_object
    steps._group.broadcast_object = lambda value: (told.append(value), broadcast(value))[1]
    for work in steps:
        turns.append(work and work.keys)
    assert turns == [tuple("0123"), None, None, None]
    assert told == [False, True, True, True, False]
    steps.close()
    source.closed.set()


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
    monkeypatch.setattr("peer.samples.feed._AHEAD_SECONDS", 60.0)  # what is to be drawn ahead is drawn, however busy the machine
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


class Slow(Shelf):
    """A source that yields when it is told to, and knows how many it has yielded. looked: called when somebody asks where it stands."""

    def __init__(self, count, looked):
        super().__init__(count, ends=False)
        self.yielded, self.go, self.looked = 0, threading.Semaphore(0), looked

    def __iter__(self):
        for sample in super().__iter__():
            assert self.go.acquire(timeout=60)
            self.yielded += 1
            yield sample

    def state_dict(self):
        self.looked()
        return {"count": self.yielded}


def test_what_a_slow_source_yields_while_a_checkpoint_is_made_is_in_it(monkeypatch):
    """Seen in the code: it was neither ahead nor still to come, so nobody trained it after a resume."""
    monkeypatch.setattr("peer.samples.feed._QUIET_SECONDS", 0.01)
    monkeypatch.setattr("peer.samples.feed._PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("peer.samples.feed._POLL_SECONDS", 0.01)

    def one_comes():
        source.go.release()
        while not steps._drawer.came:
            time.sleep(0.001)

    source = Slow(8, one_comes)
    steps = feed(source)
    assert next(iter(steps)) is None, "four samples are asked for, and none has come"
    assert steps.state_dict() == {"ahead": ["0"], "pool": {"drawn": 0, "numbers": []}, "source": {"count": 1}}
    source.closed.set()
    source.go.release(8)
    steps.close()


def test_what_comes_before_a_checkpoint_asks_the_source_where_it_stands_is_in_it_once():
    source = Slow(4, lambda: None)
    steps = feed(source)
    threading.Timer(0.1, source.go.release, [4]).start()
    steps._drawer._requests.put(4)
    steps._drawer._asked = True
    assert steps.state_dict() == {"ahead": list("0123"), "pool": {"drawn": 0, "numbers": []}, "source": {"count": 4}}
    source.closed.set()
    steps.close()


def waits_for_decoding(steps):
    for prepared in steps._prepared:
        for part in prepared.started:
            part.result()


def test_as_many_steps_are_read_ahead_as_asked_for_and_all_of_them_are_given_back(monkeypatch):
    monkeypatch.setattr("peer.samples.feed._AHEAD_SECONDS", 60.0)
    source, placed = Shelf(100), []
    sizes = {"ahead_steps": 3, "placed_steps": 2}
    steps = feed(source, workers=1, place=lambda batch: placed.append(len(batch.captions)) or batch, **sizes)
    works = iter(steps)
    assert next(works).keys == tuple("0123")
    ahead = [str(key) for key in range(4, 16)]
    assert steps.ahead() == ahead
    waits_for_decoding(steps)
    assert next(works).keys == tuple("4567")
    assert placed[:4] == [4] * 4 and len(steps._prepared) == 3  # two were handed out, two more were decoded and wait where they are trained
    assert steps.state_dict()["ahead"] == [str(key) for key in range(8, 20)]
    steps.close()
    assert source.back == [str(key) for key in range(8, 20)]


def test_what_is_placed_is_what_is_handed_out_and_with_every_key_once(monkeypatch):
    monkeypatch.setattr("peer.samples.feed._AHEAD_SECONDS", 60.0)
    steps = feed(Shelf(22), workers=1, ahead_steps=2, placed_steps=2, place=lambda batch: replace(batch, weights=torch.ones(1)))
    works = []
    for work in steps:
        works.append(work)
        waits_for_decoding(steps)
    steps.close()
    assert [key for work in works for key in work.keys] == [str(key) for key in range(22)]
    assert all(batch.weights is not None for work in works for batch in work.batches)


def test_without_decoding_processes_nothing_is_read_ahead():
    steps = feed(Shelf(100), ahead_steps=4)
    next(iter(steps))
    assert steps.ahead() == []


class Resting(Shelf):
    """A source that yields nothing while it rests."""

    def __init__(self, count):
        super().__init__(count, ends=False)
        self.awake = threading.Event()
        self.awake.set()

    def __iter__(self):
        for sample in super().__iter__():
            assert self.awake.wait(60)
            yield sample

    def rest(self, resting):
        (self.awake.clear if resting else self.awake.set)()


def test_a_feed_that_rests_gives_back_what_it_held_and_goes_on_with_the_rest():
    source = Resting(12)
    steps = feed(source, buckets=Buckets([(16, 16), (32, 8)]), batch_samples=3)
    works = iter(steps)
    handed = list(next(works).keys)
    steps._drawer._requests.put(2)  # drawn ahead, as with decoding processes
    while len(steps._drawer._hand) < 2:
        threading.Event().wait(0.01)
    steps.rest(True)
    assert steps.ahead() == [] and len(source.back) == 2
    steps.rest(False)
    steps._drawer._answers.get()
    handed += next(works).keys
    assert len(set(handed + source.back)) == len(handed) + 2 and not set(handed) & set(source.back)
    source.closed.set()
    steps.close()


class Returning(Shelf):
    """A source that yields again what was given back, as all do."""

    def __iter__(self):
        yield from super().__iter__()
        while self.back:
            yield Sample(self.back.pop(0), png(ramp(16, 16)), "")

    def rest(self, resting):
        """Nobody else waits for its samples."""


def test_samples_that_are_given_back_after_the_source_has_ended_are_drawn_again(monkeypatch):
    """Alone, a peer that rested in its last epoch, or whose fp16 sought its scale then, said that it had finished without them."""
    monkeypatch.setattr("peer.samples.feed.WINDOW_SAMPLES", 8)
    source = Returning(6)
    steps = feed(source, encode=lambda batches: batches)
    works = iter(steps)
    assert next(works).keys == tuple("0123") and steps.ahead() == list("45") and source.empty.is_set()
    steps.rest(True)
    steps.rest(False)
    assert next(works).keys == tuple("45")
    source.give_back(["2"])
    assert next(works).keys == ("2",) and next(works, None) is None


def test_a_window_of_steps_is_encoded_before_its_first_is_handed_out_and_a_checkpoint_knows_the_rest(monkeypatch):
    monkeypatch.setattr("peer.samples.feed.WINDOW_SAMPLES", 8)
    windows, source = [], Shelf(18)
    steps = feed(
        source,
        batch_samples=2,
        accumulation=2,
        encode=lambda batches: (windows.append([len(batch.captions) for batch in batches]), batches)[1],
    )
    works = iter(steps)
    assert next(works).keys == tuple("0123") and windows == [[2, 2, 2, 2]]
    assert steps.state_dict()["ahead"] == list("4567")
    assert [len(work.keys) for work in works] == [4, 4, 4, 2] and windows == [[2, 2, 2, 2], [2, 2, 2, 2], [2]]


class Dripping(Shelf):
    """A source that gives a sample when it is told to, until it has none."""

    drop = threading.Semaphore(0)

    def __iter__(self):
        for sample in super().__iter__():
            assert self.drop.acquire(timeout=60)
            yield sample


def test_a_window_waits_while_samples_come_and_is_trained_as_it_is_when_they_stop_coming(monkeypatch):
    """The trainer has its turn meanwhile: a window of slow samples takes minutes, in which others make rounds."""
    monkeypatch.setattr("peer.samples.feed._PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("peer.samples.feed._POLL_SECONDS", 0.001)
    monkeypatch.setattr("peer.samples.feed.WINDOW_SAMPLES", 8)
    windows, source, given, waits = [], Dripping(5, ends=False), 0, 0
    steps = feed(source, batch_samples=2, encode=lambda batches: (windows.append(len(batches)), batches)[1])
    for work in steps:
        if work:
            break
        waits += 1
        if steps._quiet == 8 and given < 5:
            source.drop.release()
            given += 1
            while steps._drawer.came < given:
                time.sleep(0.001)
    assert work.keys == tuple("01") and windows == [2] and waits >= 5 * 8 + 10
    assert steps.state_dict()["ahead"] == list("234")
    source.closed.set()
    steps.close()
