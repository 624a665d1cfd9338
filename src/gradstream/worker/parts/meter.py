"""`PartMeter`: divides the time that a part spends on gradients into computing and waiting for other parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from gradstream.memory import Span
from gradstream.runtime.base import Report, Runtime, Work
from gradstream.telemetry.events import PartEvent

T = TypeVar("T")


class PartMeter:
    """Counts the seconds of one process of a split replica.

    All time of a gradient in which the process computes nothing is waiting: for values, for gradients, or for what
    the other parts report.

    Args:
        runtime: of the process.
        rank: rank of the replica.
        part: the part that the process holds.
    """

    def __init__(self, runtime: Runtime, rank: int, part: int) -> None:
        self._runtime = runtime
        self._rank = rank
        self._part = part
        self._own_ns = 0  # of the gradient in progress
        self._minibatches = self._compute_ns = self._wait_ns = 0

    @contextmanager
    def minibatch(self, begun_ns: int) -> Iterator[None]:
        """Measures the body, which computes one gradient, from `begun_ns` to the end of the body."""
        self._own_ns = 0
        yield
        self._minibatches += 1
        self._compute_ns += self._own_ns
        self._wait_ns += self._runtime.now() - begun_ns - self._own_ns

    async def compute(
        self, fn: Callable[[], T], *, work: Work, reads: Sequence[Span] = (), writes: Sequence[Span] = ()
    ) -> T:
        """See `Runtime.compute`."""
        return await self.compute_in_steps(lambda _: fn(), work=work, reads=reads, writes=writes)

    async def compute_in_steps(self, fn: Callable[[Report], T], *, work: Work, **how: Any) -> T:
        """The same of a function that reports what is final; `how` are arguments of `Runtime.compute`."""
        begun_ns = self._runtime.now()
        result: T = await self._runtime.compute(fn, work=work, **how)
        self._own_ns += self._runtime.now() - begun_ns
        return result

    async def compute_here(
        self, fn: Callable[[], T], *, work: Work, reads: Sequence[Span] = (), writes: Sequence[Span] = ()
    ) -> T:
        """As `compute`, in the calling thread, which holds the memory already."""
        del work, reads, writes
        return self.count(fn)[0]

    def count(self, fn: Callable[[], T]) -> tuple[T, float]:
        """Computes in the calling thread. Returns the result, and the seconds."""
        begun_ns = self._runtime.now()
        result = fn()
        own_ns = self._runtime.now() - begun_ns
        self._own_ns += own_ns
        return result, own_ns / 1e9

    def report(self) -> list[PartEvent]:
        """What was counted since the last call; nothing if no gradient was done."""
        if not self._minibatches:
            return []
        event = PartEvent(
            rank=self._rank,
            part=self._part,
            minibatches=self._minibatches,
            compute_s=self._compute_ns / 1e9,
            wait_s=self._wait_ns / 1e9,
        )
        self._minibatches = self._compute_ns = self._wait_ns = 0
        return [event]
