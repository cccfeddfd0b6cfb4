"""What people type for a server and a token."""

import pytest

from swarm.errors import UserError
from swarm.status import asking
from swarm.urls import check_token, check_url


@pytest.mark.parametrize("url", ["http://203.0.113..7:9090", "http://a..b", "http://host/\u00fc", "http://", "ftp://host", "http://host:0", "http://a b"])
def test_what_is_no_url_is_one_line(url):
    with pytest.raises(UserError, match="is not a URL"):
        check_url(url)


@pytest.mark.parametrize("url", ["http://203.0.113.7:9090", "https://m\u00fcnchen.example/", "http://[2001:db8::1]:9090/path?x=1", "http://host.example."])
def test_what_is_one_passes(url):
    check_url(url)


@pytest.mark.parametrize("token", ["\u201cabc\u201d", "a\nb", "a b"])
def test_a_token_that_no_header_can_bring_is_one_line(token):
    with pytest.raises(UserError, match="Copy it whole"):
        check_token(token)
    with asking("http://127.0.0.1:1", seconds=1.0, token=token) as look, pytest.raises(UserError, match="Copy it whole"):
        look()
    check_token("")
