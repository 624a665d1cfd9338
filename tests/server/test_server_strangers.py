"""A shard serves only members of the run. Other nodes change nothing; a member that the shard does not know yet
waits until it does. On the virtual network, where waiting costs no time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import torch

from gradstream.errors import ClosedError, RefusedError
from gradstream.optim import SGD
from gradstream.runtime import SimulationConfig, VirtualCluster
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.service import ShardService
from gradstream.strategies.ssp import Clocked
from gradstream.testing.pieces import chunk_frame
from gradstream.transport.base import Identity, Stream
from gradstream.transport.endpoint import AccessControl, EndpointCore
from gradstream.transport.limits import LIMITS
from gradstream.transport.simulated import MemoryEndpoint, MemoryNetwork
from gradstream.wire import v1

FINGERPRINT, ELEMS, EPOCH = 77, 64, 3
MEMBERS = {"shard-0": 1, "worker-0": 10, "worker-1": 11}


class Run:
    """A shard whose parameters are all 10, and the nodes that call it."""

    def __init__(self, virtual: VirtualCluster) -> None:
        self.virtual = virtual
        self.network = MemoryNetwork(self.virtual)
        self.shard = self._endpoint("shard-0", 1)
        config = ShardConfig(0, 1, Clocked(), SGD(lr=1.0), silence_s=60.0)
        self.service = ShardService(self.shard.runtime, self.shard, config)
        spec = v1.ModelSpec(fingerprint=FINGERPRINT, elems=ELEMS, dtype=v1.FLOAT32, chunk_elems=64)
        self.service.register(spec)

    def _endpoint(self, name: str, incarnation: int, epoch: int = EPOCH) -> MemoryEndpoint:
        identity = Identity("job", name, incarnation, FINGERPRINT, epoch=epoch)
        return MemoryEndpoint(identity, self.virtual.runtime(name), self.network)

    async def node(self, name: str, incarnation: int, epoch: int = EPOCH) -> MemoryEndpoint:
        """A node that calls the shard."""
        made = self._endpoint(name, incarnation, epoch)
        await made.start()
        made.know("shard-0", self.shard.address)
        return made

    async def begin(self) -> None:
        """Has a member push the parameters."""
        await self.shard.start()
        self.shard.members_changed(MEMBERS)
        first = await self.node("worker-0", 10)
        await push(first, 1, 10.0, command=v1.Push.ASSIGN)
        assert self.parameters == [10.0] * ELEMS
        await first.close()

    @property
    def parameters(self) -> list[float]:
        """The parameters on the shard."""
        stored: list[float] = self.service.store.parameters.tensor[:ELEMS].tolist()
        return stored

    @property
    def now_s(self) -> float:
        """Virtual time, in seconds."""
        return self.virtual.clock.now_ns / 1e9


def played(script: Callable[[Run], Awaitable[None]]) -> None:
    virtual = VirtualCluster(0, SimulationConfig())

    async def main() -> None:
        run = Run(virtual)
        await run.begin()
        try:
            await script(run)
        finally:
            await run.shard.close()
        assert not run.shard._tasks
        counts = {(one.num_streams, one.unread_bytes) for one in run.shard.access.intakes._of.values()}
        assert counts <= {(0, 0)}

    virtual.run(main())


async def push(
    node: EndpointCore, sequence: int, value: float, command: v1.Push.Command | None = None
) -> None:
    request = v1.Push(sequence=sequence, lr=1.0, samples=1)
    if command is not None:
        request.command = command
    stream = await node.open("shard-0", "push", request)
    await stream.send(chunk_frame(0, ELEMS, sequence=sequence), torch.full((ELEMS,), value))
    await stream.end()
    await said(stream)


async def fetch(node: EndpointCore) -> None:
    stream = await node.open("shard-0", "fetch", v1.Fetch())
    await stream.end()
    await said(stream)


async def command(node: EndpointCore) -> None:
    leave = v1.Command(kind=v1.Command.LEAVE, sequence=7)
    await node.call("shard-0", "command", leave, v1.CommandResult)


async def said(stream: Stream) -> list[v1.Frame]:
    """All frames of the answer."""
    frames = []
    while (received := await stream.recv(60)) is not None:
        frames.append(received.frame)
    return frames


ASKS = [lambda node: push(node, 7, 1.0), fetch, command]


@pytest.mark.parametrize("ask", ASKS, ids=["push", "fetch", "command"])
@pytest.mark.parametrize(
    ("name", "incarnation", "code"),
    [
        ("worker-9", 1, "NOT_MEMBER"),
        ("worker-0", 11, "NOT_MEMBER"),  # the incarnation of another member, or of an earlier process
        ("shard-1", 1, "FORBIDDEN"),
        ("coordinator", 1, "FORBIDDEN"),
        ("launcher", 1, "FORBIDDEN"),
        ("", 1, "FORBIDDEN"),
    ],
)
def test_a_node_that_is_no_member_changes_nothing(
    ask: Callable[[EndpointCore], Awaitable[None]], name: str, incarnation: int, code: str
) -> None:
    async def script(run: Run) -> None:
        stranger = await run.node(name, incarnation)
        counters = dict(run.service.executor.counters)
        with pytest.raises(RefusedError) as refused:
            await ask(stranger)
        assert refused.value.code == code
        assert run.parameters == [10.0] * ELEMS
        assert dict(run.service.executor.counters) == counters
        await stranger.close()

    played(script)


@pytest.mark.parametrize("ask", ASKS, ids=["push", "fetch", "command"])
def test_members_are_served(ask: Callable[[EndpointCore], Awaitable[None]]) -> None:
    """The request that other nodes are refused works for a member."""

    async def script(run: Run) -> None:
        member = await run.node("worker-1", 11)
        await ask(member)
        assert run.parameters in ([9.0] * ELEMS, [10.0] * ELEMS, [0.0] * ELEMS)
        await member.close()

    played(script)


def test_a_member_that_the_shard_has_not_heard_of_is_held_and_then_served() -> None:
    async def script(run: Run) -> None:
        runtime = run.shard.runtime
        member = await run.node("worker-2", 12, epoch=EPOCH + 1)
        pushing = runtime.spawn(push(member, 1, 1.0), name="pushing")
        await runtime.sleep(3.0)
        assert not pushing.done()
        assert (
            run.parameters == [10.0] * ELEMS
        )  # the push has arrived, and the shard has applied nothing of it
        run.shard.members_changed({**MEMBERS, "worker-3": 13})  # a change of members that does not concern it
        await runtime.sleep(3.0)
        assert not pushing.done() and run.parameters == [10.0] * ELEMS
        run.shard.identity.epoch = EPOCH + 1
        run.shard.members_changed({**MEMBERS, "worker-2": 12})
        await pushing
        assert run.parameters == [9.0] * ELEMS
        await member.close()

    played(script)


@pytest.mark.parametrize("other_news", [False, True])
def test_a_node_that_falsely_claims_to_be_a_member_is_refused_in_time(other_news: bool) -> None:
    async def script(run: Run) -> None:
        runtime = run.shard.runtime

        async def news() -> None:
            for number in range(100):
                await runtime.sleep(1.0)
                run.shard.members_changed({**MEMBERS, "worker-3": number})

        telling = runtime.spawn(news(), name="news") if other_news else None
        liar = await run.node("worker-9", 1, epoch=2**63)
        begun_s = run.now_s
        with pytest.raises(RefusedError, match=r"NOT_MEMBER.*has not heard that worker-9 is a member"):
            await push(liar, 1, 1.0)
        assert run.now_s - begun_s < LIMITS.handshake_s + 1
        assert run.parameters == [10.0] * ELEMS
        if telling is not None:
            telling.cancel()
        await liar.close()

    played(script)


def test_a_node_that_proves_to_be_no_member_is_refused_at_once() -> None:
    async def script(run: Run) -> None:
        runtime = run.shard.runtime
        late = await run.node("worker-9", 1, epoch=EPOCH + 1)
        pushing = runtime.spawn(push(late, 1, 1.0), name="pushing")
        await runtime.sleep(1.0)
        run.shard.identity.epoch = EPOCH + 1
        run.shard.members_changed({"shard-0": 1, "worker-0": 10})
        begun_s = run.now_s
        with pytest.raises(RefusedError, match="NOT_MEMBER"):
            await pushing
        assert run.now_s - begun_s < 1
        await late.close()

    played(script)


def test_a_waiting_node_that_gives_up_leaves_no_state() -> None:
    async def script(run: Run) -> None:
        runtime = run.shard.runtime
        late = await run.node("worker-9", 1, epoch=EPOCH + 1)
        streams = [await late.open("shard-0", "push", v1.Push(sequence=1)) for _ in range(20)]
        await runtime.sleep(1.0)
        assert len(run.shard._tasks) == 20
        for stream in streams:
            stream.cancel("enough")
        await runtime.sleep(1.0)
        assert not run.shard._tasks
        with pytest.raises(ClosedError):
            await streams[0].recv()
        await late.close()

    played(script)


def test_a_member_that_was_lost_is_one_no_longer() -> None:
    async def script(run: Run) -> None:
        member = await run.node("worker-1", 11)
        await push(member, 1, 1.0)
        run.shard.identity.epoch = EPOCH + 1
        run.shard.members_changed({"shard-0": 1, "worker-0": 10})
        with pytest.raises(RefusedError, match="STALE_EPOCH"):
            await push(member, 2, 1.0)
        member.identity.epoch = EPOCH + 1  # it knows of that change
        with pytest.raises(RefusedError, match="NOT_MEMBER"):
            await push(member, 2, 1.0)
        assert run.parameters == [9.0] * ELEMS
        await member.close()

    played(script)


def test_a_missing_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail for a shard that serves every node."""
    monkeypatch.setattr(AccessControl, "is_member", lambda access, opened: True)
    with pytest.raises(pytest.fail.Exception):
        test_a_node_that_is_no_member_changes_nothing(ASKS[0], "worker-9", 1, "NOT_MEMBER")
