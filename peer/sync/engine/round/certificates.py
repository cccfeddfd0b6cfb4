"""The certificates of our own states: gathered after the commit from the seals that members' records bring, kept on disk, and handed out.

Nobody waits for a seal. One that is not seen while its peer stands on that state is missing; the next state has another chance.
"""

import json
import logging
from collections.abc import Collection
from pathlib import Path

from peer.contracts import CommittedRound
from peer.sync.engine.certificate import Certificate, Seals, Shown, Signer, certified, is_on, line_of, strongest
from peer.sync.engine.net.messages import CERTIFICATE, BadMessage, read
from peer.sync.engine.state import State
from swarm import files
from swarm.records import PeerRecord

log = logging.getLogger(__name__)


class Certificates:
    """path: of the strongest one; a file that cannot be read, or is of another line, is begun anew. forsaken: whether it certifies what was discarded,
    so that those who sealed it know nothing better than others."""

    def __init__(self, seals: Seals, path: Path, state: State, *, forsaken: bool = False):
        self._seals, self._path = seals, path
        self._made: dict[str, CommittedRound] = {}
        """The rounds that made our state and its last ancestors."""
        self._signers: dict[str, dict[str, Signer]] = {}
        """Of each of these states, those who have sealed it."""
        self._records: Collection[PeerRecord] = ()
        self._seal = self._line = ""
        self._best: Certificate | None = None
        self._kept: Certificate | None = None
        """What is on disk."""
        self._others: Certificate | None = None
        """The strongest that somebody else has sealed, too: a round that we make alone is evidence of nobody's company."""
        if seals.needed:
            self._best = self._kept = self._others = self._read()
            self.moved(state)
            if not (state.header.round or forsaken):  # our states are gone from the disk: those whom we had company of may be back soon
                self._others = self._kept

    @property
    def seal(self) -> str:
        """Ours, of the state that we stand on; '' where our work is not in it."""
        return self._seal

    @property
    def shown(self) -> Shown:
        """What we show to who asks."""
        return Shown(self._best, self._line)

    @property
    def others(self) -> Collection[str]:
        """Who has sealed, besides us, the last state of ours that anybody else has sealed."""
        return self._others.peers - {self._seals.peer_id} if self._others is not None else ()

    def moved(self, state: State) -> None:
        """We stand on `state` from now on."""
        if not self._seals.needed:
            return
        header = state.header
        rounds = [header.committed_round(state.digest), *header.ancestors] if header.round else []
        self._made = {made.digest: made for made in rounds}
        self._signers = {digest: self._signers.get(digest, {}) for digest in self._made}
        self._line = line_of(state)
        self._best, self._others = (each if each and is_on(self._line, each.made.digest) else None for each in (self._best, self._others))
        own = self._seals.own(rounds[0]) if rounds else None
        self._seal = own.seal if own is not None else ""
        if own is not None:
            self._take(rounds[0], own)
        self.see(self._records)  # who committed before us has said so already

    def see(self, records: Collection[PeerRecord]) -> None:
        """Take the seals that these bring: each once, of members of the round only."""
        self._records = records
        for record in records:
            made = self._made.get(record.digest)
            if made is None or record.peer_id in self._signers[made.digest] or record.peer_id not in {member.peer for member in made.members}:
                continue
            signer = self._seals.of(record, made)
            if signer is not None:
                self._take(made, signer)

    def _take(self, made: CommittedRound, signer: Signer) -> None:
        signers = self._signers[made.digest]
        signers[signer.peer] = signer
        certificate = certified(made, signers)
        if certificate is not None:
            self._best = strongest(filter(None, (certificate, self._best)))
            if certificate.peers - {self._seals.peer_id}:
                self._others = strongest(filter(None, (certificate, self._others)))

    def saved(self, state: State) -> None:
        """`state` is on disk. What certifies it, or one before it, is kept beside it: after a power cut a later one would be of no known line.

        A disk that cannot take it costs memory of it after a restart, no more.
        """
        if not self._seals.needed:
            return
        line = line_of(state)
        certificates = self._kept, *(certified(self._made[digest], signers) for digest, signers in self._signers.items())
        best = strongest(each for each in certificates if each is not None and is_on(line, each.made.digest))
        if best is None or best == self._kept:
            return
        try:
            files.replace(self._path, json.dumps(best.to_json()).encode())
            self._kept = best
        except OSError as error:
            log.warning("cannot keep the state's certificate in %s: %s", self._path, error)

    def _read(self) -> Certificate | None:
        try:
            kept = read(CERTIFICATE, json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, BadMessage) as error:
            log.warning("ignored %s: %s", self._path, error)
            return None
        return self._seals.checked(kept)
