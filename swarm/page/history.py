"""How a run went, for charts: at most a thousand points in a small SQLite file, which are merged two by two when there are more.

It is for people to look at: when the file cannot be used, the run goes on without, and says so.
"""

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
MOST_POINTS = 1000
FIRST_PERIOD_SECONDS = 10.0
COLUMNS = ("time", "round", "samples", "loss", "samples_per_second", "peers", "utilisation")
Point = tuple[float, int, int, float | None, float, int, float | None]
"""In the order of COLUMNS; time: UNIX seconds. All but time, round and samples are means over the time since the point before."""


class History:
    """path: the file; None: kept in memory only. One thread uses it."""

    def __init__(self, path: Path | None, *, most: int = MOST_POINTS, period_seconds: float = FIRST_PERIOD_SECONDS):
        self._most, self._first_period = most, period_seconds
        self._points: list[Point] = []
        self._open: list[Point] = []
        self._run = ""
        self.version = 0
        """Changes with the points."""
        self._db = _opened(path)

    def note(self, run_id: str, point: Point) -> bool:
        """How the run is now; returns whether a point was added. Points of another run are forgotten."""
        if run_id != self._run:
            self._begin(run_id)
        if any(each[0] > point[0] for each in (*self._points[-1:], *self._open[-1:])):  # the clock was ahead
            self._points, self._open = ([each for each in points if each[0] <= point[0]] for points in (self._points, self._open))
            self._keep(self._points, anew=True)
            self.version += 1
        self._open.append(point)
        last = self._points[-1][0] if self._points else self._open[0][0] - self._period
        if point[0] - last < self._period:
            return False
        self._points.append(_merged(self._open))
        self._open = []
        if len(self._points) > self._most:
            self._points = [_merged(self._points[index : index + 2]) for index in range(0, len(self._points), 2)]
            self._period *= 2
            self._keep(self._points, anew=True)
        else:
            self._keep(self._points[-1:])
        self.version += 1
        return True

    def columns(self) -> dict[str, list[Any]]:
        """The fields of `protocol.HistoryAnswer`."""
        return {name: [point[index] for point in self._points] for index, name in enumerate(COLUMNS)}

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    def _begin(self, run_id: str) -> None:
        self._run, self._open, self._points, self._period = run_id, [], [], self._first_period
        self.version += 1
        if self._db is None:
            return
        try:
            self._db.execute("DELETE FROM point WHERE run != ?", (run_id,))
            self._points = self._db.execute(f"SELECT {', '.join(COLUMNS)} FROM point WHERE run = ? ORDER BY time", (run_id,)).fetchall()
            self._db.commit()
        except sqlite3.Error as error:
            self._without(error)
        if len(self._points) > 1:  # as it was: half of the points came with at most the present period between them
            gaps = sorted(new[0] - old[0] for old, new in zip(self._points, self._points[1:], strict=False))
            while self._period < gaps[len(gaps) // 2] / 1.5:
                self._period *= 2

    def _keep(self, points: Sequence[Point], *, anew: bool = False) -> None:
        if self._db is None:
            return
        try:
            with self._db:
                if anew:
                    self._db.execute("DELETE FROM point")
                self._db.executemany(f"INSERT OR REPLACE INTO point VALUES (?{', ?' * len(COLUMNS)})", [(self._run, *p) for p in points])
        except sqlite3.Error as error:
            self._without(error)

    def _without(self, error: sqlite3.Error) -> None:
        log.warning("keeping the run's history in memory only from now on: %s", error)
        self._db.close()
        self._db = None


def point_of(progress: Mapping[str, Any], utilisation: float | None) -> Point:
    """progress: the fields of `protocol.Progress`."""
    return (
        progress["server_time"],
        progress["round"],
        progress["samples"],
        progress["loss"],
        progress["samples_per_second"],
        len(progress["peers"]),
        utilisation,
    )


def _merged(points: Sequence[Point]) -> Point:
    """One point for several that follow each other."""
    last = points[-1]
    loss, rate, peers, utilisation = (_mean([point[index] for point in points]) for index in (3, 4, 5, 6))
    return (last[0], last[1], last[2], loss, rate or 0.0, round(peers or 0), utilisation)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _opened(path: Path | None) -> sqlite3.Connection | None:
    if path is None:
        return None
    try:
        return _prepared(path)
    except sqlite3.OperationalError as error:  # the disk is full, or another program has it: the file is good
        log.warning("keeping the run's history in memory only: %s", error)
        return None
    except sqlite3.DatabaseError as error:
        log.warning("%s is not a history (%s); moved it aside, starting a new one", path, error)
    try:
        path.replace(path.with_suffix(".broken"))
        return _prepared(path)
    except (OSError, sqlite3.Error) as error:
        log.warning("keeping the run's history in memory only: %s", error)
        return None


def _prepared(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False, timeout=1)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # the last seconds may be lost with the power: it is a chart
        db.execute(
            "CREATE TABLE IF NOT EXISTS point (run TEXT, time REAL, round INTEGER, samples INTEGER, loss REAL, "
            "samples_per_second REAL, peers INTEGER, utilisation REAL, PRIMARY KEY (run, time)) WITHOUT ROWID"
        )
        if tuple(name for _, name, *_ in db.execute("PRAGMA table_info(point)")) != ("run", *COLUMNS):
            raise sqlite3.DatabaseError("its columns are others")
        db.commit()
    except BaseException:
        db.close()
        raise
    return db
