"""`SharedGroup`: collectives in place between processes of one host, beside backprop.

`SharedCore` carries operations out in the order of their calls. A short operation runs on the caller's thread as
long as no rank has to wait, since a hop to another thread and back takes ten times as long. A long operation, one
for which other ranks are late by more than some microseconds, and one that is called meanwhile, run on a thread of
their own beside the node's loop and its arithmetic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from gradstream.collectives.shm.core import SharedCore
from gradstream.collectives.shm.rendezvous import RendezvousMembers
from gradstream.collectives.shm.steps import Steps, finish
from gradstream.errors import ClosedError, PeerLostError
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Runtime, Timer
from gradstream.runtime.tasks import finish_despite_cancel

T = TypeVar("T")

BEATS_PER_DEADLINE = 8
HOLD_NS = 1_000_000
"""Time that operations may take on the event loop in all before it runs other tasks."""


class SharedGroup:
    """A `Group` of processes that share memory; made by `join`.

    Besides the protocol's operations it has `barrier`.

    Ranks read spans of vectors from `allocate` in place. A sum over all ranks' spans of such a vector can be
    read until the next operation on the same elements. An operation that is cancelled breaks the group, and
    so does `close` while one is under way.
    """

    shares_memory = True

    def __init__(self, runtime: Runtime, core: SharedCore, beat_s: float) -> None:
        self.rank = core.rank
        self.size = core.size
        self.names: Sequence[str] = core.names
        self._runtime = runtime
        self._core = core
        self._beat_s = beat_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{runtime.node}-exchange")
        # For each vector of the group: the vector that holds its sums, once one has been returned.
        self._sums: dict[Vector, Vector | None] = {}
        self._timer: Timer | None = None
        self._running: Future[Any] | None = None  # the last operation that was given to the thread
        self._on_loop_ns = 0

    @classmethod
    async def join(cls, runtime: Runtime, members: RendezvousMembers, *, deadline_s: float) -> SharedGroup:
        """Meets the other ranks; returns once all are there.

        Args:
            runtime: runtime of this rank's node.
            members: the ranks that are to meet, and which of them this is.
            deadline_s: how long an awaited rank may show no sign of life, in seconds. A rank whose event
                loop runs shows one, however long its step takes.

        Raises:
            DeadlineError, PeerLostError: names a rank that has not come, or has gone.
            ConfigError: this system has no such memory, or a rank was given other names.
        """
        group = cls(runtime, SharedCore(members, deadline_s=deadline_s), deadline_s / BEATS_PER_DEADLINE)
        try:
            await group._threaded(group._core.join)
        except BaseException:
            await group.close()
            raise
        group._beat()
        return group

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """See `Group.allocate`."""
        vector = self._core.allocate(elems, dtype, name, lead_bytes=lead_bytes)
        self._sums[vector] = None
        allocated_bytes = self._runtime.memory.allocated_bytes
        allocated_bytes[name] = allocated_bytes.get(name, 0) + vector.tensor.nbytes
        return vector

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `Group.common`, and `SharedCore.common`: one vector of zeros that all ranks have."""
        return await self._threaded(lambda: self._core.common(elems, dtype, name))

    async def allreduce(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.allreduce`, and `SharedCore.allreduce` for how long the result can be read."""
        sums = self._sums.get(span.vector)
        loan = span.vector.borrow(span.start, span.stop, write=True, to="allreduce")
        try:
            steps, brief = self._core.allreduce(span, weight=weight), self._core.is_brief(span)
            if sums is None:
                result = await self._run(steps, brief)
            else:  # a caller may still read the last sum
                with sums[span.start : span.stop].borrowed(write=True, to="allreduce"):
                    result = await self._run(steps, brief)
        finally:
            span.vector.give_back(loan)
        if span.vector in self._sums and result.vector is not span.vector:
            self._sums[span.vector] = result.vector
        return result

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.reduce_scatter`."""
        with span.borrowed(write=True, to="reduce-scatter"):
            steps = self._core.reduce_scatter(span, weight=weight)
            return await self._run(steps, self._core.is_brief(span))

    async def all_gather(self, span: Span) -> None:
        """See `Group.all_gather`. In a common vector it moves nothing, and only waits for all ranks."""
        with span.borrowed(write=True, to="all-gather"):
            await self._run(self._core.all_gather(span), self._core.is_brief(span, moves=True))

    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        """See `Group.broadcast`. In a common vector it moves nothing, and only waits for all ranks."""
        with span.borrowed(write=True, to="broadcast"):
            steps = self._core.broadcast(span, root=root)
            await self._run(steps, self._core.is_brief(span, moves=True))

    async def barrier(self) -> None:
        """Returns once all ranks have called it. Then this rank can read what they wrote before."""
        await self._run(self._core.barrier(), brief=True)

    def abandon(self, error: PeerLostError) -> None:
        """See `Group.abandon`: leaves, by which all others learn of it."""
        del error
        self._core.close()

    async def close(self) -> None:
        """See `Group.close`. Vectors stay for as long as somebody holds them."""
        if self._timer is not None:
            self._timer.cancel()
        self._core.close()
        self._sums.clear()
        self._thread.shutdown(wait=False)

    async def _run(self, steps: Steps[T], brief: bool) -> T:
        """Runs a brief operation here until it has to wait, if the thread is free; else on the thread."""
        if brief and (self._running is None or self._running.done()):
            begun_ns = self._runtime.now()
            try:
                next(steps)
            except StopIteration as done:
                result: T = done.value
                await self._yield_after(self._runtime.now() - begun_ns)
                return result
        return await self._threaded(partial(finish, steps))

    async def _yield_after(self, duration_ns: int) -> None:
        """Lets other tasks run now and then: operations that never wait would keep the loop to themselves."""
        self._on_loop_ns += duration_ns
        if self._on_loop_ns > HOLD_NS:
            self._on_loop_ns = 0
            await self._runtime.sleep(0)

    async def _threaded(self, operation: Callable[[], T]) -> T:
        try:
            self._running = running = self._thread.submit(operation)
        except RuntimeError:  # the thread has ended
            raise ClosedError(
                f"{self.names[self.rank]} has left its group, which carries out no more operations: form another"
            ) from None
        future = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._core.close()  # or it would wait for the others until the deadline
            await finish_despite_cancel(asyncio.gather(future, return_exceptions=True))
            raise

    def _beat(self) -> None:
        self._core.beat()
        self._timer = self._runtime.call_later(self._beat_s, self._beat)
