"""What follows from what is known of a run: how long it will take, what its speed amounts to, how much of its time it trains.

One place for the page, dd-monitor, dd-status and /metrics, so that they cannot disagree. All of it is worked out from the fields of
`protocol.Progress`; what its teller cannot know may be None or missing there, and is None here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from swarm.end import round_samples
from swarm.records import ASSIST, LEAVING

A100_SAMPLES_PER_SECOND = 8 / 1.40
"""One A100-80GB trains SD 1.x whole, with 8-bit Adam, VAE and CLIP in the loop, at 512 pixels: 8 pictures in 1.40 s (the original project's README)."""
_A100_RESOLUTION = 512
_NOT_TRAINING = (ASSIST, LEAVING)
_SLOWEST = 1e-6
"""Samples a second, below which nobody can say when a run ends: JSON has no infinity."""


@dataclass(frozen=True)
class Figures:
    share: float | None
    """Of the run's samples, what is in its state; None for a run without end."""
    round_target: int
    """Samples that must wait before the next round begins."""
    round_share: float
    """Of these, what is trained and waits."""
    epoch_share: float | None
    eta_seconds: float | None
    """None while nobody trains, and for a run without end."""
    a100s: float
    """How many A100s would train as many pixels a second: a measure of speed, not of what this run's model and method ask for."""
    utilisation: float | None
    """Of the training peers' time, what they do not lose to rounds."""
    trainers: int
    assistants: int
    sent_bytes: int
    """By all peers, each in the last round it averaged."""
    received_bytes: int
    transfer_seconds: float
    """Of that round, at the slowest peer."""
    validation_loss: float | None
    """Of held-out pictures: the median of what the live peers measured in the latest state that any of them did."""
    validation_round: int | None
    """After which that state came."""
    findings: list[dict[str, Any]]
    """What auditors measured of members: the fields of `records.Finding`, and `by`, the auditor's id; those first that are reported."""


def figures(seen: Mapping[str, Any]) -> Figures:
    """seen: a `protocol.Progress` as `model_dump()` has it, or what `status.summarize` makes of the DHT's records."""
    peers, total, speed = seen["peers"], seen["total_samples"], seen["samples_per_second"]
    training = [peer for peer in peers if peer["phase"] not in _NOT_TRAINING]
    utilisation = 1 - sum(peer["share_lost"] for peer in training) / len(training) if training else None
    left = total - seen["samples"]
    validation_round, validation_loss = _validation(peers, seen["round"])
    target = max(round_samples(total, seen["samples"], seen["target_batch_size"]), 0)
    effective = speed * (utilisation or 0.0)
    return Figures(
        share=min(seen["samples"] / total, 1.0) if total else None,
        round_target=target,
        round_share=min(seen["waiting_samples"] / target, 1.0) if target else 1.0,
        epoch_share=seen["epoch_samples"] / seen["dataset_samples"] if seen.get("dataset_samples") else None,
        eta_seconds=max(left - seen["waiting_samples"], 0) / effective if total and effective > _SLOWEST and not seen["finished"] else None,
        a100s=speed * ((seen.get("resolution") or _A100_RESOLUTION) / _A100_RESOLUTION) ** 2 / A100_SAMPLES_PER_SECOND,
        utilisation=utilisation,
        trainers=len(training),
        assistants=sum(peer["phase"] == ASSIST for peer in peers),
        sent_bytes=sum(peer["sent_bytes"] for peer in peers),
        received_bytes=sum(peer["received_bytes"] for peer in peers),
        transfer_seconds=max((peer["transfer_seconds"] for peer in peers), default=0.0),
        validation_loss=validation_loss,
        validation_round=validation_round,
        findings=_findings(peers),
    )


_MOST_FINDINGS = 100


def _findings(peers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whose work makes the model worse by the most first; of several auditors each has its say."""
    found = [{**finding, "by": peer["peer_id"]} for peer in peers for finding in peer.get("findings", ())]
    return sorted(found, key=lambda finding: (not finding["reported"], -finding["change"]))[:_MOST_FINDINGS]


_ROUNDS_TOLD = 20
"""A peer measures for 1 % of its time, so seldom two in the same round; of the last alone one liar would say all."""


def _validation(peers: Iterable[Mapping[str, Any]], latest: int) -> tuple[int | None, float | None]:
    """(round, loss): of the last round that was measured, and the median of each peer's newest within the ROUNDS_TOLD before it.

    latest: the run's round, beyond which nobody can have measured.
    """
    told = [(peer["validation_round"], peer["validation_loss"]) for peer in peers if peer.get("validation_loss") is not None]
    last = max((round for round, _ in told if round <= latest), default=None)
    return last, median(loss for round, loss in told if last - _ROUNDS_TOLD <= round <= last) if last is not None else None


def mean_loss(told: Iterable[tuple[float | None, float]]) -> float | None:
    """The swarm's loss, by what each peer says of its own: (loss, samples a second). Who trains faster counts for more."""
    losses = [(loss, max(speed, 1e-9)) for loss, speed in told if loss is not None]
    return sum(loss * speed for loss, speed in losses) / sum(speed for _, speed in losses) if losses else None
