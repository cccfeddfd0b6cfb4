"""Rounds that a header names no more: fetched from whoever knows them, and believed as far as the header proves them."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from peer.contracts import Member
from peer.sync.engine.cell import Bell, Cell
from peer.sync.engine.net.messages import Fetch, PastRounds
from peer.sync.engine.round.past_rounds import PAST, Past
from peer.sync.engine.state import Header

ROUNDS = 40


def states():
    """The base model's header, and those of 40 rounds that a and b made."""
    headers = [Header(run="r" * 64, schema="s" * 64)]
    for number in range(1, ROUNDS + 1):
        members = [Member("a", number, 3), Member("b", number, number)]
        headers.append(headers[-1].child(digest(number - 1), members))
    return [SimpleNamespace(digest=digest(number), header=header) for number, header in enumerate(headers)]


def digest(number):
    return f"{number:012x}" * 5 + "abcd"


def committed(state):
    return state.header.committed_round(state.digest)


async def learned_from(nodes, ours, peer):
    """What a peer that has just fetched the last state learns of the others within a minute."""
    bell, learned = Bell(), []
    past = Past(ours, Cell(states()[-1], bell, nodes.clock), lambda: [peer], learned.extend, (), nodes.clock)
    nodes.ends_with_the_test(asyncio.create_task(past.ask_forever(bell.until)))
    await asyncio.sleep(60)
    return learned


@pytest.mark.parametrize("gap", [0, 20])
def test_who_fetches_a_state_learns_of_all_rounds_that_its_holder_knows_without_a_gap(virtual, gap):
    made = [committed(state) for state in states()[1:] if state.header.round != gap]

    async def scenario(nodes):
        (_, ours), (node, theirs) = await nodes.streams(2)
        await Past(theirs, Cell(states()[0], Bell(), nodes.clock), list, print, made, nodes.clock).serve()
        learned = sorted(await learned_from(nodes, ours, node.peer_id), key=lambda each: each.round)
        # The header of round 40 names its own members and those of the eight rounds before.
        assert learned == [each for each in made if gap < each.round <= ROUNDS - 9]

    virtual(scenario)


@pytest.mark.parametrize("known", [range(1, 41), range(20, 41), [*range(1, 25), *range(26, 41)]])
def test_who_comes_back_finds_on_its_disk_the_rounds_before_those_that_its_header_names(known):
    """It was cut off and lost power before they were final: only its own file says what is in them."""
    past = Past(None, Cell(states()[-1], Bell(), lambda: 0.0), list, print, [committed(states()[number]) for number in known], lambda: 0.0)
    assert [each.round for each in past.earlier()] == [number for number in known if number < 32]


def test_who_fetched_what_others_made_on_its_own_rounds_finds_these_on_its_disk():
    """It made twelve rounds alone, others went on to round 30, and it was killed before it told anybody: nobody else knows who was in the first three."""
    other = replace(committed(states()[5]), digest="f" * 64)  # of a branch that lost
    known = [other, *(committed(states()[number]) for number in range(1, 13))]
    past = Past(None, Cell(states()[30], Bell(), lambda: 0.0), list, print, known, lambda: 0.0)
    assert past.earlier() == known[1:]


@pytest.mark.parametrize(("start", "oldest"), [(0, 6), (30, 13)])
def test_nobodys_answer_changes_what_we_know_of_our_own_rounds_nor_tells_those_twice_that_a_start_tells(virtual, start, oldest):
    """A header proves how many samples the members of a round had together, not whose they were."""
    true = [committed(state) for state in states()[1:]]
    false = [replace(each, members=(Member("a", each.round, each.round), Member("b", each.round, 3))) for each in true[5:12]]

    async def scenario(nodes):
        (own, ours), (node, theirs) = await nodes.streams(2)
        await Past(theirs, Cell(states()[0], Bell(), nodes.clock), list, print, [*true[:5], *false, *true[12:]], nodes.clock).serve()
        bell, learned = Bell(), []
        state = Cell(states()[start], bell, nodes.clock)
        past = Past(ours, state, lambda: [node.peer_id], learned.extend, true[:12], nodes.clock)
        await past.serve()
        state.set(states()[30])
        past.moved(states()[30])
        nodes.ends_with_the_test(asyncio.create_task(past.ask_forever(bell.until)))
        await asyncio.sleep(60)
        assert learned == true[oldest - 1 : 21]
        asking = Past(theirs, Cell(states()[0], Bell(), nodes.clock), list, print, (), nodes.clock)
        assert [*await asking._asked(own.peer_id, true[11].digest)] == true[11::-1]

    virtual(scenario)


def test_what_an_answer_says_of_a_branch_that_came_meanwhile_waits_for_our_disk(virtual):
    """It moved to another branch while it waited, and told the server of rounds of both before its disk had a state of the other one (seed 60000425)."""
    other = states()[35]
    for number in range(36, 41):
        other = SimpleNamespace(digest=digest(1000 + number), header=other.header.child(other.digest, [Member("a", number, 4)]))
    true = [committed(state) for state in states()[1:]]

    async def scenario(nodes):
        (_, ours), (node, theirs) = await nodes.streams(2)
        bell, learned, on_disk = Bell(), [], {states()[-1].digest}
        state = Cell(states()[-1], bell, nodes.clock)

        async def move_and_answer(channel):
            if state.value is not other:
                state.set(other)
                past.moved(other)
            await past_of_theirs._answer(channel)

        past_of_theirs = Past(theirs, Cell(states()[0], Bell(), nodes.clock), list, print, true, nodes.clock)
        await theirs.serve(PAST, move_and_answer)
        past = Past(ours, state, lambda: [node.peer_id], learned.extend, (), nodes.clock)
        asking = past.ask_forever(lambda ready: bell.until(lambda: state.value.digest in on_disk and ready(), 1.0))
        nodes.ends_with_the_test(asyncio.create_task(asking))
        await asyncio.sleep(60)
        assert state.value is other and not learned
        on_disk.add(other.digest)
        await asyncio.sleep(60)
        assert learned

    virtual(scenario)


def test_rounds_that_lead_in_a_circle_come_to_an_end():
    """A liar named one of our rounds as the parent of one long before it: the walk back never ended, and with it the process."""
    known = [committed(state) for state in states()[1:]]
    circle = replace(known[0], parent=known[20].digest)
    past = Past(None, Cell(states()[-1], Bell(), lambda: 0.0), list, print, [circle, *known[1:]], lambda: 0.0)
    assert past.missing() is None and [each.round for each in past._from(known[9].digest)] == list(range(10, 0, -1))


def test_the_oldest_round_is_not_believed_whose_parent_the_header_does_not_name():
    headers = [Header(run="r" * 64, schema="s" * 64)]
    for number in range(1, 600):
        headers.append(headers[-1].child(digest(number - 1), [Member("a", number, 3)]))
    last, names = SimpleNamespace(digest=digest(599), header=headers[-1]), 512
    told = [headers[number].committed_round(digest(number)) for number in range(590, 0, -1)]
    past = Past(None, Cell(last, Bell(), lambda: 0.0), list, print, (), lambda: 0.0)
    proven = past._proven(past.missing(), told)
    assert proven[-1].round == 599 - names + 1
    past._keep(proven)
    assert past.missing() is None


@pytest.mark.parametrize(
    "forged",
    [
        {"digest": digest(31)[:-4] + "9999"},
        {"samples": 10_000},
        {"round": 30},
        {"round": 1000},
        {"members": ()},
        {"parent": "9" * 64},
        {"members": (Member("a", 31, 0), Member("b", 31, 34))},
    ],
    ids=str,
)
def test_what_the_header_does_not_prove_is_not_believed(virtual, forged):
    lie = replace(committed(states()[31]), **forged)

    async def scenario(nodes):
        (_, ours), (node, theirs) = await nodes.streams(2)

        async def answer(channel):
            await channel.receive(Fetch, seconds=10)
            await channel.send(PastRounds(rounds=(lie,)), seconds=10)

        await theirs.serve(PAST, answer)
        assert not await learned_from(nodes, ours, node.peer_id)

    virtual(scenario)
