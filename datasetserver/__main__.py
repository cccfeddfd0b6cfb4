"""Serve a folder of captioned pictures to a swarm: check them, found the run (or resume it), lease and count its samples."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasetserver import orders, tokens
from datasetserver.config import ServerConfig
from swarm.errors import UserError, run_program
from swarm.options import build, parse_flags, read_toml
from swarm.run_config import RunConfig

_LISTED = 20  # rejected files shown on the terminal; all are in rejected.csv


def cli(argv: Sequence[str] | None = None) -> int:
    """The console script `dd-datasetserver`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return run_program(lambda: _main(argv), debug="--debug" in argv)


def _main(argv: Sequence[str]) -> None:
    if list(argv[:1]) == ["token"]:
        return tokens.main(argv[1:])
    if argv and argv[0] in orders.VERBS:
        return orders.main(argv)
    config, run_values = _read(argv)

    import uvloop

    from datasetserver import server
    from datasetserver.founding import run_to_serve
    from datasetserver.ledger import stored_run
    from swarm.logs import setup_logging

    setup_logging(debug=config.debug)
    folder = Path(config.dataset)
    work_dir = config.work_folder()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Check --dataset.")
    if config.dry_run:
        _ingest(folder, work_dir, config)
        return
    guard = server.guard(config)
    with server.listen(config.host, config.port) as sock, server.own_work_dir(work_dir):
        data = _ingest(folder, work_dir, config)
        run = run_to_serve(run_values, stored_run(work_dir / server.LEDGER), data.first)
        uvloop.run(server.serve(config, run, data, work_dir, sock, guard))


def _read(argv: Sequence[str]) -> tuple[ServerConfig, dict[str, Any]]:
    """This server's options, and what file and flags say about the run."""
    parser = argparse.ArgumentParser("python -m datasetserver", description=__doc__, allow_abbrev=False)
    server_flags, run_flags, _ = parse_flags(parser, argv, ServerConfig, RunConfig)
    config = build(ServerConfig, server_flags)
    if not config.dataset:
        raise UserError("No dataset is given.", fix="Add --dataset DIR, a folder of pictures with a .txt beside each.")
    return config, {**(read_toml(Path(config.run), RunConfig) if config.run else {}), **run_flags}


def _ingest(folder: Path, work_dir: Path, config: ServerConfig):
    from tqdm import tqdm

    from datasetserver.ingest import Policy, find_pairs, ingest

    total = len(find_pairs(folder))
    data = ingest(
        folder,
        work_dir,
        shard_samples=config.shard_samples,
        workers=None if config.ingest_workers < 0 else config.ingest_workers,
        policy=Policy(config.missing_captions, config.duplicates),
        dry=config.dry_run,
        # disable=None: no bar where nobody sees it
        show=lambda samples: tqdm(samples, total=total, desc="checking pictures", unit="", disable=None),
    )
    shards = len(data.manifest.shards)
    what = "checked" if data.fresh else "unchanged"
    print(f"dataset {folder}: {data.manifest.total} samples in {shards} shards ({what}), {len(data.rejected)} files left out", flush=True)
    for name, reason in data.rejected[:_LISTED]:
        print(f"  left out {os.fsencode(name).decode(errors='backslashreplace')}: {reason}", flush=True)
    if len(data.rejected) > _LISTED:
        rest = "" if config.dry_run else f"; all of them are in {work_dir / 'rejected.csv'}"
        print(f"  ... and {len(data.rejected) - _LISTED} more{rest}", flush=True)
    if data.duplicates:
        rest = "" if config.dry_run else f", see {work_dir / 'duplicates.csv'}"
        print(f"  {len(data.duplicates)} pictures are there more than once{rest}; --duplicates drop leaves them out", flush=True)
    return data


if __name__ == "__main__":
    sys.exit(cli())
