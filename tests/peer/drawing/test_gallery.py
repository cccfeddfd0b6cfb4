"""Pictures on their way to the host's page: one round at a time, and never in the way of training."""

import threading

import pytest
from PIL import Image

from peer.drawing import gallery
from peer.drawing.gallery import SIDE_PIXELS, Showing
from swarm.errors import ExitCode, UserError
from swarm.protocol import PictureRequest
from tests.datasetserver.hosting import until


@pytest.fixture
def showing():
    """showing(send) makes one; closed with the test."""
    made = []

    def make(send):
        made.append(Showing(send, "0123456789abcdef", "QmPeer"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def drawn(side=16, prompt="a cat"):
    return [(prompt, Image.new("RGB", (side, side), "red"))]


def test_who_ends_does_not_wait_for_a_server_that_holds_a_picture(showing, monkeypatch, caplog):
    """On Python 3.10 the timeout went past us, as another class than the built-in one, and the peer's last word was a traceback."""
    monkeypatch.setattr(gallery, "_CLOSE_SECONDS", 0.05)
    go = threading.Event()
    one = showing(lambda body: go.wait(30) and "")
    one.show(1, 32, drawn())
    with caplog.at_level("INFO"):
        one.close()
    assert "the last pictures did not reach" in caplog.text
    go.set()


def test_what_is_sent_is_small_and_says_what_it_is(showing):
    sent = []
    one = showing(lambda body: sent.append(PictureRequest.model_validate(body)) or "")
    one.show(3, 96, [*drawn(), *drawn(2 * SIDE_PIXELS, "two\nlines" + "x" * 600)])
    until(lambda: len(sent) == 2)
    for request in sent:
        assert (request.peer, request.round, request.samples) == ("QmPeer", 3, 96)
    assert sent[0].prompt == "a cat" and sent[1].prompt.startswith("two lines") and len(sent[1].prompt) == 500


def test_while_one_rounds_pictures_are_on_their_way_the_next_ones_are_left_out(showing):
    sent, go = [], threading.Event()

    def send(body):
        sent.append(body["round"])
        assert go.wait(60)
        return ""

    one = showing(send)
    one.show(1, 32, drawn())
    until(lambda: sent)
    one.show(2, 64, drawn())
    go.set()
    until(lambda: one._last.done())
    one.show(3, 96, drawn())
    until(lambda: len(sent) == 2)
    assert sent == [1, 3]


def test_who_is_not_asked_to_draw_tries_with_one_picture_each_time_and_says_so_once(showing, caplog):
    caplog.set_level("INFO", "peer.drawing.gallery")
    sent, answers = [], ["not_asked_to_draw", "not_asked_to_draw", "", ""]
    one = showing(lambda body: sent.append(body["round"]) or answers.pop(0))
    for number in (1, 2, 3):
        one.show(number, 32, [*drawn(), *drawn()])
        until(lambda: one._last.done())
    assert sent == [1, 2, 3, 3] and caplog.text.count("ours (") == 1


def test_a_server_that_is_away_or_says_no_costs_a_round_and_no_more(showing, caplog):
    answers = [UserError("It does not answer.", fix="Wait.", code=ExitCode.NETWORK), "bad_picture", ""]

    def send(body):
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    one, left = showing(send), [2, 1, 0]
    for number, expected in enumerate(left):
        one.show(number, 0, drawn())
        until(lambda: one._last.done())
        assert len(answers) == expected
    assert "bad_picture" in caplog.text
