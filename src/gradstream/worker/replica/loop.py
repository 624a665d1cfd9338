"""A replica whose gradients a loop of the user's computes.

The strategy asks for a gradient, as ever. Here that means: it is the loop's turn. The loop goes on
with the parameters as they are now, and hands a gradient over when it wants to make a step. Only then
is it known how many samples the minibatch had, at which rate it should be applied, and whether there
was one at all: where the loop has ended instead, the minibatch has no samples and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from gradstream.data.base import BatchRef
from gradstream.errors import GradientError, InternalError
from gradstream.model.batch import Batch
from gradstream.model.buffers import Buffers
from gradstream.model.check import finite
from gradstream.model.factors import FactorPairs
from gradstream.model.rows import RowGradient
from gradstream.runtime.base import Report
from gradstream.strategies import api
from gradstream.telemetry.events import LogEvent
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.gradient import Result
from gradstream.worker.replica.base import Replica, ReplicaContext
from gradstream.worker.replica.group import GroupReplica
from gradstream.worker.replica.server import ServerReplica
from gradstream.worker.schedule import EndingSource, OpenSchedule, Supply

__all__ = [
    "Loop",
    "LoopGroupReplica",
    "LoopReplica",
    "LoopServerReplica",
    "OwnData",
    "Round",
    "Turn",
    "nothing",
]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a loop has done in its turn.

    Args:
        samples: behind the gradient; 0 where the loop has ended instead.
        lr: to apply it with.
        loss: mean over the samples, NaN where unknown.
        silent: it is none of the loop's own steps: nothing is reported.
    """

    samples: int
    lr: float
    loss: float
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What a loop in its turn is given, where gradients alone are exchanged.

    Args:
        gradient: (E,) to be written from the front, in the order of the layout.
        known: called first: what the turn will have been, but for its loss.
        report: called with how many elements from the front are final: they leave.
    """

    gradient: torch.Tensor
    known: Callable[[Turn], None]
    report: Report


class Loop(Supply, Protocol):
    """A training loop that is not ours."""

    joint: bool
    """Gradients alone are exchanged: `parameters` (E,) of a turn are the round before's mean gradient."""

    @property
    def behind(self) -> tuple[int, int] | None:
        """Samples handed over since its last whole step, and whole steps; None where each turn is one."""
        ...

    def begin(self, replica: LoopReplica) -> None:
        """Called on the event loop with what will ask for turns."""
        ...

    def turn(self, parameters: torch.Tensor, given: Round) -> Turn:
        """Waits until the loop has written a gradient at `parameters` (E,), or has ended.

        Runs on the arithmetic thread. Nobody writes `parameters` meanwhile.
        """
        ...

    def logged(self) -> Iterable[LogEvent]:
        """What the loop has logged since it was asked before."""
        ...

    def finish(self, parameters: torch.Tensor, buffers: Buffers) -> None:
        """The run is over: these (E,) are the final parameters, and these the buffers, the same for all."""
        ...


class OwnData(Protocol):
    """Stands where a job has its data set: every worker's loop brings its own."""

    optimizer: str  # the update rule that the loop asks for; "" where the job names it
    joint: bool  # loops exchange gradients alone, where the strategy gives every worker their mean

    def loop(self, rank: int) -> Loop:
        """The loop of a worker."""
        ...


class _Turns:
    """Implements `GradientSource` by turns of a loop.

    Args:
        loop: computes the gradients.
        rank: of this worker.
        elems: length of the flat vector.
        on_turn: told what the loop has done, before any of it is reported.
    """

    elsewhere = True

    def __init__(self, loop: Loop, rank: int, elems: int, on_turn: Callable[[Turn], None]) -> None:
        self._loop = loop
        self._rank = rank
        self._elems = elems
        self._on_turn = on_turn

    def milestones(self, *, mean: bool, rows: bool = False) -> Sequence[int]:
        del mean, rows
        return (self._elems,)

    def read(self, ref: BatchRef, step: int) -> tuple[Batch, ...]:
        raise InternalError(f"{ref} of step {step} is read in a loop of the user's")

    def gradient(
        self,
        parameters: torch.Tensor,
        ref: BatchRef,
        into: torch.Tensor,
        *,
        num_samples: int,
        step: int,
        mean: bool,
        report: Report,
        samples: Sequence[Batch] | None = None,
        sums: torch.Tensor | None = None,
        factors: FactorPairs | None = None,
        rows: RowGradient | None = None,
    ) -> Result:
        del ref, num_samples, mean, samples, sums, factors, rows
        turn = self._loop.turn(parameters, Round(into, self._on_turn, report))
        if not self._loop.joint and not finite(into):
            raise GradientError(
                f"worker-{self._rank}, step {step}: the gradient has a NaN or an infinity; lower the "
                "learning rate, scale the inputs, or clip the gradient. Nothing of it was applied"
            )
        self._on_turn(turn)
        report(self._elems)
        return Result(turn.loss)


async def nothing(replica: Replica, refs: Sequence[BatchRef]) -> None:
    """What a loop of the user's has to do between two minibatches, it does itself."""


class LoopReplica(Replica):
    """A replica with a loop's gradients, which are means over samples; see the classes below.

    Args:
        context: `differentiator`, `lr`, `joins` and `on_boundary` are filled in here.
        exchange: what the replica of that exchange takes besides.
        loop: computes the gradients.
    """

    def __init__(self, context: ReplicaContext, *exchange: Any, loop: Loop) -> None:
        turns = _Turns(loop, context.rank, context.layout.elems, self._took_turn)
        super().__init__(replace(context, differentiator=turns), *exchange)
        assert isinstance(context.schedule, OpenSchedule)
        self._loop, self._open_ended = loop, context.schedule
        self._first_step = context.first_step
        self._last_lr, self._silent, self._silent_samples = 0.0, False, 0
        self._current: ComputedGradient | None = None
        loop.begin(self)

    @property
    def endings(self) -> EndingSource:
        """Who knows what lost workers have left."""
        return self._open_ended.endings

    @property
    def progress(self) -> tuple[int, int]:
        """See `Replica.progress`: the loop's own steps, without rounds in which it had no samples."""
        behind = self._loop.behind
        if behind is not None:
            return self.samples - self._silent_samples - behind[0], self._first_step + behind[1]
        return self.samples, self._first_step + self._loop.batches

    async def _named(self, ref: BatchRef) -> SampleBatch:
        return SampleBatch(ref, self._open_ended.size)

    def _rate(self, ref: BatchRef) -> float:
        return self._last_lr

    def _start(self, batch: api.Minibatch, *, mean: bool) -> ComputedGradient:
        self._current = super()._start(batch, mean=mean)
        return self._current

    def _took_turn(self, turn: Turn) -> None:
        """Fills in what could not be known. On the arithmetic thread: nothing has been reported yet."""
        assert self._current is not None
        self._last_lr, self._silent = turn.lr, turn.silent
        self._current.know(turn.samples, turn.lr)

    def _report(self, batch: SampleBatch) -> None:
        if self._silent:
            self._silent_samples += batch.num_samples
        elif batch.num_samples:
            super()._report(batch)


class LoopServerReplica(LoopReplica, ServerReplica):
    """Exchanges a loop's gradients through the parameter server."""


class LoopGroupReplica(LoopReplica, GroupReplica):
    """Exchanges a loop's gradients in a group of workers."""
