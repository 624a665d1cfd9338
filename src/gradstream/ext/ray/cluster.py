"""A Ray cluster from a run's point of view: `RayCluster`; and `RunFiles`, a run's files on the first node's machine.

Ray itself is imported when a run begins.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from gradstream.errors import (
    ConfigError,
    DeadlineError,
)
from gradstream.ext.ray.actor import RayNode, digest_of_file
from gradstream.ext.ssh.run_files import FREE_PART, MAX_FILES
from gradstream.machine.resources import free_disk_bytes
from gradstream.untrusted import escaped, say

# ---- cluster -----------------------------------------------------------------------------
# `RayCluster`: the few things that a run asks of Ray, each with a deadline and an error that says what to do.

RAY_SESSION = "session_[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]_*"
"""Folder of a Ray node: Ray packs the folder of a job into it, and would pack the growing package into itself."""

NOT_SENT = ["runs", ".git", ".venv", "**/__pycache__", f"**/{RAY_SESSION}"]
"""What is not sent to the nodes with the folder of a job."""

OWN_LISTS = (".rayignore", ".gitignore")
"""Files that make Ray skip more."""

MOST_BYTES = 500 << 20
"""The largest package that Ray sends to its nodes. It packs everything first, on this machine's disk."""

LOOK_S = 1.0
"""Seconds between two checks whether the user has stopped the run, while it waits for room."""

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by `ray job submit`, which has already sent the files."""


def ray_module() -> ModuleType:
    """Ray, if it is installed. Raises ConfigError."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise ConfigError(
            f"engine: Ray cannot be imported ({error}); pip install 'gradstream[ray]' here and on all machines"
        ) from None
    return ray  # type: ignore[no-any-return, unused-ignore]


class RayCluster:
    """A connection to a Ray cluster. A context manager, which ends everything that it started, including every actor.

    Args:
        address: see `RayEngine`.
        folder: the folder of the job, which is sent to the nodes unless this program's own Ray job has files.
        wait_s: longest wait for Ray.
    """

    def __init__(self, address: str, folder: Path, wait_s: float) -> None:
        self.ray: Any = ray_module()
        self._address = address
        self._folder = folder
        self._wait_s = wait_s
        self._own = False
        self._groups: dict[Any, Any] = {}  # by actor
        self._shared: Any = None  # placement group of the first nodes

    def __enter__(self) -> Self:
        if not self.ray.is_initialized():
            self._connect()
        return self

    def _connect(self) -> None:
        if JOB_VARIABLE not in os.environ:
            _check_size(self._folder)
        package = Path(__file__).resolve().parents[2]
        brought = {"working_dir": str(self._folder), "py_modules": [str(package)], "excludes": NOT_SENT}
        try:
            self.ray.init(
                address=self._address,
                runtime_env=None if JOB_VARIABLE in os.environ else brought,
                log_to_driver=False,
                configure_logging=False,
            )
        except ConnectionError as error:
            raise ConfigError(
                f"engine: no Ray cluster at {self._address!r}: {error}; `ray start --head` starts one on this machine, "
                "RAY_ADDRESS or ray://HOST:10001 names another"
            ) from error
        except (RuntimeError, ValueError) as error:
            self.ray.shutdown()
            raise ConfigError(
                f"engine: Ray cannot begin a job with the folder {self._folder}: {error}; a file .rayignore in it "
                "names what the nodes do not need, and GRADSTREAM_DATA a folder of data that all machines have"
            ) from error
        self._own = True

    def __exit__(self, *exception: object) -> None:
        for actor in list(self._groups):
            self.remove(actor)
        if self._shared is not None:
            self.ray.util.remove_placement_group(self._shared)
        if self._own:
            self.ray.shutdown()

    def place(self, bundles: Sequence[Mapping[str, float]], stopped: Callable[[], bool]) -> bool:
        """Makes Ray reserve room for the first nodes, on as many machines as it can. False if stopped first.

        Raises:
            DeadlineError: there is no room for all of them.
        """
        self._shared = self.ray.util.placement_group([dict(bundle) for bundle in bundles], strategy="SPREAD")
        give_up_s, there, said = time.monotonic() + self._wait_s, False, False
        while not there and not stopped() and (left_s := give_up_s - time.monotonic()) > 0:
            there = self._shared.wait(min(LOOK_S, left_s))
            if not there and not said:
                say(f"waiting up to {self._wait_s:g} s for room in the Ray cluster. {self._lack(bundles)}")
                said = True
        if not there and not stopped():
            raise DeadlineError(
                "ray",
                f"has no room for {len(bundles)} nodes after {self._wait_s:g} s. {self._lack(bundles)}. Ask for less "
                "(cpus, gpus, memory_gib, workers), begin with fewer (least), or add machines to the cluster",
            )
        return there

    def _lack(self, bundles: Sequence[Mapping[str, float]]) -> str:
        """What the nodes ask for, and what is available."""
        asked = "; ".join(_words(bundle) for bundle in bundles)
        free, all_of_them = self.ray.available_resources(), self.ray.cluster_resources()
        return f"They ask for {asked}. Free are {_words(free)}, of {_words(all_of_them)}"

    def start(self, rank: int, bundle: Mapping[str, float]) -> Any:
        """Starts the actor of a node. Ray restarts it, on another machine if need be, unless it is the first."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index = self._shared, rank
        if rank >= len(group.bundle_specs):
            group, index = self.ray.util.placement_group([dict(bundle)]), 0
        kind = self.ray.remote(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=4,
            max_restarts=-1 if rank else 0,
            max_task_retries=-1 if rank else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )(RayNode)
        actor = kind.remote()
        self._groups[actor] = None if group is self._shared else group
        return actor

    def remove(self, actor: Any) -> None:
        """Ends an actor and its process, and gives its room back."""
        self.ray.kill(actor, no_restart=True)
        if (group := self._groups.pop(actor)) is not None:
            self.ray.util.remove_placement_group(group)

    def answer(self, reference: Any, who: str, wait_s: float | None = None) -> Any:
        """The answer of an actor.

        Raises:
            DeadlineError: it did not come in time.
            ray.exceptions.RayError: the actor cannot be made, or is gone.
        """
        limit_s = self._wait_s if wait_s is None else wait_s
        try:
            return self.ray.get(reference, timeout=limit_s)
        except self.ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                who, f"has not answered within {limit_s:g} s; `ray list actors` shows its state"
            ) from None

    def done(self, references: Sequence[Any], wait_s: float) -> list[Any]:
        """Those of the references whose answers are there, after up to `wait_s`; at once when there is one."""
        ready: list[Any] = self.ray.wait(list(references), num_returns=1, timeout=wait_s)[0]
        return ready


def _check_size(folder: Path) -> None:
    """Raises ConfigError for a job folder too large for Ray, which would fill the disk before complaining."""
    if any((folder / name).exists() for name in OWN_LISTS):
        return
    left_bytes = MOST_BYTES
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not any(fnmatch(name, pattern.rpartition("/")[2]) for pattern in NOT_SENT)
        ]
        for name in files:
            with suppress(FileNotFoundError):  # it has just gone
                left_bytes -= os.lstat(os.path.join(root, name)).st_size
        if left_bytes < 0:
            raise ConfigError(
                f"engine: the folder of the job, {folder}, has more than {MOST_BYTES >> 20} MiB, which is the most "
                "that Ray brings to its nodes; put the job file into a folder of its own, or name in .rayignore what "
                "the nodes do not need, and in GRADSTREAM_DATA a folder of data that all machines have"
            )


def _words(resources: Mapping[str, float]) -> str:
    """Resources in words, without those that Ray defines for each machine and group."""
    amounts = {
        name: f"{value / 2**30:.1f} GiB" if name == "memory" else f"{value:g}"
        for name, value in sorted(resources.items())
        if name != "object_store_memory" and not name.startswith("node:") and "_group_" not in name
    }
    return ", ".join(f"{name} {value}" for name, value in amounts.items()) or "nothing"


# ---- files -------------------------------------------------------------------------------
# Where nodes find the job file; and `RunFiles`, the files of a run on the machine of its first node.

ANSWER_S = 60.0
"""Longest wait for an answer of the first node while it runs."""


def folder_of(job: str) -> Path:
    """The folder that nodes get as their working directory: that of the job file or, for a module, the current one."""
    return Path(job.partition(":")[0]).parent if ".py" in job else Path.cwd()


def job_files(job: str) -> tuple[list[str], str, str]:
    """Where nodes may find the job file, its SHA-256, and ":function" after it; no places for a module."""
    place, colon, function = job.partition(":")
    file = Path(place)
    if file.suffix != ".py":
        return [], "", ""
    near = [str(file.relative_to(Path.cwd()))] if file.is_relative_to(Path.cwd()) else []
    return [*near, file.name, str(file)], digest_of_file(file), colon + function


NAME_BYTES = 256
"""Longest name of a file in a message."""


class RunFiles:
    """The files of a run, which come in pieces that are too small for Ray's object store.

    Args:
        actor: the actor of the first node.
        events_bytes: size of the events that the driver does not ask for.
    """

    def __init__(self, cluster: RayCluster, actor: Any, events_bytes: int) -> None:
        self._cluster = cluster
        self._actor = actor
        self._read_bytes = events_bytes
        self._rest = b""

    def events(self) -> Iterator[dict[str, Any]]:
        """The events since the last call; none if the actor is gone: the end of its call says why.

        Raises:
            DeadlineError: the actor does not answer.
        """
        while True:
            asked = self._actor.events.remote(self._read_bytes)
            try:
                data = self._cluster.answer(asked, "node 0", ANSWER_S)
            except self._cluster.ray.exceptions.RayError:
                return
            if not data:
                return
            self._read_bytes += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def bring(self, run_dir: Path) -> None:
        """Writes all files into a folder here.

        Raises:
            ConfigError: the node names a file that would be elsewhere, or sends more than the disk has room for.
            DeadlineError: the actor does not answer.
        """
        left = int(FREE_PART * free_disk_bytes(run_dir))
        names = self._cluster.answer(self._actor.files.remote(), "node 0", ANSWER_S)
        if len(names) > MAX_FILES:
            raise ConfigError(f"node 0 names {len(names):,} files of its run, expected at most {MAX_FILES:,}")
        for name in names:
            path = (run_dir / name).resolve()
            if not path.is_relative_to(run_dir.resolve()):
                raise ConfigError(f"node 0 names a file outside of its run: {escaped(name, NAME_BYTES)}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                while data := self._cluster.answer(
                    self._actor.piece.remote(name, file.tell()), "node 0", ANSWER_S
                ):
                    left -= len(data)
                    if left < 0:
                        raise ConfigError(f"node 0 sends a run that fills the disk of {run_dir}: make room")
                    file.write(data)
