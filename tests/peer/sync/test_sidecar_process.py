"""How a sidecar is ended: with patience while it shows life, and without when it shows none."""

import json
import logging
import subprocess
import sys
import time

import pytest

from peer.sync.engine.trainer import sidecar as sidecar_room
from peer.sync.engine.trainer import sidecar_process
from peer.sync.engine.trainer.messages import Close, Message, News, Pulse, Seen
from peer.sync.engine.trainer.port import Port
from peer.sync.engine.trainer.sidecar_process import SidecarProcess
from swarm.proofs import MOST_PROOFS, PROOFS
from tests.swarm.test_proofs import invented

WRITES = """
import socket, sys, time
from pathlib import Path
descriptor, how, state, pulse, news, close = sys.argv[1:]
port, silent = socket.socket(fileno=int(descriptor)), how == "silent"
port.send(bytes.fromhex(pulse))
if how == "dies":
    port.send(bytes.fromhex(news))
    sys.exit(1)
assert port.recv(1000).hex() == close
for _ in range(20):
    time.sleep(0.2)
    if not silent:
        port.send(bytes.fromhex(pulse))
time.sleep(60 * silent)
Path(state).write_text("the last state")
"""
"""Says our messages as the bytes that they are: to import ours takes 3 s of a core."""


def as_bytes(message: Message) -> str:
    """What a port sends, in hex."""
    ours, theirs = Port.pair()
    ours.send(message)
    ours.close()
    with theirs.socket as end:
        return end.recv(1000).hex()


@pytest.fixture
def sidecar(monkeypatch, tmp_path):
    def start(how: str, handle=lambda message: None) -> SidecarProcess:
        def begin(self) -> None:
            self._port, theirs = Port.pair()
            self._has_started = self._heard = False
            descriptor = theirs.socket.fileno()
            command = [sys.executable, "-c", WRITES, str(descriptor), how, str(tmp_path / "state")]
            command += map(as_bytes, (Pulse(), News("its last words"), Close()))
            self._process = subprocess.Popen(command, pass_fds=[descriptor], start_new_session=True)
            theirs.close()

        monkeypatch.setattr(SidecarProcess, "_start", begin)
        process = SidecarProcess(opening=lambda: None, handle=handle)
        assert process._port.receive(60) == Pulse()  # it runs
        process._has_started = True
        return process

    return start


def test_a_sidecar_that_writes_for_long_is_waited_for_while_it_shows_life(sidecar, monkeypatch, tmp_path, caplog):
    """Seen in the code: after 12 s it was killed without a word, and a state of several GB was not on the disk."""
    caplog.set_level("INFO")
    process = sidecar("lives")
    monkeypatch.setattr(sidecar_process, "CLOSE_SECONDS", 3.0)  # it writes for four
    process.close()
    assert process.ended and (tmp_path / "state").exists() and "writes the last state" in caplog.text


def test_a_sidecar_that_shows_no_life_is_killed_and_that_is_said(sidecar, monkeypatch, tmp_path, caplog):
    process = sidecar("silent")
    monkeypatch.setattr(sidecar_process, "CLOSE_SECONDS", 1.0)
    process.close()
    assert process.ended and not (tmp_path / "state").exists() and "did not end by itself" in caplog.text


def test_a_sidecar_that_has_never_joined_is_killed_at_once_without_a_word(sidecar, caplog):
    process = sidecar("silent")
    process._has_started = False
    began = time.monotonic()
    process.close()
    assert process.ended and time.monotonic() - began < 5 and not caplog.text


def test_the_last_words_of_a_sidecar_that_had_died_before_it_was_closed_are_heard(sidecar):
    heard = []
    process = sidecar("dies", heard.append)
    process._process.wait(60)
    process.close()
    assert process.ended and heard == [News("its last words")]


def test_a_sidecar_says_that_it_lives_only_where_it_has_said_nothing_else():
    ours, theirs = Port.pair()
    line = sidecar_room.TrainerLine(ours)
    for words in ([], [News("one"), News("two")], [], []):
        for word in words:
            line.send(word)
        line.pulse()
    heard = []
    while (message := theirs.receive(0)) is not None:
        heard.append(message)
    assert heard == [Pulse(), News("one"), News("two"), Pulse(), Pulse()], "so something is said every two seconds"
    ours.close()
    theirs.close()


def test_each_proof_is_told_to_the_trainer_once_and_few_at_a_time():
    ours, theirs = Port.pair()
    line, told = sidecar_room.TrainerLine(ours), []
    proofs = [invented(f"Qm{number}") for number in range(MOST_PROOFS)]
    for _ in range(20):
        line.proven(proofs)
        if (message := theirs.receive(0)) is not None:
            told.append(PROOFS.validate_python(message.accusations))
    assert [len(some) for some in told] == [16] * 8 and [proof for some in told for proof in some] == proofs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("word, has_started", [(Pulse(), True), (Seen({}), True), (News("loading"), False)])
def test_a_word_that_stands_for_a_pulse_says_as_much(sidecar, monkeypatch, word, has_started):
    """Else a sidecar that hangs when it has joined would be waited for as long as one that starts."""
    process = sidecar("dies")
    process._hear_out()
    process._port.close()
    process._port, other = Port.pair()
    process._has_started = False
    other.send(word)
    list(process.messages(1))
    assert process._has_started == has_started
    other.close()
    process.close()


def test_an_error_of_our_own_that_nobody_waited_for_is_told_aloud_and_hiveminds_is_not(caplog):
    def raised(where: dict) -> Exception:
        try:
            where["fails"]()
        except ValueError as error:
            return error

    ours, through_ours, theirs = {}, {"json": json}, {}
    exec(compile("def fails(): raise ValueError('ours')", sidecar_room.__file__, "exec"), ours)
    exec(compile("def fails(): json.loads('ours')", sidecar_room.__file__, "exec"), through_ours)
    exec(compile("def fails(): raise ValueError('theirs')", "/usr/lib/site-packages/hivemind/p2p.py", "exec"), theirs)
    with caplog.at_level(logging.INFO, logger="peer.sync.engine.trainer.sidecar"):
        for error in (raised(theirs), raised(ours), raised(through_ours), None):
            sidecar_room._tell_of(None, {"message": "Task exception was never retrieved", "exception": error})
    assert [(record.levelname, type(record.exc_info[1])) for record in caplog.records] == [("ERROR", ValueError), ("ERROR", json.JSONDecodeError)]
