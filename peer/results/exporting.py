"""What `dd-export` writes: a result in another form, also when it must be made first from a checkpoint or a state.

A state holds what was trained, as one vector without names; those, and whatever was not trained, come from the run's base model.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from peer.contracts import Params
from peer.export import DTYPES, ExportConfig
from peer.launch.starting_model import load_model, source_of
from peer.loop.train import load_result
from peer.results import destination, loading
from peer.results.checkpoint import Checkpoints, about, replacing, run_of
from peer.results.forms.embedding import write_embedding
from peer.results.forms.lora import write_lora_diffusers, write_lora_kohya
from peer.results.forms.single_file import write_single_file
from peer.results.header import header
from peer.results.result import Result, read_result, tidy, write_result
from peer.rooms import load_part
from peer.sync.engine.state import BadState, State
from peer.sync.engine.transfer.disk import read_state
from peer.sync.engine.vectors import Flat, Schema
from swarm import files
from swarm.base_model import family_of
from swarm.errors import ExitCode, UserError
from swarm.run.method import method_named
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


def export(config: ExportConfig, out: Path) -> None:
    """Write to `out` what `config.state` names. Raises UserError."""
    destination.check(out, folder=config.format == "diffusers")
    destination.keep(out, *_sources(config))
    with destination.writing(out), _here(config, out) as place, found(place, config, out) as result:
        write(result, config, out)


def _sources(config: ExportConfig) -> Iterator[Path]:
    """What of this machine is read, as far as the options say it."""
    if not _is_elsewhere(config.state):
        result = loading.result_in(Path(config.state))
        yield from (Path(config.state), result, *(result / name for name in (loading.LORA, *loading.EMBEDDINGS)))
    yield from _places(config)


def _places(of: ExportConfig | RunConfig) -> Iterator[Path]:
    """Of the base model, where it is no Hub id."""
    yield from (Path(place).expanduser() for place in (of.model, of.model_config) if place)


def _is_elsewhere(state: str) -> bool:
    return state.startswith(("http://", "https://", "/ip4/", "/ip6/", "/dns"))


@contextmanager
def _here(config: ExportConfig, out: Path) -> Iterator[Path]:
    """What is to be exported, on this machine; fetched into a folder that is gone afterwards."""
    if not _is_elsewhere(config.state):
        yield Path(config.state)
        return
    from peer.results.fetching import fetch_state

    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".fetching-", dir=out.parent) as scratch:
        access = {"token": config.token, "host_key": config.host_key, "seconds": config.wait_seconds}
        yield fetch_state(config.state, Path(scratch), **access, look=lambda run: source_of(run, _elsewhere(config)))


def write(result: Path, config: ExportConfig, out: Path) -> None:
    """The result's folder in the form asked for."""
    kept = read_result(result)
    if kept:
        destination.keep(out, *_places(kept.run))
    if config.format == "diffusers":
        with replacing(out.resolve()) as folder:  # where `out` is a link, what it leads to
            _whole(result, kept, config).save(folder)
            tidy(folder)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    part, dtype = out.with_name(f".{out.name}.writing"), getattr(torch, DTYPES[config.dtype])
    try:
        if config.format == "single_file":
            if why := (method_named(kept.run.method) if kept else loading.method_in(result)).in_one_file:
                raise UserError(why, fix="Use --format embedding, beside the base model's own file.")
            model = _whole(result, kept, config)
            write_single_file(model.pipeline, part, dtype, header(model, kept, out.stem, whole=True))
        elif config.format == "embedding":
            write_embedding(result, part, kept.run.family if kept else "", dtype)
        else:
            (write_lora_kohya if config.format == "lora_kohya" else write_lora_diffusers)(result, part, dtype)
        files.flush(part)
        part.replace(out)
        files.flush(out.parent)
    finally:
        part.unlink(missing_ok=True)


def _whole(result: Path, kept: Result | None, config: ExportConfig) -> Any:
    """A model of peer/models with the result in it."""
    cpu = torch.device("cpu")
    if (result / "model_index.json").is_file():
        family = family_of(result)
        return load_part("models", family).load(result, cpu, RunConfig(model=str(result), family=family))
    if config.model:
        run = kept.run if kept else loading.run_on(config.model, config.model_config)
    else:
        base = loading.base_of(result, fix="Give its base model with --model.")
        assert base is not None
        run = base.run
    return loading.as_pipeline(result, load_model(run, _elsewhere(config), cpu))


def _elsewhere(config: ExportConfig) -> dict[str, str]:
    return {"model": config.model, "model_config": config.model_config}


@contextmanager
def found(given: Path, config: ExportConfig, out: Path) -> Iterator[Path]:
    """The result's folder that `given` stands for, made for the time being from a checkpoint or a state. Raises UserError."""
    folder = loading.result_in(given)
    if folder.is_dir() and loading.is_result(folder):
        yield folder
        return
    checkpoint = _checkpoint(given)
    if checkpoint:
        place, trained = _read(checkpoint)
        run = run_of(place) or run_beside(place.parent)
        fill_in = partial(_fill_from_checkpoint, trained)
    else:
        place, run = find(given)
        fill_in = _fill_from_state
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".exporting-", dir=out.parent) as scratch:
        yield _made(place, run, fill_in, config, Path(scratch) / "result")


def _made(place: Path, run: RunConfig, fill_in: Callable[..., tuple[int, int]], config: ExportConfig, target: Path) -> Path:
    """A result folder from the parameters in a checkpoint or state."""
    model = load_model(run, _elsewhere(config), torch.device("cpu"))
    method = load_part("methods", run.method).build(run)
    params = method.attach(model)
    rounds, samples = fill_in(params, place, run)
    log.info("exported round=%d samples=%d state=%s", rounds, samples, place.name)
    write_result(
        method, model, params, target, loading.at(Result.of(run, samples=samples, round=rounds), config.model, config.model_config)
    )
    return target


def _checkpoint(given: Path) -> Path | None:
    """The newest checkpoint of an --output_dir, or `given` itself when it is one."""
    given = Path(os.path.abspath(given))  # of `.` too, whose parent is asked for; a link stays beside the run's run.json
    if (given / "manifest.json").is_file():
        return given
    paths = Checkpoints(given, keep=1).paths() if given.is_dir() and not (given / "settled").is_dir() else []
    return paths[-1] if paths else None


def _read(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """`checkpoint`, or for a damaged one the one before; and what was trained, without the moments, which take twice as much memory."""
    loaded = Checkpoints(checkpoint.parent, keep=1).load(str(checkpoint), fix="Give a result or a final state with --state.")
    assert loaded is not None
    return loaded[0], {name: loaded[1].get(name) for name in ("params", "average")}


def _fill_from_checkpoint(trained: Mapping[str, Any], params: Params, path: Path, run: RunConfig) -> tuple[int, int]:
    """Put what was trained into `params`; round and samples."""
    load_result(params, trained)
    said = about(path)
    return said["round"], said["samples"]


def _fill_from_state(params: Params, path: Path, run: RunConfig) -> tuple[int, int]:
    header = fill(params, path, run).header
    return header.round, header.samples


def find(given: Path) -> tuple[Path, RunConfig]:
    """The state's file, and the run that it is of. Raises UserError."""
    if given.is_file():
        return given, run_beside(given.resolve().parent.parent)
    kept = sorted((given / "settled").glob("round-*.state"))
    if not kept:
        raise UserError(
            f"There is no final state in {given}, and no result or checkpoint." if given.exists() else f"{given} does not exist.",
            fix="Give a result's folder, or the --output_dir of a peer that trained or ran with --assist.",
        )
    return kept[-1], run_beside(given)


def run_beside(folder: Path) -> RunConfig:
    """The run that `folder`/run.json describes."""
    try:
        saved = json.loads((folder / "run.json").read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder / 'run.json'}, which describes the state's run, is missing or damaged.", fix="Copy it there.") from None
    return RunConfig.from_mapping(saved, where=str(folder / "run.json"))


@torch.no_grad()
def fill(params: Params, path: Path, run: RunConfig) -> State:
    """Put what was trained into `params`. Raises UserError (disk) when the file is damaged or of something else."""
    schema, slots = Schema.of(params), load_part("sync", run.sync).strategy(run).slots
    try:
        state = read_state(path, 4 * schema.size * (1 + slots))
        if (state.header.run, state.header.schema) != (run.digest, schema.digest):
            raise BadState("it is of another run or another set of tensors")
    except (OSError, BadState) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"Cannot use {path}: {reason}.", fix="Give another state with --state.", code=ExitCode.DISK) from None
    Flat(params).write(0, state.vectors(schema.size)[0])
    return state
