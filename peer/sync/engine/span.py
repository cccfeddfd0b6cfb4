"""Where a run ends, and how large its rounds are."""

from peer.sync.engine.state import Header
from swarm.run_config import RunConfig

_LAST_ROUND_STRETCH = 1.25
"""The run's last round may be so much larger than the target, so that no tiny one is left over."""


def is_over(run: RunConfig, header: Header) -> bool:
    """Whether the run's samples are all in the state; the run ends when that state is settled."""
    return 0 < run.total_samples <= header.samples


def began_after_the_end(run: RunConfig, header: Header) -> bool:
    """Whether the state's last round was made when the run was over already."""
    before = header.samples - sum(member.samples for member in header.members)
    return 0 < run.total_samples <= before


def round_samples(run: RunConfig, header: Header) -> int:
    """How many samples must wait before the round that follows this state begins."""
    left = run.total_samples - header.samples
    return left if run.total_samples and left <= _LAST_ROUND_STRETCH * run.target_batch_size else run.target_batch_size
