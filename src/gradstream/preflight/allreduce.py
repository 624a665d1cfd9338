"""Measures how long an allreduce takes among real processes.

The ranks share only a folder. It holds the plan; each rank writes its address and, at the end, its times into it.
So ranks may be processes of this machine, or of network namespaces.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.errors import ConfigError, GradstreamError, UnknownNameError
from gradstream.machine.resources import free_memory_bytes
from gradstream.run.local.cluster import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.transport.offers import CHOICES, Choice
from gradstream.transport.proof import new_secret

ALGORITHM_NAMES = ("auto", "shared", "hierarchical", "messages", *ALGORITHMS)
"""The choices: "auto" for the group that `form_group` chooses, one of its kinds, or one algorithm."""

RANK = "gradstream.preflight.allreduce_rank:main"
LIMIT_S = 600.0
ITEMSIZE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreducePlan:
    """The settings of a measurement.

    Args:
        ranks: number of processes.
        elements: length of the vector, in float32.
        algorithm: one of `ALGORITHM_NAMES`. "auto" measures the call that a strategy makes: in place where all
            ranks are on one host, whatever the carrier of a run is.
        carrier: carrier of messages, where the group sends any: "auto", "grpc", "tcp" or "shm".
        times: number of repetitions, after two that do not count.
        listen: host that each rank listens on; loopback by default. On other hosts, ranks send plain text.
        hosts: name of each rank's host; by default each rank finds out its own.
        secret: secret by which the ranks know one another.

    Raises:
        ConfigError: a number is below 1, a name is unknown, or two options exclude each other.
    """

    ranks: int = 2
    elements: int = 1_000_000
    algorithm: str = "auto"
    carrier: Choice = "auto"
    times: int = 9
    listen: Sequence[str] = ()
    hosts: Sequence[str] = ()
    secret: str = field(default_factory=lambda: new_secret().decode(), repr=False)

    def __post_init__(self) -> None:
        for name in ("ranks", "elements", "times"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.algorithm not in ALGORITHM_NAMES:
            raise UnknownNameError("algorithm", self.algorithm, ALGORITHM_NAMES)
        if self.carrier not in CHOICES:
            raise UnknownNameError("carrier", self.carrier, CHOICES)
        if self.algorithm == "shared" and self.carrier != "auto":
            raise ConfigError(
                f"algorithm='shared', carrier={self.carrier!r}: ranks that add in place send no messages, and "
                "need no carrier; leave one of the two out"
            )

    @property
    def kind(self) -> str:
        """The kind of group for `form_group`; a single algorithm runs over messages."""
        return "messages" if self.algorithm in ALGORITHMS else self.algorithm

    def save(self, folder: Path) -> None:
        """Writes the plan for the ranks."""
        (folder / "plan.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> AllreducePlan:
        """Reads the plan that `save` has written."""
        return cls(**json.loads((folder / "plan.json").read_text()))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceResult:
    """The result of a measurement.

    Args:
        plan: the settings.
        kind: kind of the group: "messages", "shared" or "hierarchical".
        algorithm: name of the algorithm that was used.
        times_s: seconds that the slowest rank took, for each repetition.
        carriers: carriers by which rank 0 reached the other ranks, each once; none in place.
        figures: alpha_s, beta_s_byte, gamma_s_byte and message_s, measured before and after the repetitions on
            the same links; none in place.
        predicted_s: seconds that the algorithm's formula predicts with these figures; None in place, and for
            a hierarchical group.
    """

    plan: AllreducePlan
    kind: str
    algorithm: str
    times_s: Sequence[float]
    carriers: Sequence[str] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    predicted_s: float | None = None

    @property
    def median_s(self) -> float:
        """Median of the repetitions, in seconds."""
        return statistics.median(self.times_s)

    @property
    def bytes_s(self) -> float:
        """Bytes of the vector per second."""
        return ITEMSIZE_BYTES * self.plan.elements / self.median_s

    @property
    def bus_bytes_s(self) -> float:
        """Bytes that each rank has to send at least, 2(p-1)/p of the vector, per second."""
        return 2 * (self.plan.ranks - 1) / self.plan.ranks * self.bytes_s

    @property
    def predicted_over_median(self) -> float | None:
        """The predicted time divided by the median; None without a prediction."""
        return None if self.predicted_s is None else self.predicted_s / self.median_s

    @property
    def as_messages(self) -> AllreducePlan | None:
        """The plan that measures the same sum by messages, where the ranks added in place; else None."""
        in_place = self.kind == "shared" and self.plan.algorithm == "auto"
        return replace(self.plan, algorithm="messages") if in_place else None

    def record(self) -> dict[str, Any]:
        """The settings and the results as a JSON object."""
        return {
            "ranks": self.plan.ranks,
            "elements": self.plan.elements,
            "carrier": self.plan.carrier,
            "carriers": list(self.carriers),
            "kind": self.kind,
            "algorithm": self.algorithm,
            "median_s": self.median_s,
            "min_s": min(self.times_s),
            "max_s": max(self.times_s),
            "times_s": list(self.times_s),
            "bytes_s": self.bytes_s,
            "bus_bytes_s": self.bus_bytes_s,
            "predicted_s": self.predicted_s,
            "predicted_over_median": self.predicted_over_median,
            **self.figures,
        }


def measure_here(plan: AllreducePlan) -> AllreduceResult:
    """Measures with processes of this machine.

    Raises:
        ConfigError: this machine has too little memory.
        GradstreamError: a rank failed, with the end of its log; or the ranks took longer than `LIMIT_S`.
    """
    free, least = free_memory_bytes(), ITEMSIZE_BYTES * plan.elements * plan.ranks
    if free is not None and least > free:
        raise ConfigError(
            f"elements = {plan.elements}: {plan.ranks} ranks hold {least / 1e9:,.1f} GB at least, and "
            f"{free / 1e9:,.1f} GB of memory are free"
        )
    with tempfile.TemporaryDirectory(prefix="gradstream-bench-") as name:
        folder = Path(name)
        plan.save(folder)
        with LocalCluster(folder / "logs", node_environment(plan.ranks)) as cluster:
            for rank in range(plan.ranks):
                cluster.start(f"rank-{rank}", [str(folder), str(rank)], main=RANK)
            _wait(cluster, plan.ranks)
        return result_of(folder)


def _wait(cluster: LocalCluster, ranks: int) -> None:
    until = time.monotonic() + LIMIT_S
    while ranks:
        message = cluster.message(max(0.0, until - time.monotonic()))
        if message is None:
            raise GradstreamError(
                f"{ranks} ranks have not finished within {LIMIT_S:g} s: end other programs on this machine, or measure "
                "fewer ranks"
            )
        if "exited" in message:
            if message["status"] != 0:
                name = message["exited"]
                raise GradstreamError(
                    f"{name} ended with status {message['status']}:\n{cluster.log_tail(name)}"
                )
            ranks -= 1


def result_of(folder: Path) -> AllreduceResult:
    """Reads the result from the folder of the ranks, once all of them have ended."""
    plan = AllreducePlan.load(folder)
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(plan.ranks)]
    slowest = [max(times) for times in zip(*(result["times_s"] for result in results), strict=True)]
    return AllreduceResult(plan=plan, **{**results[0], "times_s": slowest})
