"""In rounds, the others compute a lost replica's minibatches until it is back whole, and the result stays the same."""

from __future__ import annotations

import random
from functools import cache
from itertools import permutations
from typing import Any

import pytest

import gradstream as gs
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig
from split_jobs import difference, run

WORKERS, ROUNDS_END_S = 3, 2.0
SLOW = ("shard-1", *(f"part1-{rank}" for rank in range(WORKERS)))
"""Between these messages are slow: a round is over for the other parts long before it is for part 1."""
CONFIG = SimulationConfig(
    costs={"forward": Cost(base_s=0.005), "backward": Cost(base_s=0.01)},
    network=Network(
        link=Link(latency_s=1e-3, jitter_s=2e-3),
        links={(a, b): Link(latency_s=0.015, jitter_s=0.01) for a, b in permutations(SLOW, 2)},
    ),
)
OPTIONS: dict[str, Any] = {"workers": WORKERS, "batch_size": 3, "epochs": 5, "config": CONFIG}
STRATEGIES: dict[str, Any] = {"synchronous": gs.Synchronous(), "allreduce": gs.AllReduce()}


@cache
def undisturbed(strategy: str, split: int) -> gs.Run:
    """The run without a death."""
    return run(strategy=STRATEGIES[strategy], split=split, **OPTIONS)


class DrawnDeaths:
    """A script that kills one to three processes of replicas at drawn times, and starts their replicas again."""

    def __init__(self, seed: int, split: int) -> None:
        rng = random.Random(seed)
        self.plan = sorted(
            (
                rng.uniform(0.02, ROUNDS_END_S),
                rng.randrange(WORKERS),
                rng.randrange(split),
                rng.random() < 0.8,
            )
            for _ in range(rng.randint(1, 3))
        )
        self.back_s = rng.uniform(0.0, 0.2)
        self.split = split
        self.killed: list[str] = []

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        begun_s = 0.0
        for at_s, rank, part, comes_back in self.plan:
            await director.sleep(max(0.0, at_s - begun_s))
            begun_s = max(begun_s, at_s)
            replica = [f"worker-{rank}", *(f"part{one}-{rank}" for one in range(1, self.split))]
            assert cluster.coordinator is not None
            active = cluster.coordinator.membership.nodes.active_workers  # the last one is not spared
            if len(active) < 2 or replica[0] not in active or not all(map(cluster.is_running, replica)):
                continue
            self.killed.append(replica[part])
            cluster.kill(replica[part])
            if comes_back:
                director.spawn(self._again(cluster, replica), name=f"replica {rank} again")

    async def _again(self, cluster: SimulatedCluster, replica: list[str]) -> None:
        director = cluster.virtual.runtime("director")
        while any(cluster.is_running(one) for one in replica):
            await director.sleep(0.01)
        await director.sleep(self.back_s)
        for one in replica:
            await cluster.restart(one)


@pytest.mark.parametrize(("strategy", "seed"), [("synchronous", 5), ("allreduce", 10)])
def test_drawn_deaths_of_processes_of_replicas_leave_the_result_as_it_is(strategy: str, seed: int) -> None:
    split, deaths = 2 + seed % 2, DrawnDeaths(seed, 2 + seed % 2)
    done = run(strategy=STRATEGIES[strategy], split=split, script=deaths, **OPTIONS)
    assert deaths.killed
    bound = 0.0 if strategy == "synchronous" else 1e-12
    assert difference(undisturbed(strategy, split), done) <= bound
