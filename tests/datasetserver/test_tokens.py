"""The file of tokens: made, listed, taken back by its program, and read again by a running server."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from datasetserver.__main__ import cli
from datasetserver.refused import Refused
from datasetserver.tokens import LOOK_SECONDS, Holder, Tokens, _draw, add, names, remove
from swarm.errors import ExitCode, UserError
from tests.clock import Clock


def test_a_token_is_shown_once_and_only_its_digest_is_kept(tmp_path):
    file = tmp_path / "tokens"
    token = add(file, "alice")
    assert len(token) >= 43 and token not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    tokens = Tokens(file)
    assert tokens.holder(token) == Holder("alice")
    for wrong in ("", token[:-1], token + "x", token.swapcase(), file.read_text().split()[1], "\udc80", "x" * 100_000):
        assert tokens.holder(wrong) is None


def test_no_token_looks_like_a_flag():
    drawn = iter(["-abc", "--def", "g-h"])
    assert _draw(lambda num_bytes: next(drawn)) == "g-h"


def test_a_running_server_sees_tokens_come_and_go_and_lets_nobody_in_while_the_file_is_wrong(tmp_path, caplog):
    file, clock = tmp_path / "tokens", Clock()
    alice = add(file, "alice")
    tokens = Tokens(file, clock)
    bob = add(file, "bob")
    assert tokens.holder(bob) is None, "not looked yet"
    clock.now += LOOK_SECONDS
    assert tokens.holder(bob) == Holder("bob")
    remove(file, "alice")
    clock.now += LOOK_SECONDS
    assert (tokens.holder(alice), tokens.holder(bob)) == (None, Holder("bob"))
    kept = file.read_bytes()
    for wrong in (b"bob\n", b"\xff\n", b"", None):
        file.unlink() if wrong is None else file.write_bytes(wrong)
        clock.now += LOOK_SECONDS
        with pytest.raises(Refused, match="cannot tell") as refused:
            tokens.holder(bob)
        assert refused.value.status == 503, "peers wait, and do not end"
        assert "letting nobody in" in caplog.text
        caplog.clear()
    file.write_bytes(kept)
    clock.now += LOOK_SECONDS
    assert tokens.holder(bob) == Holder("bob")


def test_whose_token_was_the_last_and_is_removed_hears_so_and_does_not_wait(tmp_path):
    file, clock = tmp_path / "tokens", Clock()
    alice = add(file, "alice")
    tokens = Tokens(file, clock)
    remove(file, "alice")
    clock.now += LOOK_SECONDS
    assert tokens.holder(alice) is None and names(file) == []
    bob = add(file, "bob")
    assert Tokens(file).holder(bob) == Holder("bob")


def test_two_that_add_at_once_both_stay(tmp_path):
    file = tmp_path / "tokens"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: add(file, f"peer{number}"), range(24)))
    tokens = Tokens(file)
    assert [tokens.holder(token) for token in made] == [Holder(f"peer{number}") for number in range(24)]
    assert os.listdir(tmp_path) == ["tokens"]


def test_mistakes_are_named(tmp_path):
    file = tmp_path / "tokens"
    with pytest.raises(UserError, match="token add NAME"):
        Tokens(file)
    file.touch()
    with pytest.raises(UserError, match=r"tokens holds no token\. dd-datasetserver token add NAME --tokens"):
        Tokens(file)
    add(file, "alice")
    for act, match in [
        (lambda: add(file, "alice"), "already"),
        (lambda: add(file, "a b"), "not a name"),
        (lambda: remove(file, "bob"), "no token for 'bob'"),
        (lambda: add(tmp_path / "nowhere" / "tokens", "x"), "cannot be written"),
    ]:
        with pytest.raises(UserError, match=match):
            act()
    file.write_text(file.read_text() + "mallory\n")
    with pytest.raises(UserError, match="Line 2"):
        names(file)


def test_the_program_adds_lists_and_removes(tmp_path, capsys):
    file = str(tmp_path / "tokens")
    assert cli(["token", "add", "alice", "--tokens", file]) == 0
    token, hint = capsys.readouterr()
    assert Tokens(tmp_path / "tokens").holder(token.strip()) == Holder("alice") and "DD_TOKEN" in hint
    assert cli(["token", "list", "--tokens", file]) == 0
    assert capsys.readouterr().out == "alice\n"
    assert cli(["token", "remove", "alice", "--tokens", file]) == 0
    assert "remain members for up to 7 days" in capsys.readouterr().err
    assert cli(["token", "remove", "alice", "--tokens", file]) == ExitCode.CONFIG
    assert capsys.readouterr().err.startswith("error: ")
