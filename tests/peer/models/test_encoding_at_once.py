"""The VAE encodes no more pixels at once than one large picture has, whatever the batch."""

import pytest
import torch

from benchmarks.device_memory import count_encoding
from peer.models.diffusion import model as diffusion
from swarm.run_config import RunConfig
from tests import tiny


@pytest.fixture
def encoder(monkeypatch):
    """`encoder(family, pictures)`: its model, and how many pictures each call of the VAE had. A call takes `pictures` of 16 px at most."""

    def made(family, most):
        monkeypatch.setattr(diffusion, "_PIXELS_AT_ONCE", most * 16 * 16)
        model, asked = tiny.kind(family)(tiny.build(family), None, RunConfig(**tiny.MODELS[family].run)), []
        encode = model.vae.encode
        monkeypatch.setattr(model.vae, "encode", lambda pixels: asked.append(len(pixels)) or encode(pixels))
        return model, asked

    return made


def pixels(count, side=16):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_a_large_batch_is_what_its_parts_are(encoder, family):
    model, asked = encoder(family, 2)
    encoded = model.encode_pixels(pixels(5))
    assert asked == [2, 2, 1]
    apart = [model.encode_pixels(some) for some in pixels(5).split(2)]
    assert torch.equal(encoded, torch.cat(apart))
    torch.testing.assert_close(encoded, torch.cat([model.encode_pixels(one[None]) for one in pixels(5)]))


def test_a_picture_that_is_larger_than_all_that_goes_at_once_goes_alone_and_small_ones_go_together(encoder):
    model, asked = encoder("sd", 4)
    model.encode_pixels(pixels(2, side=64))
    model.encode_pixels(pixels(4))
    assert asked == [1, 1, 4]


def test_on_xla_a_batch_stays_one(encoder, monkeypatch):
    model, asked = encoder("sd", 1)
    monkeypatch.setattr(model, "device", torch.device("xla"))
    monkeypatch.setattr(diffusion.torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(diffusion.torch, "autocast", lambda kind, enabled: torch.no_grad())
    monkeypatch.setattr(model, "framed", lambda pixels: pixels)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *where: self)
    model.encode_pixels(pixels(3))
    assert asked == [3]


def test_the_count_of_a_batch_is_that_of_what_goes_at_once(encoder):
    model, _ = encoder("sd", 1)
    one, four = (count_encoding(model, pixels(count, side=64)) for count in (1, 4))
    # All four pictures and what is known of them lie there; only one flows.
    assert one < four < 1.5 * one
