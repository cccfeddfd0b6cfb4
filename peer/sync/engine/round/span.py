"""Where a run ends, and how large its rounds are."""

from peer.sync.engine.state import Head, Header
from swarm import end as ends
from swarm.end import End
from swarm.run_config import RunConfig


def is_over(end: End, state: Header | Head) -> bool:
    """Whether the run's samples are all in the state; the run ends when that state is final."""
    return 0 < end.total <= state.samples


def began_after_the_end(end: End, header: Header) -> bool:
    """Whether the state's last round was made when the run was over already."""
    before = header.samples - sum(member.samples for member in header.members)
    return 0 < end.total <= before


def round_samples(run: RunConfig, end: End, header: Header) -> int:
    """How many samples must wait before the round that follows this state begins."""
    return ends.round_samples(end.total, header.samples, run.target_batch_size)
