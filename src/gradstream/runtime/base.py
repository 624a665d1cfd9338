"""The `Runtime`: everything that a node uses besides arithmetic and the network.

Node code is `async`, and takes time, tasks, compute, randomness and disk only from its runtime.
`RealRuntime` uses asyncio and threads; `VirtualRuntime` runs the same coroutines on a clock that jumps to
the next event, so that one seed gives one history, bit for bit. So tasks, groups and deadlines are the runtime's:
`asyncio.TaskGroup`, `wait` and `as_completed` keep tasks in sets, whose order depends on addresses, and
`asyncio.timeout` takes time from the loop.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from gradstream.memory import Memory, Span
from gradstream.runtime.deadlines import Stalls
from gradstream.telemetry.events import Event

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview
"""Bytes to be written."""

_NS = 1_000_000_000
SLACK_S = 1e-3
"""The most seconds by which asyncio's timers may fire too early."""

Lane: TypeAlias = Literal["main", "exchange"]
"""Computations of one lane run one after the other, and in parallel with those of the other lane: "main" is for
gradients and updates, "exchange" for sums that groups compute during backprop."""

Report = Callable[[int], None]
"""Computing code calls it with the number of elements of the result that are final."""


@dataclass(frozen=True, slots=True)
class Work:
    """The size of a computation, from which a simulation computes its duration. The real runtime measures it.

    Args:
        kind: "gradient", "apply", "copy", "reduce", "evaluate", ...: one of `simulation.KINDS`.
        samples: number of training samples that it processes.
        elems: number of vector elements that it processes.
        passes: for "gradient": how many minibatches it computes one after the other.
        brief: whether the work takes so little time (tens of microseconds) that a change of thread would cost more.
        elsewhere: whether another thread computes while the runtime's thread waits; the CPU seconds of the
            runtime's thread are then not counted.
        share: for a pass of a split model: the fraction of the whole model's arithmetic.
    """

    kind: str
    samples: int = 0
    elems: int = 0
    passes: int = 1
    brief: bool = False
    elsewhere: bool = False
    share: float = 1.0


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Prevents the call if it has not happened yet."""
        ...


class Storage(Protocol):
    """Files of a run. Paths are relative to the run directory."""

    def write(self, path: str, data: bytes) -> None:
        """Replaces a file atomically and durably: temp, fsync, rename. On error the old file stands."""
        ...

    def append(self, path: str, *records: bytes) -> int:
        """Adds records at a file's end in one write. Each record is written whole or not at all.

        Returns:
            Number of records written, from the first: fewer than requested if the disk became full.

        Raises:
            OSError: no record was written; the disk is full or broken.
        """
        ...

    def read(self, path: str) -> bytes:
        """The file's content. Raises FileNotFoundError."""
        ...

    def patch(self, path: str, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Writes pieces at their offsets in bytes into a file, and makes them durable. Creates the file if needed.

        Several nodes may patch one file at once. Not atomic: after a crash any part may be missing.

        Raises:
            FileNotFoundError: the folder does not exist; call `mkdir` first.
        """
        ...

    def read_at(self, path: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, fewer at the end of the file. Raises FileNotFoundError."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""
        ...

    def names(self, folder: str) -> list[str]:
        """Sorted names of the entries of a folder; empty if the folder does not exist."""
        ...

    def mkdir(self, folder: str) -> None:
        """Makes a folder, with its parents."""
        ...

    def sync(self, folder: str) -> None:
        """Makes the names in a folder durable."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Gives a file or folder another name, atomically. Durable once both parents are synced."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with its contents. Does nothing if there is none."""
        ...


class Runtime(ABC):
    """Time, tasks, compute, randomness and storage of one node."""

    node: str
    memory: Memory
    storage: Storage

    def __init__(self) -> None:
        self.stalls = Stalls()
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in order; the loop itself holds tasks only weakly

    @abstractmethod
    def now(self) -> int:
        """Monotonic time in nanoseconds. Only differences are meaningful."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds`."""

    @abstractmethod
    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls back on the loop after `seconds`."""

    def look(self) -> int:
        """Notes in `stalls` a stall of this node that has just ended, and returns the time."""
        return self.now()

    def expire_after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls back after `seconds` in which this node could hear its peers: see `left_s`.

        For deadlines of other nodes' actions; `call_later` is for actions of this node.
        """
        return _Expiry(self, seconds, callback)

    def left_s(self, since_ns: int, seconds: float) -> float:
        """Seconds for which a peer, last heard at `since_ns`, may still be silent, of `seconds` in all.

        Time in which this node itself stood still does not count: see `runtime.deadlines`.
        """
        return self.stalls.left_ns(since_ns, round(seconds * _NS), self.look()) / _NS

    def awake_ns(self) -> int:
        """As `now`, excluding the time in which this node stood still."""
        return self.look() - self.stalls.total_ns

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Starts a task, and keeps it alive. The caller must await it, or its failure is only logged."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def cancel_all(self) -> None:
        """Cancels every spawned task that still runs, in the order of their start."""
        for task in list(self._tasks):
            task.cancel()

    async def gather(self, *works: Awaitable[T]) -> list[T]:
        """Results in the order given. At the first failure the rest is cancelled and awaited."""
        return await gather(*works)

    async def within(self, seconds: float, work: Awaitable[T]) -> T:
        """Awaits `work`, cancelling it as `expire_after` says. Raises TimeoutError (the builtin)."""
        future = asyncio.ensure_future(work)
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            future.cancel()

        timer = self.expire_after(seconds, expire)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if expired and not (task and task.cancelling()):
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    @abstractmethod
    async def compute(
        self,
        fn: Callable[[Report], T],
        *,
        work: Work,
        reads: Sequence[Span] = (),
        writes: Sequence[Span] = (),
        milestones: Sequence[int] = (),
        on_progress: Report | None = None,
        shape_only: T | None = None,
        lane: Lane = "main",
    ) -> T:
        """Runs `fn(report)` off the loop (brief work: on it); `reads` and `writes` are lent to it until then.

        Computations of one node and lane run one after the other, in the order of the calls.
        Cancelling the awaiting task takes effect when `fn` has returned: memory is never
        given back while arithmetic still runs on it.

        Args:
            fn: the arithmetic. May call `report(elems)` with a growing number, from any thread.
            work: size of the computation, for simulations.
            reads: memory that no other code may write meanwhile.
            writes: memory that no other code may read or write meanwhile.
            milestones: the numbers that `fn` will report; a shape-only run reports these.
            on_progress: called on the loop with each number reported; by then the elements of
                `writes` below that number are given back.
            shape_only: value to return if no arithmetic is run.
            lane: see `Lane`.

        Raises:
            LentMemoryError: a range is lent already; nothing has run.
            BaseException: whatever `fn` raises.
        """

    @abstractmethod
    async def beside(self, fn: Callable[[], T], *, work: Work) -> T:
        """Runs `fn()` on a separate thread, in parallel with computations: for disks, which block.

        One call runs at a time. Like `compute`, it cannot be cancelled; the caller keeps the memory that it
        reads and writes. A shape-only simulation runs nothing and returns None.
        """

    @abstractmethod
    def random(self, purpose: str) -> random.Random:
        """A generator that depends only on the run's seed, the node and `purpose`."""

    @abstractmethod
    def process_metrics(self, role: str) -> list[Event]:
        """Records of CPU, memory and lateness of the process, as far as this runtime can measure them."""


class _Expiry:
    """A deadline, which stalls of this node postpone."""

    __slots__ = ("_begun_ns", "_callback", "_runtime", "_seconds", "_timer")

    def __init__(self, runtime: Runtime, seconds: float, callback: Callable[[], None]) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._callback = callback
        self._begun_ns = runtime.look()
        self._timer = runtime.call_later(seconds, self._due)

    def cancel(self) -> None:
        self._timer.cancel()

    def _due(self) -> None:
        left_s = self._runtime.left_s(self._begun_ns, self._seconds)
        if left_s > SLACK_S:
            self._timer = self._runtime.call_later(left_s, self._due)
        else:
            self._callback()


async def gather(*works: Awaitable[T]) -> list[T]:
    """See `Runtime.gather`."""
    futures = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*futures))
    except BaseException:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        raise


def awaited_later(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Keeps asyncio from logging the failure of a task that nobody has awaited.

    Code that awaits the task gets the failure. A node that has failed before, and has reported it, may never
    await the task.
    """
    task.add_done_callback(_seen)
    return task


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


class ComputeProgress:
    """A number that only grows, and tasks that wait for it: elements that are ready, chunks that have arrived.

    `fail` wakes all waiters, present and future, with an exception.
    """

    __slots__ = ("_failure", "_value", "_waiters")

    def __init__(self, value: int = 0) -> None:
        self._value = value
        self._failure: BaseException | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def value(self) -> int:
        """The current number."""
        return self._value

    def advance(self, value: int) -> None:
        """Raises the number; lower or equal values change nothing."""
        if value <= self._value:
            return
        self._value = value
        waiting = []
        for target, future in self._waiters:
            if target > value:
                waiting.append((target, future))
            elif not future.done():
                future.set_result(None)
        self._waiters = waiting

    def fail(self, error: BaseException) -> None:
        """Ends the growth: `error` is raised in all tasks that wait now or later."""
        self._failure = error
        waiters, self._waiters = self._waiters, []
        for _, future in waiters:
            if not future.done():
                future.set_exception(error)

    async def reached(self, value: int) -> None:
        """Returns once the number is at least `value`."""
        if self._value >= value:
            return
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((value, future))
        await future
