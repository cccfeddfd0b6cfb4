"""The source that leases from a dataset server, against a real server in its own process."""

import io
import json
import threading
import time
import urllib.request
from itertools import islice

import pytest
from PIL import Image

from datasetserver.prepared import ingested
from peer.contracts import CommittedRound, LeaseLost, Member
from peer.data import dataset_server
from peer.data.client.download import Corrupt
from peer.data.client.manifest import SignedShards
from peer.data.client.outbox import ROUNDS, Outbox
from peer.data.client.runs import fetch_run
from peer.data.unsaid import Unsaid
from peer.machine.device import Rank, RankGroup
from peer.samples.buckets import Buckets
from peer.samples.decoding import Decoder
from peer.samples.feed import Feed
from swarm.digest import digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.receipts import Receipts
from swarm.run_config import RunConfig
from tests.datasetserver.hosting import Host
from tests.datasetserver.test_http import signed
from tests.identities import id_of, key
from tests.looking import progress
from tests.peer.data.meddler import Meddler
from tests.swarm.test_proofs import proof

BASE = "0" * 64


def eventually(condition, seconds=60):
    """Wait until `condition()` is true; its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def report(source, peer, number, keys, *, round_=1, parent=BASE, before=0):
    digest = f"{round_:064x}"
    source.report_final(CommittedRound(digest, parent, round_, before + len(keys), (Member(id_of(peer), number, len(keys)),)))


def test_two_peers_share_an_epoch_and_see_the_pictures_with_their_captions(serve, join):
    host = serve(samples=40, shard_samples=4)
    streams = [iter(join(host.url, peer)) for peer in ("alice", "bob")]
    samples = [sample for _ in range(20) for sample in (next(stream) for stream in streams)]
    assert len({sample.key for sample in samples}) == 40
    for sample in samples:
        number = int(sample.caption.removeprefix("picture "))
        assert Image.open(io.BytesIO(sample.image)).getpixel((0, 0)) == (number,) * 3


def test_one_peer_sees_every_sample_of_an_epoch_before_the_next_epoch(serve, join):
    host = serve(samples=40, shard_samples=16)
    keys = [sample.key for sample in islice(join(host.url, "alice"), 80)]
    assert len(set(keys)) == 80
    assert {key.split(":")[0] for key in keys[:40]} == {"0"} and {key.split(":")[0] for key in keys[40:]} == {"1"}
    assert keys[:16] != sorted(keys[:16]), "shuffled within the shard"


def test_registered_final_samples_are_counted(serve, join):
    host = serve("--members", "yes")
    source = join(host.url, "alice")
    keys = [sample.key for sample in islice(source, 6)]
    receipt = source.register(1, keys)
    assert Receipts.of(source._run).hold(id_of("alice"), 1, 6, receipt) and progress(host)["ledger"]["pending"] == 6
    report(source, "alice", 1, keys)
    source.acknowledge(keys)
    assert eventually(lambda: progress(host)["samples_by_peer"] == {id_of("alice"): 6})


def test_samples_given_back_and_those_of_a_peer_that_leaves_go_to_others_at_once(serve, join):
    host = serve(samples=8, shard_samples=4)
    alice = join(host.url, "alice")
    keys = [sample.key for sample in islice(alice, 3)]
    alice.register(1, keys[:2])
    alice.give_back(keys[:2])
    alice.close()
    assert {sample.key for sample in islice(join(host.url, "bob"), 8)} >= set(keys)


def test_the_same_samples_under_another_name_are_refused_as_a_lost_lease(serve, join):
    host = serve()
    alice, bob = join(host.url, "alice"), join(host.url, "bob")
    keys = [sample.key for sample in islice(alice, 2)]
    with pytest.raises(LeaseLost, match=id_of("bob")):
        bob.register(1, keys)
    alice.register(1, keys)


def test_iteration_ends_with_the_run(serve, join):
    host = serve("--total_samples", "6", samples=6, shard_samples=6)
    source = join(host.url, "alice")
    keys = [sample.key for sample in islice(source, 6)]
    source.register(1, keys)
    report(source, "alice", 1, keys)
    assert eventually(lambda: progress(host)["finished"])
    assert len(list(source)) <= 12, "what was leased before may still come"


def test_closing_wakes_an_iteration_that_waits(serve, join):
    host = serve()
    source = join(host.url, "alice")
    stream = iter(source)
    next(stream)
    host.kill()
    seen = []
    waiting = threading.Thread(target=lambda: seen.extend(stream))
    waiting.start()
    source.close()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_server_that_was_away_loses_nothing(serve, join):
    host = serve(samples=40, shard_samples=8)
    source = join(host.url, "alice")
    stream = iter(source)
    first = [next(stream).key for _ in range(4)]
    source.register(1, first)
    host.kill()
    second = [next(stream).key for _ in range(4)]  # leased before
    source.register(2, second)
    report(source, "alice", 1, first)
    report(source, "alice", 2, second, round_=2, parent=f"{1:064x}", before=4)
    host.start()
    assert eventually(lambda: progress(host)["ledger"]["counted"] == 8, 60)
    assert not {next(stream).key for _ in range(8)} & {*first, *second}


def test_what_was_unsaid_and_held_lasts_in_a_checkpoint(serve, join):
    host = serve(samples=40, shard_samples=8)
    source = join(host.url, "alice")
    keys = [sample.key for sample in islice(source, 4)]
    host.kill()
    report(source, "alice", 1, keys)
    state = json.loads(json.dumps(source.state_dict()))
    assert [letter["path"] for letter in state["outbox"]] == ["/v1/rounds"]
    host.start()
    again = join(host.url, "alice")
    again.load_state_dict(state)
    again.register(1, keys)
    assert eventually(lambda: progress(host)["ledger"]["counted"] == 4)
    untouched = {key for keys in state["untouched"].values() for key in keys}
    assert untouched and untouched <= {sample.key for sample in islice(join(host.url, "bob"), 40)} | {
        sample.key for sample in islice(again, 40)
    }


def test_who_resumes_after_its_leases_have_ended_trains_what_it_leased_again_once(serve, join):
    """Seen in the code: what the checkpoint knew of was given back, though the same samples had been leased anew a moment before."""
    host = serve(samples=16, shard_samples=8)
    source = join(host.url, "alice")
    first = [sample.key for sample in islice(source, 2)]
    state = json.loads(json.dumps(source.state_dict()))
    source.give_back(first)
    source.close()
    again = join(host.url, "alice")
    again.load_state_dict(state)
    again.give_back(first)
    keys = [sample.key for sample in islice(again, 16)]
    assert len(set(keys)) == 16
    again.register(1, keys)
    assert eventually(lambda: progress(host)["ledger"]["pending"] == 16)


def killed(source):
    """As after SIGKILL: nothing of it runs on, and nothing is released."""
    source._background.call(source._stop.set)
    source._background.close()
    source._work.close()


def test_a_peer_killed_while_the_server_is_away_says_afterwards_what_it_had_offered(serve, join, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_server, "REGISTER_SECONDS", 0.2)
    host = serve(samples=40, shard_samples=8)
    source = join(host.url, "alice")
    keys = [sample.key for sample in islice(source, 4)]
    host.kill()
    assert source.register(7, keys) == "", "without a receipt, the contribution is offered to others"
    killed(source)
    host.start()
    other = join(host.url, "bob")
    report(other, "alice", 7, keys)  # they averaged it
    assert eventually(lambda: progress(host)["round"] == 1) and progress(host)["ledger"]["counted"] == 0
    again = join(host.url, "alice")
    iter(again).__next__()
    assert eventually(lambda: progress(host)["ledger"]["counted"] == 4, 60)
    assert eventually(lambda: not list((tmp_path / "cache-alice").glob("unsaid*")))


def test_a_lone_peer_killed_while_the_server_is_away_says_afterwards_which_rounds_were_final(serve, join, tmp_path, monkeypatch):
    """A state tells of its last eight ancestors; of an outage of more rounds nobody else would."""
    monkeypatch.setattr(dataset_server, "REGISTER_SECONDS", 0.2)
    host = serve(samples=40, shard_samples=8)
    source = join(host.url, "alice")
    stream = iter(source)
    first, second = ([sample.key for sample in islice(stream, 4)] for _ in range(2))
    host.kill()
    source.register(1, first)
    assert eventually(lambda: source._transport.away_seconds() > 0)
    report(source, "alice", 1, first)
    source.register(2, second)
    report(source, "alice", 2, second, round_=2, parent=f"{1:064x}", before=4)
    killed(source)
    host.start()
    again = join(host.url, "alice")
    next(iter(again))
    assert eventually(lambda: progress(host)["ledger"]["counted"] == 8, 60)
    assert eventually(lambda: not list((tmp_path / "cache-alice").glob("unsaid*")))


def test_what_is_said_in_time_is_not_kept_and_what_the_disk_does_not_take_ends_the_training(serve, join, tmp_path, monkeypatch):
    host = serve(samples=40, shard_samples=8)
    source = join(host.url, "alice")
    stream = iter(source)
    source.register(1, [next(stream).key])
    assert not list((tmp_path / "cache-alice").glob("unsaid*"))
    host.kill()
    monkeypatch.setattr(dataset_server, "REGISTER_SECONDS", 0.2)
    monkeypatch.setattr("peer.data.unsaid.files.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left") as caught:
        source.register(2, [next(stream).key])
    assert caught.value.code == ExitCode.DISK


def test_letters_are_kept_until_they_are_said_and_a_torn_one_costs_no_other(tmp_path):
    kept = Unsaid(tmp_path / "unsaid.jsonl")
    kept.keep({"number": 1})
    kept.keep({"number": 2})
    with (tmp_path / "unsaid.jsonl").open("ab") as file:
        file.write(b'{"n\xffmb')  # and a bit of it has flipped
    assert Unsaid(tmp_path / "unsaid.jsonl").letters() == [{"number": 1}, {"number": 2}]
    kept.said({"number": 3})
    kept.said({"number": 1})
    assert kept.letters() == [{"number": 2}]
    kept.said({"number": 2})
    assert list(tmp_path.iterdir()) == []


def test_who_starts_again_and_again_while_the_server_is_away_keeps_each_report_once(tmp_path):
    """600 starts in a night, each with the same 57 final rounds, left a file of 34,000 lines, which each report wrote anew."""
    path, sizes = tmp_path / "unsaid.jsonl", set()
    for _ in range(3):
        outbox = Outbox(Unsaid(path), news=lambda: None)
        for number in range(1, 10):
            outbox.put(ROUNDS, {"round": number, "members": []})
            outbox.keep_rounds()
        sizes.add(path.stat().st_size)
    assert len(sizes) == 1 and [letter["round"] for letter in Unsaid(path).letters()] == [*range(1, 10)]
    kept = Unsaid(path)
    kept.keep({"round": 1, "members": []})
    kept.said({"round": 1, "members": []})
    assert len(kept.letters()) == 8


def test_of_hundreds_that_wait_none_is_read_again_for_another(tmp_path, monkeypatch):
    """A peer of an outage of a day has hundreds, and keeps or forgets one with each round."""
    Unsaid(tmp_path / "unsaid.jsonl").keep({"number": 1})
    kept = Unsaid(tmp_path / "unsaid.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr("peer.data.unsaid.json.loads", lambda line: pytest.fail(f"{line} was read again"))
        kept.keep({"number": 2})
        kept.said({"number": 1})
    assert kept.letters() == Unsaid(tmp_path / "unsaid.jsonl").letters() == [{"number": 2}]


def post(host, path, **body):
    data = json.dumps({"run_id": fetch_run(host.url).run_id, "peer": id_of("alice"), **body}).encode()
    headers = {"Content-Type": "application/json", **signed(path, data)}
    with urllib.request.urlopen(urllib.request.Request(host.url + path, data=data, headers=headers), timeout=20) as response:
        return json.loads(response.read())


def test_a_lease_that_was_lost_is_not_trained_any_further(serve, join):
    host = serve("--lease_seconds", "9", samples=40, shard_samples=8)
    source = join(host.url, "alice", batch_samples=1)
    stream = iter(source)
    first = next(stream)
    state = source.state_dict()
    (lease,) = state["leases"]
    lost = [first.key, *(key for keys in state["untouched"].values() for key in keys)]
    # As if another had trained them meanwhile: they are counted, and the lease has ended.
    post(host, "/v1/contributions", number=99, keys=lost)
    members = [{"peer": id_of("alice"), "number": 99, "samples": len(lost)}]
    post(host, "/v1/rounds", digest="1" * 64, parent=BASE, round=1, samples=len(lost), members=members)
    post(host, f"/v1/leases/{lease}/release")
    assert eventually(lambda: lease not in source.state_dict()["leases"])
    with pytest.raises(LeaseLost):
        source.register(1, [first.key])
    assert not {next(stream).key for _ in range(8)} & set(lost)


def test_samples_in_work_are_not_yielded_again_when_their_lease_is_lost_and_granted_anew(serve, join):
    host = serve("--lease_seconds", "9", samples=8, shard_samples=8)
    source = join(host.url, "alice", batch_samples=1)
    stream = iter(source)
    first = [next(stream).key for _ in range(3)]
    (lease,) = source.state_dict()["leases"]
    post(host, f"/v1/leases/{lease}/release")
    assert eventually(lambda: lease not in source.state_dict()["leases"])
    rest = [next(stream).key for _ in range(5)]
    assert len({*first, *rest}) == 8
    source.register(1, first + rest)
    assert progress(host)["ledger"]["pending"] == 8


def test_leases_are_renewed_while_nothing_is_asked_for(serve, join):
    host = serve("--lease_seconds", "4", "--grace_seconds", "0", samples=8, shard_samples=8)
    source = join(host.url, "alice")
    keys = [sample.key for sample in islice(source, 3)]
    begun = progress(host)["server_time"]
    assert eventually(lambda: progress(host)["server_time"] - begun > 9)
    source.register(1, keys)
    assert progress(host)["ledger"]["pending"] == 3


def test_a_damaged_shard_in_the_cache_is_fetched_again(serve, join, tmp_path):
    host = serve(samples=8, shard_samples=8)
    first = join(host.url, "alice")
    next(iter(first))
    first.close()
    (cached,) = (tmp_path / "cache-alice" / "shards").glob("*.tar")
    good = cached.read_bytes()
    cached.write_bytes(good[:700] + bytes([good[700] ^ 1]) + good[701:])
    assert len({sample.key for sample in islice(join(host.url, "alice"), 8)}) == 8
    assert cached.read_bytes() == good


@pytest.fixture
def meddle():
    servers = []

    def start(*arguments):
        servers.append(Meddler(*arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_download_goes_on_where_the_connection_broke(serve, join, meddle):
    host = serve(samples=8, shard_samples=8)
    between = meddle(host.url, "cut", "cut")
    assert len(list(islice(join(between.url, "alice"), 8))) == 8
    (digest,) = {item["digest"] for item in manifest(host)["shards"]}
    size = manifest(host)["shards"][0]["bytes"]
    assert between.ranges == [None, f"bytes={size // 2}-", f"bytes={size // 2 + (size - size // 2) // 2}-"]
    assert between.sent == size, "no byte was sent twice"
    assert digest


def test_a_shard_damaged_on_its_way_is_fetched_again(serve, join, meddle, tmp_path):
    host = serve(samples=8, shard_samples=8)
    between = meddle(host.url, "flip")
    assert len(list(islice(join(between.url, "alice"), 8))) == 8
    assert between.ranges == [None, None]
    (cached,) = (tmp_path / "cache-alice" / "shards").iterdir()
    assert digest_bytes(cached.read_bytes()) == manifest(host)["shards"][0]["digest"]


def test_a_shard_that_the_server_no_longer_has_is_given_back_and_training_goes_on(serve, join, monkeypatch, caplog):
    asked = []

    async def first_one_lost(transport, cache, digest, size, wanted):
        asked.append(digest)
        return await fetch(transport, cache, BASE if len(asked) == 1 else digest, size, wanted)

    host, fetch = serve(samples=8, shard_samples=4), dataset_server.fetch
    monkeypatch.setattr(dataset_server, "fetch", first_one_lost)
    monkeypatch.setattr(dataset_server, "_NO_SHARD_PAUSE_SECONDS", 0.0)
    samples = list(islice(join(host.url, "alice"), 8))
    assert len({sample.key for sample in samples}) == 8 and asked[0] in asked[1:]
    (line,) = [record.getMessage() for record in caplog.records if "are given back" in record.getMessage()]
    assert line.startswith("This dataset has no such shard.") and asked[0][:16] in line


def manifest(host):
    with urllib.request.urlopen(f"{host.url}/v1/manifest/{fetch_run(host.url).manifest}", timeout=20) as response:
        return json.loads(response.read())


# -- the cache


def test_a_small_cache_stays_small_while_shards_come_and_go_and_touches_nothing_else(serve, join, tmp_path):
    host = serve(samples=40, shard_samples=4)
    size = manifest(host)["shards"][0]["bytes"]
    (tmp_path / "cache-alice" / "shards").mkdir(parents=True)
    for name in ("holiday.tar", "0.tar.part", f"{BASE}.zip"):
        (tmp_path / "cache-alice" / "shards" / name).write_bytes(bytes(10 * size))
    source = join(host.url, "alice", cache_gib=5.5 * size / 2**30)
    source._work.wanted = lambda wanted=source._work.wanted: min(wanted(), 4)  # as at a low speed: what is pinned is no excuse
    for sample in islice(source, 80):
        source.acknowledge([sample.key])
    files = {path.name: path.stat().st_size for path in (tmp_path / "cache-alice" / "shards").iterdir()}
    foreign = [files.pop(name) for name in ("holiday.tar", "0.tar.part", f"{BASE}.zip")]
    assert foreign == [10 * size] * 3
    assert len(files) >= 2 and sum(files.values()) <= 5.5 * size


def test_peers_that_sort_leased_samples_into_buckets_hold_few_of_them_and_train_each_once(tmp_path, join):
    """Even those of a ratio that hardly ever fills a batch: one picture in twenty is wide."""
    host = Host(tmp_path / "host", "--resolution", "16", "--num_buckets", "5", samples=40, shard_samples=8)
    for number, path in enumerate(sorted(host.dataset.glob("*.png"))):
        Image.new("L", [(24, 8), (16, 16), (16, 16), (12, 20)][number % 4] if number % 20 else (8, 24), number).save(path)
    host.start()
    try:
        sources, feeds, seen, round_ = {}, {}, [], 0
        for peer in ("alice", "bob"):
            source = sources[peer] = join(host.url, peer)
            sizes = {"batch_samples": 2, "accumulation": 1, "buckets": Buckets.of(source._run, 4)}
            feeds[peer] = Feed(source, Decoder(source._run), RankGroup(Rank(), "cpu"), stopping=lambda: False, **sizes)
        steps = {peer: iter(feed) for peer, feed in feeds.items()}
        while len(seen) < 100:
            for peer, source in sources.items():
                work = next(steps[peer])
                (batch,) = work.batches
                assert len({tuple(picture.shape) for picture in batch.pixels}) == 1 and len(feeds[peer].ahead()) <= 5 * (2 - 1) + 2
                round_ += 1
                source.register(round_, list(work.keys))
                report(source, peer, round_, list(work.keys), round_=round_, parent=f"{round_ - 1:064x}", before=len(seen))
                source.acknowledge(work.keys)
                seen += work.keys
        assert len(set(seen)) == len(seen) and sum(key.startswith("0:") for key in seen) == 40
        for feed in feeds.values():
            feed.close()
    finally:
        host.stop()


def test_a_source_that_rests_gives_its_samples_to_others_and_keeps_what_is_in_work(serve, join):
    host = serve(samples=16, shard_samples=4)
    alice = join(host.url, "alice", batch_samples=4)
    stream = iter(alice)
    in_work = [next(stream).key for _ in range(3)]
    alice.rest(True)
    assert eventually(lambda: progress(host)["ledger"]["leased"] == 3)
    others = iter(join(host.url, "bob", batch_samples=4))
    bobs = [next(others).key for _ in range(13)]
    assert sorted(bobs + in_work) == sorted({*bobs, *in_work}), "each of the 16 samples once"
    alice.register(1, in_work)
    assert progress(host)["ledger"]["pending"] == 3
    alice.rest(False)
    assert next(stream).key.startswith("1:"), "the next epoch: the first one is given out"


def test_held_out_pictures_come_from_the_server_and_are_never_leased_and_what_is_leased_has_its_folders_weight(serve, join, tmp_path):
    (tmp_path / "data.toml").write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "host0/data"\nloss_weight = 0.5\n')
    host = serve("--dataset", str(tmp_path / "data.toml"), "--validation_split", "0.3", samples=12, shard_samples=4)
    (shard,) = ingested(tmp_path / "data.toml.datasetserver").manifest.held_out
    source = join(host.url, "alice")
    first = next(stream := iter(source))
    eventually((tmp_path / "cache-alice" / "shards" / f"{shard.digest}.tar").exists)  # fetched before anybody asks: the first measurement has them
    aside = eventually(source.held_out)
    of_epoch = [sample for sample in [first, *islice(stream, 11)] if sample.key.startswith("0:")]
    captions = {sample.caption for sample in of_epoch}
    assert aside and len(captions) == 12 - len(aside) and not captions & {sample.caption for sample in aside}
    assert captions | {sample.caption for sample in aside} == {f"picture {number}" for number in range(12)}
    assert {sample.weight for sample in of_epoch} == {0.5}
    assert source.held_out() is aside and progress(host)["dataset_samples"] == len(captions)


def test_held_out_pictures_that_arrive_corrupt_are_not_measured_and_training_goes_on(serve, join, monkeypatch, caplog):
    async def corrupt(transport, cache, digest, size, wanted):
        if digest == aside.digest:
            raise Corrupt("Shard arrived corrupt.")
        return await fetch(transport, cache, digest, size, wanted)

    host, fetch = serve("--validation_split", "0.3", samples=12), dataset_server.fetch
    (aside,) = ingested(host.dataset.with_name("data.datasetserver")).manifest.held_out
    monkeypatch.setattr(dataset_server, "fetch", corrupt)
    source = join(host.url, "alice")
    assert eventually(lambda: source.held_out() == []) and "measures no held-out loss" in caplog.text
    assert next(iter(source)).image


def test_held_out_pictures_that_the_server_refuses_are_not_measured_and_training_goes_on(serve, join, monkeypatch, caplog):
    host = serve("--validation_split", "0.3", samples=12)
    monkeypatch.setattr(SignedShards, "held_out", lambda self, transport: transport.insist_get(f"/v1/manifest/{BASE}"))
    source = join(host.url, "alice")
    assert eventually(lambda: source.held_out() == [])
    assert "This server has another dataset" in caplog.text and "This peer measures no held-out loss" in caplog.text
    assert next(iter(source)).image


def test_a_proof_reaches_the_server_once_and_the_liar_is_told_why_it_gets_no_more(serve, join):
    host = serve("--members", "yes")
    source, liar = join(host.url, "alice"), iter(join(host.url, "liar"))
    next(iter(source))
    next(liar)
    run = RunConfig.from_mapping(fetch_run(host.url).run, where=host.url)
    source.report_proofs([proof(run, key("liar"))])
    assert eventually(lambda: progress(host)["proven"]) == {id_of("liar"): "it signed two different means of one share"}
    waiting = lambda: [letter for letter in source._outbox.letters() if letter.path == "/v1/proofs"]  # noqa: E731
    assert eventually(lambda: not waiting())  # its answer comes after the server knows
    source.report_proofs([proof(run, key("liar"), group="h")])
    assert not waiting()
    with pytest.raises(UserError, match="banned by a proof of its own key") as raised:
        list(liar)
    assert raised.value.code == ExitCode.AUTH
