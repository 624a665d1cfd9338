"""Decides which lost nodes the launcher restarts, when, and which stand still: `Comebacks`; and `Succession`.

Pure: no process is started or killed here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gradstream.coordinator.lifecycle import LossTolerance

FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0
"""Seconds before the second restart of a node, and the most seconds before any; they double each time."""

RESCUE_S = 2.0
"""Seconds for another machine to report that a shard's process has ended, once the run has lost the shard."""

STILL_S = 2.0
"""Seconds after which the process of a lost worker stands still, if it has not ended by itself."""

CALM_S = 5.0
"""Seconds after which a restarted node counts as healthy: its next restart is immediate again. That costs the others
about half a second: a tenth of their time at most."""

VAIN_STARTS = 3
"""Processes of the coordinator, one after the other, that may die before they serve."""


@dataclass(slots=True)
class _Node:
    """The restarts of one node."""

    count: int = 0
    wait_s: float = 0.0  # before its next restart
    started_s: float = 0.0
    due_s: float | None = None


class Restarts:
    """The restarts of all workers and shards.

    A node that dies for the first time is restarted at once. If it dies soon after a restart, it waits twice as long
    each time: for example, a worker that runs out of memory must not take all the time of the others.

    Args:
        limit: the most restarts of each node.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._nodes: dict[str, _Node] = {}

    def ended(self, name: str, at_s: float) -> bool:
        """Notes that a node was lost. Returns whether it will be started again."""
        node = self._nodes.setdefault(name, _Node())
        if node.count >= self._limit:
            return False
        if not node.count or at_s - node.started_s > CALM_S:
            node.wait_s = 0.0
        node.due_s = at_s + node.wait_s
        node.wait_s = min(MOST_WAIT_S, 2 * node.wait_s or FIRST_WAIT_S)
        return True

    def take_due(self, at_s: float) -> list[str]:
        """The nodes to start now; they count as started."""
        due = [
            name
            for name, restart in self._nodes.items()
            if restart.due_s is not None and restart.due_s <= at_s
        ]
        for name in due:
            node = self._nodes[name]
            node.count, node.started_s, node.due_s = node.count + 1, at_s, None
        return due


class Succession:
    """The processes of the coordinator.

    Args:
        is_kept: whether the coordinator's state is kept in a file.

    Attributes:
        stored: whether a new process would find the newest state.
        address: where the first of them serves, and its successors again; "" before.
    """

    def __init__(self, is_kept: bool) -> None:
        self.stored = is_kept
        self.address = ""
        self._vain = 0

    def serves(self, address: str) -> None:
        """Notes that the current process serves."""
        self.address = self.address or address
        self._vain = 0

    def may_follow(self, status: int, training: bool) -> bool:
        """Whether a new process takes the place of one that has ended.

        Args:
            status: exit status; minus the number of the signal that killed it.
            training: whether training has begun: the state is kept from then on.
        """
        self._vain += 1
        return status < 0 and training and self.stored and self._vain <= VAIN_STARTS


class Comebacks:
    """Which lost nodes a new process replaces, and when.

    The run counts each process that ends as lost, before or after the launcher learns of its end. So while a node was
    lost more often than its processes have ended, one of them still exists, because it stands still.

    Args:
        losses: what becomes of the run when a node is lost.
        limit: the most restarts of each worker and shard.
        coordinator: decides for the coordinator.

    Attributes:
        stopping: whether the run was asked to stop.
    """

    def __init__(self, losses: LossTolerance, limit: int, coordinator: Succession) -> None:
        self.coordinator = coordinator
        self.stopping = False
        self._losses = losses
        self._restarts = Restarts(limit)
        self._left = Counter[
            str
        ]()  # by node: how often the run has lost it, minus the processes that have ended
        self._since_s: dict[str, float] = {}

    def replaces(self, name: str) -> bool:
        """Whether a new process replaces a lost one: for a shard, even while the run is being stopped."""
        if name.startswith("shard"):
            return self._losses.acknowledge != "applied"
        return name.startswith(("worker", "part")) and self._losses.replaces and not self.stopping

    def lost(self, name: str, at_s: float) -> bool:
        """Notes that the run has lost a node. Returns whether it is a shard that stands still, and has to end first."""
        self._left[name] += 1
        self._since_s[name] = at_s
        return self._left[name] > 0 and name.startswith("shard") and self.replaces(name)

    def ended(self, name: str) -> None:
        """Notes that a process of a node has ended, or is gone with its machine."""
        self._left[name] -= 1

    def start_soon(self, name: str, at_s: float) -> None:
        """Schedules the restart of a node."""
        if self.replaces(name):
            self._restarts.ended(name, at_s)

    def unheard(self, at_s: float) -> list[str]:
        """The lost shards of other machines whose processes nobody has reported as ended."""
        return [name for name in self._there(at_s, RESCUE_S) if name.startswith("shard")]

    def stand_still(self, at_s: float) -> list[str]:
        """The lost workers that have to end before a new process can take their places."""
        there = self._there(at_s, STILL_S)
        return [name for name in there if not name.startswith("shard") and self.replaces(name)]

    def _there(self, at_s: float, for_s: float) -> list[str]:
        """The nodes that the run lost at least this long ago, whose processes nobody has reported as ended."""
        since = self._since_s.items()
        return [name for name, from_s in since if self._left[name] > 0 and at_s - from_s > for_s]

    def due(self, at_s: float) -> list[str]:
        """The nodes to start now."""
        return [name for name in self._restarts.take_due(at_s) if self.replaces(name)]
