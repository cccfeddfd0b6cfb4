"""Half an hour without the dataset server, by the peers' clock: they train on, and in the end every sample is counted once and none is lost."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from datasetserver.orders import give
from peer.contracts import CommittedRound, Member
from peer.data import dataset_server
from peer.data.client import transport
from peer.data.client.manifest import SignedShards
from peer.data.client.outage import Seen
from peer.data.client.runs import fetch_run
from peer.data.dataset_server import DatasetServer
from swarm.run_config import RunConfig
from swarm.signing import KnownHosts
from tests.clock import Clock
from tests.datasetserver.hosting import Host, until
from tests.identities import id_of, key
from tests.looking import progress

SAMPLES, SHARD, BATCH = 80, 4, 4


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path / "host", samples=SAMPLES, shard_samples=SHARD).start()
    yield host
    host.stop()


@pytest.fixture
def hasty(monkeypatch):
    """Real seconds are short; those that the outage lasts are the clock's."""
    monkeypatch.setattr(dataset_server, "REGISTER_SECONDS", 0.2)
    monkeypatch.setattr(dataset_server, "OUTAGE_SECONDS", 1.0)
    monkeypatch.setattr(transport, "FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(transport, "LONGEST_PAUSE_SECONDS", 0.5)


class Peer:
    """What a peer's trainer does with its source. clock: stands still, so that no speed is measured and two batches are leased ahead, no more."""

    def __init__(self, name, url, folder, clock, run=None):
        self.hosts = KnownHosts(folder / f"{name}-hosts.json")
        self.run = run or RunConfig.from_mapping(fetch_run(url, 20, known_hosts=self.hosts).run, where=url)
        self.name, self.number, self.keys, self.folder = id_of(name), 0, [], folder / name
        self.source = DatasetServer(
            url, self.run, key=key(name), cache_dir=self.folder, cache_bytes=2**30, batch_samples=BATCH, clock=clock, known_hosts=self.hosts
        )
        self.stream = iter(self.source)

    def contribute(self):
        """Train a batch and register it; its member in the round."""
        self.offered = [sample.key for sample in itertools.islice(self.stream, BATCH)]
        self.number += 1
        self.source.register(self.number, self.offered)
        return Member(self.name, self.number, len(self.offered))

    def report_final(self, committed_round):
        self.source.report_final(committed_round)
        self.source.acknowledge(self.offered)
        self.keys += self.offered


class Swarm:
    def __init__(self, *peers):
        self.peers, self.round, self.samples, self.digest = peers, 0, 0, "0" * 64

    def rounds(self, count):
        for _ in range(count):
            members = tuple(peer.contribute() for peer in self.peers)
            self.round, parent = self.round + 1, self.digest
            self.samples += sum(member.samples for member in members)
            self.digest = f"{self.round:064x}"
            for peer in self.peers:
                peer.report_final(CommittedRound(self.digest, parent, self.round, self.samples, members))


def test_peers_train_through_half_an_hour_without_their_server_and_every_sample_counts_once(host, hasty, tmp_path):
    clock = Clock()
    peers = [Peer(name, host.url, tmp_path, clock) for name in ("alice", "bob")]
    swarm = Swarm(*peers)
    try:
        swarm.rounds(6)
        before = {key for peer in peers for key in peer.keys}
        until(lambda: not any(peer.source._work.short() for peer in peers))
        host.kill()
        swarm.rounds(1)  # what was leased before
        until(lambda: all(peer.source._transport.away_since is not None for peer in peers))
        clock.now += 1801
        swarm.rounds(5)  # far more than was leased
        own = {key for peer in peers for key in peer.keys} - before
        assert any(key.startswith("1:") for key in own), "of the next epoch, which nobody has leased"
        host.start()
        until(lambda: not any(peer.source._outbox for peer in peers))
        swarm.rounds(3)
        until(lambda: progress(host)["samples"] == swarm.samples and not progress(host)["ledger"]["pending"])
    finally:
        for peer in peers:
            peer.source.close()
    trained = {key for peer in peers for key in peer.keys}
    assert {key.partition(":")[0] for key in trained} == {"0", "1"}
    figures = progress(host)
    assert figures["ledger"]["counted"] == sum(figures["samples_by_peer"].values()) == len(trained)
    assert figures["ledger"]["leased"] == 0
    carol = Peer("carol", host.url, tmp_path, clock)
    try:
        rest = list(itertools.takewhile(lambda key: not key.startswith("2:"), (sample.key for sample in carol.stream)))
    finally:
        carol.source.close()
    everything = {f"{epoch}:{shard}:{index}" for epoch in (0, 1) for shard in range(SAMPLES // SHARD) for index in range(SHARD)}
    assert not trained & set(rest), "counted, and trained again"
    assert trained | set(rest) == everything, "lost"
    assert len(rest) == len(set(rest))


def test_a_peer_that_starts_while_its_server_is_away_trains_what_its_disk_has_of_the_next_epoch(host, hasty, tmp_path, caplog):
    clock = Clock()
    alice = Peer("alice", host.url, tmp_path, clock)
    Swarm(alice).rounds(3)
    alice.source.close()
    host.kill()
    again = Peer("alice", host.url, tmp_path, clock, alice.run)
    again.number = alice.number
    try:
        first = iter(again.stream)
        with ThreadPoolExecutor(1) as thread:
            sample = thread.submit(next, first)
            until(lambda: again.source._transport.away_since is not None)
            clock.now += 30
            assert sample.result(20).key.startswith("1:")
        own = [sample.result().key, *(each.key for each in itertools.islice(first, BATCH - 1))]
        again.source.register(4, own)
        host.start()
        until(lambda: not again.source._outbox)
        round_ = CommittedRound("a" * 64, f"{3:064x}", 4, 4 * BATCH, (Member(alice.name, 4, BATCH),))
        again.source.report_final(round_)
        until(lambda: progress(host)["samples"] == 4 * BATCH)
    finally:
        again.source.close()
    once_more, chosen = Peer("alice", host.url, tmp_path, clock, alice.run), {tuple(map(int, key.split(":")[:2])) for key in own}
    once_more.source.close()
    assert chosen and all(item in once_more.source._seen for item in chosen), "else the same is trained after each start"


@pytest.mark.parametrize("damage", ["{", "[]", None])
def test_what_was_kept_for_such_a_start_is_passed_over_where_it_is_damaged_or_not_the_hosts(host, tmp_path, caplog, damage):
    alice = Peer("alice", host.url, tmp_path, Clock())
    next(alice.stream)
    alice.source.close()
    manifest, seen = (next(alice.folder.glob(f"{name}-*.json")) for name in ("manifest", "seen"))
    assert SignedShards(alice.run, alice.hosts, manifest).of_epoch(0) and Seen(seen).epoch == 0
    manifest.write_text(damage or json.dumps({**json.loads(manifest.read_text()), "signature": "00"}))
    seen.write_text(damage or "{}")
    assert not SignedShards(alice.run, alice.hosts, manifest).of_epoch(0) and Seen(seen).epoch == -1
    assert f"ignored {manifest}" in caplog.text and f"ignored {seen}" in caplog.text


def test_a_paused_run_gives_no_samples_and_takes_none_away_and_an_ended_one_ends(tmp_path):
    host = Host(tmp_path / "host", "--lease_seconds", "15", samples=8, shard_samples=4).start()
    work_dir = host.dataset.with_name(host.dataset.name + ".datasetserver")
    peer = Peer("alice", host.url, tmp_path, Clock())
    try:
        first = next(peer.stream).key
        give(work_dir, "paused")
        until(lambda: peer.source._work.paused)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(lambda: next(peer.stream).key)
            until(lambda: progress(host)["state"] == "paused")
            assert not second.done()
            peer.source.register(1, [first])
            give(work_dir, "running")
            assert second.result(120) != first
        give(work_dir, "ended")
        until(lambda: progress(host)["finished"])
        assert len(list(peer.stream)) <= 12, "no more than what had been leased"
    finally:
        peer.source.close()
        assert host.stop() == 0
