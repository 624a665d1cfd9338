"""Prepares a run before its nodes are started: options, lock, files, cluster, the port of a script."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradstream.errors import ConfigError, DiskError
from gradstream.job.job import is_script
from gradstream.job.plan import RunPlan
from gradstream.machine.resources import allow_open_files, free_memory_bytes
from gradstream.run.followed_events import OnEvent
from gradstream.run.launcher_lock import LauncherRecord, launcher_lock
from gradstream.run.local import Cluster, LocalCluster, ThreadCluster
from gradstream.run.local.cluster import modules_of
from gradstream.run.local.environment import StopSignals, hash_seed, hold_port, node_environment
from gradstream.run.node import run_node
from gradstream.run.node_spec import NodeSpec
from gradstream.run.records import write_records, write_spec
from gradstream.run.remote.address import Address
from gradstream.run.remote.listening import Listening
from gradstream.runtime.storage import disk_error, disk_remedy
from gradstream.untrusted import say

OnAddress = Callable[[Path, str, Sequence[str]], None]

FORKED_BYTES = 25_000_000
"""Least private memory of a forked node: without vectors, and without what it shares with the other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How the launcher starts and follows the nodes of a run.

    Args:
        on_event: called with each event of the run.
        as_threads: whether nodes are threads of this process.
        listening: how other machines join; None if there are none.
        on_address: see `_train.host`; None if the launcher starts the workers.
        cluster: where to start processes, which the caller closes; None makes one for this run.
        stop: polled; once it returns True, the run stops with a checkpoint, as by Ctrl-C. None for a run that is kept.
        earlier: run directories of the runs that the job's script made before this one.
        detached: the signals of the launcher of a detached run, which holds the lock; None for any other.
    """

    on_event: OnEvent | None = None
    as_threads: bool = False
    listening: Listening | None = None
    on_address: OnAddress | None = None
    cluster: LocalCluster | None = None
    stop: Callable[[], bool] | None = None
    earlier: tuple[Path, ...] = ()
    detached: StopSignals | None = None

    @property
    def is_trial(self) -> bool:
        """Whether this is a dry run, of which nothing is kept."""
        return self.stop is not None


class Preparation:
    """Prepares a run.

    Args:
        run_dir: an existing directory.
        options: how its nodes are started and followed.
    """

    def __init__(self, plan: RunPlan, run_dir: Path, options: LaunchOptions) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._options = options
        self._meeting = ""  # host:port at which a script's own process group meets
        begun = run_dir / "nodes.json"  # exists if the run continues
        self._hash_seed = NodeSpec.read(begun).hash_seed if begun.is_file() else hash_seed()

    @contextmanager
    def lock(self, events_from: int) -> Iterator[None]:
        """Holds the launcher's lock of the run, unless there is nothing to follow, or this process holds it.

        Args:
            events_from: where this part of the run begins in its events, in bytes.
        """
        if self._options.is_trial or self._options.detached is not None:
            yield
            return
        record = LauncherRecord.here(events_from=events_from)
        with ExitStack() as stack:
            with self._writing():
                stack.enter_context(launcher_lock(self._run_dir, record))
            yield

    @contextmanager
    def held_port(self) -> Iterator[None]:
        """Reserves a port for scripts that make a process group of torch.distributed."""
        options = self._options
        if not is_script(self._plan.job) or options.on_address is not None:
            yield
            return
        at, listening = Address("127.0.0.1"), options.listening
        if listening is not None:
            at = listening.own.at(listening.meeting_port(self._plan.servers))
        with hold_port(at.host, at.port) as held:
            self._meeting = str(at.at(held.getsockname()[1]))
            yield

    def write_files(self) -> None:
        """Writes the files that nodes, and a detached launcher, read. Raises DiskError if there is no room."""
        with self._writing():
            spec, as_threads = self.spec(self._options.earlier), self._options.as_threads
            write_records(self._plan, spec, self._environment, as_threads=as_threads)

    def cluster(self) -> AbstractContextManager[Cluster]:
        """Writes the files, unless they exist, and makes the cluster. Raises DiskError if there is no room."""
        options, logs = self._options, self._run_dir / "logs"
        if not options.as_threads:
            self._check_machine()
            self._say_what_is_odd()
        if options.detached is None:
            self.write_files()
        with self._writing():
            if self._meeting and options.detached is not None:
                write_spec(self.spec(options.earlier))  # with the port
            if options.cluster is not None:
                return nullcontext(options.cluster)
            if options.as_threads:
                return ThreadCluster(logs, partial(run_node, self._plan))
            plan = self._plan
            shards, modules, cwd = plan.most_servers > 0, modules_of(plan.job), plan.job.cwd
            return LocalCluster(logs, self._environment, shards=shards, modules=modules, cwd=cwd)

    def _check_machine(self) -> None:
        """Raises ConfigError if this machine cannot have so many processes or open files, whatever the model."""
        allow_open_files(self._plan.most_workers * self._plan.parts + self._plan.most_servers + 1)
        listening, shards = self._options.listening, self._plan.most_servers
        if listening is not None and listening.servers_on == "all":
            shards = -(-shards // listening.machines)
        workers = 0 if self._options.on_address else self._per_machine
        nodes, free = 1 + shards + workers, free_memory_bytes()
        if free is not None and nodes * FORKED_BYTES > free:
            raise ConfigError(
                f"{nodes:,} processes on this machine (the coordinator, {shards:,} shards, {workers:,} workers) "
                f"need more than {nodes * FORKED_BYTES / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are "
                "free; nothing was started: take fewer workers or servers"
            )

    def _say_what_is_odd(self) -> None:
        """Warns about settings that are allowed, but seldom meant."""
        job, cores = self._plan.job, len(os.sched_getaffinity(0))
        if self._options.is_trial:
            return
        workers = 0 if self._options.on_address else self._per_machine
        if workers > cores and job.device == "cpu":
            say(
                f"{workers:,} workers share the {cores} cores of this machine: they are no faster than {cores}"
            )
        num_samples = job.data.num_samples
        if num_samples and isinstance(job.batch_size, int) and job.batch_size > num_samples:
            say(
                f"batch_size={job.batch_size:,} is more than the {num_samples:,} samples: minibatches are smaller"
            )

    def spec(self, earlier: tuple[Path, ...]) -> NodeSpec:
        """The description of the plan for the nodes; `earlier` as in `LaunchOptions`."""
        return dataclasses.replace(self._spec, earlier=tuple(map(str, earlier)), meeting=self._meeting)

    @functools.cached_property
    def _spec(self) -> NodeSpec:
        return dataclasses.replace(
            NodeSpec.of(self._plan, self._run_dir),
            trial=self._options.is_trial,
            per_machine=self._per_machine,
            hash_seed=self._hash_seed,
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises DiskError if the directory cannot be written before the nodes are started."""
        try:
            yield
        except OSError as error:
            raise DiskError(
                f"the run directory {self._run_dir} cannot be written: {disk_error(error)}; nothing was "
                f"started: {disk_remedy(error)}, or name another with run_dir=, or --run-dir"
            ) from error

    @property
    def _environment(self) -> dict[str, str]:
        if self._options.as_threads:
            return {}
        made = node_environment(self._per_machine, shards=self._plan.most_servers > 0)
        return made | {"PYTHONHASHSEED": self._hash_seed}

    @property
    def _per_machine(self) -> int:
        """Number of workers, and parts of replicas, on each machine."""
        listening = self._options.listening
        if listening is None or self._options.on_address is not None:
            return self._plan.most_workers * self._plan.parts
        return listening.workers_per_machine
