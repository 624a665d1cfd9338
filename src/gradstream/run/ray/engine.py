"""`RayEngine`: what a run asks of a Ray cluster. Ray itself is imported when a run begins."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qsl

from gradstream.errors import ConfigError

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


def words_of(options: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The options of a call of `train` as those of the command line.

    Raises:
        ConfigError: a value is an object, which other processes can only get from a file.
    """
    words = []
    for name, value in options.items():
        if name == "strategy_options" and isinstance(value, Mapping):
            words += words_of(value, "strategy.")
            continue
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(
                f"train({name}=..., engine=...): the nodes read the job's file, and cannot be given "
                f"{type(value).__name__} objects; put it into the job file"
            )
        words += ["--set", f"{prefix}{name}={str(value).lower() if isinstance(value, bool) else value}"]
    return words
