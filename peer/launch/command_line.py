"""The peer's command line: flags over the file that `--config` names, split into what this machine chooses and what it says of the run."""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peer.config import PeerConfig
from peer.launch.lengths import SAID_TWICE, refuse_both
from peer.launch.retired_flags import names_in, refuse_gone
from swarm.arguments import ArgumentParser
from swarm.errors import UserError
from swarm.options import build, load_toml, parse_flags, read_toml
from swarm.run_config import RunConfig

_EXAMPLES = """examples:
  %(prog)s --datasetserver http://HOST:9090                  join the run that a host serves
  %(prog)s --peers /ip4/203.0.113.7/tcp/31337/p2p/Qm...      join the run that a peer is in
  %(prog)s --check http://HOST:9090                          say what works from here, and end
  %(prog)s --model MODEL --train_data_dir PICTURES           train alone
  %(prog)s --model MODEL --train_data_dir PICTURES --found   found a run without a host
  %(prog)s pause --output_dir out                            rest; resume: train again
  %(prog)s --purge --output_dir out                          delete what a peer stored here
docs/options.md has all options as a page; docs/join.md and docs/operate.md say how to use them."""
_FIRST = (
    "--datasetserver", "--token", "--host_key", "--check",
    "--model", "--train_data_dir", "--method", "--resolution", "--total_samples",
    "--train_batch_size", "--output_dir", "--cache_dir", "--hours", "--config",
)  # fmt: skip
"""For those who join a run, then for those who train their own, then for all."""


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[PeerConfig, dict[str, Any]]:
    """This peer's configuration, and what was said of the run: the keys of `--config`, overruled by flags. DD_TOKEN stands for `--token`."""
    classes = (PeerConfig, RunConfig)
    refuse_gone(names_in(argv))
    parser = ArgumentParser(
        "dd-peer",
        description="Train a diffusion model, alone or together with other peers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        first=_FIRST,
    )
    parser.add_argument("--config", default="", metavar="RUN.toml", help="File with any of these options; flags override it.")
    *parts, rest = parse_flags(parser, argv, *classes)
    flags = {name: value for part in parts for name, value in part.items()}
    if rest["config"]:
        refuse_gone(load_toml(Path(rest["config"])))
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
    if peer.check:  # dd-peer takes it off its command line: wherever else it stands, a peer would train
        raise UserError(
            "--check is a command of dd-peer's command line.",
            fix=f"Start dd-peer --check {peer.check}; torchrun, python and a file for --config have no such command.",
        )
    if peer.swarming and "num_train_epochs" in said:
        raise UserError(
            "A swarm does not count epochs.", fix="Give --max_train_steps (rounds) or --total_samples instead of --num_train_epochs."
        )
    return peer, {name: value for name, value in said.items() if name not in own}


def overrule(from_file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags win over the file, also where they say the same thing in another unit."""
    twins = SAID_TWICE | {samples: steps for steps, samples in SAID_TWICE.items()}
    hidden = {twins[name] for name in flags if name in twins}
    return {name: value for name, value in from_file.items() if name not in hidden} | dict(flags)
