"""What a run leaves behind, in every form: plain diffusers loads it without our code and has the very weights that were trained."""

import copy
import errno
import functools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from peer import export, generate
from peer.generate import GenerateConfig
from peer.launch.starting_model import load_model
from peer.results import loading
from peer.results.card import write_card
from peer.results.forms.single_file import write_single_file
from peer.results.output_folder import link_result
from peer.results.result import Form, Result, read_result, warn_of_unused, write_result
from peer.rooms import load_part
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.models.reading import plain
from tests.tiny.moulds import Mould

CPU = torch.device("cpu")
WORD = {"method": "textual_inversion", "placeholder_token": "<dicoo>", "initializer_token": "toy", "num_vectors": 2}
LORA = {"method": "lora", "rank": 2, "lora_alpha": 3.0}
PROMPT = "a photo of a <dicoo> cat"


class Trained:
    """A model of a family whose parameters were moved, and the result folder that it left."""

    def __init__(self, base, family, folder, form=None, **options):
        self.run = RunConfig(model=str(base), family=tiny.FAMILIES[family], resolution=16, **options)
        self.model = load_model(self.run, {}, CPU)
        self.method = load_part("methods", self.run.method).build(self.run)
        self.params = self.method.attach(self.model)
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.params.values():
                parameter.add_(torch.randn(parameter.shape, generator=rng) * 0.1)
        self.folder, self.form = folder, form or Form()
        self.drawn = functools.cache(lambda: picture(self.model.pipeline))  # once for all that look at this model

    def at(self, folder, form=None):
        """The same model, whose result is to be written to another folder."""
        other = copy.copy(self)
        other.folder, other.form = folder, form or Form()
        return other

    def written(self):
        write_result(self.method, self.model, self.params, self.folder, Result.of(self.run, samples=64, round=3, dataset="toys"), self.form)
        return self


@pytest.fixture(scope="module")
def in_memory(tiny_family):
    return functools.cache(lambda family, **options: Trained(tiny_family(family), family, None, **options))


@pytest.fixture
def trained(in_memory):
    """`trained("sd", folder, **options)`: a `Trained` of a tiny family, made once for all tests that want the same; do not change it."""
    return lambda family, folder, form=None, **options: in_memory(family, **options).at(folder, form)


def picture(pipeline, prompt=PROMPT):
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    rng = torch.Generator().manual_seed(0)
    return pipeline(
        prompt=prompt, num_inference_steps=2, guidance_scale=2.0, height=16, width=16, output_type="np", generator=rng, **tiny.drawing(pipeline)
    ).images[0]


@functools.cache
def without(folder):
    """What plain diffusers draws with the base model in `folder`, which stays as it is."""
    return picture(plain(folder))


@pytest.fixture(params=tiny.ONE_OF_EACH)
def family(request):
    return request.param


@pytest.mark.parametrize("text", [False, True], ids=["", "text encoder"])
def test_a_lora_in_plain_diffusers_draws_what_the_model_in_memory_drew(tiny_family, trained, tmp_path, family, text):
    if text and not tiny.takes(family, "lora with text encoder"):
        pytest.skip("its text encoders stay as they are")
    done = trained(family, tmp_path / "model", train_text_encoder=text, **LORA).written()
    pipeline = plain(tiny_family(family))
    pipeline.load_lora_weights(tmp_path / "model")
    drawn = picture(pipeline)
    np.testing.assert_allclose(drawn, done.drawn(), atol=1e-4)
    assert np.abs(without(tiny_family(family)) - drawn).max() > 1e-3


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_a_lora_in_kohyas_form_comes_back_to_the_bit(tiny_family, trained, tmp_path, family):
    done = trained(family, tmp_path / "model", train_text_encoder=True, **LORA).written()
    export.main(["--state", str(tmp_path), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
    written = load_file(tmp_path / "kohya.safetensors")
    assert all(tensor == 2 for name, tensor in written.items() if name.endswith(".alpha")), "the scale is in the layers"
    assert len(written) == 3 * len(done.params) / 2
    pipeline = plain(tiny_family(family))
    pipeline.load_lora_weights(tmp_path, weight_name="kohya.safetensors", adapter_name="default")
    for name, parameter in done.params.items():
        part, key = name.split(".", 1)
        assert torch.equal(dict(plain_names(getattr(pipeline, part)))[key], parameter * 1.5 if "lora_B" in key else parameter), name
    np.testing.assert_allclose(picture(pipeline), done.drawn(), atol=1e-4)


def plain_names(part):
    return ((name.removeprefix("text_model."), parameter) for name, parameter in part.named_parameters())


def test_a_lora_is_merged_into_a_whole_pipeline_in_a_folder_and_in_one_file(tiny_family, trained, tmp_path):
    done = trained("sd", tmp_path / "model", train_text_encoder=True, **LORA).written()
    export.main(["--state", str(tmp_path / "model"), "--out", str(tmp_path / "whole")])
    whole = plain(tmp_path / "whole")
    np.testing.assert_allclose(picture(whole), done.drawn(), atol=1e-4)
    assert not hasattr(whole.unet, "peft_config")
    export.main(["--state", str(tmp_path / "model"), "--format", "single_file", "--out", str(tmp_path / "one.safetensors")])
    single = StableDiffusionPipeline.from_single_file(
        str(tmp_path / "one.safetensors"), config=str(tiny_family("sd")), local_files_only=True, safety_checker=None
    )
    np.testing.assert_allclose(picture(single), done.drawn(), atol=1e-4)


@pytest.mark.parametrize("family", tiny.WORDY)
def test_a_word_in_plain_diffusers_is_the_one_that_was_learned(tiny_family, trained, tmp_path, family):
    done = trained(family, tmp_path / "model", **WORD).written()
    pipeline = plain(tiny_family(family))
    files = {"text_encoder": "learned_embeds.safetensors", "text_encoder_2": "learned_embeds_2.safetensors"}
    for part, name in files.items():
        if not hasattr(pipeline, part):
            assert not (tmp_path / "model" / name).exists()
            continue
        assert list(load_file(tmp_path / "model" / name)) == ["<dicoo>"]
        encoder, tokenizer = getattr(pipeline, part), getattr(pipeline, part.replace("text_encoder", "tokenizer"))
        pipeline.load_textual_inversion(tmp_path / "model", weight_name=name, text_encoder=encoder, tokenizer=tokenizer)
        ids = tokenizer.convert_tokens_to_ids(["<dicoo>", "<dicoo>_1"])
        assert torch.equal(encoder.get_input_embeddings().weight[ids], done.params[f"{part}.learned_embeds"])
    drawn = picture(pipeline)
    np.testing.assert_allclose(drawn, done.drawn(), atol=1e-4)
    assert np.abs(picture(pipeline, "a photo of a toy cat") - drawn).max() > 1e-3


@pytest.mark.parametrize("family", tiny.WORDY)
def test_the_word_comes_as_a_whole_pipeline_and_as_torchs_own_format_when_wished(trained, tmp_path, family):
    done = trained(family, tmp_path / "model", Form(full_pipeline=True, safetensors=False), **WORD).written()
    np.testing.assert_allclose(picture(plain(tmp_path / "model")), done.drawn(), atol=1e-4)
    saved = torch.load(tmp_path / "model" / "learned_embeds.bin", weights_only=True)
    assert torch.equal(saved["<dicoo>"], done.params["text_encoder.learned_embeds"])
    files = re.findall('weight_name="(.+?)"', (tmp_path / "model" / "README.md").read_text())
    assert files and all((tmp_path / "model" / name).is_file() for name in files)
    assert not (tmp_path / "model" / "learned_embeds.safetensors").exists()


def test_wishes_that_the_method_has_no_use_for_are_one_warning(caplog):
    warn_of_unused(Form(full_pipeline=True, safetensors=False), RunConfig())
    assert [record.message for record in caplog.records] == [
        "--save_as_full_pipeline and --no_safe_serialization is for textual_inversion and does nothing with --method full"
    ]


@pytest.mark.parametrize("family", tiny.WORDY)
def test_an_embedding_in_one_file_is_read_back(tiny_family, trained, tmp_path, family):
    done = trained(family, tmp_path / "model", **WORD).written()
    export.main(["--state", str(tmp_path), "--format", "embedding", "--out", str(tmp_path / "any name")])
    keys = {"sd": ["<dicoo>"], "sdxl": ["clip_g", "clip_l"], "flux": ["clip_l", "t5xxl"], "chroma": ["<dicoo>"]}[family]
    assert sorted(load_file(tmp_path / "any name.safetensors")) == keys
    pipeline = plain(tiny_family(family))
    assert loading.add_embedding(pipeline, tmp_path / "any name.safetensors") == "<dicoo>"
    np.testing.assert_allclose(picture(pipeline), done.drawn(), atol=1e-4)


def test_a_word_for_two_encoders_that_does_not_say_its_family_has_no_one_file(trained, tmp_path):
    trained("sdxl", tmp_path / "model", **WORD).written()
    (tmp_path / "model" / "result.json").unlink()
    with pytest.raises(UserError, match="does not name its model family"):
        export.main(["--state", str(tmp_path / "model"), "--format", "embedding", "--out", str(tmp_path / "one")])
    assert not list(tmp_path.glob("*one*"))


TOPOLOGIES = {  # the real ones' blocks, of the least width
    "sd": {
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "block_out_channels": (8, 16, 16, 16),
    },
    "sdxl": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (8, 16, 16),
        "transformer_layers_per_block": (1, 2, 3),
        "attention_head_dim": (2, 4, 4),
    },
}
TOPOLOGIES["sd2v"] = {**TOPOLOGIES["sd"], "attention_head_dim": (2, 4, 4, 4)}


def real_blocks(family):
    """A pipeline of the family with as many blocks and layers as the real one has, the caller's own."""
    return _real_blocks(family).cast()


@functools.cache
def _real_blocks(family):
    from diffusers import AutoencoderKL

    pipeline = tiny.build(family)
    torch.manual_seed(0)
    unet = type(pipeline.unet)(**{**pipeline.unet.config, **TOPOLOGIES[family], "layers_per_block": 2, "norm_num_groups": 4})
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = AutoencoderKL(block_out_channels=(4, 8, 8, 8), latent_channels=4, layers_per_block=2, norm_num_groups=2, **blocks)
    pipeline.register_modules(unet=unet, vae=vae)
    return Mould(pipeline)


@pytest.mark.parametrize("family", TOPOLOGIES)
def test_a_single_file_comes_back_to_the_bit_through_diffusers(tmp_path, family):
    pipeline = real_blocks(family)
    pipeline.save_pretrained(tmp_path / "model")
    other = real_blocks(family)
    with torch.no_grad():  # of its folder only the configs may be used
        for part in (part for part in other.components.values() if isinstance(part, torch.nn.Module)):
            for parameter in part.parameters():
                parameter.add_(1.0)
    other.save_pretrained(tmp_path / "config")
    export.main(["--state", str(tmp_path / "model"), "--format", "single_file", "--out", str(tmp_path / "one.safetensors")])
    kind = StableDiffusionXLPipeline if family == "sdxl" else StableDiffusionPipeline
    options = {} if family == "sdxl" else {"safety_checker": None}
    back = kind.from_single_file(str(tmp_path / "one.safetensors"), config=str(tmp_path / "config"), local_files_only=True, **options)
    for part in ("unet", "vae", "text_encoder", *(["text_encoder_2"] if family == "sdxl" else [])):
        before, after = getattr(pipeline, part).state_dict(), getattr(back, part).state_dict()
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_single_file_in_half_precision_is_half_as_long(tiny_family, tmp_path):
    for dtype in ("fp32", "fp16"):
        export.main(["--state", str(tiny_family("sd")), "--format", "single_file", "--out", str(tmp_path / dtype), "--dtype", dtype])
    assert {tensor.dtype for tensor in load_file(tmp_path / "fp16.safetensors").values()} == {torch.float16}
    sizes = [(tmp_path / f"{dtype}.safetensors").stat().st_size for dtype in ("fp32", "fp16")]
    assert sizes[1] < 0.75 * sizes[0]


# --- what ComfyUI and kohya's scripts read: their own lists of names, since they pass over any other without a word

ATTENTIONS = {
    "sd": [
        *(f"down_blocks.{level}.attentions.{number}" for level in (0, 1, 2) for number in (0, 1)),
        "mid_block.attentions.0",
        *(f"up_blocks.{level}.attentions.{number}" for level in (1, 2, 3) for number in (0, 1, 2)),
    ],
    "sdxl": [
        *(f"down_blocks.{level}.attentions.{number}" for level in (1, 2) for number in (0, 1)),
        "mid_block.attentions.0",
        *(f"up_blocks.{level}.attentions.{number}" for level in (0, 1) for number in (0, 1, 2)),
    ],
}
ATTENTIONS["sd2v"] = ATTENTIONS["sd"]
CLIP = [f"text_model.encoder.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkv"] + [
    f"text_model.encoder.layers.{layer}.self_attn.out_proj" for layer in (0, 1)
]
FLUX = {  # of each kind of block what is trained
    "transformer_blocks": [
        *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    ],
    "single_transformer_blocks": ["attn.to_q", "attn.to_k", "attn.to_v"],
}


def linears(family):
    """Where the UNet's attention has linear layers, of which LoRA takes all: (attention, layer)."""
    transformers = {f"{block}.transformer_blocks.{number}" for block in ATTENTIONS[family] for number in range(depth(family, block))}
    return [(f"{block}.attn{number}", layer) for block in transformers for number in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out")]


def depth(family, block):
    """Transformers in one of the attentions of `real_blocks`."""
    if family != "sdxl":
        return 1
    depths = TOPOLOGIES["sdxl"]["transformer_layers_per_block"]
    kind, level = block.split(".")[:2]
    return {"down_blocks": depths, "up_blocks": depths[::-1]}[kind][int(level)] if kind != "mid_block" else depths[-1]


def layers_of(path):
    """The layers that a file has, without the ends of their tensors' names."""
    return {name.split(".lora_")[0].removesuffix(".weight").removesuffix(".down").removesuffix(".up").removesuffix(".alpha") for name in load_file(path)}


@pytest.fixture(scope="module")
def lora_of(tmp_path_factory):
    """`lora_of("sdxl")`: the folder of a LoRA of a model with as many blocks as the real one, its text encoders' layers included."""

    @functools.cache
    def write(family):
        folder = tmp_path_factory.mktemp(family)
        real_blocks(family).save_pretrained(folder / "base")
        return Trained(folder / "base", family, folder / "model", train_text_encoder=True, **LORA).written().folder

    return write


@pytest.mark.parametrize("family", TOPOLOGIES)
def test_comfyui_knows_every_layer_of_a_result_by_its_name(lora_of, family):
    """model_lora_keys_unet and model_lora_keys_clip of comfy/lora.py, ComfyUI at 41444b5236c613ee5ff7d09aa620f94b702f30eb."""
    known = {f"unet.{attention}.processor.{layer}_lora" for attention, layer in linears(family)}
    known |= {f"{part}.{layer}" for part in ("text_encoder", "text_encoder_2")[: 1 + (family == "sdxl")] for layer in CLIP}
    assert layers_of(lora_of(family) / loading.LORA) == known


@pytest.mark.parametrize("family", TOPOLOGIES)
def test_kohya_knows_every_layer_by_its_name(lora_of, family, tmp_path):
    """LoRANetwork of networks/lora.py, for SDXL after its convert_diffusers_to_sai_if_needed; sd-scripts at 48d368fa557731ad0488c07304dfeba8c07910eb."""
    export.main(["--state", str(lora_of(family)), "--format", "lora_kohya", "--out", str(tmp_path / "kohya")])
    known = {f"lora_unet.{attention}.{layer}" + ".0" * (layer == "to_out") for attention, layer in linears(family)}
    known |= {f"{encoder}.{layer}" for encoder in (("lora_te1", "lora_te2") if family == "sdxl" else ("lora_te",)) for layer in CLIP}
    assert layers_of(tmp_path / "kohya.safetensors") == {name.replace(".", "_") for name in known}


def test_a_lora_of_flux_has_one_kind_of_names_and_all_readers_know_them(tiny_family, trained, tmp_path):
    """ComfyUI's list at 41444b5236c613ee5ff7d09aa620f94b702f30eb; kohya's networks/convert_flux_lora.py takes lora_A and lora_B only."""
    folder = trained("flux", tmp_path / "model", train_text_encoder=True, **LORA).written().folder
    assert {name.split(".lora_")[1] for name in load_file(folder / loading.LORA)} == {"A.weight", "B.weight"}
    config = plain(tiny_family("flux")).transformer.config
    counts = {"transformer_blocks": config.num_layers, "single_transformer_blocks": config.num_single_layers}
    known = {f"transformer.{kind}.{number}.{layer}" for kind, names in FLUX.items() for number in range(counts[kind]) for layer in names}
    assert layers_of(folder / loading.LORA) == known | {f"text_encoder.{layer}" for layer in CLIP}


def test_a_lora_is_as_strong_for_readers_that_take_alpha_for_the_rank(trained, tmp_path, family):
    """ComfyUI reads no header, and `.alpha` only where the file has one."""
    done = trained(family, tmp_path / "model", train_text_encoder=tiny.takes(family, "lora with text encoder"), **LORA).written()
    written = load_file(tmp_path / "model" / loading.LORA)
    assert not [name for name in written if "alpha" in name]
    downs = sorted((tensor for name, tensor in written.items() if name.endswith(("down.weight", "lora_A.weight"))), key=torch.norm)
    ups = sorted((tensor for name, tensor in written.items() if name.endswith(("up.weight", "lora_B.weight"))), key=torch.norm)
    for kind, tensors, scale in (("lora_A", downs, 1.0), ("lora_B", ups, LORA["lora_alpha"] / LORA["rank"])):
        trained = sorted((parameter * scale for name, parameter in done.params.items() if kind in name), key=torch.norm)
        assert len(trained) == len(tensors) and all(map(torch.equal, trained, tensors))


@pytest.mark.parametrize("zero_snr", [False, True])
def test_a_single_file_says_that_an_sdxl_model_predicts_v(tmp_path, zero_snr):
    pipeline = real_blocks("sdxl")
    for prediction, marks in (("epsilon", set()), ("v_prediction", {"v_pred", "ztsnr"} if zero_snr else {"v_pred"})):
        pipeline.scheduler = tiny.ddpm(prediction, zero_snr)
        write_single_file(pipeline, tmp_path / "one.safetensors")
        assert {name for name in load_file(tmp_path / "one.safetensors") if "." not in name} == marks


def test_an_embedding_of_flux_that_an_earlier_version_wrote_is_still_read(tiny_family, trained, tmp_path):
    trained("flux", tmp_path / "model", **WORD).written()
    export.main(["--state", str(tmp_path), "--format", "embedding", "--out", str(tmp_path / "new")])
    tensors = load_file(tmp_path / "new.safetensors")
    save_file({name.replace("t5xxl", "t5"): tensor for name, tensor in tensors.items()}, tmp_path / "old.safetensors")
    pipeline = plain(tiny_family("flux"))
    assert loading.add_embedding(pipeline, tmp_path / "old.safetensors") == "old"
    learned = pipeline.text_encoder_2.get_input_embeddings().weight[pipeline.tokenizer_2.convert_tokens_to_ids("old")]
    assert torch.equal(learned, tensors["t5xxl"][0])


# --- files


@pytest.mark.parametrize("options", [{"method": "full"}, LORA, WORD], ids=lambda options: options["method"])
def test_programs_that_know_no_model_folder_load_the_output_folder(tiny_family, trained, tmp_path, options):
    done = trained("sd", tmp_path / "model", **options).written()
    link_result(tmp_path)
    pipeline = plain(tmp_path if options["method"] == "full" else tiny_family("sd"))
    if options["method"] == "lora":
        pipeline.load_lora_weights(tmp_path)
    if options["method"] == "textual_inversion":
        pipeline.load_textual_inversion(str(tmp_path / "learned_embeds.safetensors"))
    np.testing.assert_allclose(picture(pipeline), done.drawn(), atol=1e-4)
    assert loading.result_in(tmp_path) == tmp_path / "model", "ours know what it was made from"


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_others_may_read_a_result_as_the_umask_says(trained, tmp_path, mask):
    before = os.umask(mask)
    try:
        trained("sd", tmp_path / "model", method="full").written()
        trained("sd", tmp_path / "lora", **LORA).written()
        trained("sd", tmp_path / "word", **WORD).written()
        for folder, form in (("model", "single_file"), ("lora", "lora_kohya"), ("lora", "lora_diffusers"), ("word", "embedding"), ("lora", "diffusers")):
            export.main(["--state", str(tmp_path / folder), "--format", form, "--out", str(tmp_path / "exported" / form)])
    finally:
        os.umask(before)
    written = [path for path in tmp_path.rglob("*.safetensors")]
    assert len(written) > 10 and {path.stat().st_mode & 0o777 for path in written} == {0o666 & ~mask}


def test_where_the_file_system_knows_no_modes_a_result_is_written_nevertheless(trained, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    trained("sd", tmp_path / "lora", **LORA).written()
    assert read_result(tmp_path / "lora").run.rank == 2


@pytest.mark.parametrize("form", ["lora_diffusers", "lora_kohya"])
def test_a_lora_of_an_earlier_version_is_given_on_without_the_place_of_its_model(trained, tmp_path, form):
    lora = trained("sd", tmp_path / "lora", **LORA).written().folder / loading.LORA
    with safe_open(lora, "pt") as file:
        header = file.metadata()
    values = json.loads(header["lora_adapter_metadata"]) | {"unet.base_model_name_or_path": "/home/ann/models/sd"}
    save_file(load_file(lora), lora, header | {"lora_adapter_metadata": json.dumps(values)})
    export.main(["--state", str(tmp_path / "lora"), "--format", form, "--out", str(tmp_path / "given.safetensors")])
    assert b"/home/ann" in lora.read_bytes() and b"/home/ann" not in (tmp_path / "given.safetensors").read_bytes()


REFUSED = {
    "writes no single-file layout of a FluxPipeline": ("flux", {}, "single_file"),
    "A single file has no place for a new word": ("sd", WORD, "single_file"),
    "is not a LoRA": ("sd", WORD, "lora_kohya"),
    "is not an embedding": ("sd", LORA, "embedding"),
    "base model of .* is not there": ("sd", LORA, "diffusers"),
    "result.json is damaged": ("sd", LORA, "lora_diffusers"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_exported_is_one_line_and_leaves_no_file(trained, tmp_path, reason):
    family, options, form = REFUSED[reason]
    trained(family, tmp_path / "model", **options).written()
    if "not there" in reason:
        saved = json.loads((tmp_path / "model" / "result.json").read_text())
        saved["run"]["values"]["model"] = "/nowhere/model"
        (tmp_path / "model" / "result.json").write_text(json.dumps(saved))
    if "damaged" in reason:
        (tmp_path / "model" / "result.json").write_text("{")
    with pytest.raises(UserError, match=reason) as error:
        export.main(["--state", str(tmp_path / "model"), "--format", form, "--out", str(tmp_path / "out" / "it")])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_base_model_elsewhere_can_be_named(tiny_family, trained, tmp_path):
    trained("sd", tmp_path / "model", **LORA).written()
    saved = json.loads((tmp_path / "model" / "result.json").read_text())
    saved["run"]["values"]["model"] = "/nowhere/model"
    (tmp_path / "model" / "result.json").write_text(json.dumps(saved))
    export.main(["--state", str(tmp_path), "--model", str(tiny_family("sd")), "--out", str(tmp_path / "whole")])
    assert plain(tmp_path / "whole").unet.config.sample_size == 8


@pytest.mark.parametrize("options", [LORA, {**LORA, "method": "lokr"}, WORD], ids=lambda options: options["method"])
def test_a_result_that_says_nothing_of_its_run_is_merged_into_the_model_that_is_named(tiny_family, trained, tmp_path, options):
    """As of another program, or one whose result.json was left out when it was given on."""
    done = trained("sd", tmp_path / "model", **options).written()
    (tmp_path / "model" / "result.json").unlink()
    given = ["--state", str(tmp_path), "--out", str(tmp_path / "whole")]
    with pytest.raises(UserError, match=r"does not name its base model\. Give its base model with --model\.$"):
        export.main(given)
    export.main([*given, "--model", str(tiny_family("sd"))])
    np.testing.assert_allclose(picture(plain(tmp_path / "whole")), done.drawn(), atol=1e-4)


def test_a_word_that_says_nothing_of_its_run_has_no_place_in_one_file_either(tiny_family, trained, tmp_path):
    trained("sd", tmp_path / "model", **WORD).written()
    (tmp_path / "model" / "result.json").unlink()
    given = ["--state", str(tmp_path), "--format", "single_file", "--model", str(tiny_family("sd")), "--out", str(tmp_path / "one")]
    with pytest.raises(UserError, match="A single file has no place for a new word"):
        export.main(given)


@pytest.mark.parametrize("form", [Form(), Form(safetensors=False)], ids=["safetensors", "bin"])
def test_a_word_whose_file_ends_too_early_is_one_line(trained, tmp_path, form):
    trained("sd", tmp_path / "model", form, **WORD).written()
    (file,) = (tmp_path / "model").glob("learned_embeds.*")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserError, match=rf"{file.name} does not load as an embedding\. Fetch it again"):
        export.main(["--state", str(tmp_path), "--format", "embedding", "--out", str(tmp_path / "one")])
    assert not list(tmp_path.glob("*one*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "full"}, ["StableDiffusionPipeline.from_pretrained", "a full fine-tune of"]),
        (LORA, ["load_lora_weights", "- lora\n"]),
        (LORA | {"use_dora": True}, ["load_lora_weights", "dd-export --format single_file"]),
        (WORD, ["load_textual_inversion", "a photo of <dicoo>", "- textual_inversion\n"]),
    ],
)
def test_every_result_has_a_card_that_says_how_to_load_it(tiny_family, trained, tmp_path, options, words):
    trained("sd", tmp_path / "model", **options).written()
    card = (tmp_path / "model" / "README.md").read_text()
    for word in [
        *words,
        "| samples trained | 64 |",
        "| rounds | 3 |",
        "| data | toys |",
        "library_name: diffusers",
    ]:
        assert word in card
    assert "TODO" not in card and "license:" not in card, "only what is known"
    assert str(tmp_path) not in card and str(tiny_family("sd").parent) not in card
    about = read_result(tmp_path / "model")
    assert about.run.model == str(tiny_family("sd")) and about.samples == 64


@pytest.mark.parametrize("options", [LORA, {**LORA, "method": "lokr"}, WORD], ids=lambda options: options["method"])
def test_the_card_reads_a_base_model_in_one_file_as_diffusers_does(tmp_path, options):
    def code(**more):
        write_card(tmp_path, Result(run=RunConfig(**options, **more)))
        return (tmp_path / "README.md").read_text().split("```")[1]

    sd = {"family": "stable_diffusion", "model": "/models/sf.safetensors"}
    assert '\npipeline = StableDiffusionPipeline.from_single_file("sf.safetensors")\n' in code(**sd)
    assert '\npipeline = StableDiffusionPipeline.from_single_file("sf.safetensors", config="it")\n' in code(**sd, model_config="/models/it")
    if options != WORD:
        assert (
            'pipeline = QwenImagePipeline.from_pretrained("qwen/image")\n'
            'pipeline.transformer = type(pipeline.transformer).from_single_file("sf.safetensors", config="qwen/image", subfolder="transformer")\n'
        ) in code(family="qwen_image", model="/models/sf.safetensors", model_config="qwen/image")


# --- drawing


def drawn(tmp_path, *words):
    arguments = ["--prompt", PROMPT, "--num_images", "1", "--steps", "2", "--guidance", "2", "--size", "16", "--out", str(tmp_path / "drawn")]
    generate.main([*arguments, *map(str, words)])
    (path,) = (tmp_path / "drawn").iterdir()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("family", "options"),
    [(family, options) for family in tiny.ONE_OF_EACH for options in ({"method": "full"}, LORA, WORD) if tiny.takes(family, options["method"])],
)
def test_a_result_of_any_method_is_all_that_drawing_needs(trained, base_drawn, tmp_path, family, options):
    trained(family, tmp_path / "model", **options).written()
    result = drawn(tmp_path, "--model", tmp_path)
    assert result != base_drawn(family) and loading.result_in(tmp_path) == tmp_path / "model"
    if family == "sd":
        assert result == drawn(tmp_path, "--model", tmp_path / "model")


@pytest.fixture(scope="module")
def base_drawn(tiny_family, tmp_path_factory):
    """`base_drawn("sd")`: what the model that was trained draws."""
    return functools.cache(lambda family: drawn(tmp_path_factory.mktemp("base"), "--model", tiny_family(family)))


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_every_family_draws_in_half_precision_and_reads_places_in_full(tiny_family, family):
    """As on a GPU. A language model turns its words by their places: rounded to bfloat16, the 512th would be turned 0.6 radians too far."""
    model = generate.base(RunConfig(model=str(tiny_family(family))))
    turns = [(name, buffer) for part in model.parts.values() for name, buffer in part.named_buffers() if name.endswith("inv_freq")]
    model.cast(torch.bfloat16)
    model.move(torch.device("cpu"))
    with torch.no_grad():
        told = generate.told(model, ["a toy"], "")
        pictures = model.pipeline(**told, **model.drawn_with, num_inference_steps=2, height=16, width=16, output_type="pt").images
    assert pictures.isfinite().all() and all(part.dtype is torch.bfloat16 for part in model.parts.values())
    assert all(buffer.dtype is torch.float32 for _, buffer in turns)
    assert bool(turns) == bool(model.facts.language_model)


def test_a_result_is_drawn_with_prompts_read_and_noise_taken_as_in_its_training(tiny_family, trained, tmp_path):
    trained("sd", tmp_path / "model", **LORA).written()
    trained("sd", tmp_path / "other" / "model", **LORA, clip_skip=1, prediction_type="v_prediction").written()
    assert drawn(tmp_path, "--model", tmp_path) != drawn(tmp_path, "--model", tmp_path / "other")
    model = generate.load(GenerateConfig(model=str(tmp_path / "other")))
    assert model.pipeline.scheduler.config.prediction_type == "v_prediction"
    states = generate.told(model, ["a cat"], "a dog")
    assert torch.equal(states["prompt_embeds"], model.encode_text(["a cat"])["states"])
    assert torch.equal(states["negative_prompt_embeds"], model.encode_text(["a dog"])["states"])
    assert not torch.equal(
        states["prompt_embeds"], load_model(RunConfig(model=str(tiny_family("sd"))), {}, CPU).encode_text(["a cat"])["states"]
    )


def test_the_pictures_of_a_batch_are_decoded_one_at_a_time(tiny_family, tmp_path):
    config = GenerateConfig(model=str(tiny_family("sd")), num_images=3, steps=1, size=16, out=str(tmp_path))
    model, decoded = generate.load(config), []
    model.vae.decoder.register_forward_pre_hook(lambda _, inputs: decoded.append(len(inputs[0])))
    assert len(generate.draw(model, PROMPT, config, "cat")) == 3 and decoded == [1, 1, 1]


def test_each_prompt_has_a_name_of_its_own_that_a_person_recognises():
    assert generate.names(["A red square!", "a__blue square"]) == ["a-red-square", "a-blue-square"]
    assert generate.names(["一只猫", "一只狗", "Кошка", "हिन्दी", "!?"]) == ["一只猫", "一只狗", "кошка", "हिन्दी", "picture"]
    long = [f"{'the same beginning ' * 5}and a {animal}" for animal in ("cat", "dog")]
    first, second = generate.names(long)
    assert first[2:] == second[2:] and (first[:2], second[:2]) == ("1-", "2-")
    assert generate.names(["2 a cat", "a cat", "A cat"]) == ["1-2-a-cat", "2-a-cat", "3-a-cat"]
    assert len(generate.names(["猫" * 500])[0].encode()) == 120


def test_pictures_of_prompts_of_another_script_do_not_replace_one_another(tiny_family, tmp_path):
    words = ["--steps", "1", "--size", "16", "--num_images", "1", "--out", str(tmp_path / "drawn")]
    generate.main(["--model", str(tiny_family("sd")), "--prompt", "一只猫", "一只狗", *words])
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {"一只猫-000.png", "一只狗-000.png"}


def test_loras_and_words_are_put_onto_any_model(tiny_family, trained, tmp_path):
    base = tiny_family("sd")
    trained("sd", tmp_path / "lora" / "model", **LORA).written()
    trained("sd", tmp_path / "word" / "model", **WORD).written()
    both = drawn(tmp_path, "--model", base, "--lora", tmp_path / "lora", "--embedding", tmp_path / "word")
    lora = drawn(tmp_path, "--model", base, "--lora", tmp_path / "lora" / "model" / loading.LORA)
    assert drawn(tmp_path, "--model", tmp_path / "word", "--lora", tmp_path / "lora") == both
    assert drawn(tmp_path, "--model", tmp_path / "lora") == lora
    nothing = drawn(tmp_path, "--model", base)
    assert drawn(tmp_path, "--model", base, "--lora", tmp_path / "lora", "--lora_scale", "0") == nothing
    assert len({both, lora, nothing, drawn(tmp_path, "--model", base, "--negative_prompt", "a dog")}) == 4


def test_what_cannot_be_drawn_with_is_named(tiny_family, trained, tmp_path):
    base = tiny_family("sd")
    trained("sdxl", tmp_path / "lora", **LORA).written()
    trained("flux", tmp_path / "word", **WORD).written()
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    (tmp_path / "lora" / "result.json").unlink()
    for words, message in (
        (["--model", base, "--lora", "/nowhere"], r"There is no /nowhere"),
        (["--model", base, "--lora", tmp_path / "broken.safetensors"], r"broken\.safetensors does not load as a LoRA of this model"),
        (["--model", base, "--lora", base], r"does not load as a LoRA of this model: it has no pytorch_lora_weights"),
        (["--model", base, "--embedding", tmp_path / "broken.safetensors"], r"does not load as an embedding of this model"),
        (["--model", base, "--embedding", tmp_path / "word"], r"does not load as an embedding of this model"),
        (["--model", tmp_path / "lora"], r"does not name its base model.*with --lora"),
        (["--model", tmp_path / "broken.safetensors"], r"broken\.safetensors"),
        (["--model", tiny_family("flux"), "--negative_prompt", "a dog"], r"FLUX takes no negative prompt"),
        (["--model", base, "--num_images", "0"], r"num_images is 0"),
        (["--model", base, "--size", "20"], r"size is 20, but this model needs a multiple of 8\. Use 16\."),
        (["--model", base, "--size", "-8"], r"size is -8"),
        (["--model", base, "--steps", "1001"], r"steps is 1001, but the noise of this model has 1000 steps\. Use at most 1000"),
        (["--model", base, "--device", "foo"], r"--device foo does not work here: .*Use auto, cpu or cuda"),
        (["--model", base, "--device", "cuda:99"], r"--device cuda:99 does not work here: .*Use auto, cpu or cuda"),
        (["--model", base, "--out", tmp_path / "broken.safetensors"], r"no pictures in .*broken\.safetensors: it is a file\. Choose another --out"),
        (["--model", base, "--out", tmp_path / "broken.safetensors" / "in"], r"no pictures in .*: Not a directory\. Choose another --out"),
    ):
        with pytest.raises(UserError, match=message) as error:
            drawn(tmp_path, *words)
        assert "\n" not in str(error.value)
