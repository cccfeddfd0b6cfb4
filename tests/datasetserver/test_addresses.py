import pytest

from datasetserver.addresses import caller_address, visible_maddrs

LOOPBACK, LAN, DOCKER, PUBLIC = "/ip4/127.0.0.1/tcp/1/p2p/Qm", "/ip4/192.168.1.5/tcp/1", "/ip4/172.17.0.1/tcp/1", "/ip4/8.8.8.8/tcp/1"
OTHERS = ["/ip4/0.0.0.0/tcp/1", "/ip4/169.254.3.4/tcp/1", "/ip6/::1/tcp/1", "/ip6/fe80::1/tcp/1"]
TEN, IPV6, NAME = "/ip4/10.1.2.3/tcp/1", "/ip6/2001:4860:4860::8888/tcp/1", "/dns4/example.org/tcp/1"
ALL = [LOOPBACK, LAN, DOCKER, PUBLIC, *OTHERS, TEN, IPV6, NAME]


@pytest.mark.parametrize(
    ("caller", "told"),
    [
        ("127.0.0.1", ALL),
        ("::1", ALL),
        ("::ffff:127.0.0.1", ALL),
        ("192.168.1.77", [LAN, PUBLIC, TEN, IPV6, NAME]),
        ("10.9.9.9", [LAN, PUBLIC, TEN, IPV6, NAME]),
        ("fd00::7", [LAN, PUBLIC, TEN, IPV6, NAME]),
        ("172.17.0.9", [LAN, DOCKER, PUBLIC, TEN, IPV6, NAME]),
        ("1.1.1.1", [PUBLIC, IPV6, NAME]),
        ("2606:4700::1111", [PUBLIC, IPV6, NAME]),
        ("", [PUBLIC, IPV6, NAME]),
    ],
)
def test_a_caller_is_told_only_what_it_can_dial(caller, told):
    assert visible_maddrs(ALL, caller) == told


def test_what_is_no_address_is_told_to_nobody():
    assert visible_maddrs(["", "/", "/ip4", "/ip4/999.1.1.1/tcp/1", "nonsense"], "1.1.1.1") == []


def test_a_forwarded_address_is_believed_from_a_local_proxy_only():
    assert caller_address("127.0.0.1", "10.0.0.1, 1.1.1.1") == "1.1.1.1"
    assert caller_address("1.1.1.1", "127.0.0.1") == "1.1.1.1"
    assert caller_address("127.0.0.1", None) == "127.0.0.1"
    assert caller_address(None, None) == ""
