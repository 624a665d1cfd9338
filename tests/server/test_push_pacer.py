"""Pushes of one round are read side by side."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from gradstream.server.shard.requests import LEAD_CHUNKS, PacedPush, PushPacer
from gradstream.strategies.synchronous import SynchronousRound


async def reads(push: PacedPush, num_chunks: int) -> None:
    for _ in range(num_chunks):
        push.read()
        await push.turn()


async def yields() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(pushes: int, *, round_of_last: int = 0) -> tuple[ExitStack, list[PacedPush], PushPacer]:
    pacer, stack = PushPacer(), ExitStack()
    rounds = [0] * (pushes - 1) + [round_of_last]
    return stack, [stack.enter_context(pacer.push(number)) for number in rounds], pacer


def test_a_push_is_never_far_ahead_of_the_slowest() -> None:
    async def main() -> None:
        stack, (fast, middle, slow), _ = run(3)
        with stack:
            reading = [asyncio.ensure_future(reads(push, 50)) for push in (fast, middle)]
            await yields()
            assert (fast.num_read, middle.num_read) == (LEAD_CHUNKS + 1, LEAD_CHUNKS + 1)
            for count in range(1, 51):
                slow.read()
                await yields()
                assert fast.num_read == middle.num_read == min(50, count + LEAD_CHUNKS + 1)
            await asyncio.gather(*reading)

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_push_that_has_ended_or_failed_holds_nobody_up(fails: bool) -> None:
    async def main() -> None:
        pacer = PushPacer()
        with pacer.push(0) as fast:
            try:
                with pacer.push(0):
                    reading = asyncio.ensure_future(reads(fast, 50))
                    await yields()
                    assert not reading.done()
                    if fails:
                        raise ConnectionError
            except ConnectionError:
                assert fails
            await reading
        with pacer.push(0) as again:  # the round has begun anew: nothing is left of it
            await reads(again, 50)

    asyncio.run(main())


def test_rounds_do_not_wait_for_one_another_nor_for_a_push_that_has_not_begun() -> None:
    async def main() -> None:
        stack, (one, _), pacer = run(2, round_of_last=1)
        with stack:
            await reads(one, 50)  # alone in its round
            with pacer.push(0) as late:
                reading = asyncio.ensure_future(reads(one, 1))
                await yields()
                assert not reading.done()
                await reads(late, 50)
                await reading

    asyncio.run(main())


def test_pushes_are_paced_where_every_worker_is_waited_for() -> None:
    assert SynchronousRound(3, "mean").paced
    assert not SynchronousRound(3, "mean", backup=1).paced
