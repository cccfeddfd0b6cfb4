"""`dd-status URL-or-multiaddr`: one readable screen of a running swarm, asked of its dataset server or of any of its peers."""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import http.client
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console, RenderableType
from rich.live import Live

from swarm import protocol, run_identity
from swarm.arguments import ArgumentParser, seconds
from swarm.base_model import shown_model
from swarm.dialling import dialable, grounds
from swarm.errors import ExitCode, UserError, run_program, why
from swarm.figures import figures, mean_loss
from swarm.interrupts import interruptible
from swarm.members import Members
from swarm.options import with_token
from swarm.records import words
from swarm.run_defaults import DEFAULTS
from swarm.runs import choose, genuine, named_in, several
from swarm.screen import screen
from swarm.tasks import end_tasks
from swarm.urls import check_token, check_url

_MAX_ANSWER_BYTES = 16 << 20
_LONGEST_NAME = 64
_MOST_MET = 20


def cli(argv: Sequence[str] | None = None) -> int:
    """The console script `dd-status`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return run_program(lambda: _main(_parse(argv)), debug="--debug" in argv)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        "dd-status",
        description="Show how a swarm is doing.",
        examples=["dd-status http://203.0.113.7:9090 --watch", "dd-status /ip4/203.0.113.7/tcp/31337/p2p/Qm..."],
    )
    parser.add_argument("where", help="URL of its dataset server (http://203.0.113.7:9090), or multiaddr of a peer (/ip4/.../p2p/...)")
    parser.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C")
    parser.add_argument("--every", type=seconds, default=2.0, metavar="SECONDS", help="with --watch: ask every SECONDS [2]")
    parser.add_argument("--json", action="store_true", help="print everything known as JSON, for programs; with --watch a line each time")
    parser.add_argument("--run_id", default="", help="which run, when the peers at a multiaddr serve several")
    parser.add_argument(
        "--token", default=None, help="the token that its host gave you, if it asks for one; or DD_TOKEN in the environment"
    )
    parser.add_argument("--timeout", type=seconds, default=15.0, metavar="SECONDS", help="longest wait for an answer [15]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser.parse_args(with_token(argv))


def _main(args: argparse.Namespace) -> None:
    token = os.environ.get("DD_TOKEN", "") if args.token is None else args.token
    with asking(args.where, seconds=args.timeout, run_id=args.run_id, token=token.strip()) as look:
        if args.watch:
            watch(look, every=args.every, console=Console(), as_json=args.json)
        elif args.json:
            print(json.dumps(for_programs(look()), indent=2))
        else:
            console = Console()
            console.print(screen(look(), height=console.height if console.is_terminal else None))


def for_programs(seen: Mapping[str, Any]) -> dict[str, Any]:
    """`seen` and, under `figures`, what follows from it."""
    return {**seen, "figures": dataclasses.asdict(figures(seen))}


@contextlib.contextmanager
def asking(
    where: str | Sequence[str], *, seconds: float = 15.0, run_id: str = "", token: str = ""
) -> Iterator[Callable[[], dict[str, Any]]]:
    """A function that returns what a server or a peer says of the swarm: the fields of `protocol.Progress`, those a peer cannot know being None.

    It may be called any number of times; a node in the DHT is kept between looks. where: also several peers' multiaddrs, of which one has to
    answer. token: shown to a server, and to it alone. Raises UserError when `where` is neither a URL nor a multiaddr, does not answer, or is
    something else.
    """
    if isinstance(where, str) and not where.startswith("/"):
        yield lambda: _from_server(where, seconds, token)
        return
    visitor = _Visitor([where] if isinstance(where, str) else where, run_id, seconds)
    try:
        yield visitor.look
    finally:
        visitor.close()


def _from_server(url: str, seconds: float, token: str) -> dict[str, Any]:
    check_token(token)
    check_url(url, fix="Give http://HOST:PORT of a dataset server, or /ip4/.../p2p/... of a peer.")
    try:
        request = urllib.request.Request(url.rstrip("/") + "/v1/progress")
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            body = _read_within(answer, seconds)
        return protocol.Progress.model_validate_json(body).model_dump()
    except urllib.error.HTTPError as error:
        body = b""
        with error, contextlib.suppress(OSError, http.client.HTTPException):  # late, or cut off: the status says enough
            body = _read_within(error, seconds)
        raise _refusal(url, body) or _other(url, f"answers {error.code} {error.reason}") from None
    except ValidationError:
        raise _other(url, "answers something else") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None)
        cause = why(reason if isinstance(reason, Exception) else error)
        raise UserError(
            f"{url} does not answer: {cause}.", fix="Check the address, and that the server is running.", code=ExitCode.NETWORK
        ) from None


def _read_within(answer: http.client.HTTPResponse, seconds: float) -> bytes:
    """The body. Raises TimeoutError: the socket's own limit is for each read, so that a byte now and then would keep us for ever."""
    body, until = b"", time.monotonic() + seconds
    while piece := answer.read1(1 << 16):
        body += piece
        if time.monotonic() > until:
            raise TimeoutError(f"no whole answer within {seconds:g} s")
        if len(body) > _MAX_ANSWER_BYTES:
            break
    return body


def _refusal(url: str, body: bytes) -> UserError | None:
    """What a dataset server of ours said instead of its progress (it has no run yet); None when it is something else that answers."""
    try:
        said = protocol.ErrorAnswer.model_validate_json(body).error
    except ValidationError:
        return None
    code = ExitCode.AUTH if said.code.startswith("token_") else ExitCode.NETWORK
    return UserError(f"{url}: {said.message}", fix=said.fix, code=code)


def _other(url: str, what: str) -> UserError:
    return UserError(
        f"{url} {what}: it is not a dataset server of this version.", fix="Check the address and the port.", code=ExitCode.NETWORK
    )


class _Visitor:
    """A client in the DHT that stays for as long as it is asked; what it met helps it to come back when the first addresses are gone."""

    def __init__(self, maddrs: Sequence[str], run_id: str, seconds: float):
        self._maddrs, self._run_id, self._seconds = maddrs, run_id, seconds
        self._place = maddrs[0] if len(maddrs) == 1 else f"{maddrs[0]} (and {len(maddrs) - 1} more)"
        self._met: list[str] = []
        self._node: Any = None
        self._loop = asyncio.new_event_loop()

    def look(self) -> dict[str, Any]:
        """Raises UserError; the next look joins anew then."""
        task = self._loop.create_task(asyncio.wait_for(self._look(), 4 * self._seconds))
        try:
            return self._loop.run_until_complete(task)
        except BaseException as error:
            self._leave(task)
            if isinstance(error, UserError) or not isinstance(error, Exception):
                raise
            reason = f"{type(error).__name__} {error}".strip()
            raise UserError(
                f"{self._place} does not answer: {reason}.", fix="Ask again, or ask another peer.", code=ExitCode.NETWORK
            ) from None

    async def _look(self) -> dict[str, Any]:
        if self._node is None:
            self._node = await self._join()
        runs = choose(genuine(await self._node.find_runs(), named_in(self._maddrs)), self._run_id)
        of_runs = {}
        for found in runs:
            self._node.admit(Members(found.run))
            of_runs[found.run.run_id] = await self._node.records(found.run.run_id)
        if len(runs) > 1:
            raise several(runs, {run_id: len(records) for run_id, records in of_runs.items()})
        records = [record for found in of_runs.values() for record in found.values()]
        if not records and not any(await asyncio.gather(*(self._node.meet([maddr]) for maddr in self._maddrs))):
            raise UserError(f"{self._place} does not answer any more.", fix="Ask another peer.", code=ExitCode.NETWORK)
        if not runs:
            raise UserError(
                f"{self._place} answers, but no run is known there.",
                fix="Ask again in a minute, or ask another peer.",
                code=ExitCode.NETWORK,
            )
        led_into = grounds([self._maddrs], ())
        self._met = [maddr for record in records for maddr in dialable(record.maddrs, record.peer_id, led_into)][:_MOST_MET]
        return summarize(runs[0].record(), records, now=time.time())

    async def _join(self) -> Any:
        from swarm.dht import SwarmNode  # hivemind: not needed to ask a server

        with tempfile.TemporaryDirectory(prefix="dd-status-") as folder:  # the key is read once
            identity = Path(folder) / "identity.key"
            return await SwarmNode.join(
                initial_peers=[*self._maddrs, *self._met], identity_path=identity, client_mode=True, deadline_seconds=self._seconds
            )

    def _leave(self, *begun: asyncio.Task) -> None:
        self._loop.run_until_complete(end_tasks(*begun))
        node, self._node = self._node, None
        if node is not None:
            self._loop.run_until_complete(node.close())

    def close(self) -> None:
        self._leave()
        self._loop.run_until_complete(end_tasks(*asyncio.all_tasks(self._loop)))  # hivemind's node leaves one that sleeps for 5 s
        self._loop.close()


def summarize(run: Any, records: Any, *, now: float) -> dict[str, Any]:
    """The fields of `protocol.Progress` from a RunRecord and the PeerRecords of its live peers; now: in UNIX seconds."""
    peers = sorted((record.asdict() for record in records), key=lambda peer: peer["peer_id"])
    known = set(protocol.PeerInfo.model_fields)
    best = _head_of_most(peers) or run.head or {"round": 0, "samples": 0}
    # Who only looks knows no host whose signature could be checked, and takes either number on the peers' word.
    said = _said(run.run)
    total = max(_whole(values.get("total_samples")) for values in (said, run.extension or {}))
    return {
        "run_id": run.run_id,
        "run_name": str(said.get("run_name", ""))[:_LONGEST_NAME],
        "round": best["round"],
        "samples": best["samples"],
        "repeated_samples": None,
        "total_samples": total,
        "target_batch_size": _whole(said.get("target_batch_size")),
        "resolution": _whole(said.get("resolution"), most=1 << 20),
        "model": words(shown_model(str(said.get("model", ""))), _LONGEST_NAME),
        "method": words(str(said.get("method", "")), _LONGEST_NAME),
        "waiting_samples": sum(peer["waiting_samples"] for peer in peers),
        "samples_per_second": sum(peer["samples_per_second"] for peer in peers),
        "loss": mean_loss((peer["loss"], peer["samples_per_second"]) for peer in peers),
        "peers": [{name: value for name, value in peer.items() if name in known} for peer in peers],
        "samples_by_peer": None,
        "banned": {},
        "proven": {},
        "trusted": [],
        "epoch": None,
        "epoch_samples": None,
        "dataset_samples": None,
        "ledger": None,
        "finished": bool(total and best["samples"] >= total),
        "server_time": now,
    }


def _head_of_most(peers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """One of the peers on the state that most are on, and of several such on the one with most samples: a single record may say anything."""
    on = collections.Counter(peer["digest"] for peer in peers if peer["round"])
    return max((peer for peer in peers if peer["round"]), key=lambda peer: (on[peer["digest"]], peer["samples"]), default=None)


def watch(look: Callable[[], dict[str, Any]], *, every: float, console: Console, as_json: bool = False) -> None:
    """Show what `look` sees, every `every` seconds, until Ctrl-C or SIGTERM. The first look must succeed (UserError); later ones may fail.

    On a terminal one screen that is drawn anew; else a screen, or a line of JSON, for each update.
    """
    seen = look()
    trouble, at = "", time.monotonic()

    def draw() -> RenderableType:
        return screen(seen, height=console.height, trouble=trouble, age=time.monotonic() - at)

    def say(text: str) -> None:
        console.file.write(text)
        console.file.flush()

    def tell() -> None:
        if as_json:
            said = {"error": trouble, "stale_seconds": round(time.monotonic() - at, 1)} if trouble else {}
            say(json.dumps({**for_programs(seen), **said}) + "\n")
        elif not console.is_terminal:
            with console.capture() as text:
                console.print(screen(seen, trouble=trouble, age=time.monotonic() - at), "")
            say(text.get())

    drawn = console.is_terminal and not as_json
    live = Live(console=console, screen=True, get_renderable=draw, refresh_per_second=2) if drawn else contextlib.nullcontext()
    try:
        with contextlib.suppress(KeyboardInterrupt), interruptible(), live:
            while True:
                tell()
                time.sleep(every)
                try:
                    seen = look()
                    trouble, at = "", time.monotonic()
                except UserError as error:
                    trouble = error.message
    except BrokenPipeError:  # nobody reads on; what Python still holds back would fail once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), console.file.fileno())
    if drawn:
        console.print(draw())


def _said(run: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that a stranger published, unchecked; none where it is not written as a run is."""
    try:
        return {**DEFAULTS, **run_identity.read(run)[0]}
    except UserError:
        return {}


def _whole(value: Any, most: int = 1 << 53) -> int:
    """A number of a configuration that a stranger published; 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else 0


if __name__ == "__main__":
    sys.exit(cli())
