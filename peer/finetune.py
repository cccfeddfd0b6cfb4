"""The peer's entry, `torchrun peer/finetune.py ...` or `python peer/finetune.py ...`, and the only wiring of its parts."""

import argparse
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Started as a script, Python puts this file's folder first on sys.path, where our modules' names would stand for top-level ones.
# The repository root takes its place, so that the launch works from any folder and without an installation.
_ROOT = str(Path(__file__).resolve().parent.parent)
if sys.path and os.path.realpath(sys.path[0] or ".") == os.path.join(_ROOT, "peer"):
    sys.path[0] = _ROOT

from peer.config import PeerConfig  # noqa: E402
from peer.gone import names_in, refuse_gone  # noqa: E402
from peer.joining import Joined, join  # noqa: E402
from peer.launched import Rank  # noqa: E402
from peer.rooms import load_part  # noqa: E402
from peer.units import SAID_TWICE, of_founder, refuse_both, step_samples, warm_up  # noqa: E402
from swarm.base_model import AUTO, family_of  # noqa: E402
from swarm.digest import digest_model  # noqa: E402
from swarm.errors import ExitCode, UserError, run_program  # noqa: E402
from swarm.files import replace  # noqa: E402
from swarm.lifeline import die_with_parent  # noqa: E402
from swarm.logs import setup_logging  # noqa: E402
from swarm.options import build, parse_flags, read_toml  # noqa: E402
from swarm.run_config import RunConfig  # noqa: E402
from swarm.signing import KnownHosts  # noqa: E402

if TYPE_CHECKING:
    from peer.contracts import Method, Model, Params, Source, Sync
    from peer.device import RankGroup
    from peer.prior import ClassPictures
    from peer.trackers import Trackers
    from peer.train import Trainer

log = logging.getLogger("peer.finetune")
_KNOWN_HOSTS = "known_hosts.json"
_CHECKPOINT_SAMPLES = 10_000
"""Alone and without --checkpointing_steps, a checkpoint is saved every so many samples."""


def main(argv: Sequence[str]) -> int:
    if "--assist" in argv and {"--help", "-h"} & set(argv):
        from peer.assist import HELP

        print(HELP, end="")
        return ExitCode.OK
    peer, given = parse(argv)
    if peer.hub_token:  # for gated models and datasets too, which libraries fetch for us
        os.environ["HF_TOKEN"] = peer.hub_token
    if peer.dry_run:
        print(json.dumps({"run": dataclasses.asdict(resolve_run(peer, given).run), "peer": peer.shown()}, indent=2))
        return ExitCode.OK
    die_with_launcher()
    if peer.assist:
        from peer.assist import assist

        return assist(peer, lambda: resolve_run(peer, given))

    from peer.device import RankGroup, choose_device, describe, set_threads
    from peer.stopping import Stop

    rank = Rank.from_environment()
    setup_logging(debug=peer.debug, name=Path(peer.output_dir).name if peer.swarming else "")
    if rank.index:
        logging.getLogger("peer").setLevel(logging.ERROR)
    stop = Stop().listen()
    device = choose_device(peer.device, rank)
    threads = set_threads(peer.num_threads, rank)
    with ExitStack() as closing:
        group = RankGroup(rank, device)
        closing.callback(group.close)
        joined = group.broadcast_object(resolve_run(peer, given) if group.is_main else None)
        repository = prepare_hub(peer) if group.is_main else ""
        trainer, method = assemble(joined, peer, given, group, device, stop, closing)
        about = f"method={joined.run.method} learning_rate={joined.run.learning_rate:g}"
        log.info("training %s %s %s", joined.run.run_name, about, describe(rank, trainer.precision, threads, trainer.params))
        trainer.run()
        if group.is_main:
            result = Path(peer.output_dir) / "model"
            export(method, trainer, joined.run, peer, result)
            log.info("finished samples=%d round=%d result=%s", trainer.trained, trainer.sync.round, result)
        group.barrier()
        if repository:
            from peer.exports.hub import push

            push(result, repository, peer.hub_token)
    return ExitCode.OK


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[PeerConfig, dict[str, Any]]:
    """This peer's configuration, and what was said of the run: the keys of `--config`, overruled by flags. DD_TOKEN stands for `--token`."""
    classes = (RunConfig, PeerConfig)
    refuse_gone(names_in(argv))
    parser = argparse.ArgumentParser(
        prog="finetune.py", description="Train a diffusion model, alone or together with other peers.", allow_abbrev=False
    )
    parser.add_argument("--config", default="", metavar="RUN.toml", help="File with any of these options; flags overrule it.")
    *parts, rest = parse_flags(parser, argv, *classes)
    flags = {name: value for part in parts for name, value in part.items()}
    from_file = read_toml(Path(rest["config"]), *classes) if rest["config"] else {}
    for layer in (flags, from_file):
        refuse_both(layer)
    said = overrule(from_file, flags)
    if "token" in said and not said.get("datasetserver"):
        raise UserError(
            "--token is for a dataset server, and none is named.", fix="Add --datasetserver URL: a token goes to that URL only."
        )
    own = {field.name for field in dataclasses.fields(PeerConfig)}
    peer = build(PeerConfig, {"token": environ.get("DD_TOKEN", "").strip()}, {name: said[name] for name in own & said.keys()})
    if peer.swarming and "num_train_epochs" in said:
        raise UserError(
            "A swarm counts no epochs.", fix="Give --max_train_steps (rounds) or --total_samples instead of --num_train_epochs."
        )
    return peer, {name: value for name, value in said.items() if name not in own}


def overrule(from_file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags win over the file, also where they say the same thing in another unit."""
    twins = SAID_TWICE | {samples: steps for steps, samples in SAID_TWICE.items()}
    hidden = {twins[name] for name in flags if name in twins}
    return {name: value for name, value in from_file.items() if name not in hidden} | dict(flags)


def resolve_run(peer: PeerConfig, given: Mapping[str, Any]) -> Joined:
    """The run: the swarm's, or alone what was given, and no sync."""
    if peer.swarming:
        ask, found = partial(ask_server, peer), partial(found_at_server, peer)
        return join(peer, given, ask, found, partial(complete, digest=True))
    if given.get("sync", "none") != "none":
        raise UserError(
            f"--sync {given['sync']} needs a swarm, and none was named.", fix="Add --datasetserver, --peers or --found, or remove --sync."
        )
    run = build(RunConfig, of_founder(given, peer, Rank.from_environment().world), {"sync": "none"})
    if not run.model:
        raise UserError("No model was given.", fix="Give --model a diffusers folder or a Hub id.")
    if not peer.own_data:
        raise UserError(
            "No data was given.",
            fix="Give --train_data_dir a folder of pictures with a .txt beside each, --dataset_name one of the Hub, or --datasetserver.",
        )
    return Joined(complete(run))


def complete(run: RunConfig, *, digest: bool = False) -> RunConfig:
    """The run with all that its founder works out for the others. Raises UserError when its base model is not there or of no known family."""
    from peer.models.diffusion.source import locate

    source = locate(run.model)
    if run.family == AUTO:
        run = dataclasses.replace(run, family=family_of(source))
        log.info("the model %s is of family=%s", run.model, run.family)
    return dataclasses.replace(run, model_digest=digest_model(source)) if digest else run


def ask_server(peer: PeerConfig, url: str, run_id: str) -> Any:
    from peer.data.dataset_server import fetch_run

    return fetch_run(url, run_id=run_id, token=token_for(url, peer), known_hosts=known_hosts(peer))


def found_at_server(peer: PeerConfig, url: str, run: RunConfig) -> Any:
    from peer.data.dataset_server import found_run

    return found_run(url, run, token=token_for(url, peer), known_hosts=known_hosts(peer))


def known_hosts(peer: PeerConfig) -> KnownHosts:
    """The hosts' keys that this peer was given or has seen, kept beside its own."""
    path = Path(peer.identity_path).with_name(_KNOWN_HOSTS) if peer.identity_path else Path(peer.output_dir) / _KNOWN_HOSTS
    return KnownHosts(path, peer.host_key, remember=not peer.dry_run)


def token_for(url: str, peer: PeerConfig) -> str:
    """The token goes to the server that this peer's owner named, never to one that the swarm names."""
    return peer.token if url == peer.datasetserver else ""


def assemble(
    joined: Joined,
    peer: PeerConfig,
    given: Mapping[str, Any],
    group: "RankGroup",
    device: Any,
    stop: Callable[[], bool],
    closing: ExitStack,
) -> "tuple[Trainer, Method]":
    """Build every part and put them together, resumed if asked; `closing` closes them in the right order."""
    from peer.accounts import Accounts
    from peer.batches import Decoder
    from peer.buckets import Buckets
    from peer.caches import open_caches
    from peer.checkpoint import Checkpoints
    from peer.device import choose_precision
    from peer.ema import Ema
    from peer.encoding import Encoder
    from peer.exports.result import Form, warn_of_unused
    from peer.feed import Feed
    from peer.metrics import Progress
    from peer.occasions import Occasion, Occasions
    from peer.optim import build_optimizer
    from peer.ranked import RankedSync
    from peer.rounding import RoundingOptimizer, keep_in_bf16
    from peer.schedule import build_schedule
    from peer.train import Trainer
    from peer.validation import Validation

    run, output = joined.run, prepare_output(peer)
    own_id = group.broadcast_object(peer_id(peer, output) if group.is_main else None)
    check_batch(run, peer, group.world)
    model = load_model(run, given, device)
    check_resolution(run, model)
    prior = prepare_prior(run, peer, model, device, group)
    if peer.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    method = load_part("methods", run.method).build(run)
    params = method.attach(model)
    bf16 = peer.weights == "bf16"
    if bf16:
        keep_in_bf16(params)
    group.broadcast_(list(params.values()))
    if group.is_main:
        write_run(joined, output)
        warn_of_unused(Form(full_pipeline=peer.save_as_full_pipeline, safetensors=peer.safe_serialization), run)

    source = build_source(joined, peer, group, output, own_id)
    if source:
        closing.callback(source.close)
    run = with_end(run, peer, source, group)
    sync = build_sync(dataclasses.replace(joined, run=run), peer, params, group, output)
    if sync:
        closing.callback(sync.close)
    micro = {"batch_samples": peer.train_batch_size, "accumulation": peer.gradient_accumulation_steps}
    sizes = {"buckets": Buckets.of(run, model.resolution_multiple), "bucket_info": peer.output_bucket_info and group.is_main}
    mixed = "bf16" if bf16 else peer.mixed_precision
    precision = choose_precision(mixed, device, sum(parameter.numel() for parameter in params.values()))
    kept = {"latents": peer.cache_latents, "texts": peer.cache_text}
    caches = open_caches(model, run, precision.dtype, cache_folder(peer, output), int(peer.cache_gib * 2**30), **kept)
    feed = Feed(source, Decoder(run, peer.dataloader_num_workers, caches.latents, prior), group, stopping=stop, **micro, **sizes)
    closing.callback(feed.close)
    trackers = build_trackers(run, peer, output, group)
    closing.callback(trackers.close)
    progress = Progress(output / "metrics.jsonl" if group.is_main else None, total_samples=run.total_samples, tell=trackers.log)
    closing.callback(progress.close)

    checkpoints = Checkpoints(output, peer.checkpoints_total_limit)
    seed = f"{run.seed}:{own_id}"
    average = Ema(params, peer.ema_decay) if peer.use_ema and group.is_main else None
    occasions: list[Occasion] = []
    optimizer = build_optimizer(run, params, device)
    trainer = Trainer(
        model=model,
        encode=Encoder(model, caches),
        params=params,
        optimizer=RoundingOptimizer(optimizer, seed) if bf16 else optimizer,
        learning_rate=build_schedule(run),
        max_grad_norm=run.max_grad_norm,
        precision=precision,
        sync=RankedSync(sync, group, params, moves=run.sync != "none"),
        feed=feed,
        accounts=Accounts(source),
        group=group,
        progress=progress,
        stopping=stop,
        save=checkpoints.save,
        occasions=Occasions(occasions),
        by_rounds=peer.swarming,
        average=average,
        noise_seed=seed,
    )
    step = step_samples(peer, run.target_batch_size, group.world)
    validation = Validation(
        model=model,
        group=group,
        precision=trainer.precision,
        prompts=peer.validation_prompts,
        images=peer.num_validation_images,
        denoising_steps=peer.validation_inference_steps,
        side=run.resolution,
        seed=run.seed,
        folder=output / "validation",
        weights=partial(result_weights, trainer),
        show=lambda step, grid: trackers.picture(trainer.step, "validation", grid),
    )
    occasions += [  # the average first: what follows uses it
        Occasion(1 if average else 0, lambda step: average.follow(step)),
        Occasion((peer.validation_steps or (1 if peer.swarming else 100)) if peer.validation_prompts else 0, validation.draw),
        Occasion(peer.save_steps, partial(save_result, method, trainer, run, peer)),
        Occasion(
            peer.checkpointing_steps or (1 if peer.swarming else max(1, _CHECKPOINT_SAMPLES // step)),
            lambda _: trainer.checkpoint(),
            at_end=False,
        ),
    ]
    if peer.resume_from_checkpoint:
        resume(trainer, checkpoints, peer.resume_from_checkpoint, group)
    return trainer, method


def prepare_output(peer: PeerConfig) -> Path:
    folder = Path(peer.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.", fix="Choose another --output_dir.") from None
    return folder


def write_run(joined: Joined, output: Path) -> None:
    """Beside the checkpoints, what they are of, so that `dd-export` needs no more than the folder."""
    about = {"run": dataclasses.asdict(joined.run), "server_url": joined.server_url, "peers": list(joined.initial_peers)}
    replace(output / "run.json", json.dumps(about, indent=2).encode())


def cache_folder(peer: PeerConfig, output: Path) -> Path:
    return Path(peer.cache_dir) if peer.cache_dir else output / "cache"


def load_model(run: RunConfig, given: Mapping[str, Any], device: Any) -> "Model":
    """The run's base model, or this peer's copy of it elsewhere (`--model`). Raises UserError when the weights are others."""
    from peer.models.diffusion.source import locate

    run = dataclasses.replace(run, **{name: given[name] for name in ("model", "model_config") if given.get(name)})
    source = locate(run.model)
    if run.model_digest and digest_model(source) != run.model_digest:
        raise UserError(
            f"{source} is not the base model of the run '{run.run_name}': its weights have another digest than {run.model_digest[:16]}.",
            fix=f"Fetch {run.model or 'the model'} as the founder has it, or give its folder with --model.",
        )
    family = family_of(source) if run.family == AUTO else run.family
    return load_part("models", family).load(source, device, run)


def prepare_prior(run: RunConfig, peer: PeerConfig, model: "Model", device: Any, group: "RankGroup") -> "ClassPictures | None":
    """The pictures of the class that accompany this peer's own, those that are missing drawn with the base model."""
    if not peer.with_prior_preservation:
        return None
    if run.method == "textual_inversion":
        raise UserError(
            "with_prior_preservation has nothing to preserve: textual_inversion changes nothing of the model.",
            fix="Remove --with_prior_preservation.",
        )
    from peer.device import choose_precision
    from peer.prior import ClassPictures, draw_class_pictures

    folder = Path(peer.class_data_dir)
    draw_class_pictures(
        model,
        folder,
        peer.class_prompt,
        count=peer.num_class_images,
        batch=peer.train_batch_size,
        side=run.resolution,
        denoising_steps=peer.validation_inference_steps,
        seed=run.seed,
        precision=choose_precision(
            peer.mixed_precision, device, sum(p.numel() for part in model.parts.values() for p in part.parameters())
        ),
        group=group,
    )
    return ClassPictures(folder, peer.class_prompt, count=peer.num_class_images, weight=peer.prior_loss_weight, seed=run.seed)


def check_resolution(run: RunConfig, model: "Model") -> None:
    if run.resolution % model.resolution_multiple:
        below = run.resolution // model.resolution_multiple * model.resolution_multiple
        raise UserError(
            f"resolution is {run.resolution}, but this model needs a multiple of {model.resolution_multiple}.",
            fix=f"Use {below or model.resolution_multiple}.",
        )


def samples_of_a_local_step(peer: PeerConfig, world: int) -> int:
    return peer.train_batch_size * peer.gradient_accumulation_steps * world


def check_batch(run: RunConfig, peer: PeerConfig, world: int) -> None:
    step = samples_of_a_local_step(peer, world)
    if peer.swarming and step > run.target_batch_size:
        raise UserError(
            f"One step of this peer takes {step} samples, more than a round of the whole swarm ({run.target_batch_size}).",
            fix="Lower --train_batch_size or --gradient_accumulation_steps.",
        )


def build_source(joined: Joined, peer: PeerConfig, group: "RankGroup", output: Path, own_id: str) -> "Source | None":
    """Rank 0's source of samples: this peer's own when it brings one, else the dataset server; None on other ranks."""
    from peer.contracts import SourceContext

    if not group.is_main:
        return None
    context = SourceContext(
        run=joined.run,
        peer=peer,
        url=joined.server_url,
        token=token_for(joined.server_url, peer),
        known_hosts=known_hosts(peer),
        folder=Path(peer.train_data_dir) if peer.train_data_dir else None,
        peer_id=own_id,
        cache_dir=cache_folder(peer, output),
        cache_gib=peer.cache_gib,
        batch_samples=max(samples_of_a_local_step(peer, group.world), peer.lease_samples // 2),  # a source asks for two at a time
        epochs=None if joined.run.total_samples or peer.swarming else peer.num_train_epochs,
    )
    own = "directory" if peer.train_data_dir else "huggingface"
    return load_part("data", own if peer.own_data else "dataset_server").build(context)


def with_end(run: RunConfig, peer: PeerConfig, source: "Source | None", group: "RankGroup") -> RunConfig:
    """Alone and without --total_samples, the run ends after --num_train_epochs: schedules need to know when that is.

    A stream that does not say how long it is ends with its last row all the same.
    """
    if run.total_samples or peer.swarming:
        return run
    total = group.broadcast_object(length_hint(source) * peer.num_train_epochs if source is not None else None)
    share = peer.lr_warmup_steps if peer.lr_warmup_steps < 1 else 0
    warm = {"lr_warmup_samples": warm_up(share, total)} if share else {}
    return dataclasses.replace(run, total_samples=total, **warm)


def build_sync(joined: Joined, peer: PeerConfig, params: "Params", group: "RankGroup", output: Path) -> "Sync | None":
    """Rank 0's strategy; None on other ranks."""
    from peer.contracts import SyncContext

    if not group.is_main:
        return None
    context = SyncContext(
        run=joined.run,
        peer=peer,
        params=params,
        output_dir=output,
        server_url=joined.server_url,
        initial_peers=joined.initial_peers,
        last_known=joined.last_known,
    )
    return load_part("sync", joined.run.sync).build(context)


def peer_id(peer: PeerConfig, output: Path) -> str:
    """This peer's name in the swarm. Alone there is nobody to be told apart from, and a run must be repeatable."""
    if not peer.swarming:
        return "alone"
    from swarm.dht import Identity

    identity = Identity(Path(peer.identity_path) if peer.identity_path else output / "identity.key")
    identity.close()
    return identity.peer_id


def resume(trainer: "Trainer", checkpoints: Any, wanted: str, group: "RankGroup") -> None:
    """Rank 0 reads and verifies the checkpoint; all ranks go on from it."""
    found = checkpoints.load(wanted) if group.is_main else None
    state = group.broadcast_object(found[1] if found else None)
    if state is None:
        log.info("no checkpoint to resume from yet; starting from the base model")
        return
    trainer.load_state_dict(state)
    if found:
        log.info("resumed checkpoint=%s step=%d samples=%d", found[0], trainer.step, trainer.sync.samples)


def build_trackers(run: RunConfig, peer: PeerConfig, output: Path, group: "RankGroup") -> "Trackers":
    """Rank 0's; on other ranks, trackers of nothing."""
    from peer.trackers import Trackers

    report_to = peer.report_to if group.is_main else "none"
    return Trackers(report_to, output / peer.logging_dir, peer.tracker_project_name, dataclasses.asdict(run))


def result_weights(trainer: "Trainer") -> AbstractContextManager:
    """Within it the parameters are those to export and to draw with: their average where one is kept."""
    return trainer.average.applied() if trainer.average else nullcontext()


def save_result(method: Any, trainer: "Trainer", run: RunConfig, peer: PeerConfig, step: int) -> None:
    """The result as it is after so many global steps, beside those of other steps; of an embedding never the whole pipeline."""
    if trainer.group.is_main:
        name = "learned_embeds" if run.method == "textual_inversion" else "model"
        only = dataclasses.replace(peer, save_as_full_pipeline=False)
        export(method, trainer, run, only, Path(peer.output_dir) / f"{name}-steps-{step}")
    trainer.group.barrier()


def export(method: Any, trainer: "Trainer", run: RunConfig, peer: PeerConfig, target: Path) -> None:
    """Write the result; the one before stays until the new one is whole."""
    from peer.exports.result import Form, Result, write_result

    data = peer.dataset_name or Path(peer.train_data_dir).name or run.dataset_digest[:16]
    about = Result.of(run, samples=trainer.sync.samples, round=trainer.sync.round, dataset=data)
    form = Form(full_pipeline=peer.save_as_full_pipeline, safetensors=peer.safe_serialization)
    with result_weights(trainer):
        write_result(method, trainer.model, trainer.params, target, about, form)


def prepare_hub(peer: PeerConfig) -> str:
    """The repository for the result, which we may write to; '' when it stays here. Raises UserError before a day's training is done for it."""
    if not peer.push_to_hub:
        return ""
    from peer.exports.hub import prepare

    return prepare(peer.hub_model_id or Path(peer.output_dir).resolve().name, peer.hub_token)


def die_with_launcher() -> None:
    """As one of several ranks: stop cleanly when what started us is killed. torchrun starts us in a session of our own."""
    if "TORCHELASTIC_RUN_ID" in os.environ or Rank.from_environment().world > 1:
        die_with_parent(signal.SIGTERM)


def cli() -> int:
    argv = sys.argv[1:]
    debug = "--debug" in argv
    rank = Rank.from_environment()
    if rank.index == 0 or debug:
        return run_program(lambda: main(argv), debug=debug)
    try:  # one line of error for each host, not one for each rank
        return main(argv)
    except UserError as error:
        if rank.local == 0:
            print(f"{socket.gethostname()}, rank {rank.index}: error: {error}", file=sys.stderr, flush=True)
        return error.code


if __name__ == "__main__":
    sys.exit(cli())
