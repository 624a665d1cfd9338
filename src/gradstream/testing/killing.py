"""SIGKILL to the nodes of a run on this machine, at a moment of the run and not of the clock."""

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
    """Kills nodes when an event of a kind has come so many times. Give it to the run as `on_event`.

    Args:
        cluster: the nodes.
        kind: of event: "step".
        times: how often it comes before.
        victims: names of nodes; none means all that run then.
    """

    def __init__(self, cluster: LocalCluster, kind: str, times: int, *victims: str) -> None:
        self._cluster = cluster
        self._kind = kind
        self._left = times
        self._victims = victims

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Takes note of an event, and kills at the right one."""
        self._left -= event["event"] == self._kind
        if self._left == 0:
            self._left = -1
            for name in self._victims or tuple(self._cluster.running):
                self._cluster.signal(name, signal.SIGKILL)

    def bury(self) -> None:
        """Hears of every death, so that the cluster can have another run.

        Raises:
            AssertionError: the kill never fired, or somebody still runs.
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
