"""`dd-export`: a diffusers folder from a state that an assisting peer kept, `dd-export --state helper --out model`.

The state holds what was trained, as one vector without names; those, and whatever was not trained, come from the run's base model.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peer.contracts import Params
from peer.finetune import export, load_model
from peer.rooms import load_part
from peer.sync.engine.disk import read_state
from peer.sync.engine.outer import load_strategy
from peer.sync.engine.state import BadState, State
from peer.sync.engine.vectors import Flat, Schema
from swarm.errors import ExitCode, UserError, run_program
from swarm.logs import setup_logging
from swarm.options import build, option, parse_flags
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to turn into what."""

    state: str = option("", "The --output_dir of a peer that assists, for its newest settled state, or one of the files in its settled/.")
    out: str = option("model", "Folder to write; the one before stays until the new one is whole.")
    model: str = option("", "Folder of the run's base model; default: where the run says.")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="dd-export", description="Turn a state that a peer kept with --assist into a diffusers folder.")
    flags, _ = parse_flags(parser, argv, ExportConfig)
    config = build(ExportConfig, flags)
    if not config.state:
        raise UserError("No state was given.", fix="For example: dd-export --state helper --out model")
    setup_logging()
    path, run = find(Path(config.state))
    model = load_model(run, {"model": config.model}, torch.device("cpu"))
    method = load_part("methods", run.method).build(run)
    params = method.attach(model)
    state = fill(params, path, run)
    export(method, model, params, Path(config.out))
    log.info("exported round=%d samples=%d state=%s result=%s", state.header.round, state.header.samples, path.name, config.out)


def find(given: Path) -> tuple[Path, RunConfig]:
    """The state's file, and the run that it is of. Raises UserError."""
    if given.is_file():
        path, folder = given, given.resolve().parent.parent
    else:
        folder, kept = given, sorted((given / "settled").glob("round-*.state"))
        if not kept:
            raise UserError(f"There is no settled state in {given}.", fix="Give the --output_dir of a peer that ran with --assist.")
        path = kept[-1]
    try:
        saved = json.loads((folder / "run.json").read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder / 'run.json'}, which says what run the state is of, is missing or damaged.", fix="Copy it there."
        ) from None
    return path, RunConfig.from_mapping(saved, where=str(folder / "run.json"))


@torch.no_grad()
def fill(params: Params, path: Path, run: RunConfig) -> State:
    """Put what was trained into `params`. Raises UserError (disk) when the file is damaged or of something else."""
    schema, slots = Schema.of(params), load_strategy(f"peer.sync.{run.sync}:strategy", run).slots
    try:
        state = read_state(path, 4 * schema.size * (1 + slots))
        if (state.header.run, state.header.schema) != (run.digest, schema.digest):
            raise BadState("it is of another run or another set of tensors")
    except (OSError, BadState) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"Cannot use {path}: {reason}.", fix="Give another state with --state.", code=ExitCode.DISK) from None
    Flat(params).write(0, state.vectors(schema.size)[0])
    return state


def cli() -> int:
    return run_program(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(cli())
