"""`SimulationConfig`: the durations of computations and the network that a simulation assumes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.runtime.base import Work

__all__ = [
    "Cost",
    "Exponential",
    "Jitter",
    "Link",
    "LogNormal",
    "Network",
    "NoJitter",
    "Partition",
    "SimulationConfig",
    "Trace",
]


def _at_least_0(owner: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(owner, name) < math.inf:
            text = f"{type(owner).__name__}({name}={getattr(owner, name)})"
            raise ConfigError(f"{text}: expected a finite number of at least 0")


class Jitter(Protocol):
    """A random factor around a cost.

    Example:
        >>> jitter: gs.sim.Jitter = gs.sim.LogNormal(sigma=0.2)
        >>> gs.sim.Cost(per_sample_s=1e-3, jitter=jitter).jitter
        LogNormal(sigma=0.2)
    """

    def draw(self, rng: random.Random, count: int) -> float:
        """The factor of the `count`-th computation (from 0) of a node and kind."""
        ...


@dataclass(frozen=True, slots=True)
class NoJitter:
    """Always the same factor.

    Example:
        >>> gs.sim.NoJitter(factor=2.0).draw(random.Random(0), count=0)
        2.0
    """

    factor: float = 1.0

    def draw(self, rng: random.Random, count: int) -> float:
        """`factor`."""
        return self.factor


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponentially distributed, mean 1: memoryless service, as in queueing theory.

    Example:
        >>> gs.sim.Exponential().draw(random.Random(0), count=0) > 0
        True
    """

    def draw(self, rng: random.Random, count: int) -> float:
        """-ln(1 - U)."""
        return rng.expovariate(1.0)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(-s²/2, s²)): mean 1, with the long right tail of real machines.

    Example:
        >>> gs.sim.LogNormal(sigma=0.0).draw(random.Random(0), count=0)
        1.0
    """

    sigma: float = 0.1

    def __post_init__(self) -> None:
        _at_least_0(self, "sigma")

    def draw(self, rng: random.Random, count: int) -> float:
        """One factor."""
        return math.exp(rng.gauss(-self.sigma * self.sigma / 2, self.sigma))


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded factors, repeated in a cycle.

    Example:
        >>> trace = gs.sim.Trace((1.0, 1.5))
        >>> [trace.draw(random.Random(0), count) for count in range(3)]
        [1.0, 1.5, 1.0]
    """

    factors: tuple[float, ...]

    def draw(self, rng: random.Random, count: int) -> float:
        """The `count`-th factor, cyclically."""
        return self.factors[count % len(self.factors)]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a computation: (base + samples·per_sample + elems·per_elem) · jitter.

    The base of a gradient counts for each minibatch of it, where local steps or accumulation make it of several.

    Example:
        >>> config = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.01, per_sample_s=1e-3)})
        >>> run = gs.simulate(model, data, config=config, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"]
        16
    """

    base_s: float = 0.0
    per_sample_s: float = 0.0
    per_elem_s: float = 0.0
    jitter: Jitter = NoJitter()

    def __post_init__(self) -> None:
        _at_least_0(self, "base_s", "per_sample_s", "per_elem_s")

    def seconds(self, work: Work, rng: random.Random, count: int) -> float:
        """The duration of one computation on a machine of speed 1."""
        mean = work.passes * self.base_s + work.samples * self.per_sample_s + work.elems * self.per_elem_s
        return mean * self.jitter.draw(rng, count)


@dataclass(frozen=True, slots=True)
class Link:
    """The link from one node to another, in one direction.

    Args:
        latency_s: propagation time.
        jitter_s: a uniform extra of 0 to `jitter_s` per frame (frames of a stream keep order).
        loss: probability that a frame is lost. The stream is silent from then on, as over a broken
            connection that no system reports.
        duplicate: probability that a stream is delivered a second time, later, as if the client had retried;
            answers to the duplicate are dropped.
        corrupt: probability that a frame arrives damaged. The receiver hangs up on the stream, and the sender hears
            that its connection is lost, as with carriers that find a frame which they cannot read.

    Example:
        >>> network = gs.sim.Network(link=gs.sim.Link(latency_s=0.02, jitter_s=0.005))
        >>> network.link_between("worker-0", "shard-0").latency_s
        0.02
    """

    latency_s: float = 50e-6
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        _at_least_0(self, "latency_s", "jitter_s", "loss", "duplicate", "corrupt")


_NEAR = Link(latency_s=0.0)
"""The link between nodes of one machine."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Between `start_s` and `stop_s` nothing passes from a node of `sources` to one of `targets`.

    It concerns one direction; a second partition with both sets exchanged cuts the other one. Frames that are
    sent meanwhile are lost.

    Example:
        >>> cut = gs.sim.Partition(1.0, 2.0, frozenset({"worker-0"}), frozenset({"shard-0"}))
        >>> network = gs.sim.Network(partitions=[cut])
        >>> len(network.cuts("worker-0", "shard-0", 1.5)), len(network.cuts("shard-0", "worker-0", 1.5))
        (1, 0)
    """

    start_s: float
    stop_s: float
    sources: frozenset[str]
    targets: frozenset[str]


@dataclass(frozen=True, slots=True)
class Network:
    """Network cards and links.

    Each direction of each machine's card is one shared resource of `bandwidth_bytes_s` (or its
    own value in `cards`): p workers that send n bytes each to one server take p·n/bandwidth.
    Each node is on its own machine, unless `machines` puts several on one: frames between these
    use no card and take no time.

    Args:
        bandwidth_bytes_s: of every card and direction; math.inf for none.
        link: default link; `links` overrides by (source, target).
        cards: bandwidth by machine.
        machines: machine by node name; a node that is missing is on a machine of its own name.
        partitions: times in which frames between some nodes are lost.
        header_bytes: bytes of a frame on a card besides its payload.

    Example:
        >>> network = gs.sim.Network(bandwidth_bytes_s=1.25e8, cards={"worker-1": 1.25e7})
        >>> network.card_bytes_s("worker-0"), network.card_bytes_s("worker-1")
        (125000000.0, 12500000.0)
    """

    bandwidth_bytes_s: float = 1.25e9
    link: Link = Link()
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    cards: Mapping[str, float] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)
    partitions: Sequence[Partition] = ()
    header_bytes: int = 64

    def __post_init__(self) -> None:
        for node, bandwidth in {"bandwidth_bytes_s": self.bandwidth_bytes_s, **self.cards}.items():
            if not bandwidth > 0:
                raise ConfigError(
                    f"Network: {node} = {bandwidth}: expected a positive number of bytes a second"
                )

    def link_between(self, source: str, target: str) -> Link:
        """The link in this direction."""
        near = self.on_one_machine(source, target)
        return self.links.get((source, target), _NEAR if near else self.link)

    def machine(self, node: str) -> str:
        """The machine that a node is on."""
        return self.machines.get(node, node)

    def on_one_machine(self, source: str, target: str) -> bool:
        """Whether two nodes share a machine."""
        return source != target and self.machine(source) == self.machine(target)

    def card_bytes_s(self, machine: str) -> float:
        """Bandwidth of each direction of a machine's card."""
        return self.cards.get(machine, self.bandwidth_bytes_s)

    def cuts(self, source: str, target: str, now_s: float) -> list[Partition]:
        """The partitions that lose a frame which `source` sends to `target` now."""
        return [
            p
            for p in self.partitions
            if p.start_s <= now_s < p.stop_s and source in p.sources and target in p.targets
        ]


KINDS = frozenset(
    {
        "gradient",
        "forward",
        "backward",
        "predict",
        "learn",
        "apply",
        "copy",
        "reduce",
        "evaluate",
        "read",
        "build",
        "init",
        "form",
    }
    | {"checkpoint", "snapshot", "write", "commit", "restore"}
)
"""The kinds of work that can have a cost."""

_A_NODE = re.compile(r"coordinator|(shard|worker|part\d+)-\d+")


def _no_costs() -> Mapping[str, Cost]:
    return {
        "gradient": Cost(per_sample_s=2e-3),
        "apply": Cost(per_elem_s=4e-10),
        "copy": Cost(per_elem_s=4e-10),
        "reduce": Cost(per_elem_s=4e-10),
    }


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The assumptions of a simulation about machines and network.

    Args:
        costs: seconds by kind of work (`KINDS`); a kind that is missing costs nothing. The "forward" and "backward"
            passes of a split model, and what its predictors "predict" and "learn", cost their share of a "gradient",
            unless they have costs of their own.
        speeds: speed by node name, 1.0 where missing; a node of speed 0.5 takes twice as long.
        backprop: fraction of the gradient's duration at which the backward pass begins; 1/3 is
            a forward pass half as long. Its elements become ready linearly from there to the end.
        offsets: fractions of the gradient's duration at which each bucket is ready, in backward
            order, one for each tensor of the model's layout: measured values, where linear is not exact
            enough (a convolution takes more time for each element than a dense layer).
        network: see `Network`.
        shape_only: computes no arithmetic and holds no vectors: only durations and bytes.

    Example:
        >>> config = gs.sim.SimulationConfig(speeds={"worker-1": 0.25})
        >>> run = gs.simulate(model, data, config=config, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"]
        16
    """

    costs: Mapping[str, Cost] = field(default_factory=_no_costs)
    speeds: Mapping[str, float] = field(default_factory=dict)
    backprop: float = 1 / 3
    offsets: Sequence[float] = ()
    network: Network = Network()
    shape_only: bool = False

    def __post_init__(self) -> None:
        for kind in self.costs.keys() - KINDS:
            raise UnknownNameError("kind of work in SimulationConfig.costs", kind, KINDS)
        for node, speed in self.speeds.items():
            if not speed > 0:
                raise ConfigError(f"SimulationConfig.speeds[{node!r}] = {speed}: expected a positive number")
        if list(self.offsets) != sorted(self.offsets) or not all(0 <= f <= 1 for f in self.offsets):
            raise ConfigError(
                f"SimulationConfig.offsets = {self.offsets}: expected fractions of a gradient's duration, each at "
                "least 0, at most 1, and no smaller than the one before, such as (0.2, 0.6, 1.0)"
            )

    def check_names(self, nodes: Collection[str]) -> None:
        """Raises UnknownNameError for a node that the run does not have.

        A network may describe more nodes than a run has, but their names must be names of nodes.
        """
        for node in self.speeds.keys() - set(nodes):
            raise UnknownNameError("node in SimulationConfig.speeds", node, nodes)
        net = self.network
        cut = {node for partition in net.partitions for node in partition.sources | partition.targets}
        ends = {node for link in net.links for node in link}
        machines = {*net.machines.values(), *nodes}
        for where, names in {
            "node in Network.machines": net.machines.keys(),
            "node in Network.links": ends,
            "node in Network.partitions": cut,
            "machine in Network.cards": net.cards.keys() - machines,
        }.items():
            for name in sorted(names):
                if not _A_NODE.fullmatch(name):
                    raise UnknownNameError(where, name, machines if where.startswith("machine") else nodes)

    def seconds(self, node: str, work: Work, rng: random.Random, count: int) -> float:
        """Duration of one computation on a node."""
        cost, part = self.costs.get(work.kind), 1.0
        passes = {
            "forward": self.backprop,
            "backward": 1 - self.backprop,
            "predict": self.backprop,
            "learn": 1.0,
        }
        if cost is None and work.kind in passes:  # of a split model: a part of its gradient
            cost = self.costs.get("gradient")
            part = work.share * passes[work.kind]
        return part * cost.seconds(work, rng, count) / self.speeds.get(node, 1.0) if cost else 0.0

    def offset(self, bucket: int, fraction: float) -> float:
        """The fraction of the duration at which a bucket is ready, and with it `fraction` of all elements."""
        if self.offsets:
            return self.offsets[min(bucket, len(self.offsets) - 1)]
        return self.backprop + (1 - self.backprop) * fraction
