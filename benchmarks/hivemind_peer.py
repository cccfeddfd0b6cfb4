"""A peer of `hivemind.Optimizer` whose compute is a sleep: what a user would take instead, on the same links as `sleeper.py`.

    python -m benchmarks.hivemind_peer --folder OUT --num_parameters N --samples_per_second R --batch B --target T --listen MADDR [--peer MADDR]

`use_local_updates`: every peer steps on its own and the parameters are averaged once per epoch, in the background, in fp16. Its waits are
set far below its defaults, in favour of it: rounds here are shorter than real ones. Writes OUT/work.jsonl:

    {"event": "epoch", "time": ..., "epoch": n, "trained": samples of this peer so far}
"""

import argparse
import itertools
import json
import signal
import time
from pathlib import Path

import torch
from hivemind import DHT, Optimizer
from hivemind.compression import Float16Compression

from benchmarks.sleeper import MOVE, MOVED, toy_params

MATCHMAKING_SECONDS = 2.0
"""Its default is 15 s; too short for a group to form at all below about 1 s."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("folder", Path),
        ("num_parameters", int),
        ("samples_per_second", float),
        ("batch", int),
        ("target", int),
        ("listen", str),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--peer", action="append")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    args.folder.mkdir(parents=True, exist_ok=True)
    dht = DHT(initial_peers=args.peer, host_maddrs=[args.listen], start=True)
    print(*(f"--peers {maddr}" for maddr in dht.get_visible_maddrs()), sep="\n", flush=True)
    params = list(toy_params(args.num_parameters).values())
    optimizer = Optimizer(
        dht=dht,
        run_id="wan",
        target_batch_size=args.target,
        batch_size_per_step=args.batch,
        optimizer=torch.optim.SGD(params, lr=1.0),
        use_local_updates=True,
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=120.0,
        next_chunk_timeout=30.0,
        state_averaging_compression=Float16Compression(),
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5, "max_refresh_period": 1.0},
        verbose=True,
    )
    train(optimizer, params, args, stopping)
    optimizer.shutdown()
    dht.shutdown()


def train(optimizer: Optimizer, params: list[torch.nn.Parameter], args: argparse.Namespace, stopping: list[int]) -> None:
    seconds, trained, epoch, turns = args.batch / args.samples_per_second, 0, optimizer.local_epoch, itertools.cycle(params)
    with (args.folder / "work.jsonl").open("a", encoding="utf-8", buffering=1) as log:
        while not stopping:
            until = time.monotonic() + seconds
            for parameter in (next(turns) for _ in range(MOVED)):
                parameter.grad = torch.full_like(parameter, MOVE)
            time.sleep(max(0.0, until - time.monotonic()))
            optimizer.step(batch_size=args.batch)
            for parameter in params:
                parameter.grad = None
            trained += args.batch
            if optimizer.local_epoch != epoch:
                epoch = optimizer.local_epoch
                log.write(json.dumps({"event": "epoch", "time": time.time(), "epoch": epoch, "trained": trained}) + "\n")


if __name__ == "__main__":
    main()
