"""What all six programs say alike."""

import configparser
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarm.version import VERSION

END = "(the end)"
SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"


def programs() -> list[tuple[str, str]]:
    config = configparser.ConfigParser()
    config.read(SETUP)
    return [tuple(part.strip() for part in line.split("=")) for line in config["options.entry_points"]["console_scripts"].split("\n") if line]


def said(name: str, where: str, *flags: str) -> list[str]:
    """For each flag a process of its own, as installed: dd-peer becomes another program for what is answered at once. One imports for all."""
    module, function = where.split(":")
    code = f"""
import os, sys
from {module} import {function}
for flag in sys.argv[1:]:
    if not (child := os.fork()):
        sys.argv[:] = [{name!r}, flag]
        sys.exit({function}())
    assert os.waitpid(child, 0)[1] == 0
    print({END!r}, flush=True)
"""
    run = subprocess.run([sys.executable, "-c", code, *flags], cwd=SETUP.parent, check=True, capture_output=True, text=True, timeout=120)
    return run.stdout.split(END)


@pytest.mark.parametrize(("name", "where"), programs())
def test_every_program_says_its_version_and_calls_itself_by_what_people_type(name, where):
    version, helped, _ = said(name, where, "--version", "--help")
    assert version.strip() == f"distributed-diffusion {VERSION}"
    assert helped.lstrip().startswith(f"usage: {name} ")


@pytest.mark.parametrize(("name", "where"), programs())
def test_ctrl_c_while_a_program_imports_prints_no_traceback(name, where):
    module, function = where.split(":")
    code = f"import sys; from {module} import {function}; print(flush=True); sys.exit({function}())"
    words = [sys.executable, "-c", code, "http://127.0.0.1:1"]
    with subprocess.Popen(words, cwd=SETUP.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=100)
    assert process.returncode and len(said.splitlines()) <= 1, said
