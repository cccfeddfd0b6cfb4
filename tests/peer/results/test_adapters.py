"""What adapters other than the usual LoRA leave behind: LoRAs of more layers. Others load them, and draw what was trained."""

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import nn

from peer import export
from peer.results import loading
from swarm.errors import UserError
from tests import tiny
from tests.peer.methods.test_lora_targets import in_blocks
from tests.peer.results.test_results import LORA, Trained, layers_of, picture, plain, real_blocks

DORA = {**LORA, "use_dora": True, "lora_targets": "all-linear+conv"}
WIDE = {**LORA, "lora_targets": "all-linear+conv", "lora_dropout": 0.5}


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_a_lora_of_all_layers_in_plain_diffusers_draws_what_the_model_in_memory_drew(tiny_family, tmp_path, family):
    options = WIDE if family in ("sd", "sdxl") else {**WIDE, "lora_targets": "all-linear"}
    text = tiny.takes(family, "lora with text encoder")
    done = Trained(tiny_family(family), family, tmp_path / "model", train_text_encoder=text, **options).written()
    wanted, pipeline = picture(done.model.pipeline), plain(tiny_family(family))
    pipeline.load_lora_weights(tmp_path / "model")
    parts = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    assert not [name for part in parts for name, module in part.named_modules() if "lora_dropout" in name and getattr(module, "p", 0)]
    np.testing.assert_allclose(picture(pipeline), wanted, atol=1e-4)
    if family in ("sd", "sdxl"):
        export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
        other = plain(tiny_family(family))
        other.load_lora_weights(tmp_path, weight_name="kohya.safetensors")
        np.testing.assert_allclose(picture(other), wanted, atol=1e-4)


def test_a_dora_in_plain_diffusers_draws_what_the_model_in_memory_drew_and_has_no_kohya_form(tiny_family, tmp_path):
    """weight_decompose of ComfyUI's comfy/weight_adapter/base.py divides by the base model's lengths, peft and the paper by those of the sum."""
    done = Trained(tiny_family("sd"), "sd", tmp_path / "model", train_text_encoder=True, **DORA).written()
    wanted, pipeline = picture(done.model.pipeline), plain(tiny_family("sd"))
    pipeline.load_lora_weights(tmp_path / "model")
    np.testing.assert_allclose(picture(pipeline), wanted, atol=1e-4)
    export.main(["--state", str(tmp_path), "--out", str(tmp_path / "whole")])
    np.testing.assert_allclose(picture(plain(tmp_path / "whole")), wanted, atol=1e-4)
    with pytest.raises(UserError, match=r"^A DoRA is not written in kohya's form: .*Use --format single_file"):
        export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_comfyui_and_kohya_know_every_layer_of_a_wide_lora_by_its_name(tmp_path, family):
    """ComfyUI: model_lora_keys_unet of comfy/lora.py and UNET_MAP_* of comfy/utils.py at 41444b5236c613ee5ff7d09aa620f94b702f30eb, where all layers of
    transformers, of resnets and of samplers are. kohya: LoRANetwork.UNET_TARGET_REPLACE_MODULE* of networks/lora.py at
    48d368fa557731ad0488c07304dfeba8c07910eb, which takes the same ones."""
    real_blocks(family, 0).save_pretrained(tmp_path / "base")
    done = Trained(tmp_path / "base", family, tmp_path / "model", **WIDE).written()
    layers = {name for name in in_blocks(plain(tmp_path / "base").unet, nn.Linear | nn.Conv2d)}
    attention = {name for name in layers if ".attn" in name}
    known = {f"unet.{name.replace('.to_', '.processor.to_').removesuffix('.0')}_lora" for name in attention} | {
        f"unet.{name}.lora" for name in layers - attention
    }
    assert layers_of(done.folder / loading.LORA) == known
    export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
    assert layers_of(tmp_path / "kohya.safetensors") == {f"lora_unet_{name.replace('.', '_')}" for name in layers}
    assert {tensor.dim() for name, tensor in load_file(tmp_path / "kohya.safetensors").items() if "_conv1.lora_" in name} == {4}
