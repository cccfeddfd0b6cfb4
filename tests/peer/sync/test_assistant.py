"""A peer that trains nothing: real nodes in one loop, of which those that train cannot be dialled."""

import asyncio
import json
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch

from peer.contracts import CommittedRound, Member
from peer.results.exporting import find
from peer.results.fetching import fetch_state
from peer.sync.engine import assistant, first_state
from peer.sync.engine.assistant import Known, assist
from peer.sync.engine.cell import Phase
from peer.sync.engine.first_state import FirstState, _choices
from peer.sync.engine.net import neighbours
from peer.sync.engine.net.messages import BadMessage
from peer.sync.engine.round.groups import rank
from peer.sync.engine.state import Head, next_state
from peer.sync.engine.transfer.archive import Archive
from peer.sync.engine.transfer.disk import StateStore, read_state
from peer.sync.engine.transfer.download import CHUNKS
from peer.sync.engine.transfer.kind import KIND, Kind, ask_kinds, serve_kind
from peer.sync.engine.transfer.pace import Slow
from peer.sync.parameters import Parameters
from swarm.bans import Bans, sign_word
from swarm.errors import ExitCode, UserError
from swarm.members import Members
from swarm.records import ASSIST, FINDINGS_PER_RECORD, Finding, PeerRecord
from swarm.signing import HostKey
from tests.peer.sync.replicas import SIZE, Liar, Peer, check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import WAIT_SECONDS, holder, state_of, until

RUN = make_run(sync="parameters")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(first_state, "LOOK_SECONDS", 0.1)


class Helper:
    """`assist` on a node of its own, and what came of it."""

    def __init__(self, nodes, node, name="helper", limit=0, **options):
        self.node, self.id, self.folder = node, node.peer_id, nodes.folder / name
        self.stop, self.final_rounds = asyncio.Event(), []
        self.task = asyncio.create_task(
            assist(
                node=node, folder=self.folder, stop=self.stop, final=self.final_rounds.extend, states_limit=limit,
                wall=nodes.wall, rng=nodes.rng, **{"run": RUN} | options,
            )
        )  # fmt: skip
        nodes.ends_with_the_test(self.task)

    def rounds(self) -> list[dict]:
        path = self.folder / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def round(self) -> int:
        return max((line["round"] for line in self.rounds()), default=0)

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "settled").glob("*"))

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 60)
        await self.node.close()


async def volunteers(nodes, count) -> list[Peer]:
    """Peers that train, and that nobody can dial."""
    return [await Peer(nodes, await nodes.node(client_mode=True), RUN).start(nodes) for _ in range(count)]


def averaged(peer) -> list[dict]:
    return [line for line in peer.rounds() if line["how"] == "averaged"]


def check_digests(*peers) -> None:
    digests = {}
    for peer in peers:
        for line in peer.rounds():
            assert digests.setdefault((line["parent"], json.dumps(line["members"])), line["digest"]) == line["digest"]


async def leave(*peers: Peer) -> None:
    """In order, as when a volunteer presses Ctrl+C."""
    for peer in peers:
        peer.replica.close()
        await peer.tasks[0]
        await peer.replica.leave()
        await peer.stop()


def test_two_that_nobody_can_dial_average_through_one_who_assists_and_brings_no_samples(virtual):
    async def scenario(nodes):
        helper = Helper(nodes, await nodes.node())
        pair = await volunteers(nodes, 2)
        await until(lambda: all(sum(len(line["members"]) == 2 for line in averaged(peer)) >= 2 for peer in pair))
        (record,) = [record for record in pair[0].replica.neighbours.others() if record.peer_id == helper.id]
        assert (record.phase, record.waiting_samples, record.samples_per_second, record.client_mode) == (ASSIST, 0, 0, False)
        for peer in pair:
            assert not any(line["how"] == "solo" for line in peer.rounds())
            assert helper.id not in peer.head.header.included
            assert max(line["live_peers"] for line in [*peer.rounds(), *helper.rounds()]) == 2
            assert min(peer.replica.record().sent_bytes, peer.replica.record().received_bytes) > 0
        check_invariants(*pair)
        check_digests(*pair, helper)
        await helper.end()

    virtual(scenario)


class Keeps:
    """An auditor that keeps what it is told."""

    def __init__(self):
        self.kept, self.asked = {}, []

    def draw(self, members, num_bytes):
        self.asked.append((len(members), num_bytes))
        return [member.peer for member in members]

    def averaged(self, round, group, excerpts):
        for member in group.members:
            self.kept[member.peer, member.number] = bytes(excerpts.of[member.peer].numpy())

    def findings(self):
        return [Finding(peer=f"Qm{n}", change=0.5, error=0.25, rounds=7, reported=n == 0) for n in range(FINDINGS_PER_RECORD + 1)]


def test_an_auditor_sees_what_each_member_brought_for_its_share_and_others_see_what_it_found(virtual):
    async def scenario(nodes):
        auditor = Keeps()
        helper = Helper(nodes, await nodes.node(), auditor=auditor)
        pair = await volunteers(nodes, 2)
        await until(lambda: all(sum(len(line["members"]) == 2 for line in averaged(peer)) >= 2 for peer in pair))
        offered = {(peer.id, number): data for peer in pair for number, data in peer.offers}
        assert auditor.kept and all(offered[key] == data for key, data in auditor.kept.items())
        assert (2, 2 * SIZE) in auditor.asked, "all of the vector, at fp16: nobody else reduces"
        (record,) = [record for record in pair[0].replica.neighbours.others() if record.peer_id == helper.id]
        assert record.findings == tuple(auditor.findings()[:FINDINGS_PER_RECORD])
        assert all(not peer.replica.record().findings for peer in pair)
        await helper.end()

    virtual(scenario)


def test_two_helpers_reduce_a_part_each_and_one_may_die(virtual):
    async def scenario(nodes):
        helpers = [Helper(nodes, await nodes.node(), name) for name in ("one", "other")]
        pair = await volunteers(nodes, 2)

        def sent() -> list[int]:
            records = {record.peer_id: record for record in pair[0].replica.neighbours.others()}
            return [records[helper.id].sent_bytes if helper.id in records else 0 for helper in helpers]

        def together(peer: Peer) -> int:
            return sum(len(line["members"]) == 2 for line in averaged(peer))

        await until(lambda: all(sent()) and min(together(peer) for peer in pair) >= 2)
        dead, alive = helpers
        dead.task.cancel()
        await dead.node.close()
        before = [together(peer) for peer in pair]
        await until(lambda: all(together(peer) >= count + 2 for peer, count in zip(pair, before, strict=True)))
        assert not any(line["how"] == "solo" for peer in pair for line in peer.rounds())
        check_invariants(*pair)
        check_digests(*pair, *helpers)
        await alive.end()

    virtual(scenario)


def test_all_who_train_may_leave_and_come_back_and_go_on_from_what_the_helper_keeps(virtual):
    async def scenario(nodes):
        helper = Helper(nodes, await nodes.node())
        pair = await volunteers(nodes, 2)
        await until(lambda: min(peer.head.header.round for peer in pair) >= 1)
        await leave(*pair)
        last = max((peer.head for peer in pair), key=lambda state: state.header.samples)
        await until(lambda: any(last.digest[:12] in name for name in helper.kept()))
        assert helper.round() == last.header.round
        assert {final.digest for final in helper.final_rounds} == {line["digest"] for line in helper.rounds()}

        (new,) = await volunteers(nodes, 1)
        await until(lambda: new.head.header.round >= last.header.round + 2)
        first, *others = new.rounds()
        assert (first["how"], first["digest"]) == ("fetched", last.digest)
        assert all(line["how"] == "averaged" and [member[0] for member in line["members"]] == [new.id] for line in others)
        check_invariants(*pair, new)
        check_digests(*pair, new, helper)
        await helper.end()

    virtual(scenario)


def test_a_helper_that_starts_again_has_the_run_without_anybody_else(virtual):
    async def scenario(nodes):
        await nodes.node()  # the host's own node, by which all find each other
        first = Helper(nodes, await nodes.node())
        (one,) = await volunteers(nodes, 1)
        await until(lambda: first.round())
        await leave(one)
        await until(lambda: first.kept())
        await first.end()
        last = first.rounds()[-1]

        again = Helper(nodes, await nodes.node())
        (new,) = await volunteers(nodes, 1)
        await until(lambda: new.head.header.round > last["round"])
        assert new.rounds()[0]["digest"] == last["digest"]
        await again.end()

    virtual(scenario)


def test_a_helper_waits_for_the_first_peer_that_trains_and_can_be_stopped_meanwhile(virtual, caplog):
    caplog.set_level("INFO")

    async def scenario(nodes):
        helper = Helper(nodes, await nodes.node())
        await until(lambda: "waiting for the first peer that trains" in caplog.text)
        await helper.end()
        assert not helper.rounds()

    virtual(scenario)


def test_a_helper_that_comes_when_the_run_is_over_and_all_have_gone_ends_with_a_reason(virtual):
    run, answers = make_run(sync="parameters", total_samples=64), [None, Known(Head("e" * 64, 32)), Known(Head("e" * 64, 64), ("QmHolder123",))]
    asked = []

    async def ask():
        asked.append(len(asked))
        return answers[asked[-1]]

    async def scenario(nodes):
        helper = Helper(nodes, await nodes.node(), run=run, ask=ask)
        with pytest.raises(UserError, match=r"is over: all 64 samples .* one of the peers that had it: der123"):
            await helper.task
        assert asked == [0, 1, 2], "no answer, and a run that goes on, end nobody"
        await helper.node.close()

    virtual(scenario)


def test_a_helper_alone_makes_no_round_whoever_calls(virtual, monkeypatch, caplog):
    monkeypatch.setattr(neighbours, "RECORD_LIFE_SECONDS", 2.0)
    caplog.set_level("INFO")

    async def scenario(nodes):
        helper = await Peer(nodes, await nodes.node(), RUN, rate=0, assists=True).start(nodes)
        await until(lambda: helper.replica.neighbours.alone() and helper.at)

        def answered() -> bool:
            """Somebody calls until it is: with a record's life of 2 s, a helper on a busy machine may not be sure for a moment."""
            helper.replica.next_round.call("who died a moment later", helper.head.digest)
            return "nobody is left to assist" in caplog.text

        await until(answered)
        assert not helper.rounds() and not helper.head.header.round

    virtual(scenario)


@pytest.mark.parametrize("by_the_last", [False, True])
def test_helpers_without_anybody_who_trains_make_no_round(virtual, caplog, by_the_last):
    caplog.set_level("INFO")

    async def scenario(nodes):
        helpers = [await Peer(nodes, await nodes.node(), RUN, rate=0, assists=True).start(nodes) for _ in range(2)]
        await until(lambda: all(peer.replica.neighbours.others() and peer.at for peer in helpers))
        called = sorted(helpers, key=lambda peer: rank(peer.head.digest, peer.id))[by_the_last].replica
        called.next_round.call("who died a moment later", called.state.value.digest)
        await until(lambda: "nobody who has samples came" in caplog.text)
        await until(
            lambda: not any(peer.replica.next_round.is_called_here_or_ahead() or peer.replica.phase.value is not Phase.TRAIN for peer in helpers)
        )
        assert not any(peer.rounds() for peer in helpers)

    virtual(scenario)


def test_a_disk_that_takes_nothing_ends_the_helper_with_a_reason(virtual):
    async def scenario(nodes):
        helper = Helper(nodes, await nodes.node())
        (one,) = await volunteers(nodes, 1)
        await until(lambda: (helper.folder / "kind.json").exists())
        store = helper.folder / "state"
        store.rename(helper.folder / "away")
        store.write_text("a file where the folder was")
        with pytest.raises(UserError, match="Cannot save the state of round") as refused:
            await asyncio.wait_for(helper.task, 100)
        assert refused.value.code == ExitCode.DISK
        await one.stop()

    virtual(scenario)


def test_a_helper_without_the_memory_for_the_run_says_so_before_it_takes_any(virtual, monkeypatch):
    monkeypatch.setattr(assistant, "available_bytes", lambda: 400e6)

    async def scenario(nodes):
        helper = Helper(nodes, await nodes.node())
        (one,) = await volunteers(nodes, 1)
        with pytest.raises(
            UserError, match=r"Averaging needs 400 MB .*the state 4 kB, the next state 4 kB, the round's mean 2 kB"
        ) as refused:
            await asyncio.wait_for(helper.task, 100)
        assert refused.value.code == ExitCode.MEMORY
        await one.stop()

    virtual(scenario)


# ---------------------------------------------------------------- what is kept


def chain(count: int, **of) -> list:
    states = [state_of(torch.zeros(SIZE), **of)]
    for number in range(1, count + 1):
        states.append(next_state(states[-1], [[torch.full((SIZE,), float(number))]], [Member("a", number, 10)]))
    return states[1:]


def committed_round(state) -> CommittedRound:
    return state.header.committed_round(state.digest)


@pytest.mark.parametrize(("limit", "left"), [(0, 5), (1, 1), (3, 3)])
def test_the_newest_final_states_are_kept_whatever_the_store_deletes(tmp_path, limit, left):
    store = StateStore(tmp_path / "state", keep=1, older=False)
    archive = Archive(tmp_path / "settled", store, limit)
    states = chain(5)
    for state in states:
        store.save(state)
        archive.keep([committed_round(state)])
        archive.keep([committed_round(state)])  # told twice
    kept = sorted((tmp_path / "settled").iterdir())
    assert [path.name for path in kept] == [
        f"round-{s.header.round:08d}-samples-{s.header.samples:010d}-{s.digest[:12]}.state" for s in states[-left:]
    ]
    assert kept[-1].read_bytes() == next((tmp_path / "state").glob("*.state")).read_bytes()
    assert len(list((tmp_path / "state").glob("*.state"))) == 1


def test_a_final_state_that_was_replaced_before_it_was_written_is_not_kept(tmp_path):
    store, (first, second) = StateStore(tmp_path / "state"), chain(2)
    archive = Archive(tmp_path / "settled", store, 0)
    store.save(second)
    archive.keep([committed_round(first), committed_round(second)])
    assert [second.digest[:12] in path.name for path in (tmp_path / "settled").iterdir()] == [True]


def test_final_states_that_cannot_be_kept_are_a_reason_to_end(tmp_path):
    store, (state,) = StateStore(tmp_path / "state"), chain(1)
    archive = Archive(tmp_path / "settled", store, 0)
    store.save(state)
    (tmp_path / "settled").rmdir()
    with pytest.raises(UserError, match=r"Cannot keep final states in .*settled: No such file or directory") as refused:
        archive.keep([committed_round(state)])
    assert refused.value.code == ExitCode.DISK
    (tmp_path / "settled").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"Cannot keep final states in .*settled: File exists"):
        Archive(tmp_path / "settled", store, 0)


# ---------------------------------------------------------------- what a state looks like


def test_what_most_say_a_state_looks_like_is_believed(virtual):
    async def scenario(nodes):
        (_, asker), *others = await nodes.streams(4)
        right, wrong = Kind("right", (1000, 7)), Kind("a", (5, 0))
        for (_, streams), kind in zip(others, [right, wrong, right], strict=True):
            await serve_kind(streams, kind)
        assert await ask_kinds(asker, [node.peer_id for node, _ in others]) == [right, wrong]

    virtual(scenario)


def test_garbage_for_a_kind_of_state_is_nobodys_word(virtual):
    async def scenario(nodes):
        (_, asker), (node, liar) = await nodes.streams(2)

        async def lie(channel):
            await channel.send({"schema": "x", "sizes": [-1, 1 << 50]}, seconds=60)

        await liar.serve(KIND, lie)
        assert await ask_kinds(asker, [node.peer_id, "Qm" + "x" * 44]) == []

    virtual(scenario)


@pytest.mark.parametrize("lie", [Kind("a", (SIZE, 0)), Kind("schema", (1 << 30, 0)), Kind("schema", (SIZE + (2 << 20), 0))])
def test_who_says_another_kind_than_the_one_trainer_costs_a_helper_no_more_than_a_try(virtual, lie):
    """Of two that one peer each says nobody knows which is right: of another schema, too large for this machine, or of other states."""

    def refuse_large(kind):
        if sum(kind.sizes) >= 1 << 30:
            raise UserError("too large", fix="Use another machine.")

    async def scenario(nodes):
        state = next_state(state_of(torch.zeros(SIZE), run=RUN.digest), [[torch.ones(SIZE)]], [Member("a", 1, 8)])
        giver = await holder(nodes, state)
        await serve_kind(giver.streams, Kind("schema", (SIZE, 0)))
        ((liar, lying), (ours, _)) = await nodes.streams(2)
        await serve_kind(lying, lie)
        records = [
            PeerRecord(peer_id=peer, config=RUN.digest, schema=schema, round=1, samples=8, digest=state.digest)
            for peer, schema in ((giver.node.peer_id, "schema"), (liar.peer_id, lie.schema))
        ]
        first = FirstState(RUN, Parameters(), ours, Members(RUN))
        first._records = AsyncMock(return_value=records)
        kind, found = await asyncio.wait_for(first.found("waiting", refuse_large), 600)
        assert (kind, found.digest) == (Kind("schema", (SIZE, 0)), state.digest)
        first._records = AsyncMock(return_value=records[1:])
        if sum(lie.sizes) >= 1 << 30:
            with pytest.raises(UserError, match="too large"):
                await first.found("waiting", lambda kind: refuse_large(lie))

    virtual(scenario)


@pytest.mark.parametrize("values", [None, {}, {"schema": 1, "sizes": [1, 1]}, {"schema": "x", "sizes": [0, 0]}, {"schema": "x", "sizes": [True, 5]},
                                    {"schema": "x", "sizes": [5]}, {"schema": "x", "sizes": 5}, {"schema": "x", "sizes": [1 << 41, 0]}])  # fmt: skip
def test_what_is_no_kind_of_state_is_refused(values, tmp_path):
    with pytest.raises(BadMessage):
        Kind.from_json(values)
    path = tmp_path / "kind.json"
    path.write_text(json.dumps(values))
    assert Kind.read(path) is None


def test_a_kind_of_state_is_read_as_it_was_written(tmp_path):
    kind = Kind("schema", (1000, 7))
    kind.write(tmp_path / "kind.json")
    assert Kind.read(tmp_path / "kind.json") == kind and Kind.read(tmp_path / "none.json") is None
    assert kind.num_bytes(slots=2) == 4 * 1007 * 3


def test_the_newest_state_is_fetched_by_one_who_only_exports_it(swarm, tmp_path):
    async def scenario(nodes):
        run = make_run(total_samples=80)
        couple = await peers(nodes, 2, run)
        await until(lambda: all(peer.finished for peer in couple))
        (maddr, *_) = await couple[0].node.maddrs()
        path = await asyncio.to_thread(fetch_state, maddr, tmp_path, seconds=WAIT_SECONDS)
        state = read_state(path, couple[0].head.buffer.num_bytes)
        assert state.digest == couple[0].head.digest == couple[1].head.digest and state.header.samples >= 80
        assert find(path) == (path, run)
        for peer in couple:
            await peer.stop()
        with pytest.raises(UserError) as nobody:
            await asyncio.to_thread(fetch_state, maddr, tmp_path, seconds=0.5)
        assert nobody.value.code == ExitCode.NETWORK

    swarm(scenario)


def test_whoever_gives_no_state_in_time_is_not_waited_for_and_how_long_is_said_at_once(virtual, caplog):
    caplog.set_level("INFO")

    async def scenario(nodes):
        node = await nodes.node()
        with pytest.raises(UserError, match=r"Nobody gave a state .* more time, --wait_seconds 7200"):
            await FirstState(make_run(), Parameters(), node, Members(make_run())).within(3)
        assert "nobody who holds the state is here yet; waiting up to 3 s in all (--wait_seconds)" in caplog.text
        assert "the first peer that trains" not in caplog.text

    virtual(scenario)


def test_the_state_of_the_peer_named_is_taken_before_that_of_however_many_invented_ones():
    """One real key and six invented ones had dd-export give the stranger's state."""

    def on(peer: str, digest: str, samples: int, *parents: str) -> PeerRecord:
        return PeerRecord(peer_id=peer, config="c", schema="s", round=1, samples=samples, digest=digest, parents=parents)

    invented = [on(f"QmInvented{number}", "lie", 2**53) for number in range(6)]
    real, ahead = on("QmReal", "now", 100, "before"), on("QmAhead", "next", 120, "now", "before")
    records = [*invented, real, ahead]
    named = _choices(records, {"QmReal"}, "")
    assert named == [("now", {"QmReal"}), ("lie", {record.peer_id for record in invented})]
    assert _choices(records, (), "before")[0] == ("before", {"QmReal", "QmAhead"}), "what the server knows of"
    assert [digest for digest, _ in _choices(records, {"QmReal"}, "before")] == ["now", "before", "lie"]
    assert [digest for digest, _ in _choices(records, (), "unheard of")] == ["lie"], "left to memberships: numbers are all that is known"


def test_an_export_by_a_peers_address_gives_that_peers_state_whatever_three_strangers_sign(swarm, tmp_path):
    async def scenario(nodes):
        run = make_run(total_samples=80)
        couple = await peers(nodes, 2, run)
        await until(lambda: all(peer.finished for peer in couple))
        digest, num_bytes = couple[0].head.digest, couple[0].head.buffer.num_bytes
        for _ in range(3):
            liar = Liar(await nodes.node(), run)
            lie = {"schema": couple[0].head.header.schema, "digest": "f" * 64, "samples": 2**53, "round": 9}
            await liar.keep_saying(nodes, lambda lie=lie: lie)
        (maddr, *_) = await couple[0].node.maddrs()
        path = await asyncio.to_thread(fetch_state, maddr, tmp_path, seconds=WAIT_SECONDS)
        assert read_state(path, num_bytes).digest == digest

    swarm(scenario)


def test_a_helper_asks_somebody_else_when_a_state_does_not_come_in_its_time(virtual, monkeypatch):
    """The one that drips signs more samples, and is as good as anybody until it has failed once."""
    monkeypatch.setattr(first_state, "fetch_seconds", lambda num_bytes, contested: 1.0)

    async def scenario(nodes):
        base = state_of(torch.zeros(SIZE), run=RUN.digest)
        new, made_up = (next_state(base, [[torch.full((SIZE,), change)]], [Member("a", 1, 7 + int(change))]) for change in (1.0, 2.0))
        giver = await holder(nodes, new)
        ((drip, serving), (ours, _)) = await nodes.streams(2)
        await serving.serve(CHUNKS, lambda channel: asyncio.Event().wait())
        records = [
            PeerRecord(peer_id=peer, config=RUN.digest, schema="schema", round=1, samples=state.header.samples, digest=state.digest)
            for peer, state in ((giver.node.peer_id, new), (drip.peer_id, made_up))
        ]
        first = FirstState(RUN, Parameters(), ours, Members(RUN))
        with pytest.raises(Slow, match="has not come within 1 s"):
            await first._fetch(Kind("schema", (SIZE, 0)), records)
        assert first._failures == {drip.peer_id: 1}
        monkeypatch.undo()
        fetched = await first._fetch(Kind("schema", (SIZE, 0)), records)
        assert fetched.digest == new.digest

    virtual(scenario)


def test_a_disk_without_room_for_the_kind_of_state_costs_a_question_after_the_next_start(tmp_path, monkeypatch, caplog):
    run, kind, first = make_run(), Kind("schema", (SIZE, 0)), object()

    async def from_others(*_, **__):
        return kind, first

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(assistant, "FirstState", lambda *_, **__: SimpleNamespace(found=from_others))
    monkeypatch.setattr(Kind, "write", refuse)
    store = StateStore(tmp_path / "state")
    stored = assistant._stored_or_fetched(
        run, Parameters(), None, Members(run), store, tmp_path / "kind.json", Archive(tmp_path / "settled", store, 0)
    )
    assert asyncio.run(stored) == (kind, [first])
    assert "asked again after the next start: No space left" in caplog.text


def test_a_helper_that_lost_the_kind_of_state_alone_goes_on_from_its_own_newest_state(tmp_path, monkeypatch):
    run, states = make_run(sync="parameters"), chain(3, run=make_run(sync="parameters").digest)
    kind = Kind(states[-1].header.schema, (states[-1].buffer.num_bytes // 4, 0))

    async def from_others(*_, **__):
        return kind, states[0]

    monkeypatch.setattr(assistant, "FirstState", lambda *_, **__: SimpleNamespace(found=from_others))
    store = StateStore(tmp_path / "state")
    store.save(states[-1])
    (tmp_path / "kind.json").write_text("{")
    stored = assistant._stored_or_fetched(
        run, Parameters(), None, Members(run), store, tmp_path / "kind.json", Archive(tmp_path / "settled", store, 0)
    )
    told, (state,) = asyncio.run(stored)
    assert state.digest == states[-1].digest and Kind.read(tmp_path / "kind.json") == told == kind


def test_a_helper_whose_newest_states_are_discarded_goes_on_from_the_newest_of_before_and_forgets_them(tmp_path, caplog):
    run, key = make_run(sync="parameters"), HostKey(tmp_path / "host.key")
    bans, states = Bans(run, key.public), chain(5, run=run.digest)
    store = StateStore(tmp_path / "state", keep=2, bans=bans, older=False)
    archive = Archive(tmp_path / "settled", store, 0)
    for state in states:
        store.save(state)
        archive.keep([committed_round(state)])
    kind = Kind(states[-1].header.schema, (states[-1].buffer.num_bytes // 4, 0))
    kind.write(tmp_path / "kind.json")
    bans.hear([sign_word(key, run, states[2].digest, banned=True)])  # of its states, those on disk and the one before them
    store = StateStore(tmp_path / "state", keep=2, bans=bans, older=False)
    archive = Archive(tmp_path / "settled", store, 0)
    assert [path.stem[-12:] for path in archive._files()] == [state.digest[:12] for state in states[:2]]
    stored = assistant._stored_or_fetched(run, Parameters(), None, Members(run, bans), store, tmp_path / "kind.json", archive)
    _, (state,) = asyncio.run(stored)
    assert state.digest == states[1].digest and store.forsaken and caplog.text.count("it is discarded") == 5
