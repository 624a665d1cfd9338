"""Collectives in place between processes of one host: a rank reads the others' vectors where they lie.

`SharedCore` carries operations out, step by step (`Steps`), or blocks until they are done (`allreduce_`);
`SharedGroup` runs them beside backprop.

An allreduce of a large vector: each rank says on its board where its part lies and comes to the barrier;
adds up its own slice of all parts into that slice of a result which lies beside rank 0's vector, for all to
read; and comes to the barrier again. Each element moves once, no rank copies anything. A small vector is
copied onto the board, and after one barrier every rank adds up all of it.

    allreduce of n elements, W ranks     barriers   read, written by each rank
    large                                2          n, n/W
    small                                1          (W+1)·n, 2n
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any

import torch

from gradstream.collectives.group import slice_of
from gradstream.collectives.shm.assembly import DONE, NOT_DONE, TURN
from gradstream.collectives.shm.barrier import HostBarrier, Peer, PeerFailure
from gradstream.collectives.shm.control_block import (
    BEATS,
    BOARD_BYTES,
    SLOT_BYTES,
    Call,
    ControlBlock,
    OperationCode,
    available,
)
from gradstream.collectives.shm.native import State, native
from gradstream.collectives.shm.rendezvous import RendezvousMembers, meet
from gradstream.collectives.shm.steps import Steps, finish
from gradstream.collectives.shm.vectors import Vectors, number_of
from gradstream.collectives.shm.weighted_sum import BLOCK_ELEMS, WeightedSum
from gradstream.errors import ClosedError, ConfigError, GradstreamError
from gradstream.memory import Span, Vector
from gradstream.memory.segments import Segment

__all__ = ["SharedCore"]

BRIEF_BYTES = 1 << 20
"""What is summed up of vectors up to this size takes a rank less than a tenth of a millisecond."""

_MAX_KEPT = 256


class SharedCore:
    """The ranks of a host, from one of them. One thread at a time, except for `close` and `beat`.

    Operations come twice: as steps, and as what blocks until these are done (`allreduce` and `allreduce_`).
    One that has begun holds the core until its steps are done; an abandoned one breaks the group.

    Every rank calls the same operations in the same order, with the same lengths. An error of an operation
    breaks the group, at all ranks: every operation after that raises the same.

    Args:
        party: who is to meet, and which of them this is.
        deadline_s: how long another rank may show no sign of life while it is awaited: neither come to the
            operation nor `beat`.

    Raises:
        ConfigError: this system cannot do it.
    """

    def __init__(self, party: RendezvousMembers, *, deadline_s: float) -> None:
        if not available():
            raise ConfigError(
                "collectives in shared memory need Linux on x86-64: use the algorithm 'auto', or one by name"
            )
        self.rank = party.rank
        self.size = len(party.names)
        self.names = tuple(party.names)
        self._party = party
        self._deadline_s = deadline_s
        self._segment = Segment.create(BOARD_BYTES, f"gradstream {party.me} board")
        self._board = ControlBlock(self._segment)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = Lock()
        self._guard = _Guard(self)
        self._peers: dict[int, Peer] = {}
        self._boards: list[ControlBlock] = []
        self._barrier: HostBarrier
        self._state: State
        self._small: dict[torch.dtype, Callable[[int, int, int, float], int]] = {}
        self._vectors: Vectors
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._quick: dict[tuple[Vector, int, int], Callable[[float], int]] = {}  # small allreduces by span
        self._sums: dict[tuple[Span, Span | None], tuple[list[Any], WeightedSum, Span]] = {}
        self._views: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        self._failure: GradstreamError | None = ClosedError(f"{party.me}: its group has not been joined")
        self._closed = False
        _live.add(self)

    # ---- joining and leaving ---------------------------------------------------------------------

    def join(self) -> None:
        """Meets the others; returns once all are there.

        Raises:
            DeadlineError, PeerLostError: naming a rank that has not come, or has gone.
            ConfigError: a rank means other ranks than this one does.
        """
        with self._lock:
            met = meet(self._party, self._segment, self._deadline_s, self._stop)
            for rank, (connection, segment) in sorted(met.items()):
                self._peers[rank] = Peer(rank, self.names[rank], connection, ControlBlock(segment))
                segment.close()
            self._segment.close()
            self._boards = [
                self._board if rank == self.rank else self._peers[rank].board for rank in range(self.size)
            ]
            peers = list(self._peers.values())
            self._barrier = HostBarrier(
                self.rank, self.names, self._board, peers, self._deadline_s, self._stop
            )
            self._state = self._barrier.state
            code = native()
            self._small = {} if code is None else code.small
            self._vectors = Vectors(self.rank, self.names, self._peers, self._barrier)
            self._failure = None

    def close(self) -> None:
        """Leaves the group: others that wait for this rank fail, an operation under way here does too.

        Vectors stay as they are for as long as somebody holds them. Idempotent, from any thread.
        """
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        with self._lock:
            if self._boards:
                self._barrier.give_up(PeerFailure.LEFT, self.rank)
            self._failure = ClosedError(f"{self._party.me}: its group has been closed")
            self._let_go()

    def __enter__(self) -> SharedCore:
        self.join()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def forked(self) -> None:
        """In a child of this process: the connections are the parent's, and must end with it."""
        self._closed = True
        self._failure = ClosedError(
            f"{self._party.me}: its group belongs to the process that this one was forked from"
        )
        self._let_go()

    def _let_go(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._segment.close()
        os.close(self._stop)
        if self._boards:
            self._vectors.clear()
        self._peers.clear()
        self._boards.clear()
        self._views.clear()
        self._quick.clear()
        self._sums.clear()

    # ---- memory ----------------------------------------------------------------------------------

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """A vector of zeros that the others can read: operations on its spans copy nothing.

        A sum over all ranks' spans of it stays to be read until the next operation on the same elements.

        Raises:
            ConfigError: a dtype that is not summed here.
        """
        self._check()
        return self._vectors.make(elems, dtype, name, lead_bytes=lead_bytes)

    def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """One vector of zeros that all ranks have. Each rank asks for the same, in the same order.

        What one rank writes all others see. Who writes which elements, and who reads them meanwhile, is
        for the callers to agree on: with `barrier`, or any other operation between writing and reading.

        Raises:
            PeerLostError, DeadlineError: rank 0, which makes it, is gone or silent.
            ConfigError: rank 0 has made another one.
        """
        with self._guard:
            return self._vectors.common(elems, dtype, name)

    # ---- operations ------------------------------------------------------------------------------

    def barrier(self) -> Steps[None]:
        """Done once all ranks have called it. Raises as `allreduce`."""
        with self._guard:
            yield from self._come(Call(OperationCode.BARRIER, 0, 0))

    def allreduce(self, span: Span, *, weight: float = 1.0) -> Steps[Span]:
        """Σ_r weight_r · span_r over all ranks, in their order; the same bits at each.

        Args:
            span: this rank's; what it holds afterwards is undefined unless it is what is returned.
            weight: this rank's; 1 for integers.

        Returns:
            Where the sum lies: `span` itself, or memory of the group's that all ranks read: until the
            next operation on the same elements of a vector of the group's, or, for the span of a foreign
            vector, until the next operation.

        Raises:
            PeerLostError, DeadlineError: naming the rank that is dead or silent; nothing is returned.
            ConfigError: ranks ask for different things.
            ClosedError: the group has been closed.
        """
        quick = self._quick.get((span.vector, span.start, span.stop))
        if quick is None:
            self._check_sum(span, weight)
        with self._guard:
            if quick is None:
                return (yield from self._allreduce(span, weight))
            yield from self._finish_small(span, quick(weight))
            return span

    def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Steps[Span]:
        """As `allreduce`, but this rank gets only its own `slice_of` the sum, in its own span."""
        self._check_sum(span, weight)
        with self._guard:
            return (yield from self._reduce_scatter(span, weight))

    def all_gather(self, span: Span) -> Steps[None]:
        """Each rank's own `slice_of` the span, to every rank. In a common vector it only waits for all."""
        with self._guard:
            yield from self._all_gather(span)

    def broadcast(self, span: Span, *, root: int = 0) -> Steps[None]:
        """The span of rank `root`, into that of every rank. In a common vector it only waits for all."""
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast from rank {root} of {self.size}")
        with self._guard:
            yield from self._broadcast(span, root)

    def barrier_(self) -> None:
        """`barrier`, to its end."""
        finish(self.barrier())

    def allreduce_(self, span: Span, *, weight: float = 1.0) -> Span:
        """`allreduce`, to its end."""
        return finish(self.allreduce(span, weight=weight))

    def reduce_scatter_(self, span: Span, *, weight: float = 1.0) -> Span:
        """`reduce_scatter`, to its end."""
        return finish(self.reduce_scatter(span, weight=weight))

    def all_gather_(self, span: Span) -> None:
        """`all_gather`, to its end."""
        finish(self.all_gather(span))

    def broadcast_(self, span: Span, *, root: int = 0) -> None:
        """`broadcast`, to its end."""
        finish(self.broadcast(span, root=root))

    def is_brief(self, span: Span, *, moves: bool = False) -> bool:
        """Whether what an operation on this span does beside waiting takes some microseconds.

        Args:
            moves: it moves elements from one rank to another, which it need not in a common vector.
        """
        if moves and self._vectors.is_common(span.vector):
            return True
        return self._is_small(span) or (
            _size_bytes(span) <= BRIEF_BYTES and self._vectors.is_own(span.vector)
        )

    def beat(self) -> None:
        """A sign of life, for those who wait for this rank while it computes. From any thread."""
        self._board.words[BEATS] += 1

    def _allreduce(self, span: Span, weight: float) -> Steps[Span]:
        if self._is_small(span):
            yield from self._allreduce_small(span, weight)
            return span
        elems, number = len(span), number_of(span.vector.tensor.dtype)
        place = self._vectors.place(span, 0, elems)
        calls = yield from self._come(Call(OperationCode.ALLREDUCE, number, elems, 0, *place, weight))
        add, result = self._prepared(calls, span)
        add([call.weight for call in calls])
        yield from self._barrier.wait(calls[0], soon=True)
        return result

    def _allreduce_small(self, span: Span, weight: float) -> Steps[None]:
        mine, elems = _tensor(span), len(span)
        if (code := self._small.get(mine.dtype)) is not None:
            quick = partial(code, self._state.address, mine.data_ptr(), elems)
            if self._vectors.is_own(span.vector) and len(self._quick) < _MAX_KEPT:
                self._quick[span.vector, span.start, span.stop] = quick
            yield from self._finish_small(span, quick(weight))
            return
        slots = self._slots(self._state.words[TURN], elems, mine.dtype)
        slots[self.rank].copy_(mine)
        calls = yield from self._come(
            Call(OperationCode.ALLREDUCE, number_of(mine.dtype), elems, weight=weight)
        )
        WeightedSum(slots, mine, self._room(mine.dtype))([call.weight for call in calls])

    def _finish_small(self, span: Span, status: int) -> Steps[None]:
        """What machine code leaves of a small allreduce."""
        if status == DONE:
            return
        turn, mine = 1 - self._state.words[TURN], _tensor(span)
        yield from self._barrier.finish(status, self._board.read(turn))
        if status == NOT_DONE:
            weights = [call.weight for call in self._calls(turn)]
            WeightedSum(self._slots(turn, len(span), mine.dtype), mine, self._room(mine.dtype))(weights)

    def _reduce_scatter(self, span: Span, weight: float) -> Steps[Span]:
        elems, dtype = len(span), span.vector.tensor.dtype
        start, stop = slice_of(elems, self.rank, self.size)
        own, number = span.vector[span.start + start : span.start + stop], number_of(dtype)
        if self._is_small(span):
            slots = self._slots(self._state.words[TURN], elems, dtype)
            slots[self.rank].copy_(_tensor(span))
            calls = yield from self._come(Call(OperationCode.REDUCE_SCATTER, number, elems, weight=weight))
            add = WeightedSum([slot[start:stop] for slot in slots], own.tensor, self._room(dtype))
            add([call.weight for call in calls])
            return own
        place = self._vectors.place(span, 0, elems)
        calls = yield from self._come(Call(OperationCode.REDUCE_SCATTER, number, elems, 0, *place, weight))
        add, _ = self._prepared(calls, span, own)
        add([call.weight for call in calls])
        yield from self._barrier.wait(calls[0], soon=True)  # others have read this rank's part
        return own

    def _all_gather(self, span: Span) -> Steps[None]:
        elems, number = len(span), number_of(span.vector.tensor.dtype)
        if self._vectors.is_common(span.vector):
            yield from self._come(Call(OperationCode.ALL_GATHER_COMMON, number, elems, span.start))
            return
        mine = _tensor(span)
        start, stop = slice_of(elems, self.rank, self.size)
        small = self._is_small(span)
        if small:
            slots = self._slots(self._state.words[TURN], elems, span.vector.tensor.dtype)
            slots[self.rank][start:stop].copy_(mine[start:stop])
            yield from self._come(Call(OperationCode.ALL_GATHER, number, elems))
        else:
            place = self._vectors.place(span, start, stop)
            calls = yield from self._come(Call(OperationCode.ALL_GATHER, number, elems, 0, *place))
            slots = [self._vectors.elements(call) for call in calls]
        for rank in self._peers:
            start, stop = slice_of(elems, rank, self.size)
            mine[start:stop].copy_(slots[rank][start:stop])
        if not small:
            yield from self._barrier.wait(calls[0], soon=True)

    def _broadcast(self, span: Span, root: int) -> Steps[None]:
        elems, number = len(span), number_of(span.vector.tensor.dtype)
        if self._vectors.is_common(span.vector):
            yield from self._come(Call(OperationCode.BROADCAST_COMMON, number, elems, root, start=span.start))
            return
        mine = _tensor(span)
        small = self._is_small(span)
        if small:
            slots = self._slots(self._state.words[TURN], elems, span.vector.tensor.dtype)
            if self.rank == root:
                slots[root].copy_(mine)
            yield from self._come(Call(OperationCode.BROADCAST, number, elems, root))
            source = slots[root]
        else:
            place = self._vectors.place(span, 0, elems) if self.rank == root else (-1, -1, 0)
            calls = yield from self._come(Call(OperationCode.BROADCAST, number, elems, root, *place))
            source = self._vectors.elements(calls[root])
        if self.rank != root:
            mine.copy_(source)
        if not small:
            yield from self._barrier.wait(calls[root], soon=True)

    def _prepared(
        self, calls: Sequence[Call], span: Span, own: Span | None = None
    ) -> tuple[WeightedSum, Span]:
        """This rank's slice of the sum, which goes to `own`, or to where all read the result; and that.

        Kept for the group's own vectors: they are summed again and again, and to find their parts takes as
        long as to add up some ten thousand elements.
        """
        key, asked = (span, own), [call[:-1] for call in calls]  # all but the weights
        if (kept := self._sums.get(key)) is not None and kept[0] == asked:
            return kept[1:]
        start, stop = slice_of(calls[0].elems, self.rank, self.size)
        result = own or self._vectors.sums(calls[0])
        out = own.tensor if own else result.tensor[start:stop]
        parts = [self._vectors.elements(call)[start:stop] for call in calls]
        add = WeightedSum(parts, out, self._room(out.dtype))
        if self._vectors.is_own(span.vector):
            if len(self._sums) == _MAX_KEPT:
                self._sums.clear()
            self._sums[key] = asked, add, result
        return add, result

    # ---- parts of all operations -------------------------------------------------------------------

    def _come(self, call: Call) -> Steps[list[Call]]:
        """Posts a call and waits for all; what each rank has asked for."""
        turn = self._state.words[TURN]
        self._state.words[TURN] = 1 - turn
        self._board.write(turn, call)
        yield from self._barrier.wait(call)
        return self._calls(turn)

    def _calls(self, turn: int) -> list[Call]:
        """What each rank has asked for. Raises ConfigError unless it is the same."""
        calls = [board.read(turn) for board in self._boards]
        matter = calls[0][:4]
        for other in calls:
            if other[:4] != matter:
                asked = ", ".join(f"{name} is {call}" for name, call in zip(self.names, calls, strict=True))
                raise ConfigError(f"ranks of one group do different things: {asked}; all must do the same")
        return calls

    def _slots(self, turn: int, elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Room on each rank's board for a small vector."""
        key = turn, elems, dtype
        if (views := self._views.get(key)) is None:
            if len(self._views) == _MAX_KEPT:
                self._views.clear()
            views = self._views[key] = [board.slot(turn, dtype)[:elems] for board in self._boards]
        return views

    def _room(self, dtype: torch.dtype) -> torch.Tensor:
        if (scratch := self._scratch.get(dtype)) is None:
            scratch = self._scratch[dtype] = torch.empty(BLOCK_ELEMS, dtype=dtype)
        return scratch

    def _is_small(self, span: Span) -> bool:
        return _size_bytes(span) <= SLOT_BYTES

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _check_sum(self, span: Span, weight: float) -> None:
        if self._vectors.is_common(span.vector):
            raise ConfigError(f"{span.vector.name} is common to all ranks: there is nothing to sum up")
        if weight != 1.0 and not span.vector.tensor.is_floating_point():
            raise ConfigError(
                f"weight {weight} for {span.vector.tensor.dtype}: integers are summed with weight 1"
            )

    def break_(self, error: BaseException) -> None:
        """After an error in an operation the group is broken, here and at the others."""
        self._quick.clear()
        self._sums.clear()
        if self._failure is None:
            self._barrier.give_up(PeerFailure.LEFT, self.rank)  # unless another reason stands already
            self._failure = (
                error
                if isinstance(error, GradstreamError)
                else ClosedError(
                    f"{self._party.me}: its group was given up ({type(error).__name__}: {error})"
                )
            )


class _Guard:
    """One operation at a time, of a group that is whole; an error in it breaks the group."""

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


def _size_bytes(span: Span) -> int:
    return len(span) * span.vector.tensor.itemsize


def _tensor(span: Span) -> torch.Tensor:
    vector = span.vector.tensor
    return vector if len(span) == len(vector) else span.tensor


_live: weakref.WeakSet[SharedCore] = weakref.WeakSet()


def _forget_in_child() -> None:
    for core in list(_live):
        if not core._closed:
            core.forked()


os.register_at_fork(after_in_child=_forget_in_child)
