"""What adapters other than the usual LoRA leave behind: LoRAs of more layers. Others load them, and draw what was trained."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

from peer import export
from peer.results import loading
from swarm.errors import UserError
from tests import tiny
from tests.peer.methods.test_lora_targets import in_blocks
from tests.peer.results.test_results import LORA, Trained, drawn, layers_of, picture, plain, real_blocks

DORA = {**LORA, "use_dora": True, "lora_targets": "all-linear+conv"}
PRODUCTS = {
    "loha": {**LORA, "method": "loha", "lora_targets": "all-linear+conv"},
    "lokr": {**LORA, "method": "lokr", "lora_targets": "all-linear+conv"},
    "lokr of full matrices": {**LORA, "method": "lokr", "rank": 64, "lora_targets": "all-linear+conv"},
}
WIDE = {**LORA, "lora_targets": "all-linear+conv", "lora_dropout": 0.5}


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_a_lora_of_all_layers_in_plain_diffusers_draws_what_the_model_in_memory_drew(tiny_family, tmp_path, family):
    options = WIDE if family in ("sd", "sdxl") else {**WIDE, "lora_targets": "all-linear"}
    text = tiny.takes(family, "lora with text encoder")
    done = Trained(tiny_family(family), family, tmp_path / "model", train_text_encoder=text, **options).written()
    wanted, pipeline = done.drawn(), plain(tiny_family(family))
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
    wanted, pipeline = done.drawn(), plain(tiny_family("sd"))
    pipeline.load_lora_weights(tmp_path / "model")
    np.testing.assert_allclose(picture(pipeline), wanted, atol=1e-4)
    export.main(["--state", str(tmp_path), "--out", str(tmp_path / "whole")])
    np.testing.assert_allclose(picture(plain(tmp_path / "whole")), wanted, atol=1e-4)
    with pytest.raises(UserError, match=r"^kohya's form cannot hold this DoRA: .*Use --format single_file"):
        export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_comfyui_and_kohya_know_every_layer_of_a_wide_lora_by_its_name(tmp_path, family):
    """ComfyUI: model_lora_keys_unet of comfy/lora.py and UNET_MAP_* of comfy/utils.py at 41444b5236c613ee5ff7d09aa620f94b702f30eb, where all layers of
    transformers, of resnets and of samplers are. kohya: LoRANetwork.UNET_TARGET_REPLACE_MODULE* of networks/lora.py at
    48d368fa557731ad0488c07304dfeba8c07910eb, which takes the same ones."""
    real_blocks(family).save_pretrained(tmp_path / "base")
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


def in_comfyui(file, weights):
    """What LoHaAdapter and LoKrAdapter of ComfyUI's comfy/weight_adapter make of each weight, as their calculate_weight has the formulas."""
    tensors, found = load_file(file), {}
    for name, weight in weights.items():
        own = {key.rsplit(".", 1)[1]: tensor for key, tensor in tensors.items() if key.rsplit(".", 1)[0] == name}
        factors = [
            own[each] if each in own else own[f"{each}_a"] @ own[f"{each}_b"]
            for each in ("hada_w1", "hada_w2", "lokr_w1", "lokr_w2")
            if {each, f"{each}_b"} & {*own}
        ]
        ranks = [len(tensor) for kind, tensor in own.items() if kind.endswith("_b")]
        one, two = factors
        if "hada_w1_a" not in own:
            one = one[:, :, None, None] if two.dim() == 4 else one
        product = (one * two if "hada_w1_a" in own else torch.kron(one, two)).reshape(weight.shape)
        found[name] = weight + product * (own["alpha"].item() / ranks[0] if ranks else 1.0)
    return found, {key.rsplit(".", 1)[0] for key in tensors}


@pytest.mark.parametrize("name", PRODUCTS)
def test_peft_and_comfyui_have_the_weights_of_a_product_and_dd_export_merges_it(tiny_family, tmp_path, name):
    """The names are in ComfyUI's lists (model_lora_keys_unet and _clip of comfy/lora.py at 41444b5236c613ee5ff7d09aa620f94b702f30eb)."""
    done = Trained(tiny_family("sd"), "sd", tmp_path / "model", train_text_encoder=True, **PRODUCTS[name]).written()
    wanted, base, pipeline = done.drawn(), plain(tiny_family("sd")), plain(tiny_family("sd"))
    kinds = nn.Linear | nn.Conv2d
    layers = {f"lora_unet_{key.replace('.', '_')}": base.unet.get_submodule(key).weight for key in in_blocks(base.unet, kinds)}
    texts = {key: module for key, module in base.text_encoder.named_modules() if isinstance(module, nn.Linear)}
    layers |= {f"lora_te1_text_model_{key.removeprefix('text_model.').replace('.', '_')}": module.weight for key, module in texts.items()}
    merged, names = in_comfyui(done.folder / "lycoris.safetensors", layers)
    assert names == layers.keys()
    for part in ("unet", "text_encoder"):
        PeftModel.from_pretrained(getattr(pipeline, part), done.folder, subfolder=part)
    np.testing.assert_allclose(picture(pipeline), wanted, atol=1e-4)
    assert str(tmp_path).encode() not in (done.folder / "unet" / "adapter_config.json").read_bytes()
    with torch.no_grad():
        for key, weight in merged.items():
            layers[key].copy_(weight)
    np.testing.assert_allclose(picture(base), wanted, atol=1e-4)
    export.main(["--state", str(tmp_path), "--out", str(tmp_path / "whole")])
    np.testing.assert_allclose(picture(plain(tmp_path / "whole")), wanted, atol=1e-4)


def test_dd_generate_draws_with_a_product(tiny_family, tmp_path):
    Trained(tiny_family("sd"), "sd", tmp_path / "model", **PRODUCTS["lokr"]).written()
    export.main(["--state", str(tmp_path), "--out", str(tmp_path / "whole")])
    pictures = [drawn(tmp_path, "--model", place) for place in (tmp_path, tmp_path / "whole", tiny_family("sd"))]
    assert pictures[0] == pictures[1] != pictures[2]


def test_a_product_that_does_not_fit_or_has_no_base_model_is_one_line(tiny_family, tmp_path):
    done = Trained(tiny_family("sd"), "sd", tmp_path / "model", **PRODUCTS["loha"]).written()
    with pytest.raises(UserError, match=r"unet does not load as an adapter of this model: "):
        loading.add_result(plain(tiny_family("sdxl")), done.folder)
    (done.folder / "result.json").unlink()
    with pytest.raises(UserError, match=r"does not name its base model\. Make one model of both by dd-export"):
        loading.base_of(done.folder)
