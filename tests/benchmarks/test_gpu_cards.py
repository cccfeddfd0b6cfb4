"""The cards' rows on a GPU, where there is none: tiny models, one row that trains, and a model's full sizes."""

import argparse
import json

import pytest
import torch

from benchmarks import gpu_cards
from benchmarks.cards import ROWS, Row
from peer.launch.command_line import parse
from swarm.errors import ExitCode, UserError


def options(**given):
    return argparse.Namespace(**{"rows": [], "models": None, "make": False, "tiny": True, "device": "cpu", **given})


def test_a_row_is_trained_by_the_program_with_a_tiny_model_that_is_kept(tmp_path, capsys):
    assert gpu_cards.run(options(rows=["SDXL, full, bf16 weights, adafactor, fused"], models=tmp_path)) == ExitCode.OK
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = result["rows"]
    assert row["images_per_second"] > 0 and row["fits"] and row["card"] == 16 and not row["failed"] and row["counted"] == pytest.approx(10.87, abs=0.01)
    assert (tmp_path / "SDXL" / "model_index.json").is_file() and result["tiny"]


def test_a_row_that_fails_ends_the_benchmark_with_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(gpu_cards, "ROWS", [Row("SDXL", "lora", 12, optimizer="none")])
    assert gpu_cards.run(options(rows=["SDXL"])) == ExitCode.FAILED
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["failed"] and not row["fits"] and "optimizer" in row["note"]


def test_what_cannot_run_says_so_in_one_line():
    with pytest.raises(UserError, match="No row has 'SD 9'"):
        gpu_cards.run(options(rows=["SD 9"]))
    with pytest.raises(UserError, match="--models"):
        gpu_cards.run(options(make=True))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_gives_the_options_that_were_counted(row, tmp_path):
    setup = gpu_cards.Setup(tmp_path, tmp_path, tmp_path, "cuda", tiny=False)
    way = gpu_cards.way(row, tmp_path, tmp_path, setup)
    peer, given = parse(list(way.flags), environ={})
    assert (peer.train_batch_size, peer.offload, peer.fused_step, peer.blocks_to_swap) == (row.batch, row.offload, row.fused, row.swap)
    assert (given["method"], given["optimizer"], peer.base_precision, peer.weights) == (row.method, row.optimizer, row.base, row.weights)
    assert way.cap_gib * 2**30 == pytest.approx((row.card - 1) * 1e9)


def test_a_row_is_held_against_its_count_in_gb():
    row = Row("SDXL", "lora", 12)
    told = gpu_cards.in_table(row, {"images_per_second": 2.0, "peak_gib": 9.0, "reserved_gib": 10.0})
    assert told["fits"] and told["peak"] == pytest.approx(9.664, abs=0.001) and told["ratio"] == pytest.approx(told["peak"] / told["counted"])
    assert not gpu_cards.in_table(row, {"note": "out of memory"})["fits"]


def test_a_model_at_full_size_is_a_pipeline_with_numbers():
    """Its denoiser and encoders are tiny here: what is not, a test cannot hold."""
    tiny_one = gpu_cards.tiny.build("flux")
    small = gpu_cards.Size(
        "flux", lambda: type(tiny_one.transformer).from_config(tiny_one.transformer.config),
        tuple(lambda part=part: type(part)(part.config) for part in (tiny_one.text_encoder, tiny_one.text_encoder_2)), lambda: tiny_one.vae,
    )  # fmt: skip
    pipeline = gpu_cards.with_numbers(small)
    for part in (pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2):
        values = dict(part.named_parameters())
        assert {value.dtype for value in values.values()} == {torch.bfloat16}
        assert all(value.isfinite().all() for value in values.values())
        assert all(0.01 < value.std() < 0.03 for value in values.values() if value.dim() > 1 and value.numel() > 500)
    assert pipeline.tokenizer_2.model_max_length == 512 and pipeline.tokenizer.model_max_length == 77
