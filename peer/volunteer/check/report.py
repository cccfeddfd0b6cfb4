"""A list of questions, asked in order and answered with one line each: a mark, what was found, and where it fails the way out."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from swarm.errors import ExitCode, UserError

OK, NOTE, FAIL, SKIP = "ok", "note", "FAIL", "--"
_MARK, _NAME = 5, 13


class NotAsked(Exception):
    """A question that makes no sense, because of an answer before: which is said."""


@dataclass(frozen=True)
class Answer:
    """found: one line. fix: the way out of what fails, or what to know of what is noted."""

    found: str
    fix: str = ""
    mark: str = OK
    code: ExitCode = ExitCode.OK


@dataclass(frozen=True)
class Item:
    name: str
    ask: Callable[[], Answer | str]
    """Answers; raises UserError when it fails, NotAsked when it cannot be asked."""


def lines(name: str, answer: Answer) -> Iterator[str]:
    yield f"{answer.mark:<{_MARK}}{name:<{_NAME}}{answer.found}"
    if answer.fix:
        yield f"{'':<{_MARK + _NAME}}-> {answer.fix}"


def ask(item: Item) -> Answer:
    try:
        answer = item.ask()
        return answer if isinstance(answer, Answer) else Answer(answer)
    except UserError as error:
        return Answer(error.message, error.fix, FAIL, error.code)
    except NotAsked as reason:
        return Answer(f"not asked: {reason}", mark=SKIP)
    except Exception as error:  # a question of ours that breaks must not hide the answers to the others
        return Answer(f"the question itself failed: {error!r}", "Please report this.", FAIL, ExitCode.FAILED)


def run(items: Sequence[Item], out: TextIO, clock: Callable[[], float] = time.monotonic) -> ExitCode:
    """Ask all of them, whatever fails; the code of the first failure, by which a supervisor or a script tells its kind."""
    began, code, failed = clock(), ExitCode.OK, []
    for item in items:
        answer = ask(item)
        for line in lines(item.name, answer):
            print(line, file=out, flush=True)
        if answer.mark == FAIL:
            failed.append(item.name)
            code = code or answer.code
    can = "this machine can take part; join with --datasetserver (or --peers) in place of --check"
    said = f"this machine cannot take part yet: {', '.join(failed)}" if failed else can
    print(f"{said} (asked for {clock() - began:.0f} s; nothing was trained, leased or kept)", file=out, flush=True)
    return code
