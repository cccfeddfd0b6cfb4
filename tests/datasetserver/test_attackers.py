"""Strangers and members who mean harm, against a real server, over HTTP alone. Their figures are drawn anew in every run; the seed is printed."""

import http.client
import json
import random
import re
import secrets

import pytest

from datasetserver.__main__ import cli
from datasetserver.app import ENDPOINTS
from datasetserver.heads import _named
from datasetserver.tokens import add, remove
from swarm.errors import UserError
from swarm.protocol import LeaseAnswer
from swarm.signed_request import Signer
from tests.datasetserver.hosting import Host, until
from tests.datasetserver.test_http import BASE, call, envelope, keys_of, refused
from tests.identities import id_of, key

TARGET, TOTAL = 8, 60


@pytest.fixture
def rng():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def host(serve, tmp_path):
    """A run of 60 samples in rounds of 8, for those who hold a token: alice, bob and mallory."""
    tokens = {name: add(tmp_path / "tokens", name) for name in ("alice", "bob", "mallory")}
    host = serve("--tokens", str(tmp_path / "tokens"), "--total_samples", str(TOTAL), "--target_batch_size", str(TARGET))
    host.tokens, host.tokens_file = tokens, tmp_path / "tokens"
    host.run_id = ask(host, "alice", "/v1/run")["run_id"]
    return host


def bearer(host, token):
    return {"Authorization": f"Bearer {host.tokens[token]}"}


def send(host, token, peer, path, **body):
    """What the server answers `peer`, who signs with its own key and shows the token of `token`."""
    return call(host, path, {"run_id": host.run_id, "peer": id_of(peer), **body}, headers=bearer(host, token))


def ask(host, token, path):
    return json.loads(call(host, path, headers=bearer(host, token))[2])


def train(host, peer, number=1, want=8):
    """A lease of about so many samples, and a contribution of them; the keys."""
    status, _, data = send(host, peer, peer, "/v1/leases", want_samples=want)
    assert status == 201, data
    keys = keys_of(LeaseAnswer.model_validate_json(data))
    assert send(host, peer, peer, "/v1/contributions", number=number, keys=keys)[0] == 200
    return keys


def member(peer, number, samples):
    return {"peer": id_of(peer), "number": number, "samples": samples}


def report(host, token, digest, parent, round_, samples, *members):
    body = {"digest": digest, "parent": parent, "round": round_, "samples": samples, "members": list(members)}
    return send(host, token, token, "/v1/rounds", **body)


def first_round(host, peer="alice", number=1):
    """A first honest round; its digest."""
    count = len(train(host, peer, number))
    digest = secrets.token_hex(32)
    assert report(host, peer, digest, BASE, 1, count, member(peer, number, count))[0] == 200
    return digest, count


def test_no_report_of_figures_ends_a_run_or_becomes_its_head(host, rng):
    honest, count = first_round(host)
    for _ in range(20):
        figure, round_ = rng.randrange(TOTAL, 2**53), rng.randrange(2, 2**53)
        parent = rng.choice([honest, f"{rng.getrandbits(256):064x}"])
        own = rng.randrange(1, 2 * TARGET + 1) if rng.random() < 0.7 else figure
        if parent == honest:
            figure, round_ = count + own, 2
        report(host, "mallory", f"{rng.getrandbits(256):064x}", parent, round_, figure, member("mallory", rng.randrange(1, 2**53), own))
    for _ in range(2):
        progress = ask(host, "alice", "/v1/progress")
        assert (progress["samples"], progress["round"], progress["finished"]) == (count, 1, False)
        assert ask(host, "alice", "/v1/run")["head"]["digest"] == honest
        assert send(host, "bob", "bob", "/v1/leases", want_samples=1)[0] == 201
        host.kill()
        host.start()
    more = len(train(host, "alice", 2))
    after = f"{rng.getrandbits(256):064x}"
    assert report(host, "alice", after, honest, 2, count + more, member("alice", 2, more))[0] == 200
    assert ask(host, "alice", "/v1/run")["head"]["digest"] == after, "the honest go on where they were"


def test_a_contribution_counts_once_in_a_lineage_however_often_it_is_reported(host, rng):
    mine = len(train(host, "mallory"))
    digest, parent, samples = "", BASE, 0
    for round_ in range(1, 21):
        digest, samples = f"{rng.getrandbits(256):064x}", samples + mine
        report(host, "mallory", digest, parent, round_, samples, member("mallory", 1, mine))
        parent = digest
    progress = ask(host, "alice", "/v1/progress")
    assert (progress["samples"], progress["finished"]) == (mine, False)


def test_more_than_two_rounds_worth_of_one_member_is_refused(host, rng):
    samples = rng.randrange(2 * TARGET + 1, 2**53)
    answer = report(host, "mallory", f"{rng.getrandbits(256):064x}", BASE, 1, samples, member("mallory", 1, samples))
    refused(answer, 409, "contradiction")


def test_nobody_speaks_for_another_peer(host, rng):
    train(host, "alice")
    granted = LeaseAnswer.model_validate_json(send(host, "alice", "alice", "/v1/leases", want_samples=4)[2])
    before = ask(host, "alice", "/v1/progress")["ledger"]
    body = {"run_id": host.run_id, "peer": id_of("alice"), "keys": keys_of(granted)}
    path, data = f"/v1/leases/{granted.lease_id}/release", json.dumps(body).encode()
    own, hers = Signer(key("mallory")), Signer(key("alice"))
    elsewhere = [hers.headers("POST", "/v1/contributions", data), hers.headers("PUT", path, data), hers.headers("POST", path, data + b" ")]
    borrowed = {**own.headers("POST", path, data), "X-Peer-Key": key("alice").public}
    late = Signer(key("alice"), clock=lambda: 1e9 + rng.randrange(10**8)).headers("POST", path, data)
    moved = {**hers.headers("POST", path, data), "X-Peer-Time": f"{hers.clock() + rng.random():.6f}"}
    for headers, code in [
        ({}, "signature_needed"),
        (own.headers("POST", path, data), "bad_signature"),
        (borrowed, "bad_signature"),
        (moved, "bad_signature"),
        (late, "clock_differs"),
        *[(headers, "bad_signature") for headers in elsewhere],
    ]:
        refused(unsigned(host, path, data, {**headers, **bearer(host, "mallory")}), 403, code)
    assert ask(host, "alice", "/v1/progress")["ledger"] == before


def unsigned(host, path, data, headers):
    """One request with just these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", host.port, timeout=60)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_a_request_that_was_heard_on_the_way_is_worthless(host):
    granted = LeaseAnswer.model_validate_json(send(host, "alice", "alice", "/v1/leases", want_samples=4)[2])
    path = f"/v1/leases/{granted.lease_id}/release"
    data = json.dumps({"run_id": host.run_id, "peer": id_of("alice"), "keys": None}).encode()
    heard = {**Signer(key("alice")).headers("POST", path, data), **bearer(host, "alice")}
    assert unsigned(host, path, data, heard)[0] == 200
    padded = {**heard, "X-Peer-Signature": heard["X-Peer-Signature"][:-3] + "x=="}  # other text of the same bytes, or of others
    for again in (heard, {**heard, **bearer(host, "mallory")}, padded):
        refused(unsigned(host, path, data, again), 403, "replayed")
    host.kill()
    host.start()
    refused(unsigned(host, path, data, heard), 403, "clock_differs")


def test_a_peers_id_stays_with_the_token_that_it_came_with_until_that_is_taken_back(host):
    train(host, "alice")
    refused(send(host, "mallory", "alice", "/v1/leases", want_samples=1), 403, "other_token")
    host.kill()
    host.start()
    refused(send(host, "mallory", "alice", "/v1/leases", want_samples=1), 403, "other_token")
    assert send(host, "alice", "alice", "/v1/leases", want_samples=1)[0] == 201
    remove(host.tokens_file, "alice")
    host.tokens["alice again"] = add(host.tokens_file, "alice-again")
    until(lambda: call(host, "/v1/run", headers=bearer(host, "alice again"))[0] == 200)
    assert send(host, "alice again", "alice", "/v1/leases", want_samples=1)[0] == 201, "she goes on with a new token"
    refused(send(host, "mallory", "alice", "/v1/leases", want_samples=1), 403, "other_token")


def test_many_invented_peers_hold_no_more_than_one(host, rng):
    names = [f"invented{number}" for number in range(6)]
    most, held = 20_000, 0
    for name in names * 100:
        status, _, data = send(host, "mallory", name, "/v1/leases", want_samples=rng.randrange(5000, 20_000))
        if status == 201:
            keys = keys_of(LeaseAnswer.model_validate_json(data))
            held += len(keys)
            send(host, "mallory", name, "/v1/contributions", number=rng.randrange(1, 2**53), keys=keys[: len(keys) // 2])
        else:
            refused((status, None, data), 429, "too_many_leased")
            break
    assert status == 429 and held < 4 * most
    offered = {"keys": [f"{epoch}:0:0" for epoch in range(4 * held // 40, 4 * held // 40 + 1000)], "number": 7, "offered": True}
    answer = json.loads(send(host, "mallory", "invented0", "/v1/contributions", **offered)[2])
    assert (answer["registered"], answer["repeated"]) == (0, 0), "nothing beyond what it may hold"
    ledger = ask(host, "alice", "/v1/progress")["ledger"]
    assert ledger["leased"] + ledger["pending"] <= held and sum(ledger.values()) < held + 2 * 40
    assert send(host, "bob", "bob", "/v1/leases", want_samples=1)[0] == 201


def test_a_beginning_that_two_states_share_is_no_name_for_either():
    one, two = ("0123456789" + letter * 54 for letter in "ab")
    assert _named(one[:11], {one, two}) == one and _named(two, {one, two}) == two
    with pytest.raises(UserError, match=f"2 states begin with 01234567: {one}, {two}"):
        _named("01234567", {one, two})


def test_a_forged_head_is_named_and_discarded_and_the_run_goes_on(host, rng, capsys):
    honest, count = first_round(host)
    work = ["--dataset", str(host.dataset)]
    forged, parent, samples = [], honest, count
    for number in range(1, 8):  # within all bounds, as only somebody with a token can
        mine = len(train(host, "mallory", number, want=8))
        samples += mine
        forged.append(f"{rng.getrandbits(256):064x}")
        assert report(host, "mallory", forged[-1], parent, number + 1, samples, member("mallory", number, mine))[0] == 200
        parent = forged[-1]
    assert ask(host, "alice", "/v1/progress")["finished"]
    assert cli(["heads", *work]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert re.match(rf"head {forged[-1]} round=8 reported={samples} counted={samples} by {id_of('mallory')}$", line), line
    assert cli(["discard", *work, forged[0]]) == 2
    assert f"forget state {forged[0]} of round 2 and what follows from it: 7 states, which by their reports add {samples - count} samples to {count}" in capsys.readouterr().err
    assert cli(["discard", *work, forged[0][:8], "--yes", "--reason", "nobody trained it"]) == 0
    until(lambda: not ask(host, "alice", "/v1/progress")["finished"])
    assert ask(host, "alice", "/v1/run")["head"]["digest"] == honest
    (said,) = ask(host, "alice", "/v1/run")["bans"]
    assert (said["about"], said["banned"], said["reason"]) == (forged[0], True, "nobody trained it")
    assert ask(host, "alice", "/v1/progress")["banned"] == {}, "it is no peer"
    for _ in range(2):
        assert send(host, "bob", "bob", "/v1/leases", want_samples=1)[0] == 201
        again = report(host, "mallory", forged[1], forged[0], 3, count + 16, member("mallory", 2, 8))
        refused(again, 409, "discarded")
        child = f"{rng.getrandbits(256):064x}"
        refused(report(host, "mallory", child, forged[1], 4, count + 24, member("mallory", 3, 8)), 409, "discarded")
        assert ask(host, "alice", "/v1/progress")["samples"] == count
        host.kill()
        host.start()
    assert host.stop() == 0
    capsys.readouterr()
    assert cli(["heads", *work]) == 0 and capsys.readouterr().out.startswith(f"head {honest} ")
    assert cli(["discard", *work, forged[0][:16]]) == 0 and capsys.readouterr().out == f"state {forged[0]} is discarded already\n"
    assert cli(["discard", *work, honest[:7]]) == 2 and "not the digest of a state" in capsys.readouterr().err
    assert cli(["discard", *work, "no digest", "--yes"]) == 2 and "not the digest of a state" in capsys.readouterr().err
    assert cli(["discard", *work, "0" * 64, "--yes"]) == 2 and "Nobody has reported" in capsys.readouterr().err
    assert cli(["heads", "--work_dir", str(host.tokens_file)]) == 2
    assert cli(["discard", "--work_dir", str(host.tokens_file.parent), forged[0]]) == 2


# -- a web page in the host's browser


WRITING = [endpoint for endpoint in ENDPOINTS if endpoint.method not in ("GET", "HEAD")]


def page(host, endpoint, **headers):
    """What a page makes a browser send, and what comes back: the honest request but for `headers`."""
    path = endpoint.path.replace("{lease}", "0" * 32)
    data = json.dumps(envelope(host, "alice", want_samples=1)).encode()
    sent = {"Host": f"127.0.0.1:{host.port}", "Content-Type": "application/json", **headers}
    connection = http.client.HTTPConnection("127.0.0.1", host.port, timeout=60)
    try:
        connection.putrequest(endpoint.method, path, skip_host=True)
        for name, value in {**sent, "Content-Length": str(len(data))}.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(data)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def open_host(tmp_path_factory):
    names = ["--public_url", "https://pictures.example/dd", "--server_names", "box.lan"]
    host = Host(tmp_path_factory.mktemp("open"), *names, samples=8).start()
    yield host
    assert host.stop() == 0


def test_every_endpoint_that_writes_reads_json():
    assert WRITING and all(endpoint.asks for endpoint in WRITING)


@pytest.mark.parametrize("endpoint", WRITING, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_no_page_of_another_site_writes(open_host, endpoint):
    origins = ("http://evil.example", f"http://127.0.0.1:{open_host.port + 1}", "null", "", "https://pictures.example.evil.example")
    for origin in origins:
        refused(page(open_host, endpoint, Origin=origin), 403, "other_origin")
        refused(page(open_host, endpoint, **{"Origin": origin, "Content-Type": "text/plain"}), 403, "other_origin")
    assert page(open_host, endpoint, Host=None, Origin="null")[0] in (400, 403)  # 400: aiohttp itself has no use for it
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain; application/json", None):
        refused(page(open_host, endpoint, **{"Content-Type": kind}), 415, "unsupported_media_type")
    for name in ("evil.example", f"evil.example:{open_host.port}", "127.0.0.1.evil.example", "localhost.evil.example", "[", "1 27.0.0.1"):
        answer = page(open_host, endpoint, Host=name, Origin=f"http://{name}")
        assert answer[0] in (400, 421), answer
    port = open_host.port
    good = [{}, {"Origin": f"http://127.0.0.1:{port}"}, {"Host": "pictures.example", "Origin": "https://pictures.example"}]
    good += [{"Origin": "https://pictures.example"}, {"Host": "box.lan:80"}, {"Host": f"[::1]:{port}"}]
    good += [{"Host": f"LOCALHOST:{port}"}, {"Content-Type": "application/json; charset=utf-8"}]
    for headers in good:
        status, _, body = page(open_host, endpoint, **headers)
        assert status not in (415, 421) and b"other_origin" not in body, (headers, body)


@pytest.mark.parametrize("path", ["/v1/run", "/v1/progress", "/v1/pictures", "/"])
def test_a_page_whose_name_was_led_here_reads_nothing(open_host, path):
    refused(call(open_host, path, headers={"Host": "evil.example"}), 421, "other_host")
    for name in ("localhost", "10.1.2.3:80", "box.lan", "pictures.example."):
        assert call(open_host, path, headers={"Host": name})[0] == 200


# -- a store on the way


def for_others(headers):
    """Whether a proxy's store may give this answer to whom it was not for (RFC 9111, section 5.2.2; nginx obeys these two)."""
    control = {part.strip().partition("=")[0].lower() for part in headers.get("Cache-Control", "").split(",")}
    return not control & {"private", "no-store"}


def test_nothing_behind_a_token_is_for_the_stores_of_others(host):
    run = ask(host, "alice", "/v1/run")
    manifest = ask(host, "alice", f"/v1/manifest/{run['manifest']}")
    digests = {"/v1/manifest/{digest}": run["manifest"], "/v1/blobs/{digest}.tar": manifest["shards"][0]["digest"]}
    seen = {}
    for endpoint in ENDPOINTS:
        if endpoint.method != "GET" or endpoint.public or endpoint.answers == "text/event-stream":
            continue
        path = endpoint.path.replace("{digest}", digests.get(endpoint.path, "0" * 64)).replace("{peer}", "QmNobody").replace("{number}", "1")
        for headers in (bearer(host, "alice"), {}, {**bearer(host, "alice"), "Range": "bytes=0-1"}):
            status, answered, _ = call(host, path, headers=headers)
            assert not for_others(answered) and answered["Vary"] == "Authorization", (path, status, answered)
            seen[endpoint.path, status] = answered["Cache-Control"]
    assert seen["/v1/blobs/{digest}.tar", 200] == seen["/v1/blobs/{digest}.tar", 206] == "private, max-age=31536000, immutable"
    assert seen["/v1/run", 200] == seen["/v1/run", 401] == "no-store"


def test_where_no_token_is_asked_for_shards_may_be_kept_by_all_and_figures_by_nobody(open_host):
    run = json.loads(call(open_host, "/v1/run")[2])
    shard = json.loads(call(open_host, f"/v1/manifest/{run['manifest']}")[2])["shards"][0]["digest"]
    assert call(open_host, f"/v1/blobs/{shard}.tar")[1]["Cache-Control"].startswith("public")
    assert call(open_host, "/v1/run")[1]["Cache-Control"] == "no-store"
