"""How a node tries to reach a silent coordinator: a few connections at a time, and no hasty verdict."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gradstream.coordinator.client.presence import MAX_TRIES, EvictedError, Heartbeat
from gradstream.errors import GradstreamError, PeerLostError, RefusedError
from gradstream.runtime import SimulationConfig, VirtualCluster
from gradstream.runtime.deadlines import Deadlines
from gradstream.transport.limits import LIMITS

DEADLINES = Deadlines(lease_s=8)


class Silent:
    """An endpoint and a presence whose coordinator says nothing; `answer` ends a call."""

    heard_ns = 0
    comes_back = False

    def __init__(self, answer: GradstreamError | None) -> None:
        self.answer = answer
        self.now = self.most = self.tries = self.resumed = 0

    async def call(self, *given: Any, **options: Any) -> None:
        """Counts itself, and waits for ever where there is no answer."""
        self.tries += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.answer is not None:
                raise self.answer
            await asyncio.get_running_loop().create_future()
        finally:
            self.now -= 1

    async def resume(self) -> None:
        """Counts."""
        self.resumed += 1


def watched(answer: GradstreamError | None, seconds: float) -> tuple[Silent, list[GradstreamError]]:
    virtual = VirtualCluster(0, SimulationConfig())
    node, lost = Silent(answer), list[GradstreamError]()

    async def main() -> None:
        runtime: Any = virtual.runtime("worker-0")
        given: Any = node
        heartbeat = Heartbeat(runtime, given, given, DEADLINES, lost.append)
        task = runtime.spawn(heartbeat.run(), name="heartbeat")
        await runtime.sleep(seconds)
        task.cancel()

    virtual.run(main())
    return node, lost


def test_a_silent_coordinator_finds_only_a_few_connections() -> None:
    node, lost = watched(None, 12 * DEADLINES.lease_s)
    assert node.tries > 2 * LIMITS.sessions  # it goes on trying
    assert node.most <= MAX_TRIES
    assert LIMITS.sessions >= 2 * MAX_TRIES  # what the coordinator lets a node have
    assert not lost
    assert node.now == 0  # all of them were closed


@pytest.mark.parametrize("code", ["OVER_LIMIT", "BAD_REQUEST", "STALE_EPOCH", "BAD_SECRET"])
def test_a_refusal_that_says_nothing_of_membership_is_no_eviction(code: str) -> None:
    node, lost = watched(RefusedError("coordinator", code, "no"), 4 * DEADLINES.lease_s)
    assert node.tries > 10
    assert not lost


@pytest.mark.parametrize("code", ["NOT_MEMBER", "BAD_CERTIFICATE"])
def test_who_is_no_member_any_more_was_evicted_and_is_told_once(code: str) -> None:
    _, lost = watched(RefusedError("coordinator", code, "it was silent for 8 s"), 4 * DEADLINES.lease_s)
    [error] = lost
    assert isinstance(error, EvictedError)
    assert "it was silent for 8 s" in str(error)


def test_where_no_process_listens_the_coordinator_is_lost() -> None:
    _, lost = watched(PeerLostError("coordinator", "gone", nobody_listens=True), 4 * DEADLINES.lease_s)
    [error] = lost
    assert isinstance(error, PeerLostError)
