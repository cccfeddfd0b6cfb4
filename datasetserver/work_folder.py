"""Names of what lies in a server's work folder, for the commands that look there without a server, and the flags by which they are told where it is."""

import argparse
from pathlib import Path

from datasetserver.config import ServerConfig
from swarm.errors import ExitCode, UserError

LEDGER = "ledger.sqlite"
HOST_KEY = "host.key"
SERVING = "serving.json"
LOCK = "lock"
"""Made by the first server that starts there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="", metavar="DIR", help="the folder that is served")
    parser.add_argument("--work_dir", default="", metavar="DIR", help="the server's work folder, where it was given one")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def given(args: argparse.Namespace) -> Path:
    """The folder that `add_arguments`' flags name. Raises UserError when they name none."""
    if not (args.dataset or args.work_dir):
        raise UserError("No run is named.", fix="Give the server's --dataset or --work_dir.")
    return ServerConfig(dataset=args.dataset, work_dir=args.work_dir).work_folder()


def unwritable(folder: Path, error: OSError, fix: str) -> UserError:
    return UserError(f"Cannot write in {folder}: {error.strerror}.", fix=fix, code=ExitCode.DISK)
