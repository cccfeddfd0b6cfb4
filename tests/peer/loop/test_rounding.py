"""bf16 weights: what is too small for their last bit is not lost, alone or in a swarm."""

import dataclasses

import pytest
import torch
from diffusers import StableDiffusionPipeline

from peer.loop.optim import build_optimizer
from peer.loop.rounding import RoundingOptimizer, innermost, keep_in_bf16, round_stochastically
from peer.machine.device import RankGroup
from peer.sync.engine.vectors import Flat, Schema
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.peer.drawing.test_validation import export
from tests.peer.test_alone import CPU, RUN, assert_learned_alike, flat, start  # noqa: F401


def test_values_are_rounded_to_their_neighbours_with_the_right_mean_and_exact_ones_not_at_all():
    values = torch.tensor([1.0, -3.0, 0.0, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(values, torch.Generator()).float(), values)
    assert round_stochastically(torch.tensor([float("nan")]), torch.Generator()).isnan().all()
    for value in (1 + 2**-9, -(1 + 2**-9), 1e-30 * 1.001):
        rounded = round_stochastically(torch.full((100_000,), value), torch.Generator().manual_seed(0)).double()
        assert len(rounded.unique()) == 2
        assert rounded.mean().item() == pytest.approx(value, rel=5e-5)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor"])
def test_many_updates_below_the_last_bit_add_up_which_they_do_not_in_plain_bf16(kind):
    """300 steps of 1e-4 on weights of 1, whose last bit is worth 78e-4 above and 39e-4 below."""
    run = RunConfig(optimizer=kind, learning_rate=1e-4, adam_weight_decay=0.0)

    def train(rounding):
        params = {"w": torch.nn.Parameter(torch.ones(64, 128))}
        keep_in_bf16(params)
        inner = build_optimizer(run, params, CPU)
        optimizer = RoundingOptimizer(inner, "seed") if rounding else inner
        for _ in range(300):
            params["w"].grad = torch.full((64, 128), 0.01, dtype=torch.bfloat16)
            optimizer.step()
        assert params["w"].dtype is torch.bfloat16
        return params["w"].detach().double()

    assert train(rounding=True).mean().item() == pytest.approx(0.97, abs=2e-3)
    if kind == "adamw":
        assert (train(rounding=False) == 1).all()


def test_training_with_bf16_weights_learns_and_is_repeated_to_the_bit_by_its_seed(start, tmp_path):  # noqa: F811
    run = dataclasses.replace(RUN, total_samples=32)
    draw = {"validation_prompts": ("a red square",), "validation_steps": 5, "validation_inference_steps": 2, "use_ema": True}
    one, two = start("one", run=run, weights="bf16", **draw).run(), start("two", run=run, weights="bf16").run()
    assert one.losses == two.losses and torch.equal(flat(one.trainer.params), flat(two.trainer.params))
    assert {parameter.dtype for parameter in one.trainer.params.values()} == {torch.bfloat16}
    assert {shadow.dtype for shadow in one.trainer.average.state_dict()["average"]["shadow_params"]} == {torch.float32}
    export(one, tmp_path / "result")
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "result", safety_checker=None)
    assert pipeline("a red square", num_inference_steps=1, output_type="np").images.shape == (1, 16, 16, 3)
    full = start("full", run=run, mixed_precision="bf16")
    before = flat(full.trainer.params).clone()
    assert_learned_alike(one, full.run(), before, likeness=0.95)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_stopped_run_with_bf16_weights_goes_on_to_the_bit(start, optimizer):  # noqa: F811
    run = dataclasses.replace(RUN, total_samples=20, optimizer=optimizer)
    whole = start("whole", run=run, weights="bf16").run()
    first = start("parts", run=run, weights="bf16", stop_after=2).run()
    second = start("parts", run=run, weights="bf16", resume_from_checkpoint="latest").run()
    assert first.losses + second.losses == whole.losses
    assert torch.equal(flat(second.trainer.params), flat(whole.trainer.params))


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_stopped_run_goes_on_with_other_weights_and_keeps_its_moments(start, before, after):  # noqa: F811
    """As one does whose GPU was full, after the advice to take bf16."""
    first = start(weights=before, stop_after=2).run().trainer
    second = start(weights=after, stop_after=3, resume_from_checkpoint="latest")
    old, new = (innermost(trainer.optimizer).state_dict()["state"] for trainer in (first, second.trainer))
    assert old.keys() == new.keys() and all(torch.equal(old[one]["exp_avg_sq"], new[one]["exp_avg_sq"]) for one in old)
    assert {moments["exp_avg"].dtype for moments in new.values()} == {torch.float32}
    assert second.run().trainer.step == 3


def test_ranks_on_unlike_devices_are_refused_before_a_model_is_loaded(start, monkeypatch):  # noqa: F811
    monkeypatch.setattr(RankGroup, "gather", lambda group, own: [own, "NVIDIA A40 (84 multiprocessors)"])
    with pytest.raises(UserError, match=r"unlike devices.*NVIDIA A40 \(84 multiprocessors\), cpu"):
        start(weights="bf16", run=dataclasses.replace(RUN, model="/no/such/model"))


def test_what_the_optimizer_does_to_bf16_weights_is_seen_by_whoever_averages_them_and_the_other_way_round():
    params = {"w": torch.nn.Parameter(torch.ones(64, 32))}
    keep_in_bf16(params)
    vector, memory = Flat(params), params["w"].data_ptr()
    optimizer = RoundingOptimizer(build_optimizer(RunConfig(optimizer="adamw", learning_rate=0.1), params, CPU), "seed")
    for _ in range(2):
        params["w"].grad = torch.ones(64, 32, dtype=torch.bfloat16)
        optimizer.step()
        assert torch.equal(vector.read(0, 2048), params["w"].detach().float().flatten()) and params["w"].data_ptr() == memory
        assert (params["w"] < 0.95).all()
        vector.write(0, torch.ones(2048))
        assert (params["w"] == 1).all()


def test_to_the_swarm_bf16_weights_are_float32_ones_and_small_moves_of_its_state_reach_them_in_the_mean():
    params = {"w": torch.nn.Parameter(torch.ones(40_000)), "b": torch.nn.Parameter(torch.ones(8))}
    schema = Schema.of(params).digest
    keep_in_bf16(params)
    assert Schema.of(params).digest == schema
    vector, anchor = Flat(params), torch.ones(40_008)
    for _ in range(50):  # each far below the last bit
        vector.move(0, anchor, anchor + 2e-4)
        anchor = anchor + 2e-4
    assert params["w"].detach().double().mean().item() == pytest.approx(1.01, abs=3e-4)
    vector.write(0, torch.full((40_008,), 1 + 2**-9))
    assert params["w"].detach().double().mean().item() == pytest.approx(1 + 2**-9, abs=1e-4)
