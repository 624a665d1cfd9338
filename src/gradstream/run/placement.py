"""Tells a process started by `gradstream train` which worker it is, and keeps its script's session."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

import torch

from gradstream.checkpoint import Resume, kept
from gradstream.errors import RESUMABLE, GradstreamError, Interrupted, UserCodeError
from gradstream.job.code import load_module, run_kept
from gradstream.job.files import traceback_in
from gradstream.job.job import Job
from gradstream.job.plan import worker_name
from gradstream.run.local.environment import set_environment
from gradstream.run.node import ABORTED, FAILED, OK, Say, say_to, traceback_of
from gradstream.run.node_spec import NodeSpec
from gradstream.run.remote.address import Address
from gradstream.runtime.storage import DiskStorage
from gradstream.transport.proof import Credentials

# ---- placement ---------------------------------------------------------------------------


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

    @property
    def is_late(self) -> bool:
        """Whether the run had begun when this process was started."""
        return "--clock" in self.network

    @property
    def num_at_first(self) -> int:
        """Number of workers at the run's beginning."""
        return int(self.node_spec().plain["workers"])

    @property
    def is_further(self) -> bool:
        """Whether this worker is one more than there were at the run's beginning."""
        return self.is_late and self.rank >= self.num_at_first

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
    folders = [checkpoint.folder for checkpoint in kept(DiskStorage(run_dir))]
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
    def is_main(self) -> bool:
        """Whether this is the worker that should print."""
        ...

    @property
    def resumable(self) -> bool:
        """Whether the script asks where the run continues, so that a resumed run would not start over."""
        ...

    @property
    def aborted(self) -> bool:
        """Whether the run ended because of another node, which reports why."""
        ...

    def finish(self) -> None:
        """Ends the session of a script that has ended."""
        ...

    def fail(self, error: BaseException) -> None:
        """Ends the run for all workers, since the script raised an exception. Never raises."""
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


# ---- script ------------------------------------------------------------------------------
# Runs a script with its own training loop, as one worker of `gradstream train`.


def main(argv: list[str] | None = None) -> int:
    """Runs the script as `__main__`, as one of the workers, and returns its exit status."""
    parser = argparse.ArgumentParser(prog="gradstream.run.placement", description=__doc__)
    parser.add_argument("--spec", required=True, type=Path, help="file made by the launcher")
    parser.add_argument("--name", required=True, help="worker-0, ...")
    parser.add_argument("--coordinator", required=True, help="its address")
    parser.add_argument("--credentials", required=True, help="file with credentials, made by the launcher")
    parser.add_argument("--listen", default="127.0.0.1:0", help="address to listen on")
    parser.add_argument("--insecure", action="store_true", help="plain text on other interfaces")
    parser.add_argument("--clock", help="time at which the run began, in nanoseconds, if it has begun")
    parser.add_argument("--report-fd", type=int, help="file descriptor for reports to the launcher")
    arguments = parser.parse_args(argv)
    say = say_to(arguments.report_fd)
    spec = NodeSpec.read(arguments.spec)
    rank = int(arguments.name.rpartition("-")[2])
    size = max(rank + 1, int(spec.plain["workers"]))  # more workers may come
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    master, own = Address.parse(spec.meeting, "meeting"), Address.parse(arguments.listen, "--listen")
    set_environment(rank, size, spec.per_machine, (master.host, master.port), own.host)
    network = ["--listen", arguments.listen, "--credentials", arguments.credentials]
    network += ["--insecure"] if arguments.insecure else []
    network += ["--clock", arguments.clock] if arguments.clock else []
    assign(WorkerPlacement(rank, size, str(arguments.spec), arguments.coordinator, network))
    sys.stdout = _Tee(sys.stdout, say, rank)
    sys.argv = [spec.script, *spec.argv[1:]]
    run_kept(Path(spec.run_dir))
    status, session = _run(Path(spec.script), arguments.name, say), running()
    if status != OK and session is not None and not session.resumable:
        say(begins_again=True)
    return status


def _run(script: Path, name: str, say: Say) -> int:
    try:
        load_module(script, "__main__")
    except Interrupted:
        return RESUMABLE
    except SystemExit as error:
        if error.code not in (None, 0):
            return _failed(UserCodeError(f"{name}: the script ended with status {error.code!r}"), name, say)
    except GradstreamError as error:
        # The run failed, here or elsewhere, or the script misused the session.
        return _failed(error, name, say)
    except BaseException as error:
        text = traceback_in(script.resolve(), error)
        message = f"{name}: the script raised {type(error).__name__}: {error}"
        return _failed(UserCodeError(message, text), name, say)
    session = running()
    if session is None:
        return OK
    try:
        session.finish()
    except Interrupted:
        return RESUMABLE
    except GradstreamError as error:
        return _failed(error, name, say)
    return OK


def _failed(error: GradstreamError, name: str, say: Say) -> int:
    session = running()
    text = traceback_of(error)
    sys.stderr.write(text)
    if session is not None and session.aborted:
        return ABORTED  # the coordinator ended the run and knows why
    if session is not None:
        session.fail(error)
    say(error=type(error).__name__, message=str(error), traceback=text)
    return FAILED


class _Tee:
    """Standard output that goes to the launcher too, while this is the main worker."""

    def __init__(self, log: TextIO, say: Say, rank: int) -> None:
        self._log = log
        self._say = say
        self._rank = rank

    def write(self, text: str) -> int:
        """Writes to the log, and to the launcher if this is the main worker."""
        session = running()
        if self._rank == 0 if session is None else session.is_main:
            self._say(printed=text)
        self._log.write(text)
        self._log.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)
