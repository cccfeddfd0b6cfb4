from peer.stopping import Stop


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
