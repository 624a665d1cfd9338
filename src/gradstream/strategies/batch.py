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
same results. The shards keep a note with each step, from which a new worker, or a resumed run, continues.

`epochs` of the run is the largest number of passes. A run ends before when the method has ended. Bytes of a pass and
worker: 4N down, and 4N up for each portion (float32); commands and their scalars besides, which do not depend on N.

Sums are rounded once: `optim/merge.py` says how far bits depend on the order of portions. They do not depend on the
number of shards. The loss is a sum in the order of portions.

Reference: Dean et al. 2012 ("Large scale distributed deep networks", section 4.2, Sandblaster). Different here: workers
push each portion, so that a portion can be computed twice; no coordinator process sends the commands.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from typing_extensions import override

from gradstream.data.base import Partitioning
from gradstream.errors import GradientError
from gradstream.model.base import Reduction
from gradstream.optim.base import Optimizer
from gradstream.optim.merge import PassSum
from gradstream.server.aggregation import AggregationRule, EveryPush, PushHeader
from gradstream.server.procedure import (
    ACCEPTED,
    CommandRound,
    Execution,
    Procedure,
    Reply,
    State,
    StepResult,
    Steps,
    copy,
    dots_of,
    outs_of,
)
from gradstream.strategies.api import GroupWorker, Minibatch, Peers, Server, ServerWorker
from gradstream.strategies.base import GroupStrategy, ServerStrategy
from gradstream.wire import v1

# ---- batch group -------------------------------------------------------------------------
# A batch method in a group of workers, without servers: `servers=0` with any strategy of `strategies.batch`.
#
#     worker i, each round:                          g_i ← Σ_{x ∈ B_i} ∇ℓ(w; x)
#      allreduce                                    sum ← sum + Σ_i g_i         on each worker, with what rounding loses
#     all samples of the data epoch in the sum?      steps of the method         each worker on its own vectors
#     next pass at the new w
#
# A data epoch is one pass at fixed parameters, as with servers. It goes in rounds in which all workers take part: a
# round adds a minibatch of each worker, or `accumulate` of them, to the sum of the pass. All workers get the same
# bits of it, so each carries out the commands of the method by itself, on whole vectors, and gets the same scalars.
# Only gradients and losses are exchanged.
#
# What a shard keeps of a procedure is the group's `note` here: state and replies (`server.procedure.Execution`), and
# samples and losses of the pass so far. It changes with the vectors, between two rounds. So it is in checkpoints, a
# worker that joins gets it with them, and after a death the round is done again by those who are left. No sample is
# lost or counts twice.
#
# Each worker holds all vectors of the method (of L-BFGS 2m + 8 besides its parameters, with the gradient). Bytes a
# round and worker: those of an allreduce of the gradient, 2(W - 1)/W · 4N in a ring (float32); with `accumulate`
# fewer rounds make a pass. All workers wait for the slowest in each round: no portion goes to whoever is idle, as it
# does with servers. For machines of different speed there is `shares="measured"`.
#
# With one worker the bits are those of one worker and a server with one chunk. With several the sum of a round is
# rounded again.
#
# Reference: as for `strategies.batch`; the whole vectors on each worker are those of Agarwal, Chapelle, Dudik,
# Langford, "A reliable effective terascale linear learning system", JMLR 2014 (L-BFGS by allreduce).

_NO_BEGINNING = (
    "strategy={}: where the method begins, the loss or the gradient of some samples is not finite, or the model gives "
    'no loss. A batch method needs both, of all samples: take the samples out of the data (with non_finite="error" the '
    "run ends with the name of their minibatch), or give the model a loss. No parameter was changed"
)


class PassMethod(Procedure, Protocol):
    """A procedure with the update rule that adds up a pass: `strategies.batch.BatchMethod`."""

    def optimizer(self) -> Optimizer:
        """The sum of a pass."""
        ...


@dataclass(frozen=True, slots=True)
class BatchInGroup(GroupStrategy):
    """A batch method without servers; see the module. Made by `BatchMethod.in_group`.

    Args:
        method: the method.
    """

    method: PassMethod

    partitioning: ClassVar[Partitioning] = "rounds"
    survives_worker_loss: ClassVar[bool] = True
    in_passes: ClassVar[bool] = True

    @property
    @override
    def title(self) -> str:
        return f"{type(self.method).__name__} in a group"

    @property
    def stands_in(self) -> bool:
        """See `Strategy.stands_in`: what `train` keeps between two rounds is in the group's note."""
        return True

    def optimizer(self) -> Optimizer:
        """The sum of a pass, on each worker."""
        return self.method.optimizer()

    def weight(self, rank: int, samples: Sequence[int], reduction: Reduction) -> float:
        """Number of samples for means, 1 for sums: the round's sum is that over all its samples."""
        return samples[rank] if reduction == "mean" else 1.0

    async def train(self, worker: GroupWorker) -> None:
        """The client: sums up rounds, and carries out the method's steps between two passes.

        Raises:
            GradientError: the loss or the gradient where the method begins is not finite, or the model has no loss.
        """
        group = worker.group
        run = await GroupProcedure.begun(self.method, group)
        worker.evaluated = self.checkpointed(group.note)
        async for batch in worker.batches():
            if run.done:
                await group.leave_out(batch)
            else:
                await self._round(worker, run, batch)
            if run.done:
                await worker.converged(run.at.state["done"], run.at.state["loss"])

    async def _round(self, worker: GroupWorker, run: GroupProcedure, batch: Minibatch) -> None:
        group, gradient = worker.group, worker.gradient_soon(batch)
        samples = await group.samples(gradient)
        weight = self.weight(worker.rank, samples, worker.reduction)
        for bucket in group.buckets:
            await group.allreduce(gradient, bucket, weight)
        loss = await group.total_loss(gradient)
        await group.update(gradient)
        run.add(sum(samples), loss)
        if worker.ends_epoch(batch):
            await run.go_on()
            check_beginning(self.method, run.at.state)
        group.note, worker.evaluated = run.note, ACCEPTED if run.accepted else ""

    def checkpointed(self, note: bytes) -> str:
        """The last iterate that the method has accepted, once there is one. The parameters may be those of a trial."""
        return ACCEPTED if note and json.loads(note)[-1] else ""

    async def finish(self, worker: GroupWorker) -> None:
        """Ends the method at its last accepted iterate."""
        if self.checkpointed(worker.group.note):
            await worker.group.command([copy("", ACCEPTED)])


def check_beginning(method: PassMethod, state: State) -> None:
    """Raises GradientError if the method has ended where it begins, since there is no loss to go down."""
    if state["done"] and not math.isfinite(state["loss"]):
        raise GradientError(_NO_BEGINNING.format(type(method).__name__))


class GroupProcedure:
    """A procedure that each worker of a group carries out on its own vectors.

    Args:
        procedure: the method.
        group: has the note from which it continues, and the vectors.

    Attributes:
        at: where the procedure is.
        accepted: vector "x" has an iterate that the method has accepted.
    """

    def __init__(self, procedure: Procedure, group: Peers) -> None:
        self._group = group
        self._scalars: Sequence[float] = ()  # of the round that the current pass has followed
        self._samples = 0  # of the current pass
        self._loss = (0.0, 0.0)  # Σ samples·loss of them, and what rounding has lost of it
        self.accepted = False
        if group.note:
            *record, self._scalars, self._samples, self._loss, self.accepted = json.loads(group.note)
            self.at = Execution.recorded(procedure, record)
        else:
            self.at = Execution(procedure, procedure.begin())

    @classmethod
    async def begun(cls, procedure: Procedure, group: Peers) -> GroupProcedure:
        """The procedure in the pass in progress; of a new one, in its first pass."""
        run = cls(procedure, group)
        if not group.note:
            await run._reach_pass()
            group.note = run.note
        return run

    @property
    def done(self) -> bool:
        """Whether the method has ended."""
        return self.at.round is None

    @property
    def note(self) -> bytes:
        """All of it, for the group."""
        whole = [*self.at.record, [*self._scalars], self._samples, self._loss, self.accepted]
        return json.dumps(whole).encode()

    def add(self, samples: int, loss: float) -> None:
        """Adds a round to the pass: the number of its samples, and the sum of their losses."""
        self._samples += samples
        self._loss = _two_sum(self._loss, loss)

    async def go_on(self) -> None:
        """The pass is complete: carries out the steps up to the next one."""
        loss = sum(self._loss) / self._samples if self._samples else math.inf
        reply = Reply(self._scalars, loss if math.isfinite(loss) else math.inf, self._samples)
        self._samples, self._loss = 0, (0.0, 0.0)
        self.at.answer(reply)
        await self._reach_pass()

    async def _reach_pass(self) -> None:
        while (present := self.at.round) is not None:
            scalars = await self._group.command(present.commands)
            self.accepted = self.accepted or ACCEPTED in outs_of(present.commands)
            if present.evaluate:
                self._scalars = scalars
                return
            self.at.answer(Reply(tuple(scalars)))


def _two_sum(total: Sequence[float], term: float) -> tuple[float, float]:
    """Adds a term to (rounded sum, what rounding has lost): Knuth's TwoSum, as in `optim.merge.PassSum`."""
    high, low = total
    new = high + term
    if not math.isfinite(new):
        return new, 0.0
    back = new - high
    return new, low + ((high - (new - back)) + (term - back))


# ---- batch -------------------------------------------------------------------------------


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
        """The same method in a group of workers without servers; see `BatchInGroup`."""
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
        state: state before the current iteration.
    """

    def __init__(self, procedure: Procedure, server: Server) -> None:
        self._procedure = procedure
        self._server = server
        self._number = 1  # of the current round, as a step
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
            Whether a pass is in progress: this one, or a later one if others were faster. False after the method's end.
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
                self._adopt(result)
            elif not result.samples or result.samples != self._samples:
                break  # portions are missing; of the first pass nobody knows how many there are
            else:
                self._check_results(result)
                self._reply(Reply(tuple(result.scalars), result.loss, result.samples))

    async def _look(self) -> None:
        """Goes on where the others are, if they are further."""
        latest = await self._server.step(v1.Procedure(), ())
        if latest.number > self._number or (latest.number == self._number and not self._known):
            self._adopt(latest)

    async def _send(self, number: int) -> None:
        """Has all chunks carry out the current round. Goes on to the next one, unless it waits for pass `number`."""
        assert self._round is not None
        await self._server.flush()
        result = await self._server.step(self._step(), self._round.commands)
        if result.number > self._number:
            self._adopt(result)
            return
        self._check_results(result)
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
        """The current round as a step; `restored`, the one in its place that ends a run."""
        assert self._round is not None
        evaluates = self._round.evaluate and not restored
        note = [*self._at.record, self._passes, self._samples, restored, self._first]
        pass_number = (self._first or 0) + self._passes + 1 if evaluates else 0
        return v1.Procedure(number=self._number, note=json.dumps(note).encode(), pass_number=pass_number)

    def _check_results(self, result: StepResult) -> None:
        """Raises GradientError if another worker has brought another step in place of the current one."""
        assert self._round is not None
        if len(result.scalars) != (wanted := dots_of(self._round.commands)):
            raise self._broken(result, f"{len(result.scalars)} results, expected {wanted}")

    def _broken(self, latest: StepResult, why: str) -> GradientError:
        by = latest.by or "the checkpoint"
        return GradientError(
            f"step {latest.number} of {type(self._procedure).__name__}, brought by {by}, cannot be continued ({why}): "
            "the workers are not at the same point of the method. All must run the same job under the same version of "
            f"gradstream; one that sends steps of its own misleads the others, and {by} may be one of these"
        )

    def _adopt(self, latest: StepResult) -> None:
        """Goes on from a later step, which another worker has brought.

        Raises:
            GradientError: it is no step of this method.
        """
        try:
            *record, passes, samples, restored, first = json.loads(latest.note)
            self._at = Execution.recorded(self._procedure, record)
            self._passes, self._samples, self._first = (
                int(passes),
                int(samples),
                None if first is None else int(first),
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise self._broken(latest, type(error).__name__) from error
        self._number, self._sent, self._known = latest.number + bool(restored), False, not restored
