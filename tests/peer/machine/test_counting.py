"""What training takes of a device is counted without one, as what real steps take."""

import pytest
import torch

from benchmarks.cards import ROWS, SPARE
from benchmarks.device_memory import batch_of, check_tiny, count, count_encoding, measured, prepared, text_bytes, vae_bytes
from peer.machine.counting import Live, bytes_of
from swarm.run.optimizer import OPTIMIZERS

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(("family", "method", "dtype"), [("sd", "full", None), ("z_image", "lora", None), ("flux", "lora", BF16)])
def test_a_step_takes_what_was_counted(family, method, dtype):
    assert check_tiny(family, method, dtype) == pytest.approx(1, abs=0.1)


def test_a_fused_step_takes_what_was_counted():
    assert check_tiny("sd", "full", None, fused=True) == pytest.approx(1, abs=0.15)  # of a fifth of the bytes


def counted(on_gpu=False, batch=1, optimizer="adamw", dtype=None, **step):
    model, params = prepared("sd", "full", CPU, dtype)
    told = batch_of((4, 8, 8), {"states": (77, 16)}, batch, CPU)
    held = {name: sum(bytes_of(part).values()) for name, part in model.parts.items()}
    need = count(model, params, told, OPTIMIZERS[optimizer], dtype=dtype, on_gpu=on_gpu, **step)
    return need, held, params


def test_weights_and_states_are_counted_to_the_byte():
    need, held, params = counted()
    numbers = sum(parameter.numel() for parameter in params.values())
    assert need.trained == 4 * numbers and need.optimizer == 8 * numbers
    assert sum(need.parts.values()) + need.trained == sum(held.values())
    assert need.total == sum(held.values()) + need.optimizer + need.step


@pytest.mark.parametrize("family", ["sd", "klein", "z_image"])
def test_encoding_a_picture_takes_what_was_counted(family):
    model, _ = prepared(family, "lora", CPU, None)
    pixels = torch.zeros(2, 3, 64, 64)
    model.encode_pixels(pixels)
    most = measured(lambda: model.encode_pixels(pixels)) + pixels.nbytes
    assert count_encoding(model, pixels, on_gpu=False) == pytest.approx(most, rel=0.1)


def test_the_vae_of_a_size_is_counted_with_its_weights_and_the_pictures_of_a_batch():
    (weights, one), (same, two) = vae_bytes("SD 1.5, 512 px", 1), vae_bytes("SD 1.5, 512 px", 2)
    assert weights == same == pytest.approx(4 * 83.7e6, rel=0.01) and two == pytest.approx(2 * one, rel=0.01)


def test_more_pictures_accumulation_and_norms_on_a_gpu_take_more_and_a_fused_step_takes_less():
    need, _, params = counted(dtype=BF16)
    one, gradients = need.step, sum(parameter.nbytes for parameter in params.values())
    # Autocast's copies of the weights, half as large as the gradients, are there in both.
    assert 0.4 * gradients < one - counted(dtype=BF16, fused=True)[0].step < gradients
    assert one < counted(dtype=BF16, batch=2)[0].step
    assert one < counted(dtype=BF16, micro_batches=2)[0].step  # the first one's gradients are there
    assert one < counted(dtype=BF16, on_gpu=True)[0].step


def test_what_nobody_refers_to_is_gone_and_views_are_nothing_new():
    with Live() as live:
        one = torch.zeros(1000)
        one.view(10, 100).t()
        assert live.now == live.peak == 4000
        del one
        assert (live.now, live.peak) == (0, 4000)


def test_every_row_has_a_name_of_its_own():
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_text_encoders_whose_turn_does_not_fit_beside_a_denoiser_that_does_are_counted():
    """2 bytes of each parameter, and 4 of the embeddings', which autocast does not cast."""
    assert text_bytes("FLUX.2 klein 4B") == pytest.approx(2 * 4.02e9 + 2 * 151936 * 2560, rel=0.01)
    too_large = [(size, card) for size, card in {(row.size, row.card) for row in ROWS} if text_bytes(size) / 1e9 > card - SPARE]
    assert sorted(too_large) == [("FLUX.1", 8), ("FLUX.2 klein 4B", 8), ("FLUX.2 klein 9B", 12), ("Qwen-Image", 16)]
