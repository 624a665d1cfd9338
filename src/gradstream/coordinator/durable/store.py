"""`StateStore`: the coordinator's state in an SQLite file. It survives the death of processes, not of the machine.

One file in the run directory, in WAL mode. `synchronous=NORMAL`: a transaction is in the system's memory when it
returns, so no killed process loses one; a power failure may, but a run whose machine has
died continues from its checkpoint anyway. So a transaction takes some 0.1 ms, and waits for the disk only when SQLite
moves the log into the file.

Each process that leads a run has a number, its ruling. It takes the next number before it serves, and each of its
transactions first checks that this is still the newest. So an earlier process that was stopped, and
wakes up, writes nothing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradstream.coordinator.durable.state import MAX_BYTES, RESUME, StateError
from gradstream.errors import GradstreamError

STORE = "coordinator.db"
"""The file, in the run directory."""

FORMAT = "gradstream coordinator 1"
BUSY_S = 5.0
MAX_ROWS = 1000


class SupersededError(GradstreamError):
    """Another process leads the run now; this one has written nothing since."""


class StateStore:
    """The stored state of one run. Methods may be called from any thread, one at a time.

    Args:
        path: the file, or ":memory:"; made if it is missing.
        job: id of the run.

    Raises:
        StateError: the file is not a coordinator's, or belongs to another run.
        OSError: it cannot be opened or written.

    Attributes:
        ruling: the number of this process; 0 before `rule`.
    """

    def __init__(self, path: Path | str, job: str) -> None:
        self.ruling = 0
        self._job = job
        self._path = path
        self._usable = False
        self._open()

    def _open(self) -> None:
        with _named(self._path):
            if self._path != ":memory:":  # for this user alone: it holds the members' proofs of identity
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            self._database = sqlite3.connect(
                self._path,
                timeout=BUSY_S,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=16,
            )
            self._database.execute("PRAGMA trusted_schema=OFF")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES + (1 << 20))
            with self._transaction():
                self._make()
        self._usable = True

    def _make(self) -> None:
        for sql in (
            "CREATE TABLE IF NOT EXISTS leader (one INTEGER PRIMARY KEY CHECK (one = 1), "
            "format TEXT, job TEXT, ruling INTEGER)",
            "CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS events (one INTEGER PRIMARY KEY CHECK (one = 1), lines BLOB)",
        ):
            self._database.execute(sql)
        self._database.execute(
            "INSERT OR IGNORE INTO leader VALUES (1, ?, ?, 0)",
            (FORMAT, self._job),
        )
        stored = self._database.execute("SELECT format, job FROM leader").fetchone()
        if stored != (FORMAT, self._job):
            raise StateError(
                f"{self._path} is the state of {str(stored)[:200]}, expected of {(FORMAT, self._job)}{RESUME}"
            )

    def rule(self) -> tuple[dict[str, str], bytes]:
        """Makes this process the leader, with the next ruling. Returns the stored state and its last events.

        Both are empty before the first ruling. Earlier leaders can no longer write.
        """
        with _named(self._path), self._transaction():
            self._database.execute("UPDATE leader SET ruling = ruling + 1")
            (self.ruling,) = self._database.execute("SELECT ruling FROM leader").fetchone()
            rows = self._database.execute("SELECT key, value FROM state LIMIT ?", (MAX_ROWS + 1,)).fetchall()
            lines = self._database.execute("SELECT lines FROM events").fetchone() or (b"",)
        if len(rows) > MAX_ROWS or not all(isinstance(field, str) for row in rows for field in row):
            raise StateError(f"{self._path} has rows that no coordinator writes{RESUME}")
        if not isinstance(lines[0], bytes):
            raise StateError(f"{self._path} has events that are no bytes{RESUME}")
        return dict(rows), lines[0]

    def write(self, rows: Mapping[str, str], lines: bytes, gone: Sequence[str] = ()) -> None:
        """Stores changed rows and the events that belong to them, and removes rows that are gone, all or nothing.

        Raises:
            SupersededError: another process rules; nothing was written.
            OSError: the disk is full or broken; nothing was written.
        """
        if not self._usable:  # a connection that has seen a full disk may report errors for good
            self._database.close()
            self._open()
        self._usable = False
        self._write(rows, lines, gone)
        self._usable = True

    def _write(self, rows: Mapping[str, str], lines: bytes, gone: Sequence[str]) -> None:
        with _named(self._path), self._transaction():
            (ruling,) = self._database.execute("SELECT ruling FROM leader").fetchone()
            if ruling != self.ruling:
                raise SupersededError(
                    f"this coordinator, the {self.ruling}. process to lead the run, was stopped, and the {ruling}. "
                    "has taken its place: it has written nothing since, and ends"
                )
            self._database.executemany("DELETE FROM state WHERE key = ?", [(key,) for key in gone])
            self._database.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", rows.items())
            self._database.execute("INSERT OR REPLACE INTO events VALUES (1, ?)", (lines,))

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database)


class _Transaction:
    """Begins a transaction; commits it, or rolls it back if anything is raised."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if kind is None:
                self._database.execute("COMMIT")
        finally:
            if self._database.in_transaction:  # even if the disk is full
                self._database.execute("ROLLBACK")


class _named:  # noqa: N801  read as a verb
    """Turns errors of SQLite into OSError, or StateError if this is not an SQLite file."""

    def __init__(self, path: Path | str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, sqlite3.OperationalError):
            raise OSError(f"{self._path}: {error}") from error
        if isinstance(error, sqlite3.Error):
            raise StateError(f"{self._path}: {error}{RESUME}") from error
