"""SIGKILL to the nodes of a run on this machine, at an event of the run and not at a time."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from gradstream.run.local import LocalCluster

__all__ = ["Killer"]

PATIENCE_S = 0.2
QUIET = 100
"""So often nothing may be heard for `PATIENCE_S` while somebody still runs."""


class Killer:
    """Kills nodes after a number of events of one kind. Give it to the run as `on_event`.

    Args:
        cluster: the nodes.
        kind: of event: "step".
        times: number of such events before the kill.
        victims: names of nodes; none means all that run at that time.
    """

    def __init__(self, cluster: LocalCluster, kind: str, times: int, *victims: str) -> None:
        self._cluster = cluster
        self._kind = kind
        self._left = times
        self._victims = victims

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Counts an event, and kills at the last one."""
        self._left -= event["event"] == self._kind
        if self._left == 0:
            self._left = -1
            for name in self._victims or tuple(self._cluster.running):
                self._cluster.signal(name, signal.SIGKILL)

    def bury(self) -> None:
        """Waits for every death, so that the cluster can have another run.

        Raises:
            AssertionError: the kill never fired, or a node still runs.
        """
        assert self._left < 0, f"no kill: {self._left} more events {self._kind!r} were to come before"
        quiet = 0
        while True:
            if self._cluster.message(PATIENCE_S) is not None:
                continue
            if not self._cluster.running:
                return
            quiet += 1
            assert quiet < QUIET, f"still running: {', '.join(self._cluster.running)}"
