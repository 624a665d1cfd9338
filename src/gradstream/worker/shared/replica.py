"""A replica without parameters of its own: all workers update one vector in shared memory.

A worker computes its gradient while other workers write the vector, and adds it to the vector's current elements.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from typing_extensions import override

from gradstream.collectives.factory import SharedWindow
from gradstream.data.base import BatchRef
from gradstream.errors import GradientError, UserCodeError
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Work
from gradstream.sparse.data import SparseRows
from gradstream.sparse.model import SparseModel, SweepState
from gradstream.sparse.updates import LOOKS, num_locks
from gradstream.strategies import api
from gradstream.telemetry.meters import WaitAttribution
from gradstream.worker.computed import ComputedGradient, Result, SampleBatch
from gradstream.worker.replica import Replica, ReplicaContext

# ---- shared words ------------------------------------------------------------------------
# Words in shared memory by which workers that share one vector tell each other their progress.

LINE = 8
"""Words of a cache line. Each worker writes in a line of its own, which avoids false sharing."""

READY, BEFORE, COUNTS = 0, 1, 2


class SharedWords:
    """Shared memory in which workers see whether training has begun, each other's progress, and the locks.

    A word is read or written as a whole, so reading needs no lock.

    Args:
        words: (2 + W)·8 int64, zeros at first: a cache line for each fact.
        locks: int32, zeros at first; see `sparse.updates`.
        rank: rank of this worker.
    """

    def __init__(self, words: torch.Tensor, locks: torch.Tensor, rank: int) -> None:
        self.locks: np.ndarray[tuple[int], np.dtype[np.int32]] = locks.numpy()
        self._words = words.numpy()
        self._own = (COUNTS + rank) * LINE

    @classmethod
    async def of(cls, window: SharedWindow, rank: int, num_workers: int, elems: int) -> SharedWords:
        """The words of a run, in memory that all workers share. All workers call this together."""
        words = await window.common((COUNTS + num_workers) * LINE, torch.int64, "board")
        locks = await window.common(num_locks(elems, num_workers), torch.int32, "locks")
        return cls(words.tensor, locks.tensor, rank)

    @property
    def ready(self) -> bool:
        """Whether the first parameters and the data are in shared memory, so that training may begin."""
        return bool(self._words[READY * LINE])

    def begin(self, version: int) -> None:
        """Lets all workers begin. `version` minibatches are in the first parameters: above 0 in a resumed run."""
        self._words[BEFORE * LINE] = version
        self._words[READY * LINE] = 1

    def count(self) -> None:
        """Counts one more minibatch of this worker in the parameters."""
        self._words[self._own] += 1

    @property
    def version(self) -> int:
        """Number of minibatches of all workers, including lost ones, in the parameters."""
        return int(self._words[BEFORE * LINE] + self._words[COUNTS * LINE :: LINE].sum())

    def owner(self, lock: int) -> int:
        """Rank of the worker that holds a lock; -1 for none."""
        return int(self.locks[lock]) - 1

    def free(self, lock: int, rank: int) -> bool:
        """Frees a lock of a dead worker; returns whether that worker still held it."""
        from gradstream.sparse.sweep import free

        return free(self.locks, lock, rank + 1)


# ---- shared ------------------------------------------------------------------------------


class SharedReplica(Replica):
    """Implements `strategies.api.SharedMemoryWorker` and `strategies.api.Shared`.

    Args:
        context: parts of every replica.
        parameters: the vector of all workers.
        words: the progress of all workers, and the locks.
        unlock: awaited when a lock could not be taken for some milliseconds, with its number and the number of
            this halt; returns when the worker should try again.
        alone: no other worker computes at the same time (a simulation), so adding a gradient needs no locks.
    """

    def __init__(
        self,
        context: ReplicaContext,
        parameters: Vector,
        words: SharedWords,
        unlock: Callable[[int, int], Awaitable[None]],
        alone: bool,
    ) -> None:
        super().__init__(context, context.runtime.memory.allocate, WaitAttribution(), parameters)
        self.words = words
        self._unlock = unlock
        self._alone = alone
        self._late_by: Counter[str] = Counter()
        self._halts = 0

    def take_staleness(self) -> dict[str, int]:
        """How often each staleness occurred since the last call: minibatches of others during one of this worker's."""
        taken, self._late_by = self._late_by, Counter()
        return dict(taken)

    @property
    def shared(self) -> api.Shared:
        """See `strategies.api.Worker`."""
        return self

    @property
    def sparse(self) -> bool:
        """See `strategies.api.Shared`."""
        return isinstance(self._context.model, SparseModel)

    @override
    async def newest(self) -> torch.Tensor:
        return self.parameters.tensor

    async def _flush(self) -> None:
        """Does nothing: an update is in the model when the strategy continues after it."""

    async def sweep(self, batch: api.Minibatch, update: str) -> None:
        """See `strategies.api.Shared`."""
        assert isinstance(batch, SampleBatch)
        model, rate = self._context.model, self._context.schedule.rate(batch.ref)
        assert isinstance(model, SparseModel)
        rows: list[SparseRows] = []

        def go(at: SweepState) -> float:
            if not rows:
                parts = batch.samples or self._context.gradients.read(batch.ref, self.step)
                rows.append(_joined([model.rows(part) for part in parts]))
            try:
                return model.sweep(rows[0], rate, update, LOOKS, at)
            except Exception as error:  # of numba's: it cannot compile a function of the user's
                message = f"{self._where(batch.ref)}: the model raised {type(error).__name__}: {error}"
                raise UserCodeError(message, traceback.format_exc()) from error

        if batch.num_samples:
            begun_ns = self._runtime.now()
            work = Work("gradient", samples=batch.num_samples)
            loss = await self._carried_out(go, batch.num_samples, work)
            if not math.isfinite(loss) and not self._runtime.memory.shape_only:
                raise GradientError(
                    f"{self._where(batch.ref)}: the loss is {loss}; lower the learning rate, or scale the values. "
                    "The shared parameters contain this update already"
                )
            self._meter.computed(begun_ns, Result(loss / batch.num_samples))
        self._in_model(batch.ref)

    async def add(self, gradient: api.Gradient, update: str) -> None:
        """See `strategies.api.Shared`."""
        assert isinstance(gradient, ComputedGradient)
        elements, rate = gradient.vector.tensor, gradient.lr

        def go(at: SweepState) -> float:
            if self._alone:
                at.parameters.add_(elements, alpha=-rate)
                at.state[0] = len(elements)
            else:
                from gradstream.sparse.sweep import adder_of

                w = at.parameters.numpy()
                adder_of(update)(w, elements.numpy(), w.dtype.type(rate), at.access(LOOKS), at.state)
            return 0.0

        if gradient.samples:
            begun_ns = self._runtime.now()
            work = Work("apply", elems=len(elements))
            await self._carried_out(go, len(elements), work, reads=[gradient.vector.all])
            self._meter.worked(begun_ns)
        self._in_model(gradient.batch.ref)

    async def _carried_out(
        self, go: Callable[[SweepState], float], num: int, work: Work, reads: Sequence[Span] = ()
    ) -> float:
        """The sum of the results of `go`, called until it has reached `num`; it returns early at a taken lock."""
        at, total = SweepState(self.parameters.tensor, self.words.locks, self.rank + 1), 0.0
        got_to = -1
        while True:
            total += await self._runtime.compute(
                lambda _: go(at), work=work, reads=reads, writes=[self.parameters.all], shape_only=math.nan
            )
            if self._runtime.memory.shape_only or not at.blocked(num):
                return total
            if at.state[0] != got_to:  # it has made progress since its last halt
                self._halts, got_to = self._halts + 1, at.state[0]
            await self._unlock(int(at.state[1]), self._halts)

    def _where(self, ref: BatchRef) -> str:
        return f"worker-{self.rank}, step {self.step} (data epoch {ref.epoch}, batch {ref.batch})"

    def _in_model(self, ref: BatchRef) -> None:
        self._late_by[str(self.words.version - self.version)] += 1
        self.words.count()
        self.version = self.words.version
        self._handed_out((ref,))()


def _joined(rows: Sequence[SparseRows]) -> SparseRows:
    """The samples of a minibatch in parts (`accumulate`), which all lie in one table."""
    return SparseRows(rows[0].table, np.concatenate([row.ids for row in rows]))
