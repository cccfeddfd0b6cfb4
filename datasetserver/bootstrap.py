"""The server's own node in the DHT, as a process of its own: a lasting address where newcomers meet the swarm.

Run by the server as `python -m datasetserver.bootstrap`. Reads its configuration as one line of JSON from stdin and ends when stdin
does; writes JSON lines to stdout: first {"peer_id", "maddrs"}, then again and again {"maddrs", "records"}; or {"error"} and ends.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from datasetserver.lifeline import die_with_parent
from swarm.errors import ExitCode, UserError
from swarm.logs import setup_logging

log = logging.getLogger("datasetserver.bootstrap")
REPORT_SECONDS = 1.5
PUBLISH_SECONDS = 20.0
_DEAF_SECONDS = 30.0  # p2pd did not answer for so long: end, and let the server start us again


def main() -> int:
    # Asked before anything slow is imported, and answered by SIGTERM so that p2pd is ended in order.
    die_with_parent(signal.SIGTERM)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between our lines
    setup_logging(name="dht")
    options = json.loads(sys.stdin.readline() or "null")
    if options is None:
        return ExitCode.OK
    try:
        asyncio.run(_serve(options, out))
    except UserError as error:
        _say(out, error={"message": error.message, "fix": error.fix, "code": int(error.code)})
        return error.code
    except BrokenPipeError:
        return ExitCode.FAILED
    return ExitCode.OK


async def _serve(options: dict[str, Any], out: TextIO) -> None:
    from swarm.dht import SwarmNode
    from swarm.records import RunRecord

    stop = _stop_event()
    node = await SwarmNode.join(
        host_maddrs=options["host_maddrs"], announce_maddrs=options["announce_maddrs"], identity_path=Path(options["identity_path"])
    )
    loop = asyncio.get_running_loop()
    try:
        _say(out, peer_id=node.peer_id, maddrs=await node.maddrs())
        published = deaf_since = None
        while not stop.is_set():
            now = loop.time()
            try:
                if published is None or now - published >= PUBLISH_SECONDS:
                    record = RunRecord(run_id=options["run_id"], run=options["run"], server_url=options["url"])
                    await asyncio.wait_for(node.publish_run(record), 10)
                    published = now
                records = await asyncio.wait_for(node.records(options["run_id"]), 10)
                _say(out, maddrs=await node.maddrs(), records=[record.asdict() for record in records.values()])
                deaf_since = None
            except (asyncio.TimeoutError, OSError, RuntimeError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                deaf_since = now if deaf_since is None else deaf_since
                log.warning("the DHT does not answer: %s", error or type(error).__name__)
                if now - deaf_since > _DEAF_SECONDS:
                    raise UserError("The DHT has not answered for a while.", fix="It is started again.", code=ExitCode.NETWORK) from None
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), REPORT_SECONDS)
    finally:
        for noisy in ("asyncio", "hivemind"):  # they complain of the connections that closing p2pd closes
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        await node.close()


def _stop_event() -> asyncio.Event:
    """Set on SIGTERM, SIGINT, or when the server's end of our stdin is gone."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, read)
    return stop


def _say(out: TextIO, **values: Any) -> None:
    out.write(json.dumps(values) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
