"""The operations of ranks that read each other's vectors in place.

An allreduce of a large vector: each rank writes into its control block where its part lies, and arrives at the
barrier. It adds up its own slice of all parts into that slice of a result which lies beside rank 0's vector, for
all to read, and arrives at the barrier again. Each element moves once, and no rank copies anything. A small vector
is copied into the control block, and after one barrier every rank adds up all of it.

    allreduce of n elements, W ranks     barriers   read, written by each rank
    large                                2          n, n/W
    small                                1          (W+1)·n, 2n
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradstream.collectives.group import slice_of
from gradstream.collectives.shm.barrier import HostBarrier, Steps
from gradstream.collectives.shm.native import DONE, NOT_DONE, TURN, native
from gradstream.collectives.shm.rendezvous import SLOT_BYTES, Call, ControlBlock, OperationCode
from gradstream.collectives.shm.vectors import Vectors, number_of
from gradstream.errors import ConfigError
from gradstream.memory import Span, Vector

# ---- weighted sum ------------------------------------------------------------------------
# The arithmetic of an allreduce inside a host: one rank's slice of a sum over all ranks.

BLOCK_ELEMS = 1 << 16
"""Elements that are added at once: a block of float32 of two ranks and the sum stay in a core's own cache.

It is a multiple of 64, since kernels round differently at other cuts.
"""

PAST_CACHE_BYTES = 4 << 20
"""From this size on a sum is stored past the cache, where it would not stay until it is used."""


class WeightedSum:
    """Adds up Σ_r weights[r] · parts[r] into `out`, in the order of ranks, with the bits of a parameter server's sum.

    It reads each element of the parts once, and writes each of `out` once. Keep it to call it again: to make
    one takes as long as to add up some ten thousand elements.

    Args:
        parts: vectors of shape (n,).
        out: (n,); one of the parts, or memory that overlaps none of them.
        scratch: (BLOCK_ELEMS,) of the same dtype, for incomplete sums.
    """

    def __init__(self, parts: Sequence[torch.Tensor], out: torch.Tensor, scratch: torch.Tensor) -> None:
        self._parts = parts
        self._out = out
        self._scratch = scratch
        code = native()
        self._add = None if code is None else code.sum.get(out.dtype)
        at = out.data_ptr()
        self._weights = (ctypes.c_double * len(parts))()
        self._arguments = (
            at,
            (ctypes.c_void_p * len(parts))(*[part.data_ptr() for part in parts]),
            self._weights,
            len(parts),
            out.numel(),
            at % 64 == 0 and out.nbytes >= PAST_CACHE_BYTES,
        )

    def __call__(self, weights: Sequence[float]) -> None:
        """Adds up."""
        if self._add is None:
            plain_sum(self._parts, weights, self._out, self._scratch)
        else:
            self._weights[:] = list(weights)
            self._add(*self._arguments)


def plain_sum(
    parts: Sequence[torch.Tensor], weights: Sequence[float], out: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Does what `WeightedSum` does with torch's kernels, with the same bits."""
    if len(parts) == 1:
        if weights[0] != 1.0:
            torch.mul(parts[0], weights[0], out=out)
        elif out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    if len(parts) == 2 and weights[0] == 1.0:  # one pass is enough
        torch.add(parts[0], parts[1], alpha=_factor(weights[1]), out=out)
        return
    for out_block, *blocks in zip(*(torch.split(each, BLOCK_ELEMS) for each in (out, *parts)), strict=True):
        kept = scratch[: len(out_block)]
        total = blocks[0] if weights[0] == 1.0 else torch.mul(blocks[0], weights[0], out=kept)
        for block, weight in zip(blocks[1:-1], weights[1:-1], strict=True):
            total = torch.add(total, block, alpha=_factor(weight), out=kept)
        torch.add(total, blocks[-1], alpha=_factor(weights[-1]), out=out_block)


def _factor(weight: float) -> float:
    return 1 if weight == 1.0 else weight  # torch takes no floating-point factor for integers


# ---- operations --------------------------------------------------------------------------

BRIEF_BYTES = 1 << 20
"""Up to this size a rank adds up its slice of a vector in less than a tenth of a millisecond."""

_MAX_KEPT = 256


class SharedOperations:
    """Carries out the operations of one rank. The caller sees to it that one runs at a time.

    Args:
        names: names of all nodes, by rank.
        blocks: control blocks of all ranks.
        barrier: lets all ranks wait for each other.

    Attributes:
        quick: small allreduces that machine code can repeat, by (vector, start, stop).
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        blocks: list[ControlBlock],
        barrier: HostBarrier,
        vectors: Vectors,
    ) -> None:
        self.blocks = blocks
        self.barrier = barrier
        self.vectors = vectors
        self.state = barrier.state
        self.quick: dict[tuple[Vector, int, int], Callable[[float], int]] = {}
        self._rank = rank
        self._names = names
        code = native()
        self._small = {} if code is None else code.small
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._sums: dict[tuple[Span, Span | None], tuple[list[Any], WeightedSum, Span]] = {}
        self._views: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def clear(self) -> None:
        """Forgets everything that later operations could use again."""
        self.quick.clear()
        self._sums.clear()
        self._views.clear()

    def close(self) -> None:
        """Forgets all memory of the group, which goes once nobody else holds it."""
        self.clear()
        self.vectors.clear()
        self.blocks.clear()

    def is_brief(self, span: Span, *, moves: bool = False) -> bool:
        """Whether an operation on this span takes some microseconds, not counting the time it waits.

        Args:
            span: what the operation works on.
            moves: whether it moves elements from one rank to another, except in a common vector.
        """
        if moves and self.vectors.is_common(span.vector):
            return True
        return _is_small(span) or (_size_bytes(span) <= BRIEF_BYTES and self.vectors.is_own(span.vector))

    def check_sum(self, span: Span, weight: float) -> None:
        """Raises ConfigError for a span of a common vector, and for integers with a weight other than 1."""
        if self.vectors.is_common(span.vector):
            raise ConfigError(
                f"vector {span.vector.name!r} is common to all ranks, so there is nothing to sum; expected one "
                "that each rank has for itself"
            )
        if weight != 1.0 and not span.vector.tensor.is_floating_point():
            raise ConfigError(
                f"weight {weight} for {span.vector.tensor.dtype}: integers are summed with weight 1"
            )

    def wait_for_all(self) -> Steps[None]:
        """See `SharedCore.barrier`."""
        yield from self._post(Call(OperationCode.BARRIER, 0, 0))

    def allreduce(self, span: Span, weight: float) -> Steps[Span]:
        """See `SharedCore.allreduce`."""
        if _is_small(span):
            yield from self._allreduce_small(span, weight)
            return span
        elems, number = len(span), number_of(span.vector.tensor.dtype)
        place = self.vectors.place(span, 0, elems)
        calls = yield from self._post(Call(OperationCode.ALLREDUCE, number, elems, 0, *place, weight))
        add, result = self._prepared(calls, span)
        add([call.weight for call in calls])
        yield from self.barrier.wait(calls[0], soon=True)
        return result

    def _allreduce_small(self, span: Span, weight: float) -> Steps[None]:
        mine, elems = _tensor(span), len(span)
        if (code := self._small.get(mine.dtype)) is not None:
            quick = partial(code, self.state.address, mine.data_ptr(), elems)
            if self.vectors.is_own(span.vector) and len(self.quick) < _MAX_KEPT:
                self.quick[span.vector, span.start, span.stop] = quick
            yield from self.finish_small(span, quick(weight))
            return
        slots = self._slots(self.state.words[TURN], elems, mine.dtype)
        slots[self._rank].copy_(mine)
        calls = yield from self._post(
            Call(OperationCode.ALLREDUCE, number_of(mine.dtype), elems, weight=weight)
        )
        WeightedSum(slots, mine, self._room(mine.dtype))([call.weight for call in calls])

    def finish_small(self, span: Span, status: int) -> Steps[None]:
        """Does the rest of a small allreduce for which machine code has returned `status`."""
        if status == DONE:
            return
        turn, mine = 1 - self.state.words[TURN], _tensor(span)
        yield from self.barrier.finish(status, self.blocks[self._rank].read(turn))
        if status == NOT_DONE:
            weights = [call.weight for call in self._posted(turn)]
            WeightedSum(self._slots(turn, len(span), mine.dtype), mine, self._room(mine.dtype))(weights)

    def reduce_scatter(self, span: Span, weight: float) -> Steps[Span]:
        """See `SharedCore.reduce_scatter`."""
        elems, dtype = len(span), span.vector.tensor.dtype
        start, stop = slice_of(elems, self._rank, len(self.blocks))
        own, number = span.vector[span.start + start : span.start + stop], number_of(dtype)
        if _is_small(span):
            slots = self._slots(self.state.words[TURN], elems, dtype)
            slots[self._rank].copy_(_tensor(span))
            calls = yield from self._post(Call(OperationCode.REDUCE_SCATTER, number, elems, weight=weight))
            add = WeightedSum([slot[start:stop] for slot in slots], own.tensor, self._room(dtype))
            add([call.weight for call in calls])
            return own
        place = self.vectors.place(span, 0, elems)
        calls = yield from self._post(Call(OperationCode.REDUCE_SCATTER, number, elems, 0, *place, weight))
        add, _ = self._prepared(calls, span, own)
        add([call.weight for call in calls])
        yield from self.barrier.wait(calls[0], soon=True)  # until others have read this rank's part
        return own

    def all_gather(self, span: Span) -> Steps[None]:
        """See `SharedCore.all_gather`."""
        elems, number = len(span), number_of(span.vector.tensor.dtype)
        if self.vectors.is_common(span.vector):
            yield from self._post(Call(OperationCode.ALL_GATHER_COMMON, number, elems, span.start))
            return
        mine, size = _tensor(span), len(self.blocks)
        start, stop = slice_of(elems, self._rank, size)
        small = _is_small(span)
        if small:
            slots = self._slots(self.state.words[TURN], elems, span.vector.tensor.dtype)
            slots[self._rank][start:stop].copy_(mine[start:stop])
            yield from self._post(Call(OperationCode.ALL_GATHER, number, elems))
        else:
            place = self.vectors.place(span, start, stop)
            calls = yield from self._post(Call(OperationCode.ALL_GATHER, number, elems, 0, *place))
            slots = [self.vectors.elements(call) for call in calls]
        for rank in range(size):
            if rank != self._rank:
                start, stop = slice_of(elems, rank, size)
                mine[start:stop].copy_(slots[rank][start:stop])
        if not small:
            yield from self.barrier.wait(calls[0], soon=True)

    def broadcast(self, span: Span, root: int) -> Steps[None]:
        """See `SharedCore.broadcast`."""
        elems, number = len(span), number_of(span.vector.tensor.dtype)
        if self.vectors.is_common(span.vector):
            yield from self._post(Call(OperationCode.BROADCAST_COMMON, number, elems, root, start=span.start))
            return
        mine = _tensor(span)
        small = _is_small(span)
        if small:
            slots = self._slots(self.state.words[TURN], elems, span.vector.tensor.dtype)
            if self._rank == root:
                slots[root].copy_(mine)
            yield from self._post(Call(OperationCode.BROADCAST, number, elems, root))
            source = slots[root]
        else:
            place = self.vectors.place(span, 0, elems) if self._rank == root else (-1, -1, 0)
            calls = yield from self._post(Call(OperationCode.BROADCAST, number, elems, root, *place))
            source = self.vectors.elements(calls[root])
        if self._rank != root:
            mine.copy_(source)
        if not small:
            yield from self.barrier.wait(calls[root], soon=True)

    def _prepared(
        self, calls: Sequence[Call], span: Span, own: Span | None = None
    ) -> tuple[WeightedSum, Span]:
        """What adds up this rank's slice into `own`, or into the memory where all read the result; and that span.

        It is kept for vectors of the group, which are summed again and again: to find their parts takes as
        long as to add up some ten thousand elements.
        """
        key, asked = (span, own), [call[:-1] for call in calls]  # all fields but the weights
        if (kept := self._sums.get(key)) is not None and kept[0] == asked:
            return kept[1:]
        start, stop = slice_of(calls[0].elems, self._rank, len(self.blocks))
        result = own or self.vectors.sums(calls[0])
        out = own.tensor if own else result.tensor[start:stop]
        parts = [self.vectors.elements(call)[start:stop] for call in calls]
        add = WeightedSum(parts, out, self._room(out.dtype))
        if self.vectors.is_own(span.vector):
            if len(self._sums) == _MAX_KEPT:
                self._sums.clear()
            self._sums[key] = asked, add, result
        return add, result

    def _post(self, call: Call) -> Steps[list[Call]]:
        """Posts a call and waits for all ranks; returns the call of each."""
        turn = self.state.words[TURN]
        self.state.words[TURN] = 1 - turn
        self.blocks[self._rank].write(turn, call)
        yield from self.barrier.wait(call)
        return self._posted(turn)

    def _posted(self, turn: int) -> list[Call]:
        """The call of each rank. Raises ConfigError if they are not the same."""
        calls = [block.read(turn) for block in self.blocks]
        matter = calls[0][:4]
        for other in calls:
            if other[:4] != matter:
                asked = ", ".join(f"{name} is {call}" for name, call in zip(self._names, calls, strict=True))
                raise ConfigError(f"ranks of one group do different things: {asked}; all must do the same")
        return calls

    def _slots(self, turn: int, elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Memory for a small vector in the control block of each rank."""
        key = turn, elems, dtype
        if (views := self._views.get(key)) is None:
            if len(self._views) == _MAX_KEPT:
                self._views.clear()
            views = self._views[key] = [block.slot(turn, dtype)[:elems] for block in self.blocks]
        return views

    def _room(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for incomplete sums."""
        if (scratch := self._scratch.get(dtype)) is None:
            scratch = self._scratch[dtype] = torch.empty(BLOCK_ELEMS, dtype=dtype)
        return scratch


def _is_small(span: Span) -> bool:
    return _size_bytes(span) <= SLOT_BYTES


def _size_bytes(span: Span) -> int:
    return len(span) * span.vector.tensor.itemsize


def _tensor(span: Span) -> torch.Tensor:
    vector = span.vector.tensor
    return vector if len(span) == len(vector) else span.tensor
