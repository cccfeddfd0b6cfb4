"""`POST /v1/members`: a server lets peers into a run for members, and decides which runs are for members."""

import json
import socket

import pytest

from datasetserver import successor
from datasetserver.__main__ import cli
from datasetserver.config import ServerConfig
from datasetserver.founding import acceptable_run
from datasetserver.newcomers import MOST_OF_AN_OWNER, Newcomers
from datasetserver.refused import Refused
from datasetserver.tokens import add, remove
from peer.data.client.runs import ask_membership, fetch_run
from swarm.bans import Bans, said, sign_word, words_of
from swarm.errors import ExitCode, UserError
from swarm.members import is_signed
from swarm.ports import free_port
from swarm.protocol import NO_LEASE
from swarm.receipts import Receipts
from swarm.records import MAX_REASON, Membership
from swarm.run_config import RunConfig
from swarm.signing import HostKey, KnownHosts
from tests.clock import Clock
from tests.datasetserver.hosting import Host, until
from tests.datasetserver.test_bad_requests import round_of
from tests.datasetserver.test_http import call, envelope, get_run, keys_of, lease, refused
from tests.identities import id_of, signer


def run_of(host) -> RunConfig:
    return RunConfig.from_mapping(get_run(host).run, where="server")


def test_a_server_with_tokens_founds_a_run_for_members_and_lets_in_who_holds_one(tmp_path):
    token, other = (add(tmp_path / "tokens", name, peers) for name, peers in (("alice", 1), ("bob", 0)))
    host = Host(tmp_path, "--tokens", str(tmp_path / "tokens")).start()
    answer = fetch_run(host.url, token=token)
    run = RunConfig.from_mapping(answer.run, where="server")
    assert run.members_of == answer.host_key
    given = ask_membership(host.url, run, signer(id_of("alice")), token=token)
    assert is_signed(run, id_of("alice"), given) and not is_signed(run, id_of("bob"), given)
    with pytest.raises(UserError) as raised:
        ask_membership(host.url, run, signer(id_of("carol")))
    assert raised.value.code == ExitCode.AUTH
    with pytest.raises(UserError, match="One owner has 1 peer in this run") as raised:
        ask_membership(host.url, run, signer(id_of("dave")), token=token)
    assert raised.value.code == ExitCode.AUTH
    assert is_signed(run, id_of("alice"), ask_membership(host.url, run, signer(id_of("alice")), token=token))
    with pytest.raises(UserError, match="came with another token") as raised:
        ask_membership(host.url, run, signer(id_of("alice")), token=other)
    assert raised.value.code == ExitCode.AUTH
    remove(tmp_path / "tokens", "alice")

    def is_shut_out():
        try:
            ask_membership(host.url, run, signer(id_of("alice")), token=token)
            return False
        except UserError as error:
            return error.code == ExitCode.AUTH

    until(is_shut_out)
    host.kill()
    assert "found the run with --averaging centered" in host.stderr
    host.start()  # the run is what it was, also where the flags are others
    assert RunConfig.from_mapping(fetch_run(host.url, token=other).run, where="server") == run
    assert host.stop() == 0 and "--averaging" not in host.stderr, "it cannot be changed any more"
    key = host.dataset.with_name("data.datasetserver") / "host.key"
    lost = key.rename(tmp_path / "lost.key")
    with pytest.raises(AssertionError, match=r"is for members of the key .*, and there is none"):
        host.start()
    assert not key.exists()
    with pytest.raises(UserError, match="There is no host key"):
        successor.main([str(tmp_path / "spare"), "--dataset", str(host.dataset)])
    HostKey(key)
    with pytest.raises(AssertionError, match=r"is for members of the key .*, and it holds"):
        host.start()
    lost.rename(key)  # nothing is in the way of the copy that the host has kept
    host.start()
    assert RunConfig.from_mapping(fetch_run(host.url, token=other).run, where="server") == run and host.stop() == 0


def test_an_open_run_whose_key_is_lost_goes_on_with_a_new_one_and_says_so(tmp_path):
    host = Host(tmp_path).start()
    before = fetch_run(host.url)
    assert host.stop() == 0 and "--host_key" not in host.stderr
    (host.dataset.with_name("data.datasetserver") / "host.key").unlink()
    host.start()
    now = fetch_run(host.url)
    assert now.run == before.run and now.host_key != before.host_key and host.stop() == 0
    assert f"goes on with a new key, {now.host_key}: peers that knew the old one need it as --host_key" in host.stderr


def test_a_spare_in_the_place_of_a_lost_key_goes_on_with_the_run(tmp_path, capsys):
    token = add(tmp_path / "tokens", "alice", 1)
    host = Host(tmp_path, "--tokens", str(tmp_path / "tokens")).start()
    before, known = fetch_run(host.url, token=token), KnownHosts(tmp_path / "known_hosts.json")
    known.check(host.url, before.run_id, before.host_key)
    assert host.stop() == 0
    cli(["successor", str(tmp_path / "spare"), "--dataset", str(host.dataset)])
    assert "keep it away from the server" in capsys.readouterr().out
    key = host.dataset.with_name("data.datasetserver") / "host.key"
    key.unlink()
    (tmp_path / "spare").rename(key)
    host.start()
    after = fetch_run(host.url, token=token, known_hosts=known)
    run = RunConfig.from_mapping(after.run, where="server")
    assert (after.run, after.host_key) == (before.run, before.host_key) and after.signature != before.signature
    assert is_signed(run, id_of("alice"), ask_membership(host.url, run, signer(id_of("alice")), token=token))
    word = sign_word(HostKey(key), run, id_of("bob"), banned=True, reason="x" * MAX_REASON)
    assert Bans(run, words=words_of(said([word]))).reason(id_of("bob")) and host.stop() == 0


@pytest.mark.swarm
def test_a_server_that_is_refused_its_dht_port_leaves_no_key_where_no_run_has_begun(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        host = Host(tmp_path, "--members", "yes", "--dht", "--host_maddrs", place, founds=False, port=free_port())
        with pytest.raises(AssertionError, match="Cannot listen"):
            host.start()
    assert not (host.dataset.with_name("data.datasetserver") / "host.key").exists()
    host.start()
    assert (host.dataset.with_name("data.datasetserver") / "host.key").exists() and host.stop() == 0


@pytest.fixture(scope="module")
def for_members(tmp_path_factory):
    host = Host(tmp_path_factory.mktemp("members"), "--members", "yes").start()
    yield host
    assert host.stop() == 0


def test_a_receipt_is_for_leased_samples_only_and_the_same_each_time(for_members):
    host, keys = for_members, keys_of(lease(for_members, "dora"))

    def registered(number, keys, **more):
        answer = json.loads(call(host, "/v1/contributions", envelope(host, "dora", number=number, keys=keys, **more))[2])
        return answer.get("receipt")

    receipt = registered(1, keys[:3])
    assert Receipts.of(run_of(host)).hold(id_of("dora"), 1, 3, receipt)
    assert registered(1, keys[:3]) == registered(1, keys[:3], offered=True) == receipt
    refused(call(host, "/v1/contributions", envelope(host, "dora", number=2, keys=keys[:4])), 409, "not_held")
    assert registered(2, keys[3:5], offered=True) is None, "with the swarm before the server knew of it"
    assert registered(2, keys[3:5]) is None, "nor afterwards"
    assert call(host, f"/v1/leases/{NO_LEASE}/release", envelope(host, "dora", keys=keys[:3]))[0] == 200
    refused(call(host, "/v1/contributions", envelope(host, "dora", number=1, keys=keys[:3])), 409, "withdrawn")


def test_a_run_is_for_members_where_the_host_says_so_and_a_banned_peer_gets_no_membership(for_members):
    host, run = for_members, run_of(for_members)
    body = json.loads(call(host, "/v1/members", envelope(host, "alice"))[2])
    assert run.members_of == get_run(host).host_key and is_signed(run, id_of("alice"), Membership(**body))
    assert cli(["ban", id_of("alice"), "--reason", "it lies", "--dataset", str(host.dataset)]) == 0
    until(lambda: call(host, "/v1/members", envelope(host, "alice"))[0] == 403)
    refused(call(host, "/v1/members", envelope(host, "alice")), 403, "banned")
    assert call(host, "/v1/members", envelope(host, "bob"))[0] == 201
    assert cli(["trust", id_of("bob"), "--dataset", str(host.dataset)]) == 0
    until(lambda: json.loads(call(host, "/v1/progress")[2])["trusted"] == [id_of("bob")])


def test_without_tokens_or_the_hosts_wish_a_run_is_for_everybody(tmp_path):
    host = Host(tmp_path).start()
    assert run_of(host).members_of == ""
    assert host.stop() == 0
    assert [ServerConfig(dataset="x", **options).for_members for options in ({}, {"tokens": "t"}, {"tokens": "t", "members": "no"})] == [False, True, False]


def test_a_run_that_a_peer_founds_gets_the_servers_key_and_no_other():
    run = RunConfig(model="x", family="stable_diffusion", model_digest="0" * 64).to_mapping()
    assert acceptable_run(run, "d" * 64).members_of == ""
    assert acceptable_run(run, "d" * 64, "a" * 64).members_of == "a" * 64
    mine = RunConfig(model="x", family="stable_diffusion", model_digest="0" * 64, members_of="b" * 64).to_mapping()
    assert acceptable_run(mine, "d" * 64, "b" * 64).members_of == "b" * 64
    for members_of in ("", "a" * 64):
        with pytest.raises(Refused, match="members_of is for the dataset server to set") as refusal:
            acceptable_run(mine, "d" * 64, members_of)
        assert refusal.value.status == 400


def test_one_owner_has_64_peers_which_renew_as_long_as_they_like_and_make_room_two_days_after_they_left():
    clock = Clock()
    newcomers = Newcomers(clock)
    for n in range(MOST_OF_AN_OWNER):
        newcomers.let_in("token alice", f"peer{n}")
    newcomers.let_in("token alice", "peer7")
    for day in range(5):
        clock.now += 86_400 + 600
        for n in range(MOST_OF_AN_OWNER - 1):
            newcomers.let_in("token alice", f"peer{n}")
        if day < 1:
            with pytest.raises(Refused, match="One owner has 64 peers") as refusal:
                newcomers.let_in("token alice", "one more")
            assert refusal.value.status == 403
            newcomers.let_in("token bob", "one more")
    newcomers.let_in("token alice", "one more")
    with pytest.raises(Refused, match="One owner has 64 peers"):
        newcomers.let_in("token alice", "another")
    clock.now += 2 * 86_400 + 1
    newcomers.let_in("token alice", "another")
    assert dict(newcomers._of) == {"token alice": 1} and list(newcomers._let_in) == [("token alice", "another")]


def test_a_server_that_has_let_in_as_many_as_it_has_room_for_says_so():
    newcomers = Newcomers(Clock(), most=2)
    newcomers.let_in("address a", "one")
    newcomers.let_in("address b", "two")
    newcomers.let_in("address b", "two")
    with pytest.raises(Refused, match="room for") as refusal:
        newcomers.let_in("address c", "three")
    assert refusal.value.status == 503


def test_the_run_and_each_renewal_tell_which_state_is_countersigned(for_members):
    host, granted = for_members, lease(for_members, "erik")
    lease(host, "dora")
    keys, run = keys_of(granted), run_of(host)
    assert call(host, "/v1/contributions", envelope(host, "erik", number=1, keys=keys[:2]))[0] == 200
    said = round_of(host, ("erik", 1, 2))
    assert call(host, "/v1/rounds", envelope(host, "erik", **said))[0] == 200
    assert not Bans(run, words=get_run(host).bans).countersigned, "one owner's word; here each peer answers for itself"
    assert call(host, "/v1/rounds", envelope(host, "dora", **said))[0] == 200
    held = Bans(run, words=get_run(host).bans)
    assert held.countersigned == said["digest"]
    renewed = json.loads(call(host, f"/v1/leases/{granted.lease_id}/renew", envelope(host, "erik"))[2])
    assert Bans(run, words=words_of(renewed["bans"])).countersigned == said["digest"]
