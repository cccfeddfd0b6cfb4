"""One log for all processes of a peer, turned over by size: they write into a pipe, whose other end is here."""

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from swarm.errors import ExitCode, UserError

_AT_ONCE = 1 << 16
_LONGEST_LINE = 1 << 20


class LogFile(logging.Handler):
    """A handler for our own lines; `pipe` is what the others write into, and `pump()` brings it into the file, line by line.

    path, path.1, ... path.(kept - 1): each of at most max_bytes. Raises UserError (disk) when it cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int, kept: int):
        super().__init__()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=kept - 1, encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"Cannot write {path}: {error.strerror}.", fix="Choose another --log_file.", code=ExitCode.DISK) from None
        self._file.handleError = lambda record: None  # a full disk must not end the peer; what is lost are lines
        self._reading, self.pipe = os.pipe()
        os.set_blocking(self._reading, False)
        self._rest = b""

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))

    def pump(self) -> None:
        """Write what has come since. The last line without an end waits for it."""
        while True:
            try:
                data = os.read(self._reading, _AT_ONCE)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._write(line.decode("utf-8", "replace"))
            if len(self._rest) > _LONGEST_LINE:
                self.flush_rest()

    def flush_rest(self) -> None:
        """What was left of a process that was killed in the middle of a line is one, too."""
        if self._rest:
            self._write(self._rest.decode("utf-8", "replace"))
            self._rest = b""

    def close(self) -> None:
        if self._reading >= 0:
            self.pump()
            self.flush_rest()
            os.close(self._reading)
            os.close(self.pipe)
            self._reading = -1
            self._file.close()
        super().close()

    def _write(self, line: str) -> None:
        self._file.handle(logging.makeLogRecord({"msg": line}))
