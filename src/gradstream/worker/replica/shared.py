"""A replica whose parameters are those of all: one vector in shared memory, which every worker updates.

A gradient is computed on the vector as it is while others write it, and added to it as it is then.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

from gradstream.data.base import BatchRef
from gradstream.errors import GradientError, UserCodeError
from gradstream.memory import Span, Vector
from gradstream.model.base import Model
from gradstream.runtime.base import Work
from gradstream.sparse.data import SparseRows
from gradstream.sparse.model import SparseModel, SweepState
from gradstream.sparse.updates import LOOKS
from gradstream.strategies import api
from gradstream.telemetry.wait_attribution import WaitAttribution
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.gradient import Result
from gradstream.worker.replica.base import Replica, ReplicaContext
from gradstream.worker.shared_words import SharedWords

__all__ = ["SharedReplica"]


class SharedReplica(Replica):
    """Implements `strategies.api.Worker`, and `strategies.api.Shared`, where workers have one vector.

    Args:
        context: what every replica is made of.
        model: of this worker.
        parameters: of all workers.
        words: how far all of them are, and the locks.
        unlock: awaited with the number of a lock that has not been had for some milliseconds, and that of the
            halt that it means: returns when it is worth another look.
        alone: nobody else computes at the same time (a simulation): gradients are added without machine code.
    """

    def __init__(
        self,
        context: ReplicaContext,
        model: Model,
        parameters: Vector,
        words: SharedWords,
        unlock: Callable[[int, int], Awaitable[None]],
        alone: bool,
    ) -> None:
        super().__init__(context, context.runtime.memory.allocate, WaitAttribution(), parameters)
        self.words = words
        self._model = model
        self._unlock = unlock
        self._alone = alone
        self._late_by: Counter[str] = Counter()
        self._halts = 0

    def take_staleness(self) -> dict[str, int]:
        """Minibatches that others have put in during one of this worker's → how often since the last call."""
        taken, self._late_by = self._late_by, Counter()
        return dict(taken)

    @property
    def shared(self) -> api.Shared:
        """See `strategies.api.Worker`."""
        return self

    @property
    def sparse(self) -> bool:
        """See `strategies.api.Shared`."""
        return isinstance(self._model, SparseModel)

    async def newest(self) -> torch.Tensor:
        """See `Replica.newest`."""
        return self.parameters.tensor

    async def _flush(self) -> None:
        """An update is in the model when the strategy goes on from it."""

    async def sweep(self, batch: api.Minibatch, update: str) -> None:
        """See `strategies.api.Shared`."""
        assert isinstance(batch, SampleBatch)
        model, rate = self._model, self._rate(batch.ref)
        assert isinstance(model, SparseModel)
        rows: list[SparseRows] = []

        def go(at: SweepState) -> float:
            if not rows:
                parts = batch.samples or self._differentiator.read(batch.ref, self.step)
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
                    f"{self._where(batch.ref)}: the loss is {loss}; lower the learning rate, or scale the "
                    "values. It is in the parameters"
                )
            self._result = Result(loss / batch.num_samples)
            self._stopwatch.computed(begun_ns, self._runtime.now())
        self._in_model((batch.ref,))

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
            self._stopwatch.worked(begun_ns, self._runtime.now())
        self._in_model(gradient.refs)

    async def _carried_out(
        self, go: Callable[[SweepState], float], num: int, work: Work, reads: Sequence[Span] = ()
    ) -> float:
        """Σ of what `go` returns, called until it has got to `num`; it stops at locks that it cannot have."""
        at, total = SweepState(self.parameters.tensor, self.words.locks, self.rank + 1), 0.0
        got_to = -1
        while True:
            total += await self._runtime.compute(
                lambda _: go(at), work=work, reads=reads, writes=[self.parameters.all], shape_only=math.nan
            )
            if self._runtime.memory.shape_only or not at.blocked(num):
                return total
            if at.state[0] != got_to:  # it has gone on since it was last stopped
                self._halts, got_to = self._halts + 1, at.state[0]
            await self._unlock(int(at.state[1]), self._halts)

    def _where(self, ref: BatchRef) -> str:
        return f"worker-{self.rank}, step {self.step} (data epoch {ref.epoch}, batch {ref.batch})"

    def _in_model(self, refs: tuple[BatchRef, ...]) -> None:
        self._late_by[str(self.words.version - self.version)] += 1
        self.words.count()
        self.version = self.words.version
        self._handed_out(refs)()


def _joined(rows: Sequence[SparseRows]) -> SparseRows:
    """The samples of a minibatch, whose parts (`accumulate`) are of one table."""
    return SparseRows(rows[0].table, np.concatenate([one.ids for one in rows]))
