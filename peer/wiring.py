"""A peer's parts, and the only place that puts them together: what learns, what it learns from, whom it agrees with, who is told."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from operator import length_hint
from pathlib import Path
from typing import Any

import torch

from peer.contracts import Params, Source, SourceContext, Sync, SyncContext
from peer.drawing.gallery import Showing
from peer.drawing.held_out import HeldOut
from peer.drawing.validation import Validation
from peer.figures.audience import show
from peer.figures.metrics import Progress
from peer.figures.terminal import wanted
from peer.figures.trackers import Trackers
from peer.launch import membership
from peer.launch.launch import Launch
from peer.launch.lengths import Every, check_step, local_step_samples, of_epochs
from peer.launch.resolving import known_hosts, token_for
from peer.learner import Learner, build_learner, noise_seed
from peer.loop.accounts import Accounts
from peer.loop.all_ranks import RankedSync
from peer.loop.clipping import Clip
from peer.loop.ema import Ema
from peer.loop.fused import FusedStep
from peer.loop.occasions import Occasion, Occasions, seldom
from peer.loop.optim import told
from peer.loop.rounding import innermost, keep_in_bf16, moments_for
from peer.loop.schedule import build_schedule
from peer.loop.train import Trainer
from peer.machine.compiling import Compiled
from peer.machine.device import check_alike
from peer.machine.disk_space import check_disk
from peer.machine.first_gradient import FirstGradient
from peer.machine.ipex import Ipex, check_ipex
from peer.machine.profiling import Profiler, profile_folder
from peer.machine.trial_of_speed import Trial
from peer.results.checkpoint import Checkpoints
from peer.results.output_folder import Owner, claim, folder_id, lock, mark
from peer.results.writer import Results
from peer.rooms import load_part
from peer.samples.buckets import Buckets
from peer.samples.class_pictures import check_prior
from peer.samples.decoding import Decoder
from peer.samples.feed import Feed, window_steps
from peer.volunteer.resting import Resting
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.ports import refuse_busy
from swarm.run.strategy import swarms
from swarm.run_identity import PLACES
from swarm.subsets import folders_of

log = logging.getLogger(__name__)


def assemble(launch: Launch) -> tuple[Trainer, Results]:
    """The trainer with all its parts, resumed where there is what to resume, and what writes its result. Raises UserError."""
    check_step(launch.peer, launch.run, launch.group.world)
    check_prior(launch.peer, launch.run)
    check_alike(launch.group, launch.device, launch.peer.weights)
    check_held_out(launch)
    if launch.peer.ipex:
        check_ipex(launch.device)
    if launch.group.is_main:
        launch.closing.enter_context(lock(launch.output))
    own_id = launch.group.broadcast_object(peer_id(launch) if launch.group.is_main else None)
    launch = admitted(launch, own_id)
    learner, method = build_learner(launch, own_id)
    step = local_step_samples(launch.peer, launch.group.world)
    source = build_source(launch, own_id, step * window_steps(step // launch.group.world) if learner.ahead else 0)
    launch = with_end(launch, source)
    if launch.group.is_main:
        claim_output(launch)
        trained = sum(parameter.numel() for parameter in learner.params.values())
        check_disk(launch.output, launch.peer, trained, launch.run.optimizer)
    trainer, trackers = build_trainer(launch, learner, source, own_id)
    results = Results(method, trainer, launch.run_here, launch.peer)
    trainer.occasions = build_occasions(launch, trainer, results, trackers, own_id, source)
    resume(trainer, launch)
    if launch.group.is_main:
        mark(launch.output, owner(launch))
    return trainer, results


def check_held_out(launch: Launch) -> None:
    """Raises UserError where the pictures that --validation_split holds out would be trained; asked before a model is loaded."""
    share, peer = launch.run.validation_split, launch.peer
    if share and peer.source == "huggingface":
        raise UserError(
            f"validation_split is {share:g}, and no row of --dataset_name can be held out: it is streamed.",
            fix="Give --train_data_dir, or take the rows from a dataset server (dd-datasetserver --dataset_name).",
        )
    if share and launch.device.type == "xla":
        log.warning("validation_split=%g: this peer measures nothing, since that was not tried on XLA's devices", share)


def peer_id(launch: Launch) -> str:
    """This peer's name in the swarm. Alone there is nobody to be told apart from, and a run must be repeatable."""
    if not launch.peer.swarming:
        return "alone"
    from swarm.identity import Identity  # hivemind: not needed alone

    identity = Identity(launch.peer.identity_file)
    identity.close()
    return identity.peer_id


def admitted(launch: Launch, own_id: str) -> Launch:
    """The launch with rank 0's membership. Called before the model is loaded: a server refuses within 10 s, a model takes minutes.

    Raises UserError when the server refuses, the host has banned this peer, or another program has the peer's port.
    """
    if not (launch.group.is_main and swarms(launch.run.sync)):
        return launch
    if reason := launch.bans.reason(own_id):
        raise UserError(f"The host has banned this peer: {reason}.", fix="Ask the host.", code=ExitCode.AUTH)
    if not launch.peer.client_mode:
        refuse_busy(launch.peer.host_maddrs)
    return dataclasses.replace(launch, members=membership.kept(launch.joined, launch.peer, launch.bans, launch.closing))


def build_source(launch: Launch, own_id: str, window_samples: int = 0) -> Source | None:
    """Rank 0's source of samples: this peer's own when it brings one, else the dataset server; None on other ranks."""
    if not launch.group.is_main:
        return None
    joined, peer = launch.joined, launch.peer
    context = SourceContext(
        run=joined.run,
        peer=peer,
        url=joined.server_url,
        token=token_for(joined.server_url, peer),
        end=launch.end,
        bans=launch.bans,
        known_hosts=known_hosts(peer),
        peer_id=own_id,
        batch_samples=max(local_step_samples(peer, launch.group.world), peer.lease_samples // 2),  # a source asks for two at a time
        window_samples=window_samples,
        epochs=None if joined.run.total_samples or peer.swarming else peer.num_train_epochs,
    )
    source = load_part("data", peer.source).build(context)
    launch.closing.callback(source.close)
    return source


def with_end(launch: Launch, source: Source | None) -> Launch:
    """Alone and without --total_samples, the run ends after --num_train_epochs: schedules need to know when that is.

    A stream that does not say how long it is ends with its last row all the same.
    """
    run, peer = launch.run, launch.peer
    if run.total_samples or peer.swarming:
        return launch
    samples = launch.group.broadcast_object(length_hint(source) if source is not None else None)
    run = of_epochs(run, peer, samples)
    return dataclasses.replace(launch, joined=dataclasses.replace(launch.joined, run=run), end=End(run))


def owner(launch: Launch) -> Owner:
    """What this start's folder says of its run, which is all that `dd-export` needs."""
    joined, peer = launch.joined, launch.peer
    return Owner(id=folder_id(joined.run, peer), name=joined.run.run_name, alone=not peer.swarming, about=joined.about())


def claim_output(launch: Launch) -> None:
    """Before anything of the run is written, its folder is that of no other run."""
    joined, peer = launch.joined, launch.peer
    own = [peer.train_data_dir, *map(str, folders_of(Path(peer.train_data_dir)))] if peer.train_data_dir else []
    needed = (*(value for name in PLACES for value in (getattr(joined.run, name), launch.given.get(name, ""))), *own, peer.class_data_dir)
    used = [Path(place) for place in needed if place and Path(place).exists()]
    claim(launch.output, owner(launch), wanted=peer.resume_from_checkpoint, used=used)


def build_checkpoints(launch: Launch, optimizer: torch.optim.Optimizer) -> Checkpoints:
    """Marked with what their contents fit alone: moments fit their optimizer, places in the data fit these data."""
    run, peer = launch.run, launch.peer
    fits = {"run": folder_id(run, peer), "data": peer.own_data_told, "weights": peer.weights, "optimizer": told(innermost(optimizer))}
    return Checkpoints(launch.output, peer.checkpoints_total_limit, fits, run.to_mapping())


def build_trainer(launch: Launch, learner: Learner, source: Source | None, own_id: str) -> tuple[Trainer, Trackers]:
    """The loop of `learner` over the samples of `source` (None on other ranks than 0), without occasions; and who is told its figures."""
    run, peer, group, closing = launch.run, launch.peer, launch.group, launch.closing
    trackers = build_trackers(launch)
    closing.callback(trackers.close)
    sync: Sync | None = None
    # Before the sidecar starts, which writes to the same terminal.
    progress = build_progress(launch, own_id, trackers, lambda: getattr(sync, "seen", {}))
    sync = build_sync(launch, learner.params)
    if peer.weights == "bf16":  # not before the swarm's first state is made of them, which is the base model to the bit at every peer
        keep_in_bf16(learner.params)
    feed = build_feed(launch, learner, source)
    profiler = Profiler(peer.profile_duration if group.is_main else 0, profile_folder(launch.output), launch.device)
    closing.callback(profiler.close)
    clip = Clip(run.clip_norm, by_tensor=run.clip_grad == "tensor")
    trainer = Trainer(
        model=learner.model,
        encode=learner.encode,
        params=learner.params,
        optimizer=learner.optimizer,
        learning_rate=build_schedule(run),
        clip=clip,
        fused=FusedStep(learner.params, learner.optimizer, clip) if peer.fused_step else None,
        precision=learner.precision,
        sync=RankedSync(sync, group, learner.params, moves=swarms(run.sync)),
        feed=feed,
        accounts=Accounts(source),
        group=group,
        progress=progress,
        stopping=launch.stopping,
        resting=Resting(launch.output, peer.hours) if group.is_main else lambda: False,
        save=build_checkpoints(launch, learner.optimizer).save,
        occasions=Occasions(),
        by_rounds=peer.swarming,
        averages=swarms(run.sync),
        average=Ema(learner.params, peer.ema_decay) if peer.use_ema and group.is_main else None,
        noise_seed=noise_seed(run, own_id),
        trial=build_trial(launch, learner),
        compare=FirstGradient(learner.model, learner.params, peer.base_precision) if peer.base_precision != "auto" and group.is_main else None,
        gradient_point=getattr(learner.optimizer, "gradient_point", nullcontext),
        boundary=learner.place.boundary,
        stepped=profiler.stepped,
    )
    return trainer, trackers


def build_progress(launch: Launch, own_id: str, trackers: Trackers, swarm: Callable[[], Mapping[str, Any]]) -> Progress:
    """The figures, on the disk and, of rank 0, where people look; swarm: what the sidecar sees of the others."""
    peer, is_main, closing = launch.peer, launch.group.is_main, launch.closing

    def total_samples() -> int:
        return launch.end.total

    progress = Progress(
        launch.output / "metrics.jsonl" if is_main else None,
        total_samples=total_samples,
        quiet=wanted(peer.log_format),
        print_loss=peer.print_loss,
        swarm=swarm,
        tell=trackers.log,
    )
    closing.callback(progress.close)
    if is_main:
        show(peer, launch.run, own_id, progress.values, total_samples, closing)
    return progress


def build_feed(launch: Launch, learner: Learner, source: Source | None) -> Feed:
    run, peer, group = launch.run, launch.peer, launch.group
    feed = Feed(
        source,
        Decoder(run, peer.dataloader_num_workers, learner.caches.latents, peer.prior_loss_weight if peer.with_prior_preservation else None),
        group,
        batch_samples=peer.train_batch_size,
        accumulation=peer.gradient_accumulation_steps,
        stopping=launch.stopping,
        buckets=Buckets.of(run, learner.model.resolution_multiple),
        bucket_info=peer.output_bucket_info and group.is_main,
        ahead_steps=peer.loader_prefetch_size,
        placed_steps=peer.device_prefetch_size,
        place=learner.place.whole if learner.ahead else learner.place.pixels,
        encode=learner.ahead,
        beside=learner.prior and learner.prior.beside,
    )
    launch.closing.callback(feed.close)
    return feed


def build_trial(launch: Launch, learner: Learner) -> Trial | None:
    """Of the other way to compute that this machine asked for."""
    if not (launch.peer.compile or launch.peer.ipex):
        return None
    way = Ipex() if launch.peer.ipex else Compiled(learner.model.parts[learner.model.facts.denoiser])
    return Trial(way, learner.params, learner.precision, launch.group)


def build_sync(launch: Launch, params: Params) -> Sync | None:
    """Rank 0's strategy; None on other ranks."""
    if not launch.group.is_main:
        return None
    joined = launch.joined
    context = SyncContext(
        run=joined.run,
        peer=launch.peer,
        params=params,
        output_dir=launch.output,
        server_url=joined.server_url,
        initial_peers=joined.initial_peers,
        known=joined.known,
        end=launch.end if swarms(joined.run.sync) else None,
        members=launch.members,
        last_known=joined.last_known,
    )
    sync = load_part("sync", joined.run.sync).build(context)
    launch.closing.push(lambda kind, error, trace: sync.close(str(error) if isinstance(error, Exception) else ""))
    return sync


def build_trackers(launch: Launch) -> Trackers:
    """Rank 0's; on other ranks, trackers of nothing."""
    peer = launch.peer
    report_to = peer.report_to if launch.group.is_main else "none"
    return Trackers(report_to, launch.output / peer.logging_dir, peer.tracker_project_name, dataclasses.asdict(launch.run))


def build_occasions(
    launch: Launch, trainer: Trainer, results: Results, trackers: Trackers, own_id: str, source: Source | None
) -> Occasions:
    """What is done every N global steps: the running mean first, because what follows uses it."""
    run, peer, average = launch.run, launch.peer, trainer.average
    validation = Validation(
        model=trainer.model,
        group=launch.group,
        precision=trainer.precision,
        prompts=peer.validation_prompts,
        images=peer.num_validation_images,
        denoising_steps=peer.validation_inference_steps,
        side=run.resolution,
        seed=run.seed,
        folder=launch.output / "validation",
        weights=results.weights,
        show=lambda step, grid: trackers.picture(trainer.step, "validation", grid),
        share=build_showing(launch, trainer, own_id),
    )

    def measured(loss: float) -> None:
        trainer.sync.measured(loss)
        trainer.progress.measured(trainer.step, loss)

    measure = HeldOut(
        model=trainer.model,
        group=launch.group,
        precision=trainer.precision,
        run=run,
        samples=source.held_out if source else tuple,
        weights=nullcontext if peer.use_ema and peer.swarming else results.weights,  # what is told the others is of the state
        show=measured,
    ).measure

    def checkpoint(step: int) -> None:
        """All ranks call it: where one of 14 GB takes a slow disk 10 minutes, the group would take rank 0 for lost."""
        trainer.checkpoint()
        launch.group.barrier()

    every = Every.of(peer, run, launch.group.world)
    if launch.device.type == "xla":
        every = dataclasses.replace(every, held_out=0)
    if every.held_out_share:
        measure = seldom(measure, every.held_out_share, agree=launch.group.broadcast_object)
    if every.checkpoint_share:
        checkpoint = seldom(checkpoint, every.checkpoint_share, agree=launch.group.broadcast_object)
    return Occasions(
        [
            *([Occasion(1, average.follow)] if average else []),
            Occasion(every.validation, validation.draw),
            Occasion(every.held_out, measure),
            Occasion(peer.save_steps, results.save),
            Occasion(every.checkpoint, checkpoint, at_end=False),
        ]
    )


def build_showing(launch: Launch, trainer: Trainer, own_id: str) -> Callable[[list[tuple[str, Any]]], None]:
    """Where pictures go besides the disk and the trackers: to the dataset server's page, where there is a server that may want them."""
    url, peer = launch.joined.server_url, launch.peer
    if not (url and peer.swarming and peer.validation_prompts and launch.group.is_main):
        return lambda drawn: None
    showing = Showing.to_server(url, peer, launch.run.run_id, own_id)
    launch.closing.callback(showing.close)
    return lambda drawn: showing.show(trainer.sync.round, trainer.sync.samples, drawn)


def resume(trainer: Trainer, launch: Launch) -> None:
    """Rank 0 reads and verifies the checkpoint that was asked for, in a swarm its own latest unasked; all ranks go on from it."""
    wanted = launch.peer.resume_from_checkpoint
    if wanted == "none" or (wanted == "auto" and not launch.peer.swarming):
        return
    of_run = launch.run if launch.peer.swarming else None
    found = build_checkpoints(launch, trainer.optimizer).asked_for(wanted, of_run) if launch.group.is_main else None
    if found:
        begin_other_data(trainer, found[1], found[0])
    average = found[1].pop("average", None) if found else None  # rank 0 alone keeps one
    state = launch.group.broadcast_state(found[1] if found else None)
    if state is None:
        if wanted != "auto":
            log.info("no checkpoint to resume from yet; starting from the base model")
        return
    trainer.load_state_dict({**state, "optimizer": moments_for(trainer.optimizer, state["optimizer"]), "average": average})
    if found:
        log.info("resumed checkpoint=%s step=%d trained=%d", found[0], trainer.step, trainer.trained)


def begin_other_data(trainer: Trainer, state: dict[str, Any], path: Path) -> None:
    """Where the checkpoint at `path` has its place in other data than these, its `state` says their beginning instead. Rank 0 alone.

    A folder's pictures are compared by the folder's source itself.
    """
    own = trainer.feed.state_dict()
    if of_one_dataset(own["source"], state["feed"]["source"]):
        return
    log.warning("the data are not those of %s; they are trained from their beginning", path)
    state.update(feed=own, accounts=trainer.accounts.state_dict())


def of_one_dataset(own: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether two states of sources are of one kind of source, which their names tell, and of one dataset where they say which.

    A stream of 0.1.0 did not say it.
    """
    named = "dataset"
    return {*own, named} == {*saved, named} and own.get(named) == saved.get(named, own.get(named))
