"""How often others may ask."""

import pytest

from swarm.places import RELAYED, ip_of, place_of
from swarm.quota import Quota
from tests.clock import Clock


def test_each_has_its_share_and_all_together_theirs():
    clock = Clock()
    budget = Quota(3, 2, 60.0, clock)
    assert [budget.take("a", "home") for _ in range(3)] == [True, True, False]
    assert not budget.take("b", "home"), "another identity at the same place"
    assert budget.take("b", "elsewhere") and not budget.take("c", "far away")
    clock.now = 60.0
    assert budget.allows("c", "home") and budget.take("a", "home")


def test_what_is_refused_costs_nobody_anything():
    budget = Quota(2, 1, 60.0, Clock())
    assert budget.take("a") and not any(budget.take("a") for _ in range(100)) and budget.take("b")


@pytest.mark.parametrize(
    ("maddr", "place", "ip"),
    [
        ("/ip4/203.0.113.7/tcp/1", "203.0.113.7", "203.0.113.7"),
        ("/ip6/2001:db8:1:2:3::4/tcp/1", "2001:db8:1:2::/64", "2001:db8:1:2:3::4"),
        ("/ip4/203.0.113.7/tcp/1/p2p-circuit", RELAYED, ""),
        ("/dns4/example.org/tcp/80", RELAYED, ""),
    ],
)
def test_a_place_is_an_address_or_the_network_that_belongs_to_it(maddr, place, ip):
    from hivemind.utils.multiaddr import Multiaddr

    assert (place_of(Multiaddr(maddr)), ip_of(Multiaddr(maddr))) == (place, ip)
