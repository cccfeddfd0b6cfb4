"""The state: one digest for one state, one order over all of them, and files that are whole or passed over."""

import asyncio
import dataclasses
import itertools
import json
import os
import random
import resource
import shutil
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.contracts import Member
from peer.sync.engine import state as engine
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.round.finality import FINAL_SECONDS, Finality, safe
from peer.sync.engine.state import CHUNK_BYTES, BadState, Head, Header, State, better, next_state
from peer.sync.engine.transfer import chunk_file
from peer.sync.engine.transfer.discarded import discard
from peer.sync.engine.transfer.disk import OLDER_SECONDS, StateStore
from peer.sync.engine.vectors import SharedBuffer
from simulation.disk import Disk
from swarm.digest import canonical_json
from swarm.errors import ExitCode, UserError, run_program
from swarm.records import PeerRecord
from tests.peer.sync.swarm_tools import state_of

HEADS = st.text("ab", min_size=1, max_size=3).map(lambda digest: Head(digest, len(digest)))


def lineage(rounds: int, size: int = 10) -> list[State]:
    """A chain of states, the first of round 0."""
    states = [state_of(torch.arange(float(size)))]
    for number in range(1, rounds + 1):
        states.append(next_state(states[-1], [[states[-1].vectors(size)[0] + number]], [Member("b", number, 3), Member("a", number, 4)]))
    return states


@given(HEADS, HEADS, HEADS)
def test_one_of_two_heads_is_better_for_everybody_alike(a, b, c):
    assert better(a, b) + better(b, a) == (a != b)
    if better(a, b) and better(b, c):
        assert better(a, c)


def test_nobody_goes_back_along_a_growing_chain():
    heads = [Head.of(state) for state in lineage(12)]
    for older, newer in itertools.pairwise(heads):
        assert better(newer, older) and not better(older, newer)


def test_the_same_state_is_not_better_whatever_somebody_says_of_its_samples():
    assert not better(Head("a", 10**15), Head("a", 5))


def test_with_equal_samples_the_smaller_digest_is_right():
    assert better(Head("a", 5), Head("b", 5)) and not better(Head("b", 5), Head("a", 5)) and better(Head("b", 6), Head("a", 5))


def test_any_flipped_bit_changes_the_digest():
    size = CHUNK_BYTES // 4 + 3  # two chunks
    state = state_of(torch.zeros(size))
    for byte in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 4 * size - 1):
        buffer = SharedBuffer(4 * size)
        buffer.bytes().copy_(state.buffer.bytes())
        buffer.bytes()[byte] ^= 1
        assert State(state.header, buffer).digest != state.digest


def test_each_chunk_of_a_new_state_is_hashed_before_the_next_one_is_written(monkeypatch):
    """So that a disk that keeps the state (--state_on disk) is asked for no byte of it again."""
    floats, hashed = CHUNK_BYTES // 4, []
    base = state_of(torch.zeros(3 * floats))
    monkeypatch.setattr(engine, "hash_chunks", lambda data, hash_chunks=engine.hash_chunks: [hashed.append(one) or one for one in hash_chunks(data)])

    def pieces():
        for number in range(6):  # two of them are a chunk
            assert len(hashed) == number // 2
            yield [torch.full((floats // 2,), float(number))]

    state = next_state(base, pieces(), [Member("a", 1, 8)])
    assert len({*hashed}) == 3 and state.chunk_hashes == tuple(hashed)


def test_any_field_of_the_header_changes_the_digest():
    state = lineage(2)[-1]
    changes = {
        "run": "x", "schema": "x", "round": 9, "samples": 9, "parents": ("x",), "included": {"a": 9}, "members": (), "ancestors": (),
        "mean": "x", "elders": "e" * 12, "group": "x",
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(Header)}
    for name, value in changes.items():
        assert State(dataclasses.replace(state.header, **{name: value}), state.buffer).digest != state.digest, name


def test_a_header_comes_back_from_json_as_it_was():
    header = lineage(12)[-1].header
    assert read_header(json.loads(json.dumps(header.to_json()))) == header
    assert len(header.parents) == len(header.ancestors) == 8 and header.samples == 12 * 7 and header.included == {"a": 12, "b": 12}


def test_a_headers_json_is_canonical_however_much_of_it_was_made_for_its_parent():
    for state in lineage(12):
        assert state.header.json == canonical_json(state.header.to_json())
        again = read_header(json.loads(state.header.json))
        assert again.json == state.header.json


def test_a_header_names_its_last_512_ancestors_the_older_ones_shortly():
    states = lineage(14, size=1)
    header = states[-1].header
    assert header.elders == "".join(state.digest[:12] for state in reversed(states[:6])) and header.parents[-1] == states[6].digest
    assert not {"elders", "group"} & states[8].header.to_json().keys(), "a state from before there were any keeps its digest"
    for number in range(600):
        header = header.child(f"{number:064x}", [Member("a", 100 + number, 1)])
    assert len(header.elders) == 504 * 12 and read_header(header.to_json()) == header


FORGERIES = {
    "more samples than its members brought": {"samples": 10**15},
    "a number that is none": {"samples": "many"},
    "a negative number": {"round": -1},
    "another parent than its ancestor": {"parents": ["x"]},
    "no members": {"members": []},
    "a member that is not included": {"included": {}},
    "a past that is missing": {"ancestors": []},
    "a past in round 0": {"round": 0},
    "a group in round 0": {"round": 0, "samples": 0, "parents": [], "included": {}, "members": [], "ancestors": [], "group": "g"},
    "a group that is no text": {"group": 1},
    "more elders than rounds": {"elders": "0" * 12},
    "half an elder": {"round": 9, "elders": "0" * 6},
    "elders that are no digests": {"elders": "elders"},
    "a very long text": {"run": "x" * 1000},
    "no mapping": {"included": []},
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_header_that_contradicts_itself_is_refused(what):
    with pytest.raises(BadState):
        read_header({**lineage(2)[-1].header.to_json(), **FORGERIES[what]})


# ------------------------------------------------------------------------------------------------------------ on disk


def saved(folder, rounds=3) -> tuple[StateStore, list[State]]:
    store, states = StateStore(folder), lineage(rounds)
    for state in states[1:]:
        store.save(state)
    return store, states


def load(store: StateStore, run="run"):
    return store.load(run, "schema", 40, 64)


def test_the_last_two_states_and_an_older_one_are_kept_and_the_newest_is_read(tmp_path):
    store, states = saved(tmp_path, rounds=5)
    loaded = load(store)
    assert (loaded.digest, loaded.header) == (states[5].digest, states[5].header)
    assert torch.equal(loaded.buffer.bytes(), states[5].buffer.bytes())
    assert [path.stem[-12:] for path in store._files()] == [states[number].digest[:12] for number in (5, 4, 1)]
    assert len(list(tmp_path.iterdir())) == 3


def ages_kept(folder, minutes: Sequence[int], free: float = 1e9, recent: int = 0) -> list[int]:
    """Minutes since each state was saved, of those left after saving one at each of these minutes."""
    now, store, states = 0, StateStore(folder, wall=lambda: 60.0 * now, recent=recent), lineage(len(minutes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        for now, state in zip(minutes, states[1:], strict=True):
            path = store.save(state)
            os.utime(path, (60.0 * now, 60.0 * now))
    return sorted(int(now - path.stat().st_mtime / 60) for path in folder.glob("*.state"))


@pytest.mark.parametrize("every", [1, 7, 29, 40])
def test_an_older_state_is_kept_to_go_back_to_and_the_next_such(tmp_path, every):
    minutes = range(0, 600, every)
    kept = [ages_kept(tmp_path / str(count), minutes[:count]) for count in (2, 90 // every + 2, len(minutes))]
    assert kept[0] == [0, every]
    for best, second, *older in kept[1:]:
        assert (best, second) == (0, every) and len(older) <= 2
        assert OLDER_SECONDS / 60 <= max(older) < 2 * OLDER_SECONDS / 60 + 2 * every


def test_on_a_disk_that_is_nearly_full_older_states_go(tmp_path):
    assert len(ages_kept(tmp_path / "room", range(0, 90, 5), free=1e6)) == 4
    assert ages_kept(tmp_path / "none", range(0, 90, 5), free=1e3) == [0, 5]


def test_where_there_is_room_those_behind_the_best_are_kept_beside_older_ones(tmp_path):
    assert ages_kept(tmp_path / "room", range(0, 90, 5), recent=2)[:4] == [0, 5, 10, 15]
    assert len(ages_kept(tmp_path / "older", range(0, 90, 5), recent=2)) == 6
    assert ages_kept(tmp_path / "none", range(0, 90, 5), free=1e3, recent=2) == [0, 5]


def test_an_older_state_is_what_is_left_when_the_newer_ones_are_discarded(tmp_path):
    ages_kept(tmp_path, range(0, 200, 10))
    oldest = StateStore(tmp_path)._files()[-1]
    discard(tmp_path, [StateStore(tmp_path)._files()[-2].stem[-12:]])
    store = StateStore(tmp_path)
    assert load(store).digest.startswith(oldest.stem[-12:]) and store.forsaken


@pytest.mark.parametrize("position", [5, 60, -1, -40])
def test_after_a_flipped_byte_the_state_before_is_read(tmp_path, position):
    store, states = saved(tmp_path)
    newest = store._files()[0]
    data = bytearray(newest.read_bytes())
    data[position] ^= 1
    newest.write_bytes(data)
    assert load(store).digest == states[2].digest


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_after_a_torn_write_the_state_before_is_read(tmp_path, length):
    store, states = saved(tmp_path)
    newest = store._files()[0]
    newest.write_bytes(newest.read_bytes()[:length])
    assert load(store).digest == states[2].digest


@pytest.mark.parametrize("first", [b"[1]", b'"a"', b"{", b"{}", b"\xff"])
def test_a_state_whose_first_line_is_none_of_ours_is_neither_read_nor_handed_out(tmp_path, first):
    store, states = saved(tmp_path)
    newest = store._files()[0]
    newest.write_bytes(first + newest.read_bytes()[newest.read_bytes().index(b"\n") :])
    assert load(store).digest == states[2].digest and store.open(states[3].digest) is None
    with store.open(states[2].digest) as file:
        assert asyncio.run(file.chunk(0)) == bytes(states[2].chunk(0))


def test_a_foreign_runs_state_is_passed_over(tmp_path):
    store, _ = saved(tmp_path)
    assert load(store, run="another") is None


def test_what_a_killed_writer_left_is_swept(tmp_path):
    (tmp_path / "samples-1.tmp").write_bytes(b"half")
    StateStore(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_better_branch_with_fewer_rounds_is_not_pushed_out_by_the_branch_that_lost(tmp_path):
    store, _ = saved(tmp_path)
    base = state_of(torch.arange(10.0))
    winner = next_state(base, [base.vectors(10)], [Member("c", 1, 128)])
    store.save(winner)
    assert load(store).digest == winner.digest


def test_what_is_saved_after_a_branch_with_more_samples_lost_replaces_it(tmp_path):
    store, base = StateStore(tmp_path), state_of(torch.arange(10.0))
    for samples in (50, 20):
        newest = next_state(base, [base.vectors(10)], [Member("c", 1, samples)])
        store.save(newest)
    assert load(store).digest == newest.digest


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_brings_back_no_state_of_a_branch_that_lost(seed):
    disk, base = Disk(random.Random(seed)), state_of(torch.arange(10.0))
    for samples in (50, 20):
        newest = next_state(base, [base.vectors(10)], [Member("c", 1, samples)])
        StateStore(disk.root() / "state").save(newest)
    disk.crash(power=True)
    assert load(StateStore(disk.root() / "state")).digest == newest.digest


def test_older_states_of_a_branch_that_lost_go_with_it(tmp_path):
    minutes = range(0, 60, 20)
    ages_kept(tmp_path, minutes)
    base = state_of(torch.arange(10.0))
    winner = next_state(base, [base.vectors(10)], [Member("c", 1, 10)])  # of fewer samples than all but the first
    StateStore(tmp_path, wall=lambda: 3600.0).save(winner)
    left = StateStore(tmp_path)._files()
    assert load(StateStore(tmp_path)).digest == winner.digest and all(int(path.stem.split("-")[1]) <= 10 for path in left) and len(left) == 2


def test_older_states_make_room_on_a_full_disk(tmp_path, monkeypatch):
    ages_kept(tmp_path, range(0, 100, 10))
    assert len(list(tmp_path.iterdir())) == 4
    write, state = chunk_file.write, lineage(11)[-1]

    def on_a_full_disk(*args, **options):
        if len(list(tmp_path.iterdir())) > 2:
            raise OSError(28, "No space left on device")
        write(*args, **options)

    monkeypatch.setattr(chunk_file, "write", on_a_full_disk)
    StateStore(tmp_path).save(state)
    assert load(StateStore(tmp_path)).digest == state.digest


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_stored_states_with_as_many_samples_the_better_one_is_read(tmp_path, turned):
    store, base = StateStore(tmp_path), state_of(torch.zeros(10))
    siblings = [next_state(base, [[torch.full((10,), value)]], [Member("a", 1, 8)]) for value in (1.0, 2.0)]
    for state in sorted(siblings, key=lambda state: state.digest, reverse=turned):
        store.save(state)
    assert load(store).digest == min(state.digest for state in siblings)


def test_a_full_disk_is_one_line_and_leaves_the_older_states_intact(tmp_path, capsys):
    """The limit on a file's size stands for the full disk: the same code path, without mounting one."""
    store, states = saved(tmp_path / "states", rounds=1)
    size, limits = 300_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    large = state_of(torch.zeros(size))
    large = next_state(large, [large.vectors(size)], [Member("a", 1, 1)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        code = run_program(lambda: store.save(large) and 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert code == ExitCode.DISK, said
    assert "Cannot save the state of round 1" in said and "Traceback" not in said
    assert load(store).digest == states[1].digest and not list((tmp_path / "states").glob("*.tmp"))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot keep states"):
        StateStore(tmp_path / "file" / "states")


# ------------------------------------------------------------------------------------------------------------ final


def test_a_safe_state_makes_its_ancestors_final_each_once_and_oldest_first():
    states = lineage(5)
    finality = Finality(states[0])
    for state in states[1:]:
        finality.moved(state)
    assert [s.round for s in finality.take({states[3].digest})] == [1, 2, 3]
    assert finality.take({states[3].digest}) == []
    assert [s.round for s in finality.take({states[5].digest})] == [4, 5]


def _safe(signed: dict[str, str], met=(), on_disk=None) -> set[str]:
    """Which of the states a and b are. signed: by whom, which. on_disk: state -> for how many seconds."""
    others = [PeerRecord(peer_id=peer, config="", schema="", round=1, samples=1, digest=digest) for peer, digest in signed.items()]
    return safe("ab", others, met, lambda digest, seconds: (on_disk or {}).get(digest, -1) >= seconds)


def test_a_state_is_safe_on_our_disk_once_another_peer_has_it_or_after_two_minutes():
    assert _safe({"friend": "a"}, met={"friend"}, on_disk={"a": 0, "b": FINAL_SECONDS - 1}) == {"a"}
    assert _safe({"friend": "x"}, met={"friend"}, on_disk={"a": FINAL_SECONDS, "b": FINAL_SECONDS - 1}) == {"a"}
    assert _safe({}, on_disk={"a": 0}) == {"a"}, "we are alone"


def test_no_peer_vouches_for_a_state_that_our_disk_does_not_have():
    """Two attackers did, in worlds of the simulator: one that had averaged with us before, and a member that assists."""
    assert _safe({"liar": "a"}, met={"liar"}) == _safe({"liar": "a"}) == _safe({"liar": "a"}, met={"liar"}, on_disk={"b": 0}) == set()


def test_a_stranger_vouches_only_while_we_have_met_nobody():
    assert _safe({"stranger": "a"}, on_disk={"a": 0, "b": 0}) == {"a"}
    assert _safe({"stranger": "a", "friend": "x"}, met={"friend"}, on_disk={"a": 0}) == set()


def test_a_branch_that_lost_is_never_final():
    states = lineage(2)
    other = next_state(states[1], [states[1].vectors(10)], [Member("c", 1, 50)])
    finality = Finality(states[2])
    finality.moved(other)
    assert [s.digest for s in finality.take({states[2].digest, other.digest})] == [states[1].digest, other.digest]


def test_what_we_made_alone_waits_until_it_is_final_however_far_ahead_the_state_is_that_we_fetch():
    """Only we know what is in it: whoever went on from it names the last eight rounds."""
    states = lineage(30)
    finality = Finality(states[1])
    finality.moved(states[2])
    finality.moved(states[30])
    assert [s.round for s in finality.take({states[30].digest})] == [1, 2, *range(22, 31)]


def test_after_a_power_cut_the_rounds_before_those_that_the_header_names_are_told_as_well():
    states = lineage(12)
    earlier = [state.header.committed_round(state.digest) for state in states[1:4]]
    finality = Finality(states[12], earlier)
    assert [s.round for s in finality.take({states[12].digest})] == [*range(1, 13)]


@given(st.integers(1, 8), st.integers(0, 8))
def test_whoever_joins_late_can_report_what_happened_before(rounds, known):
    states = lineage(rounds)
    finality = Finality(states[0])
    finality.moved(states[-1])
    reported = finality.take({states[-1].digest})
    assert sum(m.samples for s in reported for m in s.members) == states[-1].header.samples


def test_the_name_of_a_state_that_a_killed_process_gave_is_made_durable_before_anything_is_reported(tmp_path, monkeypatch):
    """Killed between the name and the flush, a peer came back, read its state, reported it as final, and lost it to a power cut."""
    flushed = []
    monkeypatch.setattr("swarm.files.flush", flushed.append)
    StateStore(tmp_path / "state")
    assert tmp_path / "state" in flushed
