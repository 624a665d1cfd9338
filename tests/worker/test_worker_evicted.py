"""A worker whom a shard tells first that it is no member any more."""

from __future__ import annotations

from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator import EvictedError
from gradstream.errors import RefusedError
from gradstream.run.simulated import SimulatedCluster
from gradstream.testing.runs import Tokens, numbered


@pytest.mark.parametrize(
    ("peer", "code", "evicted"),
    [
        ("shard-0", "NOT_MEMBER", True),
        ("shard-0", "BAD_REQUEST", False),
        ("coordinator", "NOT_MEMBER", False),  # it has refused to let this worker in
    ],
)
def test_it_ends_as_evicted_so_that_the_launcher_starts_it_again(peer: str, code: str, evicted: bool) -> None:
    class Told(gs.Downpour):
        async def train(self, worker: Any) -> None:
            raise RefusedError(peer, code, "worker-0 has left the run")

    clusters: list[SimulatedCluster] = []

    async def script(cluster: SimulatedCluster) -> None:
        clusters.append(cluster)

    with pytest.raises(gs.errors.GradstreamError):
        simulate(Tokens(1), numbered(8), strategy=Told(), workers=1, servers=1, epochs=1, script=script)
    error = clusters[0].outcomes["worker-0"]
    assert isinstance(error, EvictedError) is evicted, error
