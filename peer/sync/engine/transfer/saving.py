"""Writing each state to disk in the background, the newest only, and since when which one is there."""

import asyncio
import time
from collections.abc import Callable

from peer.sync.engine import failpoints
from peer.sync.engine.state import State
from peer.sync.engine.transfer.disk import StateStore
from swarm.errors import UserError

_LOOK_SECONDS = 0.2
_REMEMBERED_SECONDS = 600.0
"""Longer than a state must have been on disk to be final without company, however many rounds are made in that time."""


class Saver:
    """saved: called after each state that is on disk; failed: called when the disk refuses one; may_begin: asked before each is written;
    before: called before each, in the thread that writes it."""

    def __init__(
        self,
        store: StateStore,
        state: State,
        saved: Callable[[State], None],
        failed: Callable[[UserError], None],
        may_begin: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        peer: str = "",
        before: Callable[[], None] = lambda: None,
    ):
        self._store, self._on_saved, self._on_failed, self._clock = store, saved, failed, clock
        self._may_begin, self._peer, self._before = may_begin, peer, before
        self._next: State | None = None
        self._wanted = asyncio.Event()
        self._writing: asyncio.Task | None = None
        self._saved: dict[str, float] = {}
        """Digest -> since when it is on disk, or what descends from it, the first one first. The last one is what was written last."""
        if (found := store.open(state.digest)) is not None:
            with found:
                self._saved[state.digest] = clock()
        elif state.header.round:
            self.want(state)  # the trainer's, or one just fetched: whoever had it may never have come to write it

    def want(self, state: State) -> None:
        """Save `state` when the state before is written; one that waits is replaced."""
        self._next = state
        self._wanted.set()

    def is_on_disk(self, digest: str, seconds: float = 0.0) -> bool:
        """Whether that state has been on disk for `seconds`."""
        return digest in self._saved and self._clock() - self._saved[digest] >= seconds

    async def save_forever(self) -> None:
        while True:
            await self._wanted.wait()
            if not self._may_begin():
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            self._wanted.clear()
            state, self._next = self._next, None
            try:
                await self.save(state)
                await failpoints.reached("saved", self._peer)
                self._on_saved(state)
            except UserError as error:
                self._on_failed(error)

    async def save(self, state: State) -> None:
        """Save `state` now unless it is there already. Raises UserError."""
        if self._writing is not None:
            # Whoever wanted that one was cancelled, which ends no thread: two must not write one file.
            await asyncio.wait({self._writing})
        if state.header.round and state.digest not in self._saved:
            self._writing = asyncio.create_task(self._write(state))
            await asyncio.shield(self._writing)

    def _save(self, state: State) -> None:
        self._before()
        self._store.save(state)

    async def _write(self, state: State) -> None:
        if self._saved and next(reversed(self._saved)) not in state.header.parents:
            self._saved.clear()  # another branch: once this one is written, the store deletes what it does not descend from, and we hear of it later
        await asyncio.get_running_loop().run_in_executor(None, self._save, state)
        now = self._clock()
        self._saved[state.digest] = now
        while now - self._saved[oldest := next(iter(self._saved))] > _REMEMBERED_SECONDS:
            del self._saved[oldest]
