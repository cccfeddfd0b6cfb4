"""The count of cards asks each family how large its latents and texts are, and what is checked can be chosen by name."""

import json

import pytest
import torch

from benchmarks import device_memory
from benchmarks.device_memory import SIZES, check_full_size, flowing
from swarm.errors import ExitCode, UserError
from tests import tiny

PUBLISHED = {
    "SDXL": ((4, 128, 128), {"states": (77, 2048), "pooled": (1280,)}),
    "FLUX.1": ((16, 128, 128), {"states": (512, 4096), "pooled": (768,)}),
    "Z-Image": ((16, 128, 128), {"states": (512, 2560), "mask": (512,)}),
}
"""By the models' configs: (C, h, w) of a picture of the size, and a caption of the most tokens. One for each way to read captions; a size takes 5 s."""


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_familys_own_code_makes_of_a_picture_and_a_caption_what_its_models_configs_say(size):
    assert flowing(size) == PUBLISHED[size]


def test_a_smaller_picture_has_smaller_latents():
    assert flowing("SD 1.5, 512 px", 256)[0] == (4, 32, 32)


def test_what_is_checked_is_chosen_by_a_word_and_no_row_is_counted(monkeypatch, capsys):
    monkeypatch.setattr(device_memory, "in_gb", lambda row: pytest.fail("counted"))
    monkeypatch.setattr(device_memory, "check_full_size", lambda size, method, dtype: 1.02)
    device_memory.main(["--check", "sdxl, 256"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["checked"] == {"SDXL, 256 px, lora": 1.02} and told["fits"] == {}
    with pytest.raises(UserError, match="No check has 'sd 9' in its name") as raised:
        device_memory.main(["--check", "sd 9"])
    assert "SD 1.5, 256 px, full" in raised.value.fix


@pytest.fixture(scope="module")
def small():
    """A size of a tiny model, which a test can hold. What flows through it is asked once for all tests."""
    its = tiny.build("sdxl")
    encoders = tuple(lambda part=part: type(part)(part.config) for part in (its.text_encoder, its.text_encoder_2))
    size = device_memory.Size("sdxl", lambda: type(its.unet).from_config(its.unet.config), encoders, lambda: type(its.vae).from_config(its.vae.config), 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "small", size)
        yield "small"
    flowing.cache_clear()


@pytest.mark.parametrize(("method", "dtype"), [("full", None), ("lora", torch.bfloat16)])
def test_a_step_at_full_size_is_made_with_numbers_and_held_against_the_count_without(small, method, dtype):
    assert check_full_size(small, method, dtype, side=16) == pytest.approx(1, abs=0.15)


def test_too_little_memory_for_a_check_is_said_before_any_is_taken(small, monkeypatch):
    monkeypatch.setattr(device_memory, "available_bytes", lambda: 1e9)
    monkeypatch.setattr(device_memory, "filled", lambda *_: pytest.fail("taken"))
    with pytest.raises(UserError, match=r"A step of small, lora, needs 1\.0 GB of memory, and 1\.0 are free") as raised:
        check_full_size(small, "lora", None, side=16)
    assert raised.value.code == ExitCode.MEMORY
