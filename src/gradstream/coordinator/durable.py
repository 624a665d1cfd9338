"""`StateKeeper`: makes the coordinator's state durable before anybody learns of it.

    a beat, a request ──▶ state machines ──▶ `changed`
                                                │      at most PACE_S later, or when somebody waits for `durable`
                                                ▼
                             changed rows and events, in one transaction ──▶ events.jsonl, notices, answers

A message that a process received but did not store is repeated by its sender, since no notice has acknowledged it; so
a death between the two loses and duplicates nothing. The events of the last transaction are stored with it: a new
process adds those that the file lacks.

A full or broken disk does not hold up the run: it goes on without protection, and says so.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message

from gradstream.checkpoint.draft import VectorPlace
from gradstream.checkpoint.manifest import Evaluated, JobPhase
from gradstream.coordinator.lost_work import LostPush, Orphans, Redo
from gradstream.coordinator.snapshot_rounds import Snapshot
from gradstream.data.base import BatchRef, DataProgress
from gradstream.data.dealing import Epoch, Lease, LoopBatch, Pool
from gradstream.data.leases import AssignableBatches
from gradstream.data.ledger import EpochCounts
from gradstream.data.open_ledger import Gone, LoopSequence
from gradstream.data.shares import WorkerSpeed
from gradstream.errors import GradstreamError
from gradstream.runtime.base import Runtime, Work
from gradstream.runtime.tasks import Wakeup
from gradstream.untrusted import parse_json
from gradstream.untrusted.files import DocumentError
from gradstream.wire import v1
from gradstream.wire.chunks import Placement

PACE_S = 0.1
"""Seconds until a change is stored for which nobody waits."""

RETRY_S = 0.5
"""Seconds between two attempts on a full disk."""

TAIL_BYTES = 4 << 20
"""Least number of bytes of the file's end to read, besides the events to look for."""


class Keeper(Protocol):
    """The coordinator's view of a `StateKeeper`."""

    @property
    def ruling(self) -> int:
        """Number of this process among those that have led the run; 0 if none can replace it."""
        ...

    @property
    def superseded(self) -> SupersededError | None:
        """The error with which this process ends if another one rules."""
        ...

    @property
    def restored(self) -> bool:
        """Whether the state of an earlier process was there."""
        ...

    def row(self, key: str) -> Any:
        """A value of an earlier process's state, before `begin` restores it; None if there is none.

        Raises:
            StateError: it cannot be read.
        """
        ...

    def begin(self, state: KeptState, on_superseded: Callable[[], None]) -> None:
        """Restores the stored state, if there is any, and keeps it from now on.

        The next plan of a run begins again, with another state in place of this one.

        Raises:
            StateError: the stored state does not belong to this run.
        """
        ...

    def changed(self) -> None:
        """Notes that the state may have changed."""
        ...

    def emit(self, lines: bytes) -> None:
        """Adds events to those of the run, as JSON lines."""
        ...

    async def durable(self) -> None:
        """Returns once all changes so far are stored. Raises SupersededError if another process rules."""
        ...

    async def close(self) -> None:
        """Stores the rest."""
        ...


class Unkept:
    """Keeps nothing: if the coordinator dies, the run ends.

    Args:
        write_events: adds lines to the events of the run.
    """

    ruling = 0
    superseded = None
    restored = False

    def __init__(self, write_events: Callable[[bytes], None]) -> None:
        self.emit = write_events

    def row(self, key: str) -> Any:
        """See `Keeper`."""
        return None

    def begin(self, state: KeptState, on_superseded: Callable[[], None]) -> None:
        """Does nothing, as all methods do."""

    def changed(self) -> None:
        """See `Keeper`."""

    async def durable(self) -> None:
        """See `Keeper`."""

    async def close(self) -> None:
        """See `Keeper`."""


class StateKeeper:
    """Stores changes, several in one transaction.

    Args:
        runtime: time and tasks of the coordinator.
        store: the store; this process takes the next ruling.
        write_events: adds lines to the events of the run.
        written: the end of the events file, at least `TAIL_BYTES` of it.
        tell: shows a sentence to the user who started the run, with whether the state is stored.

    Raises:
        StateError, OSError: the store cannot be read.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: StateStore,
        write_events: Callable[[bytes], None],
        written: Callable[[], bytes],
        tell: Callable[[str, bool], None],
    ) -> None:
        self._stored, last = store.rule()
        self.restored = bool(self._stored)
        if missing := missing_lines(last, written()):
            write_events(missing)
        self.superseded: SupersededError | None = None
        self._runtime = runtime
        self._store = store
        self._write_events = write_events
        self._tell = tell
        self._state = KeptState({})
        self._on_superseded: Callable[[], None] = lambda: None
        self._lines: list[bytes] = []  # events that wait for the next transaction
        self._changes = self._kept = 0  # number of changes, and of stored ones
        self._wanted, self._done = Wakeup(), asyncio.Condition()
        self._failing = False  # whether the disk is full or broken
        self._task: asyncio.Task[None] | None = None

    @property
    def ruling(self) -> int:
        """See `Keeper`."""
        return self._store.ruling

    def row(self, key: str) -> Any:
        """See `Keeper`."""
        return decode(self._stored[key]) if key in self._stored else None

    def begin(self, state: KeptState, on_superseded: Callable[[], None]) -> None:
        """See `Keeper`."""
        if self.restored:
            state.restore(self._stored)
            self.restored = False
        self._state, self._on_superseded = state, on_superseded
        self.changed()
        if self._task is None:
            self._task = self._runtime.spawn(self._keep(), name=f"{self._runtime.node}-keeper")

    def changed(self) -> None:
        """Notes that the state may have changed."""
        self._changes += 1

    def emit(self, lines: bytes) -> None:
        """Adds events to the next transaction; they reach the file after it."""
        self._lines.append(lines)
        self._changes += 1

    async def durable(self) -> None:
        """Returns once all changes so far are stored, or the disk fails.

        Raises:
            SupersededError: another process rules.
        """
        target = self._changes
        if not self._is_stored(target):
            self._wanted.ring()
            async with self._done:
                await self._done.wait_for(partial(self._is_stored, target))
        if self.superseded is not None:
            raise self.superseded

    def _is_stored(self, changes: int) -> bool:
        """Whether this many changes are stored, or never will be."""
        return self._kept >= changes or self._failing or self.superseded is not None

    async def close(self) -> None:
        """Stores the rest, and closes the store. Events go straight into the file from now on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.superseded is None:
            await self._store_changes()
        self._store.close()
        if self.superseded is None and self._lines:  # the disk failed: the log waits for room
            self._write_events(b"".join(self._lines))
            self._lines = []

    async def _keep(self) -> None:
        while True:
            await self._wanted.rung(self._runtime, RETRY_S if self._failing else PACE_S)
            if self._kept < self._changes:
                await self._store_changes()
            if self.superseded is not None:
                self._on_superseded()
                return

    async def _store_changes(self) -> None:
        number, rows = self._changes, self._state.rows()
        lines, self._lines = b"".join(self._lines), []
        changed = {key: value for key, value in rows.items() if self._stored.get(key) != value}
        gone = [key for key in self._stored if key not in rows]
        try:
            await self._runtime.beside(partial(self._store.write, changed, lines, gone), work=Work("write"))
        except SupersededError as error:
            self.superseded = error
        except (OSError, StateError) as error:
            self._fail(error)
            self._write_events(lines)  # the log of events waits for room by itself
        else:
            self._stored, self._kept = rows, number
            self._write_events(lines)
            self._recover()
        async with self._done:
            self._done.notify_all()

    def _fail(self, error: Exception) -> None:
        if not self._failing:
            self._tell(
                f"the coordinator's state cannot be stored ({error}): if it dies now, the run ends", False
            )
        self._failing = True

    def _recover(self) -> None:
        if self._failing:
            self._tell("the coordinator's state is stored again", True)
        self._failing = False


def missing_lines(last: bytes, tail: bytes) -> bytes:
    """The lines of the last transaction that the end of the events file lacks."""
    there = set(tail.splitlines(keepends=True))
    return b"".join(line for line in last.splitlines(keepends=True) if line not in there)


# ---- values ------------------------------------------------------------------------------
# Values of the coordinator's state as JSON, and back. Nothing read is executed.
#
#     None, bool, int, float, str   themselves                     bytes     {"bytes": base64}
#     list                          [...]                          tuple     {"tuple": [...]}
#     dict, set, deque              {"dict": [[key, value], ...]}, {"set": [...]}, {"deque": [...]}
#     message of the protocol       {"ModelSpec": base64}          record    {"WorkerSpeed": [field, ...]}
#
# Only the messages and records of two short tables are read.

MAX_BYTES = 256 << 20
"""Longest value to read: the description of a model may have some hundred thousand tensors."""

MAX_VALUES, MAX_DEPTH = 1 << 26, 64

_RECORDS: Mapping[str, type] = {
    cls.__name__: cls
    for cls in (
        AssignableBatches,
        BatchRef,
        DataProgress,
        Epoch,
        EpochCounts,
        Evaluated,
        Gone,
        JobPhase,
        Lease,
        LoopBatch,
        LoopSequence,
        LostPush,
        Orphans,
        Placement,
        Pool,
        Redo,
        Snapshot,
        VectorPlace,
        WorkerSpeed,
    )
}
_MESSAGES: Mapping[str, type[Message]] = {
    cls.DESCRIPTOR.name: cls for cls in (v1.Assigned, v1.ModelSpec, v1.Node, v1.TensorSpec)
}


RESUME = "; `gradstream resume` continues the run from its newest checkpoint, without the coordinator's stored state"
"""The remedy for a user whose run has such a value."""

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class StateError(ValueError):
    """A stored value that is not the coordinator's; the message says why in a few words."""


def encode(value: Any) -> str:
    """The JSON text of a value. Raises TypeError for a value of another kind, which is a bug."""
    return _ENCODE(_plain(value))


def decode(text: str) -> Any:
    """The value of a JSON text. Raises StateError for any other text."""
    try:
        plain = parse_json(text, max_bytes=MAX_BYTES, max_values=MAX_VALUES, max_depth=MAX_DEPTH)
        return _value(plain)
    except (DocumentError, DecodeError, TypeError, ValueError) as error:
        raise StateError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Message):
        return {value.DESCRIPTOR.name: base64.b64encode(value.SerializeToString(deterministic=True)).decode()}
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):
        return {name: [_plain(getattr(value, field)) for field in _fields(type(value))]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(entry)] for key, entry in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((_plain(entry) for entry in value), key=repr)}
    for kind in (deque, tuple):
        if isinstance(value, kind):
            return {kind.__name__: [_plain(entry) for entry in value]}
    if isinstance(value, list) or hasattr(value, "__getitem__"):  # repeated fields of messages, too
        return [_plain(entry) for entry in value]
    raise TypeError(f"{name}: the coordinator's state has no such values")


def _fields(cls: type) -> tuple[str, ...]:
    named: tuple[str, ...] | None = getattr(cls, "_fields", None)
    return named or tuple(field.name for field in dataclasses.fields(cls))


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(entry) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise StateError(f"got an object with {len(plain)} entries, expected one")
    ((kind, inner),) = plain.items()
    if kind in _MESSAGES:
        return _MESSAGES[kind].FromString(base64.b64decode(inner, validate=True))
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if not isinstance(inner, list):
        raise StateError(f"{kind[:40]!r}: got a {type(inner).__name__}, expected a list")
    if kind == "dict":
        return {_value(key): _value(entry) for key, entry in inner}
    values = [_value(entry) for entry in inner]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](values)
    if kind in _RECORDS:
        return _record(_RECORDS[kind], values)
    raise StateError(f"got a value of unknown kind {kind[:40]!r}")


def _record(cls: Any, values: list[Any]) -> Any:
    """A record from its fields, in order; some dataclasses take them by name only."""
    return cls(**dict(zip(_fields(cls), values, strict=True)))


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}


# ---- state -------------------------------------------------------------------------------
# The coordinator's state as rows, one for each attribute of a state machine: what is kept, and how it is restored.
#
# A class lists in `KEPT` which of its attributes change during a run. If such an attribute is an object with its own
# `KEPT`, the object's attributes are rows of the machine. Everything else follows from the plan, which a new
# process makes again. A row is restored into the attribute's existing container, since other objects may hold it, too.


class KeptState:
    """Encodes the changing attributes of several state machines as rows, and restores them.

    Args:
        parts: the machines, by a name of one word.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = dict(parts)

    def rows(self) -> dict[str, str]:
        """The whole state: JSON by part and attribute."""
        return {key: encode(getattr(part, attribute)) for key, (part, attribute) in self._places().items()}

    def restore(self, rows: Mapping[str, str]) -> None:
        """Restores the state that `rows` returned.

        Raises:
            StateError: a row is missing, unknown, or not a value of this state.
        """
        expected = self._places()
        if odd := sorted(expected.keys() ^ rows.keys()):
            raise StateError(
                f"the coordinator's stored state lacks, or has too much: {', '.join(odd)[:200]}{RESUME}"
            )
        for key, text in rows.items():
            part, attribute = expected[key]
            try:
                _put(part, attribute, decode(text))
            except StateError as error:
                raise StateError(f"the coordinator's stored state, {key}: {error}{RESUME}") from error

    def _places(self) -> dict[str, tuple[object, str]]:
        """By row, the object and its attribute."""
        return {
            f"{name}.{place[1]}": place for name, machine in self._parts.items() for place in _kept(machine)
        }


def _kept(machine: object) -> Iterator[tuple[object, str]]:
    """The kept attributes of a machine, each with the object that has it."""
    for cls in reversed(type(machine).__mro__):
        for attribute in vars(cls).get("KEPT", ()):
            value = getattr(machine, attribute)
            yield from _kept(value) if hasattr(value, "KEPT") else [(machine, attribute)]


def _put(part: object, attribute: str, value: Any) -> None:
    """Sets an attribute, in place if it is a container. Raises StateError for a value of another kind."""
    present = getattr(part, attribute)
    numbers = isinstance(present, int | float) and isinstance(value, int | float)
    if present is not None and value is not None and not isinstance(value, type(present)) and not numbers:
        alike = isinstance(present, dict | list | tuple) and isinstance(value, dict | list | tuple)
        if not alike or isinstance(present, dict) is not isinstance(value, dict):
            raise StateError(f"got a {type(value).__name__}, expected a {type(present).__name__}")
    if isinstance(present, dict | set):
        present.clear()
        present.update(value)
    elif isinstance(present, deque):
        present.clear()
        present.extend(value)
    elif isinstance(present, list):
        present[:] = value
    else:
        setattr(part, attribute, value)


# ---- store -------------------------------------------------------------------------------
# `StateStore`: the coordinator's state in an SQLite file. It survives the death of processes, not of the machine.
#
# One file in the run directory, in WAL mode. `synchronous=NORMAL`: a transaction is in the system's memory when it
# returns, so no killed process loses one; a power failure may, but a run whose machine has
# died continues from its checkpoint anyway. So a transaction takes some 0.1 ms, and waits for the disk only when SQLite
# moves the log into the file.
#
# Each process that leads a run has a number, its ruling. It takes the next number before it serves, and each of its
# transactions first checks that this is still the newest. So an earlier process that was stopped, and
# wakes up, writes nothing.

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
