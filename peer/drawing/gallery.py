"""Hands what was drawn to the dataset server for its page, signed with this peer's key: in a thread of its own, so that nobody waits for it."""

import base64
import io
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

from peer.config import PeerConfig
from peer.launch.resolving import token_for
from swarm.errors import UserError
from swarm.peer_key import PeerKey
from swarm.protocol import PictureRequest
from swarm.records import words
from swarm.signed_request import Signer

log = logging.getLogger(__name__)
SIDE_PIXELS = 1024
"""The server makes what is larger smaller anyway."""
_MAX_PROMPT = 500
_CLOSE_SECONDS = 20.0


class Showing:
    """send: what the server answers to a picture's request, '' when it took it, else the code of its refusal; raises UserError without an answer.

    While the last round's pictures are on their way, those of another are left out.
    """

    def __init__(self, send: Callable[[dict[str, Any]], str], run_id: str, peer_id: str):
        self._send, self._run_id, self._peer_id = send, run_id, peer_id
        self._thread = ThreadPoolExecutor(1, "showing")
        self._last: Future | None = None
        self._asked = True
        """As far as we know. When not, each round's first picture asks again: who drew for the page may have left."""

    @classmethod
    def to_server(cls, url: str, peer: PeerConfig, run_id: str, peer_id: str) -> "Showing":
        """To the page of the dataset server at `url`, signed with this peer's own key."""
        from peer.data.client.runs import send_picture

        send = partial(send_picture, url, Signer(PeerKey.read(peer.identity_file)), token=token_for(url, peer))
        return cls(send, run_id, peer_id)

    def show(self, round: int, samples: int, drawn: Sequence[tuple[str, Any]]) -> None:
        """drawn: (prompt, PIL picture) of the state after `round`."""
        if self._last is not None and not self._last.done():
            return
        self._last = self._thread.submit(self._deliver, round, samples, drawn)

    def close(self) -> None:
        """Wait a little for what is on its way."""
        if self._last is not None and not self._last.done():
            try:
                self._last.result(_CLOSE_SECONDS)
            except FutureTimeout:
                log.info("the last pictures did not reach the dataset server")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _request(self, round: int, samples: int, prompt: str, picture: Any) -> PictureRequest:
        picture = picture.copy()
        picture.thumbnail((SIDE_PIXELS, SIDE_PIXELS))
        picture.save(out := io.BytesIO(), "WEBP", quality=95)
        return PictureRequest(
            run_id=self._run_id,
            peer=self._peer_id,
            round=round,
            samples=samples,
            prompt=words(prompt, _MAX_PROMPT),
            picture=base64.b64encode(out.getvalue()).decode(),
        )

    def _deliver(self, round: int, samples: int, drawn: Sequence[tuple[str, Any]]) -> None:
        for prompt, picture in drawn:
            try:
                refusal = self._send(self._request(round, samples, prompt, picture).model_dump())
            except UserError as error:
                log.info("the pictures of round %d are not shown: %s", round, error)
                return
            if refusal == "not_asked_to_draw":
                if self._asked:
                    log.info("the host shows other peers' pictures; ours (%s) stay here", self._peer_id)
                self._asked = False
                return
            self._asked = True
            if refusal:
                log.warning("the dataset server refuses a picture of round %d: %s", round, refusal)
                return
