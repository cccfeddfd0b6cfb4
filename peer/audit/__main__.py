"""Measures what it is ordered to, one order after the other, until its peer ends: `orders.py` has what is said.

The model and some pictures are loaded with the first order. Its exit status says whether there is any use in another process: CONFIG and
MEMORY say no. Why, is a line of the log.
"""

import asyncio
import logging
import os
import random
import sys
from typing import Any, BinaryIO

from peer.audit.orders import Order, answer
from peer.drawing.beside import Work, load, settle
from peer.drawing.errand import Errand
from swarm.errors import UserError
from swarm.lifeline import die_with_parent
from swarm.memory_advice import AN_AUDIT

log = logging.getLogger("peer.audit")

AUDIT = Work("an audit", AN_AUDIT)
_MOST_PICTURES = 256
"""At hand, from which each measurement draws some: 30 MB at 512 pixels."""


def main() -> int:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    errand = Errand.from_json(sys.stdin.buffer.readline())
    settle(errand)
    return attempt(errand, sys.stdin.buffer, answers)


def attempt(errand: Errand, orders: BinaryIO, answers: BinaryIO) -> int:
    """Measure; what goes wrong becomes one line and an exit code."""

    def said(problem: UserError, hopeless: bool) -> None:
        log.warning("%s: %s", "this peer audits nothing" if hopeless else "an audit failed", problem)

    return AUDIT.attempt(errand, lambda: audit(errand, orders, answers), said)


def audit(errand: Errand, orders: BinaryIO, answers: BinaryIO) -> None:
    """Raises UserError, ImportError, and what a machine raises that is short of something."""
    order = Order.read(orders)
    if order is None:
        return
    loaded = load(errand, order.state, AUDIT)
    from peer.audit.measuring import OWN_PICTURES, Measuring
    from peer.results.exporting import fill
    from peer.sync.engine.codec import Wire
    from peer.sync.engine.vectors import Schema

    run, params, rng = errand.run, loaded.params, random.SystemRandom()
    wire, pictures = Wire.of(run.wire, Schema.of(params)), pictures_of(errand, rng)
    state = fill(params, order.state, run)
    loaded.filled()
    measuring = Measuring(
        model=loaded.model, params=params, precision=loaded.precision, run=run, samples=asyncio.run(pictures.some(_MOST_PICTURES)), rng=rng
    )
    while True:
        parts = [part for part in wire.parts if order.start <= part.start < order.end]
        own = {peer: asyncio.run(pictures.of(peer, number, OWN_PICTURES)) for peer, number in order.numbers.items()}
        answers.write(answer(measuring.losses(state, parts, order.excerpts, own)))
        answers.flush()
        del state, order  # each as large as what is trained: one at a time
        order = Order.read(orders)
        if order is None:
            return
        state = fill(params, order.state, run)


def pictures_of(errand: Errand, rng: random.Random) -> Any:
    """Where samples come from whose loss is measured: peer/data/client/taken.py."""
    from peer.data.client.taken import Pictures
    from peer.launch.resolving import known_hosts, token_for

    peer, url = errand.peer, errand.server_url
    return Pictures(
        url, errand.run, token=token_for(url, peer), known_hosts=known_hosts(peer), cache_dir=peer.cache_folder,
        cache_bytes=int(peer.cache_gib * 2**30), rng=rng,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
