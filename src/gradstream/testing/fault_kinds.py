"""The kinds of faults of a `FaultPlan`, as data. `testing.proxy` says what faults of links are between processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class Departure:
    """A node's process is killed.

    Args:
        node: name of the node, such as "worker-1".
        at_s: when, in seconds since the run began.
        back_s: in a simulation, seconds until a new process takes its place; None: it is not replaced. Without effect
            on real processes, which the launcher starts again.
    """

    node: str
    at_s: float
    back_s: float | None = None

    number: ClassVar[int]


class Kill(Departure):
    """A node is killed, as by SIGKILL."""

    number = signal.SIGKILL


class Drain(Departure):
    """A worker is asked to go, as by SIGTERM."""

    number = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Spell:
    """Something is wrong with a node for a while.

    Args:
        node, at_s: see `Departure`.
        for_s: how long, in seconds.
    """

    node: str
    at_s: float
    for_s: float


class Stop(Spell):
    """A process stands still (SIGSTOP, SIGCONT)."""

    number: ClassVar[int] = signal.SIGSTOP


class Freeze(Spell):
    """The machine of a node stands still, and its clock with it, as when a laptop sleeps. Simulations only."""


class DiskFull(Spell):
    """The disk takes nothing. The coordinator's: its state and the run's files. Simulations only."""


@dataclass(frozen=True, slots=True)
class Slow(Spell):
    """A node computes more slowly. Simulations only.

    Args:
        factor: how many times as long each computation takes that begins meanwhile.
    """

    factor: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes from one node to another for a while; nobody is told.

    Args:
        source, target: names of the nodes; "*" for all others.
        at_s: when it begins, in seconds since the run began.
        for_s: how long, in seconds.
        both: also in the other direction.
    """

    source: str
    target: str
    at_s: float
    for_s: float
    both: bool = True


@dataclass(frozen=True, slots=True)
class Flaw:
    """A link from one node to another that is never good; between processes, from the `started` event on.

    Args:
        source, target: names of the nodes.
        amount: value of the attribute `on_link` of `Link`.
    """

    source: str
    target: str
    amount: float

    on_link: ClassVar[str]


class Duplicate(Flaw):
    """Streams are delivered a second time, later, with this probability."""

    on_link = "duplicate"


class Lose(Flaw):
    """Frames are lost with this probability: requests, or answers on the way back."""

    on_link = "loss"


class Corrupt(Flaw):
    """Frames arrive damaged with this probability: the receiver hangs up."""

    on_link = "corrupt"


class Reorder(Flaw):
    """Frames take up to so many seconds longer, so that streams overtake one another."""

    on_link = "jitter_s"


class SlowLink(Flaw):
    """Each frame takes `amount` seconds longer; in a simulation, it takes `amount` seconds in all."""

    on_link = "latency_s"


Fault: TypeAlias = Departure | Spell | Cut | Flaw
