"""Events of workers and shards: steps, traffic, evaluations, and the state of their processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gradstream.telemetry.event import MemberEvent

GROUP = "group"
"""The name in `StepEvent.waited_for` for an exchange without servers: the worker cannot tell members apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneEvent(MemberEvent):
    """A worker that exchanges in pairs has gone through a round without its partner (worker)."""

    name: ClassVar[str] = "alone"
    rank: int
    round: int  # number of the round, from 0
    partner: str  # name of the worker that it was to meet
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriersEvent(MemberEvent):
    """The carrier by which a node reaches each other node, when all have joined (worker, shard)."""

    name: ClassVar[str] = "carriers"
    by_peer: Mapping[str, str]  # node -> "shm", "tcp" or "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergedEvent(MemberEvent):
    """A batch method has ended, which ends the run (each worker that finds out)."""

    name: ClassVar[str] = "converged"
    rank: int
    reason: str  # the tolerance or the number that was reached
    loss: float  # mean loss over all samples


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedEvent(MemberEvent):
    """Bytes from a peer were damaged on their way, and found by their checksum (every node). None of them was used."""

    name: ClassVar[str] = "damaged"
    peer: str
    size_bytes: int  # bytes under the checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent(MemberEvent):
    """Workers have formed a group (rank 0).

    `kind` is "messages", "shared" (in place, all on one host), "hierarchical" (in place inside a host, by messages
    between hosts) or "torch" (torch.distributed; `algorithm` is its backend). If measurement chose the algorithm,
    `choices` has, by number of bytes, the algorithm for vectors from this size on, and the other figures are those of
    `collectives.autotune.MeasuredCosts`.
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

    It began `compute_s + wait_s` before `time_s`. `waited_for` has the seconds of waiting by node: another worker whose
    contribution was missing, a shard (its updates and the network), or the worker itself (sums and local steps). The
    sum of its values is at most `wait_s`; no node caused the rest.
    """

    name: ClassVar[str] = "step"
    rank: int
    step: int
    epoch: int
    samples: int
    loss: float | None
    compute_s: float  # inside the gradient
    wait_s: float  # waiting for the exchange since the previous step
    compute_at_s: float = 0.0  # from the begin of the step to the begin of its gradient
    waited_for: Mapping[str, float] = field(default_factory=dict)  # node -> seconds
    lr: float | None = None  # learning rate of this minibatch
    gradient_norm: float | None = (
        None  # length of the mean gradient before clipping, if it was clipped by its length
    )
    part_squares: float | None = (
        None  # mean of |g|² over its minibatches, where batches grow by their variance
    )
    square: float | None = None  # |g|² of the mean of these gradients
    late: bool = False  # its gradient came after its update, and was dropped
    read_s: float = 0.0  # reading samples: in the gradient, or before it for a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEvent(MemberEvent):
    """Gradients that a process of a split replica has done since its previous part event (worker, part).

    The two times add up to that of the gradients. Neither has the exchange with shards or with other replicas.
    """

    name: ClassVar[str] = "part"
    rank: int
    part: int
    minibatches: int
    compute_s: float
    wait_s: float  # for values and gradients of other parts, and for what they report


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent(MemberEvent):
    """Figures that a user's training loop has logged since its previous log event (worker)."""

    name: ClassVar[str] = "log"
    rank: int
    step: int  # number of steps that this worker has made
    values: Mapping[str, float | None]  # name -> mean; None if it is not finite
    merged: int = 0  # number of values that were averaged with others
    dropped: int = 0  # number of values that were dropped because there were too many names
    total_steps: int = 0  # number of steps of this worker in the whole run; 0 if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeEvent(MemberEvent):
    """Bytes and staleness of a worker since its previous exchange event (worker).

    `pushed_bytes` and `fetched_bytes` were sent, row numbers included. The `whole_` bytes are those that it would have
    taken to send every chunk whole; they are larger if only changed rows were sent.
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
    """Traffic between a worker and a shard since the previous link event of the two (worker).

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
    """All shards have answered a push or a fetch (worker), which began `seconds` before `time_s`.

    A worker reports at most 128 of them for each `ExchangeEvent`, whose `pushes` and `fetches` count them all.
    """

    name: ClassVar[str] = "transfer"
    rank: int
    kind: Literal["push", "fetch"]
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedEvent(MemberEvent):
    """Before the first minibatch of a phase, workers know that each of its sums would take long (first of the group).

    They begin none, and the coordinator ends the phase.
    """

    name: ClassVar[str] = "rehearsed"
    rank: int
    compute_s: Mapping[str, float]  # worker -> inside a gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredEvent(MemberEvent):
    """A new process of a shard has read the backup of the one before, and serves (shard)."""

    name: ClassVar[str] = "restored"
    rank: int
    chunks: int  # number of its chunks that were in the backup


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedEvent(MemberEvent):
    """Work of a shard since its previous applied event (shard).

    `late_s` has, by worker, the seconds by which its contributions came after all others, at the chunk where that was
    most.
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
    """CPU seconds of a process so far, in total and by kind of work, and the load of its machine.

    `queued_s`: seconds so far in which its arithmetic thread could run but had no core. `load`: threads of all
    processes that ran or waited for one of the machine's `cores`, mean of the last minute. Each is None if the system
    does not report it.
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
    """Delays of timers on the event loop since the previous late event."""

    name: ClassVar[str] = "late"
    role: str
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent(MemberEvent):
    """Peak memory of a process, and the vectors that it has allocated, by name.

    `peak_bytes` is the largest resident memory, with file pages (libraries, a memory-mapped data set). `peak_own_bytes`
    is without them, sampled with each report of metrics; `own_bytes` is the latest sample.
    """

    name: ClassVar[str] = "memory"
    role: str
    peak_bytes: int
    peak_own_bytes: int
    own_bytes: int = 0
    vectors_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEvent(MemberEvent):
    """Squares of the gradients of one round (shard, worker, part), where the job asks for the gradient noise scale.

    A node sums over the elements that it has. The squares of a round are the sums over its `nodes`.
    """

    name: ClassVar[str] = "noise"
    rank: int
    round: int  # number of the update, from 1
    nodes: int  # number of nodes with such an event of this round
    contributions: int  # W, number of workers with samples
    samples: int  # Σ b of all contributions
    inverse_samples: float  # mean of 1/b over the contributions
    contribution_square: float  # its part of 1/W·Σ |g_i|²
    joined_square: float  # its part of |g|², g the mean gradient over all samples


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEvent(MemberEvent):
    """The model was evaluated on held-out samples (worker of the lowest rank)."""

    name: ClassVar[str] = "evaluated"
    step: int  # rounds in the model; without rounds, minibatches / W
    epoch: int  # data epoch of the last of them
    samples: int  # trained on so far; asynchronous: as if all workers were as far as this one
    accuracy: float | None
    loss: float | None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    held_out: int = 0  # number of evaluated samples
    seconds: float = 0.0  # duration, up to `time_s`
    final: bool = False  # whether the parameters are the final ones


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEvent(MemberEvent):
    """The disk of the run directory is full or broken (worker), or was (coordinator, launcher).

    `state` is "waiting" while a worker waits for room for a file that it must not lose, and "over" when everything that
    could be kept is written. The counts are of events; lost events are in no file.
    """

    name: ClassVar[str] = "disk"
    what: str  # the content that could not be written: "events", "final parameters"
    state: str
    error: str  # "ENOSPC: No space left on device"
    message: str
    from_s: float = 0.0  # `time_s` of the first delayed event
    to_s: float = 0.0  # `time_s` of the last delayed event
    late_events: int = 0  # number of events that were written late
    lost_events: int = 0
    lost_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorsEvent(MemberEvent):
    """How the gradients of wide linear layers are sent in the first round (worker of the lowest rank)."""

    name: ClassVar[str] = "factors"
    layers: Mapping[str, str]  # by weight: "factors" or "gradient"
    factor_elems: Mapping[str, int]  # by weight sent as factors: elements to each other worker
    gradient_elems: Mapping[str, int]  # by weight: elements of its gradient
