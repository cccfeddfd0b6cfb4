import io
import json
import logging
import sys

import pytest

from swarm.errors import ExitCode, UserError, run_program
from swarm.logs import setup_logging

log = logging.getLogger("swarm.test_logs")


@pytest.fixture
def said(monkeypatch):
    """What a program that logs as `said(...)` sets it up writes to stderr; the log of the tests is put back afterwards."""
    root, stream = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level

    def set_up(**options):
        monkeypatch.setattr(sys, "stderr", stream)  # here: pytest puts its own in between a fixture and its test
        setup_logging(**options)
        return stream.getvalue

    yield set_up
    setup_logging()
    root.handlers[:], root.level = before[0], before[1]


def test_a_line_of_json_has_time_level_logger_event_and_fields(said):
    written = said(name="peer-1", log_format="json")
    log.info("%s round=%d peers=%d seconds=%.1f state=%s", "averaged", 3, 5, 1.25, "ab12")
    line = json.loads(written())
    assert (line["level"], line["logger"], line["peer"], line["event"]) == ("INFO", "swarm.test_logs", "peer-1", "averaged")
    assert line["fields"] == {"round": 3, "peers": 5, "seconds": 1.25, "state": "ab12"} and line["time"] > 1e9


@pytest.mark.parametrize(
    ("template", "args", "event", "fields"),
    [
        ("leaving", (), "leaving", {}),
        ("100% done", (), "100% done", {}),
        ("trying again in %.0f s: %s", (2.4, "x"), "trying again in 2 s: x", {}),
        ("%d%% of it, round=%s", (5, None), "5% of it,", {"round": None}),
        ("refused %s: %s", ("x", "round=9 is\nold"), "refused x: round=9 is old", {}),
        ("%*d round=%d", (3, 1, 2), "  1 round=2", {}),
        ("loss=%.3f", (float("nan"),), "", {"loss": "nan"}),
    ],
)
def test_only_the_template_makes_fields(said, template, args, event, fields):
    written = said(log_format="json")
    log.warning(template, *args)
    line = json.loads(written())
    assert (line["event"], line["fields"]) == (event, fields)


def test_a_traceback_stays_within_its_line_of_json(said):
    written = said(log_format="json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    (line,) = written().splitlines()
    assert "two\nlines" in json.loads(line)["exception"]


def test_a_warning_is_called_so_whatever_is_imported(said):
    import hivemind.utils.logging  # noqa: F401 - renames it

    written = said(log_format="json")
    log.warning("slow")
    assert json.loads(written())["level"] == "WARNING"


def test_what_strangers_say_does_not_reach_the_terminal_as_commands(said):
    written = said(name="peer-1")
    log.warning("refused %s", "\x1b[2Jalice\r\nroot: all is well\u202e")
    (line,) = written().splitlines()
    assert line.endswith("W swarm.test_logs: refused \\x1b[2Jalice\\r\\nroot: all is well\\u202e")


def test_a_traceback_is_shown_on_its_own_lines_without_control_characters(said):
    written = said()
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.exception("failed")
    first, *rest = written().splitlines()
    assert first.endswith("failed") and rest[0].startswith("Traceback") and rest[-1] == "ValueError: \\x1b[2J"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_programs_last_word_is_in_the_same_format(said, log_format):
    def main():
        setup_logging(log_format=log_format)
        raise UserError("The disk is full.", fix="Free some space.", code=ExitCode.DISK)

    written = said()
    assert run_program(main) == ExitCode.DISK
    if log_format == "text":
        assert written() == "error: The disk is full. Free some space.\n"
    else:
        fields = {"message": "The disk is full.", "fix": "Free some space.", "code": 4}
        assert json.loads(written())["fields"] == fields and json.loads(written())["level"] == "ERROR"
