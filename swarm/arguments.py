"""Command lines whose mistakes are told as every other mistake is: one line, without a page of usage before it."""

import argparse
from typing import Any, NoReturn

from swarm.errors import UserError
from swarm.version import VERSION


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, but a wrong argument is a UserError; parse within `run_program`. Every program says its --version."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.add_argument("--version", action="version", version=f"distributed-diffusion {VERSION}", help="Print the version and end.")

    def error(self, message: str) -> NoReturn:
        what = message.removeprefix("argument ")
        raise UserError(f"{what[0].upper()}{what[1:]}.", fix="See --help.")
