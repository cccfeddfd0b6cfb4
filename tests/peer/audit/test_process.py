"""The process that measures for an assisting peer: a real server's pictures, a tiny real model, and what stops it."""

import asyncio
import dataclasses
import io
import logging
import random

import pytest
import torch

from peer.audit.__main__ import attempt
from peer.audit.orders import Order, read_answer
from peer.config import PeerConfig
from peer.data.client import taken
from peer.data.client.download import Corrupt
from peer.data.client.runs import fetch_run
from peer.data.client.taken import Pictures
from peer.data.client.transport import Refusal
from peer.drawing.errand import Errand
from peer.launch.starting_model import load_model
from peer.rooms import load_part
from peer.sync.engine.codec import Wire
from peer.sync.engine.vectors import Schema
from swarm.errors import ExitCode, UserError
from swarm.protocol import ErrorBody
from swarm.run_config import RunConfig
from tests.conftest import ROOT
from tests.datasetserver.test_http import call, envelope, keys_of, lease
from tests.identities import id_of
from tests.peer.drawing.test_drawing import keep_state
from tests.warm import Warm

AT_ONCE = """
import os, sys
os.nice = lambda by: None
sys.stdin = open(sys.argv[1])
from peer.audit.__main__ import main
sys.exit(main())
"""
"""The process at our own priority, and off one that has imported what it imports. That orders come by a pipe: test_auditor.py."""


def errand_of(folder, run, url="http://127.0.0.1:1", **changes):
    peer = PeerConfig(assist=True, audit=1, datasetserver=url, output_dir=str(folder), num_threads=1)
    return Errand(**{"peer": peer, "given": {}, "run": run, "server_url": url, "memory_bytes": 1e12} | changes)


def pictures(folder, run, url="http://x", seed=0):
    return Pictures(url, run, known_hosts=None, cache_dir=folder / "cache", cache_bytes=1 << 30, rng=random.Random(seed))


def order_of(folder, run, scales):
    """What each member brought: noise of that scale."""
    wire = Wire.of(run.wire, Schema.of(load_part("methods", run.method).build(run).attach(load_model(run, {}, None))))
    noise = torch.randn(wire.size, generator=torch.Generator().manual_seed(0))
    brought = {peer: wire.encode(noise * scale) for peer, scale in scales.items()}
    numbers = dict.fromkeys(brought, 1)
    return Order(round=1, state=keep_state(folder, run), start=0, end=wire.size, excerpts=brought, numbers=numbers)


def test_it_measures_the_loss_of_the_servers_pictures_one_order_after_the_other(tmp_path, serve, tiny_model):
    host = serve("--model", str(tiny_model), "--resolution", "16", "--sync", "diloco", founds=False, samples=16)
    run = RunConfig.from_mapping(fetch_run(host.url, 60).run, where=host.url)
    registered = keys_of(lease(host, "alice", want=8))[:5]
    assert call(host, "/v1/contributions", envelope(host, "alice", number=1, keys=registered))[0] == 200
    noise = id_of("alice")
    order = order_of(tmp_path, run, {"nothing": 0.0, noise: 0.3})
    said, log = tmp_path / "said", tmp_path / "log"
    said.write_bytes(errand_of(tmp_path, run, host.url).to_json() + b"\n" + 2 * b"".join(map(bytes, order.pieces())))
    assert Warm(["-c", AT_ONCE, said], ROOT, log).wait(200) == ExitCode.OK, log.read_text()
    first, second = (read_answer(line) for line in log.read_bytes().splitlines() if line.startswith(b"{"))
    for found in (first, second):
        assert found["nothing"].before == found["nothing"].after == found[noise].before < found[noise].after
        assert found[noise].own_before < found[noise].own_after and found[noise].own_before != found[noise].before
        assert found["nothing"].own_after is None, "the server knows of no such contribution"
    assert first["nothing"].before != second["nothing"].before, "other noise each time, which nobody knows before"


@pytest.mark.parametrize("split", [0.0, 0.3])
def test_it_takes_held_out_pictures_where_there_are_any_and_leases_none(tmp_path, serve, tiny_model, split):
    host = serve("--model", str(tiny_model), "--validation_split", str(split), founds=False, samples=16)
    answer = fetch_run(host.url, 60)
    run = RunConfig.from_mapping(answer.run, where=host.url)

    def found(most, seed=0):
        return asyncio.run(pictures(tmp_path, run, host.url, seed).some(most))

    everything = found(1000)
    assert len({sample.key for sample in everything}) == len(everything) and all(sample.image and sample.caption for sample in everything)
    assert (len(everything) == 16) == (split == 0.0) and len(found(2)) == 2
    assert {sample.key for sample in found(2, 1)} <= {sample.key for sample in everything}
    assert fetch_run(host.url, 60).manifest == answer.manifest


def test_it_takes_what_a_contribution_holds_and_nothing_where_the_server_does_not_say(tmp_path, serve, monkeypatch):
    host = serve(samples=16)
    run = RunConfig.from_mapping(fetch_run(host.url, 60).run, where=host.url)
    registered = keys_of(lease(host, "alice", want=8))[:5]
    assert call(host, "/v1/contributions", envelope(host, "alice", number=7, keys=registered))[0] == 200
    ours = pictures(tmp_path, run, host.url)

    def held(number, most=100):
        return asyncio.run(ours.of(id_of("alice"), number, most))

    assert not held(7), "the manifest is not known yet"
    everything = {sample.image for sample in asyncio.run(ours.some(100))}
    assert len(held(7)) == 5 and {sample.image for sample in held(7)} < everything and len(held(7, most=2)) == 2
    assert not held(8)
    monkeypatch.setattr(taken, "ASK_SECONDS", 0.01)
    assert not asyncio.run(pictures(tmp_path, run, "http://127.0.0.1:1").of(id_of("alice"), 7, 1))


def test_what_keeps_it_from_its_pictures_is_said(tmp_path, monkeypatch):
    class Shards:
        def __init__(self, *_):
            pass

        async def held_out(self, transport):
            if isinstance(self.trouble, Exception):
                raise self.trouble
            return self.trouble

        def of_epoch(self, epoch):
            return []

    monkeypatch.setattr(taken, "SignedShards", Shards)
    refusal = Refusal(409, ErrorBody(code="no_run", message="no run yet", fix="found one"))
    for trouble, words in ((Corrupt("Shard x arrived corrupt 3 times."), "corrupt"), (refusal, "no run yet"), ([], "gave no picture")):
        Shards.trouble = trouble
        with pytest.raises(UserError, match=words):
            asyncio.run(pictures(tmp_path, RunConfig(model="x")).some(1))


def test_without_the_model_or_memory_one_line_says_so_and_it_ends(tmp_path, tiny_model, caplog):
    run = RunConfig(model=str(tiny_model), sync="diloco", resolution=16, target_batch_size=8)
    order = order_of(tmp_path, run, {"a": 0.0})

    def fails(code, words, this=order, **changes):
        caplog.clear()
        assert attempt(errand_of(tmp_path, run, **changes), io.BytesIO(b"".join(map(bytes, this.pieces()))), io.BytesIO()) == code
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert words in line

    fails(ExitCode.MEMORY, "this peer audits nothing: an audit takes more than 1 kB", memory_bytes=1000)
    fails(ExitCode.CONFIG, "this peer audits nothing: There is no model", given={"model": str(tmp_path / "nowhere")})
    gone = tmp_path / "gone.state"
    gone.write_bytes(b"{}\n")
    fails(ExitCode.DISK, "an audit failed: Cannot use", this=dataclasses.replace(order, state=gone))


def test_an_errand_arrives_as_it_was_given(tmp_path):
    errand = errand_of(tmp_path, RunConfig(model="x"))
    read = Errand.from_json(errand.to_json())
    assert (read.run.digest, read.peer, read.server_url) == (errand.run.digest, errand.peer, errand.server_url)
