"""Handlers of messages: what the coordinator, a shard and the launcher make of what a peer has said.

Each holds an invariant besides: a message that is refused has changed nothing.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from google.protobuf.message import DecodeError, Message

from fuzzing.harness import Decoder
from fuzzing.mutator import mutated_message
from fuzzing.texts import DECODERS as TEXTS
from gradstream._version import __version__
from gradstream.coordinator.assignment import BatchAssignment, ShareBalance, Shares
from gradstream.coordinator.checkpoint_writer import lies_in
from gradstream.coordinator.lead import Emit, Refuse
from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.presence_service import EventGate
from gradstream.coordinator.progress import receipt_of
from gradstream.coordinator.registry import CoordinatorPlan
from gradstream.data.base import BatchRef
from gradstream.data.feed import QueuePlan
from gradstream.data.ledger import Ledger
from gradstream.data.plan import RoundPlan
from gradstream.errors import GradstreamError
from gradstream.memory import Memory
from gradstream.optim import SGD
from gradstream.run.remote.members import MachineMembers
from gradstream.server.aggregation import AggregationRule, FetchTerms, PushHeader
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.state import Acknowledge, Apply, Parked, ShardState
from gradstream.server.shard.store import ShardStore
from gradstream.strategies.ssp import Clocked
from gradstream.strategies.synchronous import SynchronousRound
from gradstream.telemetry.events import MachineEvent, StartedEvent, encode
from gradstream.transport.base import Identity
from gradstream.transport.limits import LIMITS
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

WORKERS = 2
_SPEC = v1.ModelSpec(fingerprint=0xAB, elems=100, dtype=v1.FLOAT32, chunk_elems=64)


def _of(kind: type[Message]) -> Callable[[bytes, random.Random], bytes]:
    """Changes fields of a message; the first byte, which says who sends it, stays."""

    def changed(data: bytes, rng: random.Random) -> bytes:
        message = kind()
        try:
            message.MergeFromString(data[1:])
        except DecodeError:
            return data
        mutated_message(message, rng)
        return bytes([rng.randrange(4)]) + message.SerializeToString()

    return changed


def _who(data: bytes) -> str:
    return ("worker-0", "worker-1", "shard-0", "worker-7")[data[0] & 3 if data else 0]


# ---- the coordinator ----------------------------------------------------------------------


def _join(name: str) -> v1.Join:
    role, _, rank = name.partition("-")
    node = v1.Node(name=name, role=role, rank=int(rank), address=f"{name}:1", incarnation=1)
    tensors = [v1.TensorSpec(name="a", shape=[10, 10], dtype="F32")] if role == "worker" else []
    return v1.Join(
        node=node, software=__version__, model=_SPEC if role == "worker" else None, tensors=tensors
    )


def _started(*, in_rounds: bool = False) -> StartedEvent:
    return StartedEvent(
        job="j",
        workers=WORKERS,
        servers=1,
        strategy="synchronous",
        optimizer="sgd",
        num_parameters=0,
        num_samples=32,
        total_steps=8,
        in_rounds=in_rounds,
    )


def _joined(membership: Membership) -> Membership:
    for name in membership.nodes.missing:
        membership.join(_join(name), 0.0)
    return membership


def _membership(*, joined: bool = True) -> Membership:
    """Of two workers that go through 4 rounds in each of 2 epochs, with a quorum."""
    plan = RoundPlan(32, 4, WORKERS, shares="measured")
    membership = Membership(
        CoordinatorPlan(
            started=_started(in_rounds=True),
            ledger=Ledger(plan, epochs=2),
            balance=ShareBalance(plan),
            losses=LossTolerance(survives_worker_loss=True, quorum=1),
        )
    )
    return _joined(membership) if joined else membership


def _asynchronous() -> Membership:
    """Of two workers that ask for minibatches, whose sizes are measured."""
    ledger = Ledger(QueuePlan(32, 8, WORKERS, shares="measured"), epochs=2)
    assignment = BatchAssignment(ledger, WORKERS, lead_s=10.0)
    return _joined(
        Membership(
            CoordinatorPlan(
                started=_started(),
                ledger=ledger,
                assignment=assignment,
                losses=LossTolerance(survives_worker_loss=True),
            )
        )
    )


def _state(membership: Membership) -> object:
    ledger, balance = membership.progress.ledger, membership.lead(Shares).balance
    return (
        membership.notice.SerializeToString(deterministic=True),
        ledger.num_receipts,
        ledger.num_samples,
        dict(membership.progress.dropped),
        tuple(membership.nodes.unfinished),
        tuple(balance.sizes if balance else ()),
    )


def _emitted(instructions: Any) -> None:
    for one in instructions:
        if isinstance(one, Emit):
            line = encode(one.event, node="coordinator", time_s=0.0)
            assert line.isascii() and line.count(b"\n") == 1


def _beat(data: bytes) -> None:
    membership, who = _membership(), _who(data)
    beat = v1.Beat.FromString(data[1:])
    if any(report.HasField("snapshot") for report in beat.reports):
        membership.life.ask_to_stop(0.0)  # begins no cut, where there is no disk
    before = _state(membership)
    try:
        membership.check(who, beat)
        instructions = membership.beat(who, beat, 1.0)
    except GradstreamError:
        assert _state(membership) == before
        raise
    _emitted(instructions)
    assert membership.progress.num_samples is not None and membership.progress.num_samples <= 64


def _asks_to_join(data: bytes) -> None:
    membership = _membership(joined=False)
    request = v1.Join.FromString(data[1:])
    before = _state(membership)
    out = membership.join(request, 0.0)
    if any(isinstance(one, Refuse) for one in out):
        assert _state(membership) == before
        raise GradstreamError("refused")
    _emitted(out)
    membership.admission.with_model(_started())


def _asks(data: bytes) -> None:
    """An ask for minibatches, an end, or shares, by the second byte."""
    kind = data[1] & 3 if len(data) > 1 else 0
    membership, who, body = _membership() if kind else _asynchronous(), _who(data), data[2:]
    before, kinds = _state(membership), (v1.Ask, v1.Ending, v1.Took, v1.Took)
    try:
        request = kinds[kind].FromString(body)
        _emitted(membership.ask(who, request, 1.0))
        answer = membership.answer(who, request, 1.0)
    except GradstreamError:
        assert _state(membership) == before
        raise
    if isinstance(answer, Refuse):
        raise GradstreamError("refused")


def _asked(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(3)
    message: Message = (
        v1.Ask(in_hand=1, rounds=2, samples=8, seconds=0.5, squares=0.1),
        v1.Ending(batches=1, samples=8, round=2),
        v1.Took(rounds=1, samples=4, seconds=0.5),
    )[kind]
    mutated_message(message, rng)
    return bytes([rng.randrange(4), kind]) + message.SerializeToString()


def _events(data: bytes) -> None:
    gate = EventGate("worker-0", 0.0)
    admitted = gate.take(data, 1.0)
    assert (
        len(admitted.lines) <= min(len(data) + 1, LIMITS.beat_events_bytes + 1) and admitted.lines.isascii()
    )
    assert admitted.lines.count(b"\n") == len(admitted.events)
    assert all(event["node"] == "worker-0" for event in admitted.events)


def _keep(data: bytes) -> None:
    """A part of a checkpoint that a holder sends: what is accepted lies inside its own ranges."""
    ranges = [(0, 64), (128, 256)]
    part = v1.Part.FromString(data[1:])
    if not lies_in(ranges, part):
        raise GradstreamError("refused")
    written = range(part.offset_bytes, part.offset_bytes + len(part.data))
    assert any(start <= written.start and written.stop <= stop for start, stop in ranges)


# ---- a shard ------------------------------------------------------------------------------


def _shard(rule: AggregationRule) -> tuple[Inspection, ShardState]:
    chunks = ChunkMap(100, 64, 1)
    state = ShardState(chunks.chunks_of(0), rule, workers=WORKERS)
    optimizer = SGD(lr=1.0, momentum=0.9)
    store = ShardStore(Memory(), chunks, 0, torch.float32, optimizer)
    config = ShardConfig(0, 1, rule, optimizer, workers=WORKERS)
    inspection = Inspection(Identity("job", "shard-0", 1), store, Counter(), config)
    return inspection, state


def _push(data: bytes) -> None:
    """What `PushHandler` does, but for the arithmetic: contributions go up to their acknowledgement."""
    rule = SynchronousRound(1, "mean")
    inspection, state = _shard(rule)
    who, request = _who(data), v1.Push.FromString(data[1:])
    inspection.check_push(v1.Open(sender=who), request)
    for chunk in state.chunks:
        inspection.check_base_version(who, chunk, request, request.base_version, state.version(chunk))
        one = PushHeader(
            who,
            inspection.rank(who),
            1,
            request.sequence,
            request.samples,
            request.num_gradients,
            request.lr,
            request.round,
            request.base_version,
            request.rows,
            request.clock,
            request.loss,
            request.vector,
        )
        out = list(state.push(chunk, Parked(one, "token", request.command == v1.Push.ASSIGN)))
        for instruction in out:
            if isinstance(instruction, Apply):
                rule.weights(state.version(chunk), [held.header for held in instruction.update])
                out += state.applied(chunk)
            if isinstance(instruction, Acknowledge):
                v1.PushResult(
                    sequence=instruction.sequence,
                    version=max(0, instruction.version),
                    staleness=instruction.staleness,
                )


def _fetch(data: bytes) -> None:
    inspection, state = _shard(SynchronousRound(1, "mean"))
    who, request = _who(data), v1.Fetch.FromString(data[1:])
    inspection.check_fetch(who, request)
    terms = FetchTerms(
        who, 1, request.min_version, request.after_sequence, flush=request.flush, min_clock=request.min_clock
    )
    for chunk in request.chunks or state.chunks:
        state.fetch(chunk, terms, "token")
        state.awaited([chunk], request.min_clock)


def _command(data: bytes) -> None:
    inspection, state = _shard(Clocked())
    who, request = _who(data), v1.Command.FromString(data[1:])
    inspection.check_command(who, request)
    if request.kind == v1.Command.ENTER:
        v1.CommandResult(clock=state.clocks.resume(inspection.rank(who), request.clock))
        assert state.clocks.present <= frozenset(range(WORKERS))


# ---- the launcher -------------------------------------------------------------------------


def _enrol(data: bytes) -> None:
    members = MachineMembers("here", machines=2, workers_per_machine=1, facts={"torch": "1"})
    seat = members.enrol(v1.Enrol.FromString(data[1:]))
    json.dumps(members.state)
    assert members.state.isprintable()
    if isinstance(seat, v1.Refuse):
        raise GradstreamError("refused")
    event = MachineEvent(
        who=seat.machine, state="joined", address=seat.address, nodes=list(seat.nodes), reason=""
    )
    assert len(encode(event, node="launcher", time_s=0.0)) < 2048


def _message(name: str, decode: Callable[[bytes], object], *seeds: Message) -> Decoder:
    data = [b"\0" + seed.SerializeToString() for seed in seeds]
    return Decoder(name, decode, data, (GradstreamError, DecodeError), _of(type(seeds[0])))


_RECEIPTS = [receipt_of(BatchRef(0, 0, 0)), receipt_of(BatchRef(1, 0, 1))]
_LINES = next(one.seeds for one in TEXTS if one.name == "event-line")
DECODERS = (
    _message(
        "beat",
        _beat,
        v1.Beat(receipts=_RECEIPTS, reports=[v1.BeatReport(snapshot=v1.SnapshotReport(number=1, count=2))]),
        v1.Beat(
            reports=[
                v1.BeatReport(refused=v1.Refused(batch=_RECEIPTS[0], samples=4, what="a NaN", in_a_row=1)),
                v1.BeatReport(sound=True),
                v1.BeatReport(redone=v1.Redone(sender="worker-1", sequence=2)),
                v1.BeatReport(broken=7),
            ]
        ),
        v1.Beat(finished=True, relies=True),
        v1.Beat(failure=v1.Failure(error="ValueError", message="x\x1b[2J")),
    ),
    _message("join", _asks_to_join, _join("worker-0"), _join("worker-1")),
    Decoder(
        "asks",
        _asks,
        [b"\0\0", b"\0\2" + v1.Took(rounds=1, samples=4, seconds=0.5).SerializeToString()],
        (GradstreamError, DecodeError),
        _asked,
    ),
    _message("keep", _keep, v1.Part(offset_bytes=130, data=b"abcd"), v1.Part(offset_bytes=0, data=b"x" * 64)),
    Decoder("event-gate", _events, [b"\n".join([*_LINES, b""])], ()),
    _message(
        "push",
        _push,
        v1.Push(sequence=1, samples=4, lr=0.1, command=v1.Push.ASSIGN),
        v1.Push(sequence=2, samples=4, lr=0.1, loss=1.0),
    ),
    _message("fetch", _fetch, v1.Fetch(chunks=[0, 1], number=1)),
    _message(
        "command",
        _command,
        v1.Command(kind=v1.Command.ENTER, clock=3, sequence=1),
        v1.Command(kind=v1.Command.LEAVE, sequence=4),
    ),
    _message("enrol", _enrol, v1.Enrol(machine="m", facts={"torch": "1"}, address="10.0.0.2")),
)
