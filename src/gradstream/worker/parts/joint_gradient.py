"""`PartJointGradient`: a split replica computes the minibatches of several workers in a round, as one minibatch."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from gradstream.errors import InternalError
from gradstream.memory import Vector
from gradstream.runtime.base import Runtime, Work
from gradstream.server.client.push import Update
from gradstream.wire import v1
from gradstream.worker.computed import ComputedGradient, Result, SampleBatch
from gradstream.worker.gradient import JointSource
from gradstream.worker.group.joint_gradient import JointGradient
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.messages import PartStandsIn
from gradstream.worker.server.stand_in import PresentRound, StandIn

# ---- joint gradient ----------------------------------------------------------------------


class PartJointGradient(JointGradient):
    """See `JointGradient`: the same sum, of gradients that all parts of the replica compute together.

    Args:
        runtime: of this process.
        sources, schedule, reduction, part: of a `JointGradient`.
    """

    def __init__(self, runtime: Runtime, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._runtime = runtime

    async def compute_jointly(self, parameters: Vector, gradient: ComputedGradient) -> Result:
        """See `JointSource`."""
        into, total, ref = gradient.vector, gradient.samples, gradient.batch.ref
        means = gradient.mean or self._reduction == "mean"
        loss, read_s, norm, vector = 0.0, 0.0, None, into
        for rank, source in self._sources.items():
            samples = self._size(ref, rank)
            if not samples:
                continue
            if not isinstance(source, JointSource):
                raise InternalError(f"the gradients of worker-{rank} are not computed jointly")
            batch = SampleBatch(replace(ref, partition=rank), samples)
            part = ComputedGradient(vector, batch, gradient.lr, gradient.step, gradient.mean)
            result = await source.compute_jointly(parameters, part)
            if result.refused:
                return Result(math.nan, refused=result.refused)
            weight = samples / total if means else 1.0
            await self._runtime.compute(
                partial(_add, into, vector, weight),
                work=Work("copy", elems=len(into)),
                reads=[vector.all] if vector is not into else [],
                writes=[into.all],
            )
            vector = self.part
            loss += result.loss * (samples / total if self._reduction == "mean" else 1.0)
            read_s += result.read_s
            norm = result.norm if norm is None else max(norm, result.norm or 0.0)
        gradient.ready.advance(len(into))
        return Result(loss, norm, read_s)


def _add(into: Vector, vector: Vector, weight: float, _: object) -> None:
    """Adds a gradient to the sum; the first one is there already."""
    if vector is not into:
        into.tensor.add_(vector.tensor, alpha=weight)
    elif weight != 1.0:
        into.tensor.mul_(weight)


# ---- stand in ----------------------------------------------------------------------------
# `PartStandIn`: the processes of a split replica compute the parts of lost workers together.
#
#     worker: own gradient ──▶ tells its parts: rank r, round m ──▶ all compute it ──▶ each pushes its part as r
#     a process has the next version ──▶ waits until all have theirs ──▶ all move on to it
#
# A stand-in needs the parameters of the current round. So no process of a replica leaves a round before it is over on
# the shards of all parts.


class PartStandIn(StandIn):
    """See `StandIn`.

    Args:
        args: of a `StandIn`.
        agreement: with the other processes of the replica.
    """

    def __init__(self, *args: Any, agreement: Agreement) -> None:
        super().__init__(*args)
        self._agreement = agreement
        self._turn = asyncio.Lock()
        self._due: list[PartStandsIn] = []  # asked of this part for a round that it has not begun
        agreement.on_stand_in = self._let

    def hear(self, notice: v1.Notice) -> None:
        """See `StandIn`: the worker alone hears for whom; the others hear of it from the worker."""
        if self._agreement.leads:
            super().hear(notice)

    def _let(self, asked: PartStandsIn) -> None:
        self._due.append(asked)
        self._compute_due()

    @override
    def begin(self, present: PresentRound) -> None:
        super().begin(present)
        self._compute_due()

    def _compute_due(self) -> None:
        present = self._round
        for asked in list(self._due):
            if present is not None and asked.round == present.version:
                self._due.remove(asked)
                self._spawn(present, asked.rank)

    async def settled(self) -> None:
        """Returns when all processes of the replica have the next version, and none needs the parameters any more."""
        if self._round is not None:
            await self._agreement.all_ready(True, last=super().settled)

    async def _gradient(self, present: PresentRound, rank: int) -> Update:
        await present.own.done()  # the processes compute one gradient at a time, in one order
        async with self._turn:
            self._agreement.let_stand_in(rank, present.version)
            return await super()._gradient(present, rank)
