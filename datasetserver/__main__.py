"""Serve a folder of captioned pictures to a swarm: check them, found the run (or resume it), lease and count its samples."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasetserver.config import ServerConfig
from swarm.errors import ExitCode, UserError, run_program
from swarm.options import build, parse_flags, read_toml
from swarm.run_config import RunConfig

_LISTED = 20  # rejected files shown on the terminal; all are in rejected.csv


def cli(argv: Sequence[str] | None = None) -> int:
    """The console script `dd-datasetserver`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return run_program(lambda: _main(argv), debug="--debug" in argv)


def _main(argv: Sequence[str]) -> None:
    config, run_values = _read(argv)

    import uvloop

    from datasetserver import server
    from swarm.logs import setup_logging

    setup_logging(debug=config.debug)
    folder = Path(config.dataset)
    work_dir = config.work_folder()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Check --dataset.")
    with server.listen(config.host, config.port) as sock, server.own_work_dir(work_dir):
        data = _ingest(folder, work_dir, config)
        run = found_run(run_values, data.digest)
        uvloop.run(server.serve(config, run, data, work_dir, sock))


def _read(argv: Sequence[str]) -> tuple[ServerConfig, dict[str, Any]]:
    """This server's options, and what file and flags say about the run."""
    parser = argparse.ArgumentParser("python -m datasetserver", description=__doc__, allow_abbrev=False)
    server_flags, run_flags, _ = parse_flags(parser, argv, ServerConfig, RunConfig)
    config = build(ServerConfig, server_flags)
    if not config.dataset:
        raise UserError("No dataset is given.", fix="Add --dataset DIR, a folder of pictures with a .txt beside each.")
    return config, {**(read_toml(Path(config.run), RunConfig) if config.run else {}), **run_flags}


def found_run(values: dict[str, Any], dataset_digest: str) -> RunConfig:
    """The run's configuration, complete with the digests of its model and data, which every peer will check against its own.

    Raises UserError when there is no model, or when a digest that was given is not the one found.
    """
    run = build(RunConfig, values)
    if run.dataset_digest not in ("", dataset_digest):
        raise UserError(
            f"The run's dataset is {run.dataset_digest[:16]}, but this folder's is {dataset_digest[:16]}.",
            fix="Give the folder of that run, or remove dataset_digest to found a new one.",
        )
    return replace(run, dataset_digest=dataset_digest, model_digest=_model_digest(run))


def _model_digest(run: RunConfig) -> str:
    from swarm.digest import digest_model

    if not run.model:
        raise UserError("No model is given.", fix="Add --model with a diffusers folder or a Hub id.")
    folder = Path(run.model)
    if not folder.is_dir():
        if run.model_digest:
            return run.model_digest
        folder = _download(run.model)
    found = digest_model(folder)
    if run.model_digest not in ("", found):
        raise UserError(
            f"The weights of {run.model} have digest {found[:16]}, not {run.model_digest[:16]}.",
            fix="Give the model that the run began with.",
        )
    return found


def _download(model: str) -> Path:
    """The weights of a Hub id in the local cache, fetched when they are not there."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=["model_index.json", "*/*.json", "*/*.safetensors"]))
    except HFValidationError:
        raise UserError(f"{model} is neither a folder nor a Hub id.", fix="Check --model.") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"The model {model} is no folder here, and cannot be fetched: {first}",
            fix="Check the name and the connection, or give a folder.",
            code=ExitCode.NETWORK,
        ) from None


def _ingest(folder: Path, work_dir: Path, config: ServerConfig):
    from tqdm import tqdm

    from datasetserver.ingest import find_pairs, ingest

    total = len(find_pairs(folder))
    data = ingest(
        folder,
        work_dir,
        shard_samples=config.shard_samples,
        workers=None if config.ingest_workers < 0 else config.ingest_workers,
        # disable=None: no bar where nobody sees it
        show=lambda samples: tqdm(samples, total=total, desc="checking pictures", unit="", disable=None),
    )
    shards = len(data.manifest.shards)
    what = "checked" if data.fresh else "unchanged"
    print(f"dataset {folder}: {data.manifest.total} samples in {shards} shards ({what}), {len(data.rejected)} files left out", flush=True)
    for name, reason in data.rejected[:_LISTED]:
        print(f"  left out {os.fsencode(name).decode(errors='backslashreplace')}: {reason}", flush=True)
    if len(data.rejected) > _LISTED:
        print(f"  ... all of them are in {work_dir / 'rejected.csv'}", flush=True)
    return data


if __name__ == "__main__":
    sys.exit(cli())
