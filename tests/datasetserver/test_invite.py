"""What a host hands out: a line to paste, and a file to fill in."""

import dataclasses
import re
import shlex

import pytest

from datasetserver import tokens
from datasetserver.__main__ import _read, cli
from datasetserver.config import ServerConfig
from datasetserver.invite import Serving, line
from datasetserver.template import _CHOOSE, _WORKED_OUT
from swarm.errors import ExitCode, UserError
from swarm.options import build, read_toml
from swarm.run_config import RunConfig


def invite(capsys, *argv):
    code = cli(["invite", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_an_invitation_is_one_line_with_address_key_and_a_token_that_opens_the_server(tmp_path, capsys, key):
    file = tmp_path / "tokens.txt"
    tokens.add(file, "somebody")
    Serving("https://run.example:9090", str(file)).write(tmp_path)
    code, out, err = invite(capsys, "alice", "--work_dir", tmp_path)
    assert code == 0 and out.count("\n") == 1
    words = shlex.split(out)
    assert words[0].startswith("DD_TOKEN=") and words[1:4] == ["dd-peer", "--datasetserver", "https://run.example:9090"]
    assert words[4:6] == ["--host_key", key.public]
    assert tokens.Tokens(file).holder(words[0].removeprefix("DD_TOKEN=")) == tokens.Holder("alice", 4)
    assert "docs/join.md begins with" in err and "secret" in err and "token remove alice" in err and "unencrypted" not in err


@pytest.mark.parametrize(("peers", "holder"), [("0", 0), ("3", 3)])
def test_a_line_may_be_for_several_peers(tmp_path, capsys, key, peers, holder):
    file = tmp_path / "tokens.txt"
    Serving("https://run.example:9090", str(file)).write(tmp_path)
    token = shlex.split(invite(capsys, "alice", "--peers", peers, "--work_dir", tmp_path)[1])[0].removeprefix("DD_TOKEN=")
    assert tokens.Tokens(file).holder(token) == tokens.Holder("alice", holder)
    for wrong in ("-1", "many", "65"):
        assert invite(capsys, "bob", "--peers", wrong, "--work_dir", tmp_path)[0] == 2


def test_nobody_is_invited_twice_under_one_name(tmp_path, capsys, key):
    Serving("http://203.0.113.7:9090", str(tmp_path / "tokens.txt")).write(tmp_path)
    assert "unencrypted" in invite(capsys, "alice", "--work_dir", tmp_path)[2]
    code, out, err = invite(capsys, "alice", "--work_dir", tmp_path)
    assert code == ExitCode.CONFIG and not out and "token remove alice" in err


def test_an_open_server_invites_without_a_token_and_a_local_one_says_that_it_is(tmp_path, capsys, key):
    Serving("http://127.0.0.1:9090").write(tmp_path)
    code, out, err = invite(capsys, "bob", "--work_dir", tmp_path)
    assert code == 0 and "DD_TOKEN" not in out and "asks nobody for a token" in err and "this machine alone" in err


def test_an_address_that_is_nobodys_is_refused(tmp_path, capsys, key):
    Serving("http://0.0.0.0:9090", str(tmp_path / "tokens.txt")).write(tmp_path)
    code, out, err = invite(capsys, "alice", "--work_dir", tmp_path)
    assert code == ExitCode.CONFIG and not out and "--public_url" in err and not (tmp_path / "tokens.txt").exists()
    code, out, _ = invite(capsys, "alice", "--work_dir", tmp_path, "--public_url", "http://203.0.113.7:9090")
    assert code == 0 and "http://203.0.113.7:9090" in out


def test_inviting_to_a_server_that_never_was_or_to_no_run_is_a_mistake(tmp_path, capsys):
    assert "No server was ever started" in invite(capsys, "alice", "--work_dir", tmp_path)[2]
    assert "No run is named" in invite(capsys, "alice")[2]
    (tmp_path / "serving.json").write_text("[]")
    assert "cannot be read" in invite(capsys, "alice", "--work_dir", tmp_path)[2]


def test_where_the_hosts_key_is_lost_nobody_is_invited_with_another(tmp_path, capsys):
    Serving("http://203.0.113.7:9090", str(tmp_path / "tokens.txt")).write(tmp_path)
    code, out, err = invite(capsys, "alice", "--work_dir", tmp_path)
    assert code == ExitCode.CONFIG and not out and "There is no host key" in err
    assert [path.name for path in tmp_path.iterdir()] == ["serving.json"], "neither a key nor a token"


def test_the_line_survives_a_shell():
    assert shlex.split(line("http://a b", "k", "t'o", "my model"))[0] == "DD_TOKEN=t'o"


def read_back(path, *flags):
    return _read(["--config", str(path), *flags])


def test_the_file_of_init_says_nothing_until_it_is_edited(tmp_path, capsys):
    path = tmp_path / "run.toml"
    assert cli(["init", str(path)]) == 0
    assert read_toml(path, ServerConfig, RunConfig) == {}
    with pytest.raises(UserError, match="No dataset is given"):
        read_back(path)
    config, run = read_back(path, "--dataset", "x")
    assert config == ServerConfig(dataset="x") and run == {}


def test_every_option_in_the_file_of_init_comes_back_with_its_default_once_it_is_uncommented(tmp_path):
    path = tmp_path / "run.toml"
    cli(["init", str(path)])
    path.write_text(re.sub(r"^#(\w+ = )", r"\1", path.read_text(), flags=re.MULTILINE))
    said = read_toml(path, ServerConfig, RunConfig)
    names = {field.name for cls in (ServerConfig, RunConfig) for field in dataclasses.fields(cls)}
    assert said.keys() == names - set(_WORKED_OUT)
    config, run = read_back(path, "--dataset", "x")
    assert config == ServerConfig(dataset="x") and build(RunConfig, run) == RunConfig()


def test_what_init_is_given_stands_in_the_file_and_comes_back(tmp_path):
    path = tmp_path / "run.toml"
    given = [
        "--dataset",
        'a "quoted" \\ path',
        "--total_samples",
        "5000",
        "--learning_rate",
        "1e-05",
        "--grow",
        "--host_maddrs",
        "/ip4/1.2.3.4/tcp/1",
    ]
    assert cli(["init", str(path), *given]) == 0
    config, run = read_back(path)
    assert config == ServerConfig(dataset='a "quoted" \\ path', grow=True, host_maddrs=("/ip4/1.2.3.4/tcp/1",))
    assert run == {"total_samples": 5000, "learning_rate": 1e-05}
    assert all(name in path.read_text() for name in _CHOOSE)
    flags_win = read_back(path, "--total_samples", "7", "--no_grow")
    assert flags_win[1]["total_samples"] == 7 and not flags_win[0].grow


def test_init_writes_over_nothing_unasked(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("mine")
    assert cli(["init", str(path)]) == ExitCode.CONFIG and path.read_text() == "mine" and "--force" in capsys.readouterr().err
    assert cli(["init", str(path), "--force"]) == 0 and path.read_text() != "mine"
    assert cli(["init", str(tmp_path / "no" / "run.toml")]) == ExitCode.DISK


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--resolution", "4"], "resolution is 4"),
        (["--sync", "parameter"], "Did you mean 'parameters'"),
        (["--rank", "8"], "rank is for --method loha or lokr or lora"),
        (["--dataset", "pictures", "--host", "0.0.0.0"], "nothing says whom"),
        (["--dataset", "pictures", "--port", "99999"], "port is 99999"),
    ],
)
def test_what_is_wrong_is_said_by_init_and_not_by_the_server_that_reads_its_file(tmp_path, capsys, given, said):
    path = tmp_path / "run.toml"
    assert cli(["init", str(path), *given]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err and not path.exists()
