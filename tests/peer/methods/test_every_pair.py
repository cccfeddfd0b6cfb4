"""Every family with every method that it takes, in whole runs: stopped, resumed, drawn from while it trains, and averaged with another peer's."""

import dataclasses

import pytest
import torch

from peer.contracts import Member
from peer.launch.starting_model import load_model
from peer.rooms import load_part
from peer.sync.engine.codec import Wire
from peer.sync.engine.outer import advance
from peer.sync.engine.state import first_state
from peer.sync.engine.vectors import Flat, Schema, flatten
from peer.sync.parameters import strategy
from swarm.run.method import methods
from swarm.run_config import RunConfig
from tests import tiny
from tests.peer.machine.shallow import shallow_family, tiny_model  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.peer.test_alone import CPU, RUN, flat, start  # noqa: F401

RARE = ("loha", "lokr")
"""Methods that are tried with one family: what they do knows of none."""
OPTIONS = {"lora": {"rank": 2, "lora_dropout": 0.25}, "loha": {"rank": 2}, "lokr": {"rank": 2}, "textual_inversion": {"placeholder_token": "<dicoo>", "initializer_token": "toy"}}
PAIRS = [(family, method) for family in tiny.ONE_OF_EACH for method in methods() if tiny.takes(family, method) and (family == "sd" or method not in RARE)]
every_pair = pytest.mark.parametrize(("family", "method"), PAIRS)


@every_pair
def test_a_run_stopped_and_resumed_goes_on_with_the_same_bits_also_where_it_draws(start, shallow_family, tmp_path, family, method):  # noqa: F811
    options = {"method": method, "model": str(shallow_family(family)), **OPTIONS.get(method, {})}
    run = dataclasses.replace(RUN, learning_rate=3e-2, total_samples=8, lr_warmup_samples=0, **options)
    plain = start("plain", run=run).run()
    draws = {"validation_prompts": ("a <dicoo>",), "num_validation_images": 1, "validation_steps": 1, "validation_inference_steps": 2}
    first = start("parts", run=run, stop_after=1, **draws).run()
    second = start("parts", run=run, resume_from_checkpoint="latest", **draws).run()
    assert first.losses + second.losses == plain.losses and len(first.losses) == len(second.losses) == 1
    assert torch.equal(flat(second.trainer.params), flat(plain.trainer.params))
    assert len({path.read_bytes() for path in (tmp_path / "parts" / "validation").iterdir()}) == 2


@every_pair
def test_two_peers_that_learned_other_things_have_the_same_mean_to_the_bit(shallow_family, family, method):  # noqa: F811
    run = RunConfig(model=str(shallow_family(family)), method=method, sync="parameters", wire="int8", **OPTIONS.get(method, {}))
    peers = [load_model(run, {}, CPU) for _ in range(2)]
    params = [load_part("methods", method).build(run).attach(model) for model in peers]
    schemas = [Schema.of(each) for each in params]
    anchors = [flatten(each, torch.empty(schemas[0].size)) for each in params]
    assert schemas[0].digest == schemas[1].digest and torch.equal(*anchors)
    travels, learned = Wire.of("int8", schemas[0]), [torch.randn(schemas[0].size, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    mean = travels.encode(sum(learned) / 2)
    state = first_state(run.digest, schemas[0].digest, anchors[0], strategy(run).slots)
    state = advance(state, [Member("a", 1, 8), Member("b", 1, 8)], mean, travels.square_norm(mean), strategy(run), travels)
    for each in params:
        Flat(each).write(0, state.vectors(schemas[0].size)[0])
    assert torch.equal(flat(params[0]), flat(params[1])) and not torch.equal(flat(params[0]), anchors[0])
    assert all(torch.equal(one, two) for one, two in zip(*(model.encode_text(["a <dicoo>"]).values() for model in peers), strict=True))
