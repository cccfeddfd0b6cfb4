"""Log lines for people, one line per event, `key=value`, a logger per module; or, for programs, one JSON object per line.

What strangers say gets into both (names, addresses, reasons): a terminal is told no control character of theirs.
"""

import json
import logging
import math
import re
import sys
import time
from typing import Any, TextIO

TEXT, JSON = "text", "json"
_LEVELS = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARNING", logging.ERROR: "ERROR", logging.CRITICAL: "CRITICAL"}
"""Not record.levelname: hivemind makes WARN of WARNING in all processes that import it."""
FORMATS = (TEXT, JSON)
_OURS = ("swarm", "peer", "datasetserver", "quickstart")
_PLACE = re.compile(r"(?:(?P<key>\w+)=)?%(?P<spec>[-#0 +]*(?:\*|\d+)?(?:\.(?:\*|\d+))?[a-zA-Z%])")
_format = TEXT


class _UtcFormatter(logging.Formatter):
    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not record.exc_info and not record.stack_info:  # then a line's end is of the message
            return plain(text)
        return "\n".join(map(plain, text.split("\n")))


class _JsonFormatter(logging.Formatter):
    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """time (UNIX seconds), level, logger, event, fields (what the line has as key=value); peer, where this process has a name."""
        event, fields = event_of(record)
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": _LEVELS.get(record.levelno, record.levelname),
            "logger": record.name,
        }
        line |= {"peer": self._name} if self._name else {}
        line |= {"event": event, "fields": fields}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Stderr(logging.StreamHandler):
    """Writes to what is stderr at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def setup_logging(*, debug: bool = False, name: str = "", log_format: str = TEXT) -> None:
    """Send our log lines to stderr; called once by each program's entry, never on import.

    name: stands before every line, so that the lines of several peers can be merged. log_format: one of FORMATS.
    """
    global _format
    _format = log_format
    handler = _Stderr()
    if log_format == JSON:
        handler.setFormatter(_JsonFormatter(name))
    else:
        prefix = f"{name} " if name else ""
        handler.setFormatter(_UtcFormatter(f"%(asctime)s {prefix}%(levelname).1s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%SZ"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # of what is not ours
    for ours in _OURS:
        logging.getLogger(ours).setLevel(logging.DEBUG if debug else logging.INFO)


def line(text: str, *, level: int = logging.INFO, **fields: Any) -> str:
    """One line in the format that was set up, past all loggers: for an entry's last word, and for a signal's handler, which may not log."""
    if _format == JSON:
        values = {"time": round(time.time(), 3), "level": _LEVELS.get(level, str(level)), "logger": "", "event": text}
        values["fields"] = {name: _said(value) for name, value in fields.items()}
        return json.dumps(values, default=str)
    return plain(text)


def plain(text: str) -> str:
    """`text` with what a terminal would obey, control characters and changes of the direction of writing, as escapes."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\t" else letter.encode("unicode_escape").decode() for letter in text)


def _said(value: Any) -> Any:
    """A number, or text: of floats that are not finite, JSON knows none."""
    return value if isinstance(value, (bool, int, type(None))) or (isinstance(value, float) and math.isfinite(value)) else str(value)


def event_of(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """The record's words, and the values that its template has as `key=%d`: no stranger's text can add a field."""
    template, args = str(record.msg), record.args if isinstance(record.args, tuple) else ()
    try:
        fields, rest, used = {}, [], []
        values = iter(args)
        last = 0
        for place in _PLACE.finditer(template):
            if place["spec"].endswith("%"):
                continue
            if "*" in place["spec"]:
                return record.getMessage(), {}
            value = next(values)
            if place["key"]:
                fields[place["key"]] = _said(value)
                rest.append(template[last : place.start()])
                last = place.end()
            else:
                used.append(value)
        rest.append(template[last:])
        words = "".join(rest)
        return " ".join((words % tuple(used) if args else words).split()), fields
    except (StopIteration, TypeError, ValueError):
        return record.getMessage(), {}
