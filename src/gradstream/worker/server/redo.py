"""Redoes torn pushes of lost workers for the chunks that lack them.

    parameters, just fetched ──gradient of each minibatch──▶ sum ──pushed in the lost worker's name──▶ every chunk

This runs beside the strategy, in separate memory that is freed afterwards, so a worker also redoes pushes while it
stands still for a snapshot, is paused, or waits for minibatches. The arithmetic thread does one thing at a time, so a
push is redone between two gradients of the worker itself.

If the replica has several processes, each redoes the pushes of its own part, and they compute the gradients together,
when the worker decides (`worker.parts.agreement`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any

from gradstream.coordinator.progress import ref_of
from gradstream.data.base import BatchRef
from gradstream.memory import Vector
from gradstream.model.base import Batch
from gradstream.runtime.base import Work
from gradstream.server.client.client import ServerClient
from gradstream.server.client.push import Update
from gradstream.wire import v1
from gradstream.worker.computed import ComputedGradient, SampleBatch
from gradstream.worker.exchange import ExchangeContext
from gradstream.worker.gradient import differentiate
from gradstream.worker.replica import ReplicaContext
from gradstream.worker.server.next_update import NextUpdate, add_scaled

Key = tuple[str, int, int]
"""Name and incarnation of a lost worker, and the number of its push."""


class Redos:
    """The pushes that one process of a replica redoes.

    Args:
        context: the process's place in the run.
        parts: parts of its replica.
        server: its client of the parameter server.
        turn: a context in which a push of these minibatches may be redone.
    """

    def __init__(
        self,
        context: ExchangeContext,
        parts: ReplicaContext,
        server: ServerClient,
        turn: Callable[[Sequence[BatchRef]], AbstractAsyncContextManager[None]],
    ) -> None:
        self._context = context
        self._parts = parts
        self._server = server
        self._runtime = context.runtime
        self._layout = parts.model.layout
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._turn = turn

    def hear(self, notice: v1.Notice) -> None:
        """Begins to redo the pushes that the coordinator requests from this process."""
        named = dict[Key, v1.Redo]()
        for lost in notice.fenced:
            for redo in lost.redos:
                if redo.substitute == self._runtime.node:
                    named[lost.sender, lost.incarnation, redo.sequence] = redo
        for key, redo in named.items():
            if key not in self._tasks:
                name = f"{self._runtime.node}-redoes-{key[0]}-{key[2]}"
                self._tasks[key] = self._runtime.spawn(self._run(key, redo), name=name)
        for key in [key for key, task in self._tasks.items() if task.done() and key not in named]:
            del self._tasks[key]

    def cancel(self) -> None:
        """Cancels all redos."""
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, key: Key, redo: v1.Redo) -> None:
        sender, incarnation, sequence = key
        behalf = v1.Behalf(sender=sender, incarnation=incarnation)
        refs = [ref_of(batch) for batch in redo.batches]
        try:
            async with self._turn(refs):
                with self._memory() as (parameters, gradient, total, sums):
                    base = await self._server.fetch_into(parameters)
                    update = await self._sum(refs, base, parameters, gradient, total, sums)
                    await self._server.redo(update, behalf, sequence)
        except Exception as error:
            await self._context.failed(error)
        else:
            done = v1.Redone(sender=sender, incarnation=incarnation, sequence=sequence)
            self._context.member.report(v1.BeatReport(redone=done))

    @contextmanager
    def _memory(self) -> Iterator[tuple[Vector, Vector, Vector, Vector | None]]:
        """Lends vectors for the parameters, a gradient, the sum of gradients, and sums of parts of a minibatch."""
        memory, layout = self._runtime.memory, self._layout
        names = ["redone parameters", "redone gradient", "redone sum", "redone parts"][
            : 3 + self._parts.joins
        ]
        vectors = [
            memory.allocate(layout.elems, layout.dtype, name, exchanged=True, lead_bytes=layout.lead_bytes)
            for name in names
        ]
        try:
            yield vectors[0], vectors[1], vectors[2], vectors[3] if self._parts.joins else None
        finally:
            for vector in vectors:
                memory.free(vector)

    async def _sum(
        self,
        refs: Sequence[BatchRef],
        base: Sequence[int],
        parameters: Vector,
        gradient: Vector,
        total: Vector,
        sums: Vector | None,
    ) -> Update:
        """The sum of the gradients of these minibatches, weighed as in any push of several gradients."""
        next_update = NextUpdate(base)
        for ref in refs:
            one = await self._gradient(ref, parameters, gradient, sums)
            if one.samples:
                begins = next_update.begins_with(one)
                await self._runtime.compute(
                    partial(_add, total, gradient, None if begins else next_update.weight(one)),
                    work=Work("copy", elems=len(total)),
                    reads=[gradient.all],
                    writes=[total.all],
                )
                next_update.update.vector = total
            next_update.count(one, math.nan, summed=bool(one.samples))
        return next_update.take(base)

    async def _gradient(
        self, ref: BatchRef, parameters: Vector, vector: Vector, sums: Vector | None
    ) -> ComputedGradient:
        """The mean gradient of a minibatch at these parameters, with weight decay if gradients include it."""
        parts, source = self._parts, self._parts.gradients
        size = parts.schedule.size(ref)
        samples: tuple[Batch, ...] | None = None
        if size is None:
            unread: tuple[Batch, ...] = ()
            samples = await self._runtime.compute(
                lambda _: source.read(ref, parts.first_step), work=Work("read"), shape_only=unread
            )
            size = sum(part.num_samples for part in samples)
        one = ComputedGradient(
            vector,
            SampleBatch(ref, size, samples),
            parts.schedule.rate(ref),
            parts.first_step,
            mean=True,
            sums=sums,
        )
        if not size:
            return one
        result = await differentiate(self._runtime, source, parameters, one)
        if result.refused:
            parts.refusals.refuse(one, result.refused)
        elif decays := parts.rule.decays:
            await self._runtime.compute(
                lambda _: add_scaled(vector.tensor, parameters.tensor, decays),
                work=Work("copy", elems=len(vector)),
                reads=[parameters.all],
                writes=[vector.all],
            )
        return one


def _add(total: Vector, gradient: Vector, weight: float | None, _: Any) -> None:
    """Adds a gradient to the sum, or begins the sum with it if `weight` is None."""
    if weight is None:
        total.tensor.copy_(gradient.tensor)
    else:
        total.tensor.add_(gradient.tensor, alpha=weight)
