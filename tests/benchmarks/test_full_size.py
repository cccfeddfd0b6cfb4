"""What the benchmark of full-size models reads off a swarm: its steps' times, and whether two results are one."""

import torch
from safetensors.torch import save_file

from benchmarks import full_size

LOG = """\
2026-11-26 22:07:01Z I peer.figures.metrics: step=1 samples=1 loss=1.079000
2026-11-26 22:07:04Z I peer.figures.metrics: step=2 samples=1 loss=1.080000
2026-11-26 22:07:05Z I peer.sync.engine.round.rounds: round=1 how=averaged
2026-11-26 22:07:14Z I peer.figures.metrics: step=3 samples=0 loss=-
"""


def test_the_time_of_a_step_is_that_between_two_lines_of_steps():
    assert full_size._between_steps(LOG) == [3.0, 10.0]
    assert full_size._between_steps("nothing was trained") == []


def test_two_results_are_equal_only_to_the_bit(tmp_path):
    weight = torch.tensor([1.0, 2.0])
    models = [tmp_path / name for name in ("one", "two", "three", "four")]
    others = (weight, weight.clone(), torch.nextafter(weight, weight + 1), weight)
    for number, (model, tensor) in enumerate(zip(models, others, strict=True)):
        model.mkdir()
        save_file({"other" if number == 3 else "layer": tensor}, model / "pytorch_lora_weights.safetensors")
    assert full_size.same_loras(models[:2]) is True
    assert full_size.same_loras([models[0], models[2]]) is False
    assert full_size.same_loras([models[0], models[3]]) is False
