"""A shard frees the state of senders that have left, and accepts nothing from them afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import RefusedError
from gradstream.memory import Memory, Vector
from gradstream.optim import SGD
from gradstream.runtime.real import RealRuntime
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.server.aggregation import EveryN, EveryPush, PushHeader, SenderStates
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.server.shard.state import Acknowledge, Instruction, Parked, ShardState
from gradstream.strategies.dc_asgd import Compensation
from gradstream.strategies.ssp import Clocked
from gradstream.testing.pairs import memory_pairs
from gradstream.testing.runs import QUICK, kill_at, least_squares
from gradstream.transport.base import Handler, Identity, Received
from gradstream.transport.tagged_tensors import Mailbox
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

MANY = 10_000
CHUNK = 64


class InPairs(EveryN):
    """Two pushes make an update, and workers have clocks."""

    clocked = True


def contribution(incarnation: int, sequence: int = 1, sender: str = "worker-0", **fields: Any) -> PushHeader:
    defaults: dict[str, Any] = {
        "samples": 1,
        "num_gradients": 1,
        "lr": 1.0,
        "round": 0,
        "base_version": 0,
    }
    return PushHeader(
        sender=sender, rank=0, incarnation=incarnation, sequence=sequence, **{**defaults, **fields}
    )


def outcomes_of(instructions: Iterable[Instruction]) -> dict[Hashable, str]:
    return {one.token: one.outcome for one in instructions if isinstance(one, Acknowledge)}


def test_windows_of_ten_thousand_incarnations_do_not_pile_up() -> None:
    state = ShardState([0, 1], EveryPush())
    for chunk in state.chunks:
        state.push(chunk, Parked(contribution(0), "first", assign=True))
        state.applied(chunk)
    most = 0
    for incarnation in range(1, MANY + 1):
        state.keep_senders({("worker-0", incarnation), ("worker-1", 1)})
        for chunk in state.chunks:
            state.push(chunk, Parked(contribution(incarnation), incarnation))
            assert outcomes_of(state.applied(chunk)) == {incarnation: "applied"}
            most = max(most, len(state.chunks[chunk].windows))
    assert most == 1
    assert state.chunks[0].version == MANY


def test_of_a_live_sender_a_second_copy_stays_a_duplicate() -> None:
    state = ShardState([0], EveryPush())
    state.push(0, Parked(contribution(0, sender="worker-1"), "first", assign=True))
    state.applied(0)
    state.push(0, Parked(contribution(7), "a"))
    state.applied(0)
    state.keep_senders({("worker-0", 7)})
    assert outcomes_of(state.push(0, Parked(contribution(7), "b"))) == {"b": "duplicate"}


def test_a_push_that_came_before_its_sender_left_is_used_and_a_copy_of_it_is_not() -> None:
    """The window stays until then: a retry that came while the chunk was busy must not count as new."""
    state = ShardState([0], EveryPush())
    state.push(0, Parked(contribution(1, sender="worker-1"), "first", assign=True))
    state.applied(0)
    state.push(0, Parked(contribution(7, 1), "a"))  # being applied
    state.push(0, Parked(contribution(7, 1), "a again"))  # a retry, while the chunk is busy
    state.push(0, Parked(contribution(7, 2), "b"))
    state.keep_senders({("worker-1", 1)})
    assert state.lingering == {"worker-0"}
    assert outcomes_of(state.applied(0)) == {"a": "applied", "a again": "duplicate"}
    assert outcomes_of(state.applied(0)) == {"b": "applied"}
    assert state.lingering == set()
    assert set(state.chunks[0].windows) == {("worker-1", 1)}
    assert state.version(0) == 2


def test_the_state_of_a_correction_is_freed() -> None:
    memory, chunks = Memory(), ChunkMap(2 * CHUNK, CHUNK, 1)
    states = SenderStates(memory, chunks, 2 * CHUNK, torch.float32, Compensation(0.1, 0.9, 1e-7))
    most_bytes = 0
    for number in range(MANY):
        sender = f"worker-{number}"
        for chunk in (0, 1):
            place = states.place(sender, chunk, 0, (1, 0))
            assert place is not None
            one = contribution(1, sender=sender)
            states.corrected(one, chunk, torch.ones(CHUNK), torch.ones(CHUNK))
            if number % 2:
                states.used(one, chunk)
        states.keep_senders({f"worker-{number}"})
        most_bytes = max(most_bytes, sum(memory.allocated_bytes.values()))
    assert most_bytes <= 4 * 2 * CHUNK * 4
    states.keep_senders(set())
    assert (memory.allocated_bytes, states._places, dict(states._given)) == ({}, {}, {})


def test_numbers_of_transfers_are_freed() -> None:
    mailbox = Mailbox()
    for incarnation in range(MANY):
        mailbox.keep_senders({"worker-0": incarnation, "worker-1": 1})
        assert mailbox.first_time("worker-0", incarnation, 1)
        assert not mailbox.first_time("worker-0", incarnation, 1)
        assert len(mailbox._windows) == 1
    assert not mailbox.knows("worker-0", 5)


# ---- a shard that serves --------------------------------------------------------------------


class Callee:
    """An endpoint that only notes its handlers."""

    def __init__(self) -> None:
        self.identity = Identity("job", "shard-0", 1, epoch=1)
        self.handlers: dict[str, Handler] = {}

    def serve(self, method: str, handler: Handler) -> None:
        self.handlers[method] = handler


class Streamed:
    """A stream whose frames a test adds one by one."""

    def __init__(self, method: str, body: bytes, *, incarnation: int, epoch: int = 1) -> None:
        self.peer = "worker-0"
        self.opened = v1.Open(
            sender="worker-0", incarnation=incarnation, body=body, epoch=epoch, method=method
        )
        self.answers: list[v1.Frame] = []
        self.frames: asyncio.Queue[Received | None] = asyncio.Queue()

    def chunk(self, index: int) -> None:
        header = v1.Chunk(index=index, elems=CHUNK)
        self.frames.put_nowait(Received(v1.Frame(chunk=header), torch.ones(CHUNK)))

    async def recv(self) -> Received | None:
        return await self.frames.get()

    async def send(self, frame: v1.Frame) -> None:
        self.answers.append(frame)

    async def waiting(self, names: Iterable[str]) -> None:
        del names

    @property
    def outcomes(self) -> Counter[str]:
        results = [
            one for frame in self.answers for one in v1.PushResults.FromString(frame.body.data).results
        ]
        return Counter(v1.PushResult.Outcome.Name(result.outcome) for result in results)


class Served:
    """A shard with two chunks, at parameters 0."""

    def __init__(self, rule: Any = None) -> None:
        self.runtime, self.endpoint = RealRuntime("shard-0"), Callee()
        callee: Any = self.endpoint
        config = ShardConfig(0, 1, rule or Clocked(), SGD(lr=1.0))
        self.service = ShardService(self.runtime, callee, config)
        self.service.register(v1.ModelSpec(elems=2 * CHUNK, dtype=v1.FLOAT32, chunk_elems=CHUNK))

    def hear(self, epoch: int, *incarnations: int) -> None:
        self.endpoint.identity.epoch = epoch
        self.service.keep_senders({("worker-0", one) for one in incarnations} | {("worker-9", 1)})

    def push(self, incarnation: int, sequence: int, *, epoch: int = 1, assign: bool = False) -> Streamed:
        request = v1.Push(sequence=sequence, samples=1, num_gradients=1, lr=1.0)
        request.command = v1.Push.ASSIGN if assign else request.command
        return Streamed("push", request.SerializeToString(), incarnation=incarnation, epoch=epoch)

    async def serve(self, stream: Streamed, *chunks: int) -> Counter[str]:
        for chunk in chunks:
            stream.chunk(chunk)
        stream.frames.put_nowait(None)
        served: Any = stream
        await self.endpoint.handlers[stream.opened.method](served)
        return stream.outcomes

    @property
    def parameters(self) -> list[float]:
        return [float(self.service.store.parameters_of(chunk)[0]) for chunk in (0, 1)]


def test_a_late_push_of_a_sender_that_left_is_refused_and_not_applied() -> None:
    async def run() -> None:
        served = Served()
        served.hear(1, 7)
        await served.serve(served.push(7, 1, assign=True), 0, 1)
        assert await served.serve(served.push(7, 2), 0, 1) == {"APPLIED": 2}
        before = served.parameters
        served.hear(2)
        assert not any(state.windows.get(("worker-0", 7)) for state in served.service.state.chunks.values())
        for epoch in (1, 2):
            with pytest.raises(RefusedError, match=r"worker-0 \(incarnation 7\) has left the run") as refused:
                await served.serve(served.push(7, 2, epoch=epoch), 0, 1)
            assert refused.value.code == "NOT_MEMBER"
        assert served.parameters == before
        served.hear(3, 8)  # a new process of the same node
        assert await served.serve(served.push(8, 2, epoch=3), 0, 1) == {"APPLIED": 2}

    asyncio.run(run())


def test_a_push_that_is_open_when_its_sender_leaves_is_refused_from_then_on() -> None:
    async def run() -> None:
        served = Served()
        served.hear(1, 7)
        await served.serve(served.push(7, 1, assign=True), 0, 1)
        stream = served.push(7, 2)
        stream.chunk(0)
        handler: Any = served.endpoint.handlers["push"]
        serving = asyncio.ensure_future(handler(stream))
        while served.service.state.version(0) < 1:  # noqa: ASYNC110  nobody tells of it
            await asyncio.sleep(0)
        before = served.parameters
        served.hear(2)
        stream.chunk(1)
        with pytest.raises(RefusedError, match="has left the run"):
            await serving
        assert served.parameters == before
        assert served.service.state.version(1) == 0

    asyncio.run(run())


def test_fetches_and_commands_of_a_sender_that_left_are_refused() -> None:
    async def run() -> None:
        served = Served()
        served.hear(1, 7)
        await served.serve(served.push(7, 1, assign=True), 0, 1)
        command = v1.Command(kind=v1.Command.LEAVE, sequence=5).SerializeToString()
        stream: Any = Streamed("command", command, incarnation=7)
        await served.endpoint.handlers["command"](stream)
        before = served.parameters
        served.hear(2)
        assert not served.service.commands._results
        for method, body in (("command", command), ("fetch", v1.Fetch().SerializeToString())):
            late: Any = Streamed(method, body, incarnation=7)
            with pytest.raises(RefusedError, match="has left the run"):
                await served.endpoint.handlers[method](late)
        assert served.parameters == before == [1.0, 1.0]

    asyncio.run(run())


def test_a_sender_that_joined_before_this_shard_was_told_is_accepted() -> None:
    async def run() -> None:
        served = Served()
        served.hear(1)
        await served.serve(served.push(8, 1, epoch=2, assign=True), 0, 1)
        assert served.service.state.versions() == [0, 0]

    asyncio.run(run())


def test_a_shard_keeps_nothing_of_many_incarnations() -> None:
    async def run() -> None:
        served = Served(InPairs(2))
        served.hear(1, 0)
        await served.serve(served.push(0, 1, assign=True), 0, 1)
        status = v1.Command(kind=v1.Command.LEAVE, sequence=1)
        for incarnation in range(1, 301):
            served.hear(incarnation, incarnation)
            epoch = incarnation
            assert await served.serve(served.push(incarnation, 1, epoch=epoch), 0, 1) == {"APPLIED": 2}
            command: Any = Streamed(
                "command", status.SerializeToString(), incarnation=incarnation, epoch=epoch
            )
            await served.endpoint.handlers["command"](command)
            assert len(served.service.commands._results) == 1
            assert {len(state.windows) for state in served.service.state.chunks.values()} == {1}
        assert served.service.state.versions() == [150, 150]

    asyncio.run(run())


# ---- whole runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["downpour", "dc-asgd"])
def test_a_run_goes_on_exactly_once_after_a_death(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    services: list[ShardService] = []
    original = ShardService.register

    def register(self: ShardService, model: v1.ModelSpec, *, opens: bool = True) -> None:
        services.append(self)
        original(self, model, opens=opens)

    monkeypatch.setattr(ShardService, "register", register)
    model, data = least_squares(240, 200, whole=False, dtype="float32", reduction="mean")
    run = simulate(
        model, data, strategy=strategy, workers=3, servers=2, batch_size=8, epochs=4, chunk_elems=64,
        optimizer=gs.optim.SGD(lr=0.01), deadlines=QUICK,
        config=SimulationConfig(costs={"gradient": Cost(base_s=0.03)}),
        script=kill_at("worker-1", 0.4),
    )  # fmt: skip
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == 4 * 240
    assert np.isfinite(run.parameters["w"]).all()
    windows = {who for one in services for state in one.state.chunks.values() for who, _ in state.windows}
    assert windows == {"worker-0", "worker-2"}


def test_a_tagged_send_of_a_sender_that_left_is_refused() -> None:
    run, make_pair = memory_pairs()

    async def check() -> None:
        async with make_pair() as pair:
            near, far = pair.near, pair.far
            mine, theirs = near.identity, far.identity
            one, two = Vector("one", torch.ones(8)), Vector("two", torch.zeros(8))
            far.members_changed({mine.name: mine.incarnation})
            await asyncio.gather(near.send(theirs.name, 1, one.all), far.recv(mine.name, 1, two.all))
            far.members_changed({"worker-9": 1})
            with pytest.raises(RefusedError, match="no member of this run"):
                await near.send(theirs.name, 2, one.all)

    run(check())
