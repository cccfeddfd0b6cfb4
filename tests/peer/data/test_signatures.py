"""A peer takes part only in a run, and trains only on shards, that the host has signed; the server is a real one, what lies between lies."""

import json
import urllib.request
from itertools import islice

import pytest

from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data.client.runs import check_run, fetch_run
from peer.data.dataset_server import build
from peer.launch.command_line import parse
from peer.launch.resolving import resolve_run
from swarm.digest import canonical_json, digest_bytes
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from swarm.signing import SIGNATURE_HEADER, HostKey, KnownHosts
from tests.datasetserver.hosting import Host
from tests.identities import id_of, identity_file
from tests.peer.data.meddler import Meddler


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("host"), samples=8, shard_samples=4).start()
    yield host
    host.stop()


@pytest.fixture
def between(host):
    """`between(change)` is the URL of somebody who passes everything on, changed."""
    servers = []

    def start(change):
        servers.append(Meddler(host.url, change=change))
        return servers[-1].url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def source(tmp_path):
    """`source(url, run)` leases from `url`; closed in the end."""
    sources = []

    def make(url, run, known_hosts=None):
        peer = PeerConfig(identity_path=str(identity_file(tmp_path / "key", "alice")), cache_dir=str(tmp_path / "cache"))
        context = SourceContext(run=run, url=url, peer=peer, peer_id=id_of("alice"), batch_samples=2, known_hosts=known_hosts)
        sources.append(build(context))
        return sources[-1]

    yield make
    for made in sources:
        made.close()


def run_of(host):
    return RunConfig.from_mapping(fetch_run(host.url, 20).run, where=host.url)


def body_of(url):
    with urllib.request.urlopen(url, timeout=20) as response:
        return response.read()


def flip(body, position):
    return body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :]


def refused(match, act, *arguments, **options):
    with pytest.raises(UserError, match=match) as raised:
        act(*arguments, **options)
    return raised.value


def test_a_run_with_any_byte_of_it_its_key_or_its_signature_flipped_is_refused(host):
    body = body_of(host.url + "/v1/run")
    said, begin = json.loads(body), body.index(b'"run":{')
    positions = [*range(begin + 6, body.index(b"}", begin) + 1)]
    for part in (said["host_key"].encode(), said["signature"].encode()):
        positions += range(body.index(part), body.index(part) + len(part))
    check_run(host.url, 200, body)
    assert len(positions) > 64 + 128 + 100
    for position in positions:
        error = refused(".", check_run, host.url, 200, flip(body, position))
        assert error.code in (ExitCode.AUTH, ExitCode.NETWORK)


def test_a_changed_name_of_the_model_which_no_digest_covers_is_noticed_by_the_signature(host, between):
    other = str(host.model).replace("model", "m0del").encode()
    url = between(lambda path, headers, body: body.replace(str(host.model).encode(), other))
    error = refused("has not signed: its signature is not that of the key", fetch_run, url, 20)
    assert error.code == ExitCode.AUTH


def test_a_run_without_a_signature_is_refused(host, between):
    url = between(lambda path, headers, body: canonical_json({**json.loads(body), "signature": ""}))
    assert refused("it is not signed", fetch_run, url, 20).code == ExitCode.AUTH


@pytest.mark.parametrize("place", ["shards", "total", "version", "end"])
def test_a_manifest_with_a_byte_flipped_is_refused(host, between, source, place):
    def change(path, headers, body):
        position = len(body) - 1 if place == "end" else body.find(f'"{place}":'.encode()) + len(place) + 8
        return flip(body, min(position, len(body) - 1)) if "/manifest/" in path else body

    error = refused("a manifest that its host has not signed", next, iter(source(between(change), run_of(host))))
    assert error.code == ExitCode.AUTH


@pytest.mark.parametrize("signature", [None, "", "no hex", "00" * 64])
def test_a_manifest_whose_signature_is_missing_or_wrong_is_refused(host, between, source, signature):
    def change(path, headers, body):
        if headers.pop(SIGNATURE_HEADER, None) and signature is not None:
            headers[SIGNATURE_HEADER] = signature
        return body

    error = refused("a manifest that its host has not signed", next, iter(source(between(change), run_of(host))))
    assert error.code == ExitCode.AUTH


def test_a_leased_shard_that_is_not_in_the_manifest_is_refused(host, between, source):
    def change(path, headers, body):
        if path != "/v1/leases":
            return body
        lease = json.loads(body)
        lease["shard_epochs"][0]["digest"] = digest_bytes(b"other pictures")
        return canonical_json(lease)

    error = refused("shards that its host has not signed", next, iter(source(between(change), run_of(host))))
    assert error.code == ExitCode.AUTH


def forge(folder):
    """What a server with a key of its own says in place of the host."""
    key = HostKey(folder / "forger.key")

    def change(path, headers, body):
        if path == "/v1/run":
            said = json.loads(body)
            signature = key.sign("run", digest_bytes(canonical_json(said["run"])))
            return canonical_json({**said, "host_key": key.public, "signature": signature})
        if "/manifest/" in path:
            headers[SIGNATURE_HEADER] = key.sign("manifest", path.rpartition("/")[2])
        return body

    return change


def test_another_host_is_refused_at_the_start_and_by_the_source_once_the_right_one_is_known(host, between, source, tmp_path):
    url, run = between(forge(tmp_path)), run_of(host)
    assert len({sample.key for sample in islice(source(url, run), 8)}) == 8, "who knows no better believes the forger"
    flags = ["--output_dir", str(tmp_path / "output")]
    known = KnownHosts(tmp_path / "output" / "known_hosts.json")
    first = resolve_run(*parse(["--datasetserver", host.url, *flags]))
    assert first.run == run
    error = refused("not the same host", resolve_run, *parse(["--datasetserver", url, *flags]))
    assert error.code == ExitCode.AUTH
    error = refused("not the same host", next, iter(source(url, run, known)))
    assert error.code == ExitCode.AUTH
    assert resolve_run(*parse(["--datasetserver", host.url, *flags])) == first


def test_a_key_that_was_given_is_asked_for_from_the_first_time_on(host, between, tmp_path):
    key = fetch_run(host.url, 20).host_key
    assert any(key in line for line in host.lines), "the host is shown it"
    flags = ["--output_dir", str(tmp_path / "output"), "--host_key", key]
    refused("as --host_key says", resolve_run, *parse(["--datasetserver", between(forge(tmp_path)), *flags]))
    assert resolve_run(*parse(["--datasetserver", host.url, *flags])).run == run_of(host)
    refused("not a host's key", parse, ["--host_key", key[:-1]])


def test_a_host_keeps_its_key_over_a_restart(tmp_path):
    host = Host(tmp_path, samples=2).start()
    key = fetch_run(host.url, 20).host_key
    host.kill()
    host.start()
    try:
        assert fetch_run(host.url, 20).host_key == key
    finally:
        host.stop()
