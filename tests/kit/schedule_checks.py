"""Executes the schedules of all ranks on plain arrays, and counts: the pure twin of `MessageGroup`.

A send never waits here; a receive waits for its message. So a schedule that blocks here would block on any network,
and one that ends depends on nothing but the order of messages between two ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradstream.collectives.schedule import MakeSchedule, Recv, Schedule, Send
from gradstream.errors import InternalError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ScheduleTally:
    """Counts of all messages of a schedule.

    Args:
        messages: number of messages of at least one element.
        elems: number of elements sent.
        busiest_elems: number of elements that the busiest rank sends.
        depth: length of the longest chain of messages, each of which had to wait for the one before it.
    """

    messages: int
    elems: int
    busiest_elems: int
    depth: int


def schedules_of(make: MakeSchedule, size: int, elems: int) -> list[Schedule]:
    """The schedule of every rank."""
    return [make(rank, size, elems) for rank in range(size)]


def execute(schedules: Sequence[Schedule], vectors: Sequence[Array]) -> ScheduleTally:
    """Executes the schedules on `vectors`, one for each rank, in place.

    Raises:
        InternalError: ranks wait for each other for ever; or a message has another length than its receiver
            expects, or no rank receives it.
    """
    return _AllRanks(schedules, vectors).execute()


class _AllRanks:
    """The position of each rank in its schedule, and the messages under way between ranks."""

    def __init__(self, schedules: Sequence[Schedule], vectors: Sequence[Array]) -> None:
        self._schedules = [[step for step in schedule if step.stop > step.start] for schedule in schedules]
        self._vectors = vectors
        self._at = [0] * len(schedules)
        self._clocks = [0] * len(schedules)  # for each rank, the messages that it has waited for, in a chain
        self._sent_elems = [0] * len(schedules)
        self._messages = 0
        self._under_way: dict[tuple[int, int], deque[tuple[Array, int]]] = {}

    def execute(self) -> ScheduleTally:
        ranks = range(len(self._schedules))
        while sum(self._advance(rank) for rank in ranks):
            pass
        for rank, schedule in enumerate(self._schedules):
            if self._at[rank] < len(schedule):
                step = schedule[self._at[rank]]
                raise InternalError(f"rank {rank} waits for ever at step {self._at[rank]}: {step}")
        for (source, target), queue in self._under_way.items():
            if queue:
                raise InternalError(f"rank {target} never receives {len(queue)} messages of rank {source}")
        sent = self._sent_elems
        return ScheduleTally(self._messages, sum(sent), max(sent, default=0), max(self._clocks, default=0))

    def _advance(self, rank: int) -> int:
        """Executes all steps that a rank can execute now; returns their number."""
        begun, schedule = self._at[rank], self._schedules[rank]
        while self._at[rank] < len(schedule):
            step = schedule[self._at[rank]]
            if isinstance(step, Send):
                self._send(rank, step)
            elif not self._recv(rank, step):
                break
            self._at[rank] += 1
        return self._at[rank] - begun

    def _send(self, rank: int, step: Send) -> None:
        message = self._vectors[rank][step.start : step.stop].copy()
        self._under_way.setdefault((rank, step.peer), deque()).append((message, self._clocks[rank]))
        self._messages += 1
        self._sent_elems[rank] += len(message)

    def _recv(self, rank: int, step: Recv) -> bool:
        """Receives a message; returns False if it has not been sent yet."""
        queue = self._under_way.get((step.peer, rank))
        if not queue:
            return False
        part, clock = queue.popleft()
        target = self._vectors[rank][step.start : step.stop]
        if len(part) != len(target):
            raise InternalError(f"rank {rank}: {len(part)} elements came, where it expects {step}")
        target[...] = target + part if step.add else part
        self._clocks[rank] = max(self._clocks[rank], clock + 1)
        return True


def check_allreduce(make: MakeSchedule, size: int, elems: int, *, seed: int = 0) -> ScheduleTally:
    """Executes an algorithm on whole numbers, and checks that every rank has numpy's sum.

    Raises:
        InternalError: a rank has another result; or as `execute`.
    """
    rng = np.random.default_rng(seed)
    vectors = list(rng.integers(-1000, 1000, (size, elems)).astype(np.float32))
    expected: Array = np.add.reduce(vectors, axis=0)
    counts = execute(schedules_of(make, size, elems), vectors)
    for rank, vector in enumerate(vectors):
        wrong = np.flatnonzero(vector != expected)
        if len(wrong):
            first = int(wrong[0])
            raise InternalError(
                f"rank {rank} of {size} has {vector[first]} at element {first} of {elems}: "
                f"expected {expected[first]}"
            )
    return counts
