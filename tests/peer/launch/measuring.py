"""What the process does that measures in test_measured_batch.py. It is spawned, and loads no more than this file: PyTorch takes it 3 s of a core."""

import os
import signal
import time

from swarm.errors import ExitCode


def killed_at_four(tell, *_):
    tell.send(1)
    tell.send(2)
    os.kill(os.getpid(), signal.SIGKILL)


def nothing_fits(tell, *_):
    pass


def refused(tell, *_):
    tell.send({"message": "The model is not there.", "fix": "Fetch it.", "code": ExitCode.CONFIG})


def waits(tell, *_):
    tell.send(1)
    time.sleep(1000)
