"""Decides which dead nodes the launcher starts again: workers (`Restarts`), the coordinator (`Succession`). Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Restarts", "Succession"]

FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
"""Seconds before the second restart of a worker, and the most seconds before any; they double from one to the next."""

CALM_S = 60.0
"""Seconds after which a worker that was started again counts as well: its next restart is at once again."""

VAIN_STARTS = 3
"""Processes of the coordinator, one after the other, that may die before they serve."""


@dataclass(slots=True)
class _Worker:
    """The restarts of one worker."""

    count: int = 0
    wait_s: float = 0.0  # before its next restart
    started_s: float = 0.0
    due_s: float | None = None


class Restarts:
    """The restarts of all workers.

    A worker that dies for the first time is started at once. One that dies soon after a restart waits, each time twice
    as long: where a machine has too little memory, say, its worker must not take all the time of the others.

    Args:
        limit: the most restarts of each worker.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._workers: dict[str, _Worker] = {}

    def ended(self, name: str, at_s: float) -> bool:
        """Notes that a worker was lost. Returns whether it will be started again."""
        worker = self._workers.setdefault(name, _Worker())
        if worker.count >= self._limit:
            return False
        if not worker.count or at_s - worker.started_s > CALM_S:
            worker.wait_s = 0.0
        worker.due_s = at_s + worker.wait_s
        worker.wait_s = min(MOST_WAIT_S, 2 * worker.wait_s or FIRST_WAIT_S)
        return True

    def take_due(self, at_s: float) -> list[str]:
        """The workers to start now; they count as started."""
        due = [name for name, one in self._workers.items() if one.due_s is not None and one.due_s <= at_s]
        for name in due:
            worker = self._workers[name]
            worker.count, worker.started_s, worker.due_s = worker.count + 1, at_s, None
        return due


class Succession:
    """The processes of the coordinator.

    Args:
        is_kept: whether the coordinator's state is kept in a file.

    Attributes:
        stored: whether what a new process would find is the newest state.
    """

    def __init__(self, is_kept: bool) -> None:
        self.stored = is_kept
        self._vain = 0

    def serves(self) -> None:
        """Notes that the present process serves."""
        self._vain = 0

    def may_follow(self, status: int, training: bool) -> bool:
        """Whether a new process takes the place of one that has ended.

        Args:
            status: exit status; minus the number of the signal that killed it.
            training: whether training has begun, which is when the state is kept from.
        """
        self._vain += 1
        return status < 0 and training and self.stored and self._vain <= VAIN_STARTS
