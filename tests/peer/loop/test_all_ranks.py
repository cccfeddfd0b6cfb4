"""The ranks of one launch are one peer: real processes, a real process group."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

RANKS = 3


def test_every_rank_ends_every_round_with_equal_bits():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    program = Path(__file__).with_name("ranked_program.py")
    done = subprocess.run(
        [*torchrun, program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["call"] for line in lines] == ["catch_up", *["step"] * 10, "withdraw", "load_state_dict", "leave"]
    assert [line["round"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6]
    for line in lines:
        assert len(line["digests"]) == RANKS and len(set(line["digests"])) == 1, line
    assert len({line["digests"][0] for line in lines}) == len(lines), "every call changed something"
