"""`python -m tests.scripts.hungry_soak ...`: scripts/soak with peers whose steps take more samples than a round of its run has."""

import sys

from scripts.churn import soak, supervised
from swarm.errors import run_program

if __name__ == "__main__":
    supervised.BATCH = 10**6
    sys.exit(run_program(lambda: soak.main(sys.argv[1:])))
