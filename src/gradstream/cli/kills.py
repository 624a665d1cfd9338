"""Which nodes `gradstream demo --faults` kills, and when: a pure schedule, and the hand that strikes."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradstream.run.local import LocalCluster
    from gradstream.telemetry.events import EventDict

ONCE = ("coordinator", "shard-1")
"""Nodes that are killed once in a run: others take their place. The shard has a backup on the other one."""

EACH = 3
"""Times that each worker is killed, at most."""

GAP_S = (1.0, 2.0)


class KillSchedule:
    """A node every one to two seconds: workers again and again, each of `once` one time.

    A worker that is due waits until it takes part and is not the last one that does.

    Args:
        seed: the same seed draws the same nodes and seconds.
        workers: names of the workers.
        once: see `ONCE`.

    Attributes:
        left: what is still to come, as (seconds of training, node).
    """

    def __init__(self, seed: int, workers: Sequence[str], once: Sequence[str] = ONCE) -> None:
        rng = random.Random(f"kills/{seed}")
        rounds = [rng.sample(workers, len(workers)) for _ in range(EACH)]
        nodes = [worker for each in rounds for worker in each]
        for node in once:
            nodes.insert(rng.randrange(1, 4), node)
        self.left: deque[tuple[float, str]] = deque()
        at_s = 0.0
        for node in nodes:
            at_s += rng.uniform(*GAP_S)
            self.left.append((at_s, node))

    def due(self, at_s: float, taking_part: Collection[str]) -> str | None:
        """The node to kill now, once; None for none.

        Args:
            at_s: seconds of training.
            taking_part: names of the workers that do.
        """
        if not self.left or at_s < self.left[0][0]:
            return None
        node = self.left[0][1]
        if node.startswith("worker") and not (node in taking_part and len(taking_part) > 1):
            return None
        self.left.popleft()
        return node


class Striker:
    """Kills the processes of a run by SIGKILL; give it to the run as `on_event`.

    Args:
        cluster: the processes.
        schedule: when which one is killed.
        tell: called with a line for each kill.

    Attributes:
        kills: number of kills.
    """

    def __init__(self, cluster: LocalCluster, schedule: KillSchedule, tell: Callable[[str], None]) -> None:
        self._cluster, self._schedule, self._tell = cluster, schedule, tell
        self.kills = 0
        self._taking_part: set[str] = set()
        self._joining: set[str] = set()
        self._zero_s = math.inf  # of the run's clock, on this one: no event is read before it happens

    def __call__(self, event: EventDict) -> None:
        """Follows who takes part, and kills who is due."""
        match event["event"]:
            case "started":
                self._taking_part = {f"worker-{rank}" for rank in range(event["workers"])}
            case "exited":
                self._taking_part.discard(event["who"])
                self._joining.discard(event["who"])
            case "joined" if event["epoch"] > 1:
                self._joining.add(event["who"])
            case "step" if event["node"] in self._joining:
                self._joining.remove(event["node"])
                self._taking_part.add(event["node"])
            case "finished":
                self._schedule.left.clear()
        if not self._taking_part:
            return
        self._zero_s = min(self._zero_s, time.monotonic() - event["time_s"])
        at_s = time.monotonic() - self._zero_s
        node = self._schedule.due(at_s, self._taking_part)
        pid = None if node is None else self._cluster.running.get(node)
        if node is not None and pid is not None:
            self._taking_part.discard(node)
            self.kills += 1
            self._cluster.post({"struck": node, "at_ns": time.monotonic_ns()})
            os.kill(pid, signal.SIGKILL)
            self._tell(f"{at_s:5.1f} s: kill -9 {pid} ({node})")
