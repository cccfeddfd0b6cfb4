"""Whom a peer takes for its dataset server, and what it does where it is refused: a token, a certificate, a pause."""

import asyncio
import json
import time
import urllib.request
from itertools import islice

import aiohttp
import pytest

from datasetserver.__main__ import cli
from peer.config import PeerConfig
from peer.contracts import CommittedRound, Member, SourceContext
from peer.data.client import probing
from peer.data.client.probing import download_state
from peer.data.client.runs import fetch_run, found_run, report_round
from peer.data.client.transport import Reply, ServerAway, Transport
from peer.data.dataset_server import build
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from swarm.signed_request import Signer
from swarm.signing import SIGNATURE_HEADER
from tests.datasetserver.test_blobs import certificate  # noqa: F401 (a fixture)
from tests.identities import id_of, identity_file, key
from tests.serving import Answer, serving

BASE = "0" * 64


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"<html>It works!</html>", "not a dataset server"),
        (b"[]", "not a dataset server"),
        (b'{"protocol": 999}', "protocol 999"),
        (b'{"protocol": 2, "run": {"learning_rat": 1}}', "does not know"),
    ],
)
def test_something_else_at_the_url_is_a_users_error(body, what):
    handler = type("Handler", (Answer,), {"body": body})
    with serving(handler) as url, pytest.raises(UserError, match=what) as raised:
        fetch_run(url, 20)
    assert raised.value.code == ExitCode.NETWORK


def test_a_proxy_whose_server_is_away_is_asked_again_for_as_long_as_a_server_is(serve):
    """nginx says 502 in words of its own, while the server behind it starts again: a peer that came then ended."""
    host, asked = serve(), []

    class Proxy(Answer):
        def do_GET(self):
            asked.append(self.path)
            if len(asked) > 2:
                with urllib.request.urlopen(host.url + self.path) as answer:
                    type(self).body = answer.read()
                return super().do_GET()
            self.send_response(502)
            self.end_headers()
            self.wfile.write(b"<html>502 Bad Gateway</html>")

    with serving(Proxy) as url:
        found = fetch_run(url, 20)
    assert found.run_id == fetch_run(host.url, 20).run_id and len(asked) == 3


def test_a_url_that_refuses_another_run_or_no_url_is_a_users_error(serve):
    host = serve()
    with pytest.raises(UserError, match=r"serves run .* not 1234"):
        fetch_run(host.url, run_id="1234")
    host.stop()
    for url in (host.url, "no url", "http://", "ftp://127.0.0.1/"):
        with pytest.raises(UserError) as raised:
            fetch_run(url, 0.5)
        assert raised.value.code == ExitCode.NETWORK and url in str(raised.value)


def test_no_server_sends_its_peers_to_another_machine():
    """A host could have all volunteers call any address, also one of their own network."""
    asked = []

    class Victim(Answer):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

    class Sends(Answer):
        def do_GET(self):
            self.send_response(307)
            self.send_header("Location", f"{victim}/v1/run")
            self.end_headers()

    async def stream():
        async with Transport(host) as transport, transport.stream("/v1/blobs/x.tar", {}):
            pass

    with serving(Victim) as victim, serving(Sends) as host:
        with pytest.raises(UserError, match=f"it sends on to {victim}/v1/run; if that is the server, give its URL"):
            fetch_run(host, 2)
        with pytest.raises(ServerAway, match="sends on"):
            asyncio.run(stream())
    assert not asked


def test_a_state_is_fetched_only_where_it_has_room_and_comes_at_some_rate(tmp_path, monkeypatch):
    offered = {"digest": "a" * 64, "round": 1, "samples": 1, "bytes": 2**53}
    progress = {
        "run_id": "0" * 16, "run_name": "x", "total_samples": 0, "target_batch_size": 1, "round": 1, "samples": 1, "waiting_samples": 0,
        "samples_per_second": 0.0, "loss": None, "peers": [], "samples_by_peer": {}, "epoch": 0, "epoch_samples": 0, "dataset_samples": 1,
        "ledger": {"available": 0, "leased": 0, "pending": 0, "counted": 0}, "finished": False, "server_time": 0.0,
    }  # fmt: skip

    class Drips(Answer):
        def do_GET(self):
            self.body = json.dumps({**progress, "checkpoint": offered}).encode() if "progress" in self.path else b"x" * 100_000
            super().do_GET()

    with serving(Drips) as host:
        with pytest.raises(UserError, match="has room for") as raised:
            download_state(host, tmp_path)
        assert raised.value.code == ExitCode.DISK
        offered["bytes"] = 1_000_000
        monkeypatch.setattr(probing, "_CONNECT_SECONDS", -100.0)
        with pytest.raises(ServerAway, match="of the state's 1000000"):
            download_state(host, tmp_path)


# -- who may use a server, and how often


def test_a_peer_shows_its_token_for_whatever_it_asks(serve, tmp_path):
    from datasetserver.tokens import add, remove

    token = add(tmp_path / "tokens", "alice")
    host = serve("--tokens", str(tmp_path / "tokens"), samples=8, shard_samples=4)
    for wrong, what in [("", "hold a token"), ("x" * 43, "opens nothing")]:
        with pytest.raises(UserError, match=what) as raised:
            fetch_run(host.url, 20, token=wrong)
        assert raised.value.code == ExitCode.AUTH
    answer = fetch_run(host.url, 20, token=token)
    run = RunConfig.from_mapping(answer.run, where=host.url)
    assert found_run(host.url, run, 20, token=token).run_id == run.run_id
    context = SourceContext(
        run=run,
        url=host.url,
        token=token,
        peer=PeerConfig(identity_path=str(identity_file(tmp_path / "key", "alice")), cache_dir=str(tmp_path / "cache")),
        peer_id=id_of("alice"),
        batch_samples=2,
    )
    assert token not in repr(context)
    source = build(context)
    keys = [sample.key for sample in islice(source, 4)]
    source.register(1, keys)
    committed_round = CommittedRound("1" * 64, BASE, 1, 4, (Member(id_of("alice"), 1, 4),))
    slow = Signer(key("bob"), clock=lambda: time.time() - 3600)  # a machine whose clock is an hour late is told so, and signs again
    report_round(host.url, run, slow, committed_round, 20, token=token)
    assert fetch_run(host.url, 20, token=token).head.samples == 4
    remove(tmp_path / "tokens", "alice")
    with pytest.raises(UserError) as raised:  # at the latest with the first lease after the server has looked at its file
        for sample in source:
            source.give_back([sample.key])
    assert raised.value.code == ExitCode.AUTH
    source.close()


def test_a_peer_trusts_a_certificate_that_its_system_trusts_and_names_one_that_it_does_not(serve, monkeypatch, join, certificate):  # noqa: F811
    host = serve("--tls_cert", str(certificate / "cert.pem"), "--tls_key", str(certificate / "key.pem"))
    with pytest.raises(UserError, match="not trusted") as raised:
        fetch_run(host.url, 20)
    assert raised.value.code == ExitCode.NETWORK and "SSL_CERT_FILE" in raised.value.fix
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    asked_anew = aiohttp.connector._make_ssl_context(True)  # aiohttp asks the system what it trusts when it is imported
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", asked_anew)
    assert len(list(islice(join(host.url, "alice"), 10))) == 10


class Busy(Answer):
    """Says `refusals` times to come back later, then passes on to a real server; `asked`: when, by path, and what it answered."""

    protocol_version = "HTTP/1.1"
    refusals, status, real, asked = 0, 429, "", []

    def do_GET(self):
        self._answer(None)

    def do_POST(self):
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body):
        kind = type(self)
        path = self.path
        refuse = path not in ("/v1/run",) and sum(1 for _, known, status in kind.asked if known == path and status != 200) < kind.refusals
        if refuse:
            headers, status = {"Retry-After": "2"}, kind.status
            data = json.dumps({"error": {"code": "too_many_requests", "message": "Not now.", "fix": "Wait."}}).encode()
        else:
            by = {name: value for name, value in self.headers.items() if name.startswith("X-Peer-")}
            request = urllib.request.Request(kind.real + path, body, {"Content-Type": "application/json", **by})
            with urllib.request.urlopen(request, timeout=60) as response:
                signature = response.headers.get(SIGNATURE_HEADER)
                headers, status, data = {SIGNATURE_HEADER: signature} if signature else {}, 200, response.read()
        kind.asked.append((time.monotonic(), path, status))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.mark.parametrize("status", [429, 503])
def test_a_peer_comes_back_when_retry_after_says_and_not_before(serve, join, status):
    host = serve(samples=8, shard_samples=8)
    handler = type("Handler", (Busy,), {"refusals": 1, "status": status, "real": host.url, "asked": []})
    with serving(handler) as url:
        source = join(url, "alice")
        assert len(list(islice(source, 8))) == 8
        source.close()
    lease = [(when, answered) for when, path, answered in handler.asked if path == "/v1/leases"]
    blob = [(when, answered) for when, path, answered in handler.asked if path.startswith("/v1/blobs/")]
    for (refused, first), (again, second) in (lease[:2], blob[:2]):
        assert (first, second) == (status, 200)
        assert again - refused >= 2.0, "as a busy server asks: more is no fault, less is"


def test_only_an_answer_that_says_no_is_read_as_an_error():
    body = b'{"error": {"code": "banned", "message": "it lies", "fix": ""}}'
    assert [Reply(status, body, {}).code for status in (200, 206, 299)] == ["", "", ""]
    assert [Reply(status, body, {}).code for status in (300, 401, 403, 500)] == ["banned"] * 4
    assert Reply(403, b"<html>", {}).error is None


def test_a_peer_that_the_host_bans_ends_with_the_reason(serve, join, tmp_path):
    host = serve(samples=40, shard_samples=4)
    stream = iter(join(host.url, "alice"))
    next(stream)
    assert cli(["ban", id_of("alice"), "--reason", "it lies", "--dataset", str(host.dataset)]) == 0
    with pytest.raises(UserError, match="banned this peer: it lies") as raised:
        while True:
            next(stream)
    assert raised.value.code == ExitCode.AUTH
