import contextlib
import math
import os
import signal

import pytest

from peer.config import PeerConfig
from peer.launch.stopping import Stop, wishes
from peer.supervise import Supervisor


@contextlib.contextmanager
def nobody_reads():
    """Within it, stderr is a pipe whose reader has ended. No fixture: pytest puts its own file there between the set-up and the test."""
    kept, (reader, writer) = os.dup(2), os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)


def test_the_first_signal_asks_and_a_later_one_ends_at_once(capfd):
    now, ended = [100.0], []
    stop = Stop(clock=lambda: now[0], end_now=ended.append)
    assert not stop()
    stop.hear(2)
    assert stop() and not ended
    now[0] += 0.1  # the launcher passes the same Ctrl-C on
    stop.hear(15)
    assert not ended
    now[0] += 1.0
    stop.hear(2)
    assert ended == [130] and "stopping after this step" in capfd.readouterr().err


def test_who_asks_before_it_has_begun_does_not_wait_and_afterwards_is_heard_as_always(capfd):
    ended = []
    stop = Stop(end_now=ended.append)
    with stop.before_it_begins():
        stop.hear(2)
    assert ended == [0] and "stopped before it began" in capfd.readouterr().err
    with pytest.raises(SystemExit), stop.before_it_begins():
        pytest.fail("it was asked already")
    stop = Stop()
    with stop.before_it_begins():
        pass
    stop.hear(15)
    assert stop() and "stopping after this step" in capfd.readouterr().err


def test_a_wish_is_heard_where_nobody_reads_what_is_said_to_it(tmp_path):
    stop, supervisor = Stop(), Supervisor([], PeerConfig(), tmp_path, log_file=object())
    with nobody_reads():
        stop.hear(2)
        supervisor._hear(2)
    assert stop() and supervisor._asked is not None


def test_a_closed_terminal_asks_to_stop_but_never_to_hurry(tmp_path, monkeypatch):
    now, ended = [100.0], []
    stop, supervisor = Stop(lambda: now[0], ended.append), Supervisor([], PeerConfig(), tmp_path, log_file=None)
    monkeypatch.setattr("peer.supervise.time.monotonic", lambda: now[0])
    for hear in (stop.hear, supervisor._hear):
        hear(signal.SIGHUP)
        now[0] += 10
        hear(signal.SIGHUP)
    assert stop() and not ended and supervisor._asked and supervisor._kill_at == math.inf


def test_a_hangup_is_heard_unless_nohup_ignores_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in wishes()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.SIGHUP not in wishes()
    finally:
        signal.signal(signal.SIGHUP, before)
