"""`python -m tests.peer.watchdog.short_of_memory ...`: dd-peer, whose trainer is `short_program.py`."""

import sys
from pathlib import Path

from peer import supervise
from swarm.errors import run_program

if __name__ == "__main__":
    sys.exit(run_program(lambda: supervise.main(sys.argv[1:], Path(__file__).with_name("short_program.py"))))
