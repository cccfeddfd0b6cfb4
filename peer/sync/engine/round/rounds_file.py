"""`rounds.jsonl`: one line for each state that this peer adopted."""

import contextlib
import json
import logging
import os
from pathlib import Path

from peer.contracts import CommittedRound, Member
from peer.sync.engine.state import State
from swarm import files

log = logging.getLogger(__name__)

EARLIER = "rounds.1.jsonl"
_MOST_BYTES = 32 << 20
"""Some 60,000 rounds of three peers. Then the file becomes EARLIER, which replaces the one before, and a new one is begun."""
_READ_BYTES = 1 << 20
"""Some 1,900 rounds of three peers."""


def read_rounds(path: Path) -> list[CommittedRound]:
    """The last rounds in the file, and in EARLIER while it is short, the oldest first; none where they cannot be read."""
    rounds, data = [], _end_of(path, _READ_BYTES)
    if len(data) < _READ_BYTES:
        data = _end_of(path.with_name(EARLIER), _READ_BYTES - len(data)) + b"\n" + data
    for line in data.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            values = json.loads(line)
            members = tuple(Member(*member) for member in values["members"])
            rounds.append(CommittedRound(values["digest"], values["parent"], values["round"], values["samples"], members))
    return [each for each in rounds if each.round]


def flush_rounds(path: Path) -> None:
    """Make the lines written so far durable: a state's header names eight rounds, and what was before these stands here alone."""
    with contextlib.suppress(OSError):  # `write_round` has warned
        files.flush(path)
        files.flush(path.parent)


def write_round(path: Path, state: State, how: str, live_peers: int, peer: str, now: float) -> None:
    """how: averaged, solo or fetched; live_peers: that train, this one included; now: seconds since 1970. A file that cannot be written is a warning."""
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
        "time": now,
    }
    try:
        if path.exists() and path.stat().st_size > _MOST_BYTES:
            files.flush(path)  # `flush_rounds` knows the new file only
            path.replace(path.with_name(EARLIER))
        # A power cut or a full disk tears a line; glued to it, this one could not be read either.
        begin = "" if _end_of(path, 1) in (b"", b"\n") else "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(begin + json.dumps(line) + "\n")
    except OSError as error:
        log.warning("could not write %s: %s", path, error.strerror)


def _end_of(path: Path, most: int) -> bytes:
    """Up to `most` bytes; none where there is no file, or it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
        return file.read()
    return b""
