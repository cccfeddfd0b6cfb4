"""`dd-peer --check`: each thing that can be wrong is said in one line with the way out, and ends with its own kind of exit code.

docs/join.md shows all of these answers; the tests compare.
"""

import dataclasses
import errno
import io
import json
import re
import shutil
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from datasetserver import tokens
from peer.config import PeerConfig
from peer.data.client.probing import Distance
from peer.data.client.transport import Refusal
from peer.finetune import main as trainer
from peer.launch.joining import Joined
from peer.machine.device import Precision
from peer.machine.disk_space import check_space, needed_bytes
from peer.machine.fitting import Fit
from peer.supervise import cli as main
from peer.supervise import main as supervisor
from peer.volunteer.check import command
from peer.volunteer.check.items import Machine, _fp32_bytes
from peer.volunteer.check.report import FAIL, NOTE, OK, SKIP, Answer, Item, NotAsked, ask, lines, run
from peer.volunteer.check.speed import _readable, measure_step
from swarm.errors import STOPPED_AT_ONCE, ExitCode, UserError, run_program
from swarm.protocol import ErrorBody
from swarm.records import HostWord
from swarm.run_config import RunConfig
from tests.datasetserver.hosting import Host

ROOT = Path(__file__).resolve().parents[3]
RUN = ("--resolution", "16", "--target_batch_size", "8", "--total_samples", "1000", "--run_name", "our first run")
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(scope="module")
def host(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("host")
    host = Host(folder, *RUN, "--tokens", str(folder / "tokens.txt"), "--model", str(tiny_model), samples=8)
    host.token = tokens.add(folder / "tokens.txt", "volunteer")
    yield host.start()
    host.stop()


@pytest.fixture
def machine(host, tmp_path):
    def make(given=None, url=host.url, **options):
        peer = PeerConfig(datasetserver=url, **({"token": host.token, "output_dir": str(tmp_path / "out")} | options))
        return Machine(
            peer, given or {}, tmp_path, patience=60 if url == host.url else 0.2, join_seconds=0.5, step_seconds=60, say=lambda text: None
        )

    return make


def asked(machine, *names) -> Answer:
    """The last of these questions' answers."""
    items = {item.name: item for item in machine.items()}
    return [ask(items[name]) for name in names][-1]


def plain(text: str) -> str:
    """Without what differs from machine to machine."""
    text = re.sub(r"http://\S+?(?=[ .,;:]*( |$))|/(?:[\w.-]+/)*[\w.-]+|\b[0-9a-f]{16,64}\b", "X", text)
    return re.sub(r"\d[\d,.]*\d|\d", "N", text)


def shown(name: str, answer: Answer) -> None:
    """The page for volunteers has this answer."""
    page = plain((ROOT / "docs" / "join.md").read_text(encoding="utf-8"))
    for line in lines(name, answer):
        assert plain(line) in page, f"docs/join.md lacks:\n{line}"


def fails(name: str, answer: Answer, code: ExitCode, *words: str) -> None:
    assert (answer.mark, answer.code) == (FAIL, code), answer
    assert answer.fix and all(word in answer.found + answer.fix for word in words), answer
    shown(name, answer)


def test_a_server_that_does_not_answer(machine):
    here = machine(url="http://127.0.0.1:9")
    fails("server", asked(here, "server"), ExitCode.NETWORK, "does not answer")
    assert [asked(here, name).mark for name in ("token", "run", "model", "memory", "speed", "link", "DHT", "clock")] == [SKIP] * 8
    assert asked(here, "disk").mark in (NOTE, FAIL)


def test_a_token_that_is_missing_or_wrong(machine):
    fails("token", asked(machine(token=""), "server", "token"), ExitCode.AUTH, "DD_TOKEN")
    fails("token", asked(machine(token="wrong"), "server", "token"), ExitCode.AUTH, "opens nothing")
    assert asked(machine(token="wrong"), "server", "token", "run").mark == SKIP


def test_a_host_that_is_seen_for_the_first_time_is_told_and_not_remembered(machine, tmp_path):
    assert "the host's key is" in asked(machine(), "server", "token").found
    assert not (tmp_path / "out").exists()


def test_another_host_than_the_one_that_was_named(machine):
    fails("token", asked(machine(host_key="ab" * 32), "server", "token"), ExitCode.AUTH, "not the same host")


def test_a_run_that_this_machine_was_told_otherwise_of_or_that_is_over(machine):
    fails("run", asked(machine({"resolution": 512}), "server", "token", "run"), ExitCode.CONFIG, "resolution = 16")
    over = machine()
    asked(over, "server")
    fails("run", over._about(RunConfig(model="m", run_name="our first run", total_samples=1000), 1000, 1000), ExitCode.CONFIG, "is over")
    empty = machine()
    asked(empty, "server")
    empty.answer = None
    fails("run", asked(empty, "run"), ExitCode.NETWORK, "no run yet")


def test_the_visit_of_a_run_has_its_hosts_key_and_knows_whom_the_host_bans(tmp_path):
    here, word = Machine(PeerConfig(datasetserver="http://host"), {}, tmp_path), HostWord(about="somebody", at=1, banned=True, reason="", signature="x")
    here.answered, run = True, RunConfig(model="m", model_digest="ab" * 32).to_mapping()
    here.answer = SimpleNamespace(run=run, head=None, initial_peers=[NOBODY], host_key="the host's", extension=None, bans=[word])
    assert asked(here, "run").mark == OK
    assert (here.joined.host_key, here.joined.bans, here.joined.initial_peers) == ("the host's", (word,), (NOBODY,))


def test_a_model_with_other_weights_or_none(machine, tiny_family, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_family("sdxl"), other)
    fails("model", asked(machine({"model": str(other)}), "server", "run", "model"), ExitCode.CONFIG, "digest")
    fails(
        "model", asked(machine({"model": str(tmp_path / "no.safetensors")}), "server", "run", "model"), ExitCode.CONFIG, "There is no model"
    )


def test_a_models_path_may_begin_with_a_tilde_and_a_name_that_the_hub_refuses_is_nobodys(machine, monkeypatch, tiny_model):
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    assert asked(machine({"model": f"~/{tiny_model.name}"}), "server", "run", "model").mark == OK
    for missing in ("~/no-such-model", "my--models/one"):
        told = asked(machine({"model": missing}), "server", "run", "model")
        assert told.mark == FAIL and told.found.startswith("There is no model"), told


def test_a_lora_that_the_run_begins_with_and_that_is_not_here(machine):
    machine = machine()
    machine.joined = Joined(RunConfig(method="lora", lora_weights="/host/style.safetensors", lora_weights_digest="0" * 64), "", ())
    fails("model", asked(machine, "model"), ExitCode.CONFIG, "begins with the LoRA", "--lora_weights FILE")


def test_a_disk_that_is_too_small_or_read_only(machine, monkeypatch, tmp_path):
    def answer(free, **options):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
        return asked(machine(**options), "server", "run", "model", "disk")

    fails("disk", answer(5_000_000), ExitCode.DISK, "--output_dir")
    fails("disk", answer(5_000_000, output_dir="/proc/out"), ExitCode.DISK, "cannot be written")
    full_later = answer(5_000_000_000)
    assert full_later.mark == NOTE and "--cache_gib" in full_later.fix
    shown("disk", full_later)
    assert answer(50_000_000_000).mark == OK


def test_a_peer_with_pictures_of_its_own_keeps_no_shards_but_what_it_makes_of_them(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**12))

    def found(**options):
        return asked(machine(train_data_dir=str(tmp_path), **options), "server", "run", "model", "disk").found

    assert "caches" not in found() and "caches 21.5 GB" in found(cache_text=True) and "caches 42.9 GB" in found(cache_latents=True, cache_text=True)


def test_caches_on_another_disk_need_no_room_on_that_of_the_result(machine, monkeypatch):
    def answer(there):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=there if folder == Path("/proc") else 5_000_000_000))
        return asked(machine(cache_dir="/proc"), "server", "run", "model", "disk")

    roomy = answer(50_000_000_000)
    assert roomy.mark == OK and ", caches" not in roomy.found
    full = answer(1_000_000)
    assert full.mark == NOTE and full.found.endswith("/proc has 1 MB free, and the caches take up to 21.5 GB") and "--cache_gib" in full.fix


def test_what_the_preflight_says_of_the_disk_is_what_the_trainer_will_say(machine, monkeypatch, tiny_model, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000))
    (tmp_path / "checkpoint-000001").mkdir()
    here = machine(output_dir=str(tmp_path), use_ema=True, checkpoints_total_limit=4, cache_gib=0.0)
    found = asked(here, "server", "run", "model", "disk").found
    needed = needed_bytes(_fp32_bytes(tiny_model), checkpoints=4, there=1, average=True, swarming=True)
    with pytest.raises(UserError) as refused:
        check_space(tmp_path, needed)
    assert found == refused.value.message


def test_a_memory_that_is_too_small_for_the_model_or_for_averaging(machine, monkeypatch):
    monkeypatch.setattr("peer.sync.engine.memory.available_bytes", lambda: 1000)
    fails("memory", asked(machine(), "server", "run", "model", "memory"), ExitCode.MEMORY, "The model alone")
    monkeypatch.setattr("peer.sync.engine.memory.available_bytes", lambda: 10e6)
    fails("memory", asked(machine(), "server", "run", "model", "memory"), ExitCode.MEMORY, "Averaging needs")


def test_a_model_takes_what_is_held_of_it_and_none_of_the_hosts_memory_on_a_gpu(machine, monkeypatch, tiny_model):
    def held(method, **options):
        here = machine(**options)
        asked(here, "server", "run", "model")
        here.joined = dataclasses.replace(here.joined, run=dataclasses.replace(here.run(), method=method))
        return here._held_bytes() / _fp32_bytes(tiny_model)

    assert held("full", mixed_precision="no") == pytest.approx(1, abs=0.01)
    assert 0.5 < held("lora", mixed_precision="bf16") < 0.7 < held("full", mixed_precision="bf16") <= 1
    assert held("lora", mixed_precision="bf16", base_precision="int8") < held("lora", mixed_precision="bf16")
    monkeypatch.setattr("peer.machine.device.choose_device", lambda *_: torch.device("cuda"))
    assert held("lora") == 0


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_step_is_measured_with_the_weights_that_are_trained(machine, weights, dtype):
    ready = machine(weights=weights)
    told = asked(ready, "server", "run", "model", "memory")
    assert told.mark == OK and {parameter.dtype for parameter in ready.learner.params.values()} == {dtype}


def test_a_gpu_whose_memory_is_too_small_is_told_before_the_model_is_loaded(machine, monkeypatch):
    monkeypatch.setattr("peer.machine.device.choose_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr("peer.launch.fitted.counted", lambda *_: Fit({"offload": True, "gradient_checkpointing": True}, 9.2e9, 14e9, 11.4e9))
    told = asked(machine(), "server", "run", "model", "memory")
    fails("memory", told, ExitCode.MEMORY, "14.0 GB of the GPU's memory", "Add --offload --gradient_checkpointing")


def test_a_model_of_which_there_is_only_a_variant_is_as_large_as_any(machine, monkeypatch, tiny_model, tmp_path):
    monkeypatch.setattr("peer.sync.engine.memory.available_bytes", lambda: 1000)
    variant = shutil.copytree(tiny_model, tmp_path / "variant")
    for file in list(variant.glob("*/*.safetensors")):
        file.rename(file.with_suffix(".fp16.safetensors"))
    (variant / "safety_checker").mkdir()
    shutil.copy(next(variant.glob("vae/*.safetensors")), variant / "safety_checker" / "model.safetensors")
    told = [asked(machine({"model": str(model)}), "server", "run", "model", "memory").found for model in (tiny_model, variant)]
    assert told[0] == told[1] and "1.1 MB" in told[0]


def test_a_step_that_hangs_or_does_not_fit_or_breaks(machine):
    ready = machine()
    asked(ready, "server", "run", "model", "memory")
    never = threading.Event()

    def tried(step, deadline=60.0):
        here = (ready.learner, ready.run(), ready.peer, deadline, lambda text: said.append(text))
        return ask(Item("speed", lambda: str(measure_step(*here, step=step))))

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    said = []
    fails("speed", tried(lambda *_: never.wait(), 1.0), ExitCode.FAILED, "too slow")
    assert said and "of at most 1 s" in said[0]
    never.set()
    fails("speed", tried(out_of_memory), ExitCode.MEMORY, "A step of 1 picture does not", "cheapest first: add --gradient_checkp")
    fails("speed", tried(lambda *_: 1 / 0), ExitCode.FAILED, "ZeroDivisionError")


@pytest.mark.parametrize(
    ("options", "run", "device", "advised"),
    [
        ({"train_batch_size": 2}, {}, "cuda", "batch accumulation offload checkpointing weights"),
        ({"train_batch_size": 2, "fused_step": True}, {}, "cuda", "batch offload checkpointing weights"),
        ({}, {"method": "lora"}, "cpu", "base checkpointing weights"),
        ({"gradient_checkpointing": True}, {"optimizer": "prodigy"}, "cuda", "offload"),
        ({"gradient_checkpointing": True}, {"method": "lora", "family": "flux"}, "cuda", "offload base swap weights"),
        ({"gradient_checkpointing": True}, {"clip_grad": "tensor"}, "cuda", "fused offload weights"),
        ({"gradient_checkpointing": True, "blocks_to_swap": 4, "weights": "bf16"}, {"method": "lora", "family": "flux"}, "cuda", "offload base"),
        ({"gradient_checkpointing": True, "offload": True, "base_precision": "nf4"}, {"method": "lora"}, "cuda", "weights"),
        ({"gradient_checkpointing": True, "weights": "bf16"}, {}, "cpu", ""),
    ],
)
def test_what_is_advised_where_a_step_does_not_fit_is_what_is_left_to_do(options, run, device, advised, monkeypatch):
    on_gpu = Precision(torch.device(device), torch.bfloat16, False, "")  # where none is, its number format is what it would have
    monkeypatch.setattr("peer.loop.fused.precision_of", lambda *_: on_gpu)
    fix = _readable(MemoryError(), RunConfig(**run), PeerConfig(**options), torch.device(device)).fix
    words = {
        "fused": "--fused_step", "batch": "--train_batch_size", "accumulation": "--gradient_accumulation_steps", "checkpointing": "--gradient_checkpointing",
        "offload": "--offload", "swap": "--blocks_to_swap", "base": "--base_precision", "weights": "--weights",
    }  # fmt: skip
    places = [fix.index(words[name]) for name in advised.split()]
    assert places == sorted(places) and fix.count("--") == len(places)
    assert advised or fix == "End other programs that use this memory, or use a device with more of it."


def test_ctrl_c_while_a_step_is_measured_leaves_it_behind(monkeypatch, capsys, tmp_path):
    class Measuring(Machine):
        def items(self):
            self.step_left_behind = True
            raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(command, "Machine", Measuring)
    monkeypatch.setattr(command.os, "_exit", ended.append)
    main([f"--check={NOBODY}", "--output_dir", str(tmp_path)])
    assert ended == [STOPPED_AT_ONCE] and capsys.readouterr().err == "stopped.\n"


def test_a_step_for_which_the_disk_is_too_full_says_so():
    error = _readable(OSError(errno.ENOSPC, "No space left on device"), RunConfig(), PeerConfig(), torch.device("cpu"))
    assert error.code == ExitCode.DISK and str(error) == "No space left on device. Free some space, then start again."


def test_a_step_is_measured_with_the_gradients_that_a_fused_one_holds():
    kept = []

    def step(learner, peer, batch):
        weight = learner.params["weight"]
        (weight * 2).sum().backward()
        kept.append(weight.grad is not None)

    for fused in (False, True):
        measure_step(held(nn.Parameter(torch.ones(3))), RunConfig(), PeerConfig(fused_step=fused), 60.0, print, step=step)
    assert kept == [True] * 3 + [False] * 3


def held(weight, ahead=None):
    return SimpleNamespace(params={"weight": weight}, precision=SimpleNamespace(device=torch.device("cpu"), reason="no"), ahead=ahead)


def test_where_parts_take_turns_what_is_measured_is_a_step_and_not_the_turns():
    told = []

    def ahead(batches):
        told.append("a window")
        return [dataclasses.replace(batch, pixels=None) for batch in batches]

    def step(learner, peer, batch):
        told.append("a step" if batch.pixels is None else "turns")

    measure_step(held(nn.Parameter(torch.ones(1)), ahead), RunConfig(resolution=16), PeerConfig(offload=True), 60.0, print, step=step)
    assert told == ["a window", *["a step"] * 3]


def test_a_link_that_carries_nothing_and_a_swarm_that_nobody_answers_in(machine):
    here = machine()
    asked(here, "server", "run")
    here.joined = dataclasses.replace(here.joined, server_url="", initial_peers=(NOBODY,))
    here.answer = None
    fails("link", asked(here, "link"), ExitCode.NETWORK, "to no peer")
    fails("DHT", asked(here, "DHT"), ExitCode.NETWORK, "None of the 1 known peers answers")


def test_a_clock_that_is_wrong(machine, monkeypatch):
    monkeypatch.setattr("peer.data.client.probing.distance", lambda url, token: Distance(0.02, 95.0))
    fails("clock", asked(machine(), "server", "run", "clock"), ExitCode.CLOCK, "95.0 s behind", "NTP")


def test_the_first_failure_decides_the_exit_code_and_all_is_asked():
    def broken():
        raise UserError("no disk", fix="buy one", code=ExitCode.DISK)

    def unasked():
        raise NotAsked("no memory")

    items = [
        Item("a", lambda: "fine"),
        Item("b", broken),
        Item("c", unasked),
        Item("d", lambda: Answer("slow", "wait", FAIL, ExitCode.FAILED)),
    ]
    out = io.StringIO()
    assert run([*items, Item("e", lambda: 1 / 0)], out, clock=lambda: 0.0) == ExitCode.DISK
    text = out.getvalue().splitlines()
    assert [line.split()[0] for line in text[:-1]] == [OK, FAIL, "->", SKIP, FAIL, "->", FAIL, "->"]
    assert "cannot take part yet: b, d, e" in text[-1]


def test_a_machine_that_can_take_part_is_told_so_and_nothing_is_left_behind(tmp_path, tiny_model, capfd):
    host = Host(tmp_path / "host", *RUN, "--model", str(tiny_model), "--dht", samples=8).start()
    try:
        out = tmp_path / "out"
        flags = ["--output_dir", str(out), "--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--cache_gib", "0.001", "--device", "cpu"]
        assert main(["--check", host.url, *flags]) == 0, capfd.readouterr()
        text = capfd.readouterr().out.splitlines()
        assert [line.split()[1] for line in text[:10]] == [
            "server",
            "token",
            "run",
            "model",
            "disk",
            "memory",
            "speed",
            "link",
            "DHT",
            "clock",
        ]
        assert all(line.startswith(OK) for line in text[:10]) and "this machine can take part; join with --datasetserver" in text[-1]
        assert (
            "samples/s on cpu" in text[6]
            and " for a step of 1 picture at " in text[6]
            and re.search(r" (1 thread|[2-9]\d* threads|1\d+ threads), mixed_precision ", text[6])
            and re.search(r" [1-9][\d,]* parameters are trained", text[5])
            and "from the server" in text[7]
            and "joined" in text[8]
        )
        assert not out.exists()
        with urllib.request.urlopen(host.url + "/v1/progress", timeout=20) as response:
            assert json.loads(response.read())["ledger"] == {"available": 0, "leased": 0, "pending": 0, "counted": 0}
    finally:
        host.stop()


def test_a_server_that_has_not_the_shard_that_it_names_is_said_in_the_link(machine, monkeypatch):
    def refused(*_, **__):
        raise Refusal(404, ErrorBody(code="no_such_shard", message="This dataset has no such shard.", fix="See its manifest."))

    monkeypatch.setattr("peer.data.client.probing.download", refused)
    asking = machine()
    asking.answer = SimpleNamespace(manifest="0" * 64)
    assert asking._from_server() == "the server gave nothing: This dataset has no such shard. See its manifest." and not asking.rates


def test_a_check_of_nothing_is_a_mistake(capsys):
    assert main(["--check"]) == ExitCode.CONFIG and "--check URL" in capsys.readouterr().err
    assert main(["--check=http://127.0.0.1:9", "--resoluton", "3"]) == ExitCode.CONFIG


@pytest.mark.parametrize(("program", "flags"), [(supervisor, ["--config", "run.toml"]), (trainer, ["--config", "run.toml"]), (trainer, ["--check", NOBODY])])
def test_a_check_that_would_be_ignored_is_refused_and_nothing_is_trained(program, flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(f'check = "{NOBODY}"\nmodel = "m"\n')
    assert run_program(lambda: program([*flags, "--output_dir", "out"])) == ExitCode.CONFIG
    assert f"is a command of dd-peer's command line. Start dd-peer --check {NOBODY}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_server_is_asked_of_its_peers(tmp_path):
    here = Machine(PeerConfig(peers=(NOBODY,)), {}, tmp_path, join_seconds=0.5)
    here.joined = Joined(RunConfig(model="m"), "", (NOBODY,))
    assert [asked(here, name).mark for name in ("server", "token", "clock")] == [SKIP] * 3
