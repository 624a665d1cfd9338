"""`until`: what ends a run early, how all of its nodes end with it, and what is accounted for then."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream._version import __version__
from gradstream.coordinator.lead import Emit
from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.coordinator.membership import Membership
from gradstream.coordinator.registry import CoordinatorPlan
from gradstream.coordinator.stopping import FEWEST, StoppingCriterion, Until
from gradstream.data.ledger import Ledger
from gradstream.data.plan import RoundPlan
from gradstream.errors import ConfigError, UserCodeError
from gradstream.job.overrides import overrides, with_overrides
from gradstream.runtime.simulation import Cost, Exponential, Link, LogNormal, Network, SimulationConfig
from gradstream.telemetry.events import FinishedEvent, StartedEvent
from gradstream.testing.runs import QUICK, Tokens, kill_at, least_squares, numbered, token_counts
from gradstream.wire import v1
from gradstream.worker.batch_gate import BatchGate

# ---- the criterion: pure ------------------------------------------------------------------


def step(loss: float | None, samples: int = 4) -> dict[str, Any]:
    return {"event": "step", "loss": loss, "samples": samples}


def evaluated(accuracy: float | None) -> dict[str, Any]:
    return {"event": "evaluated", "accuracy": accuracy, "loss": None, "step": 30, "metrics": {}}


def test_accuracy_is_that_of_an_evaluation() -> None:
    criterion = StoppingCriterion(gs.until(accuracy=0.9))
    assert not criterion.event(step(0.0))
    assert not criterion.event(evaluated(0.89))
    assert not criterion.event(evaluated(None))
    assert criterion.event(evaluated(0.9)) == "accuracy 0.9 >= 0.9 after step 30"


def test_the_test_loss_is_that_of_an_evaluation() -> None:
    criterion = StoppingCriterion(gs.until(test_loss=2.4))
    assert not criterion.event(step(0.0))
    assert not criterion.event(evaluated(1.0))
    assert not criterion.event({**evaluated(None), "loss": 2.41})
    assert criterion.event({**evaluated(None), "loss": 2.4}) == "test loss 2.4 <= 2.4 after step 30"


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_patience_counts_evaluations_since_the_best(mode: Any, sign: int) -> None:
    criterion = StoppingCriterion(gs.until(monitor="f1", mode=mode, patience=3, reaches=sign * 0.9))

    def say(value: float) -> str:
        return criterion.event({**evaluated(0.1), "metrics": {"f1": sign * value, "other": 9.0}})

    assert [say(value) for value in (0.2, 0.5, 0.4, 0.5, 0.6, 0.1, 0.6)] == [""] * 7
    assert not criterion.event(evaluated(0.1))  # without the figure
    assert say(0.55) == f"f1 {sign * 0.55:.4g} after step 30, 3 evaluations after its best, {sign * 0.6:.4g}"
    other = StoppingCriterion(gs.until(monitor="f1", mode=mode, reaches=sign * 0.9))
    reached = other.event({**evaluated(None), "metrics": {"f1": sign * 0.9}})
    assert reached == f"f1 {sign * 0.9:.4g} {'>=' if sign > 0 else '<='} {sign * 0.9:g} after step 30"


def test_patience_watches_the_test_loss_unless_it_is_told_another_figure() -> None:
    criterion = StoppingCriterion(gs.until(patience=1))
    assert not criterion.event({**evaluated(0.5), "loss": 1.0})
    assert not criterion.event({**evaluated(0.4), "loss": 0.9})
    assert criterion.event({**evaluated(0.6), "loss": 1.1}).startswith(
        "test_loss 1.1 after step 30, 1 evaluations"
    )


def test_the_loss_is_a_moving_mean_of_enough_minibatches() -> None:
    criterion = StoppingCriterion(gs.until(loss=0.5))
    said = [bool(criterion.event(step(0.4))) for _ in range(FEWEST)]
    assert said == [False] * (FEWEST - 1) + [True]
    criterion = StoppingCriterion(gs.until(loss=0.5))
    for _ in range(60):
        assert not criterion.event(step(1.0))
    assert not criterion.event(step(0.0))  # one lucky minibatch
    assert not criterion.event(step(None))
    assert not criterion.event(step(0.0, samples=0))
    later = [bool(criterion.event(step(0.0))) for _ in range(30)]
    assert 5 < later.index(True) < 20


def test_samples_and_seconds() -> None:
    criterion = StoppingCriterion(gs.until(samples=100, seconds=2.5))
    assert [criterion.counted(count) for count in (None, 0, 99)] == ["", "", ""]
    assert criterion.counted(104) == "104 samples >= 100"
    assert criterion.timed() == "2.5 s of training"
    assert not criterion.needs_events


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "no criterion"),
    ({"accuracy": 1.5}, r"accuracy is 1.5; expected a number in \(0, 1\]"),
    ({"accuracy": True}, "accuracy is True"),
    ({"loss": float("nan")}, "loss is nan"),
    ({"test_loss": True}, "test_loss is True; expected a finite number"),
    ({"seconds": 0}, "seconds is 0"),
    ({"samples": -5}, "samples is -5"),
    ({"patience": 0}, "patience is 0; expected a number > 0"),
    ({"monitor": "f1"}, "monitor='f1' needs reaches or patience"),
    (
        {"monitor": "f1", "patience": 3},
        "mode is None; expected 'max' if the largest f1 is the best, or 'min'",
    ),
    ({"mode": "up", "patience": 3}, "mode is 'up'; expected 'max' if the largest test_loss"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_criteria_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gs.until(**given)


def test_accuracy_needs_somebody_who_looks() -> None:
    model, data = least_squares(8, 3)
    with pytest.raises(ConfigError, match="give evaluate_every"):
        simulate(model, data, workers=1, epochs=1, until=gs.until(accuracy=0.9))
    with pytest.raises(ConfigError, match=r"expected gradstream\.until"):
        simulate(model, data, workers=1, epochs=1, until=0.9)  # type: ignore[arg-type]


def regression() -> tuple[gs.Model, gs.data.Dataset]:
    """With samples held out."""
    model, data = least_squares(32, 3)
    batch = data.batch(np.arange(32))
    return model, gs.data.from_arrays(
        batch.inputs[:24], batch.targets[:24], batch.inputs[24:], batch.targets[24:]
    )


def test_a_goal_that_no_evaluation_has_is_refused_at_the_first_one() -> None:
    options: Any = {"workers": 2, "batch_size": 4, "epochs": 9, "evaluate_every": 2}
    model, data = regression()
    with pytest.raises(
        UserCodeError, match=r"until\(accuracy=…\) would never end.*Give until\(test_loss=…\)"
    ):
        simulate(model, data, until=gs.until(accuracy=0.9), **options)
    run = simulate(model, data, until=gs.until(test_loss=1e9), **options)
    assert str(run.summary["reason"]).startswith("test loss ")


def test_a_metric_ends_a_run_and_a_misspelt_one_is_named() -> None:
    model, data = regression()
    options: Any = {"workers": 2, "batch_size": 4, "epochs": 90, "evaluate_every": 2}
    metrics = {"none": lambda outputs, targets: 1.0}
    until = gs.until(monitor="none", mode="max", patience=4)
    run = simulate(model, data, until=until, metrics=metrics, **options)
    assert str(run.summary["reason"]).endswith("4 evaluations after its best, 1")
    assert len(run.evaluations) == 5 + 1  # and the last one, of the final parameters
    with pytest.raises(ConfigError, match=r"monitor=…. 'nono' .did you mean 'none'"):
        simulate(
            model, data, until=gs.until(monitor="nono", mode="max", patience=4), metrics=metrics, **options
        )


def test_it_travels_as_a_table() -> None:
    job = gs.Job(*least_squares(8, 3), epochs=1, until=gs.until(seconds=5))
    assert with_overrides(job, overrides(job)).until == Until(seconds=5)


# ---- runs -----------------------------------------------------------------------------------

WORLDS = {
    "even": SimulationConfig(costs={"gradient": Cost(base_s=0.01)}),
    "uneven": SimulationConfig(
        costs={"gradient": Cost(base_s=0.01, jitter=LogNormal(1.0)), "apply": Cost(base_s=1e-3)},
        network=Network(link=Link(latency_s=5e-3, jitter_s=2e-2)),
        speeds={"worker-1": 0.2},
    ),
}
STRATEGIES: dict[str, Any] = {
    "synchronous": gs.Synchronous(),
    "in turn": gs.Synchronous(overlap=False),
    "downpour": gs.Downpour(),
    "periods": gs.Downpour(push_every=4, fetch_every=3, overlap=False),
}


def tokens_run(strategy: str, config: str, seed: int, **options: Any) -> tuple[gs.Run, int]:
    """A run of `Tokens`, and how many samples its parameters say are in the model."""
    options = {"epochs": 50, "workers": 3, "servers": 2, "batch_size": 2, "chunk_elems": 64, **options}
    model = Tokens(5)
    model.reduction = "sum" if strategy in ("synchronous", "in turn") else "mean"
    run = simulate(
        model, numbered(30), strategy=STRATEGIES[strategy], optimizer=gs.optim.SGD(lr=1.0), seed=seed,
        deadlines=QUICK, config=WORLDS[config], **options,
    )  # fmt: skip
    scale = 6 if model.reduction == "sum" else 1  # an update is the mean over the round
    counts = np.rint(run.parameters["tokens"] * scale).astype(int)[:, :30]
    assert (counts == counts[0]).all(), "chunks differ"
    return run, int(counts[0].sum())


@pytest.mark.parametrize("config", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_in_the_model_is_what_is_accounted_for(strategy: str, config: str) -> None:
    """Every sample that the run says it has gone through is in every chunk, once; and no other."""
    rng, seed = random.Random(strategy + config), list(WORLDS).index(config)
    criterion = gs.until(samples=rng.randint(1, 300)) if seed else gs.until(seconds=rng.uniform(0.01, 1.0))
    run, in_model = tokens_run(strategy, config, seed, until=criterion)
    (finished,) = [event for event in run.events if event["event"] == "finished"]
    assert finished["reason"]
    assert finished["samples"] == in_model == sum(row["samples"] for row in run.history)
    assert in_model < 1500
    if criterion.samples is not None:
        assert in_model >= criterion.samples
    steps = {rank: sum(row["rank"] == rank for row in run.history) for rank in range(3)}
    if strategy in ("synchronous", "in turn"):
        assert len(set(steps.values())) == 1  # all have stopped after the same round


def test_the_check_notices_a_worker_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: who keeps the final parameters takes them before the others' last pushes are in."""
    monkeypatch.setattr(BatchGate, "settled", True)
    differ = 0
    for seed in range(5):
        try:
            run, in_model = tokens_run("downpour", "uneven", seed, until=gs.until(seconds=0.3))
        except AssertionError:  # of a push, only some chunks were in
            differ += 1
        else:
            differ += in_model != run.summary["samples_accounted"]
    assert differ


def test_the_transitions_of_rounds() -> None:
    """PAUSE, STOP after the furthest worker's round, ENDED when all have got there, FINISHED."""
    started = StartedEvent(
        job="j", workers=2, servers=0, strategy="synchronous", optimizer="sgd", num_parameters=0,
        num_samples=40, total_steps=10, in_rounds=True,
    )  # fmt: skip
    ledger = Ledger(RoundPlan(40, 2, 2), epochs=1)
    membership = Membership(
        CoordinatorPlan(
            started=started,
            ledger=ledger,
            losses=LossTolerance(survives_worker_loss=False),
        )
    )
    spec = v1.ModelSpec(fingerprint=1, elems=64, dtype=v1.FLOAT32, chunk_elems=64)
    for rank in range(2):
        node = v1.Node(name=f"worker-{rank}", role="worker", rank=rank)
        membership.join(v1.Join(node=node, software=__version__, model=spec), 0.0)
    assert membership.life.finish("enough", 1.0)
    assert not membership.life.finish("enough again", 1.0)

    def says(rank: int, kind: v1.SnapshotReport.Kind, count: int = 0, **more: Any) -> v1.Snapshot:
        report = v1.SnapshotReport(number=1, kind=kind, count=count)
        membership.beat(f"worker-{rank}", v1.Beat(reports=[v1.BeatReport(snapshot=report)], **more), 2.0)
        return membership.notice.snapshot

    assert (membership.notice.snapshot.stage, membership.notice.snapshot.ends) == (v1.Snapshot.PAUSE, True)
    assert says(0, v1.SnapshotReport.BEGUN, 3).stage == v1.Snapshot.PAUSE
    snapshot = says(1, v1.SnapshotReport.BEGUN, 4)
    assert (snapshot.stage, dict(snapshot.stop_at)) == (v1.Snapshot.STOP, {"worker-0": 4, "worker-1": 4})
    assert says(0, v1.SnapshotReport.REACHED).stage == v1.Snapshot.STOP
    receipts = [v1.Receipt(epoch=0, partition=rank, batch=batch) for rank in (0, 1) for batch in range(4)]
    assert says(1, v1.SnapshotReport.REACHED, receipts=receipts).stage == v1.Snapshot.ENDED
    membership.beat("worker-0", v1.Beat(finished=True), 3.0)
    assert membership.life.status == v1.Notice.TRAINING
    out = membership.beat("worker-1", v1.Beat(finished=True), 3.0)
    assert membership.life.status == v1.Notice.FINISHED
    (done,) = [one.event for one in out if isinstance(one, Emit) and isinstance(one.event, FinishedEvent)]
    assert (done.samples, done.reason) == (16, "enough")


def test_synchronous_ends_with_the_bits_of_that_many_rounds() -> None:
    model, data = least_squares(60, 100, whole=False)
    options: Any = {
        "workers": 2,
        "batch_size": 5,
        "optimizer": gs.optim.SGD(lr=0.05),
        "config": WORLDS["uneven"],
    }
    run = simulate(model, data, epochs=30, until=gs.until(seconds=0.7), **options)
    rounds = len(run.history) // 2
    short = simulate(model, data, steps=rounds, **options)
    assert 3 < rounds < 180
    assert np.array_equal(run.parameters["w"], short.parameters["w"])
    assert run.summary["samples_accounted"] == rounds * 10


def test_accuracy_with_evaluations() -> None:
    """It ends within a few rounds of the evaluation that has reached it, and is evaluated once more."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 2)).astype("float32")
    y = (x[:, 0] > 0).astype(np.int64)
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros((2, 2))},
        outputs=lambda p, x: x @ p["w"],
        gradients=lambda p, x, y: {"w": x.T @ (x @ p["w"] - np.eye(2, dtype=x.dtype)[y]) / len(x)},
    )
    data = gs.from_arrays(x[:300], y[:300], x[300:], y[300:])
    run = simulate(
        model, data, optimizer=gs.optim.SGD(lr=0.1), workers=2, batch_size=10, epochs=100, evaluate_every=3,
        until=gs.until(accuracy=0.9), config=WORLDS["even"],
    )  # fmt: skip
    reached = next(row for row in run.evaluations if row["accuracy"] >= 0.9)
    final = run.evaluations[-1]
    assert final["step"] <= reached["step"] + 3
    assert run.summary["reason"] == f"accuracy {reached['accuracy']:.4g} >= 0.9 after step {reached['step']}"
    assert final["final"]
    assert final["step"] == len(run.history) // 2
    assert final["accuracy"] == run.evaluate().accuracy


def test_running_loss() -> None:
    model, data = least_squares(200, 5, whole=False, reduction="mean")
    run = simulate(
        model, data, strategy="downpour", optimizer=gs.optim.SGD(lr=0.05), workers=2, batch_size=10, epochs=100,
        until=gs.until(loss=0.55), config=WORLDS["even"],
    )  # fmt: skip
    assert run.summary["reason"].startswith("training loss 0.")
    assert len(run.history) < 1000


def test_a_run_that_comes_to_its_end_first_has_no_reason() -> None:
    run, in_model = tokens_run("downpour", "even", 0, epochs=2, until=gs.until(seconds=1e6))
    assert in_model == run.summary["samples_accounted"] == 60
    assert run.summary["reason"] is None


@pytest.mark.parametrize("name", ["worker-0", "worker-2"])
def test_a_worker_that_dies_about_then(name: str) -> None:
    """Downpour: before, while and after the others are told to stop, at 10 different instants."""
    rng = random.Random(name)
    died = 0
    for seed in range(5):
        at_s = 0.5 + rng.uniform(-0.1, 0.4)
        events: list[Any] = []
        run = simulate(
            Tokens(3), numbered(30), strategy="downpour", optimizer=gs.optim.SGD(lr=1.0), seed=seed, epochs=50,
            workers=3, batch_size=2, chunk_elems=64, deadlines=dataclasses.replace(QUICK, lease_s=0.4),
            config=WORLDS["uneven"], until=gs.until(seconds=0.5), script=kill_at(name, at_s),
            on_event=events.append,
        )  # fmt: skip
        finished = next(event for event in events if event["event"] == "finished")
        died += any(event["event"] == "left" and event["lost"] for event in events)
        assert finished["reason"]
        # What the dead one had pushed without its receipt having arrived is in the model besides.
        assert token_counts(run, 30).sum(axis=1).min() >= finished["samples"]
    assert died > 1


@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
def test_an_unlucky_network(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are lost and streams doubled between workers and shards: pushes are retried meanwhile."""
    bad = Link(latency_s=1e-3, jitter_s=4e-3, loss=0.02, duplicate=0.5)
    pairs = [(f"worker-{rank}", f"shard-{shard}") for rank in range(3) for shard in range(2)]
    links = {pair: bad for worker, shard in pairs for pair in ((worker, shard), (shard, worker))}
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=0.01, jitter=Exponential())}, network=Network(links=links)
    )
    monkeypatch.setitem(WORLDS, "unlucky", config)
    for seed in range(2):
        run, in_model = tokens_run(strategy, "unlucky", seed, until=gs.until(samples=100))
        assert run.summary["samples_accounted"] == in_model >= 100
        assert run.summary["retries"]
