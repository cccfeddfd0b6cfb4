"""How often a peer looks at the others."""

from peer.sync.engine.presence import read_seconds


def test_few_are_looked_at_every_second_and_many_as_seldom_as_the_round_allows():
    assert [read_seconds(5.0, others) for others in (0, 20, 60, 100, 1000)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert [read_seconds(0.5, others) for others in (0, 60)] == [0.5, 0.5]
