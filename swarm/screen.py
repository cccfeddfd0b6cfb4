"""A run on one terminal screen of 80 columns, from the fields of `protocol.Progress`; every word of a stranger is shown as plain text."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm import advice
from swarm.figures import Figures, figures
from swarm.logs import plain

MOST_PEERS = 20
_MOST_NOTES = 5
_LINES_WITHOUT_PEERS = 14  # the run's own lines, the tables' heads and what is left out


def span(seconds: float) -> str:
    """'41 s', '12 min 5 s', '3 h 20 min', '5 d 3 h'."""
    whole = int(seconds)
    for name, unit, below, smaller in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {below}"
    return f"{whole} s"


def screen(seen: Mapping[str, Any], *, height: int | None = None, trouble: str = "", age: float = 0.0) -> RenderableType:
    """The run, how far it is, its round, a line per peer, and what the last round cost each.

    height: lines that there are; None: MOST_PEERS peers. trouble: why `seen` is `age` seconds old.
    """
    known = figures(seen)
    peers = _in_order(seen["peers"])
    lines = bool(trouble) + bool(_reported(known)) + sum(bool(seen.get(name)) for name in ("banned", "proven", "trusted"))
    most = MOST_PEERS if height is None else max(height - _LINES_WITHOUT_PEERS - lines, 3)
    notes = [peer for peer in peers[:most] if peer.get("note")][:_MOST_NOTES]
    if height is not None:
        most = max(most - len(notes), 3)
    shown = peers[:most]
    parts = [_stale(trouble, age)] if trouble else []
    parts += [_run(seen, known), Text(), _peers(seen, shown)]
    parts += [
        Text.assemble((_name(peer), "bold"), ": ", plain(peer["note"]), style="yellow", overflow="ellipsis", no_wrap=True) for peer in notes
    ]
    if len(peers) > len(shown):
        parts.append(_left_out(peers[len(shown) :]))
    for name, by in (("banned", "the host"), ("proven", "a proof")):
        if banned := seen.get(name):
            said = ", ".join(f"...{peer[-6:]} ({plain(reason)})" for peer, reason in list(banned.items())[:_MOST_NOTES])
            parts.append(Text(f"banned by {by}: {len(banned)}: {said}", style="yellow", overflow="ellipsis", no_wrap=True))
    if reported := _reported(known):
        parts.append(Text(f"audits report {len(reported)}: {', '.join(reported[:_MOST_NOTES])}", style="yellow", overflow="ellipsis", no_wrap=True))
    if trusted := seen.get("trusted"):
        here = [_name(peer) for peer in peers if peer["peer_id"] in trusted]
        parts.append(Text(f"trusted to average: {len(here)} of {len(trusted)} are here: {', '.join(here[:_MOST_NOTES])}".rstrip(": "), overflow="ellipsis", no_wrap=True))
    averaged = [peer for peer in shown if peer["transfer_seconds"]]
    if averaged and (height is None or most >= len(shown) + len(averaged) + 2):
        parts += [Text(), _transfers(averaged)]
    if known.findings and height is None:
        parts += [Text(), _audits(peers, known.findings[:MOST_PEERS])]
    return Group(*parts)


def _stale(trouble: str, age: float) -> Text:
    return Text(f"{span(age)} old: {plain(trouble)}", style="bold red", overflow="ellipsis", no_wrap=True)


def _run(seen: Mapping[str, Any], known: Figures) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    at = time.strftime("%H:%M:%SZ", time.gmtime(seen["server_time"]))
    rows.add_row("run", Text.assemble((plain(seen["run_name"]), "bold"), f"  {plain(seen['run_id'])}  ", _state(seen), (f"  {at}", "dim")))
    left = f", about {span(known.eta_seconds)} left" if known.eta_seconds is not None else ""
    rows.add_row("samples", bar(seen["samples"], seen["total_samples"], left))
    if not seen["finished"]:
        rows.add_row(f"round {seen['round'] + 1}", bar(seen["waiting_samples"], known.round_target))
    used = f"; {known.utilisation:.0%} of the time in training" if known.utilisation is not None else ""
    rows.add_row("speed", f"{seen['samples_per_second']:,.1f} samples/s{used}")
    rows.add_row("loss", "-" if seen["loss"] is None else f"{seen['loss']:.4f}")
    if known.validation_loss is not None:
        rows.add_row("validation", f"{known.validation_loss:.4f} after round {known.validation_round}: the loss of held-out pictures")
    if seen["ledger"]:
        ledger = seen["ledger"]
        words = f"{ledger['leased']:,} leased, {ledger['pending']:,} waiting"
        rows.add_row("data", f"epoch {seen['epoch'] + 1}: {seen['epoch_samples']:,} of {seen['dataset_samples']:,}; {words}")
        rows.add_row("counted", f"{ledger['counted']:,} once each + {seen['repeated_samples']:,} repeated = {seen['samples']:,} in the state")
    if not seen["finished"] and known.transfer_seconds:
        rows.add_row("links", _link(seen, known))
    return rows


def _state(seen: Mapping[str, Any]) -> tuple[str, str]:
    if seen["finished"]:
        return "finished", "green"
    return ("paused", "yellow") if seen.get("state") == "paused" else ("", "")


def _link(seen: Mapping[str, Any], known: Figures) -> str:
    """What averaging costs this swarm: what all its peers moved, and the slowest's seconds."""
    moved = f"{advice.size(known.sent_bytes)} sent, {advice.size(known.received_bytes)} received in the last round"
    text = f"{moved}; a transfer takes {advice.duration(known.transfer_seconds)}"
    if not seen["samples_per_second"] or not seen["target_batch_size"]:
        return text
    speed = seen["samples_per_second"]
    blocking, overlapping = (advice.smallest_target(known.transfer_seconds, speed, overlap) for overlap in (False, True))
    return f"{text}; smallest target batch for {advice.UTILISATION:.0%} training: {blocking:,} ({overlapping:,} with --overlap)"


def bar(done: int, total: int, more: str = "") -> RenderableType:
    """How many samples of `total` there are; how many there are, where there is no end (0)."""
    if not total:
        return f"{done:,} samples"
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=total, completed=min(done, total), width=16), f"{done:,} of {total:,} ({min(1, done / total):.0%}){more}")
    return row


def _in_order(peers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those in trouble first, then the fast ones."""
    return sorted(peers, key=lambda peer: (not peer.get("note"), -peer["samples_per_second"], peer["peer_id"]))


def _peers(seen: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not peers:
        return Text("No live peers." if not seen["finished"] else "All peers have left.")
    counted, table = seen["samples_by_peer"] or {}, _table()
    table.add_column("peer", max_width=14, no_wrap=True, overflow="ellipsis")
    table.add_column("hardware", max_width=14, no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True)
    for name in ("round", "samples/s", "loss", "share", "seen"):
        table.add_column(name, justify="right", no_wrap=True)
    for peer in peers:
        behind = "yellow" if peer["round"] < seen["round"] else ""
        share = f"{counted.get(peer['peer_id'], 0) / max(seen['samples'], 1):.0%}" if counted else "-"
        table.add_row(
            Text(_name(peer)),
            Text(plain(peer.get("hardware", ""))),
            Text(_phase(peer), style="yellow" if peer.get("note") or peer["phase"] in ("catching_up", "paused") else ""),
            Text(str(peer["round"]), style=behind),
            f"{peer['samples_per_second']:,.1f}",
            "-" if peer["loss"] is None else f"{peer['loss']:.4f}"[:6],
            share,
            _ago(seen["server_time"] - peer["time"]) if peer.get("time") else "-",
        )
    return table


def _ago(seconds: float) -> str:
    """In five characters."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{min(int(seconds // unit), 999)} {name}"
    return f"{max(int(seconds), 0)} s"


def _left_out(peers: Sequence[Mapping[str, Any]]) -> Text:
    states = Counter(_phase(peer) for peer in peers).most_common()
    return Text(f"... and {len(peers):,} more: " + ", ".join(f"{count:,} {state}" for state, count in states), style="dim")


def _transfers(peers: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What each peer's last averaged round cost it."""
    table = _table()
    table.add_column("peer", max_width=14, no_wrap=True, overflow="ellipsis")
    for name in ("sent", "Mbit/s", "received", "Mbit/s", "seconds", "time lost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for peer in peers:
        seconds = peer["transfer_seconds"]
        moved = [
            cell
            for count in (peer["sent_bytes"], peer["received_bytes"])
            for cell in (advice.size(count), f"{8e-6 * count / seconds:,.0f}")
        ]
        table.add_row(Text(_name(peer)), *moved, f"{seconds:,.1f}", f"{peer['share_lost']:.1%}", "client" if peer["client_mode"] else "")
    return table


def _reported(known: Figures) -> list[str]:
    """Members whose contributions make the model worse, as auditors measured."""
    return list(dict.fromkeys(f"...{plain(found['peer'])[-8:]}" for found in known.findings if found["reported"]))


def _audits(peers: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What each auditor measured of each member: how one contribution changes the loss."""
    names, table = {peer["peer_id"]: _name(peer) for peer in peers}, _table()
    table.add_column("audited", max_width=14, no_wrap=True, overflow="ellipsis")
    for name in ("loss by one", "+-", "of its own", "rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("by", max_width=14, no_wrap=True, overflow="ellipsis")
    table.add_column("", no_wrap=True)
    for found in findings:
        member, by = (names.get(found[which], f"...{plain(found[which])[-8:]}") for which in ("peer", "by"))
        own = "-" if found.get("own") is None else f"{found['own']:+.5f}"
        said = Text("makes it worse", style="yellow") if found["reported"] else ""
        table.add_row(Text(member), f"{found['change']:+.5f}", f"{found['error']:.5f}", own, str(found["rounds"]), Text(by), said)
    return table


def _table() -> Table:
    """Fits into 80 columns."""
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def _name(peer: Mapping[str, Any]) -> str:
    return plain(peer.get("name") or "") or f"...{plain(peer['peer_id'])[-8:]}"


def _phase(peer: Mapping[str, Any]) -> str:
    return {"assist": "assists"}.get(peer["phase"], plain(peer["phase"]).replace("_", " "))
