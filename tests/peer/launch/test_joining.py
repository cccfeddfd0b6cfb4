"""Which run a peer takes part in: real servers, a real DHT."""

import asyncio
import dataclasses
import functools
import re
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from peer.config import PeerConfig
from peer.launch.command_line import parse
from peer.launch.joining import Joined, join
from peer.launch.resolving import known_hosts, resolve_run
from peer.launch.starting_model import complete, load_model
from peer.results.output_folder import Owner, claim
from swarm.digest import digest_model
from swarm.errors import ExitCode, Unanswered, UserError, run_program
from swarm.options import check_names
from swarm.run_config import RunConfig
from swarm.version import VERSION
from tests import tiny
from tests.datasetserver.hosting import Host
from tests.serving import Answer, serving

HEAD = {"digest": "d" * 64, "round": 3, "samples": 300, "peers": ["alice"]}


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """A peer keeps its hosts' keys in its --output_dir, by default inside the folder that it is started in."""
    monkeypatch.chdir(tmp_path)


def resolve(*argv):
    """What a peer started with these flags joins: through its own wiring."""
    return resolve_run(*parse([str(argument) for argument in argv]))


def refusal(match, *argv, code=ExitCode.CONFIG):
    """The error that a peer started with these flags ends with."""
    with pytest.raises(UserError, match=match) as raised:
        resolve(*argv)
    assert raised.value.code == code, raised.value
    return raised.value


def test_who_was_in_a_run_goes_on_with_it_while_its_server_is_away_and_nobody_else(tmp_path, caplog):
    def away(url, run_id=""):
        raise Unanswered(f"The dataset server {url} does not answer.", fix="Wait.", code=ExitCode.NETWORK)

    run = RunConfig(model="x", target_batch_size=64)
    before = Joined(run, "http://host", ("/ip4/1.2.3.4/tcp/5/p2p/x",), HEAD, "a key")
    peer = PeerConfig(output_dir=str(tmp_path / "out"), datasetserver="http://host", peers=("/ip4/6.7.8.9/tcp/5/p2p/y",))

    def goes_on(given=(), **changes):
        return join(dataclasses.replace(peer, **changes), dict(given), away, None, None, lambda run_id: f"the key of {run_id}")

    def is_told(**changes):
        with pytest.raises(Unanswered):
            goes_on(**changes)

    is_told()
    (tmp_path / "out").mkdir()
    claim(tmp_path / "out", Owner(id=run.run_id, name=run.run_name, alone=False, about=before.about()))
    addresses = (*peer.peers, *before.initial_peers)
    assert goes_on() == Joined(run, "http://host", addresses, None, f"the key of {run.run_id}", known=True)
    assert "going on with the run known from before: The dataset server http://host does not answer" in caplog.text
    assert goes_on({"target_batch_size": 64}, run_id=run.run_id).run == run
    is_told(datasetserver="http://another")
    is_told(run_id="0" * 16)
    is_told(dry_run=True)
    with pytest.raises(UserError, match="target_batch_size"):
        goes_on({"target_batch_size": 65})
    (tmp_path / "out" / "run.json").write_text("[]")
    is_told()


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    """A server with a run of its own."""
    host = Host(tmp_path_factory.mktemp("founded"), "--run_name", "digits", "--learning_rate", "1e-3").start()
    yield host
    host.stop()


@pytest.fixture
def open_host(tmp_path):
    """A server that waits for a founder."""
    host = Host(tmp_path / "open", founds=False).start()
    yield host
    host.stop()


@pytest.fixture
def host_for_members(tmp_path):
    """A server whose run, which a peer is to found, will be for members."""
    host = Host(tmp_path / "members", "--members", "yes", founds=False).start()
    yield host
    assert host.stop() == 0


def founder(host, *flags):
    return ["--datasetserver", host.url, "--found", "--model", host.model, "--max_train_steps", 8, *flags]


def last_line(capsys, *argv) -> tuple[int, str]:
    """The exit code, and the one line of error, of a peer that is started with these flags."""
    code = run_program(lambda: resolve(*argv))
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith("error: ") and err.rstrip().endswith(line) and not out and "Traceback" not in err
    return code, line


@pytest.mark.parametrize(("version", "says"), [("0.1.0", "the run needs version 0.1.1 of this program, and this is 0.1.0"), (VERSION, "")])
def test_a_founder_that_knows_no_members_is_told_to_update(host_for_members, version, says, monkeypatch, capsys):
    def of_then(values, cls, where):
        check_names(values, [field.name for field in dataclasses.fields(cls) if field.name != "members_of"], where=where)

    monkeypatch.setattr("swarm.run_config.check_keys", of_then)
    monkeypatch.setattr("swarm.run_identity.VERSION", version)
    code, line = last_line(capsys, *founder(host_for_members))
    assert code == ExitCode.CONFIG and says in line and "there is no option 'members_of'. Update: git pull" in line, line


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--host_key", "ab" * 32], ExitCode.AUTH, "not with abababababababab as --host_key says: it is not the same host. Ask the host"),
        (["--members_of", "ab" * 32], ExitCode.CONFIG, "members_of is for the dataset server to set. Leave it out;"),
    ],
)
def test_a_founder_with_another_key_than_the_servers_hears_it_in_one_line(host_for_members, flags, code, says, capsys):
    found, line = last_line(capsys, *founder(host_for_members, *flags))
    assert found == code and says in line, line


def test_a_founder_gets_the_run_for_members_of_the_server(host_for_members):
    joined = resolve(*founder(host_for_members))
    assert joined.run.members_of == joined.host_key != ""
    assert resolve(*founder(host_for_members)) == joined, "also the one that founded it and starts again"


class DhtNode:
    """A node of the DHT in a thread of its own, that publishes what it is given; on a p2pd of the lender's."""

    def __init__(self, lender, folder, *initial_peers):
        from swarm.dht import SwarmNode

        folder.mkdir(exist_ok=True)
        lender.write_key(folder / "identity.key")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.node = self.call(SwarmNode.join(initial_peers=initial_peers, identity_path=folder / "identity.key"))
        (self.maddr,) = self.call(self.node.maddrs())

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(200)

    def tell(self, run, server_url="", head=None, run_id=""):
        from swarm.records import RunRecord

        told = RunRecord(run_id=run_id or run.run_id, run=run.to_mapping(), server_url=server_url, head=head)
        assert self.call(self.node.publish_run(told))

    def sees(self, count):
        """Wait until so many have told of a run."""
        deadline = time.monotonic() + 60
        while len(self.call(self.node.find_runs())) < count:
            assert time.monotonic() < deadline, "the records did not get around"
            time.sleep(0.1)

    def close(self):
        self.call(self.node.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)
        self.loop.close()


@pytest.fixture
def lender():
    pytest.importorskip("hivemind")
    from tests.swarm import p2pds

    with p2pds.keeper().lending() as lender:
        yield lender


@pytest.fixture
def node(lender, tmp_path):
    node = DhtNode(lender, tmp_path / "node")
    yield node
    node.close()


@pytest.fixture
def visits(lender, tmp_path, monkeypatch):
    """Who looks for a run does so on a lent p2pd. On one of its own, a client: `test_a_multiaddr_is_enough_and_leads_to_the_server_too`."""
    from swarm import discovery

    lender.write_key(tmp_path / "visitor.key")
    key, join = (tmp_path / "visitor.key").read_bytes(), discovery.SwarmNode.join

    def lent(*, identity_path, **options):
        identity_path.write_bytes(key)
        return join(identity_path=identity_path, **options)

    monkeypatch.setattr(discovery, "SwarmNode", SimpleNamespace(join=lent))


def test_the_url_of_a_server_is_enough(founded):
    joined = resolve("--datasetserver", founded.url)
    assert (joined.run.run_name, joined.run.learning_rate, joined.server_url) == ("digits", 1e-3, founded.url)
    assert joined.run.model_digest == digest_model(founded.model) and joined.run.dataset_digest
    assert joined.last_known is None and joined.initial_peers == ()
    again = resolve("--datasetserver", founded.url, "--lr", "1e-3", "--run_id", joined.run.run_id, "--hivemind", "True")
    assert again == joined, "flags that agree, and --found where there is a run, change nothing"


def test_a_flag_that_differs_is_named_and_so_is_another_run(founded):
    error = refusal("has learning_rate = 0.001, but this peer was started with 0.01", "--datasetserver", founded.url, "--lr", "0.01")
    assert "--learning_rate" in error.fix
    refusal("has resolution = 512", "--datasetserver", founded.url, "--found", "--resolution", "64")
    refusal("not 0123456789abcdef", "--datasetserver", founded.url, "--run_id", "0123456789abcdef", code=ExitCode.NETWORK)


def test_the_model_may_be_elsewhere_but_not_another_one(tmp_path, tiny_model):
    host = Host(tmp_path)
    host.flags[host.flags.index("--model") + 1] = str(tiny_model)
    host.start()
    try:
        copy, other = shutil.copytree(tiny_model, tmp_path / "copy"), tiny.write_model(tmp_path / "other", seed=1)
        joined = resolve("--datasetserver", host.url, "--model", copy)
        load_model(joined.run, {"model": str(copy)}, torch.device("cpu"))
        joined = resolve("--datasetserver", host.url, "--model", other)
        with pytest.raises(UserError, match="is not the base model of the run"):
            load_model(joined.run, {"model": str(other)}, torch.device("cpu"))
    finally:
        host.stop()


# -- founding at a server


def test_the_first_peer_founds_the_run_with_the_originals_flags_and_others_need_no_more_than_the_url(open_host):
    original = [f"--datasetserver={open_host.url}", "--model", open_host.model, "--run_name", "X", "--hivemind=True"]
    first = resolve(*original)
    assert first.run.run_name == "X" and first.run.model_digest == digest_model(open_host.model) and first.run.dataset_digest
    assert first.server_url == open_host.url
    assert resolve("--datasetserver", open_host.url) == first
    assert resolve(*original, "--target_batch_size", "2048") == first
    open_host.kill()
    open_host.start()
    assert resolve("--datasetserver", open_host.url) == first


def test_a_dry_run_founds_nothing(open_host):
    flags = ["--datasetserver", open_host.url, "--model", open_host.model, "--found"]
    assert resolve(*flags, "--dry_run").run.model_digest == digest_model(open_host.model)
    refusal("has no run yet", "--datasetserver", open_host.url, code=ExitCode.NETWORK)


def test_where_nothing_was_founded_a_peer_says_how(open_host, tmp_path):
    error = refusal("has no run yet", "--datasetserver", open_host.url, "--model", open_host.model, code=ExitCode.NETWORK)
    assert error.fix == "Wait for its host, or found it: add --found --model MODEL."
    error = refusal("has no run yet", "--datasetserver", open_host.url, "--found", "--run_id", "0123456789abcdef", code=ExitCode.NETWORK)
    assert error.fix == "Found it without --run_id, which names a run that exists."
    refusal("needs a base model", "--datasetserver", open_host.url, "--found")
    far = tmp_path.joinpath(*["x" * 200] * 10)
    far.mkdir(parents=True)
    (far / "model").symlink_to(open_host.model)
    error = refusal("does not take this run", "--datasetserver", open_host.url, "--found", "--model", str(far / "model"))
    assert "Shorten" in error.fix


def test_of_two_founders_at_once_both_end_in_one_run_or_the_slower_one_is_told_what_differs(open_host):
    from peer.data.client.runs import fetch_run, found_run

    both_asked = threading.Barrier(2)

    def ask(url, run_id):
        answer = fetch_run(url, run_id=run_id)
        both_asked.wait(120)
        return answer

    def found(seed):
        peer = PeerConfig(datasetserver=open_host.url, found=True)
        try:
            return join(peer, {"model": str(open_host.model), "seed": seed}, ask, found_run, functools.partial(complete, digest=True))
        except UserError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(found, (1, 2)))
    (error,) = [outcome for outcome in outcomes if isinstance(outcome, UserError)]
    (joined,) = [outcome for outcome in outcomes if outcome is not error]
    assert f"has seed = {joined.run.seed}, but this peer was started with {3 - joined.run.seed}" in str(error)


def test_two_founders_at_once_with_equal_flags_are_in_one_run(open_host):
    flags = ["--datasetserver", open_host.url, "--model", open_host.model, "--found"]
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: resolve(*flags), range(2))
    assert one == other


# -- the DHT


@pytest.mark.swarm
def test_a_multiaddr_is_enough_and_leads_to_the_server_too(node, founded):
    run = resolve("--datasetserver", founded.url).run
    node.tell(run, founded.url, HEAD)
    joined = resolve("--peers", node.maddr)
    assert (joined.run, joined.server_url, joined.initial_peers, joined.last_known) == (run, founded.url, (node.maddr,), HEAD)
    refusal("has learning_rate = 0.001", "--peers", node.maddr, "--lr", "0.5")
    both = resolve("--datasetserver", founded.url, "--peers", node.maddr)
    assert (both.run, both.server_url, both.initial_peers) == (run, founded.url, (node.maddr,))


@pytest.mark.swarm
def test_a_peer_with_data_of_its_own_needs_no_server(node, visits, pictures):
    run = RunConfig(run_name="serverless", model="m", model_digest="ab" * 32)
    node.tell(run, head=HEAD)
    joined = resolve("--peers", node.maddr, "--train_data_dir", pictures)
    assert (joined.run, joined.server_url, joined.last_known) == (run, "", HEAD)
    refusal("no dataset server, and this peer no data", "--peers", node.maddr)


@pytest.mark.swarm
def test_a_server_that_is_away_or_lost_its_run_keeps_nobody_from_joining(node, visits, open_host):
    run = RunConfig(run_name="old", model="m", model_digest="ab" * 32)
    node.tell(run, open_host.url, HEAD)
    for _ in ("lost its run", "away"):
        joined = resolve("--peers", node.maddr, "--found", "--model", open_host.model)
        assert (joined.run, joined.server_url, joined.last_known) == (run, open_host.url, HEAD)
        open_host.stop()


@pytest.fixture
def stranger(lender, node, tmp_path):
    """Another node of the DHT, whose address no user gives."""
    stranger = DhtNode(lender, tmp_path / "stranger", node.maddr)
    yield stranger
    stranger.close()


REAL = RunConfig(run_name="real", model="m", model_digest="ab" * 32)
OTHER = RunConfig(run_name="other", model="m", model_digest="cd" * 32)


@pytest.mark.swarm
def test_of_several_runs_that_of_the_peer_named_is_joined_or_else_the_peer_says_which(node, stranger, visits, pictures):
    node.tell(REAL)
    stranger.tell(OTHER)
    node.sees(2)
    data = ("--train_data_dir", pictures)
    assert resolve("--peers", node.maddr, *data).run == REAL, "a stranger's run keeps nobody from joining that of the peer named"
    assert resolve("--peers", node.maddr, *data, "--run_id", OTHER.run_id).run == OTHER
    error = refusal("serve 2 runs", "--peers", node.maddr, stranger.maddr, *data)
    assert "--run_id" in error.fix and error.message.count("0 live") == 2
    assert all(run.run_id in error.message and run.run_name in error.message for run in (REAL, OTHER))


@pytest.mark.swarm
def test_a_run_under_the_id_of_another_is_nobodys(node, stranger, visits, pictures, monkeypatch):
    from swarm.discovery import find_run

    data = ("--train_data_dir", pictures)
    stranger.tell(OTHER, head={**HEAD, "samples": 2**53}, run_id=REAL.run_id)
    node.sees(1)
    with monkeypatch.context() as patch:
        patch.setattr("swarm.discovery.find_run", functools.partial(find_run, seconds=3.0))
        for asked in ((), ("--run_id", REAL.run_id), ("--run_id", OTHER.run_id)):
            refusal("none of them is in a run", "--peers", node.maddr, *data, *asked, code=ExitCode.NETWORK)
    node.tell(REAL)
    for asked in ((), ("--run_id", REAL.run_id)):
        joined = resolve("--peers", node.maddr, *data, *asked)
        assert (joined.run, joined.last_known) == (REAL, None)


@pytest.mark.swarm
def test_what_strangers_say_of_the_real_run_leads_nobody_astray(node, stranger, visits, pictures, founded):
    """Neither to another server, nor to another place of the model, nor into waiting for a state that nobody has."""
    data = ("--train_data_dir", pictures)
    elsewhere = dataclasses.replace(REAL, model="stranger/model", model_config="stranger/config")
    assert elsewhere.run_id == REAL.run_id
    stranger.tell(elsewhere, founded.url, {**HEAD, "samples": 2**53})
    node.tell(REAL, head=HEAD)
    node.sees(2)
    joined = resolve("--peers", node.maddr, *data)
    assert (joined.run, joined.server_url, joined.last_known) == (REAL, "", HEAD) and joined.run.model == "m"


@pytest.mark.swarm
def test_a_server_that_only_strangers_name_must_sign_with_the_hosts_key(node, stranger, visits, founded, pictures):
    at_server = resolve("--datasetserver", founded.url)
    stranger.tell(at_server.run, founded.url, {**HEAD, "samples": 2**53})
    node.sees(1)
    data = ("--train_data_dir", pictures, "--identity_path", "elsewhere/identity.key")
    for flags in ((), ("--host_key", "ab" * 32)):
        joined = resolve("--peers", node.maddr, *data, *flags)
        assert (joined.run, joined.server_url, joined.last_known) == (at_server.run, "", None), flags
    joined = resolve("--peers", node.maddr, *data, "--host_key", at_server.host_key)
    assert (joined.run, joined.server_url, joined.last_known) == (at_server.run, founded.url, None)


@pytest.mark.swarm
def test_where_no_peer_is_in_a_run_one_may_be_founded(node, visits, founded, pictures, monkeypatch):
    from swarm.discovery import find_run

    monkeypatch.setattr("swarm.discovery.find_run", functools.partial(find_run, seconds=3.0))
    error = refusal("none of them is in a run", "--peers", node.maddr, "--train_data_dir", pictures, code=ExitCode.NETWORK)
    assert "--found" in error.fix
    joined = resolve("--peers", node.maddr, "--train_data_dir", pictures, "--found", "--model", founded.model, "--run_name", "mine")
    assert (joined.run.run_name, joined.initial_peers, joined.last_known) == ("mine", (node.maddr,), None)


# -- what is no server and no address


def test_what_is_no_dataset_server_is_named():
    with serving(Answer) as url:
        refusal(f"{url} answers, but is not a dataset server", "--datasetserver", url, code=ExitCode.NETWORK)


def test_a_peers_key_and_those_of_the_hosts_that_it_has_seen_lie_in_one_folder(tmp_path):
    peer = PeerConfig(output_dir=str(tmp_path / "out"))
    elsewhere = dataclasses.replace(peer, identity_path=str(tmp_path / "keys" / "me"))
    assert (peer.identity_file, elsewhere.identity_file) == (tmp_path / "out" / "identity.key", tmp_path / "keys" / "me")
    for config, folder in ((peer, "out"), (elsewhere, "keys")):
        known_hosts(config).check("http://host", "run", "ab" * 32)
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["known_hosts.json"]


def test_a_url_that_refuses_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refuses, and nobody else gets it
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        refusal(f"{url} does not answer: Connection refused\\. Check the URL", "--datasetserver", url, code=ExitCode.NETWORK)


@pytest.mark.parametrize("maddr", ["127.0.0.1:31337", "/ip4/127.0.0.1/tcp/31337", "/ip4/300.0.0.1/tcp/1/p2p/Qm"])
def test_a_bad_multiaddr_is_shown_what_a_right_one_looks_like(maddr):
    pytest.importorskip("hivemind")
    assert "/ip4/203.0.113.7/tcp/31337/p2p/" in refusal(f"'{maddr}' is not a multiaddr", "--peers", maddr).fix


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:9196", "Write http://127.0.0.1:9196"),
        ("host.example.org", "Write http://host.example.org"),
        ("ftp://127.0.0.1/", "http://203.0.113.7:9090"),
        ("http://", "http://203.0.113.7:9090"),
        ("http://host:0", "http://203.0.113.7:9090"),
        ("http://[::1", "http://203.0.113.7:9090"),
    ],
)
@pytest.mark.parametrize("option", ["--datasetserver", "--check"])
def test_a_mistyped_url_is_told_before_anybody_waits_for_an_answer(option, url, says):
    """Without http:// it was tried for 76 s."""
    with pytest.raises(UserError, match=re.escape(f"'{url}' ")) as raised:
        parse([option, url])
    assert raised.value.code == ExitCode.CONFIG and says in raised.value.fix


def test_https_to_a_server_without_it_is_told_in_words(founded):
    url = founded.url.replace("http://", "https://")
    refused = refusal(f"{url} does not speak https", "--datasetserver", url, code=ExitCode.CONFIG)
    assert f"Write {founded.url}" in refused.fix


def test_a_path_behind_a_servers_port_is_a_mistake_that_no_restart_mends(founded):
    refused = refusal(f"{founded.url}/page/ has no dataset server", "--datasetserver", f"{founded.url}/page/", code=ExitCode.CONFIG)
    assert refused.fix == f"Write {founded.url}, if that is what the host said."


def test_addresses_quoted_as_one_word_are_several(tmp_path):
    """As scripts for the program before this one have them: --peers="A B"."""
    first, second = (f"/ip4/203.0.113.{number}/tcp/31337/p2p/Qm" for number in (7, 8))
    for said in ([f"{first} {second}"], [f"{first},{second}"], [first, second], [f" {first},", second]):
        assert parse(["--peers", *said])[0].peers == (first, second)


def test_a_mistyped_address_is_told_before_a_model_is_read(tmp_path):
    refusal("'/ip4/1.2.3.4' is not a multiaddr", "--peers", "/ip4/1.2.3.4", "--model", tmp_path / "no-model-is-here")
