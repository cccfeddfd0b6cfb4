"""The parts of the source that leases: what is leased ahead, pauses between tries, which shards are chosen in an outage."""

import asyncio
import contextlib
import gzip
import itertools
import json
import logging
import random
import shutil
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeout

import pytest
from aiohttp import web

from peer.data.client.outage import Seen, choose
from peer.data.client.outbox import CONTRIBUTIONS, PROOFS, ROUNDS, Outbox
from peer.data.client.transport import Backoff, Refusal, Reply, ServerAway, Transport, checked, retry_after
from peer.data.client.work import Lease, ShardEpoch, Work
from peer.data.unsaid import Unsaid
from swarm.digest import digest_bytes
from swarm.protocol import ErrorBody, LeasedShard, ProofsAnswer, Shard
from swarm.records import HostWord
from tests.clock import Clock


def leased(shard, samples=100, epoch=0):
    return LeasedShard(epoch=epoch, shard=shard, digest=digest_bytes(bytes([shard])), bytes=10, samples=samples, skip=[])


def item(lease, shard, samples=100):
    return ShardEpoch(lease, leased(shard, samples), deque(range(samples)), path="here")


def test_what_is_leased_ahead_is_ten_seconds_of_work_by_the_measured_speed_and_two_batches_at_least():
    clock = Clock()
    work, lease = Work(4, clock), Lease("1" * 32)
    assert work.wanted() == 0, "nobody asks for samples yet"
    work.begin()
    assert work.wanted() == 8, "its speed is not known yet"
    shard_epochs = [item(lease, shard) for shard in range(10)]
    work.add(lease, shard_epochs)
    taken = work.samples(lambda path, samples: range(100))
    for samples_per_second in (8, 64):
        for _ in range(4 * samples_per_second):
            next(taken)
            clock.now += 1 / samples_per_second
        assert work.wanted() + sum(len(item.left) for item in shard_epochs) == 10 * samples_per_second
    work.lose(lease)
    assert work.wanted() == 640
    work.close()
    assert work.wanted() == 0


def test_a_peer_that_takes_a_window_at_a_time_leases_by_what_it_trains_and_not_by_what_it_takes():
    """64 samples in a third of a second, then 32 seconds of training: 2 a second, not 200."""
    clock = Clock()
    work, lease = Work(4, clock, window_samples=64), Lease("1" * 32)
    work.begin()
    assert work.wanted() == 64, "a window, whatever its speed"
    work.add(lease, [item(lease, shard) for shard in range(10)])
    taken, rates = work.samples(lambda path, samples: range(100)), set()
    for _ in range(10):
        for _ in range(64):
            next(taken)
            clock.now += 0.005
            rates.add(round(work._speed.rate, 1))
        clock.now += 32
    assert rates == {0, 2}


def test_who_resumes_holds_no_lease_of_which_nothing_was_in_work():
    """Its renewal was answered by "has ended", and the log said: lost a lease of 0 samples."""
    work, key = Work(4, Clock()), "0:0:1"
    work.load_state_dict({"leases": {"1" * 32: [], "2" * 32: [key]}, "own": [], "registered": []})
    assert [(lease.id, lease.keys) for lease in work.leases()] == [("2" * 32, {key})]


def test_a_unit_leased_again_before_its_first_lease_is_known_to_be_lost_yields_each_sample_once():
    work = Work(4, Clock())
    work.begin()
    first, second = Lease("1" * 32), Lease("2" * 32)
    work.add(first, [item(first, 0, 6)])
    taken = work.samples(lambda path, samples: range(samples))
    keys = [next(taken)[0] for _ in range(2)]
    work.add(second, [item(second, 0, 6)])  # the server had taken the first one back
    keys += [next(taken)[0] for _ in range(4)]
    work.lose(first)
    work.end()
    assert sorted(keys) == [f"0:0:{index}" for index in range(6)] and not list(taken)
    assert set(work.state_dict()["leases"][second.id]) == set(keys), "they are ours by the second lease"


def test_a_lease_that_is_granted_while_a_peer_lies_down_changes_nothing():
    work, lease = Work(4, Clock()), Lease("1" * 32)
    work.begin()
    work.add_own(item(None, 0, 2))
    key, *_ = next(work.samples(lambda path, samples: range(samples)))
    work.rest(True)
    assert not work.add(lease, [item(lease, 0, 2)]) and not list(work.leases())
    assert work.any_own([key]), "nobody leased it to us, and the server is to hear so"


def test_rounds_that_wait_are_on_the_disk_once_the_server_is_found_away(tmp_path):
    """Reports put in just before an outage were in memory alone: a peer killed in it took them along, and the ledger never heard of a round."""

    async def scenario():
        async with Transport("http://127.0.0.1:1", found_away=outbox.keep_rounds) as transport:
            with pytest.raises(ServerAway):
                await transport.post("/v1/leases", {})
            kept = unsaid.letters()
            with pytest.raises(ServerAway):
                await transport.post("/v1/leases", {})
            return kept

    unsaid = Unsaid(tmp_path / "unsaid.jsonl")
    outbox = Outbox(unsaid, news=lambda: None)
    first, second = ({"round": number, "members": []} for number in (1, 2))
    outbox.put(ROUNDS, first)
    outbox.put("/v1/leases/1/release", {"keys": []})
    outbox.put(ROUNDS, second)
    assert not unsaid.letters()
    assert asyncio.run(scenario()) == [first, second] and unsaid.letters() == [first, second], "each once"
    assert [letter.body for letter in Outbox(unsaid, news=lambda: None).letters()] == [first, second]


def test_a_refusal_that_comes_as_the_patience_ends_is_one(tmp_path):
    """Or the contribution is offered to the swarm, and the server never hears of it."""

    class Refuses:
        async def insist(self, path, body, model=None):
            raise refusal

    def late(answer, seconds):
        if seconds:
            asyncio.run(outbox.deliver(Refuses()))
            raise FutureTimeout
        return answer.result(seconds)

    refusal = Refusal(409, ErrorBody(code="not_held", message="It is another's.", fix="Lease again."))
    unsaid = Unsaid(tmp_path / "unsaid.jsonl")
    outbox = Outbox(unsaid, news=lambda: None, result=late)
    letter = outbox.put(CONTRIBUTIONS, {"number": 1, "keys": ["0:0:0"]})
    with pytest.raises(Refusal, match="another's"):
        outbox.answered(letter, 5.0)
    assert not unsaid.letters() and not outbox


def test_the_hosts_words_that_come_with_the_answer_to_a_proof_are_heard(tmp_path):
    class Answers:
        async def insist(self, path, body, model=None):
            return ProofsAnswer(banned=[], bans=[word]) if path == PROOFS else None

    heard = []
    word = HostWord(about="f" * 64, at=1, banned=True, trusted=False, reason="a wrong mean", signature="s")
    outbox = Outbox(Unsaid(tmp_path / "unsaid.jsonl"), news=lambda: None, hear=heard.extend)
    for path in (ROUNDS, PROOFS):
        outbox.put(path, {})
    asyncio.run(outbox.deliver(Answers()))
    assert heard == [word] and not outbox


def test_a_report_that_the_disk_does_not_take_waits_in_memory_and_that_is_said_once(tmp_path, caplog):
    unsaid = Unsaid(tmp_path / "no folder" / "unsaid.jsonl")
    outbox = Outbox(unsaid, news=lambda: None)
    outbox.put(ROUNDS, {"round": 1, "members": []})
    for _ in range(3):
        outbox.keep_rounds()
    assert len(outbox) == 1 and not unsaid.letters() and caplog.text.count("cannot keep the reports") == 1
    (tmp_path / "no folder").mkdir()
    outbox.keep_rounds()
    assert unsaid.letters() == [{"round": 1, "members": []}], "once there is room"
    outbox.put(ROUNDS, {"round": 2, "members": []})
    shutil.rmtree(tmp_path / "no folder")
    outbox.keep_rounds()
    assert caplog.text.count("cannot keep the reports") == 2, "full anew"


def test_pauses_grow_to_half_a_minute_differ_from_peer_to_peer_and_are_never_shorter_than_the_server_asks():
    def pauses(uniform, wait=0.0, tries=8, busy=False):
        slept = []

        async def sleep(seconds):
            slept.append(seconds)

        async def fail():
            backoff = Backoff(sleep, uniform)
            for _ in range(tries):
                await backoff.wait("a question", ServerAway("no answer", wait, busy=busy))

        asyncio.run(fail())
        return slept

    assert pauses(lambda low, high: (low + high) / 2) == [1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses(lambda low, high: low) == [0.75 * pause for pause in (1, 2, 4, 8, 16, 30, 30, 30)]
    assert max(pauses(lambda low, high: high)) == 37.5
    assert len({tuple(pauses(random.Random(seed).uniform)) for seed in range(10)}) == 10
    for seed in range(10):
        assert min(pauses(random.Random(seed).uniform, wait=17.0)) >= 17
        paused = pauses(random.Random(seed).uniform, wait=5.0, busy=True)
        assert min(paused) >= 5 and max(paused) <= 6.25, "a run that was paused for long goes on as soon as one paused for a moment"


def test_a_run_that_its_host_has_paused_is_news_and_no_outage(caplog):
    async def no_time(seconds):
        pass

    async def pauses():
        backoff = Backoff(no_time)
        for reply in (paused, paused, away, away, paused):
            with pytest.raises(ServerAway) as raised:
                checked(reply)
            await backoff.wait("/v1/leases", raised.value)

    caplog.set_level("INFO")
    error = {"code": "run_paused", "message": "The host has paused the run at 96 samples.", "fix": "Wait."}
    paused, away = Reply(503, json.dumps({"error": error}).encode(), {"Retry-After": "5"}), Reply(502, b"no", {})
    asyncio.run(pauses())
    told = (logging.INFO, "The host has paused the run at 96 samples; waiting")
    (first, second, last) = [(record.levelno, record.message) for record in caplog.records]
    assert first == last == told and second[0] == logging.WARNING and second[1].startswith("the dataset server is away (/v1/leases): status 502")


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("7", 7),
        (" 7 ", 7),
        ("0", 0),
        ("99999", 3600),
        ("9" * 50, 60),
        ("-1", 60),
        ("Fri, 31 Dec 2027 23:59:59 GMT", 60),
    ],
)
def test_retry_after_is_read_as_seconds_within_bounds(said, seconds):
    assert retry_after({} if said is None else {"Retry-After": said}) == seconds


def shards(count):
    sides = {name: [8] * 4 for name in ("widths", "heights", "image_bytes")}
    return [Shard(index=index, digest=digest_bytes(bytes([index])), bytes=10, samples=4, **sides) for index in range(count)]


def test_in_an_outage_a_peer_chooses_what_is_on_its_disk_and_it_has_not_had_each_peer_in_an_order_of_its_own():
    known, here = lambda epoch: shards(8), {digest_bytes(bytes([index])) for index in range(6)}
    orders = []
    for peer in ("alice", "bob"):
        seen = Seen()
        for index in (0, 1, 2):
            seen.lease(leased(index, epoch=3))
        chosen = [(item.epoch, item.shard) for item in itertools.islice(choose(known, seen, here.__contains__, peer), 9)]
        assert {(3, 3), (3, 4), (3, 5)} == set(chosen[:3]) and {(4, index) for index in range(6)} == set(chosen[3:])
        orders.append(chosen)
    assert orders[0] != orders[1]


def test_an_epoch_that_a_grown_dataset_begins_with_more_shards_is_chosen_from_with_all_of_them():
    seen = Seen()
    seen.lease(leased(0, epoch=0))
    chosen = choose(lambda epoch: shards(2 if epoch < 1 else 4), seen, lambda digest: True, "alice")
    assert sorted((item.epoch, item.shard) for item in itertools.islice(chosen, 5)) == [(0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_nothing_is_chosen_when_nothing_is_on_the_disk_or_no_epoch_is_known():
    seen = Seen()
    assert list(choose(lambda epoch: shards(4), seen, lambda digest: True, "alice")) == []
    seen.lease(leased(0))
    assert list(choose(lambda epoch: shards(4), seen, lambda digest: False, "alice")) == []


def test_only_the_epochs_that_still_matter_are_remembered():
    seen = Seen()
    for epoch in range(5):
        seen.lease(leased(0, epoch=epoch))
    assert [(epoch, 0) in seen for epoch in range(6)] == [False, False, False, True, True, False]


@contextlib.asynccontextmanager
async def serving(answer):
    """The URL of a server that gives this answer to every GET."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def streamed(answer, found_away):
    """What streaming a shard from a server raises that gives this answer, and for how long the server is away then."""
    async with serving(answer) as url, Transport(url, clock=itertools.count(1.0).__next__, found_away=found_away) as transport:
        with pytest.raises((Refusal, ServerAway)) as raised:
            async with transport.stream("/v1/blobs/0.tar", {}):
                pass
        return raised.value, transport.away_seconds()


def test_a_shard_that_the_server_has_not_is_a_refusal_and_a_proxys_404_is_an_outage():
    told = []
    no_shard = {"error": {"code": "no_such_shard", "message": "This dataset has no such shard.", "fix": "See /v1/manifest/0."}}

    async def refuse(request):
        return web.json_response(no_shard, status=404)

    async def lost(request):
        return web.Response(status=404, text="404 page not found")

    async def empty(request):
        return web.Response(status=204)

    refusal, away = asyncio.run(streamed(refuse, lambda: told.append("away")))
    assert (refusal.status, refusal.code, away, told) == (404, "no_such_shard", 0.0, [])
    for answer, what in ((lost, "status 404 and something that is not an answer"), (empty, "status 204")):
        error, away = asyncio.run(streamed(answer, lambda: told.append("away")))
        assert isinstance(error, ServerAway) and what in str(error) and away > 0
    assert told == ["away", "away"]


def test_what_a_server_compresses_unasked_is_not_decompressed():
    bomb, wanted = gzip.compress(bytes(random.Random(20).randrange(8, 64) << 20)), []

    async def answer(request):
        wanted.append(request.headers.get("Accept-Encoding"))
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async def ask():
        async with serving(answer) as url, Transport(url) as transport:
            reply = await transport.insist_get("/v1/run")
            async with transport.stream("/v1/blobs/0.tar", {}) as response:
                return reply.body, await response.content.read()

    assert asyncio.run(ask()) == (bomb, bomb) and wanted == ["identity"] * 2
