"""Requests to a shard that parse and have impossible values: the shard refuses them and changes nothing."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from gradstream.optim.merge import PassSum
from gradstream.server.shard.inspection import MOST_PUSHES
from gradstream.strategies.ssp import Clocked
from gradstream.strategies.synchronous import SynchronousRound
from gradstream.wire import v1
from shard_stub import Stub, chunk, exchange, fetch, opening, push, with_shard

KINDS = v1.Command.Kind.keys()
PUSH: dict[str, Any] = {"sequence": 2, "lr": 1.0, "samples": 1}


def code(frames: list[v1.Frame]) -> v1.Code | None:
    return next((frame.refuse.code for frame in frames if frame.WhichOneof("kind") == "refuse"), None)


def step(*commands: v1.Command, number: int = 1, note: bytes = b"") -> v1.Command:
    """A step of a procedure."""
    return v1.Command(
        kind=v1.Command.STEP, sequence=3, step=v1.Procedure(number=number, note=note), commands=commands
    )


@pytest.mark.parametrize(
    ("changes", "sender"),
    [
        ({"command": 2}, "worker-5"),
        ({"command": v1.Push.ASSIGN, "clock": 1}, "worker-5"),
        ({"clock": 1}, "worker-5"),
        ({"portion": 1}, "worker-5"),
        ({"rows": True}, "worker-5"),
        ({"vector": "momentum"}, "worker-5"),
        ({"round": 1}, "worker-5"),
        ({"command": 99}, "worker-5"),
        ({"vector": "nonsense"}, "worker-5"),
        ({"sequence": 0}, "worker-5"),
        ({"sequence": (1 << 64) - 1}, "worker-5"),
        ({"samples": (1 << 64) - 1}, "worker-5"),
        ({"round": (1 << 64) - 1}, "worker-5"),
        ({"clock": (1 << 64) - 1}, "worker-5"),
        ({"lr": math.nan}, "worker-5"),
        ({"lr": math.inf}, "worker-5"),
        ({"loss": math.inf}, "worker-5"),
        ({}, "worker"),
        ({}, "worker-five"),
        ({}, ""),
    ],
)
def test_pushes(changes: dict[str, Any], sender: str) -> None:
    async def script(stub: Stub) -> None:
        await push(stub, 1, 4.0, command=v1.Push.ASSIGN)
        request = v1.Push(**{**PUSH, **changes})
        frames = [opening("push", request, sender=sender), chunk(1, [1.0] * 36, 2), v1.Frame(end=v1.End())]
        assert code(await exchange(stub, *frames)) in (v1.BAD_REQUEST, v1.NON_FINITE)
        assert await fetch(stub) == ([4.0] * 100, {0})

    with_shard(script)


def test_a_push_on_a_version_that_is_not_there_yet() -> None:
    async def script(stub: Stub) -> None:
        await push(stub, 1, 4.0, command=v1.Push.ASSIGN)
        late = chunk(1, [1.0] * 36, 2)
        late.chunk.version = 7
        frames = [opening("push", v1.Push(**PUSH)), late, v1.Frame(end=v1.End())]
        assert code(await exchange(stub, *frames)) == v1.BAD_REQUEST
        assert await fetch(stub) == ([4.0] * 100, {0})

    with_shard(script)


@pytest.mark.parametrize(
    ("method", "request_", "sender"),
    [
        ("fetch", v1.Fetch(chunks=[0, 0]), "worker-5"),
        ("fetch", v1.Fetch(chunks=[9]), "worker-5"),
        ("fetch", v1.Fetch(known=[1]), "worker-5"),
        ("fetch", v1.Fetch(vector="nonsense"), "worker-5"),
        ("fetch", v1.Fetch(), "nobody"),
        ("fetch", v1.Fetch(min_clock=1), "worker-5"),
        ("command", v1.Command.FromString(b"\x08\x63"), "worker-5"),
        *(("command", v1.Command(kind=kind, sequence=3), "worker-5") for kind in KINDS),
        ("command", v1.Command(kind=v1.Command.LEAVE, sequence=3), "nobody"),
        ("command", step(), "nobody"),
    ],
)
def test_what_a_run_without_clocks_and_passes_does_not_use(method: str, request_: Any, sender: str) -> None:
    async def script(stub: Stub) -> None:
        await push(stub, 1, 4.0, command=v1.Push.ASSIGN)
        frames = await exchange(stub, opening(method, request_, sender=sender), v1.Frame(end=v1.End()))
        assert code(frames) == v1.BAD_REQUEST, frames
        assert "Traceback" not in str(frames)
        assert await fetch(stub) == ([4.0] * 100, {0})

    with_shard(script)


@pytest.mark.parametrize(
    "request_",
    [
        v1.Command(kind=v1.Command.LEAVE, sequence=3),
        v1.Command(kind=v1.Command.ADD, sequence=3, x="sum", alpha=1.0),
        step(number=1 << 53 | 1),
        step(*[v1.Command(kind=v1.Command.SCALE, alpha=1.0)] * 4097),
        step(v1.Command(kind=v1.Command.STEP, out="sum")),
        step(v1.Command(kind=v1.Command.SCALE, alpha=math.inf)),
        step(v1.Command(kind=v1.Command.DOT, x="a", y="b")),
    ],
)
def test_what_no_procedure_has(request_: v1.Command) -> None:
    async def script(stub: Stub) -> None:
        await push(stub, 1, 4.0, command=v1.Push.ASSIGN)
        frames = await exchange(stub, opening("command", request_), v1.Frame(end=v1.End()))
        assert code(frames) == v1.BAD_REQUEST, frames
        assert await fetch(stub) == ([4.0] * 100, {0})

    with_shard(script, optimizer=PassSum(), in_passes=True)


def test_clocks_that_are_impossible() -> None:
    async def script(stub: Stub) -> None:
        for request in (
            v1.Command(kind=v1.Command.ENTER, sequence=3, clock=(1 << 64) - 1),
            v1.Command(kind=v1.Command.ENTER, sequence=(1 << 64) - 1),
            v1.Command(kind=v1.Command.LEAVE),
            step(),
        ):
            assert (
                code(await exchange(stub, opening("command", request), v1.Frame(end=v1.End())))
                == v1.BAD_REQUEST
            )
        leave = v1.Command(kind=v1.Command.LEAVE, sequence=3)
        assert code(await exchange(stub, opening("command", leave), v1.Frame(end=v1.End()))) is None

    with_shard(script, rule=Clocked())


def test_pushes_that_wait_take_no_more_memory_than_a_few() -> None:
    """A push that waits for others holds its elements, and a worker may begin as many as it likes."""

    async def script(stub: Stub) -> None:
        await push(stub, 1, 4.0, command=v1.Push.ASSIGN)

        async def later(number: int) -> v1.Code | None:
            request = v1.Push(**{**PUSH, "sequence": number})
            frames = [opening("push", request), chunk(1, [1.0] * 36, number), chunk(0, [1.0] * 64, number)]
            return code(await exchange(stub, *frames))

        asked = [asyncio.ensure_future(later(number)) for number in range(2, 2 + MOST_PUSHES)]
        await asyncio.wait(asked, timeout=0.5)
        assert not [one for one in asked if one.done()]
        assert await later(99) == v1.OVER_LIMIT
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    with_shard(script, rule=SynchronousRound(2, "mean"))


def test_initial_parameters_come_from_the_worker_of_the_lowest_rank() -> None:
    async def script(stub: Stub) -> None:
        request = v1.Push(**PUSH, command=v1.Push.ASSIGN)
        frames = [
            opening("push", request),
            chunk(1, [9.0] * 36, 2),
            chunk(0, [9.0] * 64, 2),
            v1.Frame(end=v1.End()),
        ]
        assert code(await exchange(stub, *frames)) == v1.BAD_REQUEST

    with_shard(script, first=0)
    with pytest.raises(AssertionError):
        with_shard(script, first=5)
