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
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from gradstream.coordinator.durable.state import KeptState, StateError, decode
from gradstream.coordinator.durable.store import StateStore, SupersededError
from gradstream.runtime.base import Runtime, Work
from gradstream.runtime.tasks import Wakeup

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
