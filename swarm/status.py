"""`dd-status URL-or-multiaddr`: one readable screen of a running swarm, asked of its dataset server or of any of its peers."""

import argparse
import asyncio
import http.client
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm import advice, protocol
from swarm.errors import ExitCode, UserError, run_program

_MAX_ANSWER_BYTES = 16 << 20


def cli(argv: Sequence[str] | None = None) -> int:
    """The console script `dd-status`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("dd-status", description="Show how a swarm is doing.")
    parser.add_argument("where", help="URL of its dataset server (http://203.0.113.7:9090), or multiaddr of a peer (/ip4/.../p2p/...)")
    parser.add_argument("--json", action="store_true", help="print everything known as JSON, for programs")
    parser.add_argument("--run_id", default="", help="which run, when the peers at a multiaddr serve several")
    parser.add_argument("--token", default=None, help="what its host gave you, if it asks for one; or DD_TOKEN in the environment")
    parser.add_argument("--timeout", type=float, default=15.0, metavar="SECONDS", help="wait no longer for an answer [15]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    return run_program(lambda: _main(args), debug=args.debug)


def _main(args: argparse.Namespace) -> None:
    token = os.environ.get("DD_TOKEN", "") if args.token is None else args.token
    seen = fetch(args.where, seconds=args.timeout, run_id=args.run_id, token=token.strip())
    if args.json:
        print(json.dumps(seen, indent=2))
    else:
        Console().print(screen(seen))


def fetch(where: str, *, seconds: float = 15.0, run_id: str = "", token: str = "") -> dict[str, Any]:
    """What a server or a peer says of the swarm: the fields of `protocol.Progress`, those a peer cannot know being None.

    token: shown to a server, and to it alone. Raises UserError when `where` is neither a URL nor a multiaddr, does not answer, or is something else.
    """
    if where.startswith("/"):
        return asyncio.run(_from_dht(where, run_id, seconds))
    return _from_server(where, seconds, token)


def _from_server(url: str, seconds: float, token: str) -> dict[str, Any]:
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        port_is_right = False
    if not port_is_right or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"'{url}' is neither a URL nor a multiaddr.", fix="Give http://HOST:PORT of a dataset server, or /ip4/.../p2p/... of a peer."
        )
    try:
        request = urllib.request.Request(url.rstrip("/") + "/v1/progress")
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            body = answer.read(_MAX_ANSWER_BYTES)
        return protocol.Progress.model_validate_json(body).model_dump()
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(_MAX_ANSWER_BYTES)
        raise _refusal(url, body) or _other(url, f"answers {error.code} {error.reason}") from None
    except ValidationError:
        raise _other(url, "answers something else") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        words = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise UserError(
            f"{url} does not answer: {words}.", fix="Check the address, and that the server is running.", code=ExitCode.NETWORK
        ) from None


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
        f"{url} {what}: it is no dataset server of this version.", fix="Check the address and the port.", code=ExitCode.NETWORK
    )


async def _from_dht(maddr: str, run_id: str, seconds: float) -> dict[str, Any]:
    from swarm.dht import SwarmNode  # hivemind: not needed to ask a server

    with tempfile.TemporaryDirectory(prefix="dd-status-") as folder:
        node = await SwarmNode.join(
            initial_peers=[maddr], identity_path=Path(folder) / "identity.key", client_mode=True, deadline_seconds=seconds
        )
        try:
            runs = [record for record in await node.find_runs() if run_id in ("", record.run_id)]
            names = sorted({record.run_id for record in runs})
            if not names:
                raise UserError(f"{maddr} answers, but no run is known there.", fix="Ask again in a minute, or ask another peer.")
            if len(names) > 1:
                raise UserError(f"There are {len(names)} runs: {', '.join(names)}.", fix="Say which with --run_id.")
            records = await node.records(names[0])
        finally:
            await node.close()
    run = max(runs, key=lambda record: (record.head or {"samples": 0})["samples"])
    return summarize(run, records.values(), now=time.time())


def summarize(run: Any, records: Any, *, now: float) -> dict[str, Any]:
    """The fields of `protocol.Progress` from a RunRecord and the PeerRecords of its live peers; now: in UNIX seconds."""
    peers = sorted((record.asdict() for record in records), key=lambda peer: peer["peer_id"])
    known = set(protocol.PeerInfo.model_fields)
    losses = [peer["loss"] for peer in peers if peer["loss"] is not None]
    heads = [*peers, *([run.head] if run.head else [])]
    best = max(heads, key=lambda head: head["samples"], default={"round": 0, "samples": 0})
    total = run.run.get("total_samples", 0)
    return {
        "run_id": run.run_id,
        "run_name": str(run.run.get("run_name", "")),
        "round": best["round"],
        "samples": best["samples"],
        "total_samples": total,
        "target_batch_size": run.run.get("target_batch_size", 0),
        "waiting_samples": sum(peer["waiting_samples"] for peer in peers),
        "samples_per_second": sum(peer["samples_per_second"] for peer in peers),
        "loss": sum(losses) / len(losses) if losses else None,
        "peers": [{name: value for name, value in peer.items() if name in known} for peer in peers],
        "samples_by_peer": None,
        "epoch": None,
        "epoch_samples": None,
        "dataset_samples": None,
        "ledger": None,
        "finished": bool(total and best["samples"] >= total),
        "server_time": now,
    }


def screen(seen: dict[str, Any]) -> RenderableType:
    """The one screen: the run, how far it is, its round, a line per peer, and what the last round cost each."""
    rows = Table.grid(padding=(0, 2))
    rows.add_row(
        "run", Text.assemble((seen["run_name"], "bold"), f"  {seen['run_id']}", ("  finished", "green") if seen["finished"] else "")
    )
    rows.add_row("samples", _bar(seen["samples"], seen["total_samples"]))
    target = seen["target_batch_size"]
    if seen["total_samples"]:
        target = max(1, min(target, seen["total_samples"] - seen["samples"]))
    if not seen["finished"]:
        rows.add_row(f"round {seen['round'] + 1}", _bar(seen["waiting_samples"], target))
    rows.add_row("speed", f"{seen['samples_per_second']:,.0f} samples/s{_remaining(seen)}")
    rows.add_row("loss", "-" if seen["loss"] is None else f"{seen['loss']:.4f}")
    if seen["ledger"]:
        ledger = seen["ledger"]
        words = f"{ledger['leased']:,} leased, {ledger['pending']:,} waiting to be averaged, {ledger['counted']:,} counted"
        rows.add_row("data", f"epoch {seen['epoch'] + 1}: {seen['epoch_samples']:,} of {seen['dataset_samples']:,}; {words}")
    if not seen["finished"] and (link := _link(seen)):
        rows.add_row("links", link)
    return Group(rows, Text(), _peers(seen), _transfers(seen))


def _link(seen: dict[str, Any]) -> str:
    """What averaging costs this swarm, by its slowest peer."""
    seconds = max((peer["transfer_seconds"] for peer in seen["peers"]), default=0.0)
    if not seconds or not seen["samples_per_second"] or not seen["target_batch_size"]:
        return ""
    blocking, overlapping = (advice.smallest_target(seconds, seen["samples_per_second"], overlap) for overlap in (False, True))
    return (
        f"a transfer takes {advice.duration(seconds)}; smallest target batch for {advice.UTILISATION:.0%} training: "
        f"{blocking:,}, with --overlap {overlapping:,}"
    )


def _bar(done: int, total: int) -> RenderableType:
    if not total:
        return f"{done:,}"
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=total, completed=min(done, total), width=30), f"{done:,} of {total:,} ({min(1, done / total):.0%})")
    return row


def _remaining(seen: dict[str, Any]) -> str:
    left = seen["total_samples"] - seen["samples"] - seen["waiting_samples"]
    if seen["finished"] or left <= 0 or seen["samples_per_second"] <= 0:
        return ""
    hours, rest = divmod(int(left / seen["samples_per_second"]), 3600)
    return f", about {hours}:{rest // 60:02}:{rest % 60:02} left"


def _peers(seen: dict[str, Any]) -> RenderableType:
    counted = seen["samples_by_peer"]
    if not seen["peers"]:
        return Text("No live peers." if not seen["finished"] else "All peers have left.")
    table = _table("peer", "round", "waiting", "samples/s", "loss", *(["samples"] if counted else []), "state", "")
    for peer in seen["peers"]:
        behind = Text(str(peer["round"]), style="yellow" if peer["round"] < seen["round"] else "")
        cells = [_name(peer), behind, f"{peer['waiting_samples']:,}", f"{peer['samples_per_second']:,.1f}"]
        cells += ["-" if peer["loss"] is None else f"{peer['loss']:.4f}", *([f"{counted.get(peer['peer_id'], 0):,}"] if counted else [])]
        table.add_row(*cells, peer["digest"][:8], _role(peer))
    return table


def _transfers(seen: dict[str, Any]) -> RenderableType:
    """What each peer's last averaged round cost it."""
    table = _table("peer", "sent", "Mbit/s", "received", "Mbit/s", "seconds", "time lost")
    for peer in seen["peers"]:
        if seconds := peer["transfer_seconds"]:
            moved = [[advice.size(count), f"{8e-6 * count / seconds:,.0f}"] for count in (peer["sent_bytes"], peer["received_bytes"])]
            table.add_row(_name(peer), *moved[0], *moved[1], f"{seconds:,.1f}", f"{peer['share_lost']:.1%}")
    return Group(Text(), table) if table.row_count else Group()


def _table(*names: str) -> Table:
    """Each of the two fits into 80 columns."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="left" if name in ("peer", "state", "") else "right")
    return table


def _name(peer: dict[str, Any]) -> str:
    return f"...{peer['peer_id'][-8:]}"


def _role(peer: dict[str, Any]) -> str:
    if peer["phase"] == "assist":
        return "assists"
    return "client" if peer["client_mode"] else ""


if __name__ == "__main__":
    sys.exit(cli())
