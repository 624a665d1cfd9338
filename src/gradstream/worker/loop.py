"""A user's training loop, as the source of a worker's minibatches and gradients.

The strategy asks for a gradient, as in any run. This gives the loop its turn: it continues with the current parameters,
and submits a gradient when it wants to make a step. Only then are the minibatch's samples and learning rate known. If
the loop has ended instead, the minibatch has no samples and changes nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from gradstream.data.base import BatchRef
from gradstream.data.dealing import Epoch, LoopBatch
from gradstream.data.open_ledger import Left
from gradstream.errors import ClosedError, InternalError
from gradstream.memory import Vector
from gradstream.model.base import Batch, usable
from gradstream.model.buffers import Buffers
from gradstream.runtime.base import Report, Runtime
from gradstream.telemetry.events import MemberEvent
from gradstream.transport.base import Endpoint
from gradstream.wire import v1
from gradstream.worker.computed import UNKNOWN, ComputedGradient, Result, SampleBatch
from gradstream.worker.replica import Replica
from gradstream.worker.schedule import ScheduleHooks


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of a loop's turn.

    Args:
        samples: number of samples in the gradient; 0 if the loop has ended instead.
        lr: learning rate to apply the gradient with.
        loss: mean loss over the samples, NaN if unknown.
        silent: the turn belongs to no step of the loop, so it is not reported, and no codec rounds its numbers.
    """

    samples: int
    lr: float
    loss: float
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """The worker's side of a turn.

    Args:
        gradient: (E,), for the loop to write from the front, in the order of the layout.
        known: to be called first, with the turn's samples and rate, if elements are reported as they become final.
        report: to be called with the number of leading elements that are final and may be sent.
    """

    gradient: torch.Tensor
    known: Callable[[Turn], None]
    report: Report


class EndingSource(Protocol):
    """Knows when a run of unplanned length is over: the coordinator, through `WorkerRequests`."""

    async def ending(self, batches: int, samples: int, next_round: int, left: Left | None) -> bool:
        """Whether the run is over for a worker whose loop has ended. If not, the worker takes part in `next_round`."""
        ...

    async def draw(self, request: v1.Draw) -> tuple[list[LoopBatch], int]:
        """Which minibatches the loop takes next: see `WorkerRequests.draw`."""
        ...

    async def epoch_part(self, epoch: Epoch, taken: int, *, done: bool) -> bool:
        """How far this worker is in its own part of an epoch: see `WorkerRequests.epoch_part`."""
        ...


@dataclass(frozen=True, slots=True)
class LoopContext:
    """The run as a loop sees it.

    Args:
        replica: the worker that asks for the loop's turns.
        endings: the coordinator.
        runtime, endpoint: of the worker's node.
        failed: reports an error with which this worker cannot continue.
        late: this worker has come to a run that had begun.
        first_step: number of the replica's first step.
    """

    replica: Replica
    endings: EndingSource
    runtime: Runtime
    endpoint: Endpoint
    failed: Callable[[Exception], Awaitable[None]]
    late: bool = False
    first_step: int = 0


class EntersLaterError(ClosedError):
    """A newcomer has let a round pass with which its loop could not begin: the workers form their group anew."""


class Loop(Protocol):
    """A user's training loop, as a worker sees it.

    Attributes:
        averages_gradients: whether only gradients are exchanged. The `parameters` of a turn are then the mean gradient
            of the round before.
        contributed: by rank of each worker, its samples in rounds that were steps of the loop.
        goes_on: the loop has made the steps of the phase before, so it has its state.
        is_slow: in a phase that measures the links, whether a sum takes so long that a few steps are enough.
        stays_out: this newcomer does not begin with the present round: see `EntersLaterError`.
    """

    averages_gradients: bool
    contributed: Counter[int]
    goes_on: bool
    is_slow: bool
    stays_out: bool

    @property
    def ended(self) -> bool:
        """Whether the user's loop has ended, or its phase. A last minibatch without samples was then no step of it."""
        ...

    @property
    def batches(self) -> int:
        """Number of minibatches so far, in this phase."""
        ...

    @property
    def samples(self) -> int:
        """Number of samples in them."""
        ...

    @property
    def behind(self) -> tuple[int, int] | None:
        """Samples submitted since the last whole step, and number of whole steps; None if each turn is a step."""
        ...

    @property
    def unfinished(self) -> bool:
        """Whether gradients were exchanged for a step that is not made yet: a resumed loop computes them again."""
        ...

    @property
    def left(self) -> Left | None:
        """What lost workers had left, once the loop has ended; None where the loop does not know."""
        ...

    def begin(self, context: LoopContext) -> None:
        """Called once on the event loop, before the first turn of a phase."""
        ...

    def turn(self, parameters: torch.Tensor, current: Round) -> Turn:
        """Waits until the loop has written a gradient at `parameters` (E,), or has ended.

        Runs on the arithmetic thread. Nobody writes `parameters` meanwhile.
        """
        ...

    def again(self, current: Round) -> Turn:
        """Writes what the last turn has written once more, since the loss of a worker has broken its exchange.

        Runs on the arithmetic thread. The loop still waits for the end of that turn's exchange.
        """
        ...

    @property
    def mark(self) -> int:
        """A number that is the same on all workers whose loops have dealt the same minibatches.

        Its sign tells whether a newcomer can begin with the round that is made now: below 0 it cannot. 0 if the loop
        has ended; 1 before its first round, and -1 if it has not submitted the round that is made now.
        """
        ...

    def members(
        self, ranks: Sequence[int], number: int, entered: Sequence[int] = (), *, in_step: bool = True
    ) -> None:
        """Hears, before round `number`, which workers take part from it on. The loop waits meanwhile.

        Args:
            ranks: their ranks; without those of newcomers that stay out.
            number: number of the round, from 0; in a resumed run from where it was resumed.
            entered: ranks of those that have come since the last call, to a run that had begun.
            in_step: the marks of the loops are equal.
        """
        ...

    def missed(self, rounds: int) -> None:
        """Hears, before its first turn, how many rounds this newcomer has missed: its turns count from there."""
        ...

    def state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """What the loop has besides its model, for a checkpoint. Runs on the arithmetic thread, between two turns."""
        ...

    def restore(self, state: Mapping[str, np.ndarray[Any, Any]], *, own: bool) -> None:
        """Restores what `state` has returned before the run was resumed, on this worker (`own`) or on another one."""
        ...

    def logged(self) -> Iterable[MemberEvent]:
        """What the loop has logged or noted since the last call."""
        ...

    def finish(self, parameters: torch.Tensor, buffers: Buffers) -> None:
        """Receives the final parameters (E,) and buffers, equal on all workers, when the run is over."""
        ...


class LoopSource:
    """Implements `BatchSchedule` and `GradientSource` by turns of a loop whose gradients are means over samples.

    In rounds, a loop that has ended is followed by minibatches without samples until all loops have ended (see
    `OpenLedger`). A round that is made again has the loop's earlier turn.

    Args:
        loop: computes the gradients.
        rank: rank of this worker.
        first_step: number of the loop's first step; not 0 if the run is resumed.
        endings: asked whether the run is over.
        first_version: version of the parameters with which the first turn begins.

    Attributes:
        state, updates: as of `LocalParameters`; here the loop's own optimizer has its state.
    """

    elsewhere = True

    def __init__(
        self, loop: Loop, rank: int, first_step: int, endings: EndingSource, first_version: int = 0
    ) -> None:
        self._loop = loop
        self._rank = rank
        self._first_step = first_step
        self._endings = endings
        self._first_version = first_version
        self._latest = self._newest = -1  # numbers of the latest turn, and of the newest minibatch
        self.state: Mapping[str, Vector] = {}
        self.updates = 0
        self._turn = Turn(0, 0.0, 0.0)  # the current or last turn, as far as known
        self._silent_samples = 0
        self._counts: Sequence[int] = ()  # samples of each worker in the present round

    @property
    def takes_part(self) -> bool:
        """See `BatchSchedule`."""
        return not self._loop.stays_out

    def heard(self, counts: Sequence[int]) -> None:
        """See `BatchSchedule`."""
        self._counts = counts

    async def refs(self, hooks: ScheduleHooks) -> AsyncGenerator[BatchRef, None]:
        """See `BatchSchedule`."""
        loop = self._loop
        for number in itertools.count(hooks.done):
            # Where a loss has broken a round that was begun after the loop's end, that round is made again.
            if loop.ended and number > self._newest:
                await hooks.close()
                left = loop.left
                if left is not None:
                    left = left._replace(contributed=self._loop.contributed)
                if await self._endings.ending(loop.batches, loop.samples, number, left):
                    return
            if loop.stays_out and number > hooks.done:
                raise EntersLaterError("a newcomer's loop does not begin with every round of the others")
            if await hooks.gate() == "over":
                return
            self._newest = number
            yield BatchRef(0, self._rank, number)

    def size(self, ref: BatchRef) -> int:
        """See `BatchSchedule`: 0 once the loop has ended, or where it has not begun."""
        return 0 if self._loop.ended or self._loop.stays_out else UNKNOWN

    def rate(self, ref: BatchRef) -> float:
        """See `BatchSchedule`."""
        return self._turn.lr

    def round_of(self, ref: BatchRef) -> None:
        """See `BatchSchedule`: the workers tell one another."""

    def place(self, ref: BatchRef) -> int:
        """See `BatchSchedule`: not called, since a loop's data has no order that is known."""
        raise InternalError(f"{ref} of a user's loop has no place in a pass")

    def missed(self, done: int, version: int) -> Sequence[BatchRef]:
        """See `BatchSchedule`: at most the round whose exchange a loss has broken here, and not on another worker."""
        return [BatchRef(0, self._rank, number) for number in range(done, version - self._first_version)]

    def passed(self, batch: SampleBatch) -> bool:
        """See `BatchSchedule`: rounds without samples, and silent ones, are no steps of the loop."""
        if self._turn.silent:
            self._silent_samples += batch.num_samples
        else:
            self._loop.contributed.update(dict(enumerate(self._counts)))
        self._counts = ()
        return bool(batch.num_samples) and not self._turn.silent

    def progress(self, samples: int, steps: int) -> tuple[int, int]:
        """See `BatchSchedule`: the loop counts its steps itself."""
        if self._loop.behind is None:
            return samples, self._first_step + self._loop.batches
        unfinished, steps = self._loop.behind
        return samples - self._silent_samples - unfinished, self._first_step + steps

    def milestones(self, gradient: ComputedGradient) -> Sequence[int]:
        """See `GradientSource`."""
        return (len(gradient.vector),)

    def passes(self, batch: SampleBatch) -> int:
        """See `GradientSource`."""
        return 1

    def read(self, ref: BatchRef, step: int) -> tuple[Batch, ...]:
        """See `GradientSource`: not called, since the loop reads its own samples."""
        raise InternalError(f"{ref} of step {step} is read in a user's loop")

    def compute(self, parameters: torch.Tensor, gradient: ComputedGradient, report: Report) -> Result:
        """See `GradientSource`: one turn of the loop."""

        def known(turn: Turn) -> None:
            self._turn, gradient.exact = turn, turn.silent
            gradient.know(turn.samples, turn.lr)

        into, number = gradient.vector.tensor, gradient.batch.ref.batch
        current = Round(into, known, report)
        turn = self._loop.again(current) if number == self._latest else self._loop.turn(parameters, current)
        self._latest = number
        known(turn)
        if not self._loop.averages_gradients and not usable(into):
            where = f"worker-{self._rank}, step {gradient.step}"
            return Result(
                turn.loss, refused=f"{where}: what the loop has handed over has a NaN or an infinity"
            )
        report(len(into))
        return Result(turn.loss)
