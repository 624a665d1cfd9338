"""As which worker a process that calls `join()` was started. By torchrun: see `torchrun.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradstream.checkpoint import Resume
from gradstream.config import Job
from gradstream.node import NodeSpec
from gradstream.roles import worker_name

__all__ = ["Assignment", "assign", "assigned"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker needs to know.

    Args:
        rank: of this worker.
        world_size: how many there are.
        spec: file with what all nodes of the run are told.
        coordinator: its address.
    """

    rank: int
    world_size: int
    spec: str
    coordinator: str

    def told(self) -> NodeSpec:
        """What all nodes of the run are told."""
        return NodeSpec.read(Path(self.spec))

    def job(self) -> Job:
        """The job as the launcher has it, but for model and data."""
        return self.told().load()

    def steps_before(self) -> int | None:
        """How many steps this worker has made before the run was resumed; None where it begins."""
        resume = self.told().resume
        return None if resume is None else Resume.of_json(resume).step_of(worker_name(self.rank))


_assigned: Assignment | None = None


def assign(assignment: Assignment) -> None:
    """This process is a worker that `gradstream train` has started."""
    global _assigned
    _assigned = assignment


def assigned() -> Assignment | None:
    """As which worker `gradstream train` has started this process, if it has."""
    return _assigned
