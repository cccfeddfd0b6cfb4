"""Decoders that are killed, as the kernel does it for want of memory. In a module of its own: see tests/datasetserver/crashing.py."""

import os
import signal
import time

from peer.samples.pictures import Frame, Framed, try_decode
from swarm.picture_file import BadSample


def slow(data: bytes, frame: Frame, mask: bytes = b"") -> Framed | BadSample:
    if data == b"broken":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return try_decode(data, frame, mask)
