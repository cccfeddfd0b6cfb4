"""Where `dd-export` writes: only an earlier export is replaced, never what it is made from; a disk that does not take it is one line."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from peer import export
from peer.results import destination, exporting
from peer.results.loading import LORA
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig


@pytest.fixture
def lora(tmp_path):
    """The --output_dir of a peer that trained a LoRA, as far as a refused export looks at it."""
    folder = tmp_path / "my-lora" / "model"
    folder.mkdir(parents=True)
    save_file({"unet.a.lora_A.weight": torch.ones(1, 1)}, folder / LORA)
    about = {"run": RunConfig(model=str(pipeline(tmp_path / "base")), method="lora").to_mapping(), "samples": 1, "round": 1, "dataset": ""}
    (folder / "result.json").write_text(json.dumps(about))
    return folder.parent


def pipeline(folder, *more):
    """A diffusers folder, as an export leaves one; more: what else is in it."""
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet"]}))
    for name in more:
        (folder / name).write_text("mine")
    return folder


def models(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.safetensors").write_bytes(b"mine")


REPLACED = {
    "a folder of models": (models, "models", "not an earlier export"),
    "a pipeline with more in it": (lambda tmp_path: pipeline(tmp_path / "full", "result.json"), "full", "not an earlier export"),
    "a file": (lambda tmp_path: (tmp_path / "notes.txt").write_text("mine"), "notes.txt", "not an earlier export"),
    "the LoRA itself": (None, "my-lora/model", "not an earlier export"),
    "what holds the LoRA": (None, "my-lora", "not an earlier export"),
    "the model that it was trained from": (None, "base", "which it is made from"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_an_export_replaces_nothing_but_an_earlier_one(lora, tmp_path, what):
    make, out, reason = REPLACED[what]
    if make:
        make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"{reason}.*Choose another --out"):
        export.main(["--state", str(lora), "--out", str(tmp_path / out)])
    assert sorted(tmp_path.rglob("*")) == before


def test_the_usual_out_in_the_folder_of_a_training_leaves_its_lora(lora, monkeypatch):
    monkeypatch.chdir(lora)
    with pytest.raises(UserError, match="model is there already, and is not an earlier export"):
        export.main(["--state", "."])
    assert (lora / "model" / LORA).is_file()


@pytest.mark.parametrize("option", ["--state", "--model", "--model_config"])
def test_a_pipeline_is_not_replaced_by_what_is_made_from_it(lora, tmp_path, option):
    given = pipeline(tmp_path / "given")
    link = tmp_path / "link"
    link.symlink_to(given)
    for out in (given, link):
        with pytest.raises(UserError, match=f"would replace {given}, which it is made from"):
            export.main(["--state", str(lora), option, str(given), "--out", str(out)])
    assert (given / "model_index.json").is_file() and link.is_symlink()


def test_the_file_of_a_lora_is_not_replaced_by_another_form_of_it(lora, monkeypatch):
    monkeypatch.chdir(lora / "model")
    with pytest.raises(UserError, match="which it is made from"):
        export.main(["--state", ".", "--format", "lora_diffusers", "--dtype", "fp16", "--out", LORA])
    assert load_file(LORA)["unet.a.lora_A.weight"].dtype == torch.float32


def test_an_earlier_export_is_replaced_also_where_a_link_leads_to_it(tiny_model, tmp_path):
    target = pipeline(tmp_path / "disk" / "model")
    (tmp_path / "model").symlink_to(target)
    for out in (tmp_path / "new", tmp_path / "new", tmp_path / "model", tmp_path / "model"):
        export.main(["--state", str(tiny_model), "--out", str(out)])
        assert (out / "vae" / "config.json").is_file()
    assert (tmp_path / "model").is_symlink() and not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("out", [".", "", "..", "/"])
@pytest.mark.parametrize("form", ["diffusers", "lora_kohya"])
def test_an_out_without_a_name_is_one_line(lora, monkeypatch, out, form):
    monkeypatch.chdir(lora)
    with pytest.raises(UserError, match="gives the export no name"):
        export.main(["--state", ".", "--format", form, "--out", out])


def test_a_file_does_not_take_a_folders_place(lora, tmp_path):
    (tmp_path / "mine.safetensors").mkdir()
    with pytest.raises(UserError, match="is a folder, and this format is one file"):
        export.main(["--state", str(lora), "--format", "lora_diffusers", "--out", str(tmp_path / "mine")])


@pytest.fixture
def small_disk():
    """One that takes 2 kB of a file: a soft limit of this process, which Python answers with an error of the system."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("form", ["diffusers", "single_file"])
def test_a_full_disk_is_one_line_with_the_way_out(tiny_model, tmp_path, small_disk, form):
    with pytest.raises(UserError, match=r"one\S* could not be written: File too large\. Free some space, or choose another --out\.$") as refused:
        export.main(["--state", str(tiny_model), "--format", form, "--out", str(tmp_path / "one")])
    assert refused.value.code == ExitCode.DISK and not list(tmp_path.iterdir())


def test_a_full_disk_while_the_result_is_made_says_nothing_of_training(tmp_path):
    said = r"^out could not be written: No space left on device\. Free some space"
    with pytest.raises(UserError, match=said), destination.writing(Path("out")), exporting.replacing(tmp_path / "result"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_line(lora, tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o555)
    with pytest.raises(UserError, match=r"theirs/.*Permission denied\. Check whose it is, or choose another --out\."):
        export.main(["--state", str(lora), "--format", "lora_diffusers", "--out", str(tmp_path / "theirs" / "one")])


def test_a_folder_that_cannot_be_made_is_one_line(lora, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file: .*Check whose it is, or choose another --out\."):
        export.main(["--state", str(lora), "--format", "lora_diffusers", "--out", str(tmp_path / "file" / "one")])


def test_a_file_is_on_the_disk_before_it_has_its_name(lora, tmp_path, monkeypatch):
    flushed, out = [], tmp_path / "one.safetensors"
    monkeypatch.setattr(exporting.files, "flush", lambda path: flushed.append((path.name, out.exists())))
    export.main(["--state", str(lora), "--format", "lora_diffusers", "--out", str(out)])
    assert flushed == [(".one.safetensors.writing", False), (tmp_path.name, True)]
