"""Command lines whose mistakes are told as every other mistake is: one line, without a page of usage before it."""

import argparse
import contextlib
import copy
from collections.abc import Sequence
from typing import Any, NoReturn

from swarm.errors import UserError
from swarm.version import VERSION

_ALL = "all"


def seconds(text: str) -> float:
    """A time to wait, as a flag's `type`."""
    with contextlib.suppress(ValueError):
        if 0.1 <= float(text) <= 86_400:
            return float(text)
    raise argparse.ArgumentTypeError("use 0.1 to 86400 seconds")


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, but a wrong argument is a UserError; parse within `run_program`. Every program says its --version.

    first: the flags that a newcomer needs. With them --help shows these alone, `--help all` every flag, and `--help SECTION` the groups
    whose title has that text in it. examples: command lines, for the end of --help.
    """

    def __init__(self, *args: Any, first: Sequence[str] = (), examples: Sequence[str] = (), **options: Any):
        super().__init__(*args, add_help=not first, **options)
        self.first, self.examples = first, examples
        if first:
            about = "Show the options that most people set; all: every option; or those of one section."
            self.add_argument("-h", "--help", action=_Help, nargs="?", const="", metavar="all|SECTION", help=about)
        self.add_argument("--version", action="version", version=f"distributed-diffusion {VERSION}", help="Print the version and end.")

    def error(self, message: str) -> NoReturn:
        what = message.removeprefix("argument ")
        raise UserError(f"{what[0].upper()}{what[1:]}.", fix=f"See {self.full_help}.")

    @property
    def full_help(self) -> str:
        """The flags that show every option."""
        return f"--help {_ALL}" if self.first else "--help"

    def format_help(self) -> str:
        return super().format_help() + self._format_examples()

    def _format_examples(self) -> str:
        return "".join(["\nexamples:\n", *(f"  {line}\n" for line in self.examples)]) if self.examples else ""

    def format_first(self) -> str:
        """The newcomer's screen: the flags in `first`, each by its main name, then the examples."""
        named = {name: action for action in self._actions for name in action.option_strings}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        formatter.start_section("options that most people set")
        for flag in self.first:
            action = copy.copy(named[flag])
            action.option_strings = [flag]
            formatter.add_argument(action)
        formatter.end_section()
        count = sum(action.help != argparse.SUPPRESS for action in self._actions)
        formatter.add_text(f"--help {_ALL} shows all {count} options, --help SECTION those of one section.")
        formatter.add_text(self.epilog)
        return formatter.format_help() + self._format_examples()

    def format_section(self, section: str) -> str:
        """The groups of this name, else those with this text in their title. Raises UserError, with all names, when there is none."""
        groups = self._action_groups[2:]  # after argparse's own two
        wanted = section.lower()
        names = {group: (group.title or "").split(": ")[-1] for group in groups}
        found = [group for group in groups if names[group].lower() == wanted]
        found = found or [group for group in groups if wanted in (group.title or "").lower()]
        if not found:
            raise UserError(f"--help has no section '{section}'.", fix=f"Use {_ALL}, or a word of: {'; '.join(names.values())}.")
        formatter = self._get_formatter()
        for group in found:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help()


class _Help(argparse.Action):
    """Print what is asked for, and end."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, section: Any, option_string: str | None = None) -> NoReturn:
        shown = parser.format_help() if section == _ALL else parser.format_section(section) if section else parser.format_first()
        print(shown, end="")
        parser.exit()
