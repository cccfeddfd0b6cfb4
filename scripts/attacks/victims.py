"""Programs of ours that meet a stranger once, `python -m scripts.attacks.victims WHAT ...`; each prints a line of JSON:

`lookup ADDRESS RUN_ID`: which run a newcomer with --run_id joins. `export ADDRESS`: which state dd-export fetches.
`read SHARD HARMLESS`: how many MiB more a peer takes to read the one shard than the other.
"""

import json
import resource
import sys
import tempfile
from pathlib import Path

from swarm.errors import UserError, run_program


def lookup(address: str, run_id: str) -> dict:
    from peer.config import PeerConfig
    from peer.launch.resolving import resolve_run

    with tempfile.TemporaryDirectory(prefix="lookup-") as folder:
        # dry_run: it looks and founds nothing; assist: it needs neither data nor a model.
        joined = resolve_run(PeerConfig(output_dir=folder, peers=(address,), run_id=run_id, dry_run=True, assist=True), {})
    return {"run_id": joined.run.run_id, "model_digest": joined.run.model_digest}


def export(address: str) -> dict:
    from peer.results.fetching import fetch_state

    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        path = fetch_state(address, Path(folder), seconds=90)
        with path.open("rb") as file:
            return {"digest": json.loads(file.readline())["digest"]}


def read(shard: str, harmless: str) -> dict:
    from peer.data.shards import read_shard

    read_shard(Path(harmless), 1)  # what its imports take is no attack
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_shard(Path(shard), 1)
        refused = ""
    except Exception as error:
        refused = repr(error)[:200]
    return {"grown_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, "refused": refused}


def main() -> None:
    what, *arguments = sys.argv[1:]
    try:
        said = {"lookup": lookup, "export": export, "read": read}[what](*arguments)
    except UserError as error:
        said = {"error": str(error)}
    print(json.dumps({"event": what, **said}), flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
