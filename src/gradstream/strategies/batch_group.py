"""A batch method in a group of workers, without servers: `servers=0` with any strategy of `strategies.batch`.

    worker i, each round:                          g_i ← Σ_{x ∈ B_i} ∇ℓ(w; x)
      allreduce                                    sum ← sum + Σ_i g_i         on each worker, with what rounding loses
    all samples of the data epoch in the sum?      steps of the method         each worker on its own vectors
    next pass at the new w

A data epoch is one pass at fixed parameters, as with servers. It goes in rounds in which all workers take part: a round
adds a minibatch of each worker, or `accumulate` of them, to the sum of the pass. All workers get the same bits of it,
so each carries out the commands of the method by itself, on whole vectors, and gets the same scalars. Only gradients
and losses are exchanged.

What a shard keeps of a procedure is the group's `note` here: state and replies (`server.procedure.Execution`), and
samples and losses of the pass so far. It changes with the vectors, between two rounds. So it is in checkpoints, a
worker that joins gets it with them, and after a death the round is done again by those who are left. No sample is lost
or counts twice.

Each worker holds all vectors of the method (of L-BFGS 2m + 8 besides its parameters, with the gradient). Bytes a round
and worker: those of an allreduce of the gradient, 2(W - 1)/W · 4N in a ring (float32); with `accumulate` fewer rounds
make a pass. All workers wait for the slowest in each round: no portion goes to whoever is idle, as it does with
servers. For machines of different speed there is `shares="measured"`.

With one worker the bits are those of one worker and a server with one chunk. With several the sum of a round is rounded
once more.

Reference: as for `strategies.batch`; the whole vectors on each worker are those of Agarwal, Chapelle, Dudik, Langford,
"A reliable effective terascale linear learning system", JMLR 2014 (L-BFGS by allreduce).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gradstream.data.base import Partitioning
from gradstream.errors import GradientError
from gradstream.model.base import Reduction
from gradstream.optim.base import Optimizer
from gradstream.server.arithmetic import outs_of
from gradstream.server.procedure import ACCEPTED, Execution, Procedure, Reply, State, copy
from gradstream.strategies.api import GroupWorker, Minibatch, Peers
from gradstream.strategies.base import GroupStrategy

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
    def title(self) -> str:
        """See `Strategy.title`."""
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
        group: has the note from which it goes on, and the vectors.

    Attributes:
        at: where the procedure is.
        accepted: vector "x" has an iterate that the method has accepted.
    """

    def __init__(self, procedure: Procedure, group: Peers) -> None:
        self._group = group
        self._scalars: Sequence[float] = ()  # of the round that the present pass has followed
        self._samples = 0  # of the present pass
        self._loss = (0.0, 0.0)  # Σ samples·loss of them, and what rounding has lost of it
        self.accepted = False
        if group.note:
            *record, self._scalars, self._samples, self._loss, self.accepted = json.loads(group.note)
            self.at = Execution.recorded(procedure, record)
        else:
            self.at = Execution(procedure, procedure.begin())

    @classmethod
    async def begun(cls, procedure: Procedure, group: Peers) -> GroupProcedure:
        """The procedure in the pass that is under way; of a new one, in its first pass."""
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
    """Adds a term to (rounded sum, what rounding has lost): Knuth's TwoSum, as in `optim.pass_sum`."""
    high, low = total
    new = high + term
    if not math.isfinite(new):
        return new, 0.0
    back = new - high
    return new, low + ((high - (new - back)) + (term - back))
