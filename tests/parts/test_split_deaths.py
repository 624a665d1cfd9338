"""A part that dies takes its replica out of the run; the others go on, and the replica comes back whole."""

from __future__ import annotations

from typing import Any

import pytest

import gradstream as gs
from gradstream.errors import GradstreamError
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Network, Partition, SimulationConfig
from split_jobs import SAMPLES, run

SLOW = SimulationConfig(costs={"gradient": Cost(base_s=0.03)})


def killed(name: str, at_s: float, *, back_s: float | None, replica: tuple[str, ...]) -> Any:
    """A script that kills a process, and starts its replica again once all of it has ended."""

    async def script(cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(at_s)
        cluster.kill(name)
        if back_s is None:
            return
        while any(cluster.is_running(one) for one in replica):
            await director.sleep(0.01)
        await director.sleep(back_s)
        for one in replica:
            await cluster.restart(one)

    return script


def events(done: gs.Run, kind: str) -> list[str]:
    """Who an event was about, in order."""
    return [event["who"] for event in done.events if event["event"] == kind]


@pytest.mark.parametrize("victim", ["worker-1", "part2-1"])
def test_the_replica_of_a_dead_process_leaves_and_the_others_finish(victim: str) -> None:
    replica = ("worker-1", "part1-1", "part2-1")
    script = killed(victim, 0.2, back_s=None, replica=replica)
    done = run(strategy="downpour", split=3, epochs=6, config=SLOW, script=script)
    assert sorted(events(done, "left")[:3]) == sorted(replica)
    assert done.summary["samples"] >= 6 * SAMPLES


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [(gs.Downpour(), "worker-1"), (gs.SSP(bound=1), "part1-1"), (gs.ElasticAveraging(), "part1-1")],
    ids=repr,
)
def test_the_replica_of_a_dead_process_comes_back(strategy: Any, victim: str) -> None:
    replica = ("worker-1", "part1-1")
    script = killed(victim, 0.3, back_s=0.05, replica=replica)
    done = run(strategy=strategy, split=2, epochs=12, config=SLOW, script=script)
    assert set(events(done, "joined")[-2:]) == set(replica), "it came back"
    came_back_s = max(event["time_s"] for event in done.events if event["event"] == "joined")
    after = [row for row in done.history if row["rank"] == 1 and row["time_s"] > came_back_s]
    assert after, "and took part again"
    assert done.summary["samples"] >= 12 * SAMPLES


@pytest.mark.parametrize("direction", ["to the part", "to the worker"])
def test_parts_that_cannot_reach_each_other_end_the_run_and_say_who_waits_for_what(direction: str) -> None:
    one, other = frozenset({"worker-0"}), frozenset({"part1-0"})
    ends = (one, other) if direction == "to the part" else (other, one)
    network = Network(partitions=[Partition(0.3, 1e9, *ends)])
    config = SimulationConfig(costs={"forward": Cost(base_s=0.03)}, network=network)
    with pytest.raises(GradstreamError, match=r"gives no answer to .*, which has waited for .* for 0.4 s"):
        run(strategy="downpour", split=2, epochs=20, config=config)


def test_a_part_may_compute_for_longer_than_any_silence() -> None:
    config = SimulationConfig(costs={"forward": Cost(base_s=7.0)})
    done = run(strategy="synchronous", split=2, epochs=1, config=config)
    assert done.summary["samples"] == SAMPLES and done.history[-1]["time_s"] > 20
