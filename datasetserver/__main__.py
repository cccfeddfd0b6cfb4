"""Serve a folder of captioned pictures to a swarm: check them, found the run (or resume it), lease and count its samples."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasetserver import bans, heads, invite, orders, successor, template, tokens
from datasetserver.config import ServerConfig
from datasetserver.work_folder import HOST_KEY, LEDGER
from swarm.arguments import ArgumentParser
from swarm.entries import ended_quietly
from swarm.errors import UserError, run_program
from swarm.options import build, nearest, parse_flags, read_toml
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from swarm.subsets import folders_of

log = logging.getLogger(__name__)

_EXAMPLES = """examples:
  %(prog)s --dataset PICTURES --model MODEL                 serve a run to this machine
  %(prog)s init run.toml --dataset PICTURES --model MODEL   write a run.toml to fill in
  %(prog)s --config run.toml                                serve the run in run.toml
  %(prog)s token add ANNA --tokens FILE                     make a token; it is shown once
  %(prog)s --config run.toml --host 0.0.0.0 --tokens FILE   serve those who hold a token
commands, each with --help:
  token, invite               who may use the server; print the line with which a volunteer joins
  members, ban, unban         list the run's peers; keep one out, let it in again
  trust, distrust             let peers average for all others; end that
  pause, resume, end, extend  pause, go on, end; make the run longer
  heads, discard              list the run's newest states; forget a forged one
  init, successor             write a run.toml to fill in; write a spare for the host's key
docs/host.md says how to host a run, docs/options.md has all options as a page."""
_FIRST = (
    "--config", "--dataset", "--model", "--run_name", "--method", "--resolution", "--total_samples",
    "--host", "--port", "--tokens", "--open", "--work_dir", "--dry_run",
)  # fmt: skip
"""The run first, then the server."""


def cli(argv: Sequence[str] | None = None) -> int:
    """The console script `dd-datasetserver`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return run_program(lambda: _main(argv), debug="--debug" in argv)


def _main(argv: Sequence[str]) -> None:
    if argv and not argv[0].startswith("-"):
        return _command(argv)
    config, run_values = _read(argv)

    with ended_quietly():
        import uvloop

        from datasetserver import server
        from datasetserver.founding import advice, check_host_key, run_to_serve, with_dataset
        from datasetserver.ledger import collect_seldom, stored_run
        from swarm.listening import listen
        from swarm.logs import setup_logging

    setup_logging(debug=config.debug, log_format=config.log_format)
    collect_seldom()
    work_dir = config.work_folder()
    for folder in folders_of(Path(config.dataset)) if config.dataset else ():
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}.", fix="Check --dataset.")
    if config.dry_run:
        run = run_to_serve(run_values, stored_run(work_dir / LEDGER))
        _ingest(work_dir, config, run)
        return
    guard = server.guard(config)
    with listen(config.host, config.port) as sock, server.own_work_dir(work_dir):
        begun = stored_run(work_dir / LEDGER)
        run = run_to_serve(run_values, begun)
        key = HostKey(work_dir / HOST_KEY, missing="draw")  # written after the refusals
        if run:
            check_host_key(run, key, work_dir)
        if begun and key.is_new:
            log.warning(
                "%s has no %s, so the run goes on with a new key, %s: peers that knew the old one need it as --host_key; give bans and discards again",
                work_dir, HOST_KEY, key.public,
            )  # fmt: skip
        data = _ingest(work_dir, config, run)
        run = with_dataset(run, data.first) if run else None
        if run and not begun and config.for_members:
            run = dataclasses.replace(run, members_of=key.public)
            if said := advice(run):
                log.info("%s", said)
        uvloop.run(server.serve(config, run, data, work_dir, sock, guard, key))


def _command(argv: Sequence[str]) -> None:
    """Raises UserError, also when there is no such command."""
    alone = {"init": template, "invite": invite, "successor": successor, "token": tokens}
    if argv[0] in alone:
        return alone[argv[0]].main(argv[1:])
    verbs = {verb: room for room in (heads, bans, orders) for verb in room.VERBS}
    if argv[0] in verbs:
        return verbs[argv[0]].main(argv)
    raise UserError(f"Unknown command {argv[0]}.", fix=f"{nearest(argv[0], (*alone, *verbs))} See --help.".lstrip())


def _read(argv: Sequence[str]) -> tuple[ServerConfig, dict[str, Any]]:
    """This server's options, and what files and flags say about the run; `--config` is a file of both."""
    parser = ArgumentParser(
        "dd-datasetserver",
        description="Serve captioned pictures to a swarm: found the run or resume it, lease its samples and count them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        first=_FIRST,
    )
    parser.add_argument("--config", default="", metavar="RUN.toml", help="File with any of these options; flags override it.")
    server_flags, run_flags, rest = parse_flags(parser, argv, ServerConfig, RunConfig)
    said = read_toml(Path(rest["config"]), ServerConfig, RunConfig) if rest["config"] else {}
    own = {field.name for field in dataclasses.fields(ServerConfig)}
    config = build(ServerConfig, {name: value for name, value in said.items() if name in own}, server_flags)
    of_run = {name: value for name, value in said.items() if name not in own}
    return config, {**of_run, **run_flags}


def _ingest(work_dir: Path, config: ServerConfig, run: RunConfig | None):
    """The dataset to serve, made anew where it is not up to date; what became of it is printed."""
    from tqdm import tqdm

    from datasetserver.ingest import Policy, ingest
    from datasetserver.ledger import epochs_begun
    from datasetserver.prepared import ingested
    from datasetserver.report import report, size

    masks, begun = bool(run and run.masked_loss), epochs_begun(work_dir / LEDGER)
    source = config.source(masks)
    if source is None:
        if masks and begun is None:
            raise UserError("masked_loss is True, but the prepared dataset does not say whether it has masks.", fix="Add --dataset DIR or --dataset_name.")
        data = ingested(work_dir)
        if data is None:
            raise UserError(f"No dataset is ready in {work_dir}.", fix="Add --dataset DIR or --dataset_name.")
        if begun is None:
            _refuse_another_share(run, data)
        print(f"dataset in {work_dir}: {size(data)}", flush=True)
        return data
    data = ingest(
        source,
        work_dir,
        shard_samples=config.shard_samples,
        workers=None if config.ingest_workers < 0 else config.ingest_workers,
        policy=Policy(
            "empty" if config.missing_captions == "none" else config.missing_captions,
            config.duplicates,
            masks,
            run.validation_split if run else 0.0,
        ),
        dry=config.dry_run,
        grow_from=(begun or 0) if config.grow else None,
        frozen=begun is not None,
        resolution=run.resolution if run and not run.num_buckets else 0,
        # disable=None: no bar where nobody sees it
        show=lambda samples, count: tqdm(samples, total=count, desc="checking pictures", unit="", disable=None),
    )
    if begun is None:
        _refuse_another_share(run, data)  # pictures that were prepared before, and have only grown since
    for line in report(source, data, None if config.dry_run else work_dir, masks):
        print(line, flush=True)
    return data


def _refuse_another_share(run: RunConfig | None, data: Any) -> None:
    """Of a run that has begun the dataset's digest says it."""
    if run and run.validation_split != data.held_out:
        raise UserError(
            f"validation_split is {run.validation_split:g}, but the dataset was prepared with {data.held_out:g}.",
            fix=f"Give --validation_split {data.held_out:g}; or add --dataset DIR or --dataset_name, and another --work_dir.",
        )


if __name__ == "__main__":
    sys.exit(cli())
