"""The product's sidecar, unchanged, counting what it says to others: `python -m benchmarks.counted_sidecar FD`, in place of the real one.

Writes sidecar-PID.json into $COUNTS_DIR twice a second: reads and writes of the DHT as the sidecar makes them, the calls to other nodes that
these take, the bytes of records that came in, and messages and bytes on its own streams.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol

from peer.sync.engine.net.streams import Channel, Streams
from peer.sync.engine.trainer import sidecar

COUNTED = {
    "dht_reads": (DHTNode, "get"),
    "dht_writes": (DHTNode, "store"),
    "dht_find_calls": (DHTProtocol, "call_find"),
    "dht_store_calls": (DHTProtocol, "call_store"),
    "streams": (Streams, "open"),
    "messages": (Channel, "send"),
}


def count(counts: Counter, name: str, owner: type, method: str) -> None:
    original: Callable[..., Any] = getattr(owner, method)

    async def counted(*arguments: Any, **options: Any) -> Any:
        counts[name] += 1
        if name == "messages":
            counts["message_bytes"] += len(arguments[2]) if len(arguments) > 2 else 0
        return await original(*arguments, **options)

    setattr(owner, method, counted)


def count_record_bytes(counts: Counter) -> None:
    class Counted(DHTProtocol.serializer):
        @classmethod
        def loads(cls, data: bytes) -> Any:
            counts["dht_bytes"] += len(data)
            return super().loads(data)

    DHTProtocol.serializer = Counted


def main() -> int:
    counts: Counter[str] = Counter()
    count_record_bytes(counts)
    for name, (owner, method) in COUNTED.items():
        count(counts, name, owner, method)
    path = Path(os.environ["COUNTS_DIR"]) / f"sidecar-{os.getpid()}.json"

    def write() -> None:
        while True:
            path.with_suffix(".tmp").write_text(json.dumps(counts), encoding="utf-8")
            path.with_suffix(".tmp").replace(path)
            time.sleep(0.5)

    threading.Thread(target=write, daemon=True).start()
    return sidecar.main(int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
