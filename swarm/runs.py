"""Which runs the DHT's records describe, and whose word counts for what.

Whoever reaches the DHT can sign a run record. A run's id is the hash of its configuration, so a record whose configuration gives another
id is nothing. What a record says beyond the configuration (where the server is, how far the run has come) counts if it is signed by a
peer that this user has named, by its address; what others sign about that is hearsay.
"""

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.errors import ExitCode, UserError
from swarm.records import RunRecord
from swarm.run_config import RunConfig
from swarm.run_identity import PLACES

_MOST_URLS, _MOST_RUNS = 3, 16
_MOST_NAMED = 5


@dataclass(frozen=True)
class FoundRun:
    """vouched: the newest description by a peer that was named; None when none of them tells of this run. hearsay: what others say."""

    run: RunConfig
    vouched: RunRecord | None = None
    hearsay: tuple[RunRecord, ...] = ()

    @property
    def server_url(self) -> str:
        return self.vouched.server_url if self.vouched else ""

    @property
    def head(self) -> Mapping[str, Any] | None:
        """The newest state known: {digest, round, samples, peers}."""
        return self.vouched.head if self.vouched else None

    @property
    def extension(self) -> Mapping[str, Any] | None:
        return self.vouched.extension if self.vouched else None

    @property
    def rumoured_urls(self) -> tuple[str, ...]:
        """Servers that strangers name, the most frequent first: for those who know the host's key, and can ask for it there."""
        counts = collections.Counter(record.server_url for record in self.hearsay if record.server_url)
        return tuple(url for url, _ in counts.most_common(_MOST_URLS))

    def record(self) -> RunRecord:
        """What may be shown of it."""
        return self.vouched or RunRecord(run_id=self.run.run_id, run=self.run.to_mapping())


def named_in(maddrs: Iterable[str]) -> frozenset[str]:
    """The peer ids at the ends of addresses."""
    return frozenset(maddr.rpartition("/p2p/")[2] for maddr in maddrs)


def genuine(records: Mapping[str, RunRecord], named: Collection[str]) -> dict[str, FoundRun]:
    """The runs that `records` (by signer) describe, by id. named: the peers whose word counts.

    Raises UserError when there is none, and a peer that was named describes one that this version cannot read.
    """
    by_id: dict[str, list[tuple[str, RunRecord, RunConfig]]] = {}
    unreadable = None
    for signer, record in records.items():
        try:
            run = RunConfig.from_mapping(record.run, where="the peers' description of their run")
        except UserError as error:
            unreadable = error if signer in named else unreadable
        except (TypeError, ValueError, OverflowError):
            continue  # values of kinds that no program of ours writes
        else:
            if run.run_id == record.run_id:
                by_id.setdefault(run.run_id, []).append((signer, record, run))
    if unreadable and not by_id:
        raise unreadable
    return {run_id: _found(told, named) for run_id, told in by_id.items()}


def choose(found: Mapping[str, FoundRun], run_id: str) -> list[FoundRun]:
    """The runs that may be meant: that of `run_id` alone if it is given, else those that the peers named tell of, else those of most signers."""
    meant = [run for name, run in sorted(found.items()) if run_id in ("", name)]
    meant = [run for run in meant if run.vouched] or meant
    return sorted(meant, key=lambda run: -len(run.hearsay))[:_MOST_RUNS]


def several(runs: Sequence[FoundRun], live_peers: Mapping[str, int]) -> UserError:
    """live_peers: how many each run has, by its id."""
    ranked = sorted(runs, key=lambda found: (-live_peers[found.run.run_id], found.run.run_id))
    words = [f"{found.run.run_id} ('{found.run.run_name[:32]}', {live_peers[found.run.run_id]} live)" for found in ranked[:_MOST_NAMED]]
    more = f" and {len(ranked) - _MOST_NAMED} more" if len(ranked) > _MOST_NAMED else ""
    return UserError(
        f"These peers serve {len(runs)} runs: {', '.join(words)}{more}.",
        fix="Say which with --run_id, or name a peer of that run by its address.",
        code=ExitCode.CONFIG,
    )


def _found(told: Sequence[tuple[str, RunRecord, RunConfig]], named: Collection[str]) -> FoundRun:
    vouched = [(record, run) for signer, record, run in told if signer in named]
    hearsay = tuple(record for signer, record, _ in told if signer not in named)
    if vouched:
        record, run = max(vouched, key=lambda pair: (pair[0].head or {"samples": 0})["samples"])
        return FoundRun(run, record, hearsay)
    # Where the base model lies is no part of the id. Its weights are checked by a digest, so a false place costs a download.
    def places(run: RunConfig) -> tuple[str, ...]:
        return tuple(getattr(run, name) for name in PLACES)

    ((most, _),) = collections.Counter(places(run) for _, _, run in told).most_common(1)
    return FoundRun(next(run for _, _, run in told if places(run) == most), None, hearsay)
