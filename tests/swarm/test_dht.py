"""Nodes of the DHT, each with a real p2pd, in one loop."""

import asyncio
import dataclasses
import socket
import time
from uuid import uuid4

import msgpack
import psutil
import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto.p2pd_pb2 import CallUnaryResponse, PersistentConnectionResponse
from hivemind.utils.multiaddr import Multiaddr

from swarm import dht
from swarm.daemon import Daemon
from swarm.dht_blacklist import Forgiving
from swarm.errors import ExitCode, UserError
from swarm.identity import Identity
from swarm.maddrs import parse_maddrs
from swarm.peer_key import peer_id_of
from swarm.ports import with_ports
from swarm.records import BadRecord, PeerRecord, RunRecord

CONFIG = "c0ffee" * 10
RUN_ID = CONFIG[:16]


def record(node, **values) -> PeerRecord:
    return PeerRecord(
        **{"peer_id": node.peer_id, "config": CONFIG, "schema": "s", "round": 0, "samples": 0, "digest": "d", "time": time.time(), **values}
    )


async def until(true, seconds=120.0):
    """Wait for what the swarm needs a moment for. What is stored lives for 20 s: `true` stores it again where that may not do."""
    deadline = time.monotonic() + seconds
    while not await true():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.05)


def test_records_and_runs_reach_everybody_in_the_swarm(nodes):
    async def scenario(start):
        one = await start("one")
        two = await start("two", initial_peers=await one.maddrs())
        client = await start("client", initial_peers=await one.maddrs(), client_mode=True)
        nodes = (one, two, client)

        async def known_to_all():
            stored = [await node.publish(RUN_ID, record(node)) for node in nodes]
            return all(stored) and all([set(await node.records(RUN_ID)) == {node.peer_id for node in nodes} for node in nodes])

        await until(known_to_all)
        run = RunRecord(run_id=RUN_ID, run={"model": "x"})

        async def run_known_to_all():
            return all([await node.find_runs() == {two.peer_id: run} for node in nodes])

        assert await two.publish_run(run)
        await until(run_known_to_all)
        assert await client.maddrs() == [] and await one.records("another run") == {}
        assert all([await node.alive() for node in (one, two, client)])

    nodes(scenario)


def test_a_later_record_replaces_the_one_before(nodes):
    async def scenario(start):
        one = await start("one")
        two = await start("two", initial_peers=await one.maddrs())
        for round in range(3):

            async def seen(round=round):
                await one.publish(RUN_ID, record(one, round=round))
                found = await two.records(RUN_ID)
                return one.peer_id in found and found[one.peer_id].round == round

            await until(seen)

    nodes(scenario)


def test_who_signs_what_we_cannot_read_is_known_and_no_peer(nodes):
    async def scenario(start):
        one = await start("one")
        two = await start("two", initial_peers=await one.maddrs())
        values = {**dataclasses.asdict(record(two)), "phase": "dreaming"}  # of a version to come

        async def unread():
            await two._store(f"{RUN_ID}.peers", msgpack.packb(values), 20)
            return await one.records(RUN_ID) == {} and one.unread == {two.peer_id}

        await until(unread)

        async def read_again():
            await two.publish(RUN_ID, record(two))
            return set(await one.records(RUN_ID)) == {two.peer_id} and not one.unread

        await until(read_again)

    nodes(scenario)


def test_nobody_speaks_for_another_and_nothing_unsigned_is_stored(nodes):
    async def scenario(start):
        one = await start("one")
        liar = await start("liar", initial_peers=await one.maddrs())
        await liar.publish(RUN_ID, record(one))  # signed by the liar
        key, until_ = f"{RUN_ID}.peers", time.time() + 20
        await liar._dht.store(key, record(one).pack(), expiration_time=until_, subkey=b"plain")
        await liar._dht.store(key, b"unsigned", expiration_time=until_, subkey=one._validator.local_public_key)
        await liar._dht.store(key, b"x" * 100_000, expiration_time=until_, subkey=liar._validator.local_public_key)
        assert await one.records(RUN_ID) == {}

        async def the_truth_is_seen():
            await one.publish(RUN_ID, record(one, round=7))
            found = await liar.records(RUN_ID)
            return one.peer_id in found and found[one.peer_id].round == 7

        await until(the_truth_is_seen)

    nodes(scenario)


def test_a_record_that_wants_to_live_for_years_is_not_stored(nodes):
    async def scenario(start):
        one = await start("one")
        liar = await start("liar", initial_peers=await one.maddrs())
        await liar._dht.store(
            f"{RUN_ID}.peers", record(liar).pack(), expiration_time=time.time() + 1e8, subkey=liar._validator.local_public_key
        )
        assert liar.peer_id not in await one.records(RUN_ID)

    nodes(scenario)


def test_an_identity_lasts_and_belongs_to_one_process(nodes, tmp_path):
    async def scenario(start):
        one = await start("one")
        assert peer_id_of(one._identity.key.get_public_key().to_bytes()) == one.peer_id
        with pytest.raises(UserError, match="in use by another process"):
            Identity(tmp_path / "one")
        await one.close()
        again = await start("one")
        assert again.peer_id == one.peer_id

    nodes(scenario)


def test_a_node_that_starts_again_is_where_it_was_unless_somebody_else_is_there_now(nodes):
    async def scenario(start):
        one, other = await start("one", own=True), await start("other")
        before = await one.maddrs()
        assert not set(before) & set(await other.maddrs())
        await one.close()
        again = await start("one")
        assert await again.maddrs() == before
        await again.close()
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections of a moment ago are still known to the kernel
            taken.bind(("127.0.0.1", int(Multiaddr(before[0])["tcp"])))
            taken.listen()
            assert not set(await (await start("one")).maddrs()) & set(before)

    nodes(scenario)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"/ip4/127.0.0.1/tcp/0": "x"}', '{"/ip4/127.0.0.1/tcp/0": 70000}'])
def test_a_damaged_memory_of_ports_costs_a_new_port_only(tmp_path, content):
    path = tmp_path / "identity.ports"
    path.write_text(content)
    wanted = ["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic", "/ip4/127.0.0.1/tcp/31337"]
    first, quic, fixed = with_ports(wanted, path)
    assert int(Multiaddr(first)["tcp"]) > 0 and [quic, fixed] == wanted[1:]
    assert with_ports(wanted, path) == [first, quic, fixed]
    assert with_ports(wanted, tmp_path / "no such folder" / "identity.ports")[1:] == wanted[1:]


def test_a_file_that_is_no_key_is_one_line(tmp_path):
    (tmp_path / "key").write_bytes(b"garbage")
    with pytest.raises(UserError, match="not an identity file"):
        Identity(tmp_path / "key")


def test_a_port_in_use_is_one_line(nodes):
    async def scenario(start):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(UserError, match="Cannot listen"):
                await start("one", host_maddrs=[f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"])

    nodes(scenario)


def test_peers_that_do_not_answer_are_one_line(nodes):
    async def scenario(start):
        nobody = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
        with pytest.raises(UserError, match="None of the 1 known peers answers") as caught:
            await start("one", initial_peers=[nobody], deadline_seconds=1)
        assert caught.value.code == ExitCode.NETWORK

    nodes(scenario)


@pytest.mark.parametrize("text", ["localhost:1234", "/ip4/1.2.3/tcp/1", "/ip4/127.0.0.1/tcp/1"])
def test_an_address_that_is_none_is_one_line_with_an_example(text):
    with pytest.raises(UserError, match="It looks like /ip4/"):
        parse_maddrs([text], need_peer_id=True)


def test_p2pd_runs_on_one_core_unless_the_environment_says_otherwise(nodes, monkeypatch):
    monkeypatch.setenv("GOGC", "150")
    monkeypatch.delenv("GOMAXPROCS", raising=False)

    async def scenario(start):
        node = await start("one", own=True)
        seen = psutil.Process(node.p2p._child.pid).environ()
        assert (seen["GOMAXPROCS"], seen["GOGC"]) == ("1", "150")

    nodes(scenario)


def test_the_death_of_p2pd_shows(nodes):
    async def scenario(start):
        one = await start("one", own=True)
        assert await one.alive()
        one.p2p._child.kill()
        await one.p2p._child.wait()
        assert not await one.alive()

    nodes(scenario)


def test_an_answer_to_a_question_that_was_given_up_a_moment_ago_ends_nothing(nodes):
    """It ended hivemind's reader: this node heard nobody any more, and averaged alone."""

    async def scenario(start):
        one = await start("one")
        control, given_up, call = one.p2p._client.control, asyncio.Future(), uuid4()
        given_up.cancel()
        control._pending_calls[call] = given_up
        message = PersistentConnectionResponse(callId=call.bytes, callUnaryResponse=CallUnaryResponse(response=b"late")).SerializeToString()
        late = asyncio.StreamReader()
        late.feed_data(bytes([len(message)]) + message)
        late.feed_eof()
        await control._read_from_persistent_conn(late)
        del control._pending_calls[call]
        assert await one.alive()

    nodes(scenario)


def test_a_node_that_hears_p2pd_no_more_shows(nodes):
    async def scenario(start):
        one = await start("one", own=True)
        one.p2p._client.control._read_task.cancel()
        await asyncio.sleep(0)
        assert not await one.alive()

    nodes(scenario)


def test_a_p2pd_whose_start_is_cancelled_is_ended(monkeypatch):
    ping = P2P._ping_daemon

    async def scenario():
        children, is_there = [], asyncio.Event()

        async def slowly(p2p):
            children.append(p2p._child)
            is_there.set()
            await asyncio.sleep(0.2)
            await ping(p2p)

        monkeypatch.setattr(P2P, "_ping_daemon", slowly)
        starting = asyncio.create_task(Daemon.start(host_maddrs=None, no_listen=True))
        await is_there.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert children[0].returncode is not None

    asyncio.run(scenario())


def test_a_node_that_is_back_is_asked_at_once(nodes):
    async def scenario(start):
        one, other = await start("one"), await start("other")
        peer = PeerID.from_base58(other.peer_id)
        for _ in range(12):
            one._dht.blacklist.register_failure(peer)
        assert peer in one._dht.blacklist
        assert await one.meet(await other.maddrs()) and peer not in one._dht.blacklist

    nodes(scenario)


def test_of_peers_that_never_answer_few_are_remembered_and_none_is_banned_for_long(monkeypatch):
    now = [1e9]
    monkeypatch.setattr("hivemind.dht.node.get_dht_time", lambda: now[0])
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now[0])
    banned, peers = Forgiving(), [PeerID(number.to_bytes(4, "big")) for number in range(5000)]
    for peer in peers:
        banned.register_failure(peer)
    assert len(banned.ban_counter) == 4096
    waits = []
    for _ in range(12):
        since = now[0]
        banned.register_failure(peers[0])
        while peers[0] in banned:
            now[0] += 1
        waits.append(now[0] - since)
    assert waits[0] <= 6 and waits[1] <= 11 and max(waits) <= 81


def test_a_question_to_p2pd_that_was_given_up_leaves_nothing_open(nodes):
    async def scenario(start):
        one = await start("one")
        # As hivemind opens it, and leaves it when the question is cancelled.
        _, writer = await one.p2p._client.control.daemon_connector.open_connection()
        await one.close()
        assert writer.transport.is_closing()

    nodes(scenario)


def test_a_p2pd_that_hangs_shows_and_is_ended_all_the_same(nodes, monkeypatch):
    monkeypatch.setattr(dht, "ANSWER_SECONDS", 1.0)

    async def scenario(start):
        one = await start("one", own=True)
        child = psutil.Process(one.p2p._child.pid)
        child.suspend()

        async def hangs():  # its threads stop one by one, and one of them may still answer
            return not await one.alive()

        await until(hangs)
        assert not await one.ended_within(0.1)
        await one.close()
        assert one.p2p._child.returncode is not None

    nodes(scenario)


def test_whom_we_came_by_is_found_again_after_it_was_started_again_and_then_knows_us(nodes):
    async def scenario(start):
        server = await start("server", own=True)
        maddrs = await server.maddrs()
        peer = await start("peer", initial_peers=[*maddrs, *maddrs])
        assert peer.came_by == [[*maddrs, *maddrs]] and server.came_by == []
        await server.close()
        for _ in range(2):  # hivemind forgets who does not answer
            await peer.publish(RUN_ID, record(peer))
            await peer.records(RUN_ID)
        again = await start("server")
        assert await again.maddrs() == maddrs

        async def known():
            met = [await peer.meet(group) for group in peer.came_by]
            await peer.publish(RUN_ID, record(peer))
            return all(met) and set(await again.records(RUN_ID)) == {peer.peer_id}

        await until(known)

    nodes(scenario)


def test_two_swarms_become_one_when_one_node_meets_another(nodes):
    async def scenario(start):
        one, two = await start("one"), await start("two")
        await one.publish(RUN_ID, record(one))
        assert await two.records(RUN_ID) == {}
        maddrs = await one.maddrs()

        async def met():
            return await two.meet(maddrs)

        async def seen():
            await one.publish(RUN_ID, record(one))
            return one.peer_id in await two.records(RUN_ID)

        await until(met)

        await until(seen)
        assert not await two.meet(["/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"])
        assert not await two.meet(["garbage"]) and not await two.meet([])

    nodes(scenario)


def test_a_run_too_long_for_a_record_is_refused_with_its_size(nodes):
    """A configuration from others may be sparse, and too long once every default is in it."""

    async def scenario(start):
        one = await start("one")
        with pytest.raises(BadRecord, match="at most 4096"):
            await one.publish_run(RunRecord(run_id="r", run={"model": "x" * 4096}))

    nodes(scenario)
