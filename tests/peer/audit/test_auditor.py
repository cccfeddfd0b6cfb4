"""Whom an assisting peer audits, what it hears from the process that measures, and that its rounds never wait for that."""

import asyncio
import json
import random
import sys
from collections import Counter

import pytest
import torch

from peer.audit import auditor
from peer.audit.auditor import Auditor
from peer.audit.orders import Losses, Order, answer, read_answer
from peer.audit.tally import LEAST_ROUNDS
from peer.config import PeerConfig
from peer.contracts import Member
from peer.launch.joining import Joined
from peer.sync.engine.codec import Wire
from peer.sync.engine.round.excerpts import Excerpts
from peer.sync.engine.round.groups import Group
from swarm.errors import ExitCode, UserError
from swarm.records import FINDINGS_PER_RECORD
from swarm.run_config import RunConfig

RUN = RunConfig(model="x", sync="parameters", target_batch_size=64, wire="fp16")
WIRE = Wire("fp16", 100)
MEASURES = """
import json, sys
sys.stdin.buffer.readline()
while line := sys.stdin.buffer.readline():
    head = json.loads(line)
    first = {peer: sys.stdin.buffer.read(length)[0] for peer, length in head["excerpts"].items()}
    print(json.dumps({peer: [0.5, 0.5 + (byte - 100) / 1000 + head["round"] % 3 / 10000] for peer, byte in first.items()}), flush=True)
"""
"""In place of the process that measures: the first byte of an excerpt says what it does to the loss."""


def peers(folder, audit=1, command=MEASURES, seed=1, **options):
    config = PeerConfig(assist=True, audit=audit, datasetserver="http://127.0.0.1:1", output_dir=str(folder), **options)
    return Auditor(config, {}, Joined(RUN, "http://127.0.0.1:1"), rng=random.Random(seed), command=("-c", command))


def group(number=1, members=("a", "b", "c"), samples=(8, 8, 8)):
    return Group(f"{number:064x}"[::-1], tuple(Member(peer, number, some) for peer, some in zip(members, samples, strict=True)), ("helper",))


def keep_parent(folder, of):
    """The file of the state that the group's contributions are for."""
    (folder / "state").mkdir(exist_ok=True)
    (folder / "state" / f"samples-{8:016d}-round-{1:08d}-{of.parent[:12]}.state").touch()


def excerpts(first_bytes):
    kept = Excerpts(WIRE.parts, lambda num_bytes: list(first_bytes))
    for peer, byte in first_bytes.items():
        kept.keep(peer, 0, torch.full((WIRE.num_bytes,), byte, dtype=torch.uint8))
    return kept


async def until(true, task):
    deadline = asyncio.get_running_loop().time() + 120
    while not true():
        assert not task.done() and asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def end(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_an_order_and_its_answer_arrive_as_they_were_given(tmp_path):
    import io

    kept = excerpts({"a": 7, "b": 9})
    order = Order(round=3, state=tmp_path / "x.state", start=0, end=100, excerpts=kept.of, numbers={"a": 5, "b": 6})
    stream = io.BytesIO(b"".join(bytes(piece) for piece in order.pieces()))
    read = Order.read(stream)
    assert (read.round, read.state, read.start, read.end, read.numbers) == (3, tmp_path / "x.state", 0, 100, {"a": 5, "b": 6}) and Order.read(stream) is None
    assert list(read.excerpts) == ["a", "b"] and all(torch.equal(read.excerpts[peer], kept.of[peer]) for peer in "ab")
    found = {"a": Losses(0.5, 0.25), "b": Losses(0.5, 0.25, 0.75, 0.125)}
    assert read_answer(answer(found)) == found
    with pytest.raises(EOFError):
        Order.read(io.BytesIO(stream.getvalue()[:-1]))


def test_members_are_drawn_by_chance_and_those_measured_seldom_more_often(tmp_path):
    one = peers(tmp_path)
    members = group().members
    drawn = Counter(one.draw(members, 200)[0] for _ in range(300))
    assert set(drawn) == {"a", "b", "c"} and min(drawn.values()) > 60
    for _ in range(5):
        one._tally.add("a", 0.0)
    drawn = Counter(one.draw(members, 200)[0] for _ in range(300))
    assert 0 < drawn["a"] < 60, "nobody knows that it is not its turn"
    assert len(peers(tmp_path, audit=2).draw(members, 200)) == 2 and len(peers(tmp_path, audit=9).draw(members, 200)) == 3


def test_none_is_drawn_where_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(auditor, "available_bytes", lambda: 1000.0)
    assert len(peers(tmp_path, audit=3).draw(group().members, 200)) == 2
    assert not peers(tmp_path, audit=3).draw(group().members, 501)


def test_who_makes_the_model_worse_is_told_once_in_the_log_and_always_in_the_record(tmp_path, caplog):
    caplog.set_level("INFO")
    one = peers(tmp_path)

    async def scenario():
        measuring = asyncio.create_task(one.measure_forever())
        for number in range(1, LEAST_ROUNDS + 4):
            this = group(number)
            keep_parent(tmp_path, this)
            one.averaged(number, this, excerpts({"a": 90, "b": 91, "c": 130}))
            await until(lambda number=number: f"audited round={number} member=c" in caplog.text, measuring)
        await end(measuring)

    asyncio.run(scenario())
    assert caplog.text.count("make the model worse") == 1 and "the contributions of c make the model worse" in caplog.text
    found = one.findings()
    assert [(each.peer, each.reported) for each in found] == [("c", True), ("b", False), ("a", False)]
    assert found[0].change == pytest.approx(0.03, abs=1e-3) and found[0].rounds == LEAST_ROUNDS + 3
    assert not list((tmp_path / "audit").iterdir()), "no state is kept longer than it is measured"


def test_a_change_is_that_of_a_contribution_of_the_groups_mean_size(tmp_path):
    one = peers(tmp_path)
    this = group(samples=(4, 8, 12))
    assert one._scales(this) == {"a": 2.0, "b": 1.0, "c": pytest.approx(2 / 3)}
    assert one._scales(group(samples=(1, 100, 100)))["a"] == 4.0
    with_gradients = Auditor(one._peer, {}, Joined(RunConfig(model="x", sync="gradients"), "http://127.0.0.1:1"))
    assert set(with_gradients._scales(this).values()) == {1.0}


def test_a_slow_audit_passes_rounds_over_and_delays_none(tmp_path):
    one = peers(tmp_path, command="import sys, time; sys.stdin.buffer.read(10); time.sleep(600)")

    async def scenario():
        measuring = asyncio.create_task(one.measure_forever())
        for number in range(1, 6):
            this = group(number)
            keep_parent(tmp_path, this)
            one.averaged(number, this, excerpts({"a": 90}))  # returns at once: nothing is awaited in it
            if number == 1:
                await until(lambda: one._waiting is None, measuring)
        assert one._waiting[0].round == 5 and one._passed_over == 3
        assert len(list((tmp_path / "audit").iterdir())) == 2, "the one that is measured, and the one that waits"
        await end(measuring)

    asyncio.run(scenario())


def test_nothing_is_measured_onto_a_state_that_is_not_on_disk_or_where_nobody_was_drawn(tmp_path):
    one = peers(tmp_path)
    one.averaged(1, group(), excerpts({"a": 90}))
    keep_parent(tmp_path, group())
    one.averaged(1, group(), excerpts({}))
    assert one._waiting is None
    one.averaged(1, group(), excerpts({"a": 90}))
    assert one._waiting is not None


def test_a_state_that_cannot_be_kept_for_it_is_warned_of(tmp_path, caplog):
    one = peers(tmp_path)
    keep_parent(tmp_path, group())
    (tmp_path / "audit").rmdir()
    one.averaged(7, group(), excerpts({"a": 90}))
    assert one._waiting is None and "no audit of round=7: " in caplog.text


def test_a_folder_that_cannot_be_made_ends_the_start_with_a_reason(tmp_path):
    (tmp_path / "audit").write_text("a file")
    with pytest.raises(UserError, match="audit cannot be used") as refused:
        peers(tmp_path)
    assert refused.value.code == ExitCode.DISK


def test_what_an_earlier_start_left_is_removed(tmp_path):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "left.state").touch()
    peers(tmp_path)
    assert not list((tmp_path / "audit").iterdir())


ENDS = {
    "without hope": ("import sys; sys.stdin.buffer.readline(); sys.exit(2)", ""),
    "killed": ("import os, sys; sys.stdin.buffer.readline(); os.kill(os.getpid(), 9)", "no audit of round=1: SIGKILL ended the process that measures"),
    "killed while it answers": (
        "import os, sys; sys.stdin.buffer.readline(); sys.stdout.write('[0.'); sys.stdout.flush(); os.kill(os.getpid(), 9)",
        "no audit of round=1: SIGKILL ended the process that measures",
    ),
    "hangs": ("import time; time.sleep(600)", "no audit of round=1: it was not measured within"),
    "cannot start": (None, "no audit of round=1: [Errno 2]"),
}


@pytest.mark.parametrize("how", ENDS)
def test_however_measuring_ends_the_helper_goes_on(tmp_path, monkeypatch, caplog, how):
    caplog.set_level("INFO")
    program, words = ENDS[how]
    one = peers(tmp_path, command=program or "")
    if how == "hangs":
        monkeypatch.setattr(auditor, "_LONGEST_SECONDS", 0.01)
    keep_parent(tmp_path, group())

    async def scenario():
        measuring = asyncio.create_task(one.measure_forever())
        with monkeypatch.context() as patch:
            if program is None:
                patch.setattr(sys, "executable", str(tmp_path / "nothing"))
            one.averaged(1, group(), excerpts({"a": 90}))
            if how == "without hope":
                await asyncio.wait_for(measuring, 100)
                assert not one.draw(group().members, 200)
                keep_parent(tmp_path, group(2))
                one.averaged(2, group(2), excerpts({"a": 90}))
                assert one._waiting is None and not list((tmp_path / "audit").iterdir())
                return
            await until(lambda: words in caplog.text, measuring)
        monkeypatch.setattr(auditor, "_LONGEST_SECONDS", 100.0)
        one._command = ("-c", MEASURES)
        keep_parent(tmp_path, group(2))
        one.averaged(2, group(2), excerpts({"a": 90}))
        await until(lambda: "audited round=2 member=a" in caplog.text, measuring)
        await end(measuring)

    asyncio.run(scenario())


def test_a_record_tells_of_some_members_only(tmp_path):
    one = peers(tmp_path)
    answered = {f"Qm{n}": Losses(0.5, 0.5 - n / 100) for n in range(9)} | {"nan": Losses(float("nan"), float("nan"))}
    one._hear(1, answered, dict.fromkeys(answered, 1.0))
    found = one.findings()
    assert [each.peer for each in found] == [f"Qm{n}" for n in range(FINDINGS_PER_RECORD)]
    assert json.dumps([each.change for each in found]) and "nan" not in {each.peer for each in one._tally.findings()}


def test_what_a_contribution_does_to_its_own_samples_is_told_beside_the_rest(tmp_path, caplog):
    caplog.set_level("INFO")
    one = peers(tmp_path)
    for _ in range(2):
        one._hear(1, {"a": Losses(0.5, 0.625, 0.5, 0.25), "b": Losses(0.5, 0.25), "c": Losses(0.5, 0.5, 0.5, float("nan"))}, {"a": 2.0, "b": 1.0, "c": 1.0})
    found = {each.peer: (each.change, each.own) for each in one.findings()}
    assert found == {"a": (0.25, -0.5), "b": (-0.25, None), "c": (0.0, None)}
    assert "member=a loss_before=0.500000 loss_after=0.625000 own_before=0.500000 own_after=0.250000" in caplog.text
