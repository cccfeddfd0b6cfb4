"""The durable ledger: one thread owns the SQLite file; an answer is given only after its transaction is on the disk.

Requests that wait are committed together, so that an fsync of 4 ms is shared by all of them. After `kill -9`, what was
answered is there and what was not answered is as if it had not been asked.
"""

import asyncio
import contextlib
import gc
import json
import logging
import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from datasetserver.book import Book
from datasetserver.refused import Refused
from datasetserver.store import SCHEMA, Store
from datasetserver.work_folder import LEDGER
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)
Result = TypeVar("Result")
_BATCH = 256
_TELL_SECONDS = 60.0
_SCHEMA_VERSION = "2"
_SCHEMA = SCHEMA + "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;"


class Writer:
    """Runs operations on a `Book` and commits them together.

    db: a connection in autocommit mode. where: what it is called in errors. run: kept with a new ledger; another run's ledger is refused
    with a UserError. make_book: given the connection, reads the Book from it. clock: in seconds.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        where: str,
        run: RunConfig,
        make_book: Callable[[sqlite3.Connection], Book],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._db, self._make_book, self._clock = db, make_book, clock
        self._told = -math.inf
        """When the last line about the disk was written; -inf once it has taken something again."""
        try:
            _prepare(db)
            _check_owner(db, where, run)
            self.book: Book | None = make_book(db)
        except sqlite3.DatabaseError as error:
            raise _cannot_be_opened(where, error) from None

    def commit(self, operations: Sequence[Callable[[Book], Any]]) -> list[Any]:
        """What each of them returns, or the exception that it raises; all that they changed is on the disk, or nothing of it."""
        outcomes: list[Any] = []
        try:
            book = self.book or self._make_book(self._db)
            for operation in operations:
                try:
                    outcomes.append(operation(book))
                except Refused as refused:
                    outcomes.append(refused)
            self._db.execute("BEGIN IMMEDIATE")
            book.save()
            self._db.execute("COMMIT")
            self.book = book
            self._told = -math.inf
        except Exception as error:  # a full disk, one that is gone, or a fault of ours
            self._tell(error, len(operations))
            self.book = None  # memory is ahead of the disk: it is read again when something is asked next, and again until that succeeds
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            outcomes = [error] * len(operations)
        return outcomes

    def _tell(self, error: Exception, requests: int) -> None:
        """Of a disk one line a minute, though peers repeat their requests every second; of a fault of ours each time where it was."""
        disk = isinstance(error, (sqlite3.OperationalError, OSError))
        if disk and self._clock() - self._told < _TELL_SECONDS:
            return
        self._told = self._clock()
        log.error("cannot write the ledger: none of %d requests was done (%s)", requests, error, exc_info=not disk)


class Ledger:
    """Runs operations on a `Book` one after the other in its own thread.

    path: the SQLite file, on a local file system. run, make_book: see `Writer`. clock: in seconds, the book's.
    """

    def __init__(
        self, path: Path, *, run: RunConfig, make_book: Callable[[sqlite3.Connection], Book], clock: Callable[[], float] = time.monotonic
    ):
        self._clock = clock
        self._requests: queue.SimpleQueue[tuple[Callable[[Book], Any], asyncio.Future] | None] = queue.SimpleQueue()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
        try:
            self._writer = Writer(self._db, where=str(path), run=run, make_book=make_book)
        except BaseException:
            self._db.close()
            raise
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    async def call(self, operation: Callable[[Book], Result]) -> Result:
        """Run `operation` on the book, commit, and return its result.

        Raises Refused as the operation does, and sqlite3.Error when the disk does not take it: then nothing has changed.
        """
        future, at = asyncio.get_running_loop().create_future(), self._clock()

        def arrived(book: Book) -> Result:
            book.arrived(at)
            return operation(book)

        self._requests.put((arrived, future))
        return await future

    def close(self) -> None:
        """Finish what was asked before, and end the thread."""
        self._requests.put(None)
        self._thread.join()

    def _work(self) -> None:
        open_for_requests = True
        while open_for_requests:
            batch = [self._requests.get()]
            while len(batch) < _BATCH and not self._requests.empty():
                batch.append(self._requests.get())
            open_for_requests = None not in batch
            self._commit([request for request in batch if request is not None])
        self._db.close()

    def _commit(self, batch: list[tuple[Callable[[Book], Any], asyncio.Future]]) -> None:
        outcomes = self._writer.commit([operation for operation, _ in batch])
        answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future, Any]]] = {}
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            answers.setdefault(future.get_loop(), []).append((future, outcome))
        for loop, some in answers.items():
            with contextlib.suppress(RuntimeError):  # it has ended: nobody waits any more
                loop.call_soon_threadsafe(_answer, some)


def _answer(outcomes: list[tuple[asyncio.Future, Any]]) -> None:
    """In the loop of those who asked, all of a batch at once: waking it for each costs more than the answer."""
    for future, outcome in outcomes:
        if future.done():  # whoever asked has gone
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def collect_seldom() -> None:
    """For a process with a ledger, whose hundreds of thousands of small objects live long: Python would look through all of them so often
    that it takes a tenth of the time, and keeps requests waiting for 100 ms."""
    gc.set_threshold(50_000, 20, 50)


def stored_run(path: Path) -> RunConfig | None:
    """The run whose ledger this is; None where there is no ledger yet. Raises UserError for a file that is none."""
    if not path.exists():
        return None
    with _opened(path, _cannot_be_opened) as db:
        values = dict(db.execute("SELECT key, value FROM meta")).get("run_config")
    return RunConfig.from_mapping(json.loads(values), where=str(path)) if values else None


@contextlib.contextmanager
def look_into(work_dir: Path) -> Iterator[tuple[RunConfig, Store]]:
    """The run there and what its ledger holds, whether a server runs on it or not. Raises UserError where no run has begun, or it cannot be read."""
    path = work_dir / LEDGER
    run = stored_run(path)
    if run is None:
        raise UserError(f"No run has begun in {work_dir}.", fix="Give the server's --dataset or --work_dir.")
    with _opened(path, _cannot_be_read) as db:
        yield run, Store(db, ())


def epochs_begun(path: Path) -> int | None:
    """The first epoch of which this ledger has leased nothing yet; None where no run has begun. Raises UserError for a file that is none."""
    if stored_run(path) is None:
        return None
    with _opened(path, _cannot_be_opened) as db:
        last = [db.execute(f"SELECT max(epoch) FROM {table}").fetchone()[0] for table in ("lease", "contribution_unit")]
    return max((epoch + 1 for epoch in last if epoch is not None), default=0)


@contextlib.contextmanager
def _opened(path: Path, refused: Callable[[str, sqlite3.Error], UserError]) -> Iterator[sqlite3.Connection]:
    """The ledger, for a look that changes nothing. Raises what `refused` makes of an error of the database."""
    # A server that runs keeps a write-ahead log. Where there is none the file alone is all there is, and SQLite need not write one to read it.
    path = path.resolve()  # SQLite keeps it beside the file itself, wherever a link is
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?{how}", uri=True, isolation_level=None, timeout=5)) as db:
            _add_missing_tables(db)
            yield db
    except sqlite3.DatabaseError as error:
        raise refused(str(path), error) from None


def _add_missing_tables(db: sqlite3.Connection) -> None:
    """Those that the version that wrote the ledger did not have are empty, in this connection only."""
    there = [name for (name,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")]
    db.executescript(_SCHEMA.replace("CREATE TABLE", "CREATE TEMP TABLE"))
    for name in there:
        db.execute(f'DROP TABLE IF EXISTS temp."{name}"')


def _cannot_be_read(path: str, error: sqlite3.Error) -> UserError:
    return UserError(f"The ledger {path} cannot be read: {error}.", fix="Check the disk.", code=ExitCode.DISK)


def _cannot_be_opened(path: str, error: sqlite3.Error) -> UserError:
    return UserError(
        f"The ledger {path} cannot be opened: {error}.",
        fix="Restore it from a copy; or give another --work_dir, and every sample counts as untrained.",
        code=ExitCode.DISK,
    )


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA wal_autocheckpoint = 8000")  # 32 MB: a checkpoint every thousand pages takes a twentieth of a busy ledger's time
    db.executescript(_SCHEMA)


def _check_owner(db: sqlite3.Connection, path: str, run: RunConfig) -> None:
    meta = dict(db.execute("SELECT key, value FROM meta"))
    if not meta:  # one statement: all of it is on the disk or nothing
        rows = ("schema", _SCHEMA_VERSION, "run", run.digest, "run_config", json.dumps(run.to_mapping()))
        db.execute("INSERT INTO meta VALUES (?, ?), (?, ?), (?, ?)", rows)
    elif meta.get("schema") != _SCHEMA_VERSION:
        raise UserError(f"The ledger {path} has format {meta.get('schema')}.", fix="Use the version of this program that wrote it.")
    elif meta.get("run") != run.digest:
        begun = RunConfig.from_mapping(json.loads(meta["run_config"]), where=str(path))
        begun.refuse_another(asdict(run))
        raise UserError(  # the same options, named by another rule: never served over the samples of another id without a word
            f"The ledger {path} is of the run {begun.run_id}, not {run.run_id}.", fix="Start without --model to go on with it."
        )
