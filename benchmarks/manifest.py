"""What a large dataset costs its server: memory, and seconds from the start until it serves.

    .venv/bin/python benchmarks/manifest.py [--samples 1000000]

The dataset is synthetic: a manifest of as many samples as asked for, 256 in a shard, with the size of each of them; its shards are files without
content. A real `python -m datasetserver --work_dir` serves it with a run and a ledger; a client fetches the manifest, checks it,
and leases shards. `start_seconds`: from the start of the process until its ready line. `rss_mb`, `peak_rss_mb`: the server process, after all that.
"""

import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.common import argument_parser, heed_sigterm, print_result, print_table  # noqa: E402
from benchmarks.hosting import serving, write_model  # noqa: E402
from datasetserver.prepared import manifest_path, shard_path  # noqa: E402
from swarm.digest import canonical_json, digest_bytes  # noqa: E402
from swarm.errors import UserError, run_program  # noqa: E402
from swarm.protocol import LeaseAnswer, LeaseRequest, Manifest, RunAnswer, Shard  # noqa: E402

SHARD_SAMPLES, LEASES = 256, 50
CALL_SECONDS = 60.0


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the dataset [1000000]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args()
    return run_program(lambda: measure(options.samples), debug=options.debug)


def measure(samples: int) -> None:
    if samples < 1:
        raise UserError(f"{samples} samples are none.", fix="See --help.")
    heed_sigterm()
    with tempfile.TemporaryDirectory(prefix="manifest-") as name:
        folder = Path(name)
        size = write_work_dir(folder / "work", samples)
        flags = ("--work_dir", folder / "work", "--model", write_model(folder / "model"), "--max_requests_per_second", "0")
        begun = time.perf_counter()
        with serving(*flags) as server:
            start = time.perf_counter() - begun
            served = memory(server.process.pid)["VmRSS"]
            use(server.url, samples)
            after = memory(server.process.pid)
    print_table(
        [{"samples": f"{samples:,}", "manifest MB": size / 1e6, "start s": start, "RSS MB": served, "after use MB": after["VmRSS"]}]
    )
    result = {
        "samples": samples,
        "manifest_mb": size / 1e6,
        "start_seconds": start,
        "rss_mb": after["VmRSS"],
        "peak_rss_mb": after["VmHWM"],
    }
    print_result(result)


def write_work_dir(work_dir: Path, samples: int) -> int:
    """As an ingest leaves it; returns the manifest's bytes."""
    (work_dir / "shards").mkdir(parents=True)
    rng, shards = random.Random(0), []
    for index in range(-(-samples // SHARD_SAMPLES)):
        count = min(SHARD_SAMPLES, samples - index * SHARD_SAMPLES)
        sizes = [rng.randrange(20_000, 400_000) for _ in range(count)]
        columns = {name: [rng.randrange(512, 2048) for _ in range(count)] for name in ("widths", "heights")}
        digest = digest_bytes(str(index).encode())
        shards.append(Shard(index=index, digest=digest, bytes=sum(sizes) + 2048 * count, samples=count, image_bytes=sizes, **columns))
        with shard_path(work_dir, digest).open("wb") as file:
            file.truncate(shards[-1].bytes)
    data = canonical_json(Manifest.of(shards).model_dump())
    manifest_path(work_dir).write_bytes(data)
    digest = digest_bytes(data)
    (work_dir / "ingest.json").write_bytes(canonical_json({"source": "synthetic", "manifest": digest, "first": digest}))
    return len(data)


def use(url: str, samples: int) -> None:
    """What peers do to a server: the run, the manifest, leases."""
    run = RunAnswer.model_validate_json(fetch(f"{url}/v1/run"))
    data = fetch(f"{url}/v1/manifest/{run.manifest}")
    if digest_bytes(data) != run.manifest or Manifest.model_validate_json(data).total != samples:
        raise UserError("The manifest is not the one that was written.", fix="This is a fault of the server.")
    for number in range(LEASES):
        asked = LeaseRequest(run_id=run.run_id, peer=f"peer{number}", want_samples=SHARD_SAMPLES)
        LeaseAnswer.model_validate_json(fetch(f"{url}/v1/leases", asked.model_dump_json().encode()))


def fetch(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"} if body else {})
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as response:
        return response.read()


def memory(pid: int) -> dict[str, float]:
    """VmRSS and VmHWM (the most it ever was) of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM")}


if __name__ == "__main__":
    sys.exit(main())
