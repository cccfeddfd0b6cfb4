"""`dd-datasetserver ban`, `unban` and `members`: whom the host keeps out of its run."""

import fcntl
import json
import os

import pytest

from datasetserver import bans, orders
from datasetserver.__main__ import cli
from swarm.bans import Bans
from swarm.errors import UserError
from swarm.records import MOST_BANS
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from tests.datasetserver.hosting import Host, until
from tests.datasetserver.test_http import call, envelope, get_run, keys_of, lease, refused
from tests.identities import id_of


def test_a_banned_peer_is_refused_with_the_reason_until_the_host_lets_it_in_again(tmp_path, capsys):
    host = Host(tmp_path).start()
    data = ["--dataset", str(host.dataset)]
    granted = lease(host, "alice", want=8)
    assert call(host, "/v1/contributions", envelope(host, "alice", number=1, keys=keys_of(granted)))[0] == 200
    assert cli(["ban", id_of("alice")[-8:], "--reason", "copies\nothers' work", *data]) == 0
    answers = [
        lambda: call(host, "/v1/leases", envelope(host, "alice", want_samples=1)),
        lambda: call(host, f"/v1/leases/{granted.lease_id}/renew", envelope(host, "alice")),
        lambda: call(host, "/v1/contributions", envelope(host, "alice", number=2, keys=["0:0:1"])),
    ]
    until(lambda: answers[0]()[0] == 403)
    for answer in answers:
        refused(answer(), 403, "banned")
        assert "copies others' work" in json.loads(answer()[2])["error"]["message"]
    bob = lease(host, "bob")
    renewed = json.loads(call(host, f"/v1/leases/{bob.lease_id}/renew", envelope(host, "bob"))[2])
    answer = get_run(host)
    held = Bans(RunConfig.from_mapping(answer.run, where="server"), answer.host_key, answer.bans)
    assert held.peers() == {id_of("alice")} and [word["about"] for word in renewed["bans"]] == [id_of("alice")]
    capsys.readouterr()
    assert cli(["members", *data]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{id_of('alice')} samples={len(keys_of(granted))} BANNED: copies others' work"]
    host.kill()
    host.start()
    refused(answers[0](), 403, "banned")
    assert cli(["unban", id_of("alice"), *data]) == 0
    until(lambda: answers[0]()[0] == 201)
    assert not Bans(held._run, answer.host_key, get_run(host).bans).peers()
    assert host.stop() == 0


@pytest.fixture
def work_dir(tmp_path, monkeypatch):
    """One whose ledger knows two peers, without a server."""
    run = RunConfig(model="x")
    monkeypatch.setattr(bans, "_ledger", lambda folder: (run, bans.Counter({"QmAAAAAAonePeer": 30, "QmBBBBBBanother": 7}), {"QmBBBBBBanother": "bob"}, {}))
    HostKey(tmp_path / "host.key")
    return tmp_path


def is_free(folder):
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def test_a_word_is_said_while_no_other_program_says_one(work_dir, monkeypatch):
    """The server and a command would each write a file without the other's word."""
    held = []

    def write_words(path, words):
        assert not is_free(work_dir)
        held.append(path.name)

    monkeypatch.setattr(bans, "write_words", write_words)
    word = bans.say(work_dir, RunConfig(model="x"), "f" * 64, banned=True, reason="a wrong mean")
    assert held == ["run_bans.json"] and (word.about, word.banned, word.reason) == ("f" * 64, True, "a wrong mean")
    assert is_free(work_dir) and not list(work_dir.glob("*.lock")), "a file that root made for it would keep the server out"


def test_members_are_listed_the_busiest_first_with_their_tokens(work_dir, capsys):
    assert cli(["members", "--work_dir", str(work_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == ["QmAAAAAAonePeer samples=30", "QmBBBBBBanother samples=7 token=bob"]


def test_a_second_ban_without_a_reason_keeps_the_first_ones(work_dir, capsys):
    for reason in (["--reason", "sends noise"], []):
        assert cli(["ban", "AAonePeer", *reason, "--work_dir", str(work_dir)]) == 0
    assert cli(["members", "--work_dir", str(work_dir)]) == 0
    assert "QmAAAAAAonePeer samples=30 BANNED: sends noise\n" in capsys.readouterr().out


def test_who_came_with_a_token_could_come_back_with_it(work_dir, capsys):
    assert cli(["ban", "QmBBBBBBanother", "--work_dir", str(work_dir)]) == 0
    assert "dd-datasetserver token remove bob" in capsys.readouterr().err
    assert cli(["members", "--work_dir", str(work_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "QmBBBBBBanother samples=7 token=bob BANNED: no reason given"


def test_whom_the_host_trusts_is_listed_and_a_banned_peer_is_not_trusted(work_dir, capsys, monkeypatch):
    data = ["--work_dir", str(work_dir)]
    assert cli(["trust", "QmAAAAAAonePeer", *data]) == 2
    assert "Only in a run for members" in capsys.readouterr().err
    run = RunConfig(model="x", members_of=HostKey(work_dir / "host.key").public)
    ledger = bans._ledger(work_dir)
    monkeypatch.setattr(bans, "_ledger", lambda folder: (run, *ledger[1:]))
    assert cli(["trust", "QmAAAAAAonePeer", *data]) == 0
    said = capsys.readouterr()
    assert "QmAAAAAAonePeer is trusted to lead and to average" in said.out and "until you trust 2 more" in said.err
    assert cli(["members", *data]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "QmAAAAAAonePeer samples=30 trusted"
    assert cli(["ban", "QmAAAAAAonePeer", *data]) == 0 and not bans._bans(work_dir, run).trusted
    capsys.readouterr()
    for verb in ("trust", "distrust"):
        assert cli([verb, "QmAAAAAAonePeer", *data]) == 2
        assert "is banned: no reason given" in capsys.readouterr().err
    assert bans._bans(work_dir, run).peers() == {"QmAAAAAAonePeer"}
    assert cli(["unban", "QmAAAAAAonePeer", *data]) == 0
    for peer in ("QmAAAAAAonePeer", "QmBBBBBBanother", "Qm" + "x" * 44):
        capsys.readouterr()
        assert cli(["trust", peer, *data]) == 0
    assert "until" not in capsys.readouterr().err and len(bans._bans(work_dir, run).trusted) == 3
    assert cli(["unban", "QmBBBBBBanother", *data]) == 0 and len(bans._bans(work_dir, run).trusted) == 3
    assert capsys.readouterr().out == "QmBBBBBBanother is not banned: nothing to take back\n"
    assert cli(["distrust", "QmBBBBBBanother", *data]) == 0 and len(bans._bans(work_dir, run).trusted) == 2
    assert "no longer trusted" in capsys.readouterr().out
    assert cli(["distrust", "QmBBBBBBanother", *data]) == 0
    assert capsys.readouterr().out == "QmBBBBBBanother is not trusted: nothing to take back\n"


@pytest.mark.parametrize(
    ("peer", "says"),
    [("other", "No peer's id ends with 'other'"), ("nobody-at-all", "No peer's id ends"), ("r", "No peer's id ends with 'r'")],
)
def test_a_peer_that_is_not_named_well_is_a_users_error(work_dir, peer, says, capsys):
    assert cli(["ban", peer, "--work_dir", str(work_dir)]) == 2
    assert says in capsys.readouterr().err


def test_an_ending_of_two_ids_names_neither_and_an_id_that_never_came_may_be_banned(work_dir):
    with pytest.raises(UserError, match="2 peers"):
        bans._named("ePeer1", {"QmXePeer1", "QmYePeer1"})
    assert bans._named("Qm" + "x" * 44, set()) == "Qm" + "x" * 44


def test_a_clock_that_was_put_back_does_not_undo_the_next_word(work_dir):
    run, now = RunConfig(model="x"), [100.0]
    for banned in (True, False, True):
        bans.say(work_dir, run, "a", banned=banned, clock=lambda: now[0])
        now[0] -= 50
    assert bans._bans(work_dir, run).peers() == {"a"}


def test_a_list_that_is_full_is_a_users_error(work_dir, monkeypatch):
    run, key = RunConfig(model="x"), HostKey(work_dir / "host.key")
    bans.write_words(work_dir / orders.BANS, [bans.sign_word(key, run, f"peer{n}", banned=True) for n in range(MOST_BANS)])
    with pytest.raises(UserError, match="256 peers"):
        bans.say(work_dir, run, "one-more", banned=True)
    bans.say(work_dir, run, "peer7", banned=False)
    monkeypatch.setattr(bans, "write_words", lambda path, words: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        bans.say(work_dir, run, "peer7", banned=True)


@pytest.mark.parametrize("command", [["ban", "QmBBBBBBanother"], ["unban", "QmBBBBBBanother"], ["trust", "QmBBBBBBanother"], ["members"]])
def test_where_the_hosts_key_is_lost_no_command_makes_another(work_dir, command, capsys):
    (work_dir / "host.key").unlink()
    assert cli([*command, "--work_dir", str(work_dir)]) == 2
    assert "There is no host key" in capsys.readouterr().err and not list(work_dir.iterdir())


def test_without_a_run_nobody_can_be_banned(tmp_path, capsys):
    assert cli(["members", "--work_dir", str(tmp_path)]) == 2
    assert "No run has begun" in capsys.readouterr().err
