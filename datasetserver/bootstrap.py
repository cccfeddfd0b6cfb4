"""The server's own node in the DHT, as a process of its own: a lasting address where newcomers meet the swarm.

Run by the server as `python -m datasetserver.bootstrap`. Reads its options as a line of JSON from stdin, and further ones when there is
news, such as a run; ends when stdin does. Writes JSON lines to stdout: first {"peer_id", "maddrs"}, then again and again {"maddrs"}, with
{"records"} of the run's peers once there is a run; or {"error"} and ends.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from swarm.errors import ExitCode, UserError
from swarm.interrupts import stop_event
from swarm.lifeline import die_with_parent
from swarm.logs import setup_logging

log = logging.getLogger("datasetserver.bootstrap")
REPORT_SECONDS = 1.5
PUBLISH_SECONDS = 20.0
_DEAF_SECONDS = 30.0  # p2pd did not answer for this long: end, and let the server start us again


def main() -> int:
    # Asked before anything slow is imported, and answered by SIGTERM so that p2pd is ended in order.
    die_with_parent(signal.SIGTERM)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between our lines
    lines = FileIO(0, closefd=False)  # unbuffered: what follows a line must stay where the event loop sees it
    first = lines.readline()
    if not first:
        return ExitCode.OK
    options = json.loads(first)
    setup_logging(name="dht", log_format=options.get("log_format", "text"))
    try:
        asyncio.run(_serve(options, lines, out))
    except UserError as error:
        _say(out, error={"message": error.message, "fix": error.fix, "code": int(error.code)})
        return error.code
    except BrokenPipeError:
        return ExitCode.FAILED
    return ExitCode.OK


async def _serve(options: dict[str, Any], lines: FileIO, out: TextIO) -> None:
    stop = stop_event()
    _listen(lines, options, stop)
    work, leave = asyncio.create_task(_take_part(options, out, stop)), asyncio.create_task(stop.wait())
    await asyncio.wait({work, leave}, return_when=asyncio.FIRST_COMPLETED)
    leave.cancel()
    if stop.is_set():  # a question that peers who are gone do not answer takes seconds
        work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _take_part(options: dict[str, Any], out: TextIO, stop: asyncio.Event) -> None:
    """Be in the DHT, describe the run there and tell the server of its peers, until `stop`."""
    from swarm.dht import SwarmNode
    from swarm.members import Members
    from swarm.records import RunRecord
    from swarm.run_config import RunConfig

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
                if not await node.alive():
                    raise RuntimeError("p2pd does not answer")
                told = {"maddrs": await node.maddrs()}
                if options["run_id"] and published is None:
                    node.admit(Members(RunConfig.from_mapping(options["run"], where="the server")))
                if options["run_id"] and (published is None or now - published >= PUBLISH_SECONDS):
                    record = RunRecord(
                        run_id=options["run_id"], run=options["run"], server_url=options["url"], extension=options.get("extension")
                    )
                    await asyncio.wait_for(node.publish_run(record), 10)
                    published = now
                if options["run_id"]:
                    records = await asyncio.wait_for(node.records(options["run_id"]), 10)
                    told["records"] = [record.asdict() for record in records.values()]
                _say(out, **told)
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


def _listen(lines: FileIO, options: dict[str, Any], stop: asyncio.Event) -> None:
    """Take news into `options`; set `stop` when the server's end of our stdin is gone."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        line = lines.readline()  # the server writes whole lines
        if line:
            options.update(json.loads(line))
        else:
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, read)


def _say(out: TextIO, **values: Any) -> None:
    out.write(json.dumps(values) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
