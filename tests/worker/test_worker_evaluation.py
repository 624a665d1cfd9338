"""Evaluation on the way: at which steps, of which parameters, by whom, and with what metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.cli.report import evaluation_rows
from gradstream.errors import ConfigError, UserCodeError
from gradstream.job.metrics import Metrics
from gradstream.job.overrides import overrides, with_overrides
from gradstream.model.base import Batch
from gradstream.report.progress_line import ProgressLine
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.testing.runs import QUICK, kill_at, least_squares
from gradstream.worker.evaluation import evaluate

FEATURES = 6
TIMED = SimulationConfig(costs={"gradient": Cost(base_s=0.01), "evaluate": Cost(base_s=0.03)})


def problem() -> tuple[Any, Any]:
    model, data = least_squares(60, FEATURES, whole=False)
    return model, gs.from_arrays(data.inputs[:40], data.targets[:40], data.inputs[40:], data.targets[40:])


def run_with(strategy: Any = "synchronous", **options: Any) -> gs.Run:
    model, data = problem()
    options = {"workers": 2, "batch_size": 5, "epochs": 3, "optimizer": gs.optim.SGD(lr=0.05), **options}
    return simulate(model, data, strategy=strategy, deadlines=QUICK, config=TIMED, **options)


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
    first, second, last = [(row["step"], row["epoch"]) for row in run.evaluations]
    # Behind the last minibatch of the epoch that this worker has, or the first one of the next epoch.
    assert first in ((4, 0), (5, 1)) and second in ((8, 1), (9, 2)) and last == (12, 2)
    assert run.evaluations[-1]["loss"] == run.evaluate().loss


def test_accumulated_steps_count_once() -> None:
    run = run_with(evaluate_every=2, accumulate=2)
    assert [row["step"] for row in run.evaluations] == [2, 4, 6]


def test_the_next_worker_looks_when_the_first_is_dead() -> None:
    events: list[Any] = []
    script = kill_at("worker-0", 0.4)
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
    assert found.loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(scores, torch.from_numpy(y))), rel=1e-6
    )
    assert found.own_loss
    assert found.num_samples == 300


def wrong(targets: Any, inputs: Any = None, outputs: Any = lambda p, x: x @ p["w"]) -> str:
    """How an evaluation refuses a linear model of three classes."""
    x = np.ones((8, 2), "float32") if inputs is None else inputs
    model = gs.from_functions(lambda seed: {"w": np.ones((2, 3))}, outputs, lambda p, x, y: p)
    flat = torch.ones(6, dtype=torch.float64)
    with pytest.raises(UserCodeError) as told:
        evaluate(model, flat, gs.from_arrays(x, targets, x, targets))
    return str(told.value)


def test_what_cannot_be_compared_is_refused() -> None:
    labels = np.arange(8) % 3
    assert "targets.astype('int64')" in wrong(labels.astype("float32"))
    assert "outputs have shape (7, 3) and targets (8,)" in wrong(labels, None, lambda p, x: (x @ p["w"])[:-1])
    assert "classes from 1 to 3, but the model gives scores of 3: expected 0 to 2" in wrong(labels + 1)
    assert "classes from -1 to 1" in wrong(labels - 1)
    inputs = np.ones((8, 2), "float32")
    inputs[5, 1] = np.nan
    assert "NaN for held-out sample 5; held-out inputs have NaN" in wrong(labels, inputs)
    assert "look at the model" in wrong(labels, None, lambda p, x: np.nan * (x @ p["w"]))


def test_classes_that_do_not_count_are_left_out() -> None:
    model = gs.from_functions(lambda seed: {"w": np.eye(2)}, lambda p, x: x @ p["w"], lambda p, x, y: p)
    x, y = np.eye(2)[[0, 1, 0, 1]], np.array([0, 0, -100, -100])
    assert (
        evaluate(model, torch.eye(2, dtype=torch.float64).flatten(), gs.from_arrays(x, y, x, y)).accuracy
        == 0.5
    )


def test_a_loss_that_broadcasts_targets_is_refused() -> None:
    """PyTorch warns of it; the shapes have as many elements, and would look alike."""
    x = np.ones((6, 2), "float32")
    for loss, refused in ((F.mse_loss, True), (lambda o, t: F.mse_loss(o.squeeze(-1), t), False)):
        model = gs.from_torch(lambda: nn.Linear(2, 1), loss)
        data = gs.from_arrays(x, x[:, 0], x, x[:, 0])
        flat = torch.zeros(model.layout.elems)
        if refused:
            with pytest.raises(UserCodeError, match=r"every output with every target.*targets\[:, None\]"):
                evaluate(model, flat, data)
        else:
            assert evaluate(model, flat, data).loss == 1.0


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


def test_shape_only_runs_look_at_nothing_but_take_the_time() -> None:
    model, data = problem()
    times = []
    for every in (None, 2):
        config = SimulationConfig(costs=TIMED.costs, shape_only=True)
        run = simulate(model, data, workers=2, batch_size=5, epochs=3, evaluate_every=every, config=config)
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
    with pytest.raises(ConfigError, match="has no held-out samples"):
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


# ---- metrics of all samples ---------------------------------------------------------------


def f1(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Of class 1: no mean over samples."""
    found = outputs.argmax(1)
    hits = int(((found == 1) & (targets == 1)).sum())
    return 2 * hits / max(1, int((found == 1).sum()) + int((targets == 1).sum()))


class Updated:
    """F1 as torchmetrics has it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.hits = self.others = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        found = outputs.argmax(1)
        self.hits += int(((found == 1) & (targets == 1)).sum())
        self.others += int((found == 1).sum()) + int((targets == 1).sum())

    def compute(self) -> torch.Tensor:
        return torch.tensor(2 * self.hits / max(1, self.others))


def rare_classes() -> tuple[Any, torch.Tensor, Any]:
    """700 held-out samples, of which the few of class 1 are in the first of three batches."""
    model = gs.from_torch(lambda: torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
    flat = torch.zeros(model.layout.elems)
    model.init(0, flat)
    x = np.random.default_rng(0).standard_normal((700, 3)).astype("float32")
    y = ((np.arange(700) % 10 == 0) & (np.arange(700) < 200)).astype(int)
    return model, flat, gs.from_arrays(x[:10], y[:10], x, y)


def test_a_metric_gets_all_samples_at_once_or_is_updated() -> None:
    model, flat, data = rare_classes()
    before = Updated()
    before.update(torch.eye(2), torch.tensor([0, 1]))
    expected = f1(model.outputs(flat, data.test_inputs), torch.from_numpy(data.test_targets))
    for _ in range(2):  # an evaluation leaves nothing behind
        found = evaluate(model, flat, data, {"function": f1, "object": before, "class": Updated})
        assert found.metrics == pytest.approx(dict.fromkeys(("function", "object", "class"), expected))
    assert 0 < expected < 0.5
    assert before.hits == 1


def test_trees_and_lists_are_put_together() -> None:
    seen: list[Any] = []

    def keep(outputs: Any, targets: Any) -> float:
        seen.append((outputs, targets))
        return 0.0

    metrics = Metrics({"keep": keep}, 3)
    for start, count in ((0, 2), (2, 1)):
        rows = torch.arange(start, start + count)
        batch = Batch(None, None, count, np.arange(start, start + count))
        metrics.add(batch, {"a": rows, "b": (rows[:, None], None)}, [rows[i : i + 1] for i in range(count)])
    assert metrics.values() == {"keep": 0.0}
    ((outputs, targets),) = seen
    assert outputs["a"].tolist() == [0, 1, 2]
    assert outputs["b"][0].shape == (3, 1)
    assert outputs["b"][1] is None
    assert [one.item() for one in targets] == [0, 1, 2]


def test_what_cannot_be_put_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(*outputs: torch.Tensor) -> Metrics:
        metrics = Metrics({"mine": lambda outputs, targets: 0.0}, 4)
        for one in outputs:
            metrics.add(Batch(None, None, 2, np.arange(2)), one, None)
        return metrics

    for second in (torch.zeros(2, 5), torch.zeros(3, 4), torch.zeros(())):
        metrics = given(torch.zeros(2, 4), second)
        with pytest.raises(
            UserCodeError, match=r"outputs for the metric 'mine' cannot be put .*update\(outputs"
        ):
            metrics.values()
    monkeypatch.setattr("gradstream.job.metrics.MAX_KEPT_BYTES", 63)
    with pytest.raises(
        UserCodeError, match=r"for all 4 held-out samples, which take .* MB .*update\(outputs"
    ):
        given(torch.zeros(2, 4))  # already at the first batch: 64 bytes in all
    assert Metrics({"mine": Updated}, 4).values() == {"mine": 0.0}


# ---- a loss that calls the module itself ------------------------------------------------------


class OfKeywords(nn.Module):
    """As language models have it: keywords in, and the loss among what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(FEATURES, 1), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.linear(self.dropout(x)).squeeze(1)
        return {"out": out} if y is None else {"out": out, "loss": (out - y).square().mean()}


def loss_of_batch(module: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = module(**batch)["loss"]
    return loss


def loss_of_pair(module: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    loss: torch.Tensor = module(y=targets, **inputs)["loss"]
    return loss


def mean_out(outputs: Any, targets: Any) -> float:
    return float(outputs["out"].mean())


def of_keywords(kind: str, **options: Any) -> tuple[Any, Any]:
    """The model, and data in batches of a dict with the targets in it, or of the pair (dict, targets)."""
    x, y = problem()[1].inputs.astype("float32"), problem()[1].targets.astype("float32")
    loss, train, test = loss_of_batch, ({"x": x, "y": y}, None), ({"x": x[:20], "y": y[:20]}, None)
    if kind == "pair":
        loss, train, test = loss_of_pair, ({"x": x}, y), ({"x": x[:20]}, y[:20])
    return gs.from_torch(OfKeywords, loss, loss_of="batch", **options), gs.from_arrays(*train, *test)


@pytest.mark.parametrize("kind", ["dict", "pair"])
def test_a_loss_that_calls_the_module_is_told_of_held_out_samples(kind: str) -> None:
    model, data = of_keywords(kind)
    progress = ProgressLine()
    run = simulate(
        model, data, workers=2, batch_size=5, steps=4, optimizer=gs.optim.SGD(0.05), evaluate_every=2,
        on_event=progress.update,
    )  # fmt: skip
    module = OfKeywords().eval()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in run.parameters.items()})
    x, y = problem()[1].inputs[:20].astype("float32"), problem()[1].targets[:20].astype("float32")
    with torch.no_grad():
        expected = float(module(torch.from_numpy(x), torch.from_numpy(y))["loss"])
    found = run.evaluate(batch_size=7)  # batches that are not alike: the mean is over samples
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert (found.accuracy, found.num_samples) == (None, 20)
    assert [row["step"] for row in run.evaluations] == [2, 4]
    assert run.summary["held_out_loss"] == run.evaluations[-1]["loss"] == pytest.approx(expected, rel=1e-5)
    assert f"held out   {expected:,.4g}" in repr(run)
    assert f"held out: loss {expected:.4g}" in progress.line()
    assert ("test loss", f"{expected:.4g} (the model's own, 20 samples)") in evaluation_rows(found)


def test_metrics_that_need_outputs_which_there_are_not_are_refused_before_training() -> None:
    model, data = of_keywords("dict")
    events: list[Any] = []
    job: dict[str, Any] = {"workers": 2, "batch_size": 5, "steps": 4, "evaluate_every": 4}
    with pytest.raises(UserCodeError, match="as metrics need it"):
        simulate(model, data, metrics={"mean": mean_out}, on_event=events.append, **job)
    assert not [event for event in events if event["event"] == "step"]
    spread, data = of_keywords("dict", spread=True)
    run = simulate(spread, data, metrics={"mean": mean_out}, **job)
    assert set(run.evaluations[-1]["metrics"]) == {"mean"}
    assert run.evaluations[-1]["loss"] is not None


def test_a_held_out_loss_that_is_no_number_is_named() -> None:
    model, data = of_keywords("dict")
    with pytest.raises(UserCodeError, match="the loss gave nan"):
        evaluate(model, torch.full((model.layout.elems,), torch.nan), data)
