"""An assisting peer draws the newest state that it keeps, beside what it does for the swarm, and its pictures reach the host's page."""

import asyncio
import dataclasses
import logging
import sys

import pytest
import torch

from peer.config import PeerConfig
from peer.contracts import Member
from peer.data.client.runs import fetch_run
from peer.drawing import artist
from peer.drawing.__main__ import attempt
from peer.drawing.artist import Artist, Order
from peer.launch.joining import Joined
from peer.launch.starting_model import load_model
from peer.rooms import load_part
from peer.sync.diloco import strategy
from peer.sync.engine.state import first_state, next_state
from peer.sync.engine.transfer.archive import Archive
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.vectors import Schema, flatten
from swarm.errors import ExitCode
from swarm.identity import Identity
from swarm.protocol import PicturesAnswer
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks
from tests.conftest import ROOT
from tests.datasetserver.test_http import call
from tests.peer.machine.test_turns import moved  # noqa: F401
from tests.warm import Warm

PROMPTS = ("a red square", "a blue one")
AT_ONCE = """
import os, sys
os.nice = lambda by: None
sys.stdin = open(sys.argv[1])
from peer.drawing.__main__ import main
sys.exit(main())
"""
"""The drawing process at our own priority: at the lowest it took 164 s beside other tests."""


class Forked:
    """The drawing process, off one that has imported what it imports. That an order comes by its stdin: `test_however_a_drawing_ends_...`."""

    returncode = None

    def __init__(self, folder):
        self._order, self._log = folder / "order", folder / "log"

    async def communicate(self, order):
        self._order.write_bytes(order)
        self._process = Warm(["-c", AT_ONCE, self._order], ROOT, self._log)
        await self.wait()

    async def wait(self):
        self.returncode = await asyncio.to_thread(self._process.wait)

    def kill(self):
        self._process.kill()


def helper(folder, **options):
    where = {"datasetserver": "http://127.0.0.1:1"} | options
    few = {"num_validation_images": 1, "validation_inference_steps": 2}
    return PeerConfig(assist=True, output_dir=str(folder), validation_prompts=PROMPTS, num_threads=1, **few, **where)


def keep_state(folder, run):
    """The first final state of `run`, as an assisting peer keeps it; its file."""
    params = load_part("methods", run.method).build(run).attach(load_model(run, {}, None))
    schema = Schema.of(params)
    vector, store = flatten(params, torch.empty(schema.size)), StateStore(folder / "state")
    state = first_state(run.digest, schema.digest, vector, strategy(run).slots)
    state = next_state(state, [[vector, torch.zeros(schema.size)]], [Member("a", 1, 8)])
    store.save(state)
    archive = Archive(folder / "settled", store, 0)
    archive.keep([state.header.committed_round(state.digest)])
    return next(archive.folder.iterdir())


async def until(true, task):
    deadline = asyncio.get_running_loop().time() + 180
    while not true():
        assert not task.done() and asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.1)


@pytest.mark.slow
def test_its_pictures_of_a_kept_state_arrive_in_the_hosts_gallery_once(tmp_path, serve, tiny_model, monkeypatch):
    identity = Identity(tmp_path / "identity.key")
    of_model = ("--model", str(tiny_model), "--resolution", "16", "--sync", "diloco")
    host = serve("--pictures_from", identity.peer_id, *of_model, founds=False, samples=16)
    run = RunConfig.from_mapping(fetch_run(host.url, 60).run, where=host.url)
    keep_state(tmp_path, run)
    peer = helper(tmp_path, datasetserver=host.url)

    async def forked(*_, **__):
        return Forked(tmp_path)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", forked)

    def shown():
        return PicturesAnswer.model_validate_json(call(host, "/v1/pictures")[2]).pictures

    async def scenario():
        drawing = asyncio.create_task(Artist(peer, {}, Joined(run, host.url), identity.peer_id).draw_forever())
        await until(lambda: len(shown()) == 2, drawing)
        await end_tasks(drawing)

    asyncio.run(scenario())
    identity.close()
    assert {(picture.round, picture.samples, picture.peer) for picture in shown()} == {(1, 8, identity.peer_id)}
    assert {picture.prompt for picture in shown()} == set(PROMPTS) and shown()[0].width == 16
    assert [path.name for path in (tmp_path / "validation").iterdir()] == ["step-000001.png"]
    assert Artist(peer, {}, Joined(run, host.url), "QmA")._due() is None, "a helper that is started again goes on"


def test_rounds_are_drawn_as_often_as_asked_and_those_passed_over_are_not(tmp_path):
    (tmp_path / "settled").mkdir()
    one = Artist(helper(tmp_path, validation_steps=10), {}, Joined(RunConfig(model="x")), "QmA")
    assert one._due() is None
    drawn = []
    for number in (3, 4, 9, 10, 11, 35, 36, 40):
        path = tmp_path / "settled" / f"round-{number:08d}-samples-0000000008-0123456789ab.state"
        path.touch()
        drawn += [number] if one._due() == path else []
    assert drawn == [3, 10, 35, 40]


@pytest.fixture
def order(tmp_path, tiny_model):
    run = RunConfig(model=str(tiny_model), sync="diloco", resolution=16, target_batch_size=8)
    known = {"peer_id": "QmA", "server_url": "", "round": 1, "memory_bytes": 1e12}
    return Order(peer=helper(tmp_path), given={}, run=run, state=keep_state(tmp_path, run), **known)


def test_an_order_arrives_as_it_was_given(order):
    assert Order.from_json(order.to_json()).run.digest == order.run.digest
    assert Order.from_json(order.to_json()).state == order.state


def test_with_offload_parts_take_turns_and_the_pictures_are_the_same(order, tmp_path, moved):  # noqa: F811
    drawn = []
    for peer in (order.peer, dataclasses.replace(order.peer, offload=True)):
        assert attempt(dataclasses.replace(order, peer=peer)) == 0
        drawn.append((tmp_path / "validation" / "step-000001.png").read_bytes())
    assert drawn[0] == drawn[1]
    assert sorted(name for name, came in moved if came) == sorted(["text_encoder", "unet", "vae"] * len(PROMPTS))


def test_without_the_libraries_the_model_or_memory_one_line_says_so_and_it_ends(order, tmp_path, monkeypatch, caplog):
    def fails(code, words, **changes):
        caplog.clear()
        assert attempt(dataclasses.replace(order, **changes)) == code
        (line,) = [
            record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
        ]  # its name is what libraries make it
        assert words in line

    fails(ExitCode.MEMORY, "this peer draws no pictures: drawing takes more than 1 kB", memory_bytes=1000)

    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def too_much(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("peer.drawing.__main__.draw", full)
        on_gpu = dataclasses.replace(order.peer, device="cuda")
        fails(ExitCode.MEMORY, "drawing takes more memory than cuda has free. The cheapest first: end other programs", peer=on_gpu)
        assert "--offload" in caplog.text
        fails(ExitCode.MEMORY, "more memory than cuda has free", peer=dataclasses.replace(on_gpu, offload=True))
        assert "--offload" not in caplog.text
        patch.setattr("peer.drawing.__main__.draw", too_much)
        fails(ExitCode.MEMORY, "half of the memory that is free here", peer=on_gpu)
        assert "--num_validation_images" in caplog.text and "--offload" not in caplog.text
    steps = dataclasses.replace(order.peer, validation_inference_steps=1001)
    fails(ExitCode.CONFIG, "this peer draws no pictures: validation_inference_steps is 1001, but", peer=steps)
    fails(ExitCode.CONFIG, "this peer draws no pictures: There is no model", given={"model": str(tmp_path / "nowhere")})
    other = tmp_path / "gone.state"
    other.write_bytes(b"{}\n")
    fails(ExitCode.DISK, "no pictures of round 1: Cannot use", state=other)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    fails(ExitCode.CONFIG, "this peer draws no pictures: import of diffusers")
    assert not (tmp_path / "validation").exists()


def test_a_state_that_is_no_longer_kept_when_it_is_drawn_is_drawn_all_the_same(tmp_path):
    path = tmp_path / "settled" / "round-00000001-samples-0000000008-0123456789ab.state"
    path.parent.mkdir()
    path.write_bytes(b"state")
    program = f"import json, os, sys; os.unlink({str(path)!r}); print(open(json.load(sys.stdin)['state']).read(), file=open('drawn', 'w'))"
    one = Artist(helper(tmp_path), {}, Joined(RunConfig(model="x")), "QmA", command=("-c", program.replace("'drawn'", repr(str(tmp_path / "drawn")))))
    assert asyncio.run(one._draw(one._due()))
    assert (tmp_path / "drawn").read_text() == "state\n" and not path.exists() and not (tmp_path / "drawing.state").exists()


ENDS = {
    "in vain": ("import json, sys; sys.exit(2 if json.load(sys.stdin)['round'] == 1 else 0)", None),
    "killed": ("import os; os.kill(os.getpid(), 9)", "no pictures of round 1: SIGKILL ended the process that draws"),
    "hangs": ("import time; time.sleep(600)", "no pictures of round 1: they were not drawn within"),
    "cannot start": (None, "no pictures of round 1: [Errno 2]"),
}


@pytest.mark.parametrize("how", ENDS)
def test_however_a_drawing_ends_the_helper_goes_on(tmp_path, monkeypatch, caplog, how):
    program, words = ENDS[how]
    (tmp_path / "settled").mkdir()
    (tmp_path / "settled" / "round-00000001-samples-0000000008-0123456789ab.state").touch()
    if program is None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    if how == "hangs":
        monkeypatch.setattr(artist, "_LONGEST_SECONDS", 0.01)
    one = Artist(helper(tmp_path), {}, Joined(RunConfig(model="x")), "QmA", command=("-c", program or ""))

    async def scenario():
        drawing = asyncio.create_task(one.draw_forever())
        if words is None:
            return await asyncio.wait_for(drawing, 240)
        await until(lambda: words in caplog.text, drawing)
        await end_tasks(drawing)

    asyncio.run(scenario())
    assert words or not caplog.text
