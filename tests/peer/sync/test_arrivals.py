"""How long a leader waits for each peer."""

from peer.sync.engine.round.arrivals import UNKNOWN_SECONDS, Arrivals


def test_a_peer_never_seen_is_granted_a_fixed_time_and_a_known_one_twice_its_usual_lateness():
    arrivals = Arrivals()
    assert arrivals.grant("a") == UNKNOWN_SECONDS
    for late in (0.5, 0.5, 30.0):  # one bad day does not count
        arrivals.came("a", late)
    assert arrivals.grant("a") == 2.0 and arrivals.grant("b") == UNKNOWN_SECONDS


def test_who_came_before_its_time_is_granted_the_slack_alone():
    arrivals = Arrivals()
    arrivals.came("a", -7.0)
    assert arrivals.grant("a") == 1.0


def test_who_misses_its_time_is_granted_more_and_more_but_never_without_end():
    arrivals = Arrivals()
    arrivals.came("a", 0.0)
    grants = []
    for _ in range(100):
        arrivals.missed("a")
        grants.append(arrivals.grant("a"))
    assert grants == sorted(grants) and grants[0] > 1.0 and grants[-1] == 120.0


def test_only_so_many_peers_are_remembered():
    arrivals = Arrivals()
    for count in range(2000):
        arrivals.came(str(count), 0.0)
    assert len(arrivals._late) == 1024 and arrivals.grant("0") == UNKNOWN_SECONDS and arrivals.grant("1999") == 1.0
