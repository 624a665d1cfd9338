"""Kills nodes of a run on this machine by SIGKILL, at an event of the run, which is repeatable; a time is not."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from gradstream.run.local import LocalCluster

PATIENCE_S = 0.2
QUIET = 100
"""How many periods of `PATIENCE_S` without a message `bury` accepts while a node still runs."""


class Killer:
    """Kills nodes after a number of events of one kind. Give it to the run as `on_event`.

    Args:
        cluster: the nodes.
        kind: kind of the events: "step".
        times: number of such events before the kill.
        victims: names of the nodes to kill; without any, all that run at that time.
    """

    def __init__(self, cluster: LocalCluster, kind: str, times: int, *victims: str) -> None:
        self._cluster = cluster
        self._kind = kind
        self._left = times
        self._victims = victims

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Counts an event; kills the nodes at the last one."""
        self._left -= event["event"] == self._kind
        if self._left == 0:
            self._left = -1
            for name in self._victims or tuple(self._cluster.running):
                self._cluster.signal(name, signal.SIGKILL)

    def bury(self) -> None:
        """Waits until every node has ended, so that the cluster can serve another run.

        Raises:
            AssertionError: the kill never fired, or a node still runs.
        """
        assert self._left < 0, f"no kill: {self._left} more events {self._kind!r} should have come before it"
        quiet = 0
        while True:
            if self._cluster.message(PATIENCE_S) is not None:
                continue
            if not self._cluster.running:
                return
            quiet += 1
            assert quiet < QUIET, f"still running: {', '.join(self._cluster.running)}"
