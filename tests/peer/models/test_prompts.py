"""Captions of more than 77 tokens, and text that is read from a layer below the last."""

import dataclasses

import pytest
import torch

from peer.models.diffusion.prompts import tokenize
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests import tiny

CPU = torch.device("cpu")
FIFTEEN, HORSES = "zebra " * 15, "horse " * 15  # five tokens a word, to tokenizers that know no animals but cats and dogs


def model_of(family, **options):
    pipeline = tiny.build(family)
    for name in ("text_encoder", "text_encoder_2") if family != "flux" else ():
        if getattr(pipeline, name, None) is not None:  # three layers: one more can be skipped
            encoder = getattr(pipeline, name)
            tokenizer = pipeline.tokenizer if name == "text_encoder" else pipeline.tokenizer_2
            with torch.random.fork_rng():
                torch.manual_seed(len(name))
                deeper = tiny.clip_text(
                    tokenizer, projection="Projection" in type(encoder).__name__, layers=3, act=encoder.config.hidden_act
                )
            pipeline.register_modules(**{name: deeper})
    return tiny.kind(family)(pipeline, CPU, RunConfig(**options))


@torch.no_grad()
def encode(model, *captions):
    return model.encode_text(captions)


@pytest.mark.parametrize("family", ["sd", "sd2v", "sdxl"])
def test_a_long_caption_is_read_in_chunks_each_as_a_caption_of_its_own(family):
    one, two = model_of(family), model_of(family, max_token_chunks=2)
    long = encode(two, FIFTEEN + HORSES + FIFTEEN, "a toy")
    first, second, short, empty = encode(one, FIFTEEN, HORSES, "a toy", "")["states"]
    torch.testing.assert_close(long["states"], torch.stack([torch.cat([first, second]), torch.cat([short, empty])]))
    assert len(one.pipeline.tokenizer(FIFTEEN).input_ids) == 77
    if "pooled" in long:
        torch.testing.assert_close(long["pooled"], encode(one, FIFTEEN, "a toy")["pooled"])


def test_one_chunk_cuts_a_long_caption_as_the_pipeline_does():
    model = model_of("sd")
    with torch.no_grad():
        expected = model.pipeline.encode_prompt([FIFTEEN * 3], CPU, 1, False)[0]
    torch.testing.assert_close(encode(model, FIFTEEN * 3)["states"], expected)
    torch.testing.assert_close(encode(model, FIFTEEN)["states"], expected)


def test_clip_skip_reads_what_an_encoder_without_the_last_layers_would_say():
    model = model_of("sd", clip_skip=2)
    shallow = tiny.clip_text(model.tokenizer, layers=1)
    names = shallow.state_dict().keys()
    shallow.load_state_dict({name: tensor for name, tensor in model.text_encoder.state_dict().items() if name in names})
    ids = model.tokenizer(["a toy"], padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = shallow(ids).last_hidden_state
    torch.testing.assert_close(encode(model, "a toy")["states"], expected)
    assert not torch.allclose(encode(model_of("sd"), "a toy")["states"], expected)


def test_clip_skip_of_sdxl_is_the_pipelines():
    model = model_of("sdxl", clip_skip=1)
    with torch.no_grad():
        expected, _, pooled, _ = model.pipeline.encode_prompt(["a toy"], device=CPU, do_classifier_free_guidance=False, clip_skip=1)
    text = encode(model, "a toy")
    torch.testing.assert_close(text["states"], expected)
    torch.testing.assert_close(text["pooled"], pooled)
    assert not torch.allclose(encode(model_of("sdxl"), "a toy")["states"], expected)


@pytest.mark.parametrize(("family", "most"), [("sd", 2), ("sdxl", 1)])
def test_an_encoder_keeps_a_layer_to_read(family, most):
    model_of(family, clip_skip=most)
    with pytest.raises(UserError, match=rf"clip_skip is {most + 1}, .*Use {most} or less"):
        model_of(family, clip_skip=most + 1)


def test_t5_reads_as_many_tokens_as_the_run_says():
    assert encode(model_of("flux", max_sequence_length=9), "a toy")["states"].shape == (1, 9, 16)


def test_a_word_of_several_vectors_is_written_out_for_the_encoder():
    pipeline = tiny.build("sd")
    tokenizer = pipeline.tokenizer
    tokenizer.add_tokens(["<m>", "<m>_1"])
    written_out = tokenizer("a <m> <m>_1", padding="max_length").input_ids
    assert len(set(written_out)) == 5
    for chunks in (1, 2):
        assert tokenize(pipeline, tokenizer, ["a <m>"], chunks)[0, 0].tolist() == written_out


def test_the_originals_names_are_understood():
    from peer.launch.command_line import parse

    given = parse(["--clip_penultimate", "True", "--extended_mode_chunks", "3"])[1]
    assert given == {"clip_skip": 1, "max_token_chunks": 3}
    assert parse(["--clip_penultimate=False"])[1] == {"clip_skip": 0} and parse(["--clip_penultimate"])[1] == {"clip_skip": 1}
    with pytest.raises(UserError, match="clip_skip is -1"):
        dataclasses.replace(RunConfig(), clip_skip=-1)
