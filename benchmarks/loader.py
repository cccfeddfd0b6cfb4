"""What data costs a peer: how long its training thread waits for batches, and how many samples it could take at most.

    .venv/bin/python benchmarks/loader.py [--pictures 256] [--seconds 60] [--workers 1]

A real dataset server on loopback, and a peer's real source and feed: lease, download, check, read through `datasets`, decode to 512 px
in worker processes. The training step is a sleep, as long as a GPU would take for its batch at --rate samples/s, so that it takes no CPU from
the workers. `waiting`: the share of the training thread's time between asking for a batch and having it, after the first batches. Then the same
without any training, against a bare loop that reads the same files from the disk and decodes them by the same function, in this process.
Pictures are synthetic JPEGs of 1024x768.
"""

import argparse
import random
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from PIL import Image

from benchmarks.common import argument_parser, heed_sigterm, print_result, print_table, start
from benchmarks.hosting import dataset_server
from peer.config import PeerConfig
from peer.contracts import SourceContext
from peer.data.client.runs import fetch_run
from peer.data.dataset_server import build
from peer.machine.device import Rank, RankGroup
from peer.samples.buckets import Buckets
from peer.samples.decoding import Decoder
from peer.samples.feed import Feed
from peer.samples.pictures import Frame, decode
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.run_config import RunConfig

BATCH, RESOLUTION, WARM_STEPS = 4, 512, 4


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--pictures", type=int, default=256, help="of the dataset, which is gone through again and again [256]")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement [60]")
    parser.add_argument("--rate", type=float, default=8.0, help="samples per second that the training takes [8]")
    parser.add_argument("--workers", type=int, default=1, help="decoding processes, each for one core [1]")
    return start(parser, measure)


def measure(options: argparse.Namespace) -> None:
    if options.pictures < BATCH or options.seconds <= 0 or options.rate <= 0 or options.workers < 1:
        raise UserError(f"It takes {BATCH} pictures, some seconds, a rate and a worker.", fix="See --help.")
    heed_sigterm()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="loader-") as name:
        folder = Path(name)
        write_dataset(folder / "data", options.pictures)
        with dataset_server(folder, "--resolution", str(RESOLUTION), "--shard_samples", "64") as server:
            step = BATCH / options.rate
            trained, waited, total = take(server.url, folder / "one", options.workers, options.seconds, step)
            print(f"waited {waited:.2f} of {total:.1f} s for {trained} samples", file=sys.stderr, flush=True)
            most, _, fast = take(server.url, folder / "two", options.workers, options.seconds, 0.0)
            print(f"{most} samples in {fast:.1f} s without training", file=sys.stderr, flush=True)
        bare, alone = bare_loop(folder / "data", options.seconds)
    print_table(
        [
            {"what": f"training at {options.rate:g} samples/s", "samples/s": trained / total, "waiting": f"{waited / total:.2%}"},
            {"what": "no training", "samples/s": most / fast},
            {"what": "bare loop", "samples/s": bare / alone},
        ]
    )
    ratio = (most / fast) / (bare / alone)
    print_result({"waiting_share": waited / total, "ratio_samples_per_second": ratio, "workers": options.workers, "rate": options.rate})


def write_dataset(folder: Path, count: int) -> None:
    """JPEGs about as large as photographs: coarse colours, enlarged, under some grain."""
    folder.mkdir()
    rng = random.Random(0)
    grain = Image.effect_noise((1024, 768), 30).convert("RGB")
    for number in range(count):
        coarse = Image.frombytes("RGB", (32, 24), rng.randbytes(32 * 24 * 3)).resize((1024, 768), Image.Resampling.BICUBIC)
        Image.blend(coarse, grain, 0.2).save(folder / f"{number}.jpg", quality=90)
        (folder / f"{number}.txt").write_text(f"picture {number}")


def take(url: str, cache: Path, workers: int, seconds: float, step_seconds: float) -> tuple[int, float, float]:
    """(samples, seconds that the training thread waited for them, seconds in all), the first batches not counted."""
    run = RunConfig.from_mapping(fetch_run(url, 60).run, where=url)
    identity = Identity(cache / "identity.key")
    identity.close()
    peer = PeerConfig(identity_path=str(identity.path), cache_dir=str(cache), cache_gib=4.0)
    source = build(SourceContext(run=run, url=url, peer=peer, peer_id=identity.peer_id, batch_samples=BATCH))
    group = RankGroup(Rank(0, 1, 0, 1), torch.device("cpu"))
    sizes = {"batch_samples": BATCH, "accumulation": 1, "buckets": Buckets.of(run, 64)}
    feed = Feed(source, Decoder(run, workers), group, stopping=lambda: False, **sizes)
    samples, waited = 0, 0.0
    try:
        steps = iter(feed)
        for _ in islice(steps, WARM_STEPS):
            time.sleep(step_seconds)
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            asked = time.perf_counter()
            work = next(steps)
            waited += time.perf_counter() - asked
            samples += len(work.keys)
            source.acknowledge(work.keys)
            time.sleep(step_seconds)
        return samples, waited, time.perf_counter() - begun
    finally:
        feed.close()
        source.close()


def bare_loop(folder: Path, seconds: float) -> tuple[int, float]:
    """(samples, seconds) of reading and decoding the files one after the other, in whole passes over them."""
    files, samples, begun = sorted(folder.glob("*.jpg")), 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for file in files:
            decode(file.read_bytes(), Frame(RESOLUTION, RESOLUTION, center_crop=False, seed=file.name))
            samples += 1
    return samples, time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
