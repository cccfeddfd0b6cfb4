"""A swarm in which one peer was started again with a newer program goes on as one."""

import msgpack

from tests.peer.sync.replicas import Peer, check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import until
from tests.swarm.test_run_identity import Newer, by_rule_1, newer_program


def as_newer(node) -> None:
    """Its records have a field that no program of today knows."""
    store = node._store

    async def store_with_more(key: str, data: bytes, seconds: float) -> bool:
        return await store(key, msgpack.packb({**msgpack.unpackb(data), "mood": {"fine": 1}}), seconds)

    node._store = store_with_more


def test_one_of_two_peers_is_upgraded_and_both_go_on_averaging_together(swarm):
    """Seen in production's place: the upgraded peer waited for ever for holders that included itself, the other one's trainer gave up."""

    run = by_rule_1(make_run())

    async def scenario(nodes):
        old, other = await peers(nodes, 2, run)
        await until(lambda: min(old.head.header.round, other.head.header.round) >= 2)
        await other.stop()
        held, before = other.head, old.head.header.round
        node = await nodes.node()
        as_newer(node)
        upgraded = await Peer(nodes, node, Newer.from_mapping(run.to_mapping(), where="its folder"), state=held).start(nodes)
        assert upgraded.run.digest == run.digest

        def together(peer: Peer) -> bool:
            names = [{member[0] for member in line["members"]} for line in peer.rounds() if line["round"] > before]
            return {old.id, upgraded.id} in names

        await until(lambda: together(old) and together(upgraded))
        assert not any("waiting for one who has that state" in text for text in [*old.texts, *upgraded.texts])
        assert old.id in upgraded.head.header.included and not old.node.unread
        check_invariants(old, upgraded)

    with newer_program():
        swarm(scenario)
