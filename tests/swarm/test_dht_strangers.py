"""What strangers send to a node's DHT, as bytes on the wire: real p2pds, hivemind's own messages, nothing of ours on the stranger's side."""

import asyncio
import itertools
import random
import time

import msgpack
import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.proto.p2pd_pb2 import CallUnaryRequest, Cancel, PersistentConnectionResponse
from hivemind.utils.crypto import RSAPrivateKey

from swarm import dht_direct, dht_protocol
from swarm.members import Members, said, sign_membership
from swarm.records import PeerRecord, RunRecord
from swarm.run_config import RunConfig
from swarm.signing import HostKey

CONFIG = "5ca1ab1e" * 8
RUN_ID = CONFIG[:16]
PEERS, RUNS = f"{RUN_ID}.peers", "distributed-diffusion.runs.1"
RANDOM = random.Random(4711)


def claims(peer_id: str, **values) -> dict:
    record = PeerRecord(peer_id=peer_id, config=CONFIG, schema="s", round=1, samples=7, digest="d", time=time.time())
    return msgpack.unpackb(record.pack()) | values


def signed(key: RSAPrivateKey, name: str, content: object, *, subkey: bytes | None = None, seconds: float = 20.0) -> dict:
    """A store request's columns for one record, signed as hivemind signs. content: packed twice if a mapping, else as it is."""
    validator = RSASignatureValidator(key)
    value = msgpack.packb(msgpack.packb(content)) if isinstance(content, dict) else content
    tag = msgpack.packb(validator.local_public_key if subkey is None else subkey)
    record = DHTRecord(DHTID.generate(source=name).to_bytes(), tag, value, time.time() + seconds)
    return {"keys": record.key, "subkeys": tag, "values": validator.sign_value(record), "expiration_time": record.expiration_time}


async def store(stranger, victim, *records: dict, in_cache: bool = False) -> list[bool]:
    columns = {name: [record[name] for record in records] for name in ("keys", "subkeys", "values", "expiration_time")}
    request = dht_pb2.StoreRequest(**columns, in_cache=[in_cache] * len(records))
    peer = PeerID.from_base58(victim.peer_id)
    answer = await stranger.p2p.call_protobuf_handler(peer, "DHTProtocol.rpc_store", request, dht_pb2.StoreResponse)
    return list(answer.store_ok)


def kept(node) -> list[str]:
    return [owner.decode() for _, found in node._stored.items() for owner in dict(found.value.items())]


def test_one_identity_has_one_record_under_a_key(nodes):
    """3,000 came in while a subkey had only to contain a key."""

    async def scenario(start):
        victim = await start("victim")
        stranger = await start("stranger", initial_peers=await victim.maddrs())
        key, owner = stranger._identity.key, stranger._validator.local_public_key
        spellings = [owner + b"x", b"x" + owner, owner + owner, owner.replace(b"]", b" a comment]"), owner.replace(b"ssh-rsa ", b"ssh-rsa  ")]
        spellings += [owner[:-1] + bytes([RANDOM.randrange(33, 90)]) + b"]" for _ in range(20)]
        for subkey in spellings:
            assert await store(stranger, victim, signed(key, PEERS, claims(stranger.peer_id), subkey=subkey)) == [False]
        for _ in range(3):
            assert await store(stranger, victim, signed(key, PEERS, claims(stranger.peer_id))) == [True]
            await asyncio.sleep(0.01)
        assert kept(victim) == [owner.decode()]

    nodes(scenario)


def test_junk_under_random_keys_and_of_other_kinds_is_not_kept(nodes):
    async def scenario(start):
        victim = await start("victim")
        stranger = await start("stranger", initial_peers=await victim.maddrs())
        key = stranger._identity.key
        junk = [
            signed(key, RANDOM.randbytes(9).hex(), claims(stranger.peer_id)),  # not the key of the run that it names
            signed(key, PEERS, claims(stranger.peer_id, config=RANDOM.randbytes(32).hex())),
            signed(key, RUNS, claims(stranger.peer_id)),
            signed(key, PEERS, {"run": {}, "run_id": RUN_ID}),
            signed(key, PEERS, claims("QmSomebodyElse")),
            signed(key, PEERS, RANDOM.randbytes(2000)),  # signed, and no msgpack: hivemind's readers hang over it
            signed(key, PEERS, msgpack.packb(RANDOM.randrange(2**60))),
            signed(key, PEERS, claims(stranger.peer_id, note="x" * 8000)),
            signed(key, PEERS, claims(stranger.peer_id), seconds=3600),
            signed(key, PEERS, claims(stranger.peer_id), seconds=float("nan")),
        ]
        for record in junk:
            assert await store(stranger, victim, record) == [False]
        assert await store(stranger, victim, signed(key, PEERS, claims(stranger.peer_id)), in_cache=True) == [False]
        assert len(victim._stored) == 0
        of_made_up_runs = []
        for config in (RANDOM.randbytes(32).hex() for _ in range(12)):
            record = signed(key, f"{config[:16]}.peers", claims(stranger.peer_id, config=config))
            of_made_up_runs += await store(stranger, victim, record)
        assert sum(of_made_up_runs) == 4 and victim._stored.num_bytes < 4 * 6000

    nodes(scenario)


def test_nobody_stores_what_another_signed_nor_a_whole_dictionary(nodes):
    async def scenario(start):
        victim = await start("victim")
        stranger = await start("stranger", initial_peers=await victim.maddrs())
        other = RSAPrivateKey()
        replayed = signed(other, PEERS, claims("Qm" + "x" * 44))
        assert await store(stranger, victim, replayed) == [False]
        whole = {**signed(stranger._identity.key, PEERS, claims(stranger.peer_id)), "subkeys": b""}
        assert await store(stranger, victim, whole) == [False]
        assert len(victim._stored) == 0

    nodes(scenario)


def test_a_question_whose_answer_does_not_come_is_forgotten(nodes):
    """hivemind kept the answers that were too large to travel, 4 MB each, and what was cancelled."""

    async def scenario(start):
        victim = await start("victim")
        stranger = await start("stranger", initial_peers=await victim.maddrs())
        peer, control = PeerID.from_base58(victim.peer_id), victim.p2p._client.control
        asked = asyncio.Event()

        async def large(data, remote):
            return b"x" * (control.persistent_conn_max_msg_size + 1)

        async def late(data, remote):
            asked.set()
            await asyncio.sleep(1000)

        await victim.p2p._client.add_unary_handler("large", large)
        await victim.p2p._client.add_unary_handler("late", late)

        read_at_once = asyncio.StreamReader()  # a question and its end, so that the answer never begins
        for field in ({"requestHandling": CallUnaryRequest(peer=peer.to_bytes(), proto="late", data=b"?")}, {"cancel": Cancel()}):
            message = PersistentConnectionResponse(callId=b"0123456789abcdef", **field).SerializeToString()
            read_at_once.feed_data(bytes([len(message)]) + message)
        read_at_once.feed_eof()
        await control._read_from_persistent_conn(read_at_once)
        assert control._handler_tasks

        questions = [asyncio.create_task(stranger.p2p._client.call_unary_handler(peer, name, b"?")) for name in ("large", "late")]
        await asked.wait()
        for question in questions:
            question.cancel()
        deadline = time.monotonic() + 30
        while control._handler_tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert not control._handler_tasks

    nodes(scenario)


def test_a_question_that_is_too_long_or_one_too_many_is_not_answered_and_others_are(nodes):
    async def scenario(start):
        victim = await start("victim")
        stranger, honest = [await start(name, initial_peers=await victim.maddrs()) for name in ("stranger", "honest")]
        peer, answer = PeerID.from_base58(victim.peer_id), dht_pb2.FindResponse

        async def ask(*keys: bytes):
            return await stranger.p2p.call_protobuf_handler(peer, "DHTProtocol.rpc_find", dht_pb2.FindRequest(keys=keys), answer)

        for keys in ([RANDOM.randbytes(20)] * 2, [RANDOM.randbytes(21)]):
            with pytest.raises(Exception, match="too long a question"):
                await ask(*keys)
        with pytest.raises(Exception, match="too many questions"):
            await asyncio.gather(*(ask(RANDOM.randbytes(20)) for _ in range(300)))
        assert await honest.publish(RUN_ID, PeerRecord(**claims(honest.peer_id)))
        assert honest.peer_id in await victim.records(RUN_ID)

    nodes(scenario)


def test_a_node_without_a_right_name_and_one_that_pings_too_often_cost_nothing(nodes, monkeypatch, caplog):
    """The first made one traceback for each question; for the second a peer was called back, for up to 3 s, at any rate."""

    async def scenario(start):
        victim = await start("victim")
        stranger = await start("stranger", initial_peers=await victim.maddrs())
        peer, called = PeerID.from_base58(victim.peer_id), []
        ping = dht_protocol.protocol.DHTProtocol.call_ping
        monkeypatch.setattr(dht_protocol.protocol.DHTProtocol, "call_ping", lambda self, *args: called.append(args) or ping(self, *args))

        async def ask(question, request, answer):
            return await stranger.p2p.call_protobuf_handler(peer, f"DHTProtocol.{question}", request, answer)

        nameless = dht_pb2.NodeInfo(node_id=b"\xff" * 21)
        for question, request, answer in (
            ("rpc_find", dht_pb2.FindRequest(keys=[bytes(20)], peer=nameless), dht_pb2.FindResponse),
            ("rpc_store", dht_pb2.StoreRequest(peer=nameless), dht_pb2.StoreResponse),
        ):
            with pytest.raises(Exception, match="a node of no name"):
                await ask(question, request, answer)
        assert not (await ask("rpc_ping", dht_pb2.PingRequest(peer=nameless, validate=True), dht_pb2.PingResponse)).available
        before = len(called)
        mine = dht_pb2.NodeInfo(node_id=stranger._dht.node_id.to_bytes())
        pings = [ask("rpc_ping", dht_pb2.PingRequest(peer=mine, validate=True), dht_pb2.PingResponse) for _ in range(300)]
        answers = await asyncio.gather(*pings)
        assert any(answer.available for answer in answers) and len(called) - before < 250 and not all(answer.available for answer in answers)

    nodes(scenario)


@pytest.mark.parametrize("lie", [{"dht_time": 1.0}, {"peer": dht_pb2.NodeInfo(node_id=b"\xff" * 21)}], ids=str)
def test_one_peer_that_answers_wrongly_keeps_nobody_out_of_a_swarm_of_others(nodes, monkeypatch, lie):
    """A stranger whose address a peer had kept told it a wrong time, and it could not come back to its run."""
    answer = dht_protocol.DHTProtocol.rpc_ping

    async def scenario(start):
        honest = await start("honest")
        liar = await start("liar", initial_peers=await honest.maddrs())

        async def wrongly(self, request, context):
            if self.p2p.peer_id != liar.p2p.peer_id:
                return await answer(self, request, context)
            return dht_pb2.PingResponse(**{"peer": self.node_info, "dht_time": time.time(), "available": True} | lie)

        monkeypatch.setattr(dht_protocol.DHTProtocol, "rpc_ping", wrongly)
        peer = await start("peer", initial_peers=[*await liar.maddrs(), *await honest.maddrs()])
        assert await peer.publish(RUN_ID, PeerRecord(**claims(peer.peer_id)))
        assert peer.peer_id in await honest.records(RUN_ID)

    nodes(scenario)


def test_in_a_run_for_members_only_their_records_are_kept_and_read(nodes, tmp_path):
    """A node that knows the run neither stores a stranger's record nor takes it from a node that did."""

    async def scenario(start):
        key = HostKey(tmp_path / "host.key")
        run = RunConfig(model="x", members_of=key.public)
        peers = f"{run.run_id}.peers"

        def record(node, **values) -> dict:
            return claims(node.peer_id, config=run.digest, **values)

        unaware = await start("unaware")  # of another run, or of none yet
        victim = await start("victim", initial_peers=await unaware.maddrs())
        victim.admit(Members(run))
        stranger, member = [await start(name, initial_peers=[*await victim.maddrs(), *await unaware.maddrs()]) for name in ("stranger", "member")]
        word = said(sign_membership(key, run, member.peer_id))
        assert await store(stranger, victim, signed(stranger._identity.key, peers, record(stranger))) == [False]
        assert await store(stranger, victim, signed(stranger._identity.key, peers, record(stranger, membership=word))) == [False]
        squatting = claims(stranger.peer_id, config=run.run_id + "0" * 48)  # another run whose key is the same
        assert await store(stranger, victim, signed(stranger._identity.key, peers, squatting)) == [False]
        assert await store(stranger, unaware, signed(stranger._identity.key, peers, record(stranger))) == [True]
        assert await store(member, victim, signed(member._identity.key, peers, record(member, membership=word))) == [True]
        assert set(await victim.records(run.run_id)) == {member.peer_id}
        assert stranger.peer_id in await unaware.records(run.run_id)
        unaware.admit(Members(run))  # it hears of the run, and forgets what strangers brought before
        assert set(await unaware.records(run.run_id)) == {member.peer_id}
        assert await member.publish(run.run_id, PeerRecord(**record(member, membership=sign_membership(key, run, member.peer_id), round=2)))
        assert (await victim.records(run.run_id))[member.peer_id].round == 2

    nodes(scenario)


def dictionary(items: list, *, maxsize: object = float("inf"), latest: object = 0.0) -> bytes:
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([maxsize, latest, items])))


def nonsense(stranger) -> dict[str, dict]:
    """Answers to 'find' that stopped or filled whoever asked."""
    mine = signed(stranger._identity.key, PEERS, claims(stranger.peer_id))
    owner = msgpack.unpackb(mine["subkeys"])
    item = [owner, mine["values"], mine["expiration_time"]]
    garbled = signed(stranger._identity.key, PEERS, b"\xc1" * 30)
    return {
        "over for ever": {"value": dictionary([]), "expiration_time": float("inf")},
        "no length": {"value": dictionary([item], maxsize="many")},
        "a signed record that is no msgpack": {"value": dictionary([[owner, garbled["values"], garbled["expiration_time"]]])},
        "items of other kinds": {"value": dictionary([[1, 2, 3], [[], {}, None], "x", item])},
        "no dictionary": {"value": msgpack.packb({"a": 1})},
        "2 MiB": {"value": dictionary([[owner + RANDOM.randbytes(3), mine["values"], mine["expiration_time"]] for _ in range(1000)])},
        "nothing": {"value": b""},
    }


def test_no_answer_of_a_stranger_hides_the_others_or_comes_in(nodes):
    async def scenario(start):
        one = await start("one")
        two = await start("two", initial_peers=await one.maddrs())
        stranger = await start("stranger", initial_peers=await one.maddrs())
        ids = itertools.count()

        async def answer(request: dht_pb2.FindRequest, context) -> dht_pb2.FindResponse:
            # and names itself under new ids for ever, each nearer than the one before
            near = DHTID.from_bytes(request.keys[0])
            names = [(near ^ (2**100 - next(ids))).to_bytes(20, "big") for _ in range(20)]
            result = dht_pb2.FindResult(
                type=dht_pb2.FOUND_DICTIONARY, nearest_node_ids=names, nearest_peer_ids=[stranger.p2p.peer_id.to_bytes()] * 20, **given
            )
            return dht_pb2.FindResponse(results=[result], peer=dht_pb2.NodeInfo(node_id=names[0]))

        await stranger.p2p.remove_protobuf_handler("DHTProtocol.rpc_find")
        given: dict = {}
        for what, lie in nonsense(stranger).items():
            given = lie
            await stranger.p2p.add_protobuf_handler("DHTProtocol.rpc_find", answer, dht_pb2.FindRequest)
            for node in (one, two):
                await node.publish(RUN_ID, PeerRecord(**claims(node.peer_id)))
            for node in (one, two):
                found = await asyncio.wait_for(node.records(RUN_ID), 60)
                assert {one.peer_id, two.peer_id} <= set(found) <= {one.peer_id, two.peer_id, stranger.peer_id}, what
            await stranger.p2p.remove_protobuf_handler("DHTProtocol.rpc_find")
        assert all(len(node._stored) <= 3 for node in (one, two))

    nodes(scenario)


def test_a_peer_with_many_node_ids_has_one_place_in_the_table_and_takes_nobody_elses(nodes):
    async def scenario(start):
        victim = await start("victim")
        honest = await start("honest", initial_peers=await victim.maddrs())
        stranger = await start("stranger", initial_peers=await victim.maddrs())
        taken = honest._dht.node_id.to_bytes()
        for node_id in [RANDOM.randbytes(20) for _ in range(60)] + [taken]:
            ping = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node_id))
            await stranger.p2p.call_protobuf_handler(victim.p2p.peer_id, "DHTProtocol.rpc_ping", ping, dht_pb2.PingResponse)
        table = victim._dht.protocol.routing_table
        assert len(table.uid_to_peer_id) == 2 and table.get(node_id=honest._dht.node_id) == honest.p2p.peer_id

    nodes(scenario)


def test_records_outlive_the_node_by_which_all_came(nodes):
    """Nobody hands on what others signed: owners renew it at the nodes that there are."""

    async def scenario(start):
        first = await start("first")
        two, three = [await start(name, initial_peers=await first.maddrs()) for name in ("two", "three")]
        run = RunRecord(run_id=RUN_ID, run={"model": "x"})
        assert await two.publish_run(run)
        await first.close()
        newcomer = await start("newcomer", initial_peers=await three.maddrs())
        assert await newcomer.find_runs() == {two.peer_id: run}
        await two.publish(RUN_ID, PeerRecord(**claims(two.peer_id)))
        assert two.peer_id in await newcomer.records(RUN_ID)

    nodes(scenario)


def crowd(node, key: str) -> None:
    """The 25 nodes nearest to the key that this node knows are strangers' inventions, and say that they have no record."""
    near, find = DHTID.generate(source=key), node._dht.protocol.call_find
    made_up = {PeerID(b"\x12\x20" + RANDOM.randbytes(32)): DHTID(near ^ number) for number in range(1, 26)}
    nearest = [(node_id, peer) for peer, node_id in made_up.items()]
    node._dht.protocol.routing_table.get_nearest_neighbors = lambda query, k, exclude=None: nearest[:k]

    async def found_at(peer, keys):
        if peer not in made_up:
            return await find(peer, keys)
        return {asked: (None, dict(nearest)) for asked in keys}

    node._dht.protocol.call_find = found_at


def hide_copies(node) -> None:
    """All copies of this node's record go to strangers, who lose them: it has its own."""

    async def taken(*_, **__):
        return True

    node._dht.store = taken


@pytest.mark.parametrize("by", ["met", "came by"])
def test_a_record_that_a_known_peer_keeps_is_found_among_any_number_of_strangers_near_the_key(nodes, by):
    async def scenario(start):
        one = await start("one")
        two = await start("two", initial_peers=await one.maddrs())
        await two.meet(await one.maddrs())
        hide_copies(two)
        await two.publish(RUN_ID, PeerRecord(**claims(two.peer_id)))
        if by == "met":
            one.prefer(lambda peer: peer == two.peer_id)
        else:
            one.keep_meeting(["/ip4/127.0.0.1/tcp/1/p2p/QmNo/p2p-circuit", *await two.maddrs()])
        crowd(one, PEERS)
        found = await one.records(RUN_ID)
        assert set(found) == {two.peer_id} and found[two.peer_id].round == 1

    nodes(scenario)


def test_a_look_in_an_honest_swarm_of_eight_asks_nobody_directly(nodes, monkeypatch):
    asked, direct, ask = [], [], dht_direct.ask

    async def counted(dht, key, peers):
        direct.extend(peers)
        return await ask(dht, key, peers)

    monkeypatch.setattr(dht_direct, "ask", counted)

    async def scenario(start):
        swarm = [await start("peer0")]
        for number in range(1, 8):
            swarm.append(await start(f"peer{number}", initial_peers=await swarm[0].maddrs()))
        everybody = {node.peer_id for node in swarm}
        for node in swarm:
            node.prefer(everybody.__contains__)
            assert await node.publish(RUN_ID, PeerRecord(**claims(node.peer_id)))
        for node in swarm:
            find = node._dht._call_find_with_blacklist

            async def counting(peer, keys, find=find):
                asked.append(peer)
                return await find(peer, keys)

            node._dht._call_find_with_blacklist = counting
        for node in swarm:
            assert set(await node.records(RUN_ID)) == everybody
        assert direct == [] and len(asked) == 8 * 7, (len(asked), len(direct))

    nodes(scenario)


def test_of_many_known_peers_that_say_nothing_four_are_asked_and_hold_up_a_look_for_a_deadline(nodes, monkeypatch):
    monkeypatch.setattr(dht_direct, "ANSWER_SECONDS", 0.3)
    silent = [PeerID(b"\x12\x20" + RANDOM.randbytes(32)) for _ in range(9)]
    asked = []

    async def scenario(start):
        one = await start("one")
        for peer in silent:
            one._dht.protocol.routing_table.add_or_update_node(DHTID.generate(), peer)
        one.prefer(lambda peer: True)

        async def nothing(*_, **__):
            return None

        one._dht.get = nothing

        async def hangs(peer, keys):
            asked.append(peer)
            await asyncio.sleep(60)

        one._dht._call_find_with_blacklist = hangs
        assert await asyncio.wait_for(one.records(RUN_ID), 30) == {}  # each of them says nothing for 60 s
        assert len(asked) == 4 == len(set(asked))
        assert all(peer in one._dht.blacklist for peer in asked)

    nodes(scenario)
