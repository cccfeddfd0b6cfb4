"""What averaging costs on a link, and how large a round must be to be worth it: arithmetic only.

`python -m swarm.advice` prints the table of docs/host.md.
"""

import math
from dataclasses import dataclass

UTILISATION = 0.95
"""The share of the time that a peer should train; what is recommended reaches it."""
WIRE_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.03, "int4": 0.53}
"""Bytes per parameter of each codec, block scales included."""
LINKS_MBIT = (10, 100, 1000)
_PARAMETERS = {
    "SD 1.5, full (UNet and text encoder)": 983_000_000,
    "SD 1.5, LoRA of rank 16 (UNet attention)": 3_190_000,
    "SD 1.5, textual inversion of one token": 768,
}
_IMAGES_PER_SECOND = 4.0
"""Of one peer at 512 x 512: a consumer card; the original reached 5.7 on an A100. Half the rate halves the round that is needed."""
_PEERS = 4
_MESSAGES_SECONDS = 1.0
"""Finding each other and closing a group takes about ten round trips, whatever is averaged; far apart they are 100 ms each."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one peer sends and receives in one round."""

    up: float
    down: float

    def seconds(self, up_rate: float, down_rate: float) -> float:
        """Duration on a full-duplex link; rates in bytes per second. Infinite where a rate is 0."""
        if not up_rate or not down_rate:
            return math.inf
        return max(self.up / up_rate, self.down / down_rate)


def round_traffic(wire_bytes: float, peers: int, reducers: int, reduces: bool = True) -> Traffic:
    """What the exact all-reduce moves at one peer: `wire_bytes` is its whole encoded vector, `reduces` whether it is one of the reducers.

    A peer sends every other reducer its slice and takes the average back; a reducer also takes a slice from all others and sends them its average.
    """
    if peers < 2 or reducers < 1:
        return Traffic(0, 0)
    share = wire_bytes / reducers
    foreign = share * (reducers - reduces)
    served = share * (peers - 1) if reduces else 0
    return Traffic(foreign + served, foreign + served)


def share_lost(transfer_seconds: float, round_seconds: float, overlap: bool) -> float:
    """The share of a peer's time in which it waits for the link; round_seconds: in which the swarm trains a round."""
    waits = max(transfer_seconds - round_seconds, 0) if overlap else transfer_seconds
    return waits / (round_seconds + waits) if waits else 0.0


def smallest_target(transfer_seconds: float, samples_per_second: float, overlap: bool) -> int:
    """Samples of a round, so that UTILISATION is reached at the swarm's rate."""
    round_seconds = transfer_seconds * (UTILISATION if overlap else UTILISATION / (1 - UTILISATION))
    return max(math.ceil(round_seconds * samples_per_second), 1)


def promise(wire_bytes: float) -> str:
    """What a round will cost, said before anything is measured: the most that a peer sends and receives, on the links people have."""
    most = round_traffic(wire_bytes, 1000, 1000)
    links = ", ".join(f"{duration(most.seconds(mbit * 1e6 / 8, mbit * 1e6 / 8))} at {mbit:,} Mbit/s" for mbit in LINKS_MBIT)
    return f"averaging sends and receives up to {size(most.up)} each a round: {links}"


def measured(traffic: Traffic, seconds: float, samples_per_second: float, lost: float) -> str:
    """What the last averaged round cost this peer, and how large rounds should be. samples_per_second: the swarm's; lost: see share_lost."""
    up, down = (8e-6 * num_bytes / max(seconds, 1e-6) for num_bytes in (traffic.up, traffic.down))
    text = (
        f"averaging took {duration(seconds)}: sent {size(traffic.up)} at {up:,.0f} Mbit/s, received {size(traffic.down)} at {down:,.0f}; "
        f"{lost:.1%} of the time is lost to rounds"
    )
    if not samples_per_second:
        return text
    blocking, overlapping = (smallest_target(seconds, samples_per_second, overlap) for overlap in (False, True))
    return f"{text}; for {UTILISATION:.0%} training, rounds of {blocking:,} samples or more ({overlapping:,} with --overlap)"


def table() -> str:
    """The table of docs/host.md, in Markdown."""
    head = ["what is trained", "`--wire`", "a round sends", *(f"at {mbit:,} Mbit/s" for mbit in LINKS_MBIT)]
    lines = [head, ["---"] * len(head)]
    for name, parameters in _PARAMETERS.items():
        for wire in ("fp16", "int8", "int4") if parameters > 1e6 else ("fp16",):
            traffic = round_traffic(parameters * WIRE_BYTES[wire], _PEERS, _PEERS)
            lines.append([name, f"`{wire}`", size(traffic.up), *(_cell(traffic, mbit * 1e6 / 8) for mbit in LINKS_MBIT)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(traffic: Traffic, rate: float) -> str:
    seconds, speed = traffic.seconds(rate, rate) + _MESSAGES_SECONDS, _PEERS * _IMAGES_PER_SECOND
    blocking, overlapping = (smallest_target(seconds, speed, overlap) for overlap in (False, True))
    return f"{duration(seconds)}; {_round(blocking):,} ({_round(overlapping):,})"


def _round(count: int) -> int:
    """To two significant digits, upwards."""
    step = 10 ** max(len(str(count)) - 2, 0)
    return math.ceil(count / step) * step


def size(num_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    if seconds >= 90:
        return f"{seconds / 60:.0f} min"
    if seconds >= 0.1:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
    return "less than 0.1 s"


if __name__ == "__main__":
    print(table())
