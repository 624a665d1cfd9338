"""A member gone bad: it has a worker's credentials, and sends messages of the whole protocol, drawn at random.

On virtual time. The worker's own process goes on beside it, so that rounds have a contribution of that worker.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from google.protobuf.message import Message

from gradstream.errors import GradstreamError
from gradstream.run.simulated import SimulatedCluster
from gradstream.transport.base import Stream
from gradstream.transport.limits import METHODS, role_of
from gradstream.transport.simulated import MemoryEndpoint
from gradstream.wire import v1

REQUESTS: Mapping[str, type[Message]] = {
    "join": v1.Join,
    "plan": v1.AskPlan,
    "alive": v1.Body,
    "resume": v1.Resume,
    "assign": v1.Ask,
    "ending": v1.Ending,
    "draw": v1.Draw,
    "epoch_part": v1.EpochPart,
    "shares": v1.Took,
    "keep": v1.Keep,
    "kept": v1.Kept,
    "push": v1.Push,
    "fetch": v1.Fetch,
    "command": v1.Command,
    "tensor": v1.Tensor,
    "exchange": v1.Exchange,
    "broken": v1.Broken,
    "meet": v1.Meet,
    "replica": v1.Body,
    "state": v1.Body,
    "post": v1.Body,
    "tunnel": v1.Tunnel,
    "answer": v1.Tunnel,
}
"""What opens a stream of each method that workers may call."""

BODIES: Mapping[str, type[Message]] = {"join": v1.Beat, "resume": v1.Beat, "keep": v1.Part}
"""What follows it as a Body; other methods get bytes."""

OWN_END = frozenset({"failure", "finished", "leaves", "broken"})
"""Fields of a beat, or of a report, by which a worker ends the run, or its own part of it. It may; so they are tried
apart."""

COUNTS = (0, 1, 2, 3, 7, 100, 1 << 31, 1 << 32, (1 << 53) - 1, 1 << 53, (1 << 63) - 1)
NUMBERS = (0.0, 1.0, -1.0, -1000.0, 1e-30, 1e6, 1e38, -1e38, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "sum",
    "x",
    "momentum_buffer",
    "worker-0",
    "worker-1",
    "shard-0",
    "coordinator",
    "\x1b[2J",
    "../a",
    "é" * 99,
)


class GoneBad:
    """A script for `SimulatedCluster.run`: sends messages until there were `count`, or the run is over.

    Args:
        count: number of messages.
        seed: of all that is drawn.
        worker: name of the worker that has gone bad.
        methods: the methods that are called. By default all but "resume", by which it would take its own place in the
            run from its process, and lose it with the first beat that is refused.
        at_once: number of messages that are under way at the same time.

    Attributes:
        answers: how often each method was answered, by method and "served" or the code of the refusal.
        fields: the fields that were set, as "Message.field".
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        worker: str = "worker-2",
        methods: frozenset[str] = frozenset(REQUESTS.keys() - {"resume"}),
        at_once: int = 8,
    ) -> None:
        self.answers = Counter[tuple[str, str]]()
        self.fields = set[str]()
        self.worker = worker
        self._left = count
        self._at_once = at_once
        self._draw = random.Random(seed)
        self._methods = sorted(methods)
        self._sequence = 1 << 20

    @property
    def sent(self) -> int:
        """Number of messages so far."""
        return self.answers.total()

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(0.1)
        living = self._living(cluster)
        rogue = MemoryEndpoint(
            replace(living[self.worker].identity), cluster.virtual.runtime("rogue"), cluster.network
        )
        while self._left > 0 and not cluster.over:
            burst = [self._say(cluster, rogue) for _ in range(self._at_once)]
            await director.gather(*burst)
            await director.sleep(1e-3)
        if (
            not cluster.over
        ):  # the numbers of its pushes are used up: a round would wait for it until it is lost
            cluster.kill(self.worker)

    def _living(self, cluster: SimulatedCluster) -> dict[str, MemoryEndpoint]:
        return {
            one.identity.name: one
            for one in cluster.network.endpoints.values()
            if cluster.is_running(one.identity.name)
        }

    async def _say(self, cluster: SimulatedCluster, rogue: MemoryEndpoint) -> None:
        draw, living = self._draw, self._living(cluster)
        method = draw.choice(self._methods)
        callee = draw.choice([name for name in living if role_of(name) in METHODS[method].served_by] or [""])
        if not callee or callee == self.worker:
            return
        target = living[callee]
        rogue.identity.epoch = max(rogue.identity.epoch, target.identity.epoch)
        rogue.know(callee, target.address)
        request = self._request(method, cluster)
        self._left -= 1
        answer, stream = "silent", None
        try:
            stream = await rogue.open(callee, method, request)
            await self._go_on(stream, method, target)
            while (received := await stream.recv(0.02)) is not None:
                answer = str(received.frame.WhichOneof("kind"))
        except GradstreamError as error:
            answer = getattr(error, "code", answer)
        except ValueError as error:  # the rogue's own side refuses to send it
            answer = f"unsent: {type(error).__name__}"
        finally:
            if stream is not None and draw.random() < 0.9:
                stream.cancel("done")
        self.answers[method, answer] += 1

    async def _go_on(self, stream: Stream, method: str, target: MemoryEndpoint) -> None:
        """Sends what follows a request: chunks with a push, bodies with others."""
        draw = self._draw
        if METHODS[method].chunks and draw.random() < 0.9:
            for index in draw.choice([(0,), (0, 1), (1, 0), (2,), (0, 0), (0, 1, 2, 3), (99,)]):
                elems = draw.choice([64, 64, 64, 1, 65, 0])
                value = draw.choice([1.0, -1000.0, 1e30, 3e38, float("nan"), float("inf"), 0.0])
                chunk = v1.Chunk(index=index, elems=elems, dtype=v1.FLOAT32, sequence=self._sequence)
                if draw.random() < 0.3:
                    self._fill(chunk, depth=1)
                    chunk.elems, chunk.dtype = (
                        elems,
                        v1.FLOAT32,
                    )  # the simulated carrier has the tensor itself
                with suppress(GradstreamError):
                    await stream.send(v1.Frame(chunk=chunk), torch.full((elems,), value), 0.02)
        else:
            for _ in range(draw.randrange(3)):
                body = BODIES.get(method)
                data = (
                    draw.randbytes(draw.randrange(64))
                    if body is None
                    else self._drawn(body).SerializeToString()
                )
                await stream.send(v1.Frame(body=v1.Body(data=data)), None, 0.02)
        if draw.random() < 0.9:
            await stream.end()

    # ---- what is drawn ------------------------------------------------------------------

    def _request(self, method: str, cluster: SimulatedCluster) -> Message:
        """One request: half of them such as an honest worker sends, but for a few fields."""
        request = self._drawn(REQUESTS[method])
        if isinstance(request, v1.Push | v1.Command) and self._draw.random() < 0.8:
            self._sequence += 1
            request.sequence = self._sequence
        if isinstance(request, v1.Push):
            request.ClearField("behalf") if self._draw.random() < 0.8 else None
            if self._draw.random() < 0.7:
                likely = v1.Push(sequence=self._sequence, samples=2, lr=0.1, num_gradients=1, loss=1.0)
                likely.round = self._draw.choice([0, *self._versions(cluster)])
                name = self._draw.choice([one.name for one in v1.Push.DESCRIPTOR.fields])
                if name != "behalf" and not _repeated(v1.Push.DESCRIPTOR.fields_by_name[name]):
                    setattr(likely, name, getattr(request, name))
                request = likely
        return request

    def _versions(self, cluster: SimulatedCluster) -> Iterator[int]:
        for shard in SHARDS:
            yield from (version for version in shard.versions() if version >= 0)

    def _drawn(self, kind: type[Message]) -> Message:
        message = kind()
        self._fill(message, depth=3)
        return message

    def _fill(self, message: Message, depth: int) -> None:
        """Sets some of the fields of a message."""
        draw = self._draw
        for field in message.DESCRIPTOR.fields:
            if draw.random() < 0.5 or (
                message.DESCRIPTOR.name in ("Beat", "BeatReport") and field.name in OWN_END
            ):
                continue
            self.fields.add(f"{message.DESCRIPTOR.name}.{field.name}")
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.message_type is not None:
                for _ in range(draw.randrange(3) if _repeated(field) else depth > 0):
                    inner = getattr(message, field.name)
                    if depth > 0:
                        self._fill(inner.add() if _repeated(field) else inner, depth - 1)
            elif _repeated(field):
                getattr(message, field.name).extend(self._scalar(field) for _ in range(draw.randrange(4)))
            else:
                setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: Any) -> Any:
        draw, kinds = self._draw, field
        match field.cpp_type:
            case kinds.CPPTYPE_BOOL:
                return draw.random() < 0.5
            case kinds.CPPTYPE_ENUM:
                return draw.choice([*(value.number for value in field.enum_type.values), 99])
            case kinds.CPPTYPE_FLOAT | kinds.CPPTYPE_DOUBLE:
                return draw.choice(NUMBERS)
            case kinds.CPPTYPE_STRING:
                text = draw.choice(TEXTS)
                return text.encode() if field.type == kinds.TYPE_BYTES else text
            case kinds.CPPTYPE_UINT32 | kinds.CPPTYPE_INT32:
                return draw.choice(COUNTS) % (1 << 31)
            case _:
                return draw.choice(COUNTS)


SHARDS: list[Any] = []
"""State machines of the shards of the run under attack; tests fill it."""


def _repeated(field: Any) -> bool:
    known = getattr(field, "is_repeated", None)  # of newer runtimes, which have no label
    return bool(field.label == field.LABEL_REPEATED if known is None else known)
