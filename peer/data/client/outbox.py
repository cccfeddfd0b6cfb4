"""What there is to report to the dataset server: kept in order until it has heard it, however long it is away."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from peer.data.client.transport import Refusal, Transport
from peer.data.unsaid import Unsaid
from swarm.errors import UserError
from swarm.protocol import ContributionAnswer, ProofsAnswer
from swarm.records import HostWord

log = logging.getLogger(__name__)
CONTRIBUTIONS, ROUNDS, PROOFS = "/v1/contributions", "/v1/rounds", "/v1/proofs"


@dataclass(eq=False)
class Letter:
    """Something to report, kept until the server has it. `answer`: its result is the receipt, '' without one, or it raises Refusal. on_disk: as well."""

    path: str
    body: dict[str, Any]
    answer: Future = field(default_factory=Future)
    on_disk: bool = False


class Outbox:
    """Letters in their order. unsaid: where contributions are kept that were offered before the server knew of them, and rounds final meanwhile.

    news: called after a letter was put in, in the thread that put it. hear: told of the host's words that come with an answer. result: waits for a
    future, up to a number of seconds.
    """

    def __init__(
        self,
        unsaid: Unsaid,
        news: Callable[[], None],
        hear: Callable[[Sequence[HostWord]], object] = lambda words: None,
        result: Callable[[Future, float], str] = Future.result,
    ):
        self._unsaid, self._news, self._hear, self._result, self._lock = unsaid, news, hear, result, threading.Lock()
        self._disk_failed = False
        self._letters: deque[Letter] = deque(Letter(_path_of(body), body, on_disk=True) for body in unsaid.letters())

    def __len__(self) -> int:
        return len(self._letters)

    def letters(self) -> list[Letter]:
        with self._lock:
            return list(self._letters)

    def put(self, path: str, body: dict[str, Any]) -> Letter:
        letter = Letter(path, body)
        with self._lock:
            self._letters.append(letter)
        self._news()
        return letter

    def keep_rounds(self) -> None:
        """On disk as well, those that wait: the server is away. Contributions are kept when they are offered.

        Where the disk does not take it, that is no reason to end: others tell of these rounds too.
        """
        for letter in self.letters():
            if letter.path == ROUNDS and not letter.on_disk:
                try:
                    self._unsaid.keep(letter.body)
                    letter.on_disk, self._disk_failed = True, False
                except UserError as error:
                    if not self._disk_failed:  # 35 tries a second while the server is away
                        log.warning("cannot keep the reports that wait, so a kill would lose them: %s", error.message)
                    self._disk_failed = True
                    return

    def answered(self, letter: Letter, seconds: float) -> str | None:
        """Wait up to `seconds` for the answer to a contribution: its receipt, '' where the server gives none. Raises Refusal.

        None when there is no answer: then it is offered to the swarm nevertheless, and the server will hear of it, as of one that was, even
        when this peer is killed before it is back. Raises UserError when the disk does not take it.
        """
        try:
            return self._result(letter.answer, seconds)
        except FutureTimeout:
            with self._lock:  # a body that is on its way is refused or taken as it is, and sent again as this one if it is refused
                meanwhile = letter.answer.done()
                if not meanwhile:
                    letter.body = {**letter.body, "offered": True}
            if meanwhile:
                return self._result(letter.answer, 0)
            self._unsaid.keep(letter.body)
            if letter.answer.done():  # meanwhile
                self._unsaid.said(letter.body)
            return None

    async def deliver(self, transport: Transport) -> None:
        """Bring the letters that are there to the server, one after the other. Raises UserError when it no longer takes our token."""
        while self._letters:
            letter = self._letters[0]
            body, refusal, receipt = letter.body, None, ""
            try:
                if letter.path == CONTRIBUTIONS:
                    receipt = (await transport.insist(letter.path, body, ContributionAnswer)).receipt or ""
                elif letter.path == PROOFS:
                    self._hear((await transport.insist(letter.path, body, ProofsAnswer)).bans)
                else:
                    await transport.insist(letter.path, body)
            except Refusal as error:
                refusal = error
            with self._lock:
                if refusal and body is not letter.body:  # offered meanwhile, which is another question
                    continue
                self._letters.popleft()
                if refusal:
                    letter.answer.set_exception(refusal)
                else:
                    letter.answer.set_result(receipt)
            if refusal:
                # Old news to a server that knows better is no fault; what is refused will be refused again.
                log.warning("the dataset server refused %s: %s", letter.path.rpartition("/")[2], refusal)
            if letter.path in (CONTRIBUTIONS, ROUNDS):
                self._unsaid.said(letter.body)


def _path_of(body: dict[str, Any]) -> str:
    return ROUNDS if "members" in body else CONTRIBUTIONS
