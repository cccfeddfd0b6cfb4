"""In the place of `tiny_model`, for tests whose subject is not the UNet: one of three layers, whose step takes a third of the other's."""

import pytest
import torch

from tests import tiny


def pipeline():
    """A Stable Diffusion whose UNet has one level, which reads captions.

    Its matrices are wide enough for an optimizer of 8 bits, which keeps those of less than 4,096 numbers in 32.
    """
    from diffusers import UNet2DConditionModel

    built = tiny.build_pipeline()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            sample_size=8, layers_per_block=1, block_out_channels=(32,), norm_num_groups=8, cross_attention_dim=16, attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D",), mid_block_type=None, up_block_types=("UpBlock2D",),
        )  # fmt: skip
    built.register_modules(unet=unet)
    return built


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A diffusers folder of `pipeline`; shared, so do not change it."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    pipeline().save_pretrained(folder)
    return folder
