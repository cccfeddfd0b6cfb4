"""Command lines whose mistakes are told as every other mistake is: one line, without a page of usage before it."""

import argparse
from typing import NoReturn

from swarm.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, but a wrong argument is a UserError; parse within `run_program`."""

    def error(self, message: str) -> NoReturn:
        what = message.removeprefix("argument ")
        raise UserError(f"{what[0].upper()}{what[1:]}.", fix="See --help.")
