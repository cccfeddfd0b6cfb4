"""Log lines for people: one line per event, `key=value`, a logger per module."""

import logging
import sys
import time


class _UtcFormatter(logging.Formatter):
    converter = time.gmtime


def setup_logging(*, debug: bool = False, name: str = "") -> None:
    """Send our log lines to stderr; called once by each program's entry, never on import.

    name: stands before every line, so that the lines of several peers can be merged.
    """
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"{name} " if name else ""
    handler.setFormatter(_UtcFormatter(f"%(asctime)s {prefix}%(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%SZ"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for ours in ("swarm", "peer", "datasetserver", "quickstart"):
        logging.getLogger(ours).setLevel(logging.DEBUG if debug else logging.INFO)
