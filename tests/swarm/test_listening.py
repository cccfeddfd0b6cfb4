import pytest

from swarm.errors import ExitCode, UserError
from swarm.listening import is_loopback, listen, url_of


def test_who_listens_first_has_the_port_and_the_next_is_told():
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}" and url_of(sock, "https").startswith("https://")
        with pytest.raises(UserError, match=f"Cannot listen on 127.0.0.1:{port}") as refused:
            listen("127.0.0.1", port)
        assert refused.value.code == ExitCode.NETWORK


def test_what_is_no_port_is_refused():
    with pytest.raises(UserError, match="There is no port 70000"):
        listen("127.0.0.1", 70000)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_what_nobody_else_reaches_is_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.168.1.5", "localhost.example", "[::1]"])
def test_what_others_may_reach_is_not(host):
    assert not is_loopback(host)
