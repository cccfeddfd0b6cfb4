"""The HTTP interface of a real server: what it answers, and what it refuses and how."""

import http.client
import json
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest

from datasetserver import app
from swarm.digest import digest_bytes
from swarm.protocol import ErrorAnswer, Head, LeaseAnswer, Manifest, PeersAnswer, Progress, RunAnswer, sample_key
from swarm.run_config import RunConfig
from swarm.version import VERSION
from tests.datasetserver.hosting import Host
from tests.identities import id_of, signer

BASE = "0" * 64


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("host"), "--run_name", "digits", "--total_samples", "1000000").start()
    yield host
    assert host.stop() == 0


def call(host, path, body=None, *, method=None, headers=None, raw=None):
    """(status, headers, body) of one request; `body` is sent as JSON, signed by its peer where we have its key, `raw` as it is."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    headers = {**({} if data is None else {"Content-Type": "application/json"}), **signed(path, data, method or "POST"), **(headers or {})}
    request = urllib.request.Request(host.url + path, data=data, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def signed(path, data, method="POST"):
    """The headers by which the peer that `data` names signs it; none where it names nobody whose key we have."""
    try:
        peer = json.loads(data)["peer"]
    except (TypeError, ValueError, KeyError, RecursionError):
        return {}
    key = signer(peer) if isinstance(peer, str) else None
    return key.headers(method, path, data) if key else {}


def get_run(host):
    return RunAnswer.model_validate_json(call(host, "/v1/run")[2])


def envelope(host, peer="alice", **body):
    return {"run_id": get_run(host).run_id, "peer": id_of(peer), **body}


def lease(host, peer="alice", want=1):
    status, _, data = call(host, "/v1/leases", envelope(host, peer, want_samples=want))
    assert status == 201
    return LeaseAnswer.model_validate_json(data)


def keys_of(answer):
    return [sample_key(item.epoch, item.shard, i) for item in answer.shard_epochs for i in range(item.samples) if i not in item.skip]


def refused(answer, status, code):
    assert answer[0] == status, answer
    error = ErrorAnswer.model_validate_json(answer[2]).error
    assert error.code == code
    assert error.fix


def test_one_url_gives_a_newcomer_all_it_needs(host):
    answer = get_run(host)
    run = RunConfig.from_mapping(answer.run, where="server")
    assert (run.run_id, run.dataset_digest, run.run_name, answer.url) == (answer.run_id, answer.manifest, "digits", host.url)
    assert len(run.model_digest) == 64 and answer.version == VERSION
    assert PeersAnswer.model_validate_json(call(host, "/v1/peers")[2]).peers == []
    assert call(host, "/healthz")[0] == 200


def test_manifest_and_shards_are_what_their_digests_say(host):
    digest = get_run(host).manifest
    _, headers, data = call(host, f"/v1/manifest/{digest}")
    assert digest_bytes(data) == digest and digest in headers["ETag"]
    manifest = Manifest.model_validate_json(data)
    assert manifest.total == 40
    for shard in manifest.shards:
        status, headers, blob = call(host, f"/v1/blobs/{shard.digest}.tar")
        assert (status, digest_bytes(blob), len(blob)) == (200, shard.digest, shard.bytes)
        assert headers["ETag"] and headers["Accept-Ranges"] == "bytes"


def test_a_shard_can_be_fetched_in_pieces(host):
    shard = Manifest.model_validate_json(call(host, f"/v1/manifest/{get_run(host).manifest}")[2]).shards[0]
    path = f"/v1/blobs/{shard.digest}.tar"
    status, headers, rest = call(host, path, headers={"Range": "bytes=1000-"})
    assert (status, headers["Content-Range"]) == (206, f"bytes 1000-{shard.bytes - 1}/{shard.bytes}")
    _, _, first = call(host, path, headers={"Range": "bytes=0-999"})
    assert digest_bytes(first + rest) == shard.digest
    status, headers, data = call(host, path, method="HEAD")
    assert (status, headers["Content-Length"], data) == (200, str(shard.bytes), b"")
    assert call(host, path, headers={"Range": f"bytes={shard.bytes}-"})[0] == 416


def test_a_lease_is_renewed_registered_released_and_its_round_counted(host):
    granted = lease(host, "bob", want=8)
    keys = keys_of(granted)
    assert call(host, f"/v1/leases/{granted.lease_id}/renew", envelope(host, "bob"))[0] == 200
    status, _, data = call(host, "/v1/contributions", envelope(host, "bob", number=1, keys=keys[:5]))
    assert (status, json.loads(data)) == (200, {"registered": 5, "repeated": 0, "counted": False, "receipt": None})
    release = envelope(host, "bob", keys=keys[5:6])
    assert json.loads(call(host, f"/v1/leases/{granted.lease_id}/release", release)[2]) == {"released": 1}
    round_ = {"digest": "a" * 64, "parent": BASE, "round": 1, "samples": 5, "members": [{"peer": id_of("bob"), "number": 1, "samples": 5}]}
    for _ in range(2):
        status, _, data = call(host, "/v1/rounds", envelope(host, "bob", **round_))
        assert status == 200
    assert Head.model_validate(json.loads(data)["head"]) == Head(digest="a" * 64, round=1, samples=5, reporters=[id_of("bob")])
    progress = Progress.model_validate_json(call(host, "/v1/progress")[2])
    assert (progress.round, progress.samples, progress.samples_by_peer, progress.ledger.counted) == (1, 5, {id_of("bob"): 5}, 5)
    assert get_run(host).head.digest == "a" * 64
    assert json.loads(call(host, f"/v1/leases/{granted.lease_id}/release", envelope(host, "bob"))[2])["released"] == len(keys) - 6
    refused(call(host, f"/v1/leases/{granted.lease_id}/renew", envelope(host, "bob")), 410, "lease_lost")


def test_what_the_ledger_forbids_is_a_409(host):
    keys = keys_of(lease(host, "carol"))
    refused(call(host, "/v1/contributions", envelope(host, "mallory", number=1, keys=keys)), 409, "not_held")
    assert call(host, "/v1/contributions", envelope(host, "carol", number=1, keys=keys))[0] == 200
    refused(call(host, "/v1/contributions", envelope(host, "carol", number=1, keys=keys[1:])), 409, "number_taken")
    wrong = {"digest": "b" * 64, "parent": "b" * 64, "round": 1, "samples": 1, "members": [{"peer": "m", "number": 1, "samples": 1}]}
    refused(call(host, "/v1/rounds", envelope(host, **wrong)), 409, "contradiction")


POSTS = {
    "/v1/leases": {"want_samples": 1},
    f"/v1/leases/{'0' * 32}/renew": {},
    f"/v1/leases/{'0' * 32}/release": {"keys": ["0:0:0"]},
    "/v1/contributions": {"number": 1, "keys": ["0:0:0"]},
    "/v1/rounds": {"digest": BASE, "parent": "1" * 64, "round": 1, "samples": 1, "members": [{"peer": "a", "number": 1, "samples": 1}]},
}


@pytest.mark.parametrize(("path", "method", "most"), [("/v1/leases", "POST", 256 << 10), ("/v1/rounds", "POST", 256 << 10), ("/v1/run", "PUT", 16 << 10)])
def test_what_is_larger_than_any_such_request_is_refused_unread(host, path, method, most):
    """To say what is wrong with 1.6 MB of a run took the server 3 s and 918 MB."""
    refused(call(host, path, raw=b" " * (most + 1), method=method), 413, "request_entity_too_large")
    refused(call(host, path, raw=b" " * most, method=method), 400, "bad_request")


def test_the_description_of_the_interface_is_made_once(monkeypatch):
    """It takes 20 ms, and strangers may ask for it 50 times a second."""
    made = app._description(True)
    monkeypatch.setattr(app, "describe", None)
    assert app._description(True) is made and b'"openapi"' in made


@pytest.mark.parametrize("path", POSTS)
def test_bad_requests_get_an_answer_that_says_what_is_wrong(host, path):
    good = envelope(host, **POSTS[path])
    for raw in (b"", b"{", b"\xff\xfe", b"[" * 5000):
        refused(call(host, path, raw=raw), 400, "bad_request")
    refused(call(host, path, [good]), 422, "bad_request")
    refused(call(host, path, {**good, "surprise": 1}), 422, "bad_request")
    refused(call(host, path, {**good, "run_id": "f" * 16}), 409, "other_run")
    refused(call(host, path, {**good, "peer": "../../etc"}), 422, "bad_request")
    refused(call(host, path, raw=b"x" * (9 << 20)), 413, "request_entity_too_large")
    many = json.dumps({**good, **{f"surprise{number}": 1 for number in range(5000)}})
    answer = call(host, path, raw=many.encode())
    refused(answer, 422, "bad_request")
    assert b"5000 values do not fit" in answer[2]
    refused(call(host, path), 405, "method_not_allowed")
    for field in good:
        if field != "keys":
            for value in (None, -1, "", [], {}, 2**70, "\0", 1.5, float("nan")):
                answer = call(host, path, {**good, field: value})
                assert 400 <= answer[0] < 500, (field, value, answer)
                ErrorAnswer.model_validate_json(answer[2])


def test_a_long_body_is_not_taken_apart_for_who_has_not_signed_it(host):
    keys = json.dumps({**envelope(host, number=1), "keys": ["0:0:0"] * 60_000}).encode()
    unsigned = dict.fromkeys(("X-Peer-Key", "X-Peer-Time", "X-Peer-Signature"), "")
    refused(call(host, "/v1/contributions", raw=keys, headers=unsigned), 403, "signature_needed")
    refused(call(host, "/v1/contributions", raw=b"[" + b" " * len(keys)), 403, "signature_needed")


def test_a_head_that_is_no_text_is_the_callers_fault(host):
    """aiohttp hands it on as lone surrogates. No JSON can be made of these, and the answer was a traceback."""
    headers = {"X-Peer-Key": "k", "X-Peer-Time": "\xff", "X-Peer-Signature": "s"}
    answer = call(host, "/v1/leases", raw=json.dumps(envelope(host, want_samples=1)).encode(), headers=headers)
    refused(answer, 403, "clock_differs")
    assert b"time is" in answer[2]


def test_keys_that_are_no_samples_of_the_dataset_are_refused(host):
    for key in ("0:999:0", "0:0:999", "0:0:0:0", "x"):
        assert call(host, "/v1/contributions", envelope(host, number=9, keys=[key]))[0] == 422
    assert call(host, "/v1/contributions", envelope(host, number=9, keys=["999999999:0:0"]))[0] == 409


@pytest.mark.parametrize(
    "path",
    [
        "/index.html",
        "/static/../ledger.sqlite",
        "/ledger.sqlite",
        "/v1/blobs/../../../etc/passwd",
        "/v1/blobs/..%2f..%2fledger.sqlite",
        "/v1/blobs/%2e%2e/manifest.json",
        "/v1/blobs/ledger.sqlite",
        "/v1/blobs/" + "0" * 64 + ".tar",
        "/v1/blobs/" + "A" * 64 + ".tar",
        "/v1/manifest/" + "0" * 64,
        "/v1/manifest/..%2fmanifest.json",
        "/v1/leases/xyz/renew",
    ],
)
def test_no_path_reaches_a_file(host, path):
    connection = http.client.HTTPConnection(urlsplit(host.url).netloc, timeout=20)  # sends the path as it is
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert response.status == 404
    ErrorAnswer.model_validate_json(body)


def test_a_malformed_request_line_is_no_fault_of_the_server(host):
    import socket

    netloc = urlsplit(host.url)
    for junk in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET\r\n\r\n",
        b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection((netloc.hostname, netloc.port), timeout=20) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), answer
    assert call(host, "/healthz")[0] == 200


def test_some_samples_of_a_contribution_are_told_and_of_an_unknown_one_none(host):
    keys = keys_of(lease(host, "told", want=8))
    path = f"/v1/contributions/{id_of('told')}"
    refused(call(host, f"{path}/1"), 404, "no_such_contribution")
    assert call(host, "/v1/contributions", envelope(host, "told", number=1, keys=keys[:3]))[0] == 200
    status, _, data = call(host, f"{path}/1")
    assert status == 200 and json.loads(data) == {"keys": sorted(keys[:3])}
    refused(call(host, f"{path}/2"), 404, "no_such_contribution")
    refused(call(host, f"/v1/contributions/{id_of('nobody')}/1"), 404, "no_such_contribution")
