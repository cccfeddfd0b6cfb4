"""Messages and memory between the trainer and its sidecar."""

import contextlib
import dataclasses
import os
import resource

import pytest
import torch

from peer.sync.engine.trainer import messages
from peer.sync.engine.trainer.messages import Failed, News, Offer, Progress, Pulse, Rebase
from peer.sync.engine.trainer.port import Port, PortClosed
from swarm.errors import ExitCode, UserError
from tests.peer.sync.swarm_tools import open_descriptors, shared_copy


@pytest.fixture
def ports():
    ours, theirs = Port.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_keep_their_borders_and_order(ports):
    ours, theirs = ports
    ours.send(Progress(3, loss=0.5))
    ours.send(News("x" * 100_000))
    assert theirs.receive(1) == Progress(3, loss=0.5)
    assert theirs.receive(1) == News("x" * 100_000)
    assert theirs.receive(0) is None


def test_every_kind_of_message_has_a_name_on_the_wire():
    kinds = {kind for kind in vars(messages).values() if dataclasses.is_dataclass(kind) and kind.__module__ == messages.__name__}
    assert kinds == {*messages.FromTrainer.__args__, *messages.FromSidecar.__args__}


def test_memory_is_handed_over_not_copied(ports):
    ours, theirs = ports
    buffer = shared_copy(torch.arange(4.0))
    ours.send(Offer(1, 8, "parent", buffer))
    received = theirs.receive(1)
    assert (received.number, received.samples, received.parent) == (1, 8, "parent")
    received.encoded.floats()[0] = 5
    assert buffer.floats().tolist() == [5, 1, 2, 3]


def test_a_thousand_buffers_leave_no_descriptor_open(ports):
    ours, theirs = ports
    before = open_descriptors()
    for _ in range(1000):
        ours.send(Rebase("digest", {}, shared_copy(torch.arange(4.0))))
        theirs.receive(1)
    assert open_descriptors() <= before + 1


def test_the_end_of_the_other_process_is_noticed_after_its_last_word(ports):
    ours, theirs = ports
    theirs.send(Failed.of(UserError("The disk is full.", fix="Free some space.", code=ExitCode.DISK)))
    theirs.close()
    error = ours.receive(1).error
    assert (error.message, error.fix, error.code) == ("The disk is full.", "Free some space.", ExitCode.DISK)
    with pytest.raises(PortClosed):
        ours.receive(1)
    with pytest.raises(PortClosed):
        ours.send(Progress())


def test_a_process_that_takes_nothing_does_not_block_us_for_good(ports):
    ours, _ = ports
    with pytest.raises(PortClosed, match="has taken nothing"):
        for _ in range(1000):
            ours.send(News("x" * 10_000), seconds=0.05)
    assert not ours.has_room()


def test_descriptors_above_1023_work():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(4096, limits[0]), limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        ours, theirs = Port.pair()
        stack.callback(ours.close)
        stack.callback(theirs.close)
        assert min(ours.socket.fileno(), theirs.socket.fileno()) > 1023
        ours.send(Pulse())
        assert theirs.receive(1) == Pulse()
