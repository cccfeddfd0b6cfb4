"""This machine's options for memory, alone and together: what is refused and why, as docs/hardware.md lists it, and what goes together changes nothing."""

import dataclasses
import functools
import itertools

import pytest
import torch

from peer.config import PeerConfig
from peer.launch import fitted as counting
from peer.launch import measured_batch
from peer.launch.fitted import fitted
from peer.launch.joining import Joined
from peer.launch.launcher import Rank
from peer.launch.measured_batch import with_largest
from peer.learner import check_options
from peer.machine.fitting import Fit
from swarm.errors import UserError
from swarm.run_config import RunConfig
from tests.conftest import ROOT
from tests.peer.machine.shallow import tiny_model  # noqa: F401
from tests.peer.machine.test_swap import alive, deep_family  # noqa: F401
from tests.peer.models.reading import folders_are_read_once  # noqa: F401
from tests.peer.test_alone import CPU, RUN, flat, start  # noqa: F401

BASE = {"method": "lora", "family": "flux", "clip_grad": "tensor", "model": "x"}
GPU, XLA = torch.device("cuda", 0), torch.device("xla")
OPTIONS = {
    "--gradient_checkpointing": {"gradient_checkpointing": True},
    "--gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "--cache_latents": {"cache_latents": True},
    "--cache_text": {"cache_text": True},
    "--base_precision": {"base_precision": "nf4"},
    "--offload": {"offload": True},
    "--blocks_to_swap": {"blocks_to_swap": 4},
    "--swap_to disk": {"blocks_to_swap": 4, "swap_to": "disk"},
    "--fused_step": {"fused_step": True},
    "--weights bf16": {"weights": "bf16"},
    "--state_on disk": {"state_on": "disk"},
    "--fit auto": {"fit": "auto"},
    "--train_batch_size auto": {"train_batch_size": None},
    "--mixed_precision fp16": {"mixed_precision": "fp16"},
    "--mixed_precision no": {"mixed_precision": "no"},
    "--channels_last": {"channels_last": True},
    "--compile": {"compile": True},
    "--ipex": {"ipex": True},
    "--save_as_full_pipeline": {"save_as_full_pipeline": True},
    "--device cpu": {"device": "cpu"},
    "XLA": {"device": "xla"},
}
"""A machine's own, by their names on the page."""
OF_RUNS = {
    "--method full": {"method": "full"},
    "--method textual_inversion": {"method": "textual_inversion", "placeholder_token": "<dicoo>", "initializer_token": "toy"},
    "--clip_grad global": {"clip_grad": "global"},
    "--sync gradients": {"sync": "gradients", "clip_grad": "none"},
    "--optimizer prodigy": {"optimizer": "prodigy"},
    "--optimizer adamw_schedulefree": {"optimizer": "adamw_schedulefree"},
    "--optimizer adafactor": {"optimizer": "adafactor"},
}
RANKS = "several ranks"
SAID = (
    "was not tried with --(compile|ipex)",
    "not tried on XLA",
    "trains all of the denoiser's",
    "whose weights --base_precision has rounded",
    "makes room on a GPU, and --device is",
    "clips the gradient of all tensors together",
    "adds up all gradients of a round",
    "gradient_accumulation_steps is 2|gradients of 2 ranks are added up",
    "the scaled gradients of fp16",
    "steps all tensors at once",
    "does not work with --mixed_precision",
    "rounds by chance",
    "fp16 (on a CPU is slow|is not what XLA)",
    "(counts the memory of|measures) one GPU or CPU",
    "cannot be combined",
    "(compile|channels_last|ipex) is for .*by XLA",
    "does not run on XLA",
)
"""What each row of the page's table is refused with."""


@functools.cache
def refused():
    """What is said of a pair, as the page lists them."""
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    section = page.split("\n### Options together\n")[1].split("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    found = {}
    for (one, other, _), said in zip(rows, SAID, strict=True):
        pairs = {frozenset(name.strip("`") for name in pair) for pair in itertools.product(one.split(", "), other.split(", "))}
        assert not pairs & found.keys()
        found |= dict.fromkeys(pairs, said)
    return found


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """`asked({"--offload", "--compile"})`: what a peer on a GPU is asked before it loads a model. What it would count and measure fits."""
    monkeypatch.setattr(counting, "counted", lambda *_: Fit({}, 1e9, 1e9, 2e9))
    monkeypatch.setattr(measured_batch, "_key", lambda *_: "here")
    monkeypatch.setattr(measured_batch, "_measure", lambda *_: 1)

    def ask(names):
        own, run = {"mixed_precision": "bf16", "output_dir": str(tmp_path)}, dict(BASE)
        for name in names:
            own |= OPTIONS.get(name, {})
            run |= OF_RUNS.get(name, {})
        peer, run = PeerConfig(**own), RunConfig(**run)
        device = {"cpu": CPU, "xla": XLA}.get(peer.device, GPU)
        rank = Rank(world=2 if RANKS in names else 1)
        peer = fitted(peer, Joined(run), {}, device, rank)
        if peer.train_batch_size is None:
            peer = with_largest(peer, Joined(run), {}, device, rank, lambda: False)
        check_options(peer, run, device, rank.world)

    return ask


def contradict(one, other):
    """Whether they are two values of one option: the later one counts."""
    options = [OPTIONS.get(name) or OF_RUNS.get(name, {}) for name in (one, other)]
    return any(options[0][key] != options[1][key] for key in options[0].keys() & options[1].keys())


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_goes_with_each_other_but_for_what_the_page_lists(option, asked):
    asked({option})
    tried = 0
    for other in (*OPTIONS, *OF_RUNS, RANKS):
        if other == option or contradict(option, other):
            continue
        tried += 1
        said = refused().get(frozenset({option, other}))
        if not said:
            asked({option, other})
            continue
        with pytest.raises(UserError, match=said) as error:
            asked({option, other})
        assert "\n" not in str(error.value) and error.value.fix, "one line, and the way out"
    assert tried > 20


def test_the_page_names_no_option_that_is_not_tried():
    assert {name for pair in refused() for name in pair} <= {*OPTIONS, *OF_RUNS, RANKS} and len(refused()) > 40


# ------------------------------------------------------------ what goes together


CACHED = {"cache_latents": True, "cache_text": True}
LORA = {"method": "lora", "rank": 2}
DRAWING = {"validation_prompts": ("a red square",), "num_validation_images": 1, "validation_steps": 1, "validation_inference_steps": 1}
TURNS = {"offload": True, "gradient_checkpointing": True, **DRAWING}
SWAPPED = {**TURNS, "blocks_to_swap": 6, "swap_to": "disk"}
WAYS = {  # family, or the tiny model; of the run; of this machine at every start; at the first start, and at the second
    "lora": ("flux", LORA, {}, SWAPPED | {"fused_step": True}, {"blocks_to_swap": 3}),
    "lora beside int8": ("flux", LORA, {"base_precision": "int8"}, SWAPPED | {"fused_step": True}, {"blocks_to_swap": 3}),
    "full": ("", {}, {}, TURNS | {"fused_step": True}, {"offload": True}),
    "full in bf16": ("", {"optimizer": "adafactor"}, {"weights": "bf16", "fused_step": True}, TURNS, {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_stopped_with_all_options_goes_on_with_others_and_then_with_none_to_the_same_bits(way, start, deep_family, alive, monkeypatch):  # noqa: F811
    family, of_run, always, first, second = WAYS[way]
    of_run = {"optimizer": "adamw", "clip_grad": "tensor", "max_grad_norm": 0.05, "model": str(deep_family(family)) if family else "", **of_run}
    run, always = dataclasses.replace(RUN, total_samples=12, **of_run), CACHED | always
    plain = start("plain", run=run, **always).run()
    assert not alive.came and len(plain.losses) == 3
    losses = []
    for stop, options in ((1, first), (2, second), (None, {})):
        with monkeypatch.context() as here:
            here.setattr("peer.machine.turns._OWN_MEMORY", ("cpu",) if options else ())
            part = start("parts", run=run, stop_after=stop, resume_from_checkpoint="latest", **always, **options)
        losses += part.run().losses
    assert losses == plain.losses and torch.equal(flat(part.trainer.params), flat(plain.trainer.params))
    assert bool(alive.came) == bool(family) and alive.most <= 2
