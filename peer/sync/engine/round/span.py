"""Where a run ends, and how large its rounds are."""

from peer.sync.engine.state import Header
from swarm import end as ends
from swarm.end import End
from swarm.run_config import RunConfig


def is_over(end: End, header: Header) -> bool:
    """Whether the run's samples are all in the state; the run ends when that state is final."""
    return 0 < end.total <= header.samples


def began_after_the_end(end: End, header: Header) -> bool:
    """Whether the state's last round was made when the run was over already."""
    before = header.samples - sum(member.samples for member in header.members)
    return 0 < end.total <= before


_EARLY_ROUNDS = 4
"""A round in five may begin before half of its samples are there, whoever is in a hurry, and however many those are."""


def began_early(run: RunConfig, end: End, header: Header) -> bool:
    """Whether one of the last four rounds was averaged with less than half of the samples that make it due."""
    made = [(header.samples, header.members), *((each.samples, each.members) for each in header.ancestors)] if header.round else []
    for samples, members in made[:_EARLY_ROUNDS]:
        brought = sum(member.samples for member in members)
        if 2 * brought < ends.round_samples(end.total, samples - brought, run.target_batch_size):
            return True
    return False


def round_samples(run: RunConfig, end: End, header: Header) -> int:
    """How many samples must wait before the round that follows this state begins."""
    return ends.round_samples(end.total, header.samples, run.target_batch_size)
