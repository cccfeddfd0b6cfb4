"""The failpoints at which a process can be told to fail."""

import asyncio
import importlib
import os

import pytest

from peer.sync.engine import failpoints
from peer.sync.engine.net.streams import PeerLost

KILLED = -9


@pytest.fixture
def armed(tmp_path, monkeypatch):
    path = tmp_path / "failpoints"
    monkeypatch.setattr(failpoints, "_file", str(path))
    return path


def test_an_armed_point_fails_once_and_leaves_the_others_armed(armed):
    armed.write_text("saved kill\njoined fail\n")
    with pytest.raises(PeerLost, match="failed at joined"):
        asyncio.run(failpoints.reached("joined"))
    asyncio.run(failpoints.reached("joined"))
    assert armed.read_text().split() == ["saved", "kill"]


def test_nothing_happens_where_nothing_is_armed(armed):
    asyncio.run(failpoints.reached("joined"))
    failpoints.reached_in_trainer("frozen")
    assert not armed.exists()


def test_the_parts_of_a_contribution_have_three_failpoints(monkeypatch):
    seen = []

    async def hook(point, peer):
        seen.append(point)

    monkeypatch.setattr(failpoints, "hook", hook)

    async def send(count):
        for index in range(count):
            await failpoints.part_sent(index, count, "a")

    asyncio.run(send(6))
    assert seen == ["first_part_sent", "half_of_parts_sent", "before_last_part"]
    seen.clear()
    asyncio.run(send(1))
    assert set(seen) == {"first_part_sent", "half_of_parts_sent", "before_last_part"}


def test_a_process_is_killed_at_the_point_and_not_before(tmp_path, monkeypatch):
    (tmp_path / "failpoints").write_text("saved kill\n")
    monkeypatch.setenv("DD_FAILPOINTS", str(tmp_path / "failpoints"))
    said, says = os.pipe()
    if not (child := os.fork()):  # of a process that has imported all this: 3 s of a core
        try:
            importlib.reload(failpoints)  # as it starts
            asyncio.run(failpoints.reached("rebased"))
            os.write(says, b"on")
            asyncio.run(failpoints.reached("saved"))
            os.write(says, b"never")
        finally:
            os._exit(0)
    os.close(says)
    with os.fdopen(said) as end:
        assert end.read() == "on"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
