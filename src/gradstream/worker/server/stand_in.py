"""`StandIn`: computes the parts of lost workers in each round besides the worker's own (`coordinator.lost_work`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from gradstream.data.base import BatchRef
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime
from gradstream.server.client.client import ServerClient
from gradstream.server.client.push import Update
from gradstream.wire import v1
from gradstream.worker.computed import ComputedGradient, Refusals, SampleBatch
from gradstream.worker.gradient import GradientSource, differentiate
from gradstream.worker.schedule import BatchSchedule


@dataclass(slots=True)
class PresentRound:
    """The round that a worker is in.

    Args:
        parameters: the parameters of the round; they stay until `StandIn.settled` returns.
        version: their version, which is the number of the round.
        base: version of each chunk.
        ref: the worker's own minibatch.
        step: number of the worker's step.
        sums: memory for sums of parts; see `ComputedGradient`.
        own: the gradient of the worker's own minibatch.
    """

    parameters: Vector
    version: int
    base: Sequence[int]
    ref: BatchRef
    step: int
    sums: Vector | None
    own: ComputedGradient
    begun: set[int] = field(default_factory=set)  # ranks whose part is computed, or was


class StandIn:
    """Computes and pushes, in each round, the minibatches of lost workers for which its worker stands in.

    Args:
        runtime: runtime of the worker's node.
        server: client of the parameter server.
        schedule: sizes and learning rates of minibatches.
        source_of: makes the source of another rank's gradients, with that rank's samples and random numbers.
        allocate: allocates memory for a gradient, by name.
        hand_over: tells the coordinator from which round on this worker no longer computes a rank's minibatches.
        failed: tells the coordinator that a minibatch cannot be computed.
        refusals: refuses gradients that are not finite.
    """

    def __init__(
        self,
        runtime: Runtime,
        server: ServerClient,
        schedule: BatchSchedule,
        source_of: Callable[[int], GradientSource],
        allocate: Callable[[str], Vector],
        hand_over: Callable[[v1.HandOver], None],
        failed: Callable[[Exception], Awaitable[None]],
        refusals: Refusals,
    ) -> None:
        self._runtime = runtime
        self._server = server
        self._schedule = schedule
        self._source_of = source_of
        self._allocate = allocate
        self._hand_over = hand_over
        self._failed = failed
        self._refusals = refusals
        self._asked: dict[
            int, int
        ] = {}  # by rank of a lost worker, the newcomer that waits to take over, or 0
        self._handed: dict[int, int] = {}  # by rank, the newcomer that has taken over
        self._begun_for: set[int] = set()  # ranks for which this worker has begun a round since it was asked
        self._parts: dict[int, tuple[GradientSource, Vector]] = {}  # by rank
        self._round: PresentRound | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}

    def hear(self, notice: v1.Notice) -> None:
        """Updates for whom this worker stands in, from its current round on."""
        own = [stand_in for stand_in in notice.stand_ins if stand_in.worker == self._runtime.node]
        self._asked = {one.rank: one.newcomer for one in own}
        self._begun_for &= self._asked.keys()
        self._compute()

    def begin(self, present: PresentRound) -> None:
        """Begins a round. A newcomer that waits for a part gets it from this round on.

        But not in the first round that this worker begins for a rank: the lost worker may have been ahead, so that some
        chunks already have its part of that round.
        """
        for rank, newcomer in self._asked.items():
            if newcomer and self._handed.get(rank) == newcomer:
                continue
            if newcomer and rank in self._begun_for:
                self._handed[rank] = newcomer
                self._begun_for.discard(rank)
                self._hand_over(v1.HandOver(rank=rank, round=present.version, newcomer=newcomer))
            else:
                self._begun_for.add(rank)
        self._round = present
        self._compute()

    async def settled(self) -> None:
        """Returns when no part of the round needs its parameters any more."""
        self._round = None
        for task in list(self._tasks):
            await asyncio.shield(task)

    def _compute(self) -> None:
        present = self._round
        if present is None:
            return
        for rank, newcomer in self._asked.items():
            if rank in present.begun or (newcomer and self._handed.get(rank) == newcomer):
                continue
            present.begun.add(rank)
            self._spawn(present, rank)

    def _spawn(self, present: PresentRound, rank: int) -> None:
        task = self._runtime.spawn(self._part(present, rank), name=f"{self._runtime.node}-for-{rank}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _part(self, present: PresentRound, rank: int) -> None:
        try:
            await self._server.push_beside(await self._gradient(present, rank))
        except Exception as error:
            await self._failed(error)

    async def _gradient(self, present: PresentRound, rank: int) -> Update:
        """Computes the gradient of a lost worker's minibatch of a round."""
        schedule, ref = self._schedule, replace(present.ref, partition=rank)
        samples, rate = schedule.size(ref) or 0, schedule.rate(ref)
        update = Update(
            None, samples, rate, present.base, round=present.version, refs=(ref,), stands_for=rank
        )
        if not samples:
            return update
        if rank not in self._parts:
            self._parts[rank] = self._source_of(rank), self._allocate(f"gradient for worker-{rank}")
        source, vector = self._parts[rank]
        gradient = ComputedGradient(vector, SampleBatch(ref, samples), rate, present.step, sums=present.sums)
        result = await differentiate(self._runtime, source, present.parameters, gradient)
        if result.refused:
            self._refusals.refuse(gradient, result.refused)
            update.samples = 0
        else:
            update.vector = vector
        return update
