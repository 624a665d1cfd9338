"""As which worker a process that calls `join()` was started. By torchrun: see `torchrun.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradstream.checkpoint import Resume, kept
from gradstream.job.job import Job
from gradstream.run.node_spec import NodeSpec
from gradstream.run.plan import worker_name
from gradstream.runtime.storage import DiskStorage
from gradstream.transport.credentials import Credentials

__all__ = ["WorkerPlacement", "assign", "assigned", "handed_out", "newest_in"]


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """What a worker needs to know.

    Args:
        rank: of this worker.
        world_size: how many there are.
        spec: file with what all nodes of the run are told.
        coordinator: its address.
        network: the arguments that tell the worker's node where to listen, and its credentials.
    """

    rank: int
    world_size: int
    spec: str
    coordinator: str
    network: Sequence[str] = field(repr=False)

    @property
    def arguments(self) -> list[str]:
        """The arguments of the worker's node."""
        known = ["--spec", self.spec, "--name", worker_name(self.rank), "--coordinator", self.coordinator]
        return [*known, *self.network]

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


def handed_out(spec: str) -> list[str]:
    """Credentials, as arguments, of a run whose workers others start: a file of this user's beside the spec.

    Raises:
        ConfigError: there is none that only this user can have written. So whoever else can say where the
            spec is, as other users of this machine can through torch's store, gets no code of theirs run.
    """
    return ["--credentials", str(Credentials.read(Path(spec).parent))]


def newest_in(run_dir: Path) -> str:
    """The folder of the newest checkpoint of a run; "" where there is none."""
    folders = [one.folder for one in kept(DiskStorage(run_dir))]
    return folders[-1] if folders else ""


_assigned: WorkerPlacement | None = None


def assign(assignment: WorkerPlacement) -> None:
    """This process is a worker that `gradstream train` has started."""
    global _assigned
    _assigned = assignment


def assigned() -> WorkerPlacement | None:
    """As which worker `gradstream train` has started this process, if it has."""
    return _assigned
