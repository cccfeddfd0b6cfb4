"""Requests that are replayed, about what is another's, or too late: each gets its 4xx or the first answer again, and no sample is lost.

What is malformed or too large is in test_http.py, odd requests by the hundred in test_openapi.py, slow and broken ones in test_gate.py.
"""

import itertools
import json

import pytest

from swarm.protocol import NO_LEASE
from tests.datasetserver.hosting import Host
from tests.datasetserver.test_http import BASE, call, envelope, keys_of, lease, refused
from tests.identities import id_of

SAMPLES = 40


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("host"), samples=SAMPLES).start()
    yield host
    found = totals(host)
    epochs, others = sum(found.values()) // SAMPLES, found["leased"] + found["pending"] + found["counted"]
    granted = keys_of(lease(host, "newcomer", want=found["available"]))
    assert len(set(granted)) == len(granted), "a sample twice in a lease"
    assert len([key for key in granted if int(key.split(":")[0]) < epochs]) + others == epochs * SAMPLES, "nothing is lost"
    assert host.stop() == 0


def totals(host):
    return json.loads(call(host, "/v1/progress")[2])["ledger"]


names = (f"peer{number}" for number in itertools.count())
numbers = itertools.count(1)


def round_of(host, *members):
    """The next state on the head, of these (peer, number, samples)."""
    head = json.loads(call(host, "/v1/run")[2])["head"] or {"digest": BASE, "round": 0, "samples": 0}
    said = [{"peer": id_of(peer), "number": number, "samples": samples} for peer, number, samples in members]
    samples = head["samples"] + sum(member[2] for member in members)
    return {"digest": f"{next(numbers):064x}", "parent": head["digest"], "round": head["round"] + 1, "samples": samples, "members": said}


def test_a_request_that_is_replayed_gets_the_same_answer_and_does_nothing_twice(host):
    peer = next(names)
    granted = lease(host, peer, want=8)
    keys = keys_of(granted)
    requests = [
        (f"/v1/leases/{granted.lease_id}/renew", envelope(host, peer)),
        ("/v1/contributions", envelope(host, peer, number=1, keys=keys[:4])),
        ("/v1/contributions", envelope(host, peer, number=2, keys=keys[4:6], offered=True)),
        ("/v1/rounds", envelope(host, peer, **round_of(host, (peer, 1, 4)))),
    ]
    for path, body in requests:
        first = call(host, path, body)
        assert first[0] == 200
        before = totals(host)
        again = call(host, path, body)
        assert again[0] == 200 and totals(host) == before
        assert json.loads(again[2]).keys() == json.loads(first[2]).keys()
    for left in (len(keys) - 6, 0, 0):
        assert json.loads(call(host, f"/v1/leases/{granted.lease_id}/release", envelope(host, peer))[2]) == {"released": left}
    assert json.loads(call(host, "/v1/contributions", requests[1][1])[2])["counted"]


def test_what_is_anothers_stays_the_others(host):
    owner, thief = next(names), next(names)
    granted = lease(host, owner, want=8)
    keys, before = keys_of(granted), totals(host)
    refused(call(host, f"/v1/leases/{granted.lease_id}/renew", envelope(host, thief)), 410, "lease_lost")
    for what in (None, keys):
        answer = call(host, f"/v1/leases/{granted.lease_id}/release", envelope(host, thief, keys=what))
        assert (answer[0], json.loads(answer[2])) == (200, {"released": 0})
    refused(call(host, "/v1/contributions", envelope(host, thief, number=1, keys=keys)), 409, "not_held")
    answer = json.loads(call(host, "/v1/contributions", envelope(host, thief, number=1, keys=keys, offered=True))[2])
    assert (answer["registered"], answer["repeated"]) == (0, len(keys))
    refused(call(host, "/v1/contributions", {**envelope(host, owner, number=1, keys=keys), "run_id": "0" * 16}), 409, "other_run")
    assert totals(host) == before


def test_who_comes_too_late_is_told_so(host):
    late, other = next(names), next(names)
    granted = lease(host, late, want=4)
    keys = keys_of(granted)
    assert call(host, "/v1/contributions", envelope(host, late, number=1, keys=keys[:1]))[0] == 200
    assert call(host, f"/v1/leases/{NO_LEASE}/release", envelope(host, late, keys=keys))[0] == 200
    assert call(host, f"/v1/leases/{granted.lease_id}/release", envelope(host, late))[0] == 200
    refused(call(host, f"/v1/leases/{granted.lease_id}/renew", envelope(host, late)), 410, "lease_lost")
    refused(call(host, "/v1/contributions", envelope(host, late, number=2, keys=keys)), 409, "not_held")
    refused(call(host, "/v1/contributions", envelope(host, late, number=1, keys=keys[:1])), 409, "withdrawn")
    assert call(host, f"/v1/leases/{granted.lease_id}/release", envelope(host, late, keys=keys))[0] == 200

    mine = keys_of(lease(host, other, want=4))
    assert call(host, "/v1/contributions", envelope(host, other, number=1, keys=mine))[0] == 200
    said = round_of(host, (other, 1, len(mine)))
    assert call(host, "/v1/rounds", envelope(host, other, **said))[0] == 200
    refused(call(host, "/v1/rounds", envelope(host, late, **{**said, "samples": said["samples"] + 1})), 409, "contradiction")
    refused(call(host, "/v1/rounds", envelope(host, late, **{**said, "digest": "f" * 64, "round": 1})), 409, "contradiction")
    refused(call(host, "/v1/contributions", envelope(host, late, number=3, keys=mine)), 409, "not_held")
    answer = json.loads(call(host, "/v1/contributions", envelope(host, late, number=3, keys=mine, offered=True))[2])
    assert (answer["registered"], answer["repeated"]) == (0, len(mine))
