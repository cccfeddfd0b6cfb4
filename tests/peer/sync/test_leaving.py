"""How a replica ends: with its p2pd, in order, for a full disk, or with the run."""

import logging
import signal

import pytest

from peer.sync.engine.cell import Phase
from peer.sync.engine.net import presence
from swarm import dht
from swarm.end import End, sign_extension
from swarm.errors import ExitCode, UserError
from swarm.records import LEAVING
from swarm.signing import HostKey
from tests.peer.sync.replicas import Peer, check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import until


def test_the_death_of_p2pd_ends_the_replica(swarm):
    async def scenario(nodes):
        peer = await Peer(nodes, await nodes.node(own=True), make_run()).start(nodes)
        peer.node.p2p._child.kill()
        await until(lambda: peer.tasks[0].done())
        assert "p2pd has ended" in str(peer.tasks[0].exception())

    swarm(scenario)


def test_a_p2pd_that_hangs_ends_the_replica(swarm, monkeypatch):
    monkeypatch.setattr(presence, "RENEW_SECONDS", 0.5)
    monkeypatch.setattr(dht, "ANSWER_SECONDS", 0.5)

    async def scenario(nodes):
        peer = await Peer(nodes, await nodes.node(own=True), make_run()).start(nodes)
        peer.node.p2p._child.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: peer.tasks[0].done())
        finally:
            peer.node.p2p._child.send_signal(signal.SIGCONT)
        assert "p2pd does not answer" in str(peer.tasks[0].exception())

    swarm(scenario)


async def one_and_one_that_stopped(nodes) -> list[Peer]:
    one, two = await peers(nodes, 2, make_run(), rate=0)
    await until(lambda: one.replica.neighbours.others())
    two.replica.close()
    await two.tasks[0]
    return [one, two]


def test_a_peer_that_leaves_in_order_is_not_waited_for(virtual):
    async def scenario(nodes):
        one, two = await one_and_one_that_stopped(nodes)
        two.replica.failed("CUDA is out of\nmemory")
        await two.replica.leave()
        await until(lambda: one.replica.neighbours._seen[two.id][0].phase == LEAVING)
        assert not one.replica.neighbours.others()
        assert one.replica.neighbours._seen[two.id][0].note == "CUDA is out of memory"

    virtual(scenario)


def test_a_peer_whose_disk_is_full_leaves_with_that_as_its_last_words(virtual):
    async def scenario(nodes):
        one, two = await one_and_one_that_stopped(nodes)

        async def full(state):
            raise UserError("The disk is full.", fix="Make room.", code=ExitCode.DISK)

        two.replica._saver.save = full
        with pytest.raises(UserError, match="The disk is full"):
            await two.replica.leave()
        await until(lambda: one.replica.neighbours._seen[two.id][0].phase == LEAVING)
        assert one.replica.neighbours._seen[two.id][0].note == "The disk is full."

    virtual(scenario)


def test_a_run_that_is_extended_while_its_peers_see_to_those_behind_goes_on(virtual, tmp_path):
    """One hears it from the host meanwhile, the other from what the first then says."""

    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run(total_samples=80)
        pair = [Peer(nodes, await nodes.node(), run, end=End(run, key.public)) for _ in range(2)]
        told, untold = [await peer.start(nodes) for peer in pair]
        for peer in pair:
            peer.replica._needed_by_others = lambda lingered, peer=peer: peer.replica.end.total < 200
        await until(lambda: all(peer.replica.phase.value is Phase.DONE for peer in pair))
        told.replica.extend(sign_extension(key, run, 200))
        await until(lambda: all(peer.finished for peer in pair))
        assert told.head.digest == untold.head.digest and told.head.header.samples >= 200
        check_invariants(*pair)

    virtual(scenario)


def test_who_has_not_heard_that_the_run_is_extended_asks_the_others_at_its_end(virtual, tmp_path, caplog):
    """One peer has it from the host, the other one only from what the first says in the DHT; a third knows no host, and believes nobody."""

    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run(total_samples=80)
        first, second, third = [await nodes.node() for _ in range(3)]
        told = Peer(nodes, first, run, end=End(run, key.public, sign_extension(key, run, 200)))
        untold, ignorant = Peer(nodes, second, run, end=End(run, key.public)), Peer(nodes, third, run)
        await told.start(nodes)
        await untold.start(nodes)
        await until(lambda: told.finished and untold.finished)
        assert told.head.digest == untold.head.digest and untold.head.header.samples >= 200
        assert [extension["total_samples"] for extension in untold.extensions] == [200] and not told.extensions
        assert not ignorant.replica.end.extend(told.replica.end.extension)

    caplog.set_level(logging.INFO, "peer.sync.engine.round.rounds")
    virtual(scenario)
    rounds = [record.getMessage() for record in caplog.records if record.name == "peer.sync.engine.round.rounds"]
    assert rounds and "total_samples=200" in rounds[-1]
