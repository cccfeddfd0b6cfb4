"""How little of a learned word travels. That it learns what it is shown: test_every_row.py."""

from types import SimpleNamespace

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from peer.contracts import Member
from peer.launch.starting_model import load_model
from peer.methods import textual_inversion
from peer.sync.engine.codec import Wire
from peer.sync.engine.outer import advance
from peer.sync.engine.state import first_state
from peer.sync.engine.vectors import Flat, Schema, flatten
from peer.sync.parameters import strategy
from swarm.errors import UserError
from swarm.run.family import family_named
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.models.reading import folders_are_read_once  # noqa: F401

CPU = torch.device("cpu")


@pytest.mark.parametrize("wire", ["fp32", "fp16", "int8"])
def test_two_peers_agree_on_a_word_by_its_vectors_alone(tiny_model, wire):
    run = RunConfig(model=str(tiny_model), placeholder_token="<dicoo>", initializer_token="a", num_vectors=2, sync="parameters", wire=wire)
    peers = [load_model(run, {}, CPU) for _ in range(2)]
    params = [textual_inversion.build(run).attach(model) for model in peers]
    schema = Schema.of(params[0])
    assert schema.digest == Schema.of(params[1]).digest and schema.size == 2 * 16
    anchor = flatten(params[0], torch.empty(schema.size))
    assert torch.equal(anchor, flatten(params[1], torch.empty(schema.size)))
    learned = [anchor + torch.randn(schema.size, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    travels = Wire.of(wire, schema)
    assert travels.num_bytes <= 4 * schema.size  # of SD 1.x: 768 numbers a vector, 3 KB
    mean = travels.encode(sum(vector - anchor for vector in learned) / 2)
    state = first_state(run.digest, schema.digest, anchor, strategy(run).slots)
    state = advance(state, [Member("a", 1, 8), Member("b", 1, 8)], mean, travels.square_norm(mean), strategy(run), travels)
    for each in params:
        Flat(each).write(0, state.vectors(schema.size)[0])
    (first, second) = (model.encode_text(["a <dicoo>"])["states"] for model in peers)
    assert torch.equal(first, second)
    assert torch.allclose(params[0]["text_encoder.learned_embeds"].flatten(), sum(learned) / 2, atol=5e-3)


def test_a_word_of_stable_diffusion_is_three_kilobytes():
    pipeline = tiny.build_pipeline()
    encoder = CLIPTextModel(
        CLIPTextConfig(num_hidden_layers=1, hidden_size=768, num_attention_heads=12, vocab_size=len(pipeline.tokenizer))
    )
    parts = {"unet": pipeline.unet, "vae": pipeline.vae, "text_encoder": encoder}
    model = SimpleNamespace(facts=family_named("stable_diffusion"), pipeline=pipeline, parts=parts)
    run = RunConfig(placeholder_token="<dicoo>", initializer_token="a")
    params = textual_inversion.build(run).attach(model)
    assert sum(4 * parameter.numel() for parameter in params.values()) == 3072


@pytest.mark.parametrize("word", ["<DiCoo>", "Dog-toy"])
def test_a_word_whose_further_vectors_no_caption_would_bring_is_refused(tiny_model, word):
    """CLIP's tokenizer lower-cases: diffusers then does not find the word, and does not write its vectors out."""

    def attached(word, num_vectors):
        run = RunConfig(model=str(tiny_model), placeholder_token=word, initializer_token="a", num_vectors=num_vectors)
        return textual_inversion.build(run).attach(load_model(run, {}, CPU))

    with pytest.raises(UserError, match=rf"Of the 3 vectors of '{word}' .* would read 1\. Write --placeholder_token in lower case, or use --num"):
        attached(word, 3)
    assert attached(word, 1).keys() == attached(word.lower(), 3).keys() == {"text_encoder.learned_embeds"}


def kept_bytes(model):
    """What the text encoders keep of a caption for the way back, and the gradients of the word."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        model.encode_text(["a <dicoo>"])["states"].sum().backward()
    return sum(sizes)


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_with_gradient_checkpointing_text_encoders_keep_less_and_give_the_same_gradients(tiny_family, family):
    run = RunConfig(model=str(tiny_family(family)), placeholder_token="<dicoo>", initializer_token="a")
    kept, gradients = [], []
    for checkpointed in (False, True):
        model = load_model(run, {}, CPU)
        if checkpointed:
            model.enable_gradient_checkpointing()
        params = textual_inversion.build(run).attach(model)
        kept.append(kept_bytes(model))
        gradients.append(torch.cat([vectors.grad.flatten() for vectors in params.values() if vectors.grad is not None]))
    assert kept[1] < 0.8 * kept[0] and torch.allclose(*gradients)
