"""Batch methods: every step uses the gradient of the whole data set, and vector arithmetic stays on the shards.

    worker                                                  shards
      portion ─ w ─▶ Σ_{x ∈ portion} ∇ℓ(w; x) ─ push ─▶       sum ← sum + portion      once for each portion
      all portions in?  steps of the method ─ commands ─▶     x·y,  out ← out + a·x, …
                          ◀─ scalars ─                        w ← x + t·d
      next pass at the new w

A data epoch is one pass at fixed parameters, and a minibatch a portion of it, much smaller than a W-th of the epoch.
The coordinator hands portions to the workers that are idle, and begins no pass before all portions of the one before
are in the sum. An idle worker gets a copy of a portion that another one is expected to be done with later. A chunk
takes each portion once, whoever computed it, and none of another pass. So a worker that dies in a pass loses nothing
and doubles nothing.

No node leads. The method is pure (`server/procedure.py`): each worker that gets a portion of a new pass carries out
the steps up to it, and a chunk does the commands of a step for the first worker that brings it. The others get the
same results. The shards keep a note with each step, from which a new worker, or a resumed run, goes on.

`epochs` of the run is the largest number of passes. A run ends before when the method has ended. Bytes of a pass and
worker: 4N down, and 4N up for each portion (float32); commands and their scalars besides, which do not depend on N.

Sums are rounded once: `optim/pass_sum.py` says how far bits depend on the order of portions. They do not depend on the
number of shards. The loss is a sum in the order of portions.

Reference: Dean et al. 2012 ("Large scale distributed deep networks", section 4.2, Sandblaster). Different here: workers
push each portion, so that a portion can be computed twice; no coordinator process sends the commands.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradstream.data.base import Partitioning
from gradstream.model.base import Reduction
from gradstream.optim.base import Optimizer
from gradstream.optim.pass_sum import PassSum
from gradstream.server.aggregation import AggregationRule, EveryPush, PushHeader
from gradstream.server.procedure import (
    ACCEPTED,
    CommandRound,
    Execution,
    Procedure,
    Reply,
    State,
    Steps,
    copy,
)
from gradstream.strategies.api import Server, ServerWorker
from gradstream.strategies.base import GroupStrategy, ServerStrategy
from gradstream.strategies.batch_group import BatchInGroup, check_beginning
from gradstream.wire import v1


@dataclass(frozen=True, slots=True)
class EveryPortion(EveryPush):
    """The server: adds each portion to the sum of the pass, weighted by its samples.

    Args:
        reduction: whether gradients are means over their samples, or sums.
    """

    reduction: Reduction

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """Number of samples for means, 1 for sums."""
        return [one.samples if self.reduction == "mean" else 1.0 for one in update]


class BatchMethod(ServerStrategy):
    """The base of batch methods. A method of your own has `vectors`, `begin` and `iteration`.

    Vector "" has the parameters w. "sum" has the gradient of a pass: its commands add "low" to it, and divide by the
    number of samples. "x" has the last iterate that the method has accepted; the run ends at it.
    """

    partitioning: ClassVar[Partitioning] = "queue"
    survives_worker_loss: ClassVar[bool] = True
    in_passes: ClassVar[bool] = True

    @abstractmethod
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors that the shards have for this method, besides the parameters, "sum" and "low"."""

    @abstractmethod
    def begin(self) -> State:
        """See `server.procedure.Procedure`."""

    @abstractmethod
    def iteration(self, state: State) -> Steps:
        """See `server.procedure.Procedure`."""

    def optimizer(self) -> Optimizer:
        """The sum of a pass, on the shards. Steps are the method's own."""
        return PassSum(self.vectors())

    def in_group(self) -> GroupStrategy:
        """The same method in a group of workers without servers; see `strategies.batch_group`."""
        return BatchInGroup(self)

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """Adds up portions; see `EveryPortion`."""
        return EveryPortion(reduction)

    async def train(self, worker: ServerWorker) -> None:
        """The client: computes portions, and carries out the method's steps between two passes.

        Raises:
            GradientError: the loss or the gradient where the method begins is not finite, or the model has no loss.
        """
        run, fetched = ProcedureRun(self, worker.server), -1
        async for batch in worker.batches(flush=run.catch_up):
            under_way = await run.reach(batch.epoch)
            worker.evaluated = ACCEPTED if run.accepted else ""
            if not under_way:
                check_beginning(self, run.state)
                await worker.server.push_soon(worker.leave_out(batch))
                await worker.server.flush()
                await worker.converged(run.state["done"], run.state["loss"])
                continue
            if fetched != batch.epoch:
                await worker.pull(own=False)
                fetched = batch.epoch
            await worker.server.push_soon(await worker.portion(worker.gradient_soon(batch)))
        await worker.server.flush()
        await run.finish()
        check_beginning(self, run.state)


class ProcedureRun:
    """One worker's view of a procedure that all workers carry out together.

    The note of step k is the state before its iteration, the replies of the iteration so far, and the number of passes
    before. From it the generator yields round k again. The first pass is that of the first data epoch of which a worker
    gets a portion: in a phase of a run that is a later one than 0.

    Args:
        procedure: the method.
        server: carries the steps out.

    Attributes:
        state: state before the present iteration.
    """

    def __init__(self, procedure: Procedure, server: Server) -> None:
        self._procedure = procedure
        self._server = server
        self._number = 1  # of the present round, as a step
        self._passes = 0  # that began before it
        self._first: int | None = None  # number of the first pass
        self._sent = False  # it is on all chunks
        self._known = False  # it is on a chunk
        self._samples = 0  # of a pass
        self._at = Execution(procedure, procedure.begin())

    @property
    def state(self) -> State:
        """See above."""
        return self._at.state

    @property
    def accepted(self) -> bool:
        """See `Execution.accepted`."""
        return self._at.accepted

    @property
    def _round(self) -> CommandRound | None:
        return self._at.round

    async def reach(self, number: int) -> bool:
        """Carries out all steps up to the one that begins a pass. Every pass before must be complete.

        Args:
            number: number of the pass: that of its data epoch.

        Returns:
            Whether a pass is under way: this one, or a later one if others were faster. False after the method's end.
        """
        if self._first is None:
            await self._look()
        self._first = number if self._first is None else self._first
        number -= self._first
        while self._round is not None:
            if self._round.evaluate and self._passes > number:
                return True
            if self._round.evaluate and self._passes == number and self._sent:
                return True
            await self._send(number)
        return False

    async def finish(self) -> None:
        """Ends the method at its last accepted iterate."""
        await self.catch_up()
        if self._round is not None and self._passes:
            self._number += self._known
            await self._server.step(self._step(restored=True), [copy("", ACCEPTED)])

    async def catch_up(self) -> None:
        """Carries out the steps that follow a pass, if all its samples are in the sum.

        So a checkpoint after the last pass of a phase has what that pass has found.
        """
        await self._server.flush()
        await self._look()
        while (present := self._round) is not None:
            if not present.evaluate:
                await self._send(self._passes)
                continue
            if not self._known:
                break
            result = await self._server.step(self._step(), present.commands)
            if result.number > self._number:
                self._adopt(result.number, result.note)
            elif not result.samples or result.samples != self._samples:
                break  # portions are missing; of the first pass nobody knows how many there are
            else:
                self._reply(Reply(tuple(result.scalars), result.loss, result.samples))

    async def _look(self) -> None:
        """Goes on where the others are, if they are further."""
        latest = await self._server.step(v1.Procedure(), ())
        if latest.number > self._number or (latest.number == self._number and not self._known):
            self._adopt(latest.number, latest.note)

    async def _send(self, number: int) -> None:
        """Has all chunks carry out the present round. Goes on to the next one, unless it waits for pass `number`."""
        assert self._round is not None
        await self._server.flush()
        result = await self._server.step(self._step(), self._round.commands)
        if result.number > self._number:
            self._adopt(result.number, result.note)
            return
        self._sent = self._known = True
        if not self._round.evaluate:
            self._reply(Reply(tuple(result.scalars)))
        elif self._passes < number:
            self._samples = result.samples
            self._reply(Reply(tuple(result.scalars), result.loss, result.samples))

    def _reply(self, reply: Reply) -> None:
        assert self._round is not None
        self._passes += self._round.evaluate
        self._number += 1
        self._sent = self._known = False
        self._at.answer(reply)

    def _step(self, *, restored: bool = False) -> v1.Procedure:
        """The present round as a step; `restored`, the one in its place that ends a run."""
        assert self._round is not None
        evaluates = self._round.evaluate and not restored
        note = [*self._at.record, self._passes, self._samples, restored, self._first]
        pass_number = (self._first or 0) + self._passes + 1 if evaluates else 0
        return v1.Procedure(number=self._number, note=json.dumps(note).encode(), pass_number=pass_number)

    def _adopt(self, number: int, note: bytes) -> None:
        """Goes on from a later step, which another worker has brought."""
        *record, self._passes, self._samples, restored, self._first = json.loads(note)
        self._at = Execution.recorded(self._procedure, record)
        self._number, self._sent, self._known = number + bool(restored), False, not restored
