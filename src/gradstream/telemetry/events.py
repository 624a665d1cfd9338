"""Typed event records, the only telemetry: what a node tells the world about itself.

A record becomes one JSON line: {"event": "step", "node": "worker-0", "time_s": 12.345, ...}.
`time_s` counts from the start of the run on the node's own monotonic clock. The progress line,
the report and the tests read these lines and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

__all__ = [
    "GROUP",
    "AppliedEvent",
    "CarriersEvent",
    "CheckpointEvent",
    "CheckpointFailedEvent",
    "CpuEvent",
    "DiskEvent",
    "EvaluatedEvent",
    "Event",
    "EventDict",
    "ExchangeEvent",
    "FactorsEvent",
    "FailedEvent",
    "FinishedEvent",
    "GroupEvent",
    "InsecureEvent",
    "JoinedEvent",
    "LateEvent",
    "LedgerEvent",
    "LeftEvent",
    "LeftOverEvent",
    "LinkEvent",
    "LogEvent",
    "MachineEvent",
    "MemoryEvent",
    "ParticipationEvent",
    "RefusedEventsEvent",
    "ResumedEvent",
    "RoundEvent",
    "SharesEvent",
    "StartedEvent",
    "StepEvent",
    "StoppedEvent",
    "TransferEvent",
    "WaitingEvent",
    "encode",
]

EventDict = Mapping[str, Any]
"""One record of `events.jsonl`, parsed."""

GROUP = "group"
"""For whom a worker waits in an exchange without servers, as far as it can tell (`StepEvent.waited_for`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all records; subclasses add fields of str, int, float, or flat lists and maps of them.

    Attributes:
        name: what a line calls it.
        from_members: workers and shards report it; all others are the coordinator's or the launcher's.
    """

    name: ClassVar[str] = "event"
    from_members: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEvent(Event):
    """The run begins (coordinator)."""

    name: ClassVar[str] = "started"
    job: str
    workers: int
    servers: int
    strategy: str
    optimizer: str
    num_parameters: int
    num_samples: int | None  # None in a stream
    total_steps: int  # minibatches over all workers, or rounds
    chunk_elems: int = 0  # of the registered model
    in_rounds: bool = False  # all workers take part in each step


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedEvent(Event):
    """A node is in (coordinator)."""

    name: ClassVar[str] = "joined"
    who: str
    address: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriersEvent(Event):
    """By which carrier a node reaches each other one, once all are there (worker, shard)."""

    name: ClassVar[str] = "carriers"
    from_members: ClassVar[bool] = True
    by_peer: Mapping[str, str]  # node -> "shm", "tcp" or "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftEvent(Event):
    """A node is out (coordinator): `lost` when it did not say goodbye."""

    name: ClassVar[str] = "left"
    who: str
    lost: bool
    reason: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineEvent(Event):
    """Another machine has "joined" the run, has "left" it, or was "refused" (launcher)."""

    name: ClassVar[str] = "machine"
    who: str
    state: Literal["joined", "left", "refused"]
    address: str
    nodes: list[str]  # names of its shards and workers
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent(Event):
    """The run has not begun, and for whom it waits (launcher)."""

    name: ClassVar[str] = "waiting"
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InsecureEvent(Event):
    """The run's traffic is neither encrypted nor authenticated, said each minute (launcher)."""

    name: ClassVar[str] = "insecure"
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent(Event):
    """Workers have formed a group, and how it sums (rank 0).

    `kind` is "messages", "shared" (in place, all on one host), "hierarchical" (in place inside hosts, by
    messages between) or "torch" (torch.distributed; `algorithm` is its backend). Where it was chosen by
    measurement, `choices` has the algorithm by the number of bytes from which on it holds, and the figures
    are those of `collectives.autotune.Figures`.
    """

    name: ClassVar[str] = "group"
    from_members: ClassVar[bool] = True
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
class StepEvent(Event):
    """One local minibatch is done (worker).

    It began `compute_s + wait_s` before `time_s`. `waited_for` says whose answer came last while
    nothing was computed: another worker whose contribution was missing, a shard (its updates and the
    way there and back), or this worker itself (sums and local steps). Its values add up to `wait_s`
    at most; the rest is nobody's.
    """

    name: ClassVar[str] = "step"
    from_members: ClassVar[bool] = True
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
class LogEvent(Event):
    """Figures that a training loop of the user's own has logged since its log event before (worker)."""

    name: ClassVar[str] = "log"
    from_members: ClassVar[bool] = True
    rank: int
    step: int  # steps that this worker had made
    values: Mapping[str, float | None]  # name -> mean since; None where that is no finite number
    merged: int = 0  # values that went into the means of others
    dropped: int = 0  # values of names beyond the most that a loop may have
    total_steps: int = 0  # that this worker makes in the whole run, 0 where the loop does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeEvent(Event):
    """Bytes and staleness of a node since its exchange event before (worker).

    `pushed_bytes` and `fetched_bytes` were sent, row numbers included; the `whole_` ones are what they would
    have been with all of every chunk, which they are where more than what has changed is exchanged.
    """

    name: ClassVar[str] = "exchange"
    from_members: ClassVar[bool] = True
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
class LinkEvent(Event):
    """What has passed between a worker and a shard since the link event of these two before (worker).

    `pushed_bytes` go up, from the worker to the shard; `fetched_bytes` come down.
    """

    name: ClassVar[str] = "link"
    from_members: ClassVar[bool] = True
    rank: int
    shard: str
    pushed_bytes: int
    fetched_bytes: int
    staleness: Mapping[str, int] = field(default_factory=dict)  # histogram: staleness -> chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent(Event):
    """A push or a fetch is done with all shards (worker); it began `seconds` before `time_s`.

    A worker reports a bounded number of them in a second; `exchange` counts them all.
    """

    name: ClassVar[str] = "transfer"
    from_members: ClassVar[bool] = True
    rank: int
    kind: Literal["push", "fetch"]
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedEvent(Event):
    """What a shard has done since its applied event before (shard).

    `late_s` says by how much each worker's contributions came after those of all others: of the chunk
    where that was most.
    """

    name: ClassVar[str] = "applied"
    from_members: ClassVar[bool] = True
    rank: int
    updates: int  # chunk updates
    duplicates: int
    dropped: int
    refused: int
    min_version: int
    max_version: int
    late_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent(Event):
    """A data epoch is accounted for (coordinator)."""

    name: ClassVar[str] = "ledger"
    epoch: int
    samples: int | None  # None in a stream
    batches: int
    reassigned: int
    dropped: int = 0  # of the samples: not in the model


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOverEvent(Event):
    """What became of the data of a worker whose own loop was lost or ended early (coordinator)."""

    name: ClassVar[str] = "left_over"
    who: str
    steps: int  # of its steps, how many are in the model
    missing: int | None  # minibatches that nobody took over; None: unknown
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent(Event):
    """A quorum makes an update (coordinator), of these samples. Only where there are backup workers."""

    name: ClassVar[str] = "round"
    round: int  # it makes version round + 1
    epoch: int  # data epoch
    batch: int  # round of it
    accepted: list[int]  # ranks
    left_out: list[int]  # ranks: late, skipped or dead; their samples are dropped
    ids: list[int] | None  # samples of the accepted, by rank; None where samples have no numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipationEvent(Event):
    """Who takes part from now on, where the strategy says so (coordinator).

    A worker in neither list is gone. One that is held back begins no further minibatch.
    """

    name: ClassVar[str] = "participation"
    phase: str  # the strategy's own word
    active: list[str]
    paused: list[str]
    samples: int | None  # in the model


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesEvent(Event):
    """Workers' shares of a round were measured; they hold from this round on (coordinator)."""

    name: ClassVar[str] = "shares"
    epoch: int  # data epoch
    batch: int  # round of it
    samples: list[int]  # of a whole round, by rank
    per_s: list[float]  # samples a second in each worker's gradients; 0 where nothing was measured
    changed: bool  # from what they were


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuEvent(Event):
    """CPU seconds of a process, total so far, by role and by kind of work; and how full its machine is.

    `queued_s` are seconds, so far, in which its thread of arithmetic could have run and had no core.
    `load` is the number of threads of all processes that ran or waited for one of the machine's `cores`, in
    the mean of the last minute. Each is None where the system does not tell.
    """

    name: ClassVar[str] = "cpu"
    from_members: ClassVar[bool] = True
    role: str
    user_s: float
    system_s: float
    compute_s: Mapping[str, float] = field(default_factory=dict)  # thread CPU s by Work.kind
    queued_s: float | None = None
    load: float | None = None
    cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LateEvent(Event):
    """How late the event loop ran its timers since the late event before."""

    name: ClassVar[str] = "late"
    from_members: ClassVar[bool] = True
    role: str
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent(Event):
    """Peak memory of a process, and vectors it has allocated by name.

    `peak_bytes` is all that was resident, file pages (libraries, a memory-mapped data set)
    included; `peak_own_bytes` is without those, sampled whenever vitals are taken, and `own_bytes`
    the latest sample.
    """

    name: ClassVar[str] = "memory"
    from_members: ClassVar[bool] = True
    role: str
    peak_bytes: int
    peak_own_bytes: int
    own_bytes: int = 0
    vectors_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEvent(Event):
    """Held-out samples were looked at (worker of the lowest rank)."""

    name: ClassVar[str] = "evaluated"
    from_members: ClassVar[bool] = True
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
class CheckpointEvent(Event):
    """A checkpoint is on the disk (coordinator)."""

    name: ClassVar[str] = "checkpoint"
    step: int  # rounds, or minibatches over all workers
    folder: str  # in the run directory
    size_bytes: int
    paused_s: float  # workers were paused for it
    total_s: float  # from the begin of the snapshot to its name


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailedEvent(Event):
    """No checkpoint came of a snapshot; the run goes on (coordinator)."""

    name: ClassVar[str] = "checkpoint_failed"
    step: int
    who: str
    message: str
    kept: str  # folder of the newest that is there, "" for none


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskEvent(Event):
    """The disk of the run directory is full or broken (worker), or has been (coordinator, launcher).

    `state` is "waiting" while a worker waits for room to write what it must not lose, and "over" once
    everything that could be kept is written. The counts are those of events; lost ones are nowhere.
    """

    name: ClassVar[str] = "disk"
    from_members: ClassVar[bool] = True
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
class ResumedEvent(Event):
    """The run goes on from a checkpoint (coordinator). What came after it is computed again."""

    name: ClassVar[str] = "resumed"
    step: int
    folder: str
    steps: Mapping[str, int]  # by worker, the number of its next minibatch
    samples: int  # in the model


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEvent(Event):
    """Somebody asked the run to stop, and it can be resumed (coordinator)."""

    name: ClassVar[str] = "stopped"
    step: int
    folder: str  # the checkpoint that it resumes from, "" for none


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorsEvent(Event):
    """How the gradients of wide linear layers travel in the first round (worker of the lowest rank)."""

    name: ClassVar[str] = "factors"
    from_members: ClassVar[bool] = True
    layers: Mapping[str, str]  # by weight: "factors" or "gradient"
    factor_elems: Mapping[str, int]  # what a worker has to tell each other one; of those that go as factors
    gradient_elems: Mapping[str, int]  # what the gradient of each has


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedEventsEvent(Event):
    """Lines that a member sent as events were none of its own, and were dropped (coordinator)."""

    name: ClassVar[str] = "refused_events"
    who: str
    count: int  # since the one before
    why: str  # of the latest


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent(Event):
    """The run ends with an error: who, what, where (coordinator or launcher)."""

    name: ClassVar[str] = "failed"
    culprit: str
    error: str  # class name of the exception
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent(Event):
    """Every sample is accounted for, or enough of them (coordinator)."""

    name: ClassVar[str] = "finished"
    samples: int | None  # in the model: those with a receipt; None in a stream
    train_s: float  # from the begin of training, initial parameters included, to the last receipt
    reason: str = ""  # why it finished before its data was through
    dropped: int = 0  # samples that updates were made without


MAX_FLOAT = 1e100
"""Larger numbers are written as null: sums of them would overflow."""


def encode(event: Event, *, node: str, time_s: float) -> bytes:
    """The record as one JSON line, of ASCII alone.

    Numbers that JSON cannot hold, or that nobody can add up (NaN, infinities, beyond 1e100), become null.
    """
    record: dict[str, Any] = {"event": event.name, "node": node, "time_s": round(time_s, 6)}
    for entry in fields(event):
        record[entry.name] = _plain(getattr(event, entry.name))
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if -MAX_FLOAT <= value <= MAX_FLOAT else None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and value and isinstance(value[0], float):
        return [_plain(inner) for inner in value]
    return value
