"""What is refused of a state by its header alone. The forger draws its values at random and knows no limit of ours."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.cell import Bell, Cell
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.round.heads import Heads
from peer.sync.engine.round.met import Met
from peer.sync.engine.round.plausible import Plausible
from peer.sync.engine.state import Head, Header, State, next_state
from peer.sync.engine.transfer.discarded import Discarded, discard
from peer.sync.engine.transfer.disk import StateStore
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.clock import Clock
from tests.peer.sync.swarm_tools import state_of

TARGET = 40


class _NeverEnds:
    @staticmethod
    def refusal(header: Header) -> str:
        return ""


def made(*rounds: list[Member], after: State | None = None) -> State:
    state = after or state_of(torch.zeros(4))
    for members in rounds:
        state = next_state(state, [[torch.ones(4)]], members)
    return state


def judge(tmp_path, ours: State, *, issued: int | None = None, clock: Clock | None = None) -> Plausible:
    clock = clock or Clock()
    heads = Heads(Met(tmp_path / "met.json", "run"), list, ours, clock=clock)
    state, trainer = Cell(ours, Bell(), clock), SimpleNamespace(issued=issued)
    return Plausible(RunConfig(model="x", target_batch_size=TARGET), "ann", state, trainer, heads, _NeverEnds, Discarded(tmp_path))


def refusal(plausible: Plausible, header: Header) -> str:
    return plausible.refusal(Head("f" * 64, header.samples, header.parents), header)


def test_what_an_honest_swarm_makes_is_not_refused(tmp_path):
    state = made([Member("ann", 1, 8), Member("bob", 7, 2 * TARGET)], [Member("bob", 9, TARGET)])

    assert refusal(judge(tmp_path, made(), issued=1), state.header) == ""


@pytest.mark.parametrize("seed", range(20))
def test_no_member_has_more_samples_than_a_peer_may_hold(tmp_path, seed):
    draw = random.Random(seed)
    forged = made([Member("bob", 1, draw.randrange(2 * TARGET + 1, 2**53))], *[[Member("cy", n + 1, 5)] for n in range(draw.randrange(8))])

    assert "samples of one member" in refusal(judge(tmp_path, made()), forged.header)


def test_a_past_of_two_to_the_53_samples_is_refused(tmp_path):
    honest = made(*[[Member("bob", n + 1, 5)] for n in range(12)]).header
    more = 2**53 - 1 - honest.samples
    ancestors = tuple(dataclasses.replace(ancestor, samples=ancestor.samples + more) for ancestor in honest.ancestors)
    forged = read_header(dataclasses.replace(honest, samples=2**53 - 1, ancestors=ancestors).to_json())

    assert "samples in 12 rounds" in refusal(judge(tmp_path, made()), forged)


@pytest.mark.parametrize("seed", range(20))
def test_a_number_that_nobody_could_count_beyond_is_refused(tmp_path, seed):
    draw = random.Random(seed)
    honest = made([Member("bob", 1, 5)], [Member("bob", 2, 5)]).header
    forged = dataclasses.replace(honest, included={**honest.included, "victim": draw.randrange(2**20, 2**53)})

    assert "contribution number" in refusal(judge(tmp_path, made()), forged)


def test_a_state_with_a_contribution_that_we_never_made_is_refused(tmp_path):
    forged = made([Member("ann", 6, 5), Member("bob", 1, 5)]).header
    ours = judge(tmp_path, made(), issued=5)
    assert "we have made 5" in refusal(ours, forged)

    ours._trainer.issued = 6

    assert refusal(ours, forged) == ""


def test_a_peer_that_lost_its_folder_takes_the_swarms_word_for_its_number(tmp_path):
    assert refusal(judge(tmp_path, made(), issued=None), made([Member("ann", 6, 5)]).header) == ""


def test_samples_grow_no_faster_than_a_thousand_peers_train(tmp_path):
    ours, clock = made([Member("bob", 1, 5)]), Clock()
    plausible = judge(tmp_path, made(), clock=clock)
    plausible._state.set(ours)
    header = made(*[[Member(f"peer-{n:05}", 1, 2 * TARGET) for n in range(400)]] * 3).header

    assert "samples more than ours" in refusal(plausible, header)

    clock.now += 60

    assert refusal(plausible, header) == ""


def test_growth_is_not_judged_by_a_state_that_an_earlier_process_left(tmp_path):
    header = made(*[[Member(f"peer-{n:05}", 1, 2 * TARGET) for n in range(400)]] * 3).header

    assert refusal(judge(tmp_path, made([Member("bob", 1, 5)])), header) == ""


def test_a_discarded_state_and_what_descends_from_it_are_refused(tmp_path):
    forged = made([Member("bob", 1, 5)])
    child = made([Member("bob", 2, 5)], after=forged)
    discard(tmp_path, [forged.digest[:8]])
    ours = judge(tmp_path, made())

    assert "discarded" in ours.refusal(Head.of(forged), forged.header) and "discarded" in ours.refusal(Head.of(child), child.header)
    assert refusal(ours, made([Member("bob", 1, 6)]).header) == ""


def test_a_run_goes_on_from_the_best_state_on_disk_that_is_not_discarded(tmp_path):
    honest = made([Member("bob", 1, 5)])
    forged = made([Member("eve", 1, 80)], after=honest)
    for state in (honest, forged):
        StateStore(tmp_path).save(state)
    discard(tmp_path, [forged.digest])

    assert StateStore(tmp_path).load("run", "schema", honest.buffer.num_bytes, TARGET).digest == honest.digest


@pytest.mark.parametrize("name", ["", "abc", "../../etc/passwd", "G" * 64, "a" * 65])
def test_what_names_no_state_cannot_be_discarded(tmp_path, name):
    with pytest.raises(UserError, match="names no state"):
        discard(tmp_path, [name])


@pytest.mark.parametrize("damaged", [b"0123456789abcdef\na", b"01234567\xff9abcdef\n", b"0123456789abcdeg\n"])
def test_a_damaged_list_of_discarded_states_is_refused_and_discards_nothing_else(tmp_path, damaged):
    (tmp_path / "discarded").write_bytes(damaged)
    with pytest.raises(UserError, match="Cannot read") as caught:
        Discarded(tmp_path)
    assert caught.value.fix == "Restore or delete it."
