"""What the coordinator and the launcher report: nodes, data epochs, checkpoints, and how the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradstream.telemetry.event import Event

__all__ = [
    "CheckpointEvent",
    "CheckpointFailedEvent",
    "FailedEvent",
    "FinishedEvent",
    "InsecureEvent",
    "JoinedEvent",
    "LedgerEvent",
    "LeftEvent",
    "LeftOverEvent",
    "MachineEvent",
    "ParticipationEvent",
    "RefusedEventsEvent",
    "ResumedEvent",
    "RoundEvent",
    "SharesEvent",
    "StartedEvent",
    "StoppedEvent",
    "WaitingEvent",
]


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
