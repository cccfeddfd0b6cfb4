"""What learns: a model on its device, what of it is trained, and by which rule."""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from peer.config import PeerConfig
from peer.contracts import LatentBatch, Method, Model, Params, PixelBatch, parts_of
from peer.drawing.validation import check_steps
from peer.launch.launch import Launch
from peer.launch.starting_model import load_model, locate_for
from peer.loop.fused import check_fused
from peer.loop.optim import build_optimizer, check_here
from peer.loop.rounding import RoundingOptimizer
from peer.machine.device import Precision, gains_by_channels_last, precision_of, use_channels_last
from peer.machine.making_room import ways_left
from peer.machine.placing import Placing, placing
from peer.machine.swap import Swap, swaps
from peer.machine.turns import Turns, takes_turns
from peer.machine.waiting import Files
from peer.rooms import load_part
from peer.samples.caches import Caches, open_caches
from peer.samples.class_pictures import ClassPictures, prepare
from peer.samples.encoding import Encoder
from peer.watchdog.room import tell_room
from swarm.errors import UserError
from swarm.founding import check_resolution
from swarm.run.method import method_named
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Learner:
    """encode: what a step learns from, of its pictures and captions. ahead: asks the frozen parts about a window of batches; None: they are
    asked at each step."""

    model: Model
    encode: Callable[[PixelBatch, torch.Generator], LatentBatch]
    params: Params
    optimizer: torch.optim.Optimizer
    precision: Precision
    place: Placing
    ahead: Callable[[Sequence[PixelBatch]], list[PixelBatch]] | None = None
    caches: Caches = field(default_factory=Caches)
    prior: ClassPictures | None = None


def build_learner(launch: Launch, own_id: str) -> tuple[Learner, Method]:
    """The model with what is trained of it, the same at all ranks, and the method that says what that is. Raises UserError."""
    run, peer, device = launch.run, launch.peer, launch.device
    turned, swapped = check_options(peer, run, device, launch.group.world)
    if launch.group.is_main:
        tell_room(device.type, ways_left(run, peer, device), peer.train_batch_size)
    windows = any(launch.group.gather(turned))  # all ranks draw alike; one with turns draws a window
    method = _method(launch)
    placed = _placed(launch, method, turned, swapped)
    prior = None
    if peer.with_prior_preservation:
        prior = prepare(placed.model, run, peer, placed.precision, launch.group, launch.stopping, locate_for(run, launch.given))
    params = _attach(method, placed, peer, device)
    launch.group.broadcast_(list(params.values()))
    caches = _caches(launch, placed, params)
    optimizer = build_optimizer(run, params, device)
    place = placing(device, peer.train_batch_size * (2 if peer.with_prior_preservation else 1))
    encode, ahead = _encoding(placed, Encoder(placed.model, caches, place.lazy), place, params)
    learner = Learner(
        model=placed.model,
        encode=encode,
        ahead=ahead if windows else None,
        params=params,
        optimizer=RoundingOptimizer(optimizer, noise_seed(run, own_id)) if peer.weights == "bf16" else optimizer,
        precision=placed.precision,
        place=place,
        caches=caches,
        prior=prior,
    )
    return learner, method


@dataclass(frozen=True)
class _Placed:
    """turns, swap: what brings parts and blocks of the model to the device, where they do not all stay there."""

    model: Model
    precision: Precision
    turns: Turns | None
    swap: Swap | None


def _method(launch: Launch) -> Method:
    """Raises UserError for files that it lacks, or that nobody asked for; before a model is loaded."""
    if launch.given.get("lora_weights") and not launch.run.lora_weights_digest:
        raise UserError("This run does not begin with a LoRA.", fix="Leave out --lora_weights, or found a run of your own with it.")
    method_named(launch.run.method).check_files(launch.run_here)
    return load_part("methods", launch.run.method).build(launch.run_here)


def _placed(launch: Launch, method: Method, turned: bool, swapped: bool) -> _Placed:
    """The run's model, as it starts, on the device or beside it."""
    run, peer, device = launch.run, launch.peer, launch.device
    files = Files(peer.cache_folder / "waiting") if swapped and peer.swap_to == "disk" else None
    hold = files.hold if files else torch.Tensor.cpu if turned or swapped else None
    model = load_model(run, launch.given, None)
    check_resolution(run, model.resolution_multiple)
    if peer.validation_prompts or peer.with_prior_preservation:
        check_steps(model.pipeline.scheduler, "validation_inference_steps", peer.validation_inference_steps)
    if model.trained_by:
        log.info("the model is trained with %s", model.trained_by)
    if run.resolution < model.made_for and launch.group.is_main:
        log.warning("the model was made for pictures of %d px, and is trained at %d; --resolution %d is what it knows", model.made_for, run.resolution, model.made_for)
    computing = sum(p.numel() for p in model.parts[model.facts.denoiser].parameters())
    precision = precision_of(peer, run, device, computing)
    if precision.scaled and model.facts.half == "bfloat16":
        log.warning("models of %s overflow in fp16, so that steps may be skipped or the run end; --mixed_precision no does not", model.facts.title)
    method.begin(model)
    if peer.base_precision != "auto":
        model.pack(peer.base_precision, device, hold=hold)
    model.place(device, None if peer.ipex else precision.dtype, method.whole(model), hold=hold)  # IPEX casts in its own way
    swap = Swap(model, peer.blocks_to_swap, device, as_they_are=bool(files)) if swapped else None
    turns = Turns(model, device, swap) if turned else None
    if swap and not turns:
        swap.bring_others(model)
    return _Placed(model, precision, turns, swap)


def _attach(method: Method, placed: _Placed, peer: PeerConfig, device: torch.device) -> Params:
    """What is trained of the model, which stays on the device."""
    model = placed.model
    if peer.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    if gains_by_channels_last(peer.channels_last, device):
        log.info("channels_last=%s", ",".join(use_channels_last(model.parts)))
    params = method.attach(model)
    if placed.turns:
        placed.turns.keep(params)
    elif placed.swap:
        placed.swap.bring_others(model)
    return params


def _caches(launch: Launch, placed: _Placed, params: Params) -> Caches:
    peer, most_bytes = launch.peer, int(launch.peer.cache_gib * 2**30)
    kept = {"latents": peer.cache_latents, "texts": peer.cache_text}
    with placed.precision.autocast():
        return open_caches(
            placed.model, launch.run, placed.precision.dtype, peer.cache_folder, most_bytes, **kept, trained=parts_of(params)
        )


def _encoding(placed: _Placed, encoder: Encoder, place: Placing, params: Params) -> tuple[Callable, Callable]:
    """A learner's `encode` and `ahead`."""
    encode, facts, precision = place.latents(encoder), placed.model.facts, placed.precision
    trains_text = bool(parts_of(params) & facts.text_encoders.keys())

    def encode_a_step(batch: PixelBatch, rng: torch.Generator) -> LatentBatch:
        if placed.turns:  # in the middle of a step XLA would compile what was asked before as another program
            placed.turns.begin(facts.denoiser)
        return encode(batch, rng)

    def ahead(batches: Sequence[PixelBatch]) -> list[PixelBatch]:
        with precision.autocast():
            return encoder.ahead(batches, precision.rng_device, texts=not trains_text)

    return encode_a_step, ahead


def check_options(peer: PeerConfig, run: RunConfig, device: torch.device, world: int) -> tuple[bool, bool]:
    """Whether the model's parts take turns on `device`, and whether some of its blocks wait elsewhere. world: ranks of this launch.

    Raises UserError where this machine's options do not go with each other, with the run or with the device; asked before a model is loaded.
    """
    if device.type == "xla":
        importlib.import_module("peer.machine.xla").check_options(peer)
    precision_of(peer, run, device, 0)
    check_here(run, peer.weights, device)
    check_base(peer, run, device)
    check_fused(peer, run, device, world)
    return takes_turns(peer, device), swaps(peer, run, device)


def check_base(peer: PeerConfig, run: RunConfig, device: torch.device) -> None:
    """Raises UserError where --base_precision has nothing to hold in fewer bits, or was not tried; asked before a model is loaded."""
    if peer.base_precision != "auto" and method_named(run.method).whole:
        raise UserError(
            f"--base_precision {peer.base_precision} is for weights that nobody trains, and --method {run.method} trains all of the denoiser's.",
            fix="Remove it; --weights bf16 takes less memory there.",
        )
    if peer.base_precision != "auto" and device.type == "xla":
        raise UserError("--base_precision was not tried on XLA's devices.", fix="Remove it.")


def noise_seed(run: RunConfig, own_id: str) -> str:
    return f"{run.seed}:{own_id}"
