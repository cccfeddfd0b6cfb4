"""Each invariant is one that can fail."""

import json
from types import SimpleNamespace

import pytest
import torch

from peer.sync.engine.state import first_state
from simulation.checks import Breach, Checks


class World:
    def __init__(self):
        self.loop = SimpleNamespace(time=lambda: 1.0)

    def stop(self):
        pass

    def committed(self, commit):
        pass


class Scene:
    def __init__(self):
        self.checks = Checks(World())
        self.flushed = []
        self.machine = SimpleNamespace(peer="ann", short="ann", sidecar=object(), disk=SimpleNamespace(flushed=lambda: self.flushed))
        self.offers({("ann", 1): 8, ("ann", 2): 8, ("bob", 1): 8, ("bob", 2): 8})

    def offers(self, known):
        self.checks._offers |= {key: (b"bytes", samples) for key, samples in known.items()}

    def adopts(self, digest, parent, round, samples, members, machine=None):
        line = {"digest": digest, "parent": parent, "round": round, "samples": samples, "members": members, "how": "averaged"}
        self.checks.appended(machine or self.machine, "/rounds.jsonl", json.dumps(line).encode())

    def broken(self):
        try:
            self.checks.raise_if_broken()
        except Breach as breach:
            return str(breach)
        return ""


@pytest.fixture
def scene():
    scene = Scene()
    scene.adopts("one", "base", 1, 16, [["ann", 1, 8], ["bob", 1, 8]])
    assert not scene.broken()
    return scene


def test_a_round_more_breaks_nothing(scene):
    scene.adopts("two", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    assert not scene.broken()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (("other", "base", 1, 16, [["ann", 1, 8], ["bob", 1, 8]]), "one group made two states"),
        (("two", "one", 2, 24, [["ann", 1, 8]]), "twice in the lineage"),
        (("two", "one", 2, 31, [["ann", 2, 8], ["bob", 2, 8]]), "not those of its parent and members"),
        (("two", "gone", 2, 32, [["ann", 2, 8], ["bob", 2, 8]]), "never adopted by anybody"),
        (("two", "one", 2, 25, [["ann", 2, 9]]), "not those it was offered with"),
        (("two", "one", 2, 24, [["cy", 1, 8]]), "not those it was offered with"),
        (("one", "base", 1, 8, [["ann", 1, 8]]), "two stories"),
    ],
)
def test_a_round_that_breaks_a_promise_is_named(scene, line, says):
    scene.adopts(*line)
    assert says in scene.broken()


def test_nobody_goes_back_to_an_ancestor_unless_it_was_started_again(scene):
    two = ("two", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    one = ("one", "base", 1, 16, [["ann", 1, 8], ["bob", 1, 8]])
    scene.adopts(*two)
    scene.machine.sidecar = object()
    scene.adopts(*one)
    assert not scene.broken()
    scene.adopts(*two)
    scene.adopts(*one)
    assert "went back" in scene.broken()


def test_the_bytes_of_a_contribution_are_one(scene):
    def offer(content):
        buffer = SimpleNamespace(bytes=lambda: SimpleNamespace(numpy=lambda: content))
        scene.checks.said(scene.machine, "offer", {"number": 3, "samples": 8}, [buffer])

    offer(b"same")
    offer(b"same")
    assert not scene.broken()
    offer(b"other")
    assert "bytes of contribution 3 changed" in scene.broken()


def reports(scene, digest):
    scene.checks.told(scene.machine, "settled", {"settlement": {"digest": digest}}, [])
    return scene.broken()


@pytest.mark.parametrize("digest", ["one-of-two-peers", "two-of-two-peers"])
def test_what_is_reported_is_with_another_peer_or_on_a_disk(scene, digest):
    scene.adopts("one-of-two-peers", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]])
    scene.offers({("ann", 3): 8})
    scene.adopts("two-of-two-peers", "one-of-two-peers", 3, 40, [["ann", 3, 8]])
    scene.flushed = [f"/state/samples-16-{digest[:12]}.state"]
    assert not reports(scene, digest)
    scene.flushed = ["/state/samples-16-another-four.state", f"/state/samples-16-{digest[:12]}.tmp"]
    assert "no other peer has" in reports(scene, digest)


def test_what_another_peer_has_made_something_of_may_be_reported(scene):
    scene.adopts("two", "one", 2, 32, [["ann", 2, 8], ["bob", 2, 8]], SimpleNamespace(peer="bob", short="bob", sidecar=object()))
    assert not reports(scene, "one")


def test_the_bytes_of_a_state_are_those_of_its_digest(scene):
    state = first_state("run", "schema", torch.zeros(4), 0)
    landed = {"digest": state.digest, "header": state.header.to_json()}
    scene.checks.told(scene.machine, "landed", landed, [state.buffer])
    assert not scene.broken()
    state.buffer.floats()[0] = 1
    scene.checks.told(scene.machine, "landed", landed, [state.buffer])
    assert "not those of its digest" in scene.broken()


def test_a_contribution_is_done_once_it_is_in_a_state_that_was_reported(scene):
    scene.flushed = ["/state/samples-16-one.state"]
    scene.checks.settled["one"] = 1
    scene.checks.done(scene.machine, 1)
    assert not scene.broken()
    scene.checks.done(scene.machine, 2)
    assert "taken for done" in scene.broken()


def test_what_is_reported_was_adopted_by_somebody(scene):
    scene.checks._holders["one"] = {"ann", "bob"}
    scene.checks.told(scene.machine, "settled", {"settlement": {"digest": "one"}}, [])
    assert not scene.broken()
    scene.checks.told(scene.machine, "settled", {"settlement": {"digest": "nobody's"}}, [])
    assert "nobody adopted" in scene.broken()


@pytest.mark.parametrize(("held", "reported", "drawn", "broken"), [(["a", "b"], 1, 3, False), (["a"], 1, 3, True), (["a", "a"], 1, 3, True)])
def test_every_sample_is_held_or_reported_once(scene, held, reported, drawn, broken):
    accounts = SimpleNamespace(state_dict=lambda: {"open": held, "contributions": {}, "aside": []})
    scene.machine.source = SimpleNamespace(acknowledged=range(reported), given_back=(), drawn_since_boot=drawn)
    scene.checks.accounts(scene.machine, accounts)
    assert bool(scene.broken()) == broken
