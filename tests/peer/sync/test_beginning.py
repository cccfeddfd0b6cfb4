"""Who may start to train, and who waits for what."""

import time

import pytest

from peer.sync.engine.round.beginning import Beginning
from peer.sync.engine.state import Head
from peer.sync.engine.transfer.promises import Promises
from swarm.errors import ExitCode, UserError
from swarm.records import PeerRecord
from swarm.run_config import RunConfig
from tests.clock import Clock

BASE = Head("b" * 64, 0)


def record(peer: str, **values) -> PeerRecord:
    common = {"config": "c", "schema": "s", "round": 0, "samples": 0, "digest": BASE.digest, "phase": "joining", "time": time.time()}
    return PeerRecord(peer_id=peer, **{**common, **values})


def test_nobody_starts_before_the_company_it_asks_for_and_what_becomes_of_that_does_not_matter():
    said = []
    beginning = Beginning(RunConfig(model="x"), None, (), 3, Clock())

    def may(*others):
        return beginning.may_start(BASE, own_round=0, fetching=False, behind=False, others=others, news=said.append)

    assert not may() and not may(record("a"))
    assert said == ["waiting for company: 1 of 3 peers are live (--min_peers)", "waiting for company: 2 of 3 peers are live (--min_peers)"]
    assert not may(record("a"), record("helper", phase="assist"))  # which is no company to train with
    assert may(record("a"), record("b")) and said[-1] == "3 peers are live; starting"
    assert may()


def test_who_waits_for_company_in_a_run_that_is_over_is_told_so():
    """Seed 910184: nobody will ever come."""
    clock = Clock()
    beginning = Beginning(RunConfig(model="x", total_samples=48), Head("a" * 64, 50), ("holder",), 2, clock)
    ask = {"own_round": 0, "fetching": False, "behind": False, "news": lambda text: None}
    assert not beginning.may_start(BASE, others=(), **ask)
    clock.now = 20.0
    assert not beginning.may_start(BASE, others=[record("late", samples=50, round=3, digest="a" * 64, phase="train")], **ask), "it still serves"
    with pytest.raises(UserError, match="is over"):
        beginning.may_start(BASE, others=(), **ask)


def test_so_is_who_had_a_discarded_state_once_it_has_waited_for_a_state_before_that():
    """It did not wait for the known state, which may descend from the discarded one, but for company that never came."""
    clock = Clock()
    beginning = Beginning(RunConfig(model="x", total_samples=48), Head("a" * 64, 50), ("holder",), 2, clock, forsaken=True)
    ask = {"own_round": 0, "fetching": False, "behind": False, "others": (), "news": lambda text: None}
    for clock.now in (0.0, 20.0, 119.0):
        assert not beginning.may_start(BASE, **ask)
    clock.now = 120.0
    with pytest.raises(UserError, match="is over") as raised:
        beginning.may_start(BASE, **ask)
    assert raised.value.code == ExitCode.OVER, "dd-peer does not start it again"


def test_who_has_a_state_of_the_run_waits_for_no_company():
    """Seed 78002280: the last peer of a run was started again, and waited for ever. So did one of a run that had ended (seed 74000463)."""
    beginning = Beginning(RunConfig(model="x"), None, (), 2, Clock())
    assert beginning.may_start(BASE, own_round=43, fetching=False, behind=False, others=(), news=lambda text: None)


def test_whoever_asks_for_no_company_starts_alone():
    beginning = Beginning(RunConfig(model="x"), None, (), 1, Clock())
    assert beginning.may_start(BASE, own_round=0, fetching=False, behind=False, others=(), news=lambda text: None)


AHEAD = record("holder", samples=5, round=1, digest="a" * 64, phase="train")


class Newcomer:
    """One that began with the base, or with a state of its own."""

    def __init__(self, own_round=0, known: Head | None = None, forsaken: bool = False):
        self.clock, self.said, self.own_round = Clock(), [], own_round
        self.promises = Promises(self.clock)
        self.beginning = Beginning(RunConfig(model="x"), known, (), 1, self.clock, forsaken=forsaken)

    def may(self, *others, fetching=False, behind=False) -> bool:
        return self.beginning.may_start(
            BASE, own_round=self.own_round, fetching=fetching, behind=behind, others=others, news=self.said.append, counts=self.promises.counts
        )


def test_a_newcomer_never_trains_alone_from_the_base_while_others_hold_the_run():
    newcomer = Newcomer()
    newcomer.promises.asked(["holder"])
    for newcomer.clock.now in (0.0, 61.0, 1200.0):  # its slots are all taken
        assert not newcomer.may(AHEAD) and not newcomer.may(AHEAD, behind=True)
    assert newcomer.said[-1].endswith("which this peer does not begin again while others hold it: holder")
    assert newcomer.may(), "they are gone"


def test_one_that_gives_nothing_holds_a_newcomer_up_no_longer():
    newcomer = Newcomer()
    newcomer.promises.asked(["holder"])
    for _ in range(3):
        assert not newcomer.may(AHEAD)
        newcomer.promises.broken("holder")
    assert newcomer.may(AHEAD), "of those who sign a later state none is left that may give it"
    assert not newcomer.may(AHEAD, record("honest", samples=5, round=1, digest="c" * 64))


def test_a_claim_that_is_not_worth_a_question_holds_a_newcomer_up_for_a_minute():
    newcomer = Newcomer()
    assert not newcomer.may(AHEAD)
    newcomer.clock.now = 60.0
    assert newcomer.may(AHEAD)


def test_founders_that_start_together_start():
    newcomer = Newcomer()
    assert newcomer.may(record("twin"))
    other_base = record("other", digest="a" * 64)  # of as many samples: the smaller digest is better
    newcomer.promises.asked(["other"])
    assert not newcomer.may(other_base, behind=True)
    newcomer.clock.now = 60.0
    assert newcomer.may(other_base, behind=True), "nobody waits for ever for a state of round 0"


def test_one_that_has_a_state_of_its_own_goes_on_from_it_after_a_minute():
    peer = Newcomer(own_round=3)
    assert not peer.may(AHEAD, behind=True)
    peer.clock.now = 60.0
    assert peer.may(AHEAD, behind=True) and not peer.may(AHEAD, fetching=True)


def test_made_up_states_do_not_hold_up_one_that_has_a_state_of_its_own():
    assert Newcomer(own_round=3).may(AHEAD)


def test_a_liar_does_not_pass_for_the_run_that_the_host_knows_of():
    newcomer = Newcomer(known=Head("e" * 64, 900))
    newcomer.promises.broken("holder", lied=True)
    newcomer.promises.asked(["holder"])
    newcomer.clock.now = 600.0
    assert not newcomer.may(AHEAD) and "waiting for one who has that state" in newcomer.said[-1]


def test_whoever_lost_its_state_to_the_hosts_word_waits_two_minutes_for_a_known_one_that_may_descend_from_it():
    newcomer = Newcomer(known=Head("f" * 64, 32), forsaken=True)
    assert not newcomer.may() and "waiting for one who has that state" in newcomer.said[-1]
    newcomer.clock.now = 120.0
    assert newcomer.may() and newcomer.said[-1].endswith("going on from 0")
