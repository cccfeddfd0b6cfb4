"""What the server counts for Prometheus. No label grows with the callers: endpoints, methods, statuses and the ledger's words only."""

import asyncio
import contextlib
import math
import time
from collections import Counter as Counted
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from swarm.figures import figures
from swarm.records import PHASES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = ("GET", "HEAD", "POST", "PUT")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_OF_THE_RUN = {
    "round": "The newest final state's round.",
    "samples": "Samples in that state.",
    "epoch": "Passes over the pictures that are done.",
    "total_samples": "Samples at which the run ends; 0: no end.",
    "target_batch_size": "Samples of a round.",
    "waiting_samples": "Samples trained for the next round.",
    "samples_per_second": "Samples that all peers train a second.",
    "loss": "Mean loss of the peers, weighted by their speed.",
    "validation_loss": "Loss of held-out pictures in the latest state that a peer measured.",
    "a100s": "A100s that would train as many pixels a second.",
    "utilisation": "Share of the training peers' time that they do not lose to rounds.",
    "eta_seconds": "Seconds to the run's end at this speed.",
    "transfer_seconds": "Seconds that averaging took the slowest peer in its last round.",
    "sent_bytes": "Bytes that all peers sent, each in its last round.",
    "received_bytes": "Bytes that they received in it.",
}


@dataclass
class Watched:
    """A request that is being answered; `status` is set when it has been."""

    status: int = 500


class Metrics:
    """One server's counters; several in one process do not mix."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("dd_http_requests", "Requests answered.", ("endpoint", "method", "status"), registry=registry)
        self._seconds = Histogram("dd_http_seconds", "Time to answer.", ("endpoint",), buckets=_SECONDS, registry=registry)
        self._active = Gauge("dd_http_active_requests", "Requests being answered.", registry=registry)
        self._shard_bytes = Counter("dd_shard_bytes", "Bytes of shards sent.", registry=registry)
        self._connections = Gauge("dd_http_connections", "Open connections.", registry=registry)
        self._refused_connections = Counter("dd_http_refused_connections", "Connections closed for being too many.", registry=registry)
        self._samples = Gauge("dd_ledger_samples", "Samples of the epochs begun, by state.", ("state",), registry=registry)
        self._peers = Gauge("dd_peers", "Live peers.", registry=registry)
        self._phases = Gauge("dd_peers_by_phase", "Live peers, by what they do.", ("phase",), registry=registry)
        self._run = {name: Gauge(f"dd_run_{name}", help, registry=registry) for name, help in _OF_THE_RUN.items()}

    @contextlib.contextmanager
    def watch(self, endpoint: str, method: str) -> Iterator[Watched]:
        watched, since = Watched(), time.perf_counter()
        self._active.inc()
        try:
            yield watched
        except (ConnectionError, asyncio.CancelledError):
            watched.status = 499  # as nginx has it: the client went away
            raise
        finally:
            self._active.dec()
            self._requests.labels(endpoint, method if method in _METHODS else "other", str(watched.status)).inc()
            self._seconds.labels(endpoint).observe(time.perf_counter() - since)

    def sent(self, count: int) -> None:
        """`count` bytes of a shard were sent."""
        self._shard_bytes.inc(count)

    def connected(self, change: int) -> None:
        self._connections.inc(change)

    def refused_connection(self) -> None:
        self._refused_connections.inc()

    def text(self, *, peers: int, progress: Mapping[str, Any] | None) -> bytes:
        """Everything in Prometheus' text format. progress: of the run, a `protocol.Progress`, None without a run; what it cannot say is NaN."""
        self._peers.set(peers)
        known = {**progress, **asdict(figures(progress))} if progress else {}
        phases = Counted(peer["phase"] for peer in known.get("peers", ()))
        for phase in PHASES:
            self._phases.labels(phase).set(phases[phase])
        for name, gauge in self._run.items():
            value = known.get(name)
            gauge.set(math.nan if value is None else value)
        for state, count in known.get("ledger", {}).items():
            self._samples.labels(state).set(count)
        return generate_latest(self._registry)
