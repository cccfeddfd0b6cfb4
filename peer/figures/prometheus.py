"""`--metrics_port`: a peer's figures for Prometheus, by its client's own HTTP server in a thread. No label grows with the callers or the peers."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric, StateSetMetricFamily
from prometheus_client.registry import Collector

from peer.figures.metrics import METRICS
from swarm.errors import ExitCode, UserError
from swarm.records import PHASES

PREFIX = "dd_peer_"


class Figures(Collector):
    """What `values()` says at the time of asking: METRICS as far as they are known, and `phase`. about: what never changes."""

    def __init__(self, values: Callable[[], Mapping[str, Any]], about: Mapping[str, str]):
        self._values, self._about = values, dict(about)

    def collect(self) -> Iterable[Metric]:
        values = self._values()
        for metric in METRICS:
            value = values.get(metric.name)
            family = CounterMetricFamily if metric.counts else GaugeMetricFamily
            yield family(PREFIX + metric.name, metric.help, value=None if value is None else float(value))
        yield StateSetMetricFamily(PREFIX + "phase", "What this peer does.", {phase: values.get("phase") == phase for phase in PHASES})
        yield InfoMetricFamily("dd_peer", "The run, and this peer in it.", self._about)


def registry(values: Callable[[], Mapping[str, Any]], about: Mapping[str, str]) -> CollectorRegistry:
    """All that a peer exposes; several in one process do not mix."""
    made = CollectorRegistry()
    ProcessCollector(registry=made)
    made.register(Figures(values, about))
    return made


@contextlib.contextmanager
def exposed(values: Callable[[], Mapping[str, Any]], about: Mapping[str, str], *, host: str, port: int) -> Iterator[int]:
    """Answer at http://host:port/metrics (port 0: any free one) for as long as the context lasts; the port. Raises UserError."""
    try:
        server, thread = start_http_server(port, host, registry(values, about))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"The figures cannot be served at {host}:{port}: {getattr(error, 'strerror', None) or error}.",
            fix="Choose another --metrics_port or --metrics_host.",
            code=ExitCode.NETWORK,
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
