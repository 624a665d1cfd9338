"""Tells a process which worker it is, where `gradstream train` has started it, and keeps its script's session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from gradstream.checkpoint import Resume, kept
from gradstream.job.job import Job
from gradstream.run.node_spec import NodeSpec
from gradstream.run.plan import worker_name
from gradstream.runtime.storage import DiskStorage
from gradstream.transport.credentials import Credentials


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """The rank of a worker, and the place of its run.

    Args:
        rank: number of this worker.
        world_size: number of workers.
        spec: path of the file with the specification of all nodes.
        coordinator: address of the coordinator.
        network: command-line arguments with the address to listen on, and the credentials.
    """

    rank: int
    world_size: int
    spec: str
    coordinator: str
    network: Sequence[str] = field(repr=False)

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments of the worker's node."""
        known = ["--spec", self.spec, "--name", worker_name(self.rank), "--coordinator", self.coordinator]
        return [*known, *self.network]

    def node_spec(self) -> NodeSpec:
        """Reads the specification of all nodes."""
        return NodeSpec.read(Path(self.spec))

    def job(self) -> Job:
        """The launcher's job, without model and data."""
        return self.node_spec().load()

    def steps_before(self) -> int | None:
        """Number of steps that this worker made before the run was resumed; None in a new run."""
        resume = self.node_spec().resume
        return None if resume is None else Resume.of_json(resume).step_of(worker_name(self.rank))


def handed_out(spec: str) -> list[str]:
    """Command-line arguments with the credentials of a run, from the file beside the specification.

    Raises:
        ConfigError: there is no such file, or another user can have written it. Other users of the machine
            can name a specification through torch's store; this check keeps their code from running here.
    """
    return ["--credentials", str(Credentials.read(Path(spec).parent))]


def newest_in(run_dir: Path) -> str:
    """Folder of the newest checkpoint of a run; "" if there is none."""
    folders = [one.folder for one in kept(DiskStorage(run_dir))]
    return folders[-1] if folders else ""


_assigned: WorkerPlacement | None = None


def assign(assignment: WorkerPlacement) -> None:
    """Sets the placement of this process, which `gradstream train` has started."""
    global _assigned
    _assigned = assignment


def assigned() -> WorkerPlacement | None:
    """The placement of this process; None if `gradstream train` has not started it."""
    return _assigned


class ScriptSession(Protocol):
    """The session of a script, for the program that runs the script and ends the session after it."""

    @property
    def resumable(self) -> bool:
        """Whether the script asks where the run goes on, so that a resumed run would not begin again."""
        ...

    @property
    def aborted(self) -> bool:
        """Whether the run has ended because of another node, which reports why."""
        ...

    def finish(self) -> None:
        """Ends the session of a script that has ended."""
        ...

    def fail(self, error: BaseException) -> None:
        """Ends the run for all workers, since the script has ended with an exception. Never raises."""
        ...


S = TypeVar("S", bound=ScriptSession)

_running: ScriptSession | None = None


def enter(session: S) -> S:
    """Makes `session` the session of this process, and returns it."""
    global _running
    _running = session
    return session


def running() -> ScriptSession | None:
    """The session of this process; None until its script has joined a run with other workers."""
    return _running
