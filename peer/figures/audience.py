"""To whom a peer shows its figures: Prometheus, where it was asked to, and whoever looks at its terminal."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from peer.config import PeerConfig
from peer.figures.prometheus import exposed
from peer.figures.terminal import display, wanted
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)


def show(
    peer: PeerConfig,
    run: RunConfig,
    peer_id: str,
    values: Callable[[], Mapping[str, Any]],
    total_samples: Callable[[], int],
    closing: ExitStack,
) -> None:
    """Until `closing` closes; values(): by the names of `peer.figures.metrics.METRICS`, asked for by other threads. Raises UserError."""
    if peer.metrics_port:
        about = {"run": run.run_name, "run_id": run.run_id, "peer_id": peer_id}
        closing.enter_context(exposed(values, about, host=peer.metrics_host, port=peer.metrics_port))
        log.info("metrics at http://%s:%d/metrics", peer.metrics_host, peer.metrics_port)
    if wanted(peer.log_format):
        closing.enter_context(display(run.run_name, values, total_samples=total_samples))
