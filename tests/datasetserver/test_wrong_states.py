"""The server discards the state that a proven wrong mean has made: that one, and no other."""

import asyncio
import dataclasses
import json
import sqlite3
from types import SimpleNamespace

import pytest

from datasetserver import heads
from datasetserver.__main__ import cli
from datasetserver.book import Book
from datasetserver.owners import Sender
from datasetserver.proven import Proven
from datasetserver.refused import Refused
from datasetserver.store import SCHEMA
from datasetserver.tree import State
from datasetserver.wrong_states import MOST_WORDS, bury
from swarm.bans import Bans
from swarm.errors import UserError
from swarm.run_config import RunConfig
from swarm.wrong_states import MOST_BEHIND
from tests.datasetserver.test_http import call, envelope, get_run, keys_of, lease, refused
from tests.datasetserver.test_proven import prove
from tests.identities import id_of, key
from tests.swarm.test_wrong_states import RUN, lies, wrong_mean, wrong_state

LIAR = key("liar").peer_id


def report(host, digest, parent, number, samples, members):
    said = [{"peer": id_of(peer), "number": each, "samples": count} for peer, each, count in members]
    body = envelope(host, members[0][0], digest=digest, parent=parent, round=number, samples=samples, members=said)
    return call(host, "/v1/rounds", body)


def head(host):
    return json.loads(call(host, "/v1/run")[2])["head"]["digest"]


def test_a_wrong_state_and_what_follows_are_discarded_by_the_hosts_word_and_a_restart_keeps_it(serve, capsys):
    host = serve("--members", "yes")
    run = RunConfig.from_mapping(get_run(host).run, where="server")
    lease(host, "liar")
    held = lease(host, "ann", 8)
    counts = []
    for number, key_ in enumerate(keys_of(held)[:3], 1):
        assert call(host, "/v1/contributions", envelope(host, "ann", number=number, keys=[key_]))[0] == 200
    proof = wrong_mean(run, parent="1" * 64, members=((id_of("ann"), 2, 1),))
    shown = wrong_state(proof, run, round=2, samples=2)
    chain = [("1" * 64, "0" * 64, 1), (shown.digest, "1" * 64, 2), ("3" * 64, shown.digest, 3)]
    for digest, parent, number in chain:
        assert report(host, digest, parent, number, number, [("ann", number, 1)])[0] == 200
    assert head(host) == "3" * 64
    for each in (wrong_state(proof, run, group="f" * 64), shown):
        answer = prove(host, "bob", each)
        assert json.loads(answer[2])["bans"] == [], "a state of whom nothing is proven is passed over"
    refused(prove(host, "bob", proof, wrong_state(proof, run, group="f" * 64)), 403, "no_wrong_state")
    assert head(host) == "3" * 64
    told = json.loads(prove(host, "bob", shown)[2])
    assert told["banned"] == [LIAR]
    assert [(word["about"], word["banned"], word["reason"]) for word in told["bans"]] == [(shown.digest, True, f"a wrong mean of {LIAR} made it")]
    for _ in range(2):
        counts.append((head(host), json.loads(call(host, "/v1/progress")[2])["samples"]))
        refused(report(host, "4" * 64, "3" * 64, 4, 4, [("ann", 4, 1)]), 409, "discarded")
        assert f"it made state {shown.digest} of round 2, which is discarded" in json.loads(call(host, "/v1/progress")[2])["proven"][LIAR]
        again = json.loads(prove(host, "carol", shown)[2])["bans"]
        assert [word["about"] for word in again if word["banned"]] == [shown.digest], "shown again, it is no news"
        assert Bans(run, get_run(host).host_key, get_run(host).bans).discarded == {shown.digest}
        host.kill()
        host.start()
    assert counts == [("1" * 64, 1)] * 2
    assert cli(["members", "--dataset", str(host.dataset)]) == 0
    assert f"it made state {shown.digest} of round 2, which is discarded" in capsys.readouterr().out


# ---------------------------------------------------------------- without a server


class Ledger:
    def __init__(self, book):
        self._book = book

    async def call(self, operation):
        return operation(self._book)


class Server(SimpleNamespace):
    """A run in which one state follows another; `wrong` is that of the round `at`."""

    def __init__(self, rounds=3, at=3, words=0):
        db = sqlite3.connect(":memory:", isolation_level=None)
        db.executescript(SCHEMA)
        self.db, self.discarded = db, []
        proven = Proven(RUN, None)
        self.proof = wrong_mean()
        proven.hear("token ann", {LIAR: "token mallory"}, [self.proof])
        super().__init__(run=RUN, proven=proven, bans=SimpleNamespace(words=(None,) * words, reason=self.reason))
        self.shown = wrong_state(self.proof, round=at)
        self.boot()
        parent = "0" * 64
        for number in range(1, rounds + 1):
            digest = self.shown.digest if number == at else f"{number:x}" * 64
            for reporter in ("QmAnn", "QmBob"):
                self.book.admit(reporter, Sender(address=f"of {reporter}"))
                self.book.add_final(State(digest, parent, number, number, (("QmAnn", number, 1),)), reporter)
            parent = digest

    def boot(self):
        self.book = Book(self.db, shards=[8], seed=1, clock=lambda: 0.0)
        self.ledger = Ledger(self.book)

    def reason(self, digest):
        return "discarded" if digest in self.discarded else ""

    def discard(self, digest, reason):
        assert LIAR in reason
        self.discarded.append(digest)

    def show(self, state=None, owner="token ann"):
        asyncio.run(bury(self, owner, state or self.shown))
        self.book.save()
        return self.discarded


def test_a_state_is_discarded_once_while_peers_have_what_was_before_it():
    for behind in range(MOST_BEHIND + 1):
        server = Server(rounds=3 + behind)
        assert server.show() == server.show() == [server.shown.digest]
    assert Server(rounds=0).show(), "also where no report of it has come yet: its header says what it is"


def test_what_is_too_old_is_left_to_the_host_and_said_for_good():
    server = Server(rounds=3 + MOST_BEHIND + 1)
    why = f"it made state {server.shown.digest} of round 3, which is left to you: 3 rounds had followed it when it was shown"
    for _ in range(2):
        assert server.show() == [] and server.book.wrong.all() == {LIAR: why}
        server.boot()  # its states are not in this ledger: what was judged stays


def test_rounds_that_one_peer_made_up_do_not_make_a_state_too_old():
    """Its word stays head until the next round; what was judged meanwhile stays for good."""
    server = Server()
    server.book.contribute("QmMallory", 1, ["0:0:0"], offered=True)
    server.book.add_final(State("f" * 64, "e" * 64, 2**53, 2**53, (("QmMallory", 1, 1),)), "QmMallory")
    assert server.book.tree.head.round == 2**53
    assert server.show() == [server.shown.digest]


def test_no_other_state_is_discarded():
    server = Server()
    for name, shown in lies(server.proof).items():
        with pytest.raises(Refused) as raised:
            server.show(shown, owner=f"token {name}")
        assert raised.value.code == "no_wrong_state"
    other = wrong_mean(liar="mallory")
    assert server.show(wrong_state(other)) == [], "nothing is proven of its maker"
    assert server.show(dataclasses.replace(server.shown, accused=key("mallory").peer_id)) == []


def test_a_liar_that_shows_a_state_of_its_own_making_first_keeps_nobody_from_showing_the_right_one():
    server = Server()
    made_up = [wrong_state(server.proof, round=3, samples=samples) for samples in (25, 26, 27)]
    for each in made_up:
        server.show(each, owner="token mallory")
    assert server.discarded == [made_up[0].digest], "one of each owner"
    assert server.show() == server.show() == [made_up[0].digest, server.shown.digest]
    server.boot()
    assert server.book.wrong.all()[LIAR].count("which is discarded") == 2


def test_a_state_that_peers_would_take_for_another_is_left_to_the_host():
    server = Server()
    twin = server.shown.digest[:12] + "0" * 52
    server.book.tree.add(State(twin, "f" * 64, 9, 9, (("QmBob", 1, 1),), ["QmBob"], owners=2))
    assert server.show() == [] and f"state {twin} begins with the same digits" in server.book.wrong.all()[LIAR]


def test_liars_do_not_fill_the_hosts_places_for_words():
    assert Server(words=MOST_WORDS - 1).show()
    server = Server(words=MOST_WORDS)
    assert server.show() == [] and "128 of your 256 words" in server.book.wrong.all()[LIAR]


def test_a_server_that_ended_before_the_word_was_said_says_it_when_the_state_is_shown_again():
    server = Server()

    def full(digest, reason):
        raise UserError("Cannot write.", fix="Check the disk.")

    server.discard, discard = full, server.discard
    with pytest.raises(Refused) as raised:
        server.show()
    assert (raised.value.status, raised.value.code) == (503, "disk")
    server.book.save()
    server.boot()
    server.discard = discard
    assert server.show() == [server.shown.digest]


def test_who_shows_too_many_is_refused_and_others_are_not():
    server = Server()
    codes = set()
    for _ in range(40):
        with pytest.raises(Refused) as raised:
            server.show(wrong_state(server.proof, round=0), owner="token mallory")
        codes.add(raised.value.code)
    assert codes == {"no_wrong_state", "too_many_proofs"}
    assert server.show() == [server.shown.digest]


def test_heads_names_what_was_left_to_the_host(tmp_path, monkeypatch):
    server = Server(rounds=3 + MOST_BEHIND + 1)
    server.show()
    tree = server.book.tree
    monkeypatch.setattr(heads, "_ledger", lambda work_dir: (RUN, tree, server.book.wrong._known))
    assert heads.lines(tmp_path)[-1] == f"wrong {server.shown.digest} round=3 by {LIAR}, left to you: 3 rounds had followed it when it was shown"
