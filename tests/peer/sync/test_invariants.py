"""The invariants of the protocol, each by its name, over the history of one swarm in which peers died, came back and lost streams."""

import json
from collections import Counter, defaultdict

import pytest

from peer.sync.engine import failpoints, replica
from peer.sync.engine.net.streams import Broken
from tests.peer.sync.replicas import make_run, peers
from tests.peer.sync.swarm_tools import until
from tests.peer.sync.test_failures import PAUSES, SECONDS, Trap, average_together, back, balanced, die, lineage
from tests.peer.sync.virtual import VirtualNodes, run_virtual


class Past:
    """What a peer left behind; the peer itself is not kept, nor what it holds open."""

    def __init__(self, peer, everyone):
        self.id, self.rounds, self.lineage = peer.id, peer.rounds(), lineage(peer, everyone)
        self.offers, self.final_rounds, self.balanced = peer.offers, peer.final_rounds, balanced(peer, everyone)


class History:
    """living: who was there at the end, the one that came back last; everyone: also who died on the way."""

    def __init__(self, living, everyone):
        self.living = [Past(peer, everyone) for peer in living]
        self.everyone = [Past(peer, everyone) for peer in everyone]


async def live(nodes: VirtualNodes) -> History:
    trio, ends = await peers(nodes, 3, make_run()), []
    by_id = {peer.id: peer for peer in trio}
    await until(lambda: min(peer.head.header.round for peer in trio) >= 1, SECONDS)
    failpoints.hook = cut = Trap("joined", lambda peer: _fail(Broken("cut off")))
    await until(lambda: cut.victim, SECONDS)
    failpoints.hook = killed = Trap("outer_step", lambda peer: die(by_id[peer], ends))
    await until(lambda: ends and ends[0].done(), SECONDS)
    dead = by_id[killed.victim]
    others = [peer for peer in trio if peer is not dead]
    again = await back(nodes, dead, others[0])
    await average_together(again, others)
    living, everyone = [*others, again], [*trio, again]
    await until(lambda: all(balanced(peer, everyone) and len(peer.final_rounds) > 2 for peer in living), SECONDS)
    return History(living, everyone)


async def _fail(error: Exception):
    raise error


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "hook", None)
        patch.setattr(replica, "_BACKOFF_SECONDS", PAUSES)
        yield run_virtual(tmp_path_factory.mktemp("invariants"), live, seed=1)


def test_one_parent_and_one_group_give_one_digest(history):
    digests = defaultdict(set)
    for line in (line for peer in history.everyone for line in peer.rounds):
        digests[line["parent"], json.dumps(line["members"])].add(line["digest"])
    assert len(digests) > 2 and all(len(found) == 1 for found in digests.values())


def test_a_state_holds_at_most_one_contribution_of_each_peer_and_its_lineage_none_twice(history):
    for line in (line for peer in history.everyone for line in peer.rounds):
        assert len({peer for peer, _, _ in line["members"]}) == len(line["members"])
    for peer in history.living:
        counted = Counter((who, number) for line in peer.lineage for who, number, _ in line["members"])
        assert counted and max(counted.values()) == 1


def test_the_reported_samples_add_up_to_those_of_the_state(history):
    for peer in history.living:
        last = max(peer.final_rounds, key=lambda committed_round: committed_round.round)
        reported = {committed_round.digest: committed_round for committed_round in peer.final_rounds}
        assert len(reported) == len(peer.final_rounds), "a state was reported twice"
        before = min(peer.final_rounds, key=lambda committed_round: committed_round.round)
        began_at = before.samples - sum(member.samples for member in before.members)
        assert began_at + sum(member.samples for s in peer.final_rounds for member in s.members) == last.samples
        assert began_at == 0 or peer not in history.living[:2]


def test_the_bytes_of_a_contribution_never_change(history):
    offers = defaultdict(set)
    for peer in history.everyone:
        for number, data in peer.offers:
            offers[peer.id, number].add(data)
    assert len(offers) > 3 and all(len(found) == 1 for found in offers.values())


def test_every_sample_is_in_the_state_or_waiting_or_given_back(history):
    assert len(history.living) == 3 and all(peer.balanced for peer in history.living)


def test_nobody_ever_goes_back(history):
    for peer in history.living[:2]:
        samples = [line["samples"] for line in peer.rounds]
        assert len(samples) > 2 and samples == sorted(samples)
