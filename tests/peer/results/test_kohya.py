"""`--format lora_kohya` of transformers: the layers that kohya's programs have, and in them what was trained."""

import numpy as np
import pytest
import torch
from diffusers import (
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from peer import export
from peer.methods.shared.adapters import layers
from peer.results.forms.lora import as_original
from peer.results.loading import LORA as FILE
from swarm.errors import UserError
from swarm.run.family import families
from tests import flux2_file, flux_file
from tests.peer.models import test_chroma, test_flux2, test_qwen_image, test_sd3, test_z_image
from tests.peer.results.kohyas_layers import digest
from tests.peer.results.test_results import LORA, Trained, picture, plain

FULL = {  # the last two: what `python tests/peer/results/kohyas_layers.py` prints of sd-scripts at 48d368f and musubi-tuner at 30c658c
    "FLUX.1": ("flux", FluxTransformer2DModel, {"guidance_embeds": True}, 304, "962b07ece1a68f5d"),
    "Chroma": ("chroma", ChromaTransformer2DModel, test_chroma.HD, 228, "a191567548056846"),
    "SD 3.5 medium": ("sd3", SD3Transformer2DModel, test_sd3.MEDIUM, 263, "dd5537ac35317fd9"),
    "SD 3.5 large": ("sd3", SD3Transformer2DModel, test_sd3.LARGE, 377, "781f50e8b2df6725"),
    "FLUX.2 dev": ("flux2", Flux2Transformer2DModel, test_flux2.DEV, 160, "fbc910ee4924ec50"),
    "FLUX.2 klein 4B": ("flux2_klein", Flux2Transformer2DModel, test_flux2.KLEIN_4B, 80, "30151d18fb978f3c"),
    "FLUX.2 klein 9B": ("flux2_klein", Flux2Transformer2DModel, test_flux2.KLEIN_9B, 112, "fcde66fdf7508d3f"),
    "Z-Image": ("z_image", ZImageTransformer2DModel, test_z_image.REAL, 270, "6ad036122a3fcebc"),
    "Qwen-Image": ("qwen_image", QwenImageTransformer2DModel, test_qwen_image.REAL, 840, "40630708c04dfa9f"),
}


@pytest.mark.parametrize("name", FULL)
def test_all_linear_layers_of_a_full_size_model_are_kohyas_by_name_outputs_and_inputs(name):
    family, kind, config, count, wanted = FULL[name]
    facts = families()[family]
    with torch.device("meta"):
        model = kind(**config)
    chosen = {key: model.get_submodule(key) for key in layers(model, facts.layers.all)}
    pairs = {
        key: (torch.empty(1, each.in_features, device="meta"), torch.empty(each.out_features, 1, device="meta"))
        for key, each in chosen.items()
    }
    found = as_original(pairs, facts)
    assert digest((f"lora_unet_{key.replace('.', '_')}", len(up), down.shape[1]) for key, (down, up) in found.items()) == (count, wanted)


ORIGINAL = {  # the transformer's tensors under the original names, as the tests of single files have them
    "flux": flux_file.transformer_tensors,
    "chroma": flux_file.transformer_tensors,
    "flux2": flux2_file.transformer_tensors,
    "sd3": lambda model: {name.removeprefix("model.diffusion_model."): tensor for name, tensor in test_sd3.original(model).items()},
    "qwen_image": nn.Module.state_dict,
    "z_image": nn.Module.state_dict,
}


@pytest.mark.parametrize(("family", "targets"), [("flux", "auto"), *((family, "all-linear") for family in ORIGINAL)])
def test_each_weight_of_the_original_model_changes_by_what_was_trained(tiny_family, tmp_path, family, targets):
    """auto: of linear1 in the single blocks only a part is trained."""
    before = ORIGINAL[family](plain(tiny_family(family)).transformer)
    done = Trained(tiny_family(family), family, tmp_path / "model", lora_targets=targets, **LORA).written()
    export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
    done.model.pipeline.fuse_lora(components=["transformer"])
    done.model.pipeline.unload_lora_weights()
    after, kohya = ORIGINAL[family](done.model.pipeline.transformer), load_file(tmp_path / "kohya.safetensors")
    assert_changed(kohya, before, after)


def assert_changed(kohya, before, after):
    """A file changes the original model's weights from `before` to `after`, and has no layer that changes none."""
    changed = {name.removesuffix(".weight") for name in after if not torch.equal(after[name], before[name])}
    assert {name.split(".")[0] for name in kohya} == {f"lora_unet_{name.replace('.', '_')}" for name in changed}
    for name in changed:
        down, up, alpha = (kohya[f"lora_unet_{name.replace('.', '_')}.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha"))
        torch.testing.assert_close(
            before[f"{name}.weight"] + up @ down * (alpha / len(down)), after[f"{name}.weight"], atol=1e-6, rtol=1e-5
        )


def given(folder, pipeline, **options):
    """Replace the LoRA of a result by one that peft made, with this config."""
    pipeline.transformer.add_adapter(
        LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "to_out.0"], **options)
    )
    adapter = pipeline.transformer.peft_config["default"].to_dict()
    tensors = get_peft_model_state_dict(pipeline.transformer)
    pipeline.save_lora_weights(folder, transformer_lora_layers=tensors, transformer_lora_adapter_metadata=adapter)


def test_layers_of_other_ranks_are_as_strong_as_in_peft_also_where_they_are_in_one(tiny_family, tmp_path):
    done, pipeline = Trained(tiny_family("flux"), "flux", tmp_path / "model", **LORA).written(), plain(tiny_family("flux"))
    before = {name: tensor.clone() for name, tensor in ORIGINAL["flux"](pipeline.transformer).items()}
    given(done.folder, pipeline, rank_pattern={"to_q": 2, "to_out.0": 1})
    export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
    pipeline.fuse_lora(components=["transformer"])
    pipeline.unload_lora_weights()
    assert_changed(load_file(tmp_path / "kohya.safetensors"), before, ORIGINAL["flux"](pipeline.transformer))


@pytest.mark.parametrize("options", [{"alpha_pattern": {"to_q": 2}}, {"use_rslora": True}], ids=str)
def test_layers_that_are_scaled_each_in_its_own_way_are_refused(tiny_family, tmp_path, options):
    done = Trained(tiny_family("flux"), "flux", tmp_path / "model", **LORA).written()
    given(done.folder, plain(tiny_family("flux")), **options)
    with pytest.raises(UserError, match=r"has layers of different scales\. Use --format lora_diffusers"):
        export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])


def test_what_is_no_lora_of_the_family_is_refused_in_one_line(tiny_family, tmp_path):
    file = Trained(tiny_family("flux"), "flux", tmp_path / "model", **LORA).written().folder / FILE
    tensors, layer = load_file(file), "transformer.transformer_blocks.0.attn.other.lora_{}.weight"
    files = {
        "without second matrices": {name: tensor for name, tensor in tensors.items() if "lora_A" in name},
        "a layer that none has": tensors | {layer.format(side): torch.ones(2, 2) for side in "AB"},
        "a part that none has": tensors | {f"unet.{layer.format(side)}": torch.ones(2, 2) for side in "AB"},
        "a tensor of no layer": tensors | {"transformer.bias": torch.ones(2)},
        "no tensor": {},
    }
    said = {"a damaged header": "{", "a list for a header": "[]"}
    for what in (*files, *said):
        save_file(files.get(what, tensors), file, {"lora_adapter_metadata": said.get(what, "{}")})
        with pytest.raises(UserError, match=r"does not load as a LoRA( of FLUX)?\. [^\n]*$"):
            export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
    assert not list(tmp_path.glob("*kohya*"))


def test_text_encoders_have_kohyas_numbers(tiny_family, tmp_path):
    """lora_te of SD 1.x and 2.x; lora_te1 and, for SD 3, lora_te2 (LORA_PREFIX_TEXT_ENCODER... of networks/lora.py, lora_flux.py and lora_sd3.py)."""
    for family, numbers in (("sd", {"lora_te"}), ("flux", {"lora_te1"}), ("sd3", {"lora_te1", "lora_te2"})):
        Trained(tiny_family(family), family, tmp_path / family / "model", train_text_encoder=True, **LORA).written()
        export.main(["--state", str(tmp_path / family), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
        names = [name for name in load_file(tmp_path / "kohya.safetensors") if name.startswith("lora_te")]
        assert {name.split("_text_model_encoder_layers_")[0] for name in names} == numbers


def test_plain_diffusers_draws_with_kohyas_form_what_the_model_in_memory_drew(tiny_family, tmp_path):
    """Of the families whose form it converts at any width."""
    for family in ("qwen_image", "z_image"):
        done = Trained(tiny_family(family), family, tmp_path / family / "model", **LORA).written()
        export.main(["--state", str(tmp_path / family), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
        pipeline = plain(tiny_family(family))
        pipeline.load_lora_weights(tmp_path, weight_name="kohya.safetensors")
        np.testing.assert_allclose(picture(pipeline), done.drawn(), atol=1e-4)


def test_a_lora_that_does_not_say_its_family_is_written_where_all_such_have_the_same_names(tiny_family, tmp_path):
    for family in ("sd", "flux"):
        Trained(tiny_family(family), family, tmp_path / family, train_text_encoder=True, **LORA).written()
        (tmp_path / family / "result.json").unlink()
    export.main(["--state", str(tmp_path / "sd"), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
    assert any(name.startswith("lora_te_text_model_") for name in load_file(tmp_path / "kohya.safetensors"))
    with pytest.raises(UserError, match=r"does not name its model family\. Use --format lora_diffusers"):
        export.main(["--state", str(tmp_path / "flux"), "--format", "lora_kohya", "--out", str(tmp_path / "none")])
    assert not list(tmp_path.glob("*none*"))
