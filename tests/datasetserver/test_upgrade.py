"""A host whose program is replaced by a newer one in the middle of a run goes on serving that run."""

import dataclasses
import json
import sqlite3

import pytest

from datasetserver import founding, ledger
from datasetserver.founding import run_to_serve
from datasetserver.ledger import Ledger, stored_run
from scripts.demo.stand_in import write_model
from swarm.digest import digest_json, digest_model
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from swarm.signing import HostKey, check_signature
from tests.datasetserver.hosting import write_dataset
from tests.datasetserver.test_program import complaint
from tests.swarm.test_run_identity import NEWER_VERSION, Newer, newer_program


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def upgraded(monkeypatch):
    """From now on the host's program is the newer one."""
    with newer_program():
        monkeypatch.setattr(founding, "RunConfig", Newer)
        monkeypatch.setattr(ledger, "RunConfig", Newer)
        yield


def begin(path, run: RunConfig) -> None:
    Ledger(path, run=run, make_book=lambda db: None).close()


def founded(model, **values) -> tuple[RunConfig, RunConfig]:
    """The same run as this program founds it, and as one from before rule 2 did."""
    run = dataclasses.replace(run_to_serve({"model": str(model), **values}, None), dataset_digest="d" * 64)
    return run, RunConfig.from_mapping(dataclasses.asdict(run), where="here")


SAID = {"method": "lora", "total_samples": 9000, "learning_rate": 1e-3}


@pytest.mark.parametrize("rule", [2, 1])
def test_the_stored_run_is_served_byte_for_byte_with_its_id_and_signature(tmp_path, model, rule, request):
    run = founded(model, **SAID)[rule == 1]
    begin(tmp_path / "ledger.sqlite", run)
    before, key = json.dumps(run.to_mapping()), HostKey(tmp_path / "host.key")
    signature = key.sign("run", digest_json(json.loads(before)))
    request.getfixturevalue("upgraded")
    for values in ({}, {"model": str(model), **SAID}, {"model": str(model)}, {"total_samples": 9000}):
        served = run_to_serve(values, stored_run(tmp_path / "ledger.sqlite"))
        assert served.digest == run.digest and json.dumps(served.to_mapping()) == before, values
        check_signature("run", digest_json(served.to_mapping()), signature, key.public)
        begin(tmp_path / "ledger.sqlite", served)
    assert served.rank == 4, "the default that the run was founded with"


@pytest.mark.parametrize("rule", [2, 1])
def test_what_the_host_now_says_otherwise_is_named(tmp_path, model, rule, request):
    run = founded(model, method="lora", rank=16)[rule == 1]
    begin(tmp_path / "ledger.sqlite", run)
    request.getfixturevalue("upgraded")
    for said, message in [
        ({"sparkle": 0.25}, "sparkle was 0.5, now 0.25"),
        ({"rank": 8, "seed": 7}, "rank was 16, now 8; seed was 42, now 7"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            run_to_serve({"model": str(model), "method": "lora", **said}, stored_run(tmp_path / "ledger.sqlite"))
        assert f"({run.run_id}) has begun here with other options" in str(caught.value) and caught.value.code == ExitCode.CONFIG


def test_other_weights_at_the_same_place_are_another_run(tmp_path, model):
    begin(tmp_path / "ledger.sqlite", dataclasses.replace(founded(model)[0], model_digest="0" * 64))
    with pytest.raises(UserError, match=f"the model's weights had the digest 00000000, now {digest_model(model)[:8]}"):
        run_to_serve({"model": str(model)}, stored_run(tmp_path / "ledger.sqlite"))


def test_the_same_options_under_another_id_never_take_over_a_ledger(tmp_path, model):
    new, old = founded(model)
    begin(tmp_path / "ledger.sqlite", old)
    with pytest.raises(UserError, match=f"is of the run {old.run_id}, not {new.run_id}"):
        begin(tmp_path / "ledger.sqlite", new)


def test_a_host_that_goes_back_to_an_older_program_hears_which_version_the_run_needs(tmp_path, model):
    with newer_program():
        begin(tmp_path / "ledger.sqlite", Newer(model=str(model), sparkle=0.25))
    with pytest.raises(UserError, match=f"the run needs version {NEWER_VERSION} of this program") as caught:
        stored_run(tmp_path / "ledger.sqlite")
    assert caught.value.code == ExitCode.CONFIG
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT value FROM meta WHERE key = 'run_config'").fetchall()
    assert json.loads(rows[0][0])["needs_version"] == NEWER_VERSION


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "lorra"], "method is 'lorra'. Did you mean 'lora'?"),
        (["--sync", "dilocco"], "sync is 'dilocco'. Did you mean 'diloco'?"),
        (["--family", "sdlx"], "family is 'sdlx'. Did you mean 'sdxl'?"),
        (["--lr_scheduler", "cosin"], "lr_scheduler is 'cosin'. Did you mean 'cosine'?"),
        (["--lr_scheduler", "cosine"], "lr_scheduler 'cosine' must know where the run ends."),
        (["--guidance_scale", "2"], "guidance_scale is 2.0, but stable_diffusion has no such thing."),
    ],
)
def test_what_no_peer_could_train_is_one_line_before_anything_is_signed(tmp_path, model, capsys, flags, message):
    data = write_dataset(tmp_path / "data", 2)
    code, line = complaint(capsys, "--dataset", str(data), "--model", str(model), "--port", "0", "--no_dht", *flags)
    assert code == ExitCode.CONFIG and message in line
    assert [path.name for path in (tmp_path / "data.datasetserver").iterdir()] == ["lock"]
