"""`rounds.jsonl`: one line for each state that this peer adopted."""

import json
import logging
import time
from pathlib import Path

from peer.sync.engine.state import State

log = logging.getLogger(__name__)


def write_round(path: Path, state: State, how: str, live_peers: int, peer: str) -> None:
    """how: averaged, solo or fetched; live_peers: that train, this one included. A file that cannot be written is a warning."""
    header = state.header
    line = {
        "round": header.round,
        "samples": header.samples,
        "digest": state.digest,
        "parent": header.parents[0] if header.parents else "",
        "members": [[m.peer, m.number, m.samples] for m in header.members],
        "how": how,
        "live_peers": live_peers,
        "peer": peer,
        "time": time.time(),
    }
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        log.warning("could not write %s: %s", path, error.strerror)
