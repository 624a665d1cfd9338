"""Plays the schedules of all ranks on plain arrays, and counts: the pure twin of `MessageGroup`.

Sends never wait here and receives wait for their message, so what comes to a standstill here would on any
network, and what does not needs no more than the order of messages between two ranks.
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

__all__ = ["ScheduleTally", "check_allreduce", "play", "schedules_of"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ScheduleTally:
    """What a schedule costs.

    Args:
        messages: in all, of at least one element.
        elems: sent in all.
        busiest_elems: sent by the rank that sends most.
        depth: messages on the longest chain of which each had to wait for the one before: the α's.
    """

    messages: int
    elems: int
    busiest_elems: int
    depth: int


def schedules_of(make: MakeSchedule, size: int, elems: int) -> list[Schedule]:
    """The schedule of every rank."""
    return [make(rank, size, elems) for rank in range(size)]


def play(schedules: Sequence[Schedule], vectors: Sequence[Array]) -> ScheduleTally:
    """Carries them out on `vectors`, one for each rank, in place.

    Raises:
        InternalError: ranks wait for each other for ever, a message is longer or shorter than who
            receives it expects, or one is never received.
    """
    return _Table(schedules, vectors).play()


class _Table:
    """All ranks at one table: how far each has come, and what is under way between them."""

    def __init__(self, schedules: Sequence[Schedule], vectors: Sequence[Array]) -> None:
        self._schedules = [[step for step in schedule if step.stop > step.start] for schedule in schedules]
        self._vectors = vectors
        self._at = [0] * len(schedules)
        self._clocks = [0] * len(schedules)  # of each rank: messages that it had to wait for, in a row
        self._sent_elems = [0] * len(schedules)
        self._messages = 0
        self._under_way: dict[tuple[int, int], deque[tuple[Array, int]]] = {}

    def play(self) -> ScheduleTally:
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
        """Does all the steps that a rank can do now; how many those were."""
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
        """Whether the message was there."""
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
    """Plays an algorithm on whole numbers, and looks whether every rank has numpy's sum.

    Raises:
        InternalError: a rank has something else; or as `play`.
    """
    rng = np.random.default_rng(seed)
    vectors = list(rng.integers(-1000, 1000, (size, elems)).astype(np.float32))
    expected: Array = np.add.reduce(vectors, axis=0)
    tally = play(schedules_of(make, size, elems), vectors)
    for rank, vector in enumerate(vectors):
        wrong = np.flatnonzero(vector != expected)
        if len(wrong):
            first = int(wrong[0])
            raise InternalError(
                f"rank {rank} of {size} has {vector[first]} at element {first} of {elems}: "
                f"expected {expected[first]}"
            )
    return tally
