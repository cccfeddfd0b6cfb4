"""Tables of words that are in bf16 in their files stay so, and give the bits of float32 ones."""

import pytest
import torch
from torch import nn

from peer.launch.starting_model import load_model
from peer.rooms import load_part
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.models.reading import folders_are_read_once  # noqa: F401

BF16, CPU = torch.bfloat16, torch.device("cpu")
CAPTIONS = ["a cat", "a photo of an object on a table"]
WORD = {"method": "textual_inversion", "placeholder_token": "<dicoo>", "initializer_token": "toy"}


@pytest.fixture(scope="module")
def filed_in_bf16(tmp_path_factory):
    def write(family):
        folder = tmp_path_factory.mktemp(family) / "bf16"
        tiny.build(family).to(BF16).save_pretrained(folder)
        return folder

    return write


def placed(folder, dtype, **options):
    run = RunConfig(**{"model": str(folder), "method": "lora", **options})
    model, method = load_model(run, {}, None), load_part("methods", run.method).build(run)
    model.place(CPU, dtype, method.whole(model))
    return model, method, method.attach(model)


def tables(model):
    encoders = [part for name, part in model.parts.items() if name in model.facts.text_encoders]
    return [module.weight for encoder in encoders for module in encoder.modules() if isinstance(module, nn.Embedding)]


@pytest.mark.parametrize("family", tiny.ONE_OF_EACH)
def test_a_familys_captions_have_the_same_bits_in_half_the_memory(family, filed_in_bf16):
    folder, told = filed_in_bf16(family), []
    for dtype in (None, BF16):
        model, *_ = placed(folder, dtype)
        assert {table.dtype for table in tables(model)} == {dtype or torch.float32}
        with torch.autocast("cpu", dtype=BF16):
            told.append(model.encode_text(CAPTIONS))
    plain, held = told
    assert plain.keys() == held.keys() and all(torch.equal(plain[name], held[name]) and plain[name].dtype is held[name].dtype for name in plain)


def test_an_encoder_that_is_trained_as_a_whole_has_them_in_float32(filed_in_bf16):
    model, _, params = placed(filed_in_bf16("sd"), BF16, method="full", train_text_encoder=True)
    assert {table.dtype for table in tables(model)} == {torch.float32} == {parameter.dtype for parameter in params.values()}


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_a_new_word_is_laid_over_them_and_written_unrounded(family, filed_in_bf16):
    model, method, params = placed(filed_in_bf16(family), BF16, **WORD)
    captions = ["a <dicoo>"]
    with torch.autocast("cpu", dtype=BF16):
        before = model.encode_text(captions)
        for vectors in params.values():
            vectors.data.normal_(generator=torch.Generator().manual_seed(1))
        after = model.encode_text(captions)
    assert not any(torch.equal(after[name], before[name]) for name in before)
    method.complete(model, params)
    for name, vectors in method.vectors(params).items():
        encoder, tokenizer = model.parts[name], getattr(model.pipeline, model.facts.text_encoders[name].tokenizer)
        assert torch.equal(encoder.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(captions[0].split()[1])], vectors[0])
        assert vectors.dtype is torch.float32 and not torch.equal(vectors, vectors.to(BF16).float())


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_what_comes_after_a_new_word_counts_in_the_pooled_text_too(family, tmp_path):
    """As SDXL and FLUX.1 are published: with 2 as the end of their captions, CLIP pools at the highest id, which is the new word's."""
    pipeline = tiny.build(family)
    for part in pipeline.components.values():
        if getattr(getattr(part, "config", None), "model_type", "").startswith("clip_text"):
            part.config.eos_token_id = 2
    pipeline.save_pretrained(tmp_path)
    model, *_ = placed(tmp_path, None, **WORD)
    told = model.encode_text(["<dicoo>", "<dicoo> a red square"])
    pooled = [name for name, value in told.items() if value.dim() == 2]
    assert pooled and all(not torch.equal(*told[name]) for name in pooled)
