"""Draws one state: told which by an `Order` on stdin, it sends the pictures as a trainer does, and ends.

Its exit status says whether it may go better with a later state: CONFIG and MEMORY never do. Why, is a line of the log.
"""

import contextlib
import logging
import sys
from pathlib import Path

from peer.drawing.artist import Order
from peer.drawing.beside import Work, load, settle
from swarm.errors import UserError
from swarm.lifeline import die_with_parent
from swarm.memory_advice import A_DRAWING

log = logging.getLogger("peer.drawing")

DRAWING = Work("drawing", A_DRAWING)


def main() -> int:
    die_with_parent()
    order = Order.from_json(sys.stdin.buffer.read())
    settle(order)
    return attempt(order)


def attempt(order: Order) -> int:
    """Draw; what goes wrong becomes one line and an exit code."""

    def said(problem: UserError, hopeless: bool) -> None:
        if hopeless:
            log.warning("this peer draws no pictures: %s", problem)
        else:
            log.warning("no pictures of round %d: %s", order.round, problem)

    return DRAWING.attempt(order, lambda: draw(order), said)


def draw(order: Order) -> None:
    """Raises UserError, ImportError, and what a machine raises that is short of something."""
    loaded = load(order, order.state, DRAWING)
    from peer.drawing.validation import Validation, check_steps
    from peer.launch.launcher import Rank
    from peer.machine.device import RankGroup
    from peer.results.exporting import fill

    peer, run = order.peer, order.run
    check_steps(loaded.model.pipeline.scheduler, "validation_inference_steps", peer.validation_inference_steps)
    header = fill(loaded.params, order.state, run).header
    loaded.filled()
    with sending(order) as showing:
        Validation(
            model=loaded.model,
            group=RankGroup(Rank(), loaded.precision.device),
            precision=loaded.precision,
            prompts=peer.validation_prompts,
            images=peer.num_validation_images,
            denoising_steps=peer.validation_inference_steps,
            side=run.resolution,
            seed=run.seed,
            folder=Path(peer.output_dir) / "validation",
            weights=contextlib.nullcontext,
            show=lambda step, grid: None,
            share=lambda drawn: showing.show(header.round, header.samples, drawn) if showing else None,
        ).draw(header.round)


@contextlib.contextmanager
def sending(order: Order):
    """To the dataset server's page, where the run has one."""
    if not order.server_url:
        yield None
        return
    from peer.drawing.gallery import Showing

    showing = Showing.to_server(order.server_url, order.peer, order.run.run_id, order.peer_id)
    try:
        yield showing
    finally:
        showing.close()


if __name__ == "__main__":
    sys.exit(main())
