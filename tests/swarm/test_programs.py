"""What all six programs say alike."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.version import VERSION

SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"


def programs() -> list[tuple[str, str]]:
    config = configparser.ConfigParser()
    config.read(SETUP)
    return [tuple(part.strip() for part in line.split("=")) for line in config["options.entry_points"]["console_scripts"].split("\n") if line]


def said(name: str, where: str, flag: str) -> str:
    """A process of its own, as installed: dd-peer becomes another program for what is answered at once."""
    module, function = where.split(":")
    code = f"import sys; from {module} import {function}; sys.argv[0] = {name!r}; sys.exit({function}())"
    return subprocess.run([sys.executable, "-c", code, flag], cwd=SETUP.parent, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize(("name", "where"), programs())
def test_every_program_says_its_version(name, where):
    assert said(name, where, "--version").strip() == f"distributed-diffusion {VERSION}"


@pytest.mark.parametrize(("name", "where"), programs())
def test_every_program_calls_itself_by_what_people_type(name, where):
    assert said(name, where, "--help").startswith(f"usage: {name} ")
