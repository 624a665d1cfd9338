"""Why a run is slow: simulated runs that were made slow, each for one reason, and it is the one named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.report.figures import NodeFigures, RunFigures, ShardFigures, figures_of
from gradstream.report.reason import Reason, reason_of
from gradstream.report.worker_figures import WorkerFigures
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, Exponential, Network, SimulationConfig
from gradstream.strategies import Strategy
from gradstream.testing.runs import Sized, least_squares, numbered

CHUNK = 4096


def run_in(config: SimulationConfig, strategy: Strategy, *, steps: int = 8, **options: Any) -> Run:
    given: dict[str, Any] = {"workers": 4, "batch_size": 1, "chunk_elems": CHUNK, "steps": steps, "seed": 1}
    model = Sized([CHUNK] * 8)
    return simulate(model, numbered(64), config=config, strategy=strategy, **(given | options))


def reason_in(config: SimulationConfig, strategy: Strategy, **options: Any) -> Reason:
    return reason_of(figures_of(run_in(config, strategy, **options).events))


def world_of(gradient_s: float, **options: Any) -> SimulationConfig:
    costs = {"gradient": Cost(base_s=gradient_s), **options.pop("costs", {})}
    return SimulationConfig(costs=costs, shape_only=True, **options)


@pytest.mark.parametrize("slow", ["worker-0", "worker-2"])
def test_a_worker_that_computes_slowly_is_named(slow: str) -> None:
    reason = reason_in(world_of(1.0, speeds={slow: 1 / 3}), gs.Synchronous())
    assert (reason.kind, reason.culprit) == ("slow worker", slow)
    assert f"{slow} computes 3.0 times slower than the median" in reason.text
    assert "the others waited 67% of their time for it" in reason.text


def test_nobody_waits_for_it_in_downpour_but_it_is_named() -> None:
    """Where its first minibatch takes longer than all others together, they wait at the end."""
    for speed, what in (0.25, "nobody waits for it, and"), (0.02, "the others had nothing left to do"):
        reason = reason_in(world_of(1.0, speeds={"worker-1": speed}), gs.Downpour())
        assert (reason.kind, reason.culprit) == ("slow worker", "worker-1")
        assert f"{1 / speed:.1f} times slower" in reason.text
        assert what in reason.text


def test_a_worker_with_a_slow_network_is_late_and_not_slow() -> None:
    network = Network(cards={"worker-3": 1e5})
    reason = reason_in(world_of(0.05, network=network), gs.Synchronous())
    assert (reason.kind, reason.culprit) == ("late worker", "worker-3")
    assert "computes as fast as the others" in reason.text
    assert "of its own time for the exchange" in reason.remedy


def test_workers_that_are_slow_by_turns_are_not_named() -> None:
    config = SimulationConfig(costs={"gradient": Cost(base_s=1.0, jitter=Exponential())}, shape_only=True)
    reason = reason_in(config, gs.Synchronous(), steps=100)
    assert (reason.kind, reason.culprit) == ("varying steps", "")


def test_a_shard_that_updates_all_the_time_is_named() -> None:
    reason = reason_in(world_of(0.01, costs={"apply": Cost(per_elem_s=1e-6)}), gs.Downpour())
    assert (reason.kind, reason.culprit) == ("server", "shard-0")
    assert "servers=2" in reason.remedy


def test_a_slow_network_is_named() -> None:
    reason = reason_in(world_of(0.01, network=Network(bandwidth_bytes_s=1e6)), gs.Downpour())
    assert reason.kind == "network"
    # 131,072 bytes: 32 times up and down, 6 times for the initial and the final parameters, over 32 steps.
    assert "0.287 MB a step" in reason.text


def test_the_last_worker_on_a_full_network_card_is_not_named() -> None:
    """All workers push to a shard at once: one of them comes last, in every round the same."""
    network = Network(bandwidth_bytes_s=2e6)
    for workers, servers in ((8, 3), (4, 1), (2, 1)):
        options: dict[str, Any] = {"workers": workers, "servers": servers}
        reason = reason_in(world_of(0.01, network=network), gs.Synchronous(), **options)
        assert (reason.kind, reason.culprit) == ("network", "")


def test_computing_is_the_reason_if_no_other_is_left() -> None:
    reason = reason_in(world_of(1.0), gs.Downpour())
    assert reason.kind == "compute"
    assert "100%" in reason.text


def test_sums_of_ones_own_are_computing() -> None:
    reason = reason_in(world_of(1.0, costs={"copy": Cost(base_s=0.5)}), gs.Downpour(push_every=4))
    assert reason.kind == "compute"


def test_a_worker_that_evaluates_most_of_the_time_is_not_slow() -> None:
    model, data = least_squares(40, 8)
    data = gs.from_arrays(data.inputs, data.targets, data.inputs, data.targets)
    config = SimulationConfig(costs={"gradient": Cost(base_s=1.0), "evaluate": Cost(base_s=2.0)})
    for strategy in ("synchronous", "downpour"):
        run = simulate(
            model, data, config=config, strategy=strategy, workers=2, batch_size=2, steps=8, evaluate_every=2
        )
        reason = reason_of(figures_of(run.events))
        assert (reason.kind, reason.culprit) == ("evaluation", "worker-0")
        # 3 on the way and one at the end, after which nobody waits: 8 seconds, beside 8 of 1 second each.
        # Under Downpour the other worker takes minibatches meanwhile.
        assert strategy == "downpour" or "50% of the time" in reason.text


def test_without_steps_there_is_nothing_to_say() -> None:
    assert reason_of(figures_of([])).kind == "nothing"


def test_a_run_cut_short_before_its_first_reports_has_a_reason() -> None:
    network = Network(bandwidth_bytes_s=2e6)
    run = run_in(world_of(0.01, network=network), gs.Synchronous())
    for kinds in ({"step"}, {"step", "joined"}):
        reason = reason_of(figures_of([event for event in run.events if event["event"] in kinds]))
        assert reason.kind == "network"


def test_a_full_machine_is_named_before_its_nodes() -> None:
    worker = WorkerFigures("worker-0", 10, 100, 4.0, 6.0, {"shard-0": 6.0}, None, None)
    nodes = tuple(
        NodeFigures(n, n, "127.0.0.1", ("tcp",), 0, 10, False, 9.5, (), (), 0)
        for n in ("worker-0", "shard-0")
    )
    shard = ShardFigures("shard-0", 10, 9.0, 9.5)
    full = RunFigures({}, "finished", 0.0, 10.0, (worker,), (shard,), (), nodes)
    assert reason_of(full, cores=2).kind == "machine"
    assert reason_of(full, cores=16).kind == "server"
    assert reason_of(full).kind == "server"
    mostly_moving = dataclasses.replace(full, shards=(dataclasses.replace(shard, apply_s=1.0),))
    assert reason_of(mostly_moving).kind == "server"  # its process fills a core
    assert reason_of(mostly_moving, processes=False).kind == "network"  # whose CPU seconds are everybody's
