"""What those who watch are told: one look at the run a second, put into words once for all of them, and sent when it says something new."""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from swarm.figures import figures
from swarm.page.assets import SECURITY_HEADERS
from swarm.page.history import History, point_of
from swarm.page.roster import Roster
from swarm.records import words
from swarm.tasks import end_tasks

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
UNWATCHED_SECONDS = 2.5
"""Between two looks while nobody watches: for the history only."""
ALIVE_SECONDS = 10.0
"""After this long without news a watcher gets an empty comment, which shows that the server lives."""
MOST_WATCHERS = 200
_MAX_TROUBLE = 300


class Watch:
    """take: the run now, as the fields of `protocol.Progress`; None while there is none. pictures: their version. clock: UNIX seconds."""

    def __init__(
        self,
        take: Callable[[], Awaitable[Mapping[str, Any] | None]],
        history: History,
        *,
        pictures: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.time,
    ):
        self._take, self.history, self._pictures, self._clock = take, history, pictures, clock
        self._roster, self._said = Roster(), ""
        self._watching: dict[object, str] = {}
        """Each stream, and who reads it; the oldest first."""
        self._view: dict[str, Any] = {"progress": None}
        self._trouble = ""
        self._event = b""
        self._news, self._someone, self._closed = asyncio.Event(), asyncio.Event(), False

    def has_room(self, who: str) -> bool:
        """Whether `who` gets one more place. If all are taken, whoever has most of them loses the oldest, unless `who` would then have as many."""
        if len(self._watching) < MOST_WATCHERS:
            return True
        have = Counter(self._watching.values())
        most = max(have, key=have.__getitem__)
        if have[most] <= have[who] + 1:
            return False
        del self._watching[next(stream for stream, reader in self._watching.items() if reader == most)]
        return True

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """Looks for as long as `app` runs: one of its `cleanup_ctx`."""
        task = asyncio.create_task(self._look_forever())
        yield
        await end_tasks(task)
        self.history.close()

    async def _look_forever(self) -> None:
        while True:
            await self.look()
            self._someone.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._someone.wait(), LOOK_SECONDS if self._watching else UNWATCHED_SECONDS)

    async def look(self) -> None:
        """Look once, and tell those who watch; what keeps us from seeing the run is shown beside the last that was seen."""
        try:
            self._view = self._seen(await self._take())
            self._trouble = ""
        except Exception as error:  # a disk that is full, a DHT that does not answer
            trouble = words(str(error) or type(error).__name__, _MAX_TROUBLE)
            if trouble != self._trouble:
                log.warning("cannot see the run: %s", trouble)
            self._trouble = trouble
        self._tell({**self._view, "trouble": self._trouble, "history": self.history.version, "pictures": self._pictures()})

    def _seen(self, progress: Mapping[str, Any] | None) -> dict[str, Any]:
        if progress is None:
            return {"progress": None}
        told = figures(progress)
        self._roster.look(progress["peers"], self._clock())
        if progress["peers"]:
            self.history.note(progress["run_id"], point_of(progress, told.utilisation))
        peers = [{**peer, "maddrs": []} for peer in progress["peers"]]  # addresses are for peers, not for whoever watches
        return {
            "progress": {**progress, "peers": peers},
            "figures": asdict(told),
            "seen": self._roster.seen(),
            "gone": self._roster.gone(),
        }

    def _tell(self, view: Mapping[str, Any]) -> None:
        said = json.dumps({**view, "progress": view["progress"] and {**view["progress"], "server_time": 0}})
        if said != self._said:
            self._said, self._event = said, f"data: {json.dumps(view, allow_nan=False)}\n\n".encode()
            self._news.set()
            self._news = asyncio.Event()

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._news.set()

    async def events(self, request: web.Request, who: str, is_admitted: Callable[[], bool] = lambda: True) -> web.StreamResponse:
        """Server-sent events, each the whole view as JSON, until the watcher leaves, is admitted no more, makes room, or we close."""
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if request.method == "HEAD":  # a stream would write its events behind the head, for ever
            return web.Response(headers=headers, content_type="text/event-stream")
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        stream = object()
        self._watching[stream] = who
        if len(self._watching) == 1:
            self._someone.set()
        sent: bytes = b""
        try:
            await response.prepare(request)
            while stream in self._watching and not self._closed and is_admitted():
                event, news = self._event, self._news
                if event is not sent:
                    await response.write(event)
                    sent = event
                    continue
                try:
                    await asyncio.wait_for(news.wait(), ALIVE_SECONDS)
                except asyncio.TimeoutError:
                    await response.write(b":\n\n")
        except ConnectionError:  # it has left
            pass
        finally:
            self._watching.pop(stream, None)
        return response
