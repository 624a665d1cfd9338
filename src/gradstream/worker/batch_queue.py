"""Minibatches that a worker has in hand: handed out by the coordinator, which is asked before there are none.

    hand  ■ ■ ■ ■ ■ ■ ■ ■      a block; half of it gone ▶ asks for the next one, and goes on meanwhile
    none left                  takes the next block, which mostly is there already

A worker computes its first minibatch before it asks for a second one, and then says how long it took. Nobody
knows before how slow it is, and a second one would be waited for at the end of a short run.

Where there is nothing for it now, the worker puts all that it has computed into the model, and asks again:
then the answer comes when there is something, or when the run has none any more.
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

__all__ = ["BatchQueue", "BatchSource"]


class BatchSource(Protocol):
    """Whoever hands out minibatches: the coordinator, through `WorkerRequests`."""

    async def assign(self, wait: bool, in_hand: int, stretch: WorkerSpeed) -> Assigned:
        """See `WorkerRequests.assign`."""
        ...


class BatchQueue:
    """What one worker was handed.

    Args:
        source: hands out more.
        runtime: asks beside the worker's own work.
    """

    def __init__(self, source: BatchSource, runtime: Runtime) -> None:
        self._source = source
        self._runtime = runtime
        self._refs: deque[BatchRef] = deque()
        self._turn = 0  # that they belong to
        self._low = 0  # with so many left, the next block is asked for
        self._asked: asyncio.Task[Assigned] | None = None
        self._units = 1  # of the minibatch that is computed
        self._steps = 0
        self._stretch = WorkerSpeed()

    def took(self, step: StepEvent) -> None:
        """A minibatch is done. What is said of the first one is of it alone: see `BatchAssignment.took`."""
        self._steps += 1
        me = f"worker-{step.rank}"
        others = (who for who in step.waited_for if who.startswith("worker-") and who != me)
        for_others_s = sum(step.waited_for[who] for who in others)
        self._stretch.took(self._units, step.compute_s + step.wait_s - for_others_s)

    async def next(self, turn: Callable[[], int], close: Callable[[], Awaitable[None]]) -> BatchRef | None:
        """The next minibatch; None where the run has none any more.

        Args:
            turn: number of the worker's turn, as it knows it.
            close: puts all that was computed into the model.

        Raises:
            PeerLostError, DeadlineError: the coordinator was lost.
        """
        while not self._refs:
            if self._asked is None:
                self._ask(in_hand=0)
            asked, self._asked = self._asked, None
            assert asked is not None
            answer = self._take(await asked, turn())
            if not self._refs:
                await close()
                if answer.complete:
                    return None
                answer = self._take(await self._source.assign(True, 0, self._since()), turn())
                if answer.complete:
                    return None
        ref = self._refs.popleft()
        self._units = ref.count
        if self._steps and len(self._refs) <= self._low and self._asked is None:
            self._ask(in_hand=len(self._refs) + 1)
        return ref

    def put_back(self, ref: BatchRef, turn: int) -> None:
        """It was not begun, and a new turn begins: what was handed out in an earlier one goes."""
        if self._turn == turn:
            self._refs.appendleft(ref)
        else:
            self._refs.clear()

    def _ask(self, in_hand: int) -> None:
        asking = self._source.assign(False, in_hand, self._since())
        self._asked = awaited_later(self._runtime.spawn(asking, name=f"{self._runtime.node}-assign"))

    def _since(self) -> WorkerSpeed:
        stretch, self._stretch = self._stretch, WorkerSpeed()
        return stretch

    def _take(self, answer: Assigned, turn: int) -> Assigned:
        self._turn = answer.interval
        self._refs.extend(answer.refs if answer.interval >= turn else ())
        self._low = len(self._refs) // 2
        return answer
