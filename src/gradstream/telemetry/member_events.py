"""What workers and shards report: steps, traffic, evaluations, and the state of their processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gradstream.telemetry.event import MemberEvent

__all__ = [
    "GROUP",
    "AppliedEvent",
    "CarriersEvent",
    "CpuEvent",
    "DiskEvent",
    "EvaluatedEvent",
    "ExchangeEvent",
    "FactorsEvent",
    "GroupEvent",
    "LateEvent",
    "LinkEvent",
    "LogEvent",
    "MemoryEvent",
    "StepEvent",
    "TransferEvent",
]

GROUP = "group"
"""The name in `StepEvent.waited_for` for an exchange without servers: the worker cannot tell members apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriersEvent(MemberEvent):
    """By which carrier a node reaches each other one, once all are there (worker, shard)."""

    name: ClassVar[str] = "carriers"
    by_peer: Mapping[str, str]  # node -> "shm", "tcp" or "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent(MemberEvent):
    """Workers have formed a group, and how it sums (rank 0).

    `kind` is "messages", "shared" (in place, all on one host), "hierarchical" (in place inside hosts, by
    messages between) or "torch" (torch.distributed; `algorithm` is its backend). Where it was chosen by
    measurement, `choices` has the algorithm by the number of bytes from which on it holds, and the figures
    are those of `collectives.autotune.MeasuredCosts`.
    """

    name: ClassVar[str] = "group"
    kind: str
    ranks: list[str]
    epoch: int
    hosts: int
    algorithm: str
    choices: Mapping[str, str] = field(default_factory=dict)  # bytes -> algorithm
    alpha_s: float | None = None
    beta_s_byte: float | None = None
    gamma_s_byte: float | None = None
    message_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(MemberEvent):
    """One local minibatch is done (worker).

    It began `compute_s + wait_s` before `time_s`. `waited_for` says whose answer came last while
    nothing was computed: another worker whose contribution was missing, a shard (its updates and the
    way there and back), or this worker itself (sums and local steps). Its values add up to `wait_s`
    at most; the rest is nobody's.
    """

    name: ClassVar[str] = "step"
    rank: int
    step: int
    epoch: int
    samples: int
    loss: float | None
    compute_s: float  # inside the gradient
    wait_s: float  # waiting for the exchange since the step before
    compute_at_s: float = 0.0  # from the begin of the step to that of its gradient
    waited_for: Mapping[str, float] = field(default_factory=dict)  # node -> seconds
    lr: float | None = None  # learning rate of this minibatch
    gradient_norm: float | None = None  # length of the mean gradient before it was clipped by it
    late: bool = False  # its gradient came behind its update, and was dropped
    read_s: float = 0.0  # reading samples: in the gradient, or before it where they come of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent(MemberEvent):
    """Figures that a training loop of the user's own has logged since its log event before (worker)."""

    name: ClassVar[str] = "log"
    rank: int
    step: int  # steps that this worker had made
    values: Mapping[str, float | None]  # name -> mean since; None where that is no finite number
    merged: int = 0  # values that went into the means of others
    dropped: int = 0  # values of names beyond the most that a loop may have
    total_steps: int = 0  # that this worker makes in the whole run, 0 where the loop does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeEvent(MemberEvent):
    """Bytes and staleness of a node since its exchange event before (worker).

    `pushed_bytes` and `fetched_bytes` were sent, row numbers included; the `whole_` ones are what they would
    have been with all of every chunk, which they are where more than what has changed is exchanged.
    """

    name: ClassVar[str] = "exchange"
    rank: int
    pushed_bytes: int
    fetched_bytes: int
    pushes: int
    fetches: int
    retries: int
    whole_pushed_bytes: int = 0
    whole_fetched_bytes: int = 0
    staleness: Mapping[str, int] = field(default_factory=dict)  # histogram: staleness -> chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvent(MemberEvent):
    """What has passed between a worker and a shard since the link event of these two before (worker).

    `pushed_bytes` go up, from the worker to the shard; `fetched_bytes` come down.
    """

    name: ClassVar[str] = "link"
    rank: int
    shard: str
    pushed_bytes: int
    fetched_bytes: int
    staleness: Mapping[str, int] = field(default_factory=dict)  # histogram: staleness -> chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent(MemberEvent):
    """A push or a fetch is done with all shards (worker); it began `seconds` before `time_s`.

    A worker reports a bounded number of them in a second; `exchange` counts them all.
    """

    name: ClassVar[str] = "transfer"
    rank: int
    kind: Literal["push", "fetch"]
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedEvent(MemberEvent):
    """What a shard has done since its applied event before (shard).

    `late_s` says by how much each worker's contributions came after those of all others: of the chunk
    where that was most.
    """

    name: ClassVar[str] = "applied"
    rank: int
    updates: int  # chunk updates
    duplicates: int
    dropped: int
    refused: int
    min_version: int
    max_version: int
    late_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuEvent(MemberEvent):
    """CPU seconds of a process, total so far, by role and by kind of work; and how full its machine is.

    `queued_s` are seconds, so far, in which its thread of arithmetic could have run and had no core.
    `load` is the number of threads of all processes that ran or waited for one of the machine's `cores`, in
    the mean of the last minute. Each is None where the system does not tell.
    """

    name: ClassVar[str] = "cpu"
    role: str
    user_s: float
    system_s: float
    compute_s: Mapping[str, float] = field(default_factory=dict)  # thread CPU s by Work.kind
    queued_s: float | None = None
    load: float | None = None
    cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LateEvent(MemberEvent):
    """How late the event loop ran its timers since the late event before."""

    name: ClassVar[str] = "late"
    role: str
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent(MemberEvent):
    """Peak memory of a process, and vectors it has allocated by name.

    `peak_bytes` is all that was resident, file pages (libraries, a memory-mapped data set)
    included; `peak_own_bytes` is without those, sampled with each report of metrics, and `own_bytes`
    the latest sample.
    """

    name: ClassVar[str] = "memory"
    role: str
    peak_bytes: int
    peak_own_bytes: int
    own_bytes: int = 0
    vectors_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEvent(MemberEvent):
    """Held-out samples were looked at (worker of the lowest rank)."""

    name: ClassVar[str] = "evaluated"
    step: int  # rounds in the model; without rounds, a W-th of the minibatches
    epoch: int  # data epoch of the last of them
    samples: int  # that the run has gone through by then; asynchronous: if all were as far as this worker
    accuracy: float | None
    loss: float | None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    held_out: int = 0  # samples looked at
    seconds: float = 0.0  # that it took, up to `time_s`
    final: bool = False  # of the parameters that the run ends with


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEvent(MemberEvent):
    """The disk of the run directory is full or broken (worker), or has been (coordinator, launcher).

    `state` is "waiting" while a worker waits for room to write what it must not lose, and "over" once
    everything that could be kept is written. The counts are those of events; lost ones are nowhere.
    """

    name: ClassVar[str] = "disk"
    what: str  # what could not be written: "events", "final parameters"
    state: str
    error: str  # "ENOSPC: No space left on device"
    message: str
    from_s: float = 0.0  # `time_s` of the first event that could not be written at once
    to_s: float = 0.0  # of the last
    late_events: int = 0  # written later than they came
    lost_events: int = 0
    lost_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorsEvent(MemberEvent):
    """How the gradients of wide linear layers travel in the first round (worker of the lowest rank)."""

    name: ClassVar[str] = "factors"
    layers: Mapping[str, str]  # by weight: "factors" or "gradient"
    factor_elems: Mapping[str, int]  # what a worker has to tell each other one; of those that go as factors
    gradient_elems: Mapping[str, int]  # what the gradient of each has
