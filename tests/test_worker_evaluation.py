"""Evaluation on the way: at which steps, of which parameters, by whom, and with what metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.errors import ConfigError, UserCodeError
from gradstream.overrides import overrides, with_overrides
from gradstream.runtime.world import Cost, World
from gradstream.simulate import simulate
from gradstream.testing.runs import QUICK, kill_at, least_squares
from gradstream.worker.evaluation import evaluate

FEATURES = 6
TIMED = World(costs={"gradient": Cost(base_s=0.01), "evaluate": Cost(base_s=0.03)})


def problem() -> tuple[Any, Any]:
    model, data = least_squares(60, FEATURES, whole=False)
    return model, gs.from_arrays(data.inputs[:40], data.targets[:40], data.inputs[40:], data.targets[40:])


def run_with(strategy: Any = "synchronous", **options: Any) -> gs.Run:
    model, data = problem()
    options = {"workers": 2, "batch_size": 5, "epochs": 3, "optimizer": gs.SGD(lr=0.05), **options}
    return simulate(model, data, strategy=strategy, deadlines=QUICK, world=TIMED, **options)


def largest(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((outputs - targets).abs().max())


def test_synchronous_evaluates_exact_versions() -> None:
    """An evaluation after step n is that of a run of n steps."""
    run = run_with(evaluate_every=5, metrics={"largest": largest})
    assert [row["step"] for row in run.evaluations] == [5, 10, 12]  # the last: of the final parameters
    assert [row["final"] for row in run.evaluations] == [False, False, True]
    assert [row["samples"] for row in run.evaluations] == [50, 100, 120]
    for row in run.evaluations:
        short = run_with(epochs=None, steps=row["step"], metrics={"largest": largest})
        expected = short.evaluate()
        assert row["loss"] == expected.loss
        assert row["metrics"] == expected.metrics
        assert row["accuracy"] is None
        assert row["held_out"] == 20


@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
def test_looking_changes_no_bit(strategy: str) -> None:
    """Others wait for the one that looks, or go on; the samples that each goes through stay the same."""
    looked, plain = run_with(strategy, workers=1, evaluate_every=1), run_with(strategy, workers=1)
    assert np.array_equal(looked.parameters["w"], plain.parameters["w"])
    assert len(looked.evaluations) == 24
    assert plain.evaluations == []


def test_once_an_epoch() -> None:
    run = run_with("downpour", evaluate_every="epoch")
    assert [(row["step"], row["epoch"]) for row in run.evaluations] == [(4, 0), (8, 1), (12, 2)]
    assert run.evaluations[-1]["loss"] == run.evaluate().loss


def test_accumulated_steps_count_once() -> None:
    run = run_with(evaluate_every=2, accumulate=2)
    assert [row["step"] for row in run.evaluations] == [2, 4, 6]


def test_the_next_worker_looks_when_the_first_is_dead() -> None:
    events: list[Any] = []
    script = kill_at("worker-0", 0.7)
    run_with("downpour", epochs=12, evaluate_every=2, script=script, on_event=events.append)
    looked = [(event["node"], event["step"]) for event in events if event["event"] == "evaluated"]
    assert {node for node, _ in looked} == {"worker-0", "worker-1"}
    after = [node for node, _ in looked][[node for node, _ in looked].index("worker-1") :]
    assert set(after) == {"worker-1"}
    assert looked[-1] == ("worker-1", 48)


def test_classes_trees_and_nothing_to_compare() -> None:
    model = gs.from_torch(lambda: torch.nn.Linear(3, 4), torch.nn.functional.cross_entropy)
    flat = torch.zeros(model.layout.elems)
    model.init(0, flat)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((300, 3)).astype("float32"), rng.integers(0, 4, 300)
    data = gs.from_arrays(x[:10], y[:10], x, y)

    def top2(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return (outputs.topk(2).indices == targets[:, None]).any(1).float().mean().item()

    found = evaluate(model, flat, data, {"top2": top2})
    scores = model.outputs(flat, x)
    assert found.accuracy == int((scores.argmax(1) == torch.from_numpy(y)).sum()) / 300
    assert found.metrics["top2"] == pytest.approx(top2(scores, torch.from_numpy(y)))
    assert found.metrics["top2"] > found.accuracy
    assert found.loss is None
    assert found.num_samples == 300


class Trees:
    """Targets that are trees: only metrics can tell."""

    name, num_samples, num_test_samples = "trees", 4, 4

    def batch(self, ids: Any) -> Any:
        return gs.from_arrays(np.zeros((4, 3), "float32"), np.zeros(4)).batch(ids)

    def test_batch(self, ids: Any) -> Any:
        import dataclasses

        return dataclasses.replace(self.batch(ids), targets={"a": np.ones(len(ids)), "b": [1] * len(ids)})


def test_of_trees_only_metrics_tell() -> None:
    model = gs.from_torch(lambda: torch.nn.Linear(3, 4), torch.nn.functional.cross_entropy)
    flat = torch.zeros(model.layout.elems)
    found = evaluate(model, flat, Trees(), {"mine": lambda outputs, targets: targets["a"].mean()})
    assert (found.accuracy, found.loss, found.metrics) == (None, None, {"mine": 1.0})


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda outputs, targets: 1 / 0, "metric 'mine' raised ZeroDivisionError"),
        (lambda outputs, targets: float("nan"), "metric 'mine' gave nan"),
        (lambda outputs, targets: "much", "metric 'mine' raised ValueError"),
    ],
)
def test_what_a_metric_raises_ends_the_run_and_says_whose_it_was(metric: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        run_with(evaluate_every=3, metrics={"mine": metric})


def test_phantom_runs_look_at_nothing_but_take_the_time() -> None:
    model, data = problem()
    times = []
    for every in (None, 2):
        world = World(costs=TIMED.costs, phantom=True)
        run = simulate(model, data, workers=2, batch_size=5, epochs=3, evaluate_every=every, world=world)
        times.append(run.history[-1]["time_s"])
    assert times[1] == pytest.approx(times[0] + 5 * 0.03, abs=1e-4)


BAD: list[tuple[Any, str]] = [
    ({"evaluate_every": 0}, "evaluate_every=0: expected at least 1"),
    ({"evaluate_every": "week"}, "expected a whole number, or 'epoch'"),
    ({"metrics": {"a": "nowhere.py:f"}}, "no such file"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_with(**options)
    with pytest.raises(ConfigError, match="holds no samples out"):
        simulate(*least_squares(8, 3), workers=1, epochs=1, evaluate_every=1)


def test_metrics_travel_by_place(tmp_path: Path) -> None:
    model, data = problem()
    job = gs.Job(model, data, epochs=1, metrics={"largest": largest, "local": lambda outputs, targets: 0.0})
    fields = overrides(job)
    assert fields["metrics"] == {"largest": f"{largest.__module__}:largest", "local": ""}
    again = with_overrides(job, fields)
    assert again.metrics["local"] is job.metrics["local"]
    with pytest.raises(ConfigError, match=r"metrics\['local'\] is not in the job file"):
        with_overrides(gs.Job(model, data, epochs=1), fields)
