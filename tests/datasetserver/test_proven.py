"""`POST /v1/proofs`: the server hears of proofs from peers, and serves nobody whom one bans."""

import dataclasses
import json

import pytest

from datasetserver import bans
from datasetserver.__main__ import cli
from datasetserver.proven import MOST_OF_AN_OWNER, Proven
from datasetserver.refused import Refused
from swarm.protocol import PROOFS_TOLD
from swarm.run_config import RunConfig
from tests.clock import Clock
from tests.datasetserver.test_http import call, envelope, get_run, keys_of, lease, refused
from tests.identities import key
from tests.swarm.test_proofs import forged, invented, proof

REASON = "it signed two different means of one share"
RUN = RunConfig(model="x", members_of="0" * 64)


def prove(host, by, *proofs):
    return call(host, "/v1/proofs", envelope(host, by, proofs=[vars(each) for each in proofs]))


def test_whom_a_proof_bans_the_server_refuses_and_names_with_the_reason(serve, capsys):
    host = serve("--members", "yes")
    run, liar = RunConfig.from_mapping(get_run(host).run, where="server"), key("liar")
    held = lease(host, "liar", want=8)
    refused(prove(host, "alice", *[invented(f"Qm{number}") for number in range(PROOFS_TOLD + 1)]), 422, "bad_request")
    refused(prove(host, "alice", dataclasses.replace(invented("Qm"), key="ssh-rsa " + "A" * 2000)), 422, "bad_request")
    assert json.loads(prove(host, "alice", proof(run, key("stranger")))[2]) == {"banned": [], "bans": []}, "nobody whom the server let in"
    for false in forged(run, key("alice"), liar).values():
        if false.accused == liar.peer_id:
            refused(prove(host, "alice", false), 403, "no_proof")
    assert json.loads(prove(host, "alice", proof(run, liar))[2]) == {"banned": [liar.peer_id], "bans": []}
    asked = {
        "/v1/leases": {"want_samples": 1},
        f"/v1/leases/{held.lease_id}/renew": {},
        "/v1/members": {},
        "/v1/contributions": {"number": 1, "keys": keys_of(held)},
    }

    def refuses_the_liar():
        for path, body in asked.items():
            answer = call(host, path, envelope(host, "liar", **body))
            refused(answer, 403, "banned")
            assert REASON in json.loads(answer[2])["error"]["message"]

    refuses_the_liar()
    assert json.loads(call(host, "/v1/progress")[2])["proven"] == {liar.peer_id: REASON}
    assert json.loads(prove(host, "bob", proof(run, liar, group="h"))[2]) == {"banned": [liar.peer_id], "bans": []}, "said again, it is no news"
    data = ["--dataset", str(host.dataset)]
    assert cli(["members", *data]) == 0
    assert f"{liar.peer_id} samples=0 BANNED by a proof: {REASON}" in capsys.readouterr().out.splitlines()
    assert cli(["unban", liar.peer_id, *data]) == 2
    assert "Nobody can take that back" in capsys.readouterr().err
    host.kill()
    host.start()
    refuses_the_liar()


# ---------------------------------------------------------------- bounds, without a server


def proven(signed=lambda *said: True, clock=None):
    return Proven(RUN, None, signed, clock or Clock())


def test_only_of_members_a_proof_is_kept():
    known = proven()
    known.hear("token alice", {"QmLiar": "token bob"}, [invented("QmStranger"), invented("QmLiar")])
    assert known.peers() == ["QmLiar"] and not known.reason("QmStranger")


def test_a_flood_of_false_proofs_costs_its_token_the_word_and_nobody_else():
    looked, clock = [], Clock()
    known = proven(lambda peer, *said: looked.append(peer) or peer == "QmLiar", clock)
    members = {"QmLiar": "token bob", "QmHonest": "token carol"}
    codes = []
    for _ in range(200):
        with pytest.raises(Refused) as raised:
            known.hear("token mallory", members, [invented("QmHonest")])
        codes.append(raised.value.code)
    assert set(codes) == {"no_proof", "too_many_proofs"} and len(looked) == codes.count("no_proof") == 32
    with pytest.raises(Refused, match="more proofs than the server looks at"):
        known.hear("token mallory", members, [invented("QmLiar")])
    known.hear("token alice", members, [invented("QmLiar")])
    assert known.peers() == ["QmLiar"]
    known.hear("token mallory", members, [invented("QmLiar")] * 100)  # what is known costs nothing
    clock.now += 11
    with pytest.raises(Refused, match="does not prove that QmHonest"):
        known.hear("token mallory", members, [invented("QmHonest")])


def test_one_token_does_not_take_the_room_of_others_by_proofs_against_its_own_peers():
    clock = Clock()
    known, members = proven(clock=clock), {"QmLiar": "token bob"}
    for number in range(2 * MOST_OF_AN_OWNER):
        members[f"Qm{number}"] = "token mallory"
        clock.now += 10
        known.hear("token mallory", members, [invented(f"Qm{number}")])
    assert len(known.peers()) == MOST_OF_AN_OWNER
    known.hear("token mallory", members, [invented("QmLiar")])
    assert known.reason("QmLiar") == REASON


def test_in_an_open_run_nothing_is_a_proof():
    known = Proven(RunConfig(model="x"), None, lambda *said: True)
    with pytest.raises(Refused, match="does not prove"):
        known.hear("", {"QmLiar": ""}, [invented("QmLiar")])


def test_a_proven_peer_is_listed_also_where_the_ledger_does_not_know_it():
    known = proven()
    known.hear("token alice", {"QmLiar": "token bob"}, [invented("QmLiar")])
    lines = bans._lines(bans.Counter({"QmOne": 3}), {}, bans.Bans(RUN), known.reasons({}))
    assert lines == ["QmOne samples=3", f"QmLiar samples=0 BANNED by a proof: {REASON}"]
