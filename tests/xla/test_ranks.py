"""Hosts as ranks of one peer: here two processes, each with two devices of its own."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

STEPS = 4


@pytest.mark.timeout(3600)
def test_two_ranks_of_two_devices_have_the_losses_of_one_process(tiny_family, pictures, tmp_path):
    flags = f"--model {tiny_family('flux')} --train_data_dir {pictures} --resolution 16 --max_sequence_length 32 --learning_rate 1e-3"
    flags += f" --train_batch_size 2 --total_samples {4 * STEPS} --target_batch_size 4 --seed 7 --print_loss"

    def losses(name, launcher, *more, **environ):
        command = [
            sys.executable,
            *launcher,
            str(ROOT / "peer" / "finetune.py"),
            "--output_dir",
            str(tmp_path / name),
            *flags.split(),
            *more,
        ]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stderr
        return [float(loss) for loss in re.findall(r"step=\d+ samples=4 loss=([\d.]+)", done.stderr)], done.stderr

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    of_ranks, said = losses("ranks", torchrun, "--device", "xla", CPU_NUM_DEVICES="2")
    assert "ranks=2 device=xla devices=2 (CPU)" in said
    of_one, _ = losses("one", [], "--device", "cpu", "--gradient_accumulation_steps", "2")
    assert len(of_one) == STEPS and of_ranks == pytest.approx(of_one, rel=1e-4)
