"""Real time: asyncio for waiting, a thread for each lane of arithmetic, the disk for files.

torch and numpy release the GIL in their kernels, so the loop serves the network while a gradient is
computed. `LoopLag` continuously measures how late the loop runs its timers.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from gradstream.memory import Memory, Span, borrow_all
from gradstream.memory.segments import SharedMemory
from gradstream.runtime.base import Lane, Report, Runtime, Storage, Timer, Work
from gradstream.runtime.deadlines import StallWatch
from gradstream.runtime.storage import DiskStorage, MemoryStorage
from gradstream.runtime.tasks import finish_despite_cancel, release_then
from gradstream.telemetry.events import CpuEvent, Event, LoopLagEvent, MemoryEvent

# ---- process metrics ---------------------------------------------------------------------
# Metrics of this process: how late its event loop is, and how much memory it uses.
#
# Measuring takes time on cores that backprop needs, so each measures only as often as its class says.


class LoopLag:
    """Measures how late timers fire, with ten samples a second: each sample wakes the process."""

    PERIOD_S = 0.1

    def __init__(self) -> None:
        self._late_s: list[float] = []

    async def watch(self) -> None:
        """Measures until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.PERIOD_S
            await asyncio.sleep(self.PERIOD_S)
            self._late_s.append(loop.time() - due)

    def take(self) -> tuple[float, float]:
        """(99th percentile, maximum) of the lateness in seconds since the previous call."""
        late, self._late_s = sorted(self._late_s), []
        if not late:
            return 0.0, 0.0
        return late[int(0.99 * (len(late) - 1))], late[-1]


class OwnMemory:
    """Measures `own_bytes` of this process, and its maximum.

    With shared memory the system takes long to answer: it visits all pages, 20 ms for a gigabyte. So
    this measures again when the resident memory, which is known at once, has changed by `CHANGE`, and
    otherwise for at most `SHARE_OF_TIME` of the time.

    Args:
        shared: see `own_bytes`.
        read: returns the bytes; takes `shared`.
        clock: returns seconds.
    """

    SHARE_OF_TIME = 1e-3
    CHANGE = 0.02

    def __init__(
        self,
        *,
        shared: bool,
        read: Callable[[bool], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peak_bytes = 0
        self._shared = shared
        self._read = read or (lambda shared: own_bytes(shared=shared))
        self._clock = clock
        self._due_s = 0.0
        self._resident_bytes = 0  # at the last measurement
        self._now_bytes = 0

    def take(self) -> int:
        """Bytes now, or at the last measurement."""
        resident_bytes = self._read(False)
        if not self._shared:
            self._now_bytes = resident_bytes
        elif self._is_due(resident_bytes):
            begun_s = self._clock()
            self._now_bytes, self._resident_bytes = self._read(True), resident_bytes
            ended_s = self._clock()
            self._due_s = ended_s + (ended_s - begun_s) / self.SHARE_OF_TIME
        self.peak_bytes = max(self.peak_bytes, self._now_bytes)
        return self._now_bytes

    def _is_due(self, resident_bytes: int) -> bool:
        changed_bytes = abs(resident_bytes - self._resident_bytes)
        return changed_bytes > self.CHANGE * resident_bytes or self._clock() >= self._due_s


def load_of_machine() -> float | None:
    """Mean number of threads on the machine that ran or waited for a core, over a minute; None if unknown."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def queued_s(thread: int | None) -> float | None:
    """Seconds in which a thread of this process was ready to run and had no core.

    Args:
        thread: native id of the thread (`threading.get_native_id`); None for none.

    Returns:
        None if the system does not count it: only Linux does.
    """
    if thread is None:
        return None
    try:
        _, waited_ns, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="utf-8").split()
        return int(waited_ns) / 1e9
    except (OSError, ValueError):
        return None


def own_bytes(*, shared: bool = False) -> int:
    """Bytes of resident memory of this process that belong to no file; 0 if the system does not report them.

    Args:
        shared: whether the process shares memory with others: a page that n processes have mapped then counts as 1/n
            (proportional set size), so that the sum over all processes is their common use.
    """
    names = ("Pss_Anon:", "Pss_Shmem:") if shared else ("RssAnon:", "RssShmem:")
    try:
        lines = (
            Path("/proc/self/smaps_rollup" if shared else "/proc/self/status")
            .read_text(encoding="utf-8")
            .splitlines()
        )
    except OSError:
        return own_bytes() if shared else 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


# ---- real --------------------------------------------------------------------------------

T = TypeVar("T")


class RealRuntime(Runtime):
    """The `Runtime` of a process.

    Args:
        seed: seed of the run; `random` depends on (seed, node, purpose).
        root: run directory; None keeps files in memory.
        durable: see `DiskStorage`.
        core: the thread for arithmetic that several nodes of this process share; None makes one. With a
            shared thread, CPU seconds count the node's arithmetic alone.
        memory: memory for the node's vectors; None is private memory, which no other process can map.

    Attributes:
        shares_thread: whether other nodes compute in this node's thread too; then nothing may wait in it.
    """

    def __init__(
        self,
        node: str,
        *,
        seed: int = 0,
        root: Path | None = None,
        durable: bool = True,
        core: Executor | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        self.node = node
        self.seed = seed
        self.memory = Memory() if memory is None else memory
        self.storage: Storage = MemoryStorage() if root is None else DiskStorage(root, durable=durable)
        self.lateness = LoopLag()
        self._watch = StallWatch(self.stalls, self.now)
        self._own_memory = OwnMemory(shared=isinstance(self.memory, SharedMemory))
        self.compute_s: defaultdict[str, float] = defaultdict(float)  # thread CPU seconds by kind of work
        self._num_running: Counter[Lane] = Counter()  # computations asked for and not completed
        self._thread: int | None = None  # of `_core`, if it belongs to this node alone
        self.shares_thread = core is not None
        self._core = core or ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=f"{node}-compute", initializer=self._began
        )
        self._exchange = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{node}-exchange")
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{node}-disk")

    def _began(self) -> None:
        self._thread = threading.get_native_id()

    def now(self) -> int:
        """Nanoseconds of the monotonic clock."""
        return time.monotonic_ns()

    @override
    def look(self) -> int:
        return self._watch.look()

    async def sleep(self, seconds: float) -> None:
        """See `Runtime.sleep`."""
        await asyncio.sleep(seconds)

    @override
    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)

    def random(self, purpose: str) -> random.Random:
        """See `Runtime.random`."""
        return random.Random(f"{self.seed}/{self.node}/{purpose}")

    def process_metrics(self, role: str) -> list[Event]:
        """CPU seconds and memory of this process, the lateness of its loop, and the load of the machine."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        p99_s, max_s = self.lateness.take()
        vectors = dict(self.memory.allocated_bytes)
        own_bytes = self._own_memory.take()
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        user_s, system_s = usage.ru_utime, usage.ru_stime
        if self.shares_thread:
            user_s, system_s = sum(self.compute_s.values()), 0.0
        return [
            CpuEvent(
                role=role,
                user_s=user_s,
                system_s=system_s,
                compute_s=dict(self.compute_s),
                queued_s=queued_s(self._thread),
                load=load_of_machine(),
                cores=os.cpu_count(),
            ),
            MemoryEvent(
                role=role,
                peak_bytes=usage.ru_maxrss * unit_bytes,
                peak_own_bytes=self._own_memory.peak_bytes,
                own_bytes=own_bytes,
                vectors_bytes=vectors,
            ),
            LoopLagEvent(role=role, p99_ms=1e3 * p99_s, max_ms=1e3 * max_s),
        ]

    def close(self) -> None:
        """Ends the threads of this runtime."""
        self._disk.shutdown(wait=False, cancel_futures=True)
        self._exchange.shutdown(wait=False, cancel_futures=True)
        if not self.shares_thread:
            self._core.shutdown(wait=False, cancel_futures=True)

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
        """See `Runtime.compute`: runs on the lane's thread."""
        del milestones, shape_only  # for simulations
        loop = asyncio.get_running_loop()
        core = self._core if lane == "main" else self._exchange
        # Computations queue for one thread, so they do not conflict with each other.
        with borrow_all(reads, writes, to=f"{self.node}/{work.kind}", queue=core) as loans:
            progress = None if on_progress is None else release_then(loans, on_progress)

            def report(elems: int) -> None:
                if progress is not None:
                    loop.call_soon_threadsafe(progress, elems)

            def run() -> T:
                begun = time.thread_time()
                try:
                    return fn(report)
                finally:
                    if not work.elsewhere:
                        self.compute_s[work.kind] += time.thread_time() - begun

            if work.brief and not self._num_running[lane]:  # never beside the lane's own thread
                return run()
            self._num_running[lane] += 1
            try:
                return await finish_despite_cancel(loop.run_in_executor(core, run))
            finally:
                self._num_running[lane] -= 1

    async def beside(self, fn: Callable[[], T], *, work: Work) -> T:
        """See `Runtime.beside`."""

        def run() -> T:
            begun = time.thread_time()
            try:
                return fn()
            finally:
                self.compute_s[work.kind] += time.thread_time() - begun

        return await finish_despite_cancel(asyncio.get_running_loop().run_in_executor(self._disk, run))
