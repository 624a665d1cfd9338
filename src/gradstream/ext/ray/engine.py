"""`RayEngine`: what a run asks of a Ray cluster. Ray itself is imported when a run begins."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from urllib.parse import parse_qsl

from gradstream.errors import ConfigError, DeadlineError
from gradstream.ext.ray.actor import RayNode
from gradstream.run.followed_events import OnEvent
from gradstream.untrusted import say

# ---- engine ------------------------------------------------------------------------------

FORM = "ray, or ray://HOST:PORT of a Ray Client server, and options: 'ray?cpus=4&least=2'"


@dataclass(slots=True, kw_only=True)
class RayEngine:
    """Has Ray place the nodes of a run, start them again elsewhere, and change their number.

    A node is a process of gradstream with `workers_per_node` workers, in an actor. The first one has the coordinator
    and all shards besides.

    Args:
        address: "auto" takes the cluster that this program is connected to, that of RAY_ADDRESS, or that of this
            machine; "ray://host:10001" a cluster that is reached through Ray Client.
        cpus: CPUs that each node asks Ray for, and whose number its threads of arithmetic have.
        gpus: GPUs of each node.
        memory_gib: memory of each node, in GiB; 0 asks for none.
        first_cpus: CPUs of the first node; None asks for as many as the others have.
        resources: other resources of Ray that each node asks for.
        workers_per_node: workers of each node.
        least: number of nodes with which training begins, and which Ray places together; the others join when Ray has
            room for them. None waits for all.
        wait_s: longest wait for room, and for a process to answer, in seconds.

    Example:
        >>> engine = RayEngine(cpus=4, least=2)
        >>> run = train(job, workers=8, engine=engine)  # doctest: +SKIP
    """

    address: str = "auto"
    cpus: float = 1.0
    gpus: float = 0.0
    memory_gib: float = 0.0
    first_cpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    workers_per_node: int = 1
    least: int | None = None
    wait_s: float = 300.0
    _wanted: int | None = field(default=None, init=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an engine as a command line has it: "ray", "ray?cpus=4&least=2", "ray://head:10001?gpus=1".

        Raises:
            ConfigError: it is no engine, or has an option that there is not, or a value of a wrong kind.
        """
        place, _, query = text.partition("?")
        if place != "ray" and not re.fullmatch(r"ray://[^:]+:\d+", place):
            raise ConfigError(f"engine {text!r}: expected {FORM}")
        known = {one.name: one for one in dataclasses.fields(cls) if one.init and one.name != "resources"}
        known.pop("address")
        given: dict[str, Any] = {"address": "auto" if place == "ray" else place}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
                raise ConfigError(f"engine {text!r}: there is no option {name!r}; {hint}")
            kind = int if "int" in str(known[name].type) else float
            try:
                given[name] = kind(value)
            except ValueError:
                raise ConfigError(
                    f"engine {text!r}: {name}={value!r}; expected "
                    + ("a whole number" if kind is int else "a number")
                ) from None
        return cls(**given)

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus", "memory_gib", "first_cpus"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"engine: {name}={value}; expected 0 or more")
        if not (self.bundle(0) and self.bundle(1)):
            raise ConfigError(
                "engine: cpus=0: a node has to ask Ray for something; expected cpus, gpus or resources"
            )
        if self.workers_per_node < 1:
            raise ConfigError(f"engine: workers_per_node={self.workers_per_node}; expected at least 1")

    def run(
        self, job: str, words: Sequence[str], *, workers: int, run_dir: Path, on_event: OnEvent | None
    ) -> None:
        """Trains to the end; see `gradstream._train.RunEngine`, and `RayRun.run` for the errors."""
        from gradstream.ext.ray.driver import RayRun

        RayRun(engine=self, job=job, words=words, workers=workers, run_dir=run_dir, on_event=on_event).run()

    @property
    def wanted(self) -> int | None:
        """Number of nodes that the run is to have now; None for all."""
        return self._wanted

    def scale(self, nodes: int) -> None:
        """Changes the number of nodes of the run, while it trains or before. Returns at once.

        The nodes of the highest numbers hand in what they have computed and leave; new ones join when Ray has placed
        them. May be called from any thread, a callback of the run among them.

        Args:
            nodes: new number, at least 1. Those above the number that the run was planned for (`workers` divided by
                `workers_per_node`) are not started.

        Raises:
            ConfigError: it is less than 1.
        """
        if nodes < 1:
            raise ConfigError(f"scale: nodes={nodes}; expected at least 1: the first node has the parameters")
        self._wanted = nodes

    def bundle(self, rank: int) -> dict[str, float]:
        """The resources that a node asks Ray for."""
        cpus = self.cpus if rank or self.first_cpus is None else self.first_cpus
        asked = {"CPU": cpus, "GPU": self.gpus, "memory": self.memory_gib * 2**30, **self.resources}
        return {name: value for name, value in asked.items() if value}

    def nodes_for(self, workers: int) -> int:
        """Number of nodes of a run with so many workers, or parts of replicas. Raises ConfigError."""
        nodes, left = divmod(workers, self.workers_per_node)
        if left:
            raise ConfigError(
                f"workers={workers} do not divide among nodes with workers_per_node={self.workers_per_node} each; "
                f"expected a multiple of {self.workers_per_node}"
            )
        if self.least is not None and not 1 <= self.least <= nodes:
            raise ConfigError(f"engine: least={self.least}; expected 1 to {nodes}, the number of nodes")
        if nodes == 1:
            raise ConfigError(
                "engine: a single node would be a run on one machine; expected workers=2 or more, or a smaller "
                "workers_per_node"
            )
        return nodes


# ---- cluster -----------------------------------------------------------------------------
# `RayCluster`: the few things that a run asks of Ray, each with a deadline and an error that says what to do.

RAY_SESSION = "session_[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]_*"
"""Folder of a Ray node: Ray packs the folder of a job into it, and would pack the growing package into itself."""

NOT_SENT = ["runs", ".git", ".venv", "**/__pycache__", f"**/{RAY_SESSION}"]
"""What is not brought to the nodes with the folder of a job."""

OWN_LISTS = (".rayignore", ".gitignore")
"""Files by which Ray leaves out more."""

MOST_BYTES = 500 << 20
"""The largest package that Ray brings to its nodes. It packs all first, on this machine's disk."""

LOOK_S = 1.0
"""Seconds between two looks whether the user has stopped the run, while it waits for room."""

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by `ray job submit`, which has brought the files already."""


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
    """A connection to a Ray cluster. A context manager, which ends what it has begun, and every actor.

    Args:
        address: see `RayEngine`.
        folder: the folder of the job, which is brought to the nodes unless this program's own Ray job has files.
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
        """Has Ray keep room for the first nodes, on as many machines as it can. False if it was stopped before.

        Raises:
            DeadlineError: there is no room for all of them.
        """
        self._shared = self.ray.util.placement_group([dict(one) for one in bundles], strategy="SPREAD")
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
        """What the nodes ask for, and what there is."""
        asked = "; ".join(_words(one) for one in bundles)
        free, all_of_them = self.ray.available_resources(), self.ray.cluster_resources()
        return f"They ask for {asked}. Free are {_words(free)}, of {_words(all_of_them)}"

    def start(self, rank: int, bundle: Mapping[str, float]) -> Any:
        """Starts the actor of a node. Ray starts it again, on another machine if need be, unless it is the first."""
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
        found: list[Any] = self.ray.wait(list(references), num_returns=1, timeout=wait_s)[0]
        return found


def _check_size(folder: Path) -> None:
    """Raises ConfigError if the folder of a job is too large for Ray. Ray would fill the disk before it said so."""
    if any((folder / name).exists() for name in OWN_LISTS):
        return
    left_bytes = MOST_BYTES
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if not any(fnmatch(name, one.rpartition("/")[2]) for one in NOT_SENT)
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
    """Resources in words; those that Ray makes for each machine and group are left out."""
    told = {
        name: f"{value / 2**30:.1f} GiB" if name == "memory" else f"{value:g}"
        for name, value in sorted(resources.items())
        if name != "object_store_memory" and not name.startswith("node:") and "_group_" not in name
    }
    return ", ".join(f"{name} {value}" for name, value in told.items()) or "nothing"
