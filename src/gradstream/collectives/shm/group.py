"""`SharedGroup`: collectives in place between processes of one host, beside backprop.

`SharedCore` carries operations out in the order of their calls. A short operation runs on the caller's thread as
long as no rank has to wait, since a hop to another thread and back takes ten times as long. A long operation, one
for which other ranks are late by more than some microseconds, and one that is called meanwhile, run on a thread of
their own beside the node's loop and its arithmetic.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import torch

from gradstream.collectives.shm.barrier import HostBarrier, Peer, PeerFailure, Steps, finish
from gradstream.collectives.shm.operations import SharedOperations
from gradstream.collectives.shm.rendezvous import (
    BEATS,
    BLOCK_BYTES,
    ControlBlock,
    RendezvousMembers,
    available,
    meet,
)
from gradstream.collectives.shm.vectors import Vectors
from gradstream.errors import ClosedError, ConfigError, GradstreamError, PeerLostError
from gradstream.memory import Span, Vector
from gradstream.memory.segments import Segment
from gradstream.runtime.base import Runtime, Timer
from gradstream.runtime.tasks import finish_despite_cancel

# ---- core --------------------------------------------------------------------------------
# Collectives in place between processes of one host: a rank reads the others' vectors where they lie.
#
# `SharedCore` joins the group, carries operations out step by step (`Steps`), and leaves the group.
# `SharedOperations` says what an operation does. `SharedGroup` runs operations beside backprop.


class SharedCore:
    """One rank of a group of processes on the same host, which run collective operations in shared memory.

    As with MPI, every rank calls the same operations in the same order, with the same lengths. An operation is a
    generator of steps: run it to its end (`finish` does that and blocks) before the next one begins. If a caller
    abandons an operation, or an error occurs in it, the group breaks: every later operation of any rank raises.

    Methods are not thread-safe, except for `close` and `beat`.

    Args:
        members: names of all ranks, and the rank of this process.
        deadline_s: how long this rank waits for another one that neither arrives at the operation nor calls
            `beat`, in seconds. Then the operation raises DeadlineError.

    Raises:
        ConfigError: the system is not Linux on x86-64.
    """

    _operations: SharedOperations  # since `join`

    def __init__(self, members: RendezvousMembers, *, deadline_s: float) -> None:
        if not available():
            raise ConfigError(
                "algorithms 'shared' and 'hierarchical' need Linux on x86-64, which this machine is not: take "
                "algorithm='auto', or another one by name"
            )
        self.rank = members.rank
        self.size = len(members.names)
        self.names = tuple(members.names)
        self._members = members
        self._deadline_s = deadline_s
        self._segment = Segment.create(BLOCK_BYTES, f"gradstream {members.me} control block")
        self._block = ControlBlock(self._segment)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = Lock()
        self._guard = _Guard(self)
        self._peers: dict[int, Peer] = {}
        self._joined = False
        self._failure: GradstreamError | None = ClosedError(f"{members.me}: its group has not been joined")
        self._closed = False
        _live.add(self)

    # ---- joining and leaving ---------------------------------------------------------------------

    def join(self) -> None:
        """Meets the other ranks; returns once all are there.

        Raises:
            DeadlineError, PeerLostError: names a rank that has not come, or has gone.
            ConfigError: a rank was given other names than this one.
        """
        with self._lock:
            met = meet(self._members, self._segment, self._deadline_s, self._stop)
            for rank, (connection, segment) in sorted(met.items()):
                self._peers[rank] = Peer(rank, self.names[rank], connection, ControlBlock(segment))
                segment.close()
            self._segment.close()
            peers = list(self._peers.values())
            barrier = HostBarrier(self.rank, self.names, self._block, peers, self._deadline_s, self._stop)
            blocks = [self._peers[r].block if r in self._peers else self._block for r in range(self.size)]
            vectors = Vectors(self.rank, self.names, self._peers, barrier)
            self._operations = SharedOperations(self.rank, self.names, blocks, barrier, vectors)
            self._joined = True
            self._failure = None

    def close(self) -> None:
        """Leaves the group. Ranks that wait for this one fail, and so does an operation in progress here.

        Vectors stay as they are for as long as somebody holds them. Idempotent; may be called on any thread.
        """
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        with self._lock:
            if self._joined:
                self._operations.barrier.give_up(PeerFailure.LEFT, self.rank)
            self._failure = ClosedError(f"{self._members.me}: its group has been closed")
            self._release()

    def __enter__(self) -> SharedCore:
        self.join()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def forked(self) -> None:
        """Closes the connections in a child of this process: they belong to the parent and must end with it."""
        self._closed = True
        self._failure = ClosedError(
            f"{self._members.me}: its group belongs to the process that this one was forked from"
        )
        self._release()

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._segment.close()
        os.close(self._stop)
        if self._joined:
            self._operations.close()
        self._peers.clear()

    # ---- memory ----------------------------------------------------------------------------------

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """A vector of zeros that the other ranks can read, so that operations on its spans copy nothing.

        A sum over all ranks' spans of it can be read until the next operation on the same elements.

        Raises:
            ConfigError: the group does not sum this dtype.
        """
        self._check()
        return self._operations.vectors.make(elems, dtype, name, lead_bytes=lead_bytes)

    def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """One vector of zeros that all ranks have. Each rank asks for the same vectors, in the same order.

        All ranks see what one of them writes. The callers agree on which rank writes which elements, and which
        ranks read them meanwhile, by `barrier` or any other operation between writing and reading.

        Raises:
            PeerLostError, DeadlineError: rank 0, which makes the vector, is gone or silent.
            ConfigError: rank 0 has made another one.
        """
        with self._guard:
            return self._operations.vectors.common(elems, dtype, name)

    # ---- operations ------------------------------------------------------------------------------

    def barrier(self) -> Steps[None]:
        """Done once all ranks have called it. Raises as `allreduce`."""
        with self._guard:
            yield from self._operations.wait_for_all()

    def allreduce(self, span: Span, *, weight: float = 1.0) -> Steps[Span]:
        """Sums up Σ_r weight_r · span_r over all ranks, in their order. All get the same bits.

        Args:
            span: this rank's part. Its contents are undefined afterwards unless it is returned.
            weight: factor of this rank's part; 1 for integers.

        Returns:
            The span that holds the sum: `span` itself, or memory of the group that all ranks read. For a
            vector of the group it can be read until the next operation on the same elements, for any other
            vector until the next operation.

        Raises:
            PeerLostError, DeadlineError: names the rank that is dead or silent; nothing is returned.
            ConfigError: ranks ask for different things.
            ClosedError: the group has been closed.
        """
        operations = self._operations
        quick = operations.quick.get((span.vector, span.start, span.stop))
        if quick is None:
            operations.check_sum(span, weight)
        with self._guard:
            if quick is None:
                return (yield from operations.allreduce(span, weight))
            yield from operations.finish_small(span, quick(weight))
            return span

    def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Steps[Span]:
        """Sums up as `allreduce`, but this rank gets only its own `slice_of` the sum, in its own span."""
        self._operations.check_sum(span, weight)
        with self._guard:
            return (yield from self._operations.reduce_scatter(span, weight))

    def all_gather(self, span: Span) -> Steps[None]:
        """Gives each rank's own `slice_of` the span to every rank. In a common vector it only waits for all."""
        with self._guard:
            yield from self._operations.all_gather(span)

    def broadcast(self, span: Span, *, root: int = 0) -> Steps[None]:
        """Copies the span of rank `root` into that of every rank. In a common vector it only waits for all."""
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast(root={root}): expected a rank from 0 to {self.size - 1}")
        with self._guard:
            yield from self._operations.broadcast(span, root)

    def is_brief(self, span: Span, *, moves: bool = False) -> bool:
        """See `SharedOperations.is_brief`."""
        return self._operations.is_brief(span, moves=moves)

    def beat(self) -> None:
        """Shows ranks that wait for this one that it is alive while it computes. May be called on any thread."""
        self._block.words[BEATS] += 1

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def break_(self, error: BaseException) -> None:
        """Breaks the group after an error in an operation, here and at the other ranks."""
        self._operations.clear()
        if self._failure is None:
            self._operations.barrier.give_up(PeerFailure.LEFT, self.rank)  # the first reason stands
            if not isinstance(error, GradstreamError):
                why = f"({type(error).__name__}: {error})"
                error = ClosedError(f"{self._members.me}: its group was given up {why}")
            self._failure = error


class _Guard:
    """Lets one operation run at a time, if the group is whole. An error in it breaks the group."""

    def __init__(self, core: SharedCore) -> None:
        self._core = core

    def __enter__(self) -> None:
        self._core._lock.acquire()
        if self._core._failure is not None:
            self._core._lock.release()
            self._core._check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._core.break_(error)
        self._core._lock.release()


_live: weakref.WeakSet[SharedCore] = weakref.WeakSet()


def _forget_in_child() -> None:
    for core in list(_live):
        if not core._closed:
            core.forked()


os.register_at_fork(after_in_child=_forget_in_child)


# ---- group -------------------------------------------------------------------------------

T = TypeVar("T")

BEATS_PER_DEADLINE = 8
HOLD_NS = 1_000_000
"""Time that operations may take on the event loop in all before it runs other tasks."""


class SharedGroup:
    """A `Group` of processes that share memory; made by `join`.

    Besides the protocol's operations it has `barrier`.

    Ranks read spans of vectors from `allocate` in place. A sum over all ranks' spans of such a vector can be
    read until the next operation on the same elements. An operation that is cancelled breaks the group, and
    so does `close` while one is in progress.
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
            deadline_s: how long an awaited rank may show no heartbeat, in seconds. A rank whose event
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
