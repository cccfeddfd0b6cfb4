import pytest

from peer.launch.stopping import Stop


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
