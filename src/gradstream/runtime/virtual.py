"""Virtual time: many nodes in one thread, on a clock that jumps to the next event.

When no task can run, the clock jumps to the earliest timer and fires it: hours pass in milliseconds.
Time is in integer nanoseconds. Timers for the same instant fire in an order drawn from the seed: one seed
gives one history, bit for bit, and another seed gives another interleaving. Where no event is left, the run
ends with a `DeadlockError` that lists the waiting tasks.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import random
import selectors
import signal
import threading
from asyncio.tasks import _enter_task, _leave_task
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from gradstream.errors import InternalError
from gradstream.memory import Memory, Span, borrow_all
from gradstream.runtime.base import Lane, Report, Runtime, Storage, Timer, Work
from gradstream.runtime.deadlines import Stalls
from gradstream.runtime.simulation import SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.runtime.tasks import finish_despite_cancel, release_then
from gradstream.telemetry.events import CpuEvent, Event, MemoryEvent

# ---- nesting -----------------------------------------------------------------------------
# One event loop inside another, as in a notebook's cell that runs a simulation.
#
# asyncio lets a thread run one loop at a time, because the outer loop stands still while the inner one waits. A loop
# on virtual time waits for nothing outside of it: for the outer loop it is a function that takes some time.


@contextmanager
def standing_still() -> Iterator[None]:
    """Suspends the loop that runs in this thread, if there is one: another loop can run in the context.

    Ctrl-C raises KeyboardInterrupt meanwhile. asyncio would cancel a task instead, which would have to wait
    for the suspended loop.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        _leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        with _interruptible():
            yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            _enter_task(loop, task)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Replaces asyncio's own handler of Ctrl-C; any other handler stays, also one that ignores it."""
    before = signal.getsignal(signal.SIGINT)
    waits = getattr(getattr(before, "func", before), "__module__", "").startswith("asyncio")
    if not waits or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- suspension --------------------------------------------------------------------------
# `Suspension`: a simulated node stands still, as a process that was stopped, or with its whole machine.

READ_NS = 1_000_000
"""When the node goes on, expired timers fire first; this much later it reads the waiting frames."""


class _Clock(Protocol):
    now_ns: int

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> object: ...


class Suspension:
    """Holds the timers, results and frames of a node while it stands still.

    Args:
        clock: the clock of the simulation.
        stalls: the node's; they take each suspension that the node notices.

    Attributes:
        active: whether the node currently stands still.
        num_held: number of timers, results and frames that were held so far.
        missed_ns: time in which the node's own clock stood still as well.
    """

    def __init__(self, clock: _Clock, stalls: Stalls) -> None:
        self.active = False
        self.num_held = 0
        self.missed_ns = 0
        self._clock = clock
        self._stalls = stalls
        self._since_ns = 0
        self._late: list[Callable[[], None]] = []
        self._unread = deque[Callable[[], None]]()

    def begin(self) -> None:
        """Makes the node stand still from now on."""
        self.active, self._since_ns = True, self._clock.now_ns

    def end(self, *, noticed: bool = True, with_clock: bool = False) -> None:
        """Makes the node go on.

        Args:
            noticed: whether it knows that it stood still; if not, it believes that others were silent.
            with_clock: whether its clock stood still too, so that there is nothing to notice, and timers are due later.
        """
        if not self.active:
            return
        now_ns = self._clock.now_ns
        if with_clock:
            self.missed_ns += now_ns - self._since_ns
        elif noticed:
            self._stalls.add(self._since_ns - self.missed_ns, now_ns - self.missed_ns)
        self._release()
        self._clock.call_at(now_ns + READ_NS, self._read)

    def kill(self) -> None:
        """Ends it for good: nobody reads the frames any more."""
        self._unread.clear()
        self._release()

    def _release(self) -> None:
        self.active = False
        late, self._late = self._late, []
        for call in late:
            call()

    def act(self, call: Callable[[], None]) -> None:
        """Calls now, or when the node goes on."""
        if self.active:
            self.num_held += 1
            self._late.append(call)
        else:
            call()

    def read(self, deliver: Callable[[], None]) -> None:
        """Delivers a frame now, or behind those that wait to be read."""
        if self.active or self._unread:
            self.num_held += self.active
            self._unread.append(deliver)
        else:
            deliver()

    def _read(self) -> None:
        while self._unread and not self.active:
            self._unread.popleft()()


# ---- virtual -----------------------------------------------------------------------------

T = TypeVar("T")


class DeadlockError(InternalError):
    """All tasks wait, and no timer is left: each waits for another task that waits too."""


class _ClockTimer:
    """A pending call; cancelled timers stay in the heap and fire nothing."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None

    @property
    def cancelled(self) -> bool:
        return self.callback is None


class Clock:
    """Virtual nanoseconds and the timers on them.

    Args:
        rng: draws the order of timers that are due at the same nanosecond.
    """

    def __init__(self, rng: random.Random) -> None:
        self.now_ns = 0
        self.num_fired = 0
        self._rng = rng
        self._count = 0
        self._heap: list[tuple[int, float, int, _ClockTimer]] = []

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> _ClockTimer:
        """Calls back when the clock reaches `when_ns`; for a past time, at the next jump of the clock."""
        timer = _ClockTimer(callback)
        self._count += 1
        entry = (max(when_ns, self.now_ns), self._rng.random(), self._count, timer)
        heapq.heappush(self._heap, entry)
        return timer

    def advance(self) -> bool:
        """Jumps to the next timer and fires it; False when there is none."""
        while self._heap:
            when_ns, _, _, timer = heapq.heappop(self._heap)
            callback = timer.callback
            if callback is None:
                continue
            assert when_ns >= self.now_ns
            self.now_ns = when_ns
            self.num_fired += 1
            callback()
            return True
        return False


class _JumpingSelector(selectors.DefaultSelector):
    """Where asyncio would sleep until something happens, the clock jumps."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if (timeout is None or timeout > 0) and not self._clock.advance():
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(asyncio.get_running_loop()))
            raise DeadlockError(
                f"all tasks wait, and no timer is left, at {self._clock.now_ns / 1e9:.6f} s of virtual time: "
                f"{', '.join(waiting)}; a script or strategy of yours awaits what never comes, or gradstream has a bug"
            )
        return []


class _JumpingLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool

    def __init__(self, clock: Clock) -> None:
        super().__init__(_JumpingSelector(clock))
        self._clock = clock

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now_ns / 1e9

    def _run_once(self) -> None:
        """As in asyncio, without the looks at files and at timers of asyncio, of which a simulation has none."""
        ready = self._ready
        if self._scheduled or not (ready or self._stopping or self._clock.advance()):
            super()._run_once()  # type: ignore[misc]  # private
            return
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Logs failures of tasks that nobody awaited, except Ctrl-C: `run_until_complete` has raised it."""
        if not isinstance(context.get("exception"), KeyboardInterrupt | SystemExit):
            super().call_exception_handler(context)


class VirtualCluster:
    """The machines of a simulation: one clock, one seed, one disk, a runtime per node.

    Args:
        seed: seed of the schedule and of all random numbers.
        config: durations and network.
        storage: the disk; None is an empty one.
    """

    def __init__(
        self, seed: int = 0, config: SimulationConfig | None = None, storage: Storage | None = None
    ) -> None:
        self.seed = seed
        self.config = config or SimulationConfig()
        self.clock = Clock(self.random("schedule"))
        self.storage: Storage = MemoryStorage() if storage is None else storage
        self._runtimes: dict[str, VirtualRuntime] = {}

    def hand(self, node: str, deliver: Callable[[], None]) -> None:
        """Delivers something to a node, at once or when it reads again."""
        runtime = self._runtimes.get(node)
        if runtime is None:
            deliver()
        else:
            runtime.suspension.read(deliver)

    def random(self, purpose: str) -> random.Random:
        """A generator that depends on the seed and `purpose` alone."""
        return random.Random(f"{self.seed}/{purpose}")

    def runtime(self, node: str) -> VirtualRuntime:
        """The runtime of a node, made at first use."""
        if node not in self._runtimes:
            self._runtimes[node] = VirtualRuntime(node, self)
        return self._runtimes[node]

    def replace(self, node: str) -> VirtualRuntime:
        """The runtime of a new process, which may replace a killed node."""
        self._runtimes.pop(node, None)
        return self.runtime(node)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine, and all it starts, to its end.

        Tasks that are left over are cancelled. Raises what `work` raises, or `DeadlockError`.
        """
        with self.looping() as run:
            result: T = run(work)
            return result

    @contextmanager
    def looping(self) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
        """Yields a function that runs a coroutine to its end; between two calls, all tasks stand still.

        The end of the context cancels tasks that are left over. This works inside a running event loop
        too: that loop stands still meanwhile.
        """
        loop = _JumpingLoop(self.clock)

        def run(work: Coroutine[Any, Any, Any]) -> Any:
            with standing_still():
                return loop.run_until_complete(work)

        try:
            yield run
        finally:
            try:
                self._cancel_rest(loop)
            finally:
                loop.close()

    def _cancel_rest(self, loop: asyncio.AbstractEventLoop) -> None:
        rest = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        for task in rest:
            task.cancel()
        if rest:
            try:
                with standing_still():
                    loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            except DeadlockError:
                pass  # the first error is the one to report


class VirtualRuntime(Runtime):
    """The `Runtime` of one simulated node: one core for each lane, random streams of the node, the common clock.

    Attributes:
        suspension: whether the node stands still.
        slowness: factor on the duration of its computations from now on.
        dead: whether it was killed.
    """

    def __init__(self, node: str, cluster: VirtualCluster) -> None:
        super().__init__()
        self.node = node
        self.cluster = cluster
        self.memory = Memory(shape_only=cluster.config.shape_only)
        self.storage: Storage = cluster.storage
        self.compute_s: defaultdict[str, float] = defaultdict(float)
        self._cores: dict[Lane, asyncio.Lock] = {"main": asyncio.Lock(), "exchange": asyncio.Lock()}
        self._disk = asyncio.Lock()
        self._counts: Counter[str] = Counter()
        self.suspension = Suspension(cluster.clock, self.stalls)
        self.slowness = 1.0
        self.dead = False

    def now(self) -> int:
        """Virtual nanoseconds, without those in which the node's clock stood still."""
        return self.cluster.clock.now_ns - self.suspension.missed_ns

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """See `Runtime.call_later`. A killed node's calls do not happen."""
        clock, due_ns = self.cluster.clock, self.now() + max(0, round(seconds * 1e9))

        def call() -> None:
            if self.suspension.active:
                self.suspension.act(call)
            elif (left_ns := due_ns - self.now()) > 0:  # its clock has stood still
                clock.call_at(clock.now_ns + left_ns, call)
            elif not self.dead and not timer.cancelled:
                callback()

        timer = clock.call_at(clock.now_ns + due_ns - self.now(), call)
        return timer

    async def sleep(self, seconds: float) -> None:
        """Lets virtual time pass."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(seconds, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            timer.cancel()

    def random(self, purpose: str) -> random.Random:
        """See `Runtime.random`."""
        return self.cluster.random(f"{self.node}/{purpose}")

    def process_metrics(self, role: str) -> list[Event]:
        """Virtual compute seconds by kind of work, and bytes of the node's vectors."""
        used = dict(self.compute_s)
        vectors = dict(self.memory.allocated_bytes)
        total = sum(vectors.values())
        return [
            CpuEvent(role=role, user_s=sum(used.values()), system_s=0.0, compute_s=used),
            MemoryEvent(
                role=role,
                peak_bytes=total,
                peak_own_bytes=total,
                own_bytes=total,
                vectors_bytes=vectors,
            ),
        ]

    def kill(self) -> None:
        """Ends the node as if its process had died: cancels its tasks; its timers never fire.

        Break its connections first (`MemoryNetwork.kill`), or its clean-up code would send messages.
        """
        self.dead = True
        self.suspension.kill()
        self.cancel_all()

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
        """See `Runtime.compute`: the arithmetic runs now, and its duration passes on the virtual clock."""
        core = self._cores[lane]
        # Computations queue for one core, so they do not conflict with each other.
        with borrow_all(reads, writes, to=f"{self.node}/{work.kind}", queue=core) as loans:
            async with core:
                reported: list[int] = []
                if self.cluster.config.shape_only:
                    result: T = shape_only  # type: ignore[assignment]  # the caller names a T
                    reported = list(milestones)
                else:
                    result = fn(reported.append)
                seconds = self._price(work)
                if on_progress is not None:
                    self._schedule_progress(reported, milestones, seconds, release_then(loans, on_progress))
                await finish_despite_cancel(self._after(seconds))
                return result

    async def beside(self, fn: Callable[[], T], *, work: Work) -> T:
        """See `Runtime.beside`: runs now; its duration passes on the virtual clock, in parallel with the core."""
        async with self._disk:
            result: T = None if self.cluster.config.shape_only else fn()  # type: ignore[assignment]
            await finish_despite_cancel(self._after(self._price(work)))
            return result

    def _price(self, work: Work) -> float:
        count = self._counts[work.kind]
        self._counts[work.kind] += 1
        rng = self.random(f"{work.kind}/{count}")
        seconds = self.cluster.config.seconds(self.node, work, rng, count) * self.slowness
        self.compute_s[work.kind] += seconds
        return seconds

    def _after(self, seconds: float) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._later(round(seconds * 1e9), lambda: None if done.done() else done.set_result(None))
        return done

    def _later(self, after_ns: int, call: Callable[[], None]) -> None:
        """Calls even if the node is dead by then, since arithmetic cannot be interrupted."""
        clock = self.cluster.clock
        clock.call_at(clock.now_ns + after_ns, partial(self.suspension.act, call))

    def _schedule_progress(
        self, reported: Sequence[int], milestones: Sequence[int], seconds: float, on_progress: Report
    ) -> None:
        config = self.cluster.config
        total = reported[-1] if reported else 0
        for elems in reported[:-1]:
            bucket = bisect.bisect_left(milestones, elems)
            after_ns = round(seconds * config.offset(bucket, elems / total) * 1e9)
            self._later(after_ns, partial(on_progress, elems))
        if reported:  # at the very end, and never after the result
            self._later(round(seconds * 1e9) - (1 if seconds > 0 else 0), partial(on_progress, total))
