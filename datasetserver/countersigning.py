"""The server countersigns the run's branch, in a run for members: one of the host's words, which peers hand on and a newcomer goes by.

The ledger says which state; its choice is on the disk before it is signed. A server that is away stops nobody: its last word counts for ten
minutes (`swarm/members.py`), and then certificates alone. Not promised: that the state is good; that two servers with one key and a ledger each agree.
"""

from typing import TYPE_CHECKING

from datasetserver.book import Book
from swarm.bans import sign_word

if TYPE_CHECKING:
    from datasetserver.service import Service

EVERY_SECONDS = 60.0
"""A word that is news goes through every peer's records once, and to its disk."""


async def countersign(service: "Service") -> None:
    """Say which state is on the run's one branch, if that was not said within EVERY_SECONDS; there is a run. Raises sqlite3.Error (disk)."""
    now = service.wall()
    if not service.run.members_of or now < service.countersign_at:
        return
    service.countersign_at = now + EVERY_SECONDS
    digest = await service.ledger.call(Book.countersign)
    if not digest:
        service.countersign_at = now
    else:  # also the same one again: peers go by a word of the last ten minutes only
        service.bans.hear([sign_word(service.key, service.run, digest, trusted=True, clock=service.wall)])
