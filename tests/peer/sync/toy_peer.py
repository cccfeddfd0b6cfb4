"""A process that trains a toy with a real `SwarmSync`: `python -m tests.peer.sync.toy_peer OUT STRATEGY [PEER ...] [--key=value ...]`.

Each line it prints is one JSON object: what happened. Ends with the run, or when told to stop by SIGTERM (it leaves in order).
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from peer.config import PeerConfig
from peer.contracts import SyncContext
from peer.sync.engine.trainer import sidecar_process
from peer.sync.engine.vectors import flatten
from swarm.errors import run_program
from swarm.logs import setup_logging
from swarm.run_config import RunConfig


def say(**values) -> None:
    sys.stdout.write(json.dumps(values) + "\n")  # in one piece: the sidecar writes to the same file
    sys.stdout.flush()


def build(out: Path, strategy: str, peers: list[str], options: dict[str, str]):
    torch.manual_seed(0)
    params = {"w": nn.Parameter(torch.randn(int(options.get("rows", 100)), 100)), "b": nn.Parameter(torch.zeros(7))}
    target = int(options.get("target", 64))
    run = RunConfig(
        model="x", sync=strategy, target_batch_size=target, total_samples=int(options.get("total", 0)), wire=options.get("wire", "fp32")
    )
    host, company = options.get("host", "/ip4/127.0.0.1/tcp/0"), int(options.get("min_peers", 1))
    config = PeerConfig(
        output_dir=str(out),
        host_maddrs=(host,),
        overlap="overlap" in options,
        min_peers=company,
        state_on=options.get("state_on", "memory"),
    )
    context = SyncContext(run=run, peer=config, params=params, output_dir=out, initial_peers=tuple(peers))
    return params, importlib.import_module(f"peer.sync.{strategy}").build(context)


def main() -> int:
    torch.set_num_threads(1)
    options = dict(argument[2:].split("=") for argument in sys.argv[1:] if argument.startswith("--"))
    out, strategy, *peers = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    setup_logging(name=Path(out).name)
    if "silent" in options:
        sidecar_process._SILENT_SECONDS = float(options["silent"])
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    params, sync = build(Path(out), strategy, peers, options)
    say(event="started", sidecar=sync._sidecar.pid if hasattr(sync, "_sidecar") else 0)
    counts = {"trained": 0, "final": 0, "dropped": 0}
    open_samples, contributions, trained, overlapped, most_waiting = 0, {}, 0, 0, 0
    work = getattr(sync, "_work", None)

    def follow(report):
        nonlocal open_samples
        if report.frozen is not None:
            contributions[report.frozen], open_samples = open_samples, 0
        for number in report.final:
            counts["final"] += contributions.pop(number)
        for number in report.dropped:
            counts["dropped"] += contributions.pop(number) if number else open_samples
            open_samples = open_samples if number else 0
        for s in report.final_rounds:
            say(event="committed_round", round=s.round, digest=s.digest, samples=sum(m.samples for m in s.members), total=s.samples)
        return report

    generator = torch.Generator().manual_seed(os.getpid())
    report = follow(sync.catch_up())
    while not report.done and not stopping:
        while (report.wait or report.frozen is not None) and not stopping:
            report = follow(sync.step(0))
        if report.done or stopping:
            break
        overlapped += work is not None and work.frozen is not None
        time.sleep(float(options.get("seconds", 0.1)))
        for parameter in params.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 8
        if sync.before_step():
            for parameter in params.values():
                parameter.data.add_(parameter.grad, alpha=1e-4)
                parameter.grad = None
        trained += 8
        open_samples += 8
        report = follow(sync.step(8, 1.0))
        most_waiting = max(most_waiting, work.waiting_samples if work else 0)
    done = report.done
    report = follow(sync.leave(hurry=bool(stopping)))
    while report.wait:
        report = follow(sync.leave(hurry=bool(stopping)))
    sync.close()
    counts |= {"trained": trained, "waiting": open_samples + sum(contributions.values())}
    counts |= {"overlapped": overlapped, "most_waiting": most_waiting}
    if work is not None:
        own = flatten(params, torch.empty(sum(p.numel() for p in params.values())))
        counts["off_the_state"] = float((own - work.state.vector(own.numel())).abs().max())
    finite = all(bool(torch.isfinite(p).all()) for p in params.values())
    checksum = float(sum(p.detach().double().sum() for p in params.values()))
    say(event="ended", round=sync.round, samples=sync.samples, done=done, finite=finite, checksum=checksum, **counts)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
