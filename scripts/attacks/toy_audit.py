"""Measures for `helper.py` what contributions do to the toy's loss: `peer/audit/measuring.py`, but for the loss itself."""

import os
import random
import sys
import time
from types import SimpleNamespace

import torch

from peer.audit.measuring import Measuring
from peer.audit.orders import Order, answer
from peer.contracts import Params
from peer.drawing.errand import Errand
from peer.machine.device import Precision
from peer.results.exporting import fill
from peer.sync.engine.codec import Wire
from peer.sync.engine.vectors import Schema
from scripts.attacks.toy import Toy, new_params
from swarm.lifeline import die_with_parent
from swarm.run_config import RunConfig

_NO_MODEL = SimpleNamespace(parts={})


class ToyMeasuring(Measuring):
    """now: whose target is meant, in UNIX seconds: the same before and after."""

    now = 0.0

    def _loss(self, samples: object, seed: int) -> float:
        loss = Toy(self.params).gradients(self.now)
        for parameter in self.params.values():
            parameter.grad = None
        return loss


def measuring_of(params: Params, run: RunConfig) -> ToyMeasuring:
    precision = Precision(torch.device("cpu"), None, scaled=False, reason="a toy")
    return ToyMeasuring(model=_NO_MODEL, params=params, precision=precision, run=run, samples=(), rng=random.Random(0))


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    errand = Errand.from_json(sys.stdin.buffer.readline())
    params = new_params()
    wire, measuring = Wire.of(errand.run.wire, Schema.of(params)), measuring_of(params, errand.run)
    while order := Order.read(sys.stdin.buffer):
        state, measuring.now = fill(params, order.state, errand.run), time.time()
        parts = [part for part in wire.parts if order.start <= part.start < order.end]
        answers.write(answer(measuring.losses(state, parts, order.excerpts)))
        answers.flush()


if __name__ == "__main__":
    main()
