"""In the place of `tiny_model` and `tiny_family`, for tests whose subject is not the UNet: one of three layers, whose step takes a third of the other's."""

import functools

import pytest
import torch

from tests import tiny

_ONE_LEVEL = {
    "block_out_channels": (32,), "down_block_types": ("CrossAttnDownBlock2D",), "mid_block_type": None, "up_block_types": ("UpBlock2D",),
    "attention_head_dim": 4, "transformer_layers_per_block": 1,
}  # fmt: skip


def with_one_level(pipeline, **options):
    """The pipeline, whose UNet, if it has one, is now of one level, which reads captions; options: other ones of the UNet.

    Its matrices are wide enough for an optimizer of 8 bits, which keeps those of less than 4,096 numbers in 32.
    """
    if hasattr(pipeline, "unet"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pipeline.register_modules(unet=type(pipeline.unet).from_config({**pipeline.unet.config, **_ONE_LEVEL, **options}))
    return pipeline


def pipeline():
    """A Stable Diffusion with such a UNet."""
    return with_one_level(tiny.build_pipeline())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A diffusers folder of `pipeline`; shared, so do not change it."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shallow_family(tmp_path_factory):
    """`shallow_family("sdxl")`: as `tiny_family`, whose UNets have one level."""

    def write(family):
        folder = tmp_path_factory.mktemp(family) / "shallow"
        with_one_level(tiny.build(family)).save_pretrained(folder)
        return folder

    return functools.cache(write)
