"""The plan of a run as JSON: the launcher writes it, and each node reads the job again from it."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradstream.checkpoint import Resume
from gradstream.data.alike import checks_of, differences
from gradstream.errors import ConfigError
from gradstream.job.descriptions import describe
from gradstream.job.files import load_job
from gradstream.job.job import Job, is_script
from gradstream.job.overrides import overrides, with_overrides
from gradstream.job.plan import RunPlan
from gradstream.job.registry import find_optimizer, find_strategy
from gradstream.job.sources import import_from, users_folder
from gradstream.run.files import read_record
from gradstream.run.planning import plan_run
from gradstream.untrusted import MismatchError, check_record


def _optimizer_of(plan: RunPlan, job: Job) -> dict[str, Any]:
    if plan.whole is None:
        return describe(plan.optimizer)
    return {} if job.optimizer is None else describe(find_optimizer(job.optimizer))


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The plan of a run, as nodes.json holds it.

    Args:
        job: place of the job (see `Job.spec`); "" if it is in no file, as in a notebook.
        earlier: run directories of the runs that the script made before this one.
        run_dir: run directory.
        plain: fields of the job that are plain values.
        strategy, optimizer: as the registry describes them.
        resume: where the run continues, as `Resume.as_json` writes it; None if it is new.
        script: the user's script, if the workers run its training loop; the other nodes do not run it.
        data: properties of the data that the workers compare, by name; see `data.alike.checks_of`.
        hash_seed: PYTHONHASHSEED of the nodes.
        trial: whether nothing of the run is kept, so that files need not be synchronized to the disk.
        elsewhere: whether the nodes are on another machine than the launcher, with another run directory: they
            write and read checkpoints through the coordinator.
        per_machine: number of workers on each machine, if they run a script.
        meeting: host:port at which the script's own torch.distributed meets; "" if torchrun or another
            launcher has started the script.
        imports: where the launcher imports the user's modules from; see `users_folder`.
        seal: shows that this user's gradstream wrote it; see `run/launches.py`.
    """

    id: str
    job: str
    earlier: tuple[str, ...]
    run_dir: str
    plain: dict[str, Any]
    strategy: dict[str, Any]
    optimizer: dict[str, Any]
    resume: dict[str, Any] | None = None
    script: str = ""
    data: dict[str, str] = field(default_factory=dict)
    hash_seed: str = "0"
    trial: bool = False
    elsewhere: bool = False
    per_machine: int = 1
    meeting: str = ""
    imports: str = ""
    seal: str = ""

    @classmethod
    def of(cls, plan: RunPlan, run_dir: Path) -> NodeSpec:
        """The description of a plan. A job that is not in a file can be run, but not read again."""
        job = plan.whole or plan.job
        return cls(
            id=plan.id,
            job=job.data.job if is_script(job) else job.spec or "",  # type: ignore[attr-defined]
            earlier=(),
            run_dir=str(run_dir),
            plain=overrides(job),
            strategy=describe(find_strategy(job.strategy, job.strategy_options)),
            optimizer=_optimizer_of(plan, job),
            resume=None if plan.resume is None else plan.resume.as_json(),
            script=job.spec or "" if is_script(job) else "",
            data=checks_of(job.data),
            imports=users_folder(),
        )

    @classmethod
    def read(cls, path: Path) -> NodeSpec:
        """Reads a spec from a file. Raises ConfigError if it holds none, FileNotFoundError if there is no file."""
        record = read_record(path)
        try:
            check_record(cls, record)
        except MismatchError as error:
            raise ConfigError(
                f"{path} is damaged, or another version of gradstream wrote it: {error}; put it back from a "
                "copy, or use the version that run.json names"
            ) from None
        return cls(**record)

    @property
    def argv(self) -> list[str]:
        """The command line that the user's file finds in sys.argv."""
        return list(self.plain.get("argv") or sys.argv)

    def load(self) -> Job:
        """Reads the job in this process as a node does. Raises ConfigError if it is not in a file."""
        return self._load(self.job)

    def load_again(self) -> Job:
        """Reads the job as the launcher did: a script up to its `join()`. Raises ConfigError as `load`."""
        return self._load(self.script or self.job)

    def plan(self, job: Job) -> RunPlan:
        """The launcher's plan, made again from this node's job. Raises ConfigError."""
        resume = None if self.resume is None else Resume.of_json(self.resume)
        return plan_run(job, self.id, resume=resume)

    def check_data(self, job: Job) -> None:
        """Raises ConfigError if this node's data differs from the launcher's."""
        for part, mine, launchers in differences(checks_of(job.data), self.data):
            raise ConfigError(
                f"{part} of the data set {job.data.name!r} differ between nodes: this node has {mine}, the "
                f"launcher {launchers}. Every node runs the job file and makes the data again: {self.same_data}"
            )

    @property
    def same_data(self) -> str:
        """What to do if two processes make different data."""
        return (
            "give the random generator a seed, numpy.random.default_rng(0), or read the data from a file; sort what "
            "comes from a set or from a folder, sorted(os.listdir(...)); a process that gradstream has not started "
            f"has the order of sets of the nodes by PYTHONHASHSEED={self.hash_seed}"
        )

    def _load(self, job: str) -> Job:
        if not job:
            raise ConfigError(
                f"{self.run_dir}: the job of this run was not in a file, so it cannot be loaded again; put the job "
                "into a file, and begin a new run"
            )
        import_from(self.imports)
        loaded = load_job(job, earlier=[Path(path) for path in self.earlier], argv=self.argv)
        # A class defined in the job file has no place: the fields of the file's own object are changed.
        strategy = find_strategy(self.strategy["class"] or loaded.strategy, self.strategy["fields"])
        optimizer = None  # of a job with phases, each of which takes its strategy's
        if self.optimizer:
            optimizer = find_optimizer(
                self.optimizer["class"] or loaded.optimizer or strategy.optimizer(), self.optimizer["fields"]
            )
        changed = with_overrides(loaded, self.plain)
        return dataclasses.replace(changed, strategy=strategy, strategy_options={}, optimizer=optimizer)
