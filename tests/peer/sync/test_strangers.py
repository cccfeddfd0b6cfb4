"""What forged, false and missing records do to peers that average: nothing."""

import time

from peer.sync.engine.round.calls import CALL
from peer.sync.engine.state import Head
from swarm.tasks import end_tasks
from tests.peer.sync.replicas import Liar, check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import ANYTHING, named, until

LIES = {
    "more samples than there can be, in a state that nobody gives": lambda peer: {"samples": 10**15, "digest": "f" * 64, "round": 10**6},
    "samples waiting on our state that never come": lambda peer: {
        "samples": peer.head.header.samples, "digest": peer.head.digest, "waiting_samples": 80, "samples_per_second": 1e6,
    },
    "our digest with another count, and itself for a parent": lambda peer: {
        "samples": 10**15, "digest": peer.head.digest, "parents": (peer.head.digest,),
    },
    "waiting samples out of bounds": lambda peer: {"digest": peer.head.digest, "waiting_samples": 10**12},
}  # fmt: skip


def test_what_a_liar_claims_stops_nobody(virtual):
    """One liar after the other; what the one before claimed counts for another 20 s."""

    async def scenario(nodes):
        run = make_run()
        pair = await peers(nodes, 2, run)
        for what, claims in LIES.items():
            with named(what):
                liar = Liar(await nodes.node(), run)
                lying = await liar.keep_saying(nodes, lambda claims=claims: claims(pair[0]))
                await until(lambda liar=liar: all(liar.node.peer_id in peer.replica.neighbours._seen for peer in pair))
                started = max(peer.head.header.round for peer in pair)
                await until(lambda started=started: all(peer.head.header.round >= started + 2 for peer in pair))
                assert all(peer.head.header.samples < 10**6 for peer in pair)
                await end_tasks(lying)
        check_invariants(*pair)

    virtual(scenario)


def test_a_record_signed_by_another_or_by_nobody_or_of_another_run_is_not_seen(swarm):
    async def scenario(nodes):
        run = make_run()
        (peer,) = await peers(nodes, 1, run, rate=0)
        liar = Liar(await nodes.node(), run)
        await liar.say(peer_id="QmSomebodyElse")
        await liar.say(config="f" * 64)
        await liar.node._dht.store(f"{run.run_id}.peers", b"x", expiration_time=time.time() + 20, subkey=b"plain")
        await peer.replica.neighbours.read()
        assert set(peer.replica.neighbours._seen) <= {peer.id}

    swarm(scenario)


def test_a_stranger_without_a_record_makes_nobody_average(virtual):
    async def scenario(nodes):
        (peer,) = await peers(nodes, 1, make_run(target_batch_size=10_000))
        await until(lambda: peer.waiting)
        ((_, streams),) = await nodes.streams(1)
        channel = await streams.open(peer.id, CALL)
        await channel.send({"head": vars(Head.of(peer.head))}, seconds=60)
        answer, _ = await channel.receive(ANYTHING, seconds=60)
        channel.close()
        assert answer["coming"] is False and not peer.offers

    virtual(scenario)
