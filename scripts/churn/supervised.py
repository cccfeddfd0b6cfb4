"""Kill something every minute in a swarm that nobody tends: what was killed must come back by supervision alone, and the page stay true.

    ./scripts/soak --minutes 30 [--every 60] [--peers 2] [--seed 0] [--record FILE]

Real `dd-peer`s train a tiny Stable Diffusion from a real dataset server, for which a loop here stands in for systemd (Restart=always).
Killed are, in turn and then by chance: a trainer, the server, a p2pd, a sidecar (which averages); a p2pd and a trainer are stopped so
that they hang. After each, once what was lost has taken part in a round again, what the page says is compared with /v1/progress, that
with the ledger, and all of it with the table of processes. The exit status is 0 only if everything came back and all agreed each time.
"""

import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.common import about, argument_parser, heed_sigterm, print_table
from scripts.churn import checks
from scripts.churn.swarm import ROOT, Peer, Server, add_record_arguments, conclude, end, leave, until, work_folder
from scripts.demo import processes
from swarm.errors import ExitCode, UserError
from swarm.lifeline import adopt_orphans
from tests.page import chromium

KINDS = ("trainer", "server", "p2pd", "sidecar", "p2pd hangs", "trainer hangs")
PARTS = {"dd-peer": "peer.supervise", "trainer": "peer/finetune.py", "sidecar": "peer.sync.engine.trainer.sidecar", "p2pd": "hivemind_cli/p2pd"}
SERVER_PARTS = {"server": "-m datasetserver ", "DHT node": "datasetserver.bootstrap", "p2pd": "hivemind_cli/p2pd"}
START_SECONDS, RECOVER_SECONDS, AGREE_SECONDS = 420.0, 420.0, 90.0
"""Far above what anything takes; a busy machine needs a minute to start a trainer. A peer that is gone is listed for 20 s."""
STALL_SECONDS = 30.0
ROUND_SAMPLES, BATCH = 128, 4


class Page:
    """What a person reads at the server's `/`: round, samples and the peers' names.

    In a browser, where there is one, that has the page open all the time: its text, which the page itself must keep up to date, also
    when its server was away. Otherwise the document in the first event of the page's stream.
    """

    _TEXTS = (
        "JSON.stringify(Object.fromEntries(['round', 'samples', 'peers'].map(id => [id, document.getElementById(id)?.innerText ?? ''])))"
    )

    def __init__(self, url: str, folder: Path, *, browser: bool):
        self._url, self._folder, self._process = url, folder / "chromium", None
        self.browser = browser and bool(chromium.PROGRAM)

    def open(self) -> None:
        if self.browser:
            self._process = processes.Program(
                "chromium",
                [chromium.PROGRAM, *chromium.flags(self._folder), self._url],
                self._folder.with_suffix(".log"),
                {},
                self._folder.parent,
            )

    def close(self) -> None:
        if self._process:
            self._process.kill_tree()

    def read(self) -> dict[str, Any] | None:
        """None when it shows nothing just now."""
        try:
            return self._rendered() if self.browser else self._streamed()
        except (OSError, ValueError, KeyError, IndexError, TypeError, StopIteration, asyncio.TimeoutError, aiohttp.ClientError):
            return None

    def _rendered(self) -> dict[str, Any] | None:
        port = (self._folder / "DevToolsActivePort").read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20) as answer:
            tab = next(tab for tab in json.load(answer) if tab["type"] == "page")
        texts = json.loads(asyncio.run(asyncio.wait_for(_evaluate(tab["webSocketDebuggerUrl"], self._TEXTS), 30)))
        rounds, samples = (int(re.sub(r"\D", "", texts[name].split(" of ")[0])) for name in ("round", "samples"))
        return {"round": rounds, "samples": samples, "peers": sorted(set(re.findall(r"peer-\d+", texts["peers"])))}

    def _streamed(self) -> dict[str, Any] | None:
        with urllib.request.urlopen(self._url + "/v1/events", timeout=20) as stream:
            return next(_shown(seen) for line in stream if line.startswith(b"data: ") and (seen := json.loads(line[6:])["progress"]))


async def _evaluate(socket: str, script: str) -> str:
    """What a script is in a tab of the browser (DevTools protocol)."""
    async with aiohttp.ClientSession() as session, session.ws_connect(socket, max_msg_size=0) as channel:
        await channel.send_json({"id": 1, "method": "Runtime.evaluate", "params": {"expression": script, "returnByValue": True}})
        while (said := await channel.receive_json()).get("id") != 1:
            pass
        return said["result"]["result"]["value"]


def _shown(progress: dict[str, Any]) -> dict[str, Any]:
    names = sorted(peer.get("name", "") for peer in progress["peers"] if peer.get("phase") != "leaving")
    return {"round": progress["round"], "samples": progress["samples"], "peers": names}


@dataclass
class Kill:
    number: int
    kind: str
    victim: str
    at: float
    """Seconds since the start."""
    seconds: float | None = None
    """Until what was killed was there again and had taken part in a round; None: it never was."""
    page: dict[str, Any] | None = None
    progress: dict[str, Any] | None = None
    ledger: dict[str, Any] | None = None
    processes: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Soak:
    """One run: `story` makes the kills, `verdict` checks what is left."""

    def __init__(self, folder: Path, model: Path | None, *, peers: int, seed: int, every: float, browser: bool, say: Callable[[str], None]):
        self._folder, self._every, self._say, self._rng = folder, every, say, random.Random(seed)
        model = model or write_model(folder / "model")
        flags = ["--model", str(model), "--run_name", "soak", "--learning_rate", "1e-4", "--optimizer", "adamw"]
        self._server = Server(folder, target=ROUND_SAMPLES, sync="parameters", flags=flags)
        self.page = Page(self._server.url, folder, browser=browser)
        self._server_down_until, self._num_peers = 0.0, peers
        self._peers: list[Peer] = []
        self._began = time.monotonic()
        self.kills: list[Kill] = []
        self.faults: list[str] = []
        self.seconds = 0.0

    # ---------------------------------------------------------------- the story

    def story(self, seconds: float, most_kills: int) -> None:
        """Raises UserError, with the reason, when a peer gives up: nobody but itself would start it again."""
        self._server.wait()
        self.page.open()
        for number in range(1, self._num_peers + 1):
            name = f"peer-{number}"
            flags = ["--datasetserver", self._server.url, "--output_dir", str(self._folder / name), "--peer_name", name]
            flags += ["--train_batch_size", str(BATCH), "--num_threads", "1", "--stall_seconds", str(STALL_SECONDS)]
            flags += ["--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--checkpointing_steps", "5"]
            self._peers.append(Peer(name, self._folder / name, [sys.executable, "-m", "peer.supervise", *flags]))
        self._until("first rounds of all", lambda: all(peer.rounds() for peer in self._peers), START_SECONDS)
        began = time.monotonic()
        next_kill = began + min(self._every, 5)
        while time.monotonic() - began < seconds and len(self.kills) < most_kills:
            self._until("time", lambda at=next_kill: time.monotonic() >= at, self._every + 1)
            next_kill = time.monotonic() + self._every
            self._one()
        self.seconds = round(time.monotonic() - began, 1)
        self.page.close()
        self.faults += leave(self._peers, self._server)

    def _one(self) -> None:
        number = len(self.kills)
        kind = KINDS[number] if number < len(KINDS) else self._rng.choice(KINDS)
        victim = None if kind == "server" else self._rng.choice(self._peers)
        kill = Kill(number + 1, kind, victim.name if victim else "server", round(time.monotonic() - self._began, 1))
        self.kills.append(kill)
        now, began = time.time(), time.monotonic()
        if victim is None:
            back = self._kill_server()
        else:
            back = self._kill_part(kill, victim, now)
        if self._until(f"return of {kill.victim} after kill {kill.number} ({kind})", back, RECOVER_SECONDS):
            kill.seconds = round(time.monotonic() - began, 1)
            self._compare(kill)
        self.faults += [f"kill {kill.number} ({kind} of {kill.victim}): {fault}" for fault in kill.faults]
        self._say(
            f"{kill.at:7.1f} s  {kill.number:3} {kind:14} {kill.victim:8} back after {kill.seconds} s; "
            f"page {kill.page} ledger {kill.ledger} {'agree' if not kill.faults else '; '.join(kill.faults)}"
        )

    def _kill_server(self) -> Callable[[], bool]:
        before = self._ledger_head()["round"]
        self._server.kill()
        self._server_down_until = time.monotonic() + 1.0
        return lambda: (self._server.ask("/v1/progress") or {}).get("round", 0) > before

    def _kill_part(self, kill: Kill, peer: Peer, now: float) -> Callable[[], bool]:
        part = kill.kind.split()[0]
        pids = {process.pid for process in peer.family(PARTS[part])}
        if not pids:
            kill.faults.append(f"had no {part} to kill")
        for process in peer.family(PARTS[part])[:1]:
            process.send_signal(signal.SIGSTOP if kill.kind.endswith("hangs") else signal.SIGKILL)

        def back() -> bool:
            others = {process.pid for process in peer.family(PARTS[part])} - pids
            return bool(others) and not any(map(psutil.pid_exists, pids)) and bool(peer.commits_since(now + 0.5))

        return back

    def _tend(self) -> None:
        """What systemd does for the server; for peers nobody does anything."""
        if self._server.program.ended() is not None and not self._server_down_until:
            self._server_down_until = time.monotonic() + 1.0
        if self._server_down_until and time.monotonic() >= self._server_down_until:
            self._server_down_until = 0.0
            self._server.start()
        for peer in self._peers:
            if peer.program.ended() is not None:
                words = peer.program.last_words(5)
                raise UserError(
                    f"{peer.name} gave up with status {peer.program.ended()}:\n{words}",
                    fix=f"See {peer.program.log}.",
                    code=ExitCode.FAILED,
                )

    def _until(self, what: str, true: Callable[[], bool], seconds: float) -> bool:
        """Wait; what does not come in time is a fault, and the story goes on."""
        came = until(true, self._tend, seconds)
        if not came:
            self.faults.append(f"no {what} within {seconds:.0f} s")
        return came

    # ---------------------------------------------------------------- what must agree

    def _compare(self, kill: Kill) -> None:
        """News takes some seconds to reach everybody: what does not agree then never will."""
        deadline = time.monotonic() + AGREE_SECONDS
        while faults := self._differences(kill):
            self._tend()
            if time.monotonic() > deadline:
                kill.faults += faults
                return
            time.sleep(0.3)

    def _differences(self, kill: Kill) -> list[str]:
        chain = self._chain()
        before = self._server.ask("/v1/progress")
        page = self.page.read()
        after, head = self._server.ask("/v1/progress"), self._ledger_head()
        if not (before and after and page):
            return [f"the {'page' if before and after else 'server'} shows nothing"]
        chain = {**chain, **self._chain()}
        kill.page, kill.progress, kill.ledger, kill.processes = page, _shown(after), head, self._processes()
        expected = {"server": 1, "server's DHT node": 1, "server's p2pd": 1}
        expected |= {f"{peer.name}'s {part}": 1 for peer in self._peers for part in PARTS}
        at_most = {f"{peer.name}'s torch_shm_manager": 1 for peer in self._peers}  # PyTorch's own, there once something was shared
        expected |= {name: min(kill.processes.get(name, 0), most) for name, most in at_most.items()}
        faults = []
        for name, seen, first, last in (
            ("the page", page, before["round"], after["round"]),
            ("/v1/progress", _shown(after), 0, head["round"]),
        ):
            if not first <= seen["round"] <= last:
                faults.append(f"{name} says round {seen['round']}, not {first} to {last}")
            elif chain.get(seen["round"]) != seen["samples"]:
                faults.append(f"{name} says {seen['samples']} samples in round {seen['round']}, the ledger {chain.get(seen['round'])}")
            if seen["peers"] != sorted(peer.name for peer in self._peers):
                faults.append(f"{name} shows the peers {seen['peers']}")
        if both := sorted(expected.keys() | kill.processes.keys()):
            faults += [
                f"processes: {kill.processes.get(name, 0)} of {name}"
                for name in both
                if kill.processes.get(name, 0) != expected.get(name, 0)
            ]
        return faults

    def _processes(self) -> dict[str, int]:
        """All living descendants, by what they are."""
        counted: dict[str, int] = {}
        trunks = {self._server.program.pid: ("server", SERVER_PARTS)} | {peer.program.pid: (peer.name, PARTS) for peer in self._peers}
        for process in processes.descendants():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline()) + " "
                if "chrom" in line.split()[0]:
                    continue
                owner, parts = trunks.get(process.pid) or next(
                    (trunks[parent.pid] for parent in process.parents() if parent.pid in trunks), ("", {})
                )
                part = next((part for part, mark in parts.items() if mark in line), process.name())
                name = "server" if (owner, part) == ("server", "server") else f"{owner or 'nobody'}'s {part}"
                counted[name] = counted.get(name, 0) + 1
        return counted

    def _chain(self) -> dict[int, int]:
        return {state["round"]: state["samples"] for state in checks.read_ledger(self._server.ledger)[0]}

    def _ledger_head(self) -> dict[str, int]:
        chain = checks.read_ledger(self._server.ledger)[0]
        return {"round": chain[-1]["round"], "samples": chain[-1]["samples"]} if chain else {"round": 0, "samples": 0}

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        self.page.close()
        left = end(self._peers, self._server)
        for fault in left:  # at once: a story that broke off has no verdict
            self._say(f"FAULT (end): {fault}")
        self.faults += left

    def verdict(self) -> dict[str, Any]:
        rounds = [line for peer in self._peers for line in peer.rounds()]
        head = self._ledger_head()
        faults = {
            "story": self.faults,
            **checks.faults_of(rounds, self._server.ledger),
        }
        return {
            "holds": bool(self.kills) and not any(faults.values()),
            "faults": faults,
            "seconds": self.seconds,
            "page_read_by": "chromium" if self.page.browser else "its stream of events",
            "rounds": head["round"],
            "samples": head["samples"],
            "records": [asdict(kill) for kill in self.kills],
        }


_MODEL = """
import sys
from pathlib import Path
from PIL import Image
from scripts.demo.tiny_model import build
pictures = [Image.new("RGB", (16, 16), (number, 255 - number, 128)) for number in range(0, 256, 16)]
build(Path(sys.argv[1]), pictures, ["picture 0 1 2 3 4 5 6 7 8 9"], vae_steps=5)
"""


def write_model(folder: Path) -> Path:
    """A real Stable Diffusion of some megabytes, for pictures of 16x16 pixels; made elsewhere, since who starts others has no threads."""
    done = subprocess.run([sys.executable, "-c", _MODEL, str(folder)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"The model could not be made: {done.stderr[-1000:]}", fix="See there.", code=ExitCode.FAILED)
    return folder


def summary(kills: Sequence[Kill]) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        mine = [kill for kill in kills if kill.kind == kind]
        seconds = sorted(kill.seconds for kill in mine if kill.seconds is not None)
        median, worst = (seconds[len(seconds) // 2], seconds[-1]) if seconds else ("-", "-")
        rows.append({"killed": kind, "times": len(mine), "back": len(seconds), "median s": median, "worst": worst})
    return rows


def main(argv: Sequence[str]) -> int:
    parser = argument_parser(__doc__, "soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills, or until what was killed is back [60]")
    parser.add_argument("--kills", type=int, default=10**9, help="end after N kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--no_browser", action="store_true", help="read the page's events instead of its text in chromium")
    parser.add_argument("--model", type=Path, help="train this tiny Stable Diffusion for pictures of 16x16 pixels [one made for it]")
    add_record_arguments(parser)
    args = parser.parse_args(argv)
    adopt_orphans()
    heed_sigterm()
    with work_folder(args.keep) as folder:
        say = partial(print, flush=True)
        options = {"peers": args.peers, "seed": args.seed, "every": args.every}
        soak = Soak(folder, args.model, **options, browser=not args.no_browser, say=say)
        say(f"{args.peers} peers under dd-peer, a kill every {args.every:.0f} s for {args.minutes:g} min; seed {args.seed}")
        try:
            soak.story(60 * args.minutes, args.kills)
        finally:
            soak.close()
        verdict = {**options, **soak.verdict(), "about": about()}
    print_table(summary(soak.kills))
    return conclude(verdict, f"{len(soak.kills)} kills, {verdict['rounds']} rounds, {verdict['samples']} samples", args.record)
