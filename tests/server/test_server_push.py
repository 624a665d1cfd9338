"""A push on the shard's side, where all chunks arrive at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from gradstream.errors import RefusedError
from gradstream.optim import SGD
from gradstream.runtime.real import RealRuntime
from gradstream.server.aggregation import EveryPush
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.event_schedule import ArrivalOrder, Event, PushArrived, UpdateApplied
from gradstream.server.shard.service import ShardService
from gradstream.transport.base import Handler, Identity, Received
from gradstream.wire import v1

CHUNK_ELEMS, NUM_CHUNKS = 64, 3


class Noting(ArrivalOrder):
    """Notes the events of chunks, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def admit(self, event: Event) -> Iterable[Event]:
        match event:
            case PushArrived(chunk):
                self.seen.append(f"came {chunk}")
            case UpdateApplied(update):
                self.seen.append(f"updated {update.due.chunk}")
        return (event,)


class Callee:
    """An endpoint that only notes its handlers."""

    def __init__(self) -> None:
        self.identity = Identity("job", "shard-0", 1)
        self.handlers: dict[str, Handler] = {}

    def serve(self, method: str, handler: Handler) -> None:
        self.handlers[method] = handler


class Pushed:
    """A push of these chunks, without a network."""

    def __init__(self, chunks: Iterable[int]) -> None:
        request = v1.Push(command=v1.Push.ASSIGN, sequence=1)
        self.peer = "worker-0"
        self.opened = v1.Open(sender="worker-0", incarnation=1, body=request.SerializeToString())
        self.answers: list[v1.Frame] = []
        headers = [v1.Chunk(index=index, elems=CHUNK_ELEMS) for index in chunks]
        self._frames = [Received(v1.Frame(chunk=header), torch.ones(CHUNK_ELEMS)) for header in headers]

    async def recv(self) -> Received | None:
        return self._frames.pop(0) if self._frames else None

    async def send(self, frame: v1.Frame) -> None:
        self.answers.append(frame)


async def serve(pushed: Pushed, order: Noting) -> None:
    """Serves a push as a shard of a model with these chunks does."""
    runtime, endpoint = RealRuntime("shard-0"), Callee()
    callee: Any = endpoint
    service = ShardService(runtime, callee, ShardConfig(0, 1, EveryPush(), SGD(lr=1.0), schedule=order))
    service.register(v1.ModelSpec(elems=NUM_CHUNKS * CHUNK_ELEMS, dtype=v1.FLOAT32, chunk_elems=CHUNK_ELEMS))
    stream: Any = pushed
    try:
        await endpoint.handlers["push"](stream)
    finally:
        runtime.close()


def test_a_chunk_is_updated_before_the_next_one_is_looked_at() -> None:
    """The chunk's elements were just read, so they are in the cache."""
    order, pushed = Noting(), Pushed(range(NUM_CHUNKS))
    asyncio.run(serve(pushed, order))
    assert order.seen == ["came 0", "updated 0", "came 1", "updated 1", "came 2", "updated 2"]
    results = [one for frame in pushed.answers for one in v1.PushResults.FromString(frame.body.data).results]
    assert sorted(result.chunk for result in results) == [0, 1, 2]


def test_a_chunk_that_comes_twice_is_refused() -> None:
    """The second copy would replace the elements of the first, which wait for their update."""
    order = Noting()
    with pytest.raises(RefusedError, match="chunk 1 comes twice in one push") as refused:
        asyncio.run(serve(Pushed([0, 1, 1, 2]), order))
    assert refused.value.code == "BAD_REQUEST"
    assert order.seen[-1] != "came 2"
