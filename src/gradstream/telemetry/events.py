"""All event records: nodes report only through them, and the progress line, the report and tests read only them.

A record becomes one JSON line: {"event": "step", "node": "worker-0", "time_s": 12.345, ...}. `time_s` counts
seconds from the start of the run on the node's own monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, dataclass_transform

# ---- base --------------------------------------------------------------------------------

EventDict = Mapping[str, Any]
"""One record of `events.jsonl`, parsed."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Event:
    """Base of all records, which are frozen dataclasses of str, int, float, or flat lists and maps of them.

    Attributes:
        name: the value of "event" in its lines, which the head of the class gives.
        from_members: workers and shards report it; all others come from the coordinator or the launcher.
    """

    name: ClassVar[str] = ""  # of a base of others
    from_members: ClassVar[bool] = False
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, *, name: str = "") -> None:
        cls.name = name
        dataclass(frozen=True, kw_only=True)(cls)


class MemberEvent(Event):
    """Base of the records that workers and shards report."""

    from_members: ClassVar[bool] = True


MAX_FLOAT = 1e100
"""Larger numbers are written as null: sums of them would overflow."""


def encode(event: Event, *, node: str, time_s: float) -> bytes:
    """The record as one JSON line, of ASCII alone.

    NaN, infinities and numbers beyond 1e100 become null: JSON does not hold them, or sums of them overflow.
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


# ---- workers and shards ------------------------------------------------------------------
# Events of workers and shards: steps, traffic, evaluations, and the state of their processes.

GROUP = "group"
"""The name in `StepEvent.waited_for` for an exchange without servers: the worker cannot tell members apart."""


class EnteringEvent(MemberEvent, name="entering"):
    """The others wait for the first gradient of a newcomer's own loop (worker: the newcomer)."""

    limit_s: float  # for which they wait, at most


class AloneEvent(MemberEvent, name="alone"):
    """A worker that exchanges in pairs has gone through a round without its partner (worker)."""

    rank: int
    round: int  # number of the round, from 0
    partner: str  # name of the worker that it was to meet
    reason: str


class CarriersEvent(MemberEvent, name="carriers"):
    """The carrier by which a node reaches each other node, when all have joined (worker, shard)."""

    by_peer: Mapping[str, str]  # node -> "shm", "tcp" or "grpc"


class ConvergedEvent(MemberEvent, name="converged"):
    """A batch method has ended, which ends the run (each worker that finds out)."""

    rank: int
    reason: str  # the tolerance or the number that was reached
    loss: float  # mean loss over all samples


class DamagedEvent(MemberEvent, name="damaged"):
    """Bytes from a peer were damaged on their way, and found by their checksum (every node). None of them was used."""

    peer: str
    size_bytes: int  # bytes under the checksum


class GroupEvent(MemberEvent, name="group"):
    """Workers have formed a group (rank 0).

    `kind` is "messages", "shared" (in place, all on one host), "hierarchical" (in place inside a host, by messages
    between hosts) or "torch" (torch.distributed; `algorithm` is its backend). If measurement chose the algorithm,
    `choices` has, by number of bytes, the algorithm for vectors from this size on, and the other figures are those of
    `collectives.autotune.MeasuredCosts`.
    """

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


class StepEvent(MemberEvent, name="step"):
    """One local minibatch is done (worker).

    It began `compute_s + wait_s` before `time_s`. `waited_for` has the seconds of waiting by node: another worker whose
    contribution was missing, a shard (its updates and the network), or the worker itself (sums and local steps). The
    sum of its values is at most `wait_s`; no node caused the rest.
    """

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


class PartEvent(MemberEvent, name="part"):
    """Gradients that a process of a split replica has done since its previous part event (worker, part).

    The two times add up to that of the gradients. Neither has the exchange with shards or with other replicas.
    """

    rank: int
    part: int
    minibatches: int
    compute_s: float
    wait_s: float  # for values and gradients of other parts, and for what they report


class LogEvent(MemberEvent, name="log"):
    """Figures that a user's training loop has logged since its previous log event (worker)."""

    rank: int
    step: int  # number of steps that this worker has made
    values: Mapping[str, float | None]  # name -> mean; None if it is not finite
    merged: int = 0  # number of values that were averaged with others
    dropped: int = 0  # number of values that were dropped because there were too many names
    total_steps: int = 0  # number of steps of this worker in the whole run; 0 if unknown


class NoteEvent(MemberEvent, name="note"):
    """What the user should know of a training loop of their own; the launcher prints it (worker)."""

    rank: int
    message: str


class ExchangeEvent(MemberEvent, name="exchange"):
    """Bytes and staleness of a worker since its previous exchange event (worker).

    `pushed_bytes` and `fetched_bytes` were sent, row numbers included. The `whole_` bytes are those that it would have
    taken to send every chunk whole; they are larger if only changed rows were sent.
    """

    rank: int
    pushed_bytes: int
    fetched_bytes: int
    pushes: int
    fetches: int
    retries: int
    whole_pushed_bytes: int = 0
    whole_fetched_bytes: int = 0
    staleness: Mapping[str, int] = field(default_factory=dict)  # histogram: staleness -> chunks


class LinkEvent(MemberEvent, name="link"):
    """Traffic between a worker and a shard since the previous link event of the two (worker).

    `pushed_bytes` go up, from the worker to the shard; `fetched_bytes` come down.
    """

    rank: int
    shard: str
    pushed_bytes: int
    fetched_bytes: int
    staleness: Mapping[str, int] = field(default_factory=dict)  # histogram: staleness -> chunks


class TransferEvent(MemberEvent, name="transfer"):
    """All shards have answered a push or a fetch (worker), which began `seconds` before `time_s`.

    A worker reports at most 128 of them for each `ExchangeEvent`, whose `pushes` and `fetches` count them all.
    """

    rank: int
    kind: Literal["push", "fetch"]
    seconds: float
    size_bytes: int


class RehearsedEvent(MemberEvent, name="rehearsed"):
    """Before the first minibatch of a phase, workers know that each of its sums would take long (first of the group).

    They begin none, and the coordinator ends the phase.
    """

    rank: int
    compute_s: Mapping[str, float]  # worker -> inside a gradient


class RestoredEvent(MemberEvent, name="restored"):
    """A new process of a shard has read the backup of the one before, and serves (shard)."""

    rank: int
    chunks: int  # number of its chunks that were in the backup


class AppliedEvent(MemberEvent, name="applied"):
    """Work of a shard since its previous applied event (shard).

    `late_s` has, by worker, the seconds by which its contributions came after all others, at the chunk where that was
    most.
    """

    rank: int
    updates: int  # chunk updates
    duplicates: int
    dropped: int
    refused: int
    min_version: int
    max_version: int
    late_s: Mapping[str, float] = field(default_factory=dict)


class CpuEvent(MemberEvent, name="cpu"):
    """CPU seconds of a process so far, in total and by kind of work, and the load of its machine.

    `queued_s`: seconds so far in which its arithmetic thread could run but had no core. `load`: threads of all
    processes that ran or waited for one of the machine's `cores`, mean of the last minute. Each is None if the system
    does not report it.
    """

    role: str
    user_s: float
    system_s: float
    compute_s: Mapping[str, float] = field(default_factory=dict)  # thread CPU s by Work.kind
    queued_s: float | None = None
    load: float | None = None
    cores: int | None = None


class LoopLagEvent(MemberEvent, name="loop_lag"):
    """Delays of timers on the event loop since the previous late event."""

    role: str
    p99_ms: float
    max_ms: float


class MemoryEvent(MemberEvent, name="memory"):
    """Peak memory of a process, and the vectors that it has allocated, by name.

    `peak_bytes` is the largest resident memory, with file pages (libraries, a memory-mapped data set). `peak_own_bytes`
    is without them, sampled with each report of metrics; `own_bytes` is the latest sample.
    """

    role: str
    peak_bytes: int
    peak_own_bytes: int
    own_bytes: int = 0
    vectors_bytes: Mapping[str, int] = field(default_factory=dict)


class NoiseEvent(MemberEvent, name="noise"):
    """Squares of the gradients of one round (shard, worker, part), where the job asks for the gradient noise scale.

    A node sums over the elements that it has. The squares of a round are the sums over its `nodes`.
    """

    rank: int
    round: int  # number of the update, from 1
    nodes: int  # number of nodes with such an event of this round
    contributions: int  # W, number of workers with samples
    samples: int  # Σ b of all contributions
    inverse_samples: float  # mean of 1/b over the contributions
    contribution_square: float  # its part of 1/W·Σ |g_i|²
    joined_square: float  # its part of |g|², g the mean gradient over all samples


class EvaluatedEvent(MemberEvent, name="evaluated"):
    """The model was evaluated on held-out samples (worker of the lowest rank)."""

    step: int  # rounds in the model; without rounds, minibatches / W
    epoch: int  # data epoch of the last of them
    samples: int  # trained on so far; asynchronous: as if all workers were as far as this one
    accuracy: float | None
    loss: float | None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    held_out: int = 0  # number of evaluated samples
    seconds: float = 0.0  # duration, up to `time_s`
    final: bool = False  # whether the parameters are the final ones


class DiskEvent(MemberEvent, name="disk"):
    """The disk of the run directory is full or broken (worker), or was (coordinator, launcher).

    `state` is "waiting" while a worker waits for room for a file that it must not lose, and "over" when everything that
    could be kept is written. The counts are of events; lost events are in no file.
    """

    what: str  # the content that could not be written: "events", "final parameters"
    state: str
    error: str  # "ENOSPC: No space left on device"
    message: str
    from_s: float = 0.0  # `time_s` of the first delayed event
    to_s: float = 0.0  # `time_s` of the last delayed event
    late_events: int = 0  # number of events that were written late
    lost_events: int = 0
    lost_bytes: int = 0


# ---- coordinator and launcher ------------------------------------------------------------
# Events of the coordinator and the launcher: nodes, data epochs, checkpoints, and the end of the run. In parentheses:
# who records the event.


class StartedEvent(Event, name="started"):
    """The run begins (coordinator)."""

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
    way: str = ""  # of exchange: "servers", "group", "pairs", "shared memory"
    trains_locally: bool = False  # workers make steps of their own between two exchanges


class PhaseEvent(Event, name="phase"):
    """A phase of the job begins, or goes on in a resumed run (coordinator)."""

    number: int  # from 1
    phases: int  # number of the job's phases
    label: str  # its name
    workers: int
    servers: int
    strategy: str
    optimizer: str
    batch_size: list[int]  # of each worker's minibatches
    accumulate: int  # number of minibatches of a step
    total_steps: int  # as of `StartedEvent`, of the run up to the end of this phase
    in_rounds: bool
    samples: int | None = 0  # number of samples in the model
    why: str = ""  # the reason of strategy "auto" for how it exchanges
    way: str = ""  # these two as of `StartedEvent`
    trains_locally: bool = False


class JoinedEvent(Event, name="joined"):
    """A node has joined (coordinator)."""

    who: str
    address: str
    epoch: int


class CoordinatorEvent(Event, name="coordinator"):
    """A new process of the coordinator has taken the place of one that died (coordinator)."""

    ruling: int  # number of the process, from 1
    members: list[str]  # names of the nodes that it waits for
    epoch: int


class ExitedEvent(Event, name="exited"):
    """The process of a node has ended before the run did (launcher).

    `time_s` is when its parent saw that, or when it was killed, where the killer has told the launcher; of another
    machine, when the launcher heard of it.
    """

    who: str
    status: int  # its exit status; minus the number of the signal that killed it
    how: str = ""  # the same in words, with the cause where it is known


class LeftEvent(Event, name="left"):
    """A node has left (coordinator); it is `lost` if it did not say goodbye."""

    who: str
    lost: bool
    reason: str
    epoch: int


class SettledEvent(Event, name="settled"):
    """What became of the minibatches that a lost worker had without a receipt (coordinator)."""

    who: str
    in_model: int  # minibatches that every chunk had taken
    torn: int  # minibatches that some chunks had taken: another worker computes them again for the others
    again: int  # minibatches that no chunk had taken: handed out again


class BackedUpEvent(Event, name="backed_up"):
    """Another shard has a whole backup of this one again, after its process had died (coordinator)."""

    who: str


class ReshardEvent(Event, name="reshard"):
    """The run changes its shards (coordinator).

    "preparing": new ones are to join; "holding": they get the parameters, and nothing is updated meanwhile; "switched":
    they hold them, and the others leave; "failed": the others still hold them, and the new ones leave.
    """

    state: Literal["preparing", "holding", "switched", "failed"]
    token: str  # of the request
    servers: int  # number of shards that were asked for
    shards: list[str]  # their names; empty if none was begun
    held_s: float  # for how long nothing was updated
    who: str  # where it has failed, because of this node,
    message: str  # and why


class MachineEvent(Event, name="machine"):
    """Another machine has "joined" the run, has "left" it, or was "refused" (launcher)."""

    who: str
    state: Literal["joined", "left", "refused"]
    address: str
    nodes: list[str]  # names of its shards and workers
    reason: str


class RelayEvent(Event, name="relay"):
    """A node could not dial another one (coordinator). That one has dialled back, or their bytes are relayed."""

    caller: str
    called: str
    how: Literal["dialled back", "relayed"]
    size_bytes: int  # bytes that have gone through the coordinator so far: 0 in the first event of a pair


class WaitingEvent(Event, name="waiting"):
    """The run waits for machines or nodes before it begins; `state` names them (launcher)."""

    state: str


class InsecureEvent(Event, name="insecure"):
    """The traffic of the run is neither encrypted nor authenticated; reported each minute (launcher)."""

    address: str


class LedgerEvent(Event, name="ledger"):
    """Every minibatch of a data epoch has a receipt (coordinator)."""

    epoch: int
    samples: int | None  # None in a stream
    batches: int
    reassigned: int
    dropped: int = 0  # number of these samples that are not in the model


class LeftOverEvent(Event, name="left_over"):
    """The rest of the data of a user's loop whose worker was lost, or that ended early (coordinator)."""

    who: str
    steps: int  # number of its steps in the model
    missing: int | None  # number of minibatches that no worker took over; None if unknown
    message: str


class RoundEvent(Event, name="round"):
    """A quorum makes an update of these samples; only with backup workers (coordinator)."""

    round: int  # its update makes version round + 1
    epoch: int  # data epoch
    batch: int  # round of the data epoch
    accepted: list[int]  # ranks
    left_out: list[int]  # ranks of late, skipped or lost workers; their samples are dropped
    ids: list[int] | None  # samples of the accepted workers, by rank; None if samples have no ids


class GradientRefusedEvent(Event, name="gradient_refused"):
    """A worker's gradient has a NaN or an infinity, and is not in the model (coordinator)."""

    who: str
    step: int  # of this worker
    epoch: int  # data epoch
    batch: int
    samples: int
    what: str
    in_a_row: int  # number of this worker's refused gradients in a row, with this one


class SharesEvent(Event, name="shares"):
    """Workers' shares of a round were measured; they hold from this round on (coordinator)."""

    epoch: int  # data epoch
    batch: int  # round of the data epoch
    samples: list[int]  # by rank, samples of a full round
    per_s: list[float]  # by rank, samples per second of gradients; 0 if not measured
    changed: bool  # whether they differ from the shares before


class CheckpointEvent(Event, name="checkpoint"):
    """A checkpoint is on the disk (coordinator)."""

    step: int  # rounds, or minibatches over all workers
    folder: str  # in the run directory
    size_bytes: int
    paused_s: float  # workers were paused for it
    total_s: float  # from the begin of the snapshot to the end of writing it


class CheckpointCopyEvent(Event, name="checkpoint_copy"):
    """A worker on another machine has a copy of a checkpoint, or could not get one (coordinator)."""

    folder: str
    worker: str
    size_bytes: int
    total_s: float  # of sending it
    error: str  # "" if the copy is there


class CheckpointFailedEvent(Event, name="checkpoint_failed"):
    """A snapshot could not become a checkpoint; the run continues (coordinator)."""

    step: int
    who: str
    message: str
    kept: str  # folder of the newest checkpoint, "" for none


class ResumedEvent(Event, name="resumed"):
    """The run continues from a checkpoint, and computes later steps again (coordinator)."""

    step: int
    folder: str
    steps: Mapping[str, int]  # by worker, the number of its next minibatch
    samples: int  # number of samples in the model
    by_worker: Mapping[str, int] = field(
        default_factory=dict
    )  # of these, where workers bring data of their own


class StoppedEvent(Event, name="stopped"):
    """A user has stopped the run, and it can be resumed (coordinator)."""

    step: int
    folder: str  # folder of the checkpoint to resume from, "" for none


class RefusedEventsEvent(Event, name="refused_events"):
    """The coordinator dropped lines of a member that were no events, or not its own (coordinator)."""

    who: str
    count: int  # since the previous such event
    why: str  # why the latest one was dropped


class FailedEvent(Event, name="failed"):
    """The error of a node, `culprit`, ends the run (coordinator or launcher)."""

    culprit: str
    error: str  # class name of the exception
    message: str
    traceback: str


class FinishedEvent(Event, name="finished"):
    """The run has ended: every minibatch has a receipt, or a stopping criterion holds (coordinator)."""

    samples: int | None  # number of samples in the model, i.e. with a receipt; None in a stream
    train_s: float  # from the begin of training, initial parameters included, to the last receipt
    reason: str = ""  # why the run finished before its data was used up
    dropped: int = 0  # number of samples that updates skipped
