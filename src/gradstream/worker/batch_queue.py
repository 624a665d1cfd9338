"""The minibatches that the coordinator has assigned to a worker. It asks for more before it has none left.

    queue  ■ ■ ■ ■ ■ ■ ■ ■     a block; with half of it left, the worker asks for the next one, and continues
    empty                      takes the next block, which has usually come already

A worker computes its first minibatch before it asks for a second one, and then reports how long it took. Before that,
nobody knows how slow it is: at the end of a short run, all would wait for its second minibatch.

If the coordinator has no minibatch at present, the worker brings everything that it has computed into the model, and
asks again. The second answer comes when there is a minibatch, or when the run has no more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from gradstream.coordinator.client.requests import Assigned
from gradstream.data.base import BatchRef
from gradstream.data.shares import WorkerSpeed
from gradstream.runtime.base import Runtime, awaited_later
from gradstream.telemetry.events import StepEvent


class BatchSource(Protocol):
    """Assigns minibatches: the coordinator, through `WorkerRequests`."""

    async def assign(self, wait: bool, in_hand: int, stretch: WorkerSpeed) -> Assigned:
        """See `WorkerRequests.assign`."""
        ...


class BatchQueue:
    """The minibatches assigned to one worker.

    Args:
        source: assigns more.
        runtime: runtime of the worker's node.
    """

    def __init__(self, source: BatchSource, runtime: Runtime) -> None:
        self._source = source
        self._runtime = runtime
        self._refs: deque[BatchRef] = deque()
        self._interval = 0  # in which they were assigned
        self._low = 0  # number of minibatches left at which the worker asks for the next block
        self._asked: asyncio.Task[Assigned] | None = None
        self._units = 1  # of samples in the present minibatch
        self._steps = 0
        self._stretch = WorkerSpeed()

    def took(self, step: StepEvent) -> None:
        """Notes the time of a step. The first one is reported by itself: see `BatchAssignment.took`."""
        self._steps += 1
        me = f"worker-{step.rank}"
        others = (who for who in step.waited_for if who.startswith("worker-") and who != me)
        for_others_s = sum(step.waited_for[who] for who in others)
        self._stretch.took(self._units, step.compute_s + step.wait_s - for_others_s)

    async def next(
        self, interval: Callable[[], int], close: Callable[[], Awaitable[None]]
    ) -> BatchRef | None:
        """The next minibatch; None if the run has no more.

        Args:
            interval: number of the worker's interval, as the worker knows it.
            close: brings everything that was computed into the model.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        while not self._refs:
            if self._asked is None:
                self._ask(in_hand=0)
            asked, self._asked = self._asked, None
            assert asked is not None
            answer = self._take(await asked, interval())
            if not self._refs:
                await close()
                if answer.complete:
                    return None
                answer = self._take(await self._source.assign(True, 0, self._since()), interval())
                if answer.complete:
                    return None
        ref = self._refs.popleft()
        self._units = ref.count
        if self._steps and len(self._refs) <= self._low and self._asked is None:
            self._ask(in_hand=len(self._refs) + 1)
        return ref

    def put_back(self, ref: BatchRef, interval: int) -> None:
        """Makes a minibatch that was not begun the next one again; if an interval has begun since, drops all."""
        if self._interval == interval:
            self._refs.appendleft(ref)
        else:
            self._refs.clear()

    def _ask(self, in_hand: int) -> None:
        asking = self._source.assign(False, in_hand, self._since())
        self._asked = awaited_later(self._runtime.spawn(asking, name=f"{self._runtime.node}-assign"))

    def _since(self) -> WorkerSpeed:
        stretch, self._stretch = self._stretch, WorkerSpeed()
        return stretch

    def _take(self, answer: Assigned, interval: int) -> Assigned:
        self._interval = answer.interval
        self._refs.extend(answer.refs if answer.interval >= interval else ())
        self._low = len(self._refs) // 2
        return answer
