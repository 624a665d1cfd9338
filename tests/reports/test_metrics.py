"""Reports of figures that told of one process what was taken for all, or did not tell whose fault a slow step was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig
from gradstream.testing.runs import Sized, least_squares, numbered

WORLD = SimulationConfig(costs={"gradient": Cost(per_sample_s=0.01)})


def still(**options: Any) -> gs.Run:
    """A run whose parameters stay at 0, so that the loss of a sample is always the same."""
    model, data = least_squares(50, 4, whole=False, reduction="mean")
    given: dict[str, Any] = {"workers": 3, "batch_size": 6, "epochs": 2, "config": WORLD, "chunk_elems": 64}
    return simulate(model, data, optimizer=gs.optim.SGD(lr=1e-30), **{**given, **options})


@pytest.mark.parametrize("strategy", ["synchronous", "allreduce", "downpour"])
def test_the_loss_of_a_run_is_a_mean_over_the_samples_of_all_workers(strategy: str) -> None:
    """huggingface/transformers#13681: the loss that was shown was that of the first process."""
    _, data = least_squares(50, 4, whole=False, reduction="mean")
    run = still(strategy=strategy)
    assert run.summary["loss"] == pytest.approx(float(np.mean(np.asarray(data.targets) ** 2)) / 2)


def test_a_short_minibatch_counts_as_many_samples_as_it_has() -> None:
    """Lightning-AI/pytorch-lightning#2924: means of minibatches were averaged, the short last one like the others."""
    run = still(workers=1)
    rows = [row for row in run.history if row["epoch"] == 1]
    assert sorted({row["samples"] for row in rows}) == [2, 6]
    means = sum(row["samples"] * row["loss"] for row in rows) / 50
    assert run.summary["loss"] == pytest.approx(means)
    assert run.summary["loss"] != pytest.approx(np.mean([row["loss"] for row in rows]))


def run_of_four(**options: Any) -> gs.Run:
    config = SimulationConfig(costs={"gradient": Cost(base_s=1.0)}, shape_only=True, **options)
    given: dict[str, Any] = {"workers": 4, "batch_size": 1, "steps": 5, "chunk_elems": 64}
    return simulate(Sized([64] * 4), numbered(64), config=config, strategy="allreduce", **given)


def test_who_is_slow_is_told_by_name() -> None:
    """pytorch/pytorch#71303: with many processes nobody can look at each of their traces to find the slow one."""
    found = run_of_four(speeds={"worker-2": 0.5}).summary["straggler"]
    assert (found["who"], found["slower"]) == ("worker-2", pytest.approx(2.0))
    assert found["waited_s"] == pytest.approx(5.0, rel=0.01)


def test_waiting_within_backward_is_not_taken_for_computing() -> None:
    """traceopt-ai/traceml#252: the sum within `backward` made it take as long everywhere, so nobody was found slow."""
    run = run_of_four(speeds={"worker-1": 0.25})
    by_rank = {rank: [row["time_s"] for row in run.history if row["rank"] == rank] for rank in range(4)}
    assert np.allclose(
        np.diff(by_rank[0]), np.diff(by_rank[1]), rtol=0.01
    )  # what a clock around the step sees
    steps = [event for event in run.events if event["event"] == "step"]
    computed = {rank: sum(one["compute_s"] for one in steps if one["rank"] == rank) for rank in range(4)}
    assert computed == {
        0: pytest.approx(5.0),
        1: pytest.approx(20.0),
        2: pytest.approx(5.0),
        3: pytest.approx(5.0),
    }
    assert run.summary["straggler"]["who"] == "worker-1"


def test_a_slow_network_is_no_slow_worker() -> None:
    """intelligent-machine-learning/dlrover#678: whether a slow node computes or sends slowly was not told."""
    slow = Link(latency_s=1.0)
    links = {
        pair: slow
        for other in (0, 1, 3)
        for pair in ((f"worker-{other}", "worker-2"), ("worker-2", f"worker-{other}"))
    }
    run = run_of_four(network=Network(links=links))
    assert run.summary["straggler"] is None
    assert run.summary["train_s"] > 10.0
