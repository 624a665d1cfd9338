"""The worker's node in a thread of the user's process, beside the user's loop."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

from gradstream.coordinator import RunAbortedError, RunStoppedError
from gradstream.errors import GradstreamError, Interrupted, PeerLostError
from gradstream.run.failures import typed_error
from gradstream.run.node import SWITCH_INTERVAL_S, run_worker
from gradstream.session.binding import ParameterBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.job import OwnLoop
from gradstream.session.place import WorkerPlacement, newest_in

__all__ = ["LoopNode"]


class LoopNode:
    """Exchanges for a loop until the run is over.

    Args:
        place: which worker this is.
        held: the parameters that the user holds.
        handover: the other end of it is the user's loop.
        rule: the update rule that the loop's optimizer asks for, as text.
    """

    def __init__(
        self, place: WorkerPlacement, held: ParameterBinding, handover: LoopBridge, rule: str
    ) -> None:
        self._place = place
        self._held = held
        self._handover = handover
        self._rule = rule
        self.aborted = False  # the run has ended because of another node
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
            self._handover.over(_as_it_happened(aborted))
        except RunStoppedError:
            self._handover.over(self._interrupted())
        except BaseException as error:
            self._handover.over(error)
        else:
            self._handover.over(None)

    def _interrupted(self) -> Interrupted:
        if self._place.told().elsewhere:
            return Interrupted(None, "its newest checkpoint, on the first machine")
        path = Path(self._place.told().run_dir)
        folder = newest_in(path)
        return Interrupted(path, folder, f"gradstream resume {shlex.quote(str(path))}")

    async def _run(self) -> None:
        place = self._place
        own = OwnLoop(self._handover, self._rule)
        parts: dict[str, Any] = {"model": self._held, "data": own}
        job = dataclasses.replace(place.job(), **parts)
        await run_worker(job, place.arguments)


def _as_it_happened(error: RunAbortedError) -> GradstreamError:
    """The error that another node has ended the run with."""
    found = re.match(r"(\w+): (.*)", error.reason, re.DOTALL)
    if found is None:
        return PeerLostError(error.culprit, error.reason)
    return typed_error(error.culprit, found[1], found[2], "")
