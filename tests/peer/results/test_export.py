"""`dd-export` on a tiny model and a state as an assisting peer keeps it."""

import dataclasses
import json
import shutil
import signal
import socket

import pytest
import torch
from safetensors.torch import load_file

from peer import export
from peer.contracts import Member
from peer.launch.starting_model import load_model
from peer.loop.ema import Ema
from peer.methods import full, textual_inversion
from peer.models import stable_diffusion
from peer.results.checkpoint import Checkpoints
from peer.sync.diloco import strategy
from peer.sync.engine.state import first_state, next_state
from peer.sync.engine.transfer.archive import Archive
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.vectors import Schema, flatten
from swarm.digest import digest_model
from swarm.errors import STOPPED_AT_ONCE, ExitCode, UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.conftest import ROOT
from tests.warm import Warm

CPU = torch.device("cpu")


@pytest.fixture
def helper(tmp_path, tiny_model):
    """The folder of an assisting peer with two final states; the newest adds 0.25 to all parameters of the model."""
    run = RunConfig(model=str(tiny_model), sync="diloco", model_digest=digest_model(tiny_model), target_batch_size=8)
    params = full.build(run).attach(stable_diffusion.load(tiny_model, CPU, RunConfig()))
    schema = Schema.of(params)
    vector = flatten(params, torch.empty(schema.size))
    folder = tmp_path / "helper"
    store = StateStore(folder / "state")
    archive = Archive(folder / "settled", store, 0)
    state = first_state(run.digest, schema.digest, vector, strategy(run).slots)
    for number, change in ((1, 9.0), (2, 0.25)):
        state = next_state(state, [[vector + change, torch.zeros(schema.size)]], [Member("a", number, 8)])
        store.save(state)
        archive.keep([state.header.committed_round(state.digest)])
    (folder / "run.json").write_text(json.dumps({"run": run.to_mapping(), "server_url": "", "peers": []}))
    return folder


def test_the_newest_kept_state_becomes_a_diffusers_folder(helper, tmp_path, tiny_model, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dd-export", "--state", str(helper), "--out", str(tmp_path / "out" / "model")])
    assert export.cli() == ExitCode.OK
    assert "exported round=2 samples=16" in capsys.readouterr().err
    base, result = (stable_diffusion.load(folder, CPU, RunConfig()).parts for folder in (tiny_model, tmp_path / "out" / "model"))
    trained = result["unet"].state_dict()
    for name, tensor in base["unet"].state_dict().items():
        assert torch.equal(trained[name].float(), tensor.float() + 0.25)
    for part in base.keys() - {"unet"}:
        assert all(torch.equal(result[part].state_dict()[name], tensor) for name, tensor in base[part].state_dict().items())


def test_any_kept_state_can_be_named_and_the_model_may_lie_elsewhere(helper, tmp_path, tiny_model):
    first = sorted((helper / "settled").iterdir())[0]
    shutil.copytree(tiny_model, tmp_path / "elsewhere")
    export.main(["--state", str(first), "--out", str(tmp_path / "out"), "--model", str(tmp_path / "elsewhere")])
    name, base = next(iter(stable_diffusion.load(tiny_model, CPU, RunConfig()).parts["unet"].named_parameters()))
    assert torch.equal(dict(stable_diffusion.load(tmp_path / "out", CPU, RunConfig()).parts["unet"].named_parameters())[name], base + 9.0)


def damage(helper, tmp_path):
    path = sorted((helper / "settled").iterdir())[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def of_another_run(helper, tmp_path):
    saved = json.loads((helper / "run.json").read_text())
    saved["run"]["values"]["seed"] = 5
    (helper / "run.json").write_text(json.dumps(saved))


def of_another_model(helper, tmp_path):
    saved = json.loads((helper / "run.json").read_text())
    saved["run"]["values"]["model"] = str(tiny.write_model(tmp_path / "other", seed=1))
    (helper / "run.json").write_text(json.dumps(saved))


WRONG = {
    "a bit has flipped": damage,
    "it is of another run": of_another_run,
    "is not the base model of the run": of_another_model,
    "There is no final state in": lambda helper, tmp_path: shutil.rmtree(helper / "settled"),
    "does not exist": lambda helper, tmp_path: shutil.rmtree(helper),
    "which describes the state's run, is missing or damaged": lambda helper, tmp_path: (helper / "run.json").write_text("{"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_cannot_be_exported_is_one_line_and_leaves_no_folder(helper, tmp_path, monkeypatch, capsys, reason):
    WRONG[reason](helper, tmp_path)
    monkeypatch.setattr("sys.argv", ["dd-export", "--state", str(helper), "--out", str(tmp_path / "out")])
    assert export.cli() != ExitCode.OK
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and reason in errors[0] and not (tmp_path / "out").exists()


@pytest.fixture
def trained(tmp_path, tiny_model):
    """The --output_dir of a peer that learned a word, with two checkpoints; and the word's newest vector."""
    run = RunConfig(model=str(tiny_model), placeholder_token="<dicoo>", initializer_token="a")
    params = textual_inversion.build(run).attach(load_model(run, {}, CPU))
    folder = tmp_path / "trained"
    checkpoints = Checkpoints(folder, keep=2)
    (vectors,) = params.values()
    for number in (1, 2):
        vectors.data += number
        checkpoints.save({"params": {name: p.detach() for name, p in params.items()}}, {"round": number, "samples": 8 * number})
    (folder / "run.json").write_text(json.dumps({"run": run.to_mapping(), "server_url": "", "peers": []}))
    return folder, vectors.detach()


def test_a_checkpoint_is_exported_the_newest_the_one_named_and_for_a_damaged_one_the_one_before(trained, tmp_path, capsys, monkeypatch):
    folder, vectors = trained
    monkeypatch.chdir(folder / "checkpoint-000001")
    for which, expected in (
        (folder, vectors),
        (folder / "checkpoint-000001", vectors - 2),
        (".", vectors - 2),
        (folder / "checkpoint-000002", vectors),
    ):
        export.main(["--state", str(which), "--format", "embedding", "--out", str(tmp_path / "word.safetensors")])
        assert torch.allclose(load_file(tmp_path / "word.safetensors")["<dicoo>"], expected)
    (folder / "checkpoint-000002" / "tensors.safetensors").write_bytes(b"")
    export.main(["--checkpoint", str(folder), "--format", "embedding", "--out", str(tmp_path / "word.safetensors")])
    assert torch.allclose(load_file(tmp_path / "word.safetensors")["<dicoo>"], vectors - 2)
    assert "exported round=1 samples=8" in capsys.readouterr().err
    assert not list(tmp_path.glob(".exporting-*"))


def test_where_all_checkpoints_are_damaged_the_way_out_is_one_that_dd_export_has(trained, tmp_path):
    for path in trained[0].glob("checkpoint-*"):
        (path / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"No checkpoint in .* is whole\. Give a result or a final state with --state\.$"):
        export.main(["--state", str(trained[0]), "--out", str(tmp_path / "out")])


def test_of_a_run_with_a_moving_average_that_is_exported(trained, tmp_path):
    folder, vectors = trained
    params = {"text_encoder.learned_embeds": torch.nn.Parameter(vectors.clone())}
    average = Ema(params, 0.5)
    average.follow(1)
    params["text_encoder.learned_embeds"].data += 4
    state = {"params": {name: p.detach() for name, p in params.items()}, "average": average.state_dict()}
    Checkpoints(folder, keep=3).save(state, {"round": 3, "samples": 24})
    export.main(["--state", str(folder), "--format", "embedding", "--out", str(tmp_path / "word.safetensors")])
    assert torch.equal(load_file(tmp_path / "word.safetensors")["<dicoo>"], vectors)


def test_a_checkpoint_is_exported_under_the_options_that_made_it_not_those_of_a_later_start(trained, tmp_path):
    folder, vectors = trained
    said = json.loads((folder / "run.json").read_text())
    state = {"params": {"text_encoder.learned_embeds": vectors}}
    Checkpoints(folder, keep=3, options=said["run"]).save(state, {"round": 3, "samples": 24})
    later = dataclasses.replace(RunConfig.from_mapping(said["run"], where=""), placeholder_token="<later>")
    (folder / "run.json").write_text(json.dumps({**said, "run": later.to_mapping()}))
    export.main(["--state", str(folder), "--format", "embedding", "--out", str(tmp_path / "word.safetensors")])
    assert load_file(tmp_path / "word.safetensors").keys() == {"<dicoo>"}


def test_an_output_dirs_result_goes_before_its_checkpoints(trained, tmp_path):
    folder, _ = trained
    export.main(["--state", str(folder), "--out", str(folder / "model")])
    assert (folder / "model" / "model_index.json").is_file()
    export.main(["--state", str(folder), "--out", str(tmp_path / "again")])
    with pytest.raises(UserError, match="is not an embedding"):
        export.main(["--state", str(folder), "--format", "embedding", "--out", str(tmp_path / "word")])


BACKGROUND = "import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); runpy.run_module('peer.export', run_name='__main__')"
"""As a script's shell starts a job with `&`: SIGINT is ignored."""


@pytest.mark.parametrize(
    ("started_by", "number"),
    [(("-m", "peer.export"), signal.SIGTERM), (("-m", "peer.export"), signal.SIGINT), (("-c", BACKGROUND), signal.SIGTERM)],
)
def test_an_export_that_is_stopped_while_it_fetches_leaves_nothing(tmp_path, started_by, number):
    out, log = tmp_path / "out", tmp_path / "log"
    out.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:  # that takes the question, and does not answer
        server.settimeout(200)
        process = Warm([*started_by, f"http://127.0.0.1:{server.getsockname()[1]}", "--out", str(out / "model")], ROOT, log)
        try:
            question, _ = server.accept()
            assert [path.name.startswith(".fetching-") for path in out.iterdir()] == [True]
            process.send_signal(number)
            assert process.wait(200) == STOPPED_AT_ONCE and log.read_text().endswith("stopped.\n")
            question.close()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(100)
    assert not list(out.iterdir())
