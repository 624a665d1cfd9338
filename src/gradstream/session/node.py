"""Runs the worker's node in a thread beside the user's loop, from joining the run to leaving it."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shlex
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradstream.coordinator import RunAbortedError, RunStoppedError
from gradstream.errors import GradstreamError, Interrupted, PeerLostError, UserCodeError
from gradstream.run.failures import typed_error
from gradstream.run.node import SWITCH_INTERVAL_S, run_worker
from gradstream.run.placement import WorkerPlacement, newest_in
from gradstream.session.binding import ParameterBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.host import Host
from gradstream.session.job import OwnLoop
from gradstream.session.log import SessionLog

__all__ = ["LoopNode", "RunConnection"]

FAREWELL_S = 15.0
"""How long a script that has failed waits until the others know."""


class LoopNode:
    """Exchanges for a loop until the run is over.

    Args:
        place: which worker this is.
        binding: the user's parameters.
        bridge: connects the node to the user's loop.
        rule: the update rule that the loop's optimizer asks for, as text.

    Attributes:
        aborted: whether the run has ended because of another node.
    """

    def __init__(
        self, place: WorkerPlacement, binding: ParameterBinding, bridge: LoopBridge, rule: str
    ) -> None:
        self._place = place
        self._binding = binding
        self._bridge = bridge
        self._rule = rule
        self.aborted = False
        self._thread = threading.Thread(target=self._live, name="gradstream", daemon=True)

    def start(self) -> None:
        """Begins to join the run."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the node has left the run."""
        self._thread.join(timeout_s)

    def _live(self) -> None:
        try:
            asyncio.run(self._run())
        except RunAbortedError as aborted:
            self.aborted = True
            self._bridge.over(_original_error(aborted))
        except RunStoppedError:
            self._bridge.over(self._interrupted())
        except BaseException as error:
            self._bridge.over(error)
        else:
            self._bridge.over(None)

    def _interrupted(self) -> Interrupted:
        if self._place.node_spec().elsewhere:
            return Interrupted(None, "its newest checkpoint, on the first machine")
        path = Path(self._place.node_spec().run_dir)
        folder = newest_in(path)
        return Interrupted(path, folder, f"gradstream resume {shlex.quote(str(path))}")

    async def _run(self) -> None:
        own = OwnLoop(self._bridge, self._rule)
        parts: dict[str, Any] = {"model": self._binding, "data": own}
        await run_worker(dataclasses.replace(self._place.job(), **parts), self._place.arguments)


class RunConnection:
    """A loop's connection to its run: joins it with the loop's parameters, and leaves it.

    Args:
        place: which worker this is.
        log: figures that the loop logs.
        host: what this process runs for all workers, waited for at the end; or None.

    Attributes:
        bridge: connects the loop to its node; None before `join`.
    """

    def __init__(self, place: WorkerPlacement, log: SessionLog, host: Host | None) -> None:
        self.bridge: LoopBridge | None = None
        self._place = place
        self._log = log
        self._host = host
        self._binding: ParameterBinding | None = None
        self._node: LoopNode | None = None

    @property
    def aborted(self) -> bool:
        """Whether the run has ended because of another node, which reports why."""
        return self._node is not None and self._node.aborted

    def join(self, binding: ParameterBinding, rule: str, *, joint: bool) -> LoopBridge:
        """Joins the run. Returns when all workers are there, with the same parameters.

        Args:
            binding: the user's parameters.
            rule: the update rule that the loop's optimizer asks for, as text.
            joint: only gradients are exchanged.

        Raises:
            GradstreamError: the run did not come about.
        """
        self._binding = binding
        bridge = self.bridge = LoopBridge(binding, self._log, joint=joint, on_step=binding.snapshot_buffers)
        self._node = LoopNode(self._place, binding, bridge, rule)
        self._node.start()
        bridge.first()
        self._log.open()
        return bridge

    def check_unchanged(self, where: str) -> None:
        """Raises ConfigError where the script has changed what the exchange would overwrite."""
        if self._binding is not None and self.bridge is not None and self.bridge.error is None:
            self._binding.check_unchanged(where)

    @contextmanager
    def newest_parameters(self) -> Iterator[None]:
        """Inside, the user sees the parameters that are on the servers now."""
        assert self._binding is not None and self.bridge is not None
        own = self.bridge.visible
        self._binding.set_parameters(self.bridge.fetch())
        try:
            yield
        finally:
            if own is not None:
                self._binding.set_parameters(own)

    def leave(self) -> None:
        """Leaves the run, and waits until it is over.

        Raises:
            GradstreamError: the run has ended with this error.
        """
        self._log.close()
        if self.bridge is None or self._node is None:
            return
        assert self._binding is not None
        self._binding.release()
        self.bridge.end()
        self._node.join()
        if self._host is not None:
            self._host.join()
        error = self.bridge.error or (self._host.error if self._host is not None else None)
        if error is not None:
            raise error

    def fail(self, error: BaseException) -> None:
        """Ends the run for all workers, with the traceback of the script's error. Never raises."""
        self._log.close()
        if self.bridge is None or self._node is None:
            return
        if self.bridge.error is None:
            text = "".join(traceback.format_exception(error))
            message = f"worker-{self._place.rank}: the script raised {type(error).__name__}: {error}"
            self.bridge.end(error if isinstance(error, UserCodeError) else UserCodeError(message, text))
            self._node.join(FAREWELL_S)
        if self._host is not None:
            self._host.join(FAREWELL_S)


def _original_error(error: RunAbortedError) -> GradstreamError:
    """The error with which another node has ended the run."""
    found = re.match(r"(\w+): (.*)", error.reason, re.DOTALL)
    if found is None:
        return PeerLostError(error.culprit, error.reason)
    return typed_error(error.culprit, found[1], found[2], "")
