"""How a run ended, and how it goes on, in the words that its launcher and those who follow it share."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradstream.errors import GradstreamError, Interrupted
from gradstream.run.failures import typed_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A run by the latest of its events.

    Args:
        run_dir: run directory.
        last: the latest event of each kind, of this part of the run.
        first: folder of the checkpoint that this part began from; "" if the run began.
        in_file: whether the job is in a file, so that a command can resume the run.
        begins_again: whether a resumed script would begin from its start.
    """

    run_dir: Path
    last: Mapping[str, Mapping[str, Any]]
    first: str = ""
    in_file: bool = True
    begins_again: bool = False

    @property
    def checkpoint(self) -> str:
        """Folder of the newest checkpoint, as far as is known; "" without one."""
        found: str = self.last.get("checkpoint", {}).get("folder", self.first)
        return found

    @property
    def command(self) -> str:
        """The command, or the call, that resumes the run."""
        if self.begins_again:
            return "once the script goes on where it was, by session.skip() or session.step"
        if not self.in_file:
            return f"gradstream.resume({str(self.run_dir)!r}, job=the job)"
        return f"gradstream resume {shlex.quote(str(self.run_dir))}"

    @property
    def where(self) -> list[str]:
        """The run directory of a run that did not finish, and how to resume it."""
        more = self.checkpoint and "finished" not in self.last
        resumes = [f"it resumes from {self.checkpoint}: {self.command}"] if more else []
        return [f"run directory: {self.run_dir}", *resumes]

    @property
    def interrupted(self) -> Interrupted:
        """The stop of the run, as an exception."""
        return Interrupted(self.run_dir, self.checkpoint, self.command)

    @property
    def failure(self) -> GradstreamError | None:
        """The error that the run failed with, as its events report it; None for none."""
        failed = self.last.get("failed")
        if failed is None:
            return None
        return typed_error(failed["culprit"], failed["error"], failed["message"], failed["traceback"])
