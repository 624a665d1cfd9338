"""The gradient noise scale of runs on virtual time: that of a twin in NumPy, which has the same minibatches."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.cli.report import figures
from gradstream.errors import ConfigError
from gradstream.report import curves
from gradstream.report.charts import value_text
from gradstream.report.sections import learning
from gradstream.report.summary import DECAY, SQUARES, rounds_of
from gradstream.run.result import Run
from gradstream.server.shard.updates import Updates
from gradstream.telemetry import meters
from gradstream.telemetry.meters import NoiseMeter
from gradstream.testing.runs import QUICK, kill_at
from gradstream.worker.group.peers import GroupPeers
from split_jobs import run as small_run

FEATURES, SAMPLES, EVERY = 200, 128, 4
"""Four chunks of 64 elements; every fourth round is measured."""

SHARDED = gs.AllReduce(sharded=True, bucket_mib=5e-4)
WHOLE = gs.AllReduce(sharded=False, bucket_mib=5e-4)

Call = tuple[bytes, Any, Any]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter run has as many measured rounds."""
    monkeypatch.setattr(meters, "EVERY", EVERY)


class Twin:
    """Least squares that keeps what each gradient was computed on."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.x = rng.standard_normal((SAMPLES, FEATURES)) / FEATURES**0.5
        self.y = self.x @ rng.standard_normal(FEATURES) + rng.standard_normal(SAMPLES) / 10
        self.calls: list[Call] = []

    def run(self, *, mean: bool = True, **options: Any) -> Run:
        """Trains, and keeps the minibatches."""

        def gradients(p: Any, x: Any, y: Any) -> Any:
            self.calls.append((p["w"].tobytes(), x.copy(), y.copy()))
            return {"w": gradient(p["w"], x, y) * (1 if mean else len(x))}

        model = gs.from_functions(
            init=lambda seed: {"w": np.zeros(FEATURES)},
            outputs=lambda p, x: x @ p["w"],
            gradients=gradients,
            reduction="mean" if mean else "sum",
            dtype="float64",
        )
        given: dict[str, Any] = {
            "optimizer": gs.optim.SGD(lr=0.3, weight_decay=1e-3),
            "workers": 3,
            "batch_size": 8,
            "steps": 14,
            "chunk_elems": 64,
            "deadlines": QUICK,
            "noise_scale": True,
        }
        return gs.simulate(model, gs.from_arrays(self.x, self.y), **{**given, **options})

    def value(self) -> float:
        """tr Σ / |G|² of the minibatches that were kept."""
        rounds: dict[bytes, list[Call]] = {}
        for call in self.calls:
            rounds.setdefault(call[0], []).append(call)
        trace = square = 0.0
        for number, calls in enumerate(list(rounds.values())[::EVERY]):
            sizes = np.array([len(x) for _, x, _ in calls])
            means = np.array([gradient(np.frombuffer(w), x, y) for w, x, y in calls])
            small, big = (means**2).sum(1).mean(), (np.average(means, axis=0, weights=sizes) ** 2).sum()
            new = (small - big) / ((1 / sizes).mean() - 1 / sizes.sum())
            share = max(1 / (number + 1), 1 - DECAY)
            trace, square = (
                trace + share * (new - trace),
                square + share * (big - new * (1 / sizes.sum() - 1 / SAMPLES) - square),
            )
        return float(trace / square)


def gradient(w: Any, x: Any, y: Any) -> Any:
    return 2 / len(x) * x.T @ (x @ w - y)


def check(**options: Any) -> Run:
    """Compares a run with its twin."""
    twin = Twin()
    run = twin.run(**options)
    assert run.summary["noise_scale"] == pytest.approx(twin.value(), rel=1e-9)
    return run


CASES: dict[str, dict[str, Any]] = {
    "one shard": {"strategy": "synchronous"},
    "three shards": {"strategy": "synchronous", "servers": 3},
    "uneven": {"strategy": "synchronous", "servers": 2, "batch_size": [2, 5, 11]},
    "a worker without samples": {"strategy": "synchronous", "servers": 2, "batch_size": [6, 0, 9]},
    "sums": {"strategy": "synchronous", "servers": 2, "mean": False, "batch_size": [2, 5, 11]},
    "norms of tensors": {
        "strategy": "synchronous",
        "servers": 3,
        "optimizer": gs.optim.LARS(lr=0.3, momentum=0.0),
    },
    "allreduce": {"strategy": "allreduce"},
    "in slices": {"strategy": SHARDED, "batch_size": [2, 5, 11]},
    "whole": {"strategy": WHOLE, "batch_size": [2, 5, 11]},
    "sums of a group": {"strategy": WHOLE, "mean": False, "batch_size": [6, 0, 9]},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_it_is_that_of_a_numpy_twin(options: dict[str, Any]) -> None:
    run = check(**options)
    rounds = {event["round"] for event in run.events if event["event"] == "noise"}
    assert rounds == {1, 5, 9, 13}
    points = curves.noise_scale(run.events)
    assert points[-1].value == run.summary["noise_scale"]
    assert points[-1].samples == sum(row["samples"] for row in run.history if row["step"] < 13)


def test_it_is_in_the_report_and_in_the_figures_of_the_command_line() -> None:
    run = Twin().run(strategy="allreduce")
    value = run.summary["noise_scale"]
    assert f"gradient noise scale over samples, in samples; {value_text(value)} at the end" in learning(
        run.events
    )
    assert ("noise scale", f"{value:,.4g} samples") in figures(run.summary)
    alone = Twin().run(strategy="allreduce", workers=1)
    assert "gradient noise scale" not in learning(alone.events)
    assert dict(figures(alone.summary))["noise scale"].startswith("none: one worker")


def add(self: NoiseMeter, step: int, samples: Any, here: Any, joined: float) -> None:
    """`NoiseMeter.add`, with a first contribution in the place of all."""
    ADD(self, step, samples, [*here[:1]] * len(here) if len(here) > 1 else here, joined)


ADD = NoiseMeter.add


@pytest.mark.parametrize(
    ("where", "name", "fault", "case"),
    [
        pytest.param(
            Updates, "_square", lambda self, due, total: 9 * float(total @ total), "one shard", id="sum"
        ),
        pytest.param(GroupPeers, "_joined_square", lambda self: 1.0, "allreduce", id="no-sum"),
        pytest.param(NoiseMeter, "add", add, "three shards", id="one-worker"),
    ],
)
def test_other_squares_would_be_noticed(
    where: Any, name: str, fault: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises(AssertionError):
        check(**CASES[case])


def test_a_shard_that_is_left_out_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: NoiseMeter, *piece: Any) -> None:
        self.nodes = 1
        if self.rank != 1:
            ADD(self, *piece)

    monkeypatch.setattr(NoiseMeter, "add", alone)
    with pytest.raises(AssertionError):
        check(strategy="synchronous", servers=2)


def squares_of(run: Run, key: str) -> dict[int, float]:
    """Squares of the measured rounds, over all nodes."""
    return {one["round"]: one[key] for one in rounds_of(run.events)}


SLICES = gs.pipeline.Hybrid("slices")
SMALL: dict[str, Any] = {"strategy": "synchronous", "servers": 1, "epochs": 2, "noise_scale": True}


@cache
def whole_run() -> Run:
    """The run of replicas that are not split."""
    return small_run(**SMALL)


@pytest.mark.parametrize(
    "options",
    [
        {"split": 2, "servers": 2},
        {"split": 3, "pipeline": "1f1b", "micro_batches": 2},
        {"split": 2, "pipeline": SLICES},
        {"split": 2, "strategy": "allreduce", "servers": None},
        {"split": 2, "strategy": "allreduce", "servers": None, "pipeline": SLICES},
    ],
    ids=["parts", "micro-batches", "slices", "parts-allreduce", "slices-allreduce"],
)
def test_parts_of_a_split_model_add_up(options: dict[str, Any]) -> None:
    whole, parts = whole_run(), small_run(**{**SMALL, **options})
    for key in SQUARES:
        found = squares_of(parts, key)
        assert found == pytest.approx(squares_of(whole, key), rel=1e-9)
        assert list(found) == [1, 5]


def test_it_changes_no_bit_and_off_it_measures_nothing() -> None:
    for strategy in ("synchronous", WHOLE, SHARDED):
        on, off = (Twin().run(strategy=strategy, noise_scale=one) for one in (True, False))
        assert (on.parameters["w"] == off.parameters["w"]).all()
        assert not [event for event in off.events if event["event"] == "noise"]
        assert off.summary["noise_scale"] is None and not off.summary["noise_scale_missing"]


@pytest.mark.parametrize("strategy", ["synchronous", "allreduce"])
def test_one_worker_has_no_value_and_hears_why(strategy: str) -> None:
    summary = Twin().run(strategy=strategy, workers=1).summary
    assert summary["noise_scale"] is None
    assert "take workers=2" in summary["noise_scale_missing"]


@pytest.mark.parametrize("strategy", ["synchronous", WHOLE], ids=["synchronous", "allreduce"])
def test_a_death_changes_the_joined_squares_of_no_other_round(strategy: Any) -> None:
    run = Twin().run(strategy=strategy, script=kill_at("worker-1", 0.02))
    whole = Twin().run(strategy=strategy)
    assert run.summary["workers_lost"] == ["worker-1"]
    joined, expected = (squares_of(one, "joined_square") for one in (run, whole))
    assert {**expected, **joined} == pytest.approx(expected, rel=1e-9)
    assert len(joined) >= 3 and 13 in joined


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "downpour"}, "computed on different parameters"),
        ({"strategy": "ssp"}, "take strategy='synchronous' or 'allreduce'"),
        ({"strategy": "diloco"}, "take strategy='synchronous' or 'allreduce'"),
        (
            {"strategy": "hogwild", "optimizer": gs.optim.SGD(lr=0.1)},
            "take strategy='synchronous' or 'allreduce'",
        ),
        ({"strategy": gs.Synchronous(backup=1)}, "leave backup"),
        ({"strategy": gs.Synchronous(aggregate="median")}, "leave backup, aggregate"),
        ({"strategy": gs.Synchronous(worker_momentum=0.9)}, "worker_momentum out"),
        ({"strategy": gs.Synchronous(sparse=True)}, "leave sparse out"),
        ({"clip_norm": 1.0}, "leave clip_norm out"),
        ({"strategy": "allreduce", "clip_value": 1.0}, "leave clip_value out"),
        ({"pipeline": "2bw", "split": 2}, "take pipeline='1f1b'"),
    ],
    ids=str,
)
def test_where_it_would_be_wrong_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Twin().run(**{"strategy": "synchronous", **options})
