"""How a peer comes to its membership: asked, kept, renewed, and what it says where it gets none."""

import dataclasses
import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from datasetserver.__main__ import cli
from peer import assist, wiring
from peer.config import PeerConfig
from peer.data.client import runs
from peer.data.client.transport import Reply
from peer.launch import membership
from peer.launch.joining import Joined
from peer.launch.launch import Launch
from peer.launch.membership import Keeper, kept, visitor
from peer.machine.device import Rank, RankGroup
from swarm.bans import Bans
from swarm.errors import ExitCode, UserError
from swarm.listening import listen
from swarm.members import LIFE_SECONDS, Members, sign_membership
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from tests.clock import Clock
from tests.datasetserver.hosting import Host, until
from tests.identities import id_of, identity_file, signer

DAY = 86_400.0


@pytest.fixture
def run(key):
    return RunConfig(model="x", members_of=key.public)


class Asked:
    """A server. error: what it answers instead."""

    def __init__(self, key, run, wall):
        self.times, self.error, self._give = 0, None, lambda: sign_membership(key, run, "me", wall)

    def __call__(self):
        self.times += 1
        if self.error:
            raise self.error
        return self._give()


@pytest.fixture
def keeping(key, run, tmp_path):
    wall = Clock(1.7e9)
    asked = Asked(key, run, wall)

    def start():
        members = Members(run, wall=wall)
        return members, Keeper(members, "me", asked, tmp_path / "memberships.json", wall)

    return wall, asked, start


AWAY = UserError("The dataset server does not answer.", fix="Wait.", code=ExitCode.NETWORK)
SHUT = UserError("It does not let this peer in.", fix="Ask the host.", code=ExitCode.AUTH)


def test_a_membership_is_asked_for_once_a_day_and_kept_meanwhile(keeping):
    wall, asked, start = keeping
    first, keeper = start()
    keeper.begin()
    second, again = start()
    wall.now += DAY - 1
    again.begin()
    assert second.own == first.own and asked.times == 1
    wall.now += 2
    start()[1].begin()
    assert asked.times == 2


def test_a_server_that_is_away_stops_nobody_for_as_long_as_the_membership_lasts(keeping, caplog):
    wall, asked, start = keeping
    start()[1].begin()
    asked.error, began = AWAY, wall.now
    wall.now += 5 * DAY
    members, keeper = start()
    keeper.begin()
    assert not members.has_ended() and "for 2.0 days" in caplog.text
    wall.now = began + LIFE_SECONDS - 60
    with pytest.raises(UserError, match="does not answer"):
        start()[1].begin()


def test_whom_the_server_shuts_out_does_not_go_on_with_what_it_had(keeping):
    wall, asked, start = keeping
    start()[1].begin()
    asked.error = SHUT
    wall.now += 2 * DAY
    with pytest.raises(UserError, match="does not let"):
        start()[1].begin()


def test_what_is_on_the_disk_counts_only_where_it_is_this_runs_and_this_peers(keeping, key, run, tmp_path):
    wall, asked, start = keeping
    path = tmp_path / "memberships.json"
    other = dataclasses.replace(run, seed=run.seed + 1)
    entries = [sign_membership(key, run, "another", wall), sign_membership(key, other, "me", wall)]
    for number, content in enumerate([*(json.dumps({run.digest: vars(entry)}) for entry in entries), "{", "[]", json.dumps({run.digest: 7})]):
        path.write_text(content)
        start()[1].begin()
        assert asked.times == number + 1, content
    start()[1].begin()
    assert asked.times == number + 1


def test_memberships_of_several_runs_lie_beside_each_other(keeping, key, run, tmp_path):
    wall, _, start = keeping
    start()[1].begin()
    other = dataclasses.replace(run, seed=run.seed + 1)
    Keeper(Members(other, wall=wall), "me", lambda: sign_membership(key, other, "me", wall), tmp_path / "memberships.json", wall).begin()
    assert set(json.loads((tmp_path / "memberships.json").read_text())) == {run.digest, other.digest}


def test_a_disk_that_takes_nothing_costs_a_warning(keeping, monkeypatch, caplog):
    _, _, start = keeping
    monkeypatch.setattr(membership.files, "replace", lambda path, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    members, keeper = start()
    keeper.begin()
    assert not members.has_ended() and "No space left" in caplog.text


def test_it_is_renewed_while_the_peer_runs_and_again_after_a_refusal(keeping, monkeypatch, caplog):
    wall, asked, start = keeping
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.01)
    members, keeper = start()
    keeper.begin()
    stop = keeper.renew_meanwhile()
    asked.error = AWAY
    wall.now += 2 * DAY
    until(lambda: "cannot renew the membership yet, it lasts for 5.0 days" in caplog.text)
    asked.error = None
    until(lambda: members.own.until == int(wall.now + LIFE_SECONDS))
    stop.set()


@pytest.mark.parametrize("days", [-8, -1, 1, 400])
def test_what_a_server_with_a_wrong_clock_gives_takes_nothing_away(keeping, key, run, days):
    wall, asked, start = keeping
    members, keeper = start()
    keeper.begin()
    own = members.own
    asked._give = lambda: sign_membership(key, run, "me", lambda: wall.now + days * DAY)
    with pytest.raises(UserError, match="clock is wrong") as raised:
        keeper.renew()
    assert raised.value.code == ExitCode.NETWORK and members.own == own
    wall.now += 2 * DAY
    again = start()[0]
    Keeper(again, "me", asked, keeper._path, wall).begin()
    assert not again.has_ended()


def test_a_token_that_goes_to_no_server_says_which_option_is_missing(run, tmp_path, monkeypatch):
    peer = PeerConfig(output_dir=str(tmp_path), token="secret", peers=("/ip4/127.0.0.1/tcp/1/p2p/Qm",))
    identity_file(peer.identity_file, "alice")
    monkeypatch.setattr(membership, "_ask", lambda *_: (_ for _ in ()).throw(SHUT))
    with ExitStack() as closing, pytest.raises(UserError, match="does not let") as raised:
        kept(Joined(run, "http://elsewhere"), peer, Bans(run), closing)
    assert "Add --datasetserver URL" in raised.value.fix and "secret" not in str(raised.value)


def test_a_run_for_members_without_a_server_says_what_is_missing(run, tmp_path):
    peer = PeerConfig(output_dir=str(tmp_path))
    identity_file(peer.identity_file, "alice")
    with ExitStack() as closing, pytest.raises(UserError, match="no dataset server is known") as raised:
        kept(Joined(run), peer, Bans(run), closing)
    assert raised.value.code == ExitCode.AUTH and "--token" in raised.value.fix


def test_a_run_for_everybody_asks_for_nothing(tmp_path):
    joined = Joined(RunConfig(model="x"))
    with ExitStack() as closing:
        assert kept(joined, PeerConfig(output_dir=str(tmp_path)), Bans(joined.run), closing).own is None
    assert visitor(joined, tmp_path / "no.key", "").own is None


def test_a_real_server_gives_it_to_a_peer_and_to_a_visitor_and_none_of_another_key(tmp_path):
    host = Host(tmp_path, "--members", "yes").start()
    answer = runs.fetch_run(host.url)
    run = RunConfig.from_mapping(answer.run, where="server")
    joined = Joined(run, host.url, host_key=answer.host_key)
    peer = PeerConfig(output_dir=str(tmp_path / "out"), datasetserver=host.url)
    identity_file(peer.identity_file, "alice")
    with ExitStack() as closing:
        members = kept(joined, peer, Bans(run), closing)
        members.hear(id_of("alice"), members.own)
        assert members.refusal(id_of("alice")) == "" and peer.identity_file.with_name("memberships.json").exists()
    own = visitor(joined, peer.identity_file, "").own
    members.hear(id_of("alice"), own)
    assert own.until >= members.own.until
    forged = dataclasses.replace(joined, run=dataclasses.replace(run, members_of="ab" * 32))
    with pytest.raises(UserError, match="serves run") as raised:
        visitor(forged, peer.identity_file, "")
    assert raised.value.code == ExitCode.NETWORK
    assert host.stop() == 0


def test_a_membership_that_the_runs_host_did_not_sign_or_that_is_none_is_not_taken(run, tmp_path, monkeypatch):
    peer, other = id_of("alice"), sign_membership(HostKey(tmp_path / "other.key"), run, id_of("alice"))
    bodies = {json.dumps(vars(other)).encode(): ExitCode.AUTH, b"{}": ExitCode.NETWORK}
    for body, code in bodies.items():

        async def answer(*_, body=body):
            return Reply(201, body, {})

        monkeypatch.setattr(runs, "_ask", answer)
        with pytest.raises(UserError) as raised:
            runs.ask_membership("http://x", run, signer(peer))
        assert raised.value.code == code


@pytest.fixture
def refused(tmp_path):
    """A peer that its server does not let in: its configuration, and the run."""
    host = Host(tmp_path, "--members", "yes").start()
    answer = runs.fetch_run(host.url)
    peer = PeerConfig(output_dir=str(tmp_path / "out"), datasetserver=host.url, train_data_dir=str(host.dataset))
    identity_file(peer.identity_file, "alice")
    assert cli(["ban", id_of("alice"), "--reason", "it lies", "--dataset", str(host.dataset)]) == 0
    joined = Joined(RunConfig.from_mapping(answer.run, where="server"), host.url, ("/ip4/127.0.0.1/tcp/1/p2p/x",), host_key=answer.host_key)
    until(lambda: is_refused(joined, peer))  # the server looks at its bans once a second
    yield peer, joined
    assert host.stop() == 0


def is_refused(joined, peer):
    try:
        return not visitor(joined, peer.identity_file, "")
    except UserError as error:
        return error.code == ExitCode.AUTH


def never(*_, **__):
    raise AssertionError("it was told too late that it is not let in")


def test_a_trainer_that_is_not_let_in_hears_it_before_the_model_is_loaded(refused, monkeypatch):
    peer, joined = refused
    cpu = torch.device("cpu")
    monkeypatch.setattr("peer.learner.load_model", never)
    with ExitStack() as closing, pytest.raises(UserError, match="banned this peer: it lies") as raised:
        group = RankGroup(Rank(), cpu)
        wiring.assemble(Launch(joined=joined, peer=peer, group=group, device=cpu, stopping=lambda: False, closing=closing))
    assert raised.value.code == ExitCode.AUTH


def test_a_helper_that_is_not_let_in_hears_it_before_the_swarm_is_joined(refused, monkeypatch):
    peer, joined = refused
    monkeypatch.setattr(assist.SwarmNode, "join", never)
    with pytest.raises(UserError, match="banned this peer: it lies") as raised:
        assist.assist(dataclasses.replace(peer, assist=True, train_data_dir=""), lambda: joined)
    assert raised.value.code == ExitCode.AUTH


def test_a_trainer_that_is_let_in_passes_its_membership_on(run, key, tmp_path, monkeypatch):
    peer, own = PeerConfig(output_dir=str(tmp_path)), sign_membership(key, run, id_of("alice"))
    identity_file(peer.identity_file, "alice")
    monkeypatch.setattr(membership, "_ask", lambda *_: own)
    cpu = torch.device("cpu")
    with ExitStack() as closing:
        group = RankGroup(Rank(), cpu)
        launch = Launch(joined=Joined(run), peer=peer, group=group, device=cpu, stopping=lambda: False, closing=closing)
        built = []
        monkeypatch.setattr(wiring, "load_part", lambda *_: Strategy(built))
        assert launch.members is None
        wiring.build_sync(wiring.admitted(launch, id_of("alice")), {})
    assert built[0].members.own == own


def test_a_peer_that_the_host_has_banned_ends_before_the_model_is_loaded(run, key, tmp_path):
    """It loaded the model, joined, and was refused by the others 45 s later."""
    peer, cpu = PeerConfig(output_dir=str(tmp_path)), torch.device("cpu")
    with ExitStack() as closing:
        launch = Launch(joined=Joined(run), peer=peer, group=RankGroup(Rank(), cpu), device=cpu, stopping=lambda: False, closing=closing)
        launch = dataclasses.replace(launch, bans=SimpleNamespace(reason=lambda peer: "it lies" if peer == id_of("alice") else ""))
        with pytest.raises(UserError, match="banned this peer: it lies") as refused:
            wiring.admitted(launch, id_of("alice"))
    assert refused.value.code == ExitCode.AUTH


def test_a_port_that_another_program_has_is_refused_before_the_model_is_loaded(run, key, tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "_ask", lambda *_: sign_membership(key, run, id_of("alice")))
    cpu = torch.device("cpu")
    with ExitStack() as closing, listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        peer = PeerConfig(output_dir=str(tmp_path), host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
        identity_file(peer.identity_file, "alice")
        group = RankGroup(Rank(), cpu)
        launch = Launch(joined=Joined(run), peer=peer, group=group, device=cpu, stopping=lambda: False, closing=closing)
        with pytest.raises(UserError, match=f"Cannot listen on /ip4/127.0.0.1/tcp/{port}: Address already in use") as refused:
            wiring.admitted(launch, id_of("alice"))
        assert refused.value.code == ExitCode.NETWORK
        listens_nowhere = dataclasses.replace(launch, peer=dataclasses.replace(peer, client_mode=True))
        assert wiring.admitted(listens_nowhere, id_of("alice")).members is not None


class Strategy:
    """Notes what it is built with."""

    def __init__(self, built):
        self._built = built

    def build(self, context):
        self._built.append(context)
        return self

    def close(self, reason):
        pass
