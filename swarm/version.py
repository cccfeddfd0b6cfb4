"""The version of this program: of the checkout that it runs from, else of the package that pip installed."""

import configparser
import importlib.metadata
import re
from pathlib import Path
from typing import TypeGuard

_PACKAGE = "distributed-diffusion"
_ROOT = Path(__file__).resolve().parent.parent
_VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}", re.ASCII)


def is_version(text: object) -> TypeGuard[str]:
    """Whether `text` is one to four numbers between dots; what comes from a network need not be."""
    return isinstance(text, str) and _VERSION.fullmatch(text) is not None


def order(version: str) -> tuple[int, ...]:
    """For comparing versions: 0.10 comes after 0.9, and 1.0 is 1."""
    numbers = [int(number) for number in version.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _own(root: Path) -> str:
    # The checkout first: one that was pulled after `pip install -e` still has its old version among the installed packages.
    checkout = configparser.ConfigParser(interpolation=None)
    checkout.read(root / "setup.cfg", encoding="utf-8")
    if checkout.get("metadata", "name", fallback="") == _PACKAGE:
        return checkout["metadata"]["version"]
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # a copy of the folders alone
        return "0"


VERSION = _own(_ROOT)
