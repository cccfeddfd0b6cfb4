"""Which addresses a record makes us dial."""

import random

from swarm.budget import Budget, Budgets
from swarm.dialling import MOST_OF_A_RECORD, dialable, grounds

ME, THEM = "QmMe", "QmThem"
LOOPBACK, LAN, LINK, PUBLIC = "127.0.0.1", "192.168.1.7", "169.254.3.4", "8.8.4.4"


def maddr(ip: str, peer: str = THEM, port: int = 31337) -> str:
    return f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}/p2p/{peer}"


def test_an_address_is_dialled_for_the_peer_that_signed_it_only():
    ours, theirs = maddr(PUBLIC), maddr(PUBLIC, "QmThirdParty")
    assert dialable([theirs, ours], THEM, ()) == (ours,)
    assert dialable([theirs], THEM, ()) == () == dialable([f"/ip4/{PUBLIC}/tcp/1"], THEM, ())


def test_names_relays_and_what_is_no_address_are_not_dialled():
    relay = f"/ip4/{PUBLIC}/tcp/1/p2p/QmRelay/p2p-circuit/p2p/{THEM}"
    for text in ("", "/", relay, f"/dns4/example.com/tcp/1/p2p/{THEM}", maddr("1.2.3.400"), maddr("224.0.0.1"), maddr("0.0.0.0"), maddr("::")):
        assert dialable([text], THEM, {"loopback", "private", "link-local"}) == (), text
    rng = random.Random(5)
    for _ in range(500):
        assert dialable([rng.randbytes(30).decode("latin-1")], THEM, {"loopback", "private"}) == ()


def test_a_few_addresses_of_a_record_are_dialled():
    assert len(dialable([maddr(PUBLIC, port=port) for port in range(1000, 1100)], THEM, ())) == MOST_OF_A_RECORD


def test_a_closed_network_is_dialled_into_only_by_those_who_were_led_there():
    everywhere = [maddr(LOOPBACK), maddr(LAN), maddr(LINK), maddr("::ffff:127.0.0.1"), maddr("100.64.0.9")]
    assert all(dialable([place], THEM, grounds([], [maddr(LOOPBACK, ME), maddr(LAN, ME)])) == () for place in everywhere)
    assert all(dialable([place], THEM, grounds([[maddr(PUBLIC), maddr(LAN), maddr(LOOPBACK)]], [])) == () for place in everywhere)
    at_home = grounds([[maddr(LAN)]], [maddr(LAN, ME), maddr(LOOPBACK, ME)])
    assert dialable([maddr(LOOPBACK), maddr(LAN)], THEM, at_home) == (maddr(LAN),)
    here = grounds([], [maddr(LOOPBACK, ME)])
    assert dialable([maddr(LOOPBACK), maddr(LAN)], THEM, here) == (maddr(LOOPBACK),)


def test_a_budget_is_spent_and_comes_back():
    now = [0.0]
    budget = Budget(0.5, 3, lambda: now[0])
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]
    now[0] = 4.0
    assert [budget.take() for _ in range(3)] == [True, True, False]
    now[0] = 1000.0
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


def test_budgets_are_each_his_own_and_so_many_are_remembered():
    budgets = Budgets(0.0, 1, most=10, clock=lambda: 0.0)
    assert budgets.take("a") and not budgets.take("a") and budgets.take("b")
    for number in range(50):
        budgets.take(number)
    assert len(budgets._of) == 10
