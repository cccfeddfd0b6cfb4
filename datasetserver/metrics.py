"""What the server counts for Prometheus. No label grows with the callers: endpoints, methods, statuses and the ledger's words only."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = ("GET", "HEAD", "POST", "PUT")
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


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
        self._run = {name: Gauge(f"dd_run_{name}", f"The run's {name}.", registry=registry) for name in ("round", "samples", "epoch")}
        self._peers = Gauge("dd_peers", "Live peers.", registry=registry)

    @contextlib.contextmanager
    def watch(self, endpoint: str, method: str) -> Iterator[Watched]:
        watched, since = Watched(), time.perf_counter()
        self._active.inc()
        try:
            yield watched
        except ConnectionError:
            watched.status = 499  # as nginx has it: the client went away
            raise
        finally:
            self._active.dec()
            self._requests.labels(endpoint, method if method in _METHODS else "other", str(watched.status)).inc()
            self._seconds.labels(endpoint).observe(time.perf_counter() - since)

    def sent(self, count: int) -> None:
        """So many bytes of a shard."""
        self._shard_bytes.inc(count)

    def connected(self, change: int) -> None:
        self._connections.inc(change)

    def refused_connection(self) -> None:
        self._refused_connections.inc()

    def text(self, *, peers: int, figures: Mapping[str, float], samples: Mapping[str, int]) -> bytes:
        """Everything in Prometheus' text format. figures: the run's round, samples and epoch; samples: by state; both empty without a run."""
        self._peers.set(peers)
        for name, gauge in self._run.items():
            gauge.set(figures.get(name, 0))
        for state, count in samples.items():
            self._samples.labels(state).set(count)
        return generate_latest(self._registry)
