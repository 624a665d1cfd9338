"""Whoever stood still itself does not take that for the silence of others."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradstream.runtime import VirtualCluster
from gradstream.runtime.deadlines import Deadlines, Stalls, StallWatch
from gradstream.runtime.real import RealRuntime
from gradstream.runtime.tasks import Broadcast, Silence

S = 1_000_000_000


def left_s(stalls: Stalls, since_s: float, bound_s: float, now_s: float) -> float:
    return stalls.left_ns(round(since_s * S), round(bound_s * S), round(now_s * S)) / S


def test_without_a_stall_silence_is_what_the_clock_says() -> None:
    assert left_s(Stalls(), 1, 10, 4) == 7
    assert left_s(Stalls(), 1, 10, 12) == -1


def test_after_a_long_stall_silence_counts_anew() -> None:
    stalls = Stalls()
    stalls.add(3 * S, 15 * S)
    assert left_s(stalls, 1, 10, 15) == 10
    assert left_s(stalls, 1, 10, 24) == 1
    assert left_s(stalls, 1, 10, 26) == -1, "whoever says nothing after that is silent"
    assert left_s(stalls, 16, 10, 25) == 1, "what was heard since is what counts"


def test_a_short_stall_is_not_counted_and_leaves_time_to_read() -> None:
    stalls = Stalls()
    stalls.add(3 * S, 4 * S)
    assert left_s(stalls, 1, 10, 5) == 7
    late = Stalls()
    late.add(round(10.9 * S), round(11.9 * S))
    assert left_s(late, 1, 10, 11.9) == 1.25, "an eighth of the bound, to read what has come"
    assert left_s(late, 0.5, 10, 11.9) == 1.25


def test_a_stall_before_the_peer_was_heard_excuses_nothing() -> None:
    stalls = Stalls()
    stalls.add(0, 5 * S)
    assert left_s(stalls, 6, 10, 17) == -1
    assert left_s(stalls, 4.5, 10, 15.5) == -0.5, "only what was after"


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=6),
    st.integers(0, 100),
    st.integers(1, 100),
)
def test_silence_is_always_noticed_in_the_end(gaps: list[tuple[int, int]], since: int, bound: int) -> None:
    stalls, now = Stalls(), 0
    for gap, length in gaps:
        stalls.add(now + gap, now + gap + length)
        now += gap + length
    now = max(now, since)
    left = stalls.left_ns(since, bound, now)
    assert left <= bound
    assert stalls.left_ns(since, bound, now + bound) <= 0
    assert left >= bound - (now - since), "a stall takes nothing away"


def test_the_watch_notes_looks_that_come_too_late() -> None:
    at = [0.0]
    stalls = Stalls()
    watch = StallWatch(stalls, lambda: round(at[0] * S))

    async def look() -> None:
        for at[0] in (0.0, 0.2, 0.4, 12.4, 12.5):
            watch.look()

    asyncio.run(look())
    assert stalls.total_ns == 12 * S
    at[0] = 100.0
    asyncio.run(look())  # on another loop: nobody has looked in between, and nobody has waited
    assert stalls.total_ns == 24 * S


def test_the_alarm_waits_until_what_has_come_is_read() -> None:
    cluster = VirtualCluster()
    runtime, bell, heard = cluster.runtime("a"), Broadcast(), False
    silence = Silence(runtime, bell)

    def wakes() -> None:
        runtime.stalls.add(2 * S, runtime.now())

    def reads() -> None:
        nonlocal heard
        heard = True
        silence.heard()
        bell.ring()

    async def waits() -> bool:
        return await silence.until(bell, lambda: heard, 10.0)

    runtime.call_later(9.999, wakes)  # stopped from 2 s on, until just before the deadline would end
    runtime.call_later(10.5, reads)
    assert cluster.run(waits())
    assert cluster.clock.now_ns == round(10.5 * S)


def test_silence_after_a_stall_is_noticed() -> None:
    cluster = VirtualCluster()
    runtime, bell = cluster.runtime("a"), Broadcast()
    runtime.call_later(9.0, lambda: runtime.stalls.add(2 * S, 9 * S))
    assert not cluster.run(Silence(runtime, bell).until(bell, lambda: False, 10.0))
    assert cluster.clock.now_ns == 19 * S


def test_a_deadline_is_put_off_by_a_stall() -> None:
    cluster = VirtualCluster()
    runtime = cluster.runtime("a")

    async def waits() -> None:
        with pytest.raises(TimeoutError):
            await runtime.within(10.0, runtime.sleep(1e6))

    runtime.call_later(9.0, lambda: runtime.stalls.add(2 * S, 9 * S))
    cluster.run(waits())
    assert cluster.clock.now_ns == 19 * S
    assert runtime.awake_ns() == 12 * S


def test_a_blocked_loop_is_a_stall() -> None:
    """The loop stands still for longer than the bound; what came meanwhile is read first."""

    async def waits() -> str:
        runtime = RealRuntime("a")
        reader, writer = await asyncio.open_connection(*await listening())
        writer.write(b"?\n")
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, time.sleep, 4 * StallWatch.PERIOD_S)  # as SIGSTOP
        try:
            answer = await runtime.within(2 * StallWatch.PERIOD_S, reader.readline())
        finally:
            writer.close()
            runtime.close()
        assert runtime.stalls.total_ns > 0, "no stall was noticed"
        return answer.decode()

    async def listening() -> tuple[str, int]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            await asyncio.sleep(2 * StallWatch.PERIOD_S)  # due while the loop stands still
            writer.write(b"here\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address: tuple[str, int] = server.sockets[0].getsockname()
        return address

    assert asyncio.run(waits()) == "here\n"


def test_no_carrier_decides_before_the_rules_do() -> None:
    for deadlines in (
        Deadlines(),
        Deadlines(lease_s=300),
        Deadlines(silence_s=500),
        Deadlines(coordinator_s=1),
    ):
        assert deadlines.connection_s / 2 > max(deadlines.silence_s, deadlines.lease_s, deadlines.patience_s)
        assert deadlines.connection_s > deadlines.patience_s >= deadlines.lease_s
        assert 2 * deadlines.beat_s < 0.1 * deadlines.lease_s, "a cut of 0.9 of a lease"
