"""Errors that a user can cause, each one line: what happened, with values, and what to do about it."""

import asyncio
import contextlib
import enum
import errno
import logging
import os
import re
import ssl
import sys
import traceback
from collections.abc import Callable, Iterator

from swarm.logs import line
from swarm.memory_advice import memory_advice


class ExitCode(enum.IntEnum):
    """How a program of ours ends; a supervisor decides by this number whether a restart can help."""

    OK = 0
    FAILED = 1
    CONFIG = 2
    AUTH = 3
    DISK = 4
    MEMORY = 5
    NETWORK = 6
    CLOCK = 7
    STALLED = 8
    OVER = 9
    """The run is, and nobody is left who has its last state."""


STOPPED_AT_ONCE = 130
"""The exit status after a second signal: the shells' own 128 + SIGINT."""


class UserError(Exception):
    """A mistake or a circumstance that the user can mend: `message` says what happened, `fix` what to do."""

    def __init__(self, message: str, *, fix: str, code: ExitCode = ExitCode.CONFIG):
        super().__init__(f"{message} {fix}")
        self.message, self.fix, self.code = message, fix, code


class Unanswered(UserError):
    """Nobody answers: whoever was asked may be back later."""


_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_MEMORY = re.compile(
    r"can't allocate memory|RESOURCE_EXHAUSTED"  # torch's own on a CPU; XLA
    r"|(CUDA|HIP)( driver)? error: out of memory|_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'out of memory'"  # the driver; cuBLAS, cuDNN, cuSOLVER; NCCL
)
"""What is said by all that has no exception of its own for it: a GPU that is full may say so outside torch's allocator, too."""


def system_number(error: BaseException | None) -> int:
    """The system's number of an error, 0 where it has none. safetensors, being Rust, gives it in its text only: '(os error 28)'."""
    if isinstance(error, OSError):
        return error.errno or 0
    # By its name, since safetensors is not everybody's.
    found = re.search(r"os error (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(found[1]) if found else 0


def of_machine(error: BaseException) -> UserError | None:
    """What the machine was short of when `error` was raised, memory or disk, as the circumstance it is; None for all other errors."""
    text, number = str(error), system_number(error)
    if number in _FULL:
        about = f" ({error.filename})" if getattr(error, "filename", None) else ""
        reason = getattr(error, "strerror", None) or os.strerror(number)
        return UserError(f"{reason}{about}.", fix="Free some space, then start again.", code=ExitCode.DISK)
    # By its name, since torch is not everybody's.
    short = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY.search(text)
    if short or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        first = (text.strip().splitlines() or ["of the host"])[0][:300]
        return UserError(f"Out of memory: {first}", fix=memory_advice(), code=ExitCode.MEMORY)
    return None


def why(error: BaseException) -> str:
    """Why nobody answered, in the system's words ('Connection refused') where it has some, without those that a library put around them."""
    error = getattr(error, "os_error", error)  # aiohttp's own say 'Cannot connect to host ... ssl:default [...]'
    if isinstance(error, OSError) and (error.errno or 0) > 0 and not isinstance(error, ssl.SSLError):  # its errno is another list's
        return os.strerror(error.errno)
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not error.args:  # two in Python 3.10
        return "timed out"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextlib.contextmanager
def circumstances() -> Iterator[None]:
    """Within it, what the machine is short of is a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if circumstance := of_machine(error):
            raise circumstance from error
        raise


def run_program(main: Callable[[], int | None], *, debug: bool = False) -> int:
    """Run `main` and answer a UserError with one line on stderr and its exit code; `debug` keeps the traceback."""
    try:
        with circumstances():
            return int(main() or ExitCode.OK)
    except UserError as error:
        if debug:
            traceback.print_exc()
        tell_error(error)
        return error.code
    except KeyboardInterrupt:
        print(line("stopped."), file=sys.stderr, flush=True)
        return STOPPED_AT_ONCE


def tell_error(error: UserError, where: str = "") -> None:
    """A program's last word, one line; where: which of several, as 'host, rank 3: '."""
    said = line(f"{where}error: {error}", level=logging.ERROR, message=error.message, fix=error.fix, code=int(error.code))
    print(said, file=sys.stderr, flush=True)
