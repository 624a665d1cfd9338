"""Events of the coordinator and the launcher: nodes, data epochs, checkpoints, and the end of the run.

In parentheses: who records the event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gradstream.telemetry.event import Event


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
    way: str = ""  # of exchange: "servers", "group", "pairs", "shared memory"
    trains_locally: bool = False  # workers make steps of their own between two exchanges


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent(Event):
    """A phase of the job begins, or goes on in a resumed run (coordinator)."""

    name: ClassVar[str] = "phase"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedEvent(Event):
    """A node has joined (coordinator)."""

    name: ClassVar[str] = "joined"
    who: str
    address: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorEvent(Event):
    """A new process of the coordinator has taken the place of one that died (coordinator)."""

    name: ClassVar[str] = "coordinator"
    ruling: int  # number of the process, from 1
    members: list[str]  # names of the nodes that it waits for
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitedEvent(Event):
    """The process of a node has ended before the run did (launcher).

    `time_s` is when its parent saw that, or when it was killed, where the killer has told the launcher; of another
    machine, when the launcher heard of it.
    """

    name: ClassVar[str] = "exited"
    who: str
    status: int  # its exit status; minus the number of the signal that killed it
    how: str = ""  # the same in words, with the cause where it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftEvent(Event):
    """A node has left (coordinator); it is `lost` if it did not say goodbye."""

    name: ClassVar[str] = "left"
    who: str
    lost: bool
    reason: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledEvent(Event):
    """What became of the minibatches that a lost worker had without a receipt (coordinator)."""

    name: ClassVar[str] = "settled"
    who: str
    in_model: int  # minibatches that every chunk had taken
    torn: int  # minibatches that some chunks had taken: another worker computes them again for the others
    again: int  # minibatches that no chunk had taken: handed out again


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedUpEvent(Event):
    """Another shard has a whole backup of this one again, after its process had died (coordinator)."""

    name: ClassVar[str] = "backed_up"
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardEvent(Event):
    """The run changes its shards (coordinator).

    "preparing": new ones are to join; "holding": they get the parameters, and nothing is updated meanwhile; "switched":
    they hold them, and the others leave; "failed": the others still hold them, and the new ones leave.
    """

    name: ClassVar[str] = "reshard"
    state: Literal["preparing", "holding", "switched", "failed"]
    token: str  # of the request
    servers: int  # number of shards that were asked for
    shards: list[str]  # their names; empty if none was begun
    held_s: float  # for how long nothing was updated
    who: str  # where it has failed, because of this node,
    message: str  # and why


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
class RelayEvent(Event):
    """A node could not dial another one (coordinator). That one has dialled back, or their bytes are relayed."""

    name: ClassVar[str] = "relay"
    caller: str
    called: str
    how: Literal["dialled back", "relayed"]
    size_bytes: int  # bytes that have gone through the coordinator so far: 0 in the first event of a pair


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent(Event):
    """The run waits for machines or nodes before it begins; `state` names them (launcher)."""

    name: ClassVar[str] = "waiting"
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InsecureEvent(Event):
    """The traffic of the run is neither encrypted nor authenticated; reported each minute (launcher)."""

    name: ClassVar[str] = "insecure"
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent(Event):
    """Every minibatch of a data epoch has a receipt (coordinator)."""

    name: ClassVar[str] = "ledger"
    epoch: int
    samples: int | None  # None in a stream
    batches: int
    reassigned: int
    dropped: int = 0  # number of these samples that are not in the model


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOverEvent(Event):
    """The rest of the data of a user's loop whose worker was lost, or that ended early (coordinator)."""

    name: ClassVar[str] = "left_over"
    who: str
    steps: int  # number of its steps in the model
    missing: int | None  # number of minibatches that no worker took over; None if unknown
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent(Event):
    """A quorum makes an update of these samples; only with backup workers (coordinator)."""

    name: ClassVar[str] = "round"
    round: int  # its update makes version round + 1
    epoch: int  # data epoch
    batch: int  # round of the data epoch
    accepted: list[int]  # ranks
    left_out: list[int]  # ranks of late, skipped or lost workers; their samples are dropped
    ids: list[int] | None  # samples of the accepted workers, by rank; None if samples have no ids


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRefusedEvent(Event):
    """A worker's gradient has a NaN or an infinity, and is not in the model (coordinator)."""

    name: ClassVar[str] = "gradient_refused"
    who: str
    step: int  # of this worker
    epoch: int  # data epoch
    batch: int
    samples: int
    what: str
    in_a_row: int  # number of this worker's refused gradients in a row, with this one


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipationEvent(Event):
    """The workers that take part from now on, by the participation schedule of the strategy (coordinator).

    A worker in neither list has left. A paused worker begins no further minibatch.
    """

    name: ClassVar[str] = "participation"
    phase: str  # the strategy's name of the phase
    active: list[str]
    paused: list[str]
    samples: int | None  # number of samples in the model


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesEvent(Event):
    """Workers' shares of a round were measured; they hold from this round on (coordinator)."""

    name: ClassVar[str] = "shares"
    epoch: int  # data epoch
    batch: int  # round of the data epoch
    samples: list[int]  # by rank, samples of a full round
    per_s: list[float]  # by rank, samples per second of gradients; 0 if not measured
    changed: bool  # whether they differ from the shares before


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint is on the disk (coordinator)."""

    name: ClassVar[str] = "checkpoint"
    step: int  # rounds, or minibatches over all workers
    folder: str  # in the run directory
    size_bytes: int
    paused_s: float  # workers were paused for it
    total_s: float  # from the begin of the snapshot to the end of writing it


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailedEvent(Event):
    """A snapshot could not become a checkpoint; the run continues (coordinator)."""

    name: ClassVar[str] = "checkpoint_failed"
    step: int
    who: str
    message: str
    kept: str  # folder of the newest checkpoint, "" for none


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedEvent(Event):
    """The run continues from a checkpoint, and computes later steps again (coordinator)."""

    name: ClassVar[str] = "resumed"
    step: int
    folder: str
    steps: Mapping[str, int]  # by worker, the number of its next minibatch
    samples: int  # number of samples in the model
    by_worker: Mapping[str, int] = field(
        default_factory=dict
    )  # of these, where workers bring data of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedEvent(Event):
    """A user has stopped the run, and it can be resumed (coordinator)."""

    name: ClassVar[str] = "stopped"
    step: int
    folder: str  # folder of the checkpoint to resume from, "" for none


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedEventsEvent(Event):
    """The coordinator dropped lines of a member that were no events, or not its own (coordinator)."""

    name: ClassVar[str] = "refused_events"
    who: str
    count: int  # since the previous such event
    why: str  # why the latest one was dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent(Event):
    """The error of a node, `culprit`, ends the run (coordinator or launcher)."""

    name: ClassVar[str] = "failed"
    culprit: str
    error: str  # class name of the exception
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent(Event):
    """The run has ended: every minibatch has a receipt, or a stopping criterion holds (coordinator)."""

    name: ClassVar[str] = "finished"
    samples: int | None  # number of samples in the model, i.e. with a receipt; None in a stream
    train_s: float  # from the begin of training, initial parameters included, to the last receipt
    reason: str = ""  # why the run finished before its data was used up
    dropped: int = 0  # number of samples that updates left out
