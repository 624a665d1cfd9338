"""A run without servers, stopped, resumed or killed: whole rounds only, whatever happens. Virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.checkpoint import newest
from gradstream.errors import Interrupted, PeerLostError
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.strategies import AllReduce
from gradstream.testing.runs import QUICK, kill_at, least_squares
from gradstream.worker.group.peers import GroupPeers
from whole_runs import same, unexpected

MODEL, DATA = least_squares(60, 700, whole=False)
WORLD = SimulationConfig(
    costs={"gradient": Cost(base_s=0.01, jitter=Exponential()), "apply": Cost(base_s=2e-3)},
    network=Network(bandwidth_bytes_s=1e6, link=Link(latency_s=1e-3, jitter_s=1e-3)),
)
SMALL = 128 * 8 / (1 << 20)
JOB: dict[str, Any] = {
    "optimizer": gs.optim.Adam(lr=0.05), "workers": 3, "batch_size": 4, "epochs": 4, "chunk_elems": 64,
    "config": WORLD, "deadlines": QUICK, "keep_last": 3,
}  # fmt: skip
EXACT: dict[str, Any] = {"optimizer": gs.optim.SGD(lr=2.0**-7, momentum=0.5), "workers": 4}
"""With whole numbers, rounds of 16 samples: every sum, and its mean, is exact in any order."""
STRATEGIES = {
    "whole": AllReduce(bucket_mib=SMALL, algorithm="ring"),
    "sharded": AllReduce(bucket_mib=SMALL, sharded=True),
    "after": AllReduce(bucket_mib=SMALL, overlap=False),
}


def stop_at(seconds: float) -> Any:
    async def script(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.stop()

    return script


@pytest.mark.parametrize(("name", "seconds"), [("whole", 0.08), ("sharded", 0.3), ("after", 0.08)])
def test_stopped_and_resumed_a_run_ends_with_the_same_bytes(name: str, seconds: float) -> None:
    """This holds if it is stopped again, and if it is resumed by the other exchange: the files are the same."""
    job = {**JOB, "strategy": STRATEGIES[name]}
    whole = simulate(MODEL, DATA, **job)
    storage = MemoryStorage()
    with pytest.raises(Interrupted):
        simulate(MODEL, DATA, storage=storage, script=stop_at(seconds), **job)
    if seconds < 0.2:
        with pytest.raises(Interrupted):
            simulate(MODEL, DATA, storage=storage, script=stop_at(0.1), resume=True, **job)
    other = {**job, "strategy": AllReduce(sharded=not STRATEGIES[name].sharded, bucket_mib=2 * SMALL)}
    for again in (job, other):
        run = simulate(MODEL, DATA, storage=storage, resume=True, **again)
        if again is job:
            assert same(run, whole)
        else:  # buckets cut elsewhere are summed in another order
            np.testing.assert_allclose(run.parameters["w"], whole.parameters["w"], rtol=1e-9)


def test_another_number_of_workers_goes_on_at_the_same_sample() -> None:
    """Whole numbers: every sum is exact, so the bytes tell whether each sample came once and in its round."""
    model, data = least_squares(48, 700, grid=2.0**-10)
    job = {**JOB, **EXACT, "strategy": STRATEGIES["sharded"]}
    whole = simulate(model, data, **job)
    for workers, size in ((2, 8), (1, 16), (8, 2)):
        storage = MemoryStorage()
        with pytest.raises(Interrupted):
            simulate(model, data, storage=storage, script=stop_at(0.12), **job)
        run = simulate(
            model, data, storage=storage, resume=True, **{**job, "workers": workers, "batch_size": size}
        )
        assert same(run, whole), workers
        assert run.summary["samples_accounted"] == 4 * 48


def test_a_run_through_a_server_goes_on_without_and_back() -> None:
    model, data = least_squares(48, 700, grid=2.0**-10)
    job = {**JOB, **EXACT}
    orders: list[tuple[Any, Any]] = [
        (gs.Synchronous(), STRATEGIES["sharded"]), (STRATEGIES["whole"], gs.Synchronous()),
    ]  # fmt: skip
    expected = simulate(model, data, strategy=gs.Synchronous(), **job)
    for before, after in orders:
        storage = MemoryStorage()
        with pytest.raises(Interrupted):
            simulate(model, data, storage=storage, script=stop_at(0.12), strategy=before, **job)
        assert same(simulate(model, data, storage=storage, resume=True, strategy=after, **job), expected)


def test_checkpoints_on_the_way_hold_whole_rounds_and_the_run_goes_on_meanwhile() -> None:
    storage = MemoryStorage()
    job = {**JOB, "strategy": STRATEGIES["sharded"]}
    run = simulate(MODEL, DATA, storage=storage, checkpoint_every=3, **job)
    made = [event for event in run.events if event["event"] == "checkpoint"]
    assert len(made) >= 3
    assert not [event for event in run.events if event["event"] == "checkpoint_failed"]
    assert same(run, simulate(MODEL, DATA, **job))
    found = newest(storage, unexpected)
    assert found is not None and set(found[1].files) == {
        "model.safetensors", "optimizer-exp_avg.safetensors", "optimizer-exp_avg_sq.safetensors",
    }  # fmt: skip


KILLED = {**JOB, "epochs": 2}
WORKERS: list[Any] = []


@dataclass(frozen=True, slots=True)
class Watched(AllReduce):
    """Keeps its workers, to be looked at after their death, which ends the run: nobody stands in."""

    stands_in = False

    async def train(self, worker: Any) -> None:
        WORKERS.append(worker)
        await AllReduce.train(self, worker)


def rounds_of(strategy: AllReduce, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, bytes], float]:
    """The parameters after each round of an undisturbed run, and how long it takes."""
    table: dict[int, bytes] = {0: np.zeros(700).tobytes()}
    begin = GroupPeers.update

    async def noted(self: Any, gradient: Any) -> None:
        await begin(self, gradient)
        table[self._replica.version] = self._replica.parameters.tensor.numpy().tobytes()

    with monkeypatch.context() as patched:
        patched.setattr(GroupPeers, "update", noted)
        run = simulate(MODEL, DATA, strategy=strategy, **KILLED)
    return table, run.info["virtual_s"]


@pytest.mark.parametrize(("algorithm", "trials"), [("ring", 6), ("naive", 4)])
def test_a_worker_killed_anywhere_leaves_the_others_with_whole_rounds(
    algorithm: str, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends within the deadline with its name, and no worker has applied a part of a sum."""
    strategy = Watched(bucket_mib=SMALL, algorithm=algorithm)
    table, takes_s = rounds_of(strategy, monkeypatch)
    rng = random.Random(0)
    ended, seen = 0, set()
    for trial in range(trials):
        WORKERS.clear()
        victim, at_s = f"worker-{trial % 3}", rng.uniform(0.02, takes_s)
        storage, events = MemoryStorage(), list[Any]()
        try:
            simulate(
                MODEL, DATA, strategy=strategy, storage=storage, checkpoint_every=2, on_event=events.append,
                script=kill_at(victim, at_s), **KILLED,
            )  # fmt: skip
        except PeerLostError:
            ended += 1
            failed = next(event for event in events if event["event"] == "failed")
            assert (failed["error"], failed["culprit"]) == ("PeerLostError", victim), at_s
            assert failed["time_s"] <= at_s + QUICK.lease_s + 1.0
        for worker in WORKERS:
            if worker.rank != trial % 3 and worker.version >= 0:
                # An update that is being made when the run ends is made whole, and not counted any more.
                found, version = worker.parameters.tensor.numpy().tobytes(), worker.version
                assert found in (table[version], table.get(version + 1)), (trial, at_s)
                seen.add(worker.version)
        newest(storage, unexpected)  # every checkpoint is whole
    assert ended >= 2 * trials // 3
    assert len(seen) > trials // 3


def test_the_checker_notices_an_update_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: each bucket is applied as soon as its sum is there."""
    strategy = Watched(bucket_mib=SMALL, algorithm="ring", overlap=False)
    table, takes_s = rounds_of(strategy, monkeypatch)
    sum_up = GroupPeers.allreduce

    async def hasty(self: Any, gradient: Any, bucket: Any, weight: float) -> None:
        await sum_up(self, gradient, bucket, weight)
        if bucket[1] < len(gradient.vector):
            await self._apply()
            self._round.sums.clear()

    monkeypatch.setattr(GroupPeers, "allreduce", hasty)
    rng, torn = random.Random(0), 0
    for _ in range(10):
        WORKERS.clear()
        try:
            kill = kill_at("worker-1", rng.uniform(0.02, takes_s))
            simulate(MODEL, DATA, strategy=strategy, script=kill, **KILLED)
        except PeerLostError:
            pass
        torn += any(
            worker.parameters.tensor.numpy().tobytes() != table[worker.version]
            for worker in WORKERS
            if worker.rank != 1
        )
    assert torn


def test_who_waits_for_a_long_evaluation_does_not_take_it_for_a_death() -> None:
    """The worker of the lowest rank looks at held-out samples for 60 times the silence that is allowed."""
    held = gs.from_arrays(DATA.inputs, DATA.targets, test_inputs=DATA.inputs, test_targets=DATA.targets)
    costs = {**WORLD.costs, "evaluate": Cost(base_s=60 * QUICK.silence_s)}
    job = {
        **JOB,
        "config": SimulationConfig(costs=costs, network=WORLD.network),
        "strategy": STRATEGIES["whole"],
    }
    run = simulate(MODEL, held, evaluate_every=10, **job)
    assert len([event for event in run.events if event["event"] == "evaluated"]) == 2
    assert run.info["virtual_s"] > 2 * 60 * QUICK.silence_s
