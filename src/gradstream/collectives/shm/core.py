"""Collectives in place between processes of one host: a rank reads the others' vectors where they lie.

`SharedCore` joins the group, carries operations out step by step (`Steps`), and leaves the group.
`SharedOperations` says what an operation does. `SharedGroup` runs operations beside backprop.
"""

from __future__ import annotations

import os
import weakref
from threading import Lock
from types import TracebackType

import torch

from gradstream.collectives.shm.barrier import HostBarrier, Peer, PeerFailure
from gradstream.collectives.shm.operations import SharedOperations
from gradstream.collectives.shm.rendezvous import (
    BEATS,
    BLOCK_BYTES,
    ControlBlock,
    RendezvousMembers,
    available,
    meet,
)
from gradstream.collectives.shm.steps import Steps
from gradstream.collectives.shm.vectors import Vectors
from gradstream.errors import ClosedError, ConfigError, GradstreamError
from gradstream.memory import Span, Vector
from gradstream.memory.segments import Segment


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
        """Leaves the group. Ranks that wait for this one fail, and so does an operation under way here.

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
