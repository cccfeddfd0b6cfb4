"""Errors that a user can cause, each one line: what happened, with values, and what to do about it."""

import enum
import sys
import traceback
from collections.abc import Callable


class ExitCode(enum.IntEnum):
    """How a program of ours ends; a supervisor decides by this number whether a restart can help."""

    OK = 0
    FAILED = 1
    CONFIG = 2
    AUTH = 3
    DISK = 4
    MEMORY = 5
    NETWORK = 6


class UserError(Exception):
    """A mistake or a circumstance that the user can mend: `message` says what happened, `fix` what to do."""

    def __init__(self, message: str, *, fix: str, code: ExitCode = ExitCode.CONFIG):
        super().__init__(f"{message} {fix}")
        self.message, self.fix, self.code = message, fix, code


def run_program(main: Callable[[], int | None], *, debug: bool = False) -> int:
    """Run `main` and answer a UserError with one line on stderr and its exit code; `debug` keeps the traceback."""
    try:
        return int(main() or ExitCode.OK)
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.code
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr, flush=True)
        return 130
