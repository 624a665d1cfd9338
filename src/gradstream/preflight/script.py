"""A dry run of a script with a training loop of its own.

Only the script knows its model, and only while it runs: so its first steps come first. The dry run stops it in
the middle of its loop, with a checkpoint, as Ctrl-C would. The script may print and write files until then. Its
evaluation is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradstream.errors import PreflightError
from gradstream.machine.resources import free_memory_bytes
from gradstream.preflight.base import Check, DryRun, by_role
from gradstream.report.units import size_text
from gradstream.telemetry.events import EventDict


class ScriptDryRun(DryRun):
    """See `DryRun`."""

    @property
    def checks(self) -> Mapping[str, Check]:
        """See `DryRun`."""
        return {
            "configuration": self.configuration,
            "processes": self.processes,
            "model": self._look_at_model,
            "memory": self._memory,
            "disk": self._disk,
            "checkpoint": self.checkpoint,
            "pace": self._pace,
        }

    def rule(self) -> str:
        """See `DryRun`."""
        return "the script's optimizer"

    def processes(self) -> str:
        """See `DryRun`."""
        self._free_bytes = free_memory_bytes()
        return super().processes()

    def _look_at_model(self) -> str:
        exchanged = size_text(self._vector_bytes)
        return f"{self._started['num_parameters']:,} parameters, exchanged in vectors of {exchanged}"

    def _memory(self) -> str:
        """Check: shows the peak of memory and what was free before. It never fails: the run has fitted in."""
        peaks: Mapping[str, int] = self.run.summary["peak_own_bytes"]
        text = f"{size_text(sum(peaks.values()))} at the peak of the first steps, in all processes together"
        return text if self._free_bytes is None else f"{size_text(self._free_bytes)} were free; {text}"

    def _pace(self) -> str:
        pace = self.pace()
        return "too few steps to say" if pace is None else pace[1]

    @property
    def _started(self) -> EventDict:
        started = [event for event in self.run.events if event["event"] == "started"]
        if not started:
            raise PreflightError("the run has not begun")
        return started[-1]

    def _vectors(self, role: str) -> Mapping[str, int]:
        """Bytes of vectors by name, on the first node of a role."""
        by_node = {
            event["node"]: event["vectors_bytes"] for event in self.run.events if event["event"] == "memory"
        }
        found: Mapping[str, int] = by_role(by_node).get(role, {})
        return found

    @property
    def _vector_bytes(self) -> int:
        return self._vectors("worker").get("parameters", 0)

    def _disk(self) -> str:
        """Check: the disk has room for checkpoints of this size, with the state of the loop's own optimizer."""
        return self.disk(
            self.kept.stat().st_size, sum(file.stat().st_size for file in self.kept.parent.iterdir())
        )
