"""Runs of several phases equal one run, or a run that is resumed; every sample counts once, whoever dies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.checkpoint.manifest import JobPhase
from gradstream.checkpoint.snapshot import Carried
from gradstream.coordinator import growing_batches
from gradstream.coordinator.durable import StateStore
from gradstream.coordinator.growing_batches import VarianceTest
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.data import Ledger
from gradstream.errors import ConfigError, Interrupted, UnknownNameError
from gradstream.job.job import Job
from gradstream.job.phase_jobs import rate_of_phase
from gradstream.job.phases import described_phase, phase_of
from gradstream.optim.schedules import Position
from gradstream.report.page import PageSource, page
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import (
    NUM_SAMPLES,
    QUICK,
    UNSTEADY,
    Tokens,
    check_exactly_once,
    kill_at,
    least_squares,
    numbered,
)
from whole_runs import same

ADAM, MOMENTUM = gs.optim.Adam(lr=0.01), gs.optim.SGD(lr=0.01, momentum=0.9)


def linear(**options: Any) -> gs.Run:
    """A run on random numbers, in which each bit of the order and of the state counts."""
    model, data = least_squares(48, 70, whole=False, reduction="mean", dtype="float32")
    return gs.simulate(model, data, **{"batch_size": 4, "chunk_elems": 64, **options})


# ---- two phases are one run -------------------------------------------------------------------

ALIKE: dict[str, dict[str, Any]] = {
    "synchronous": {"optimizer": ADAM, "workers": 3, "servers": 2},
    "synchronous, a schedule": {"optimizer": gs.optim.SGD(lr=gs.schedules.Cosine(0.1), momentum=0.9), "workers": 2},
    "allreduce": {"strategy": "allreduce", "optimizer": ADAM, "workers": 3},
    "downpour": {"strategy": gs.Downpour(overlap=False), "workers": 1, "optimizer": MOMENTUM},
    "downpour, every third": {"strategy": gs.Downpour(push_every=3, fetch_every=3, overlap=False), "workers": 1},
    "asysg": {"strategy": "asysg", "workers": 1, "optimizer": ADAM},
    "ssp": {"strategy": "ssp", "workers": 1, "optimizer": MOMENTUM},
    "parameter-averaging": {"strategy": gs.ParameterAveraging(every=3), "workers": 2, "optimizer": gs.optim.SGD(0.1)},
    "diloco": {"strategy": gs.DiLoCo(every=3), "workers": 2, "optimizer": gs.optim.SGD(0.1)},
}  # fmt: skip


@pytest.mark.parametrize("kind", ALIKE)
def test_two_phases_of_the_same_settings_are_one_run_to_the_bit(kind: str) -> None:
    one, two = (
        linear(**ALIKE[kind], epochs=3),
        linear(**ALIKE[kind], phases=[gs.Phase(epochs=1), gs.Phase(epochs=2)]),
    )
    assert same(one, two)
    assert one.summary["steps"] == two.summary["steps"]
    assert [row["lr"] for row in one.history] == [row["lr"] for row in two.history]


@pytest.mark.parametrize("kind", ["synchronous", "allreduce", "synchronous, a schedule"])
def test_a_phase_may_end_inside_a_data_epoch(kind: str) -> None:
    one, two = (
        linear(**ALIKE[kind], steps=10),
        linear(**ALIKE[kind], phases=[gs.Phase(steps=3), gs.Phase(steps=7)]),
    )
    assert same(one, two)


def test_a_phase_that_forgets_the_optimizers_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = map(str, range(1000))
    monkeypatch.setattr("gradstream.job.plan.RunPlan.rule_name", property(lambda plan: next(numbers)))
    with pytest.raises(AssertionError):
        test_two_phases_of_the_same_settings_are_one_run_to_the_bit("synchronous")


@pytest.mark.parametrize(
    ("before", "outer"),
    [("allreduce", gs.LocalSGD(every=2, outer_momentum=0.5)), ("synchronous", gs.DiLoCo(every=2))],
    ids=["in a group", "on servers"],
)
def test_an_outer_velocity_does_not_begin_with_the_momentum_of_gradients(before: str, outer: Any) -> None:
    """Nor does it look for one that a rule without momentum has not left."""
    momentum, plain = (
        linear(
            workers=2,
            phases=[
                gs.Phase(
                    epochs=1, strategy=before, optimizer=rule, lr=1e-30
                ),  # leaves a momentum, and nothing else
                gs.Phase(epochs=1, strategy=outer, optimizer=gs.optim.SGD(lr=0.01)),
            ],
        )
        for rule in (MOMENTUM, gs.optim.SGD(lr=0.01))
    )
    assert same(momentum, plain)


@pytest.mark.parametrize("rule", [MOMENTUM, gs.optim.SGD(lr=0.01)], ids=["momentum", "none"])
def test_a_resumed_job_of_another_rule_says_that_the_state_begins_anew(
    rule: gs.optim.SGD, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.5)
        cluster.stop()

    storage, config = (
        MemoryStorage(),
        gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(per_sample_s=1e-2)}),
    )
    options: dict[str, Any] = {
        "storage": storage,
        "workers": 2,
        "optimizer": rule,
        "epochs": 4,
        "config": config,
    }
    with pytest.raises(Interrupted):
        linear(strategy="allreduce", script=stop, **options)
    kept = linear(strategy="allreduce", resume=True, **options)
    assert not capsys.readouterr().err
    linear(strategy=gs.LocalSGD(every=2, outer_momentum=0.5), resume=True, **options)
    assert "the state of the update rule begins anew: checkpoints/step-" in capsys.readouterr().err
    assert kept.summary["samples"] < 4 * 48


def filled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each worker that goes on from a checkpoint: vectors that it needs, and that it has to read."""
    found = list[tuple[int, int]]()
    fill = Carried.fill

    def note(self: Carried, version: int, vectors: Any) -> Any:
        left = fill(self, version, vectors)
        found.append((len(vectors), len(left)))
        return left

    monkeypatch.setattr(Carried, "fill", note)
    return found


def test_workers_of_a_group_read_no_checkpoint_between_two_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have it in memory: parameters and Adam's two vectors. Of a run that is resumed they read all."""
    found = filled(monkeypatch)
    kind = {**ALIKE["allreduce"], "phases": [gs.Phase(epochs=1), gs.Phase(epochs=1)]}
    storage = MemoryStorage()
    linear(**kind, storage=storage)
    assert found == [(3, 0)] * 3
    found.clear()
    linear(**kind, storage=boundary(storage), resume=True)
    assert found[-3:] == [(3, 3)] * 3


def test_what_a_worker_has_is_of_the_boundary_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of one before a phase with servers, nor before one without this worker, nor of another round."""
    found = filled(monkeypatch)
    group = gs.Phase(epochs=1, strategy="allreduce", workers=2)
    options: dict[str, Any] = {"optimizer": MOMENTUM, "workers": 2}
    linear(**options, phases=[group, gs.Phase(epochs=1, strategy="synchronous"), group])
    assert found == [(2, 2)] * 2
    found.clear()
    linear(**options, phases=[group, gs.Phase(epochs=1, strategy="allreduce", workers=1), group])
    assert sorted(found) == [(2, 0), (2, 0), (2, 2)]
    whole, keep = linear(**options, phases=[group, group]), Carried.keep
    monkeypatch.setattr(Carried, "keep", lambda self, version, vectors: keep(self, version - 1, vectors))
    assert same(whole, linear(**options, phases=[group, group]))
    assert found[-2:] == [(2, 2)] * 2


def test_other_numbers_in_memory_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what is kept is not what the checkpoint has."""
    keep = Carried.keep

    def spoilt(self: Carried, version: int, vectors: Any) -> None:
        keep(self, version, {name: [(0, 1.5 * piece)] for name, ((_, piece),) in vectors.items()})

    monkeypatch.setattr(Carried, "keep", spoilt)
    with pytest.raises(AssertionError):
        test_two_phases_of_the_same_settings_are_one_run_to_the_bit("allreduce")


# ---- a phase is a resumed run -------------------------------------------------------------------

AFTER: dict[str, dict[str, Any]] = {
    "more workers, larger batches": {"workers": 3, "batch_size": 8},
    "fewer workers": {"workers": 1},
    "accumulated": {"accumulate": 3},
    "another rate": {"lr": 0.003},
    "other shards": {"servers": 3},
}


def boundary(storage: MemoryStorage) -> MemoryStorage:
    """A disk with the first checkpoint of a run alone."""
    first, only = (
        min(name for name in storage.names("checkpoints") if name.startswith("step")),
        MemoryStorage(),
    )
    for name in storage.names(f"checkpoints/{first}"):
        only.write(f"checkpoints/{first}/{name}", storage.read(f"checkpoints/{first}/{name}"))
    return only


@pytest.mark.parametrize("kind", AFTER)
def test_a_phase_is_a_run_resumed_with_other_settings(kind: str) -> None:
    options, storage = {"workers": 2, "optimizer": ADAM, "checkpoint_every": None}, MemoryStorage()
    changed = dict(AFTER[kind])
    phases = linear(**options, phases=[gs.Phase(epochs=1), gs.Phase(epochs=2, **changed)], storage=storage)
    if "lr" in changed:
        options["optimizer"] = replace(ADAM, lr=changed.pop("lr"))
    resumed = linear(**{**options, **changed}, epochs=3, storage=boundary(storage), resume=True)
    assert same(phases, resumed)


# ---- every sample once --------------------------------------------------------------------------

CHANGES: dict[str, list[gs.Phase]] = {
    "warm start": [gs.Phase(epochs=1, workers=1), gs.Phase(epochs=3, strategy="downpour")],
    "one worker at last": [gs.Phase(epochs=2, strategy="downpour"), gs.Phase(epochs=2, workers=1)],
    "rounds": [gs.Phase(epochs=1, strategy="allreduce", workers=2, lr=4.0), gs.Phase(steps=3, servers=1, lr=6.0),
               gs.Phase(epochs=1, strategy="allreduce", batch_size=1, accumulate=2, lr=6.0),
               gs.Phase(epochs=2, batch_size=4, lr=12.0)],
    "queues": [gs.Phase(epochs=1, strategy="ssp"), gs.Phase(steps=3, strategy="downpour", batch_size=1),
               gs.Phase(epochs=3, strategy="ssp", batch_size=4, servers=1)],
}  # fmt: skip
"""A round of several workers is a mean: its gradients are sums here, and its rate is its number of samples."""

COUNTED: dict[str, Any] = {
    "optimizer": gs.optim.SGD(lr=1.0), "workers": 3, "servers": 2, "batch_size": 2, "chunk_elems": 64,
    "deadlines": QUICK, "config": UNSTEADY,
}  # fmt: skip


def counted(*, sums: bool, **options: Any) -> gs.Run:
    """A run of three workers whose parameters count the samples in them."""
    model = Tokens(num_chunks=3)
    model.reduction = "sum" if sums else "mean"
    return gs.simulate(model, numbered(NUM_SAMPLES), **{**COUNTED, **options})


def tokens(change: str, **options: Any) -> gs.Run:
    run = counted(sums=change == "rounds", phases=CHANGES[change], **options)
    check_exactly_once(run, NUM_SAMPLES, 4)
    assert [row["number"] for row in run.summary["phases"]] == [*range(1, len(CHANGES[change]) + 1)]
    return run


@pytest.mark.parametrize("change", CHANGES)
def test_each_sample_counts_once_an_epoch(change: str) -> None:
    run = tokens(change)
    assert sum(event["event"] == "started" for event in run.events) == 1
    assert not any(event["event"] == "left" and event["lost"] for event in run.events)


def test_a_boundary_that_forgets_samples_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an epoch was complete in which steps end a phase."""
    monkeypatch.setattr(Ledger, "_is_whole", lambda self, epoch: True)
    with pytest.raises(AssertionError):
        tokens("rounds")


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_dies_at_a_boundary_or_elsewhere(seed: int) -> None:
    """In a quarter of the runs nobody takes its place."""
    rng = random.Random(seed)
    change = rng.choice([*CHANGES])
    rank = rng.randrange(2) + (
        "worker" in change or "warm" in change
    )  # the only worker of a phase ends the run

    async def script(cluster: SimulatedCluster) -> None:
        sleep = cluster.virtual.runtime("director").sleep
        if seed % 2:
            await sleep(rng.uniform(0.05, 1.0))
        else:
            while not at_boundary(cluster):
                await sleep(1e-3)
            await sleep(rng.uniform(0.0, 0.02))
        if not cluster.over and cluster.is_running(f"worker-{rank}"):
            cluster.kill(f"worker-{rank}")
            if seed % 4 != 3:
                await sleep(rng.uniform(0.0, 0.5))
                await cluster.restart(f"worker-{rank}")

    tokens(change, seed=seed, script=script)


def test_nobody_waits_at_a_boundary_for_a_worker_that_was_lost_before() -> None:
    run = tokens("queues", script=kill_at("worker-2", 0.05))
    (lost,) = [event["time_s"] for event in run.events if event["event"] == "left" and event["lost"]][:1]
    last = [event["time_s"] for event in run.events if event["event"] == "step"]
    assert lost < run.summary["phases"][1]["time_s"]
    assert run.summary["workers_lost"] == ["worker-2"]  # once, and not again at each boundary
    assert all(
        row["time_s"] - max(at for at in last if at < row["time_s"]) < QUICK.join_s / 2
        for row in run.summary["phases"][1:]
    )


def at_boundary(cluster: SimulatedCluster) -> bool:
    coordinator = cluster.coordinator
    return coordinator is not None and coordinator.membership.life.crossing


def test_a_snapshot_that_is_not_tried_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstream.coordinator.snapshot_rounds.ATTEMPTS", 0)
    real = SnapshotRounds.prepared
    failures = [1]

    def once(self: SnapshotRounds, snapshot: Any, places: Any, at_s: float) -> Any:
        return self.fail("coordinator", "the disk is full", at_s) if failures and failures.pop() else real(
            self, snapshot, places, at_s
        )  # fmt: skip

    monkeypatch.setattr(SnapshotRounds, "prepared", once)
    with pytest.raises(Interrupted):
        tokens("warm start")
    monkeypatch.undo()
    failures = [1]
    monkeypatch.setattr(SnapshotRounds, "prepared", once)
    assert any(event["event"] == "checkpoint_failed" for event in tokens("warm start").events)


@pytest.mark.parametrize("seed", range(len(CHANGES)))
def test_the_coordinator_dies_at_a_boundary_or_elsewhere(seed: int) -> None:
    rng = random.Random(seed)

    async def script(cluster: SimulatedCluster) -> None:
        cluster.successor_due = True
        sleep = cluster.virtual.runtime("director").sleep
        while not at_boundary(cluster):
            await sleep(1e-3)
        await sleep(rng.choice([0.0, rng.uniform(0.0, 0.05)]))
        if not cluster.over:
            cluster.kill("coordinator")
            await sleep(rng.uniform(0.0, 0.3))
            await cluster.restart("coordinator")
        cluster.successor_due = False

    script.store = lambda job: StateStore(":memory:", job)  # type: ignore[attr-defined]
    tokens([*CHANGES][seed % len(CHANGES)], seed=seed, script=script)


# ---- resume in the middle -------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_stopped_anywhere_a_run_goes_on_in_the_phase_where_it_was(change: str) -> None:
    rng, stops = random.Random(change), 0
    for seed in range(2):
        storage, when_s = MemoryStorage(), rng.uniform(0.05, 0.5)

        async def script(cluster: SimulatedCluster, when_s: float = when_s) -> None:
            await cluster.virtual.runtime("director").sleep(when_s)
            cluster.stop()

        options: dict[str, Any] = {
            "phases": CHANGES[change], "storage": storage, "seed": seed, "sums": change == "rounds",
        }  # fmt: skip
        try:
            run = counted(**options, script=script)
        except Interrupted:
            stops += 1
            run = counted(**options, resume=True)
        check_exactly_once(run, NUM_SAMPLES, 4)
    assert stops


def test_a_resumed_run_of_phases_ends_with_the_same_bits() -> None:
    phases, storage = (
        [gs.Phase(epochs=1, workers=1), gs.Phase(epochs=2, workers=3, lr=gs.schedules.Linear(0.1))],
        None,
    )
    options: dict[str, Any] = {"optimizer": MOMENTUM, "phases": phases}
    whole = linear(**options)
    for seconds in (0.02, 0.1, 0.2):
        storage = MemoryStorage()

        async def script(cluster: SimulatedCluster, seconds: float = seconds) -> None:
            await cluster.virtual.runtime("director").sleep(seconds)
            cluster.stop()

        try:
            run = linear(**options, storage=storage, script=script)
        except Interrupted:
            run = linear(**options, storage=storage, resume=True)
        assert same(whole, run)
        assert run.summary["phases"][-1]["number"] == 2


# ---- rates, lengths, reports ------------------------------------------------------------------------


def job_with(phases: list[gs.Phase]) -> Job:
    return Job(Tokens(1), numbered(24), phases=phases)


def test_a_schedule_of_a_phase_counts_from_its_beginning_and_one_of_the_job_from_the_runs() -> None:
    linear_ = gs.schedules.Linear(1.0)
    job = job_with([gs.Phase(epochs=2), gs.Phase(epochs=2, lr=linear_)])
    begin = JobPhase(1, epochs=2, rounds=20, origin=20)
    at = Position(step=30, num_steps=40, steps_per_epoch=10)
    own = rate_of_phase(job, begin, gs.optim.SGD(lr=0.5)).lr
    assert callable(own) and own(at) == linear_(Position(10, 20, 10))
    whole = rate_of_phase(
        job_with([gs.Phase(epochs=2), gs.Phase(epochs=2)]), begin, gs.optim.SGD(lr=linear_)
    ).lr
    assert callable(whole) and whole(at) == linear_(Position(30, 40, 10))
    with pytest.raises(ConfigError, match="all in one unit"):
        rate_of_phase(job_with([gs.Phase(epochs=2), gs.Phase(steps=2)]), begin, gs.optim.SGD(lr=linear_))


def test_a_phase_ends_early_by_its_criterion() -> None:
    run = linear(
        workers=2, optimizer=gs.optim.SGD(lr=0.01),
        phases=[gs.Phase(epochs=9, until=gs.until(samples=60)), gs.Phase(steps=2, name="the end")],
    )  # fmt: skip
    first, last = run.summary["phases"]
    assert (first["samples"], last["label"]) == (0, "the end")
    assert 60 <= last["samples"] < 9 * 48
    assert run.summary["samples_accounted"] == last["samples"] + 2 * 8


def test_the_criterion_of_the_last_phase_ends_the_run() -> None:
    phases = [gs.Phase(epochs=1), gs.Phase(epochs=99, until=gs.until(samples=100))]
    run = linear(workers=2, optimizer=gs.optim.SGD(lr=0.01), phases=phases)
    assert "samples >= 100" in run.summary["reason"]
    assert 100 <= run.summary["samples_accounted"] < 99 * 48


def test_the_report_names_the_phases() -> None:
    run = linear(
        workers=2, phases=[gs.Phase(epochs=1, name="small"), gs.Phase(epochs=1, strategy="downpour")]
    )
    rows = run.summary["phases"]
    assert [(row["label"], row["strategy"], row["workers"]) for row in rows] == [
        ("small", "synchronous", 2), ("downpour", "downpour", 2),
    ]  # fmt: skip
    assert run.summary["strategy"] == "downpour"
    text = page(PageSource(events=run.events, title="t", config="", info={}, price=None))
    assert "phase 1 of 2, small" in text and "phase 2 of 2, downpour" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"phases": [gs.Phase(epochs=1, variance_test=0.5)]}, "2 minibatches of a step"),
        ({"phases": [gs.Phase(epochs=1, accumulate=2, variance_test=2.0)]}, "a number in"),
        ({"phases": [gs.Phase(epochs=1, accumulate=2, noise_multiple=0.0)]}, "a number above 0"),
        ({"phases": [gs.Phase(epochs=1, noise_multiple=1.0)]}, "noise_multiple=1.0 without accumulate"),
        ({"phases": [gs.Phase(epochs=1, noise_multiple=1.0, variance_test=0.5)]}, "leave one of them out"),
        ({"phases": [gs.Phase()]}, r"phases\[0\]: expected exactly one of epochs and steps"),
        ({"phases": [gs.Phase(epochs=1)], "epochs": 2}, "each phase has its own length"),
        ({"phases": [gs.Phase(epochs=0)]}, "whole number of at least 1"),
        ({"phases": [gs.Phase(epochs=1), gs.Phase(epochs=1, workers=100)]}, r"phases\[1\]: workers=100"),
        ({"phases": [gs.Phase(epochs=1, strategy_options={"every": 2})]}, "name the strategy"),
        ({"phases": [gs.Phase(epochs=1)], "record": True}, "leave one of the two out"),
        ({"phases": [gs.Phase(epochs=1)], "config": gs.sim.SimulationConfig(shape_only=True)}, "shape-only"),
        ({"phases": ["downpour"]}, "expected gs.Phase"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        linear(workers=2, **options)


def test_phases_are_settings_too() -> None:
    phase = gs.Phase(
        epochs=2, strategy=gs.Downpour(push_every=2), lr=gs.schedules.Cosine(0.1), batch_size=[1, 2]
    )
    assert phase_of(described_phase(phase)) == replace(phase, batch_size=[1, 2])
    assert phase_of({"steps": 3, "strategy": "ssp", "strategy_options": {"bound": 2}}).strategy == "ssp"
    with pytest.raises(UnknownNameError, match="epochs"):
        phase_of({"epoch": 3})


# ---- batches that grow ------------------------------------------------------------------------------


def test_a_batch_grows_in_the_place_of_a_rate_that_falls() -> None:
    phase = gs.Phase(epochs=2, accumulate=2)
    assert [one.accumulate for one in phase.growing(times=3, factor=5)] == [2, 10, 50]
    with pytest.raises(ConfigError, match="factor of 2"):
        phase.growing(times=2, factor=1)


def test_growing_batches_are_batches_of_that_size_to_the_bit() -> None:
    """On whole numbers, k minibatches of b samples are one of k·b."""
    model, data = least_squares(48, 70, grid=2**-8)
    options: dict[str, Any] = {"workers": 2, "chunk_elems": 64, "optimizer": gs.optim.SGD(lr=2**-7)}
    grown = gs.simulate(model, data, **options, batch_size=2, phases=gs.Phase(epochs=1).growing(times=3))
    large = gs.simulate(
        model, data, **options, phases=[gs.Phase(epochs=1, batch_size=size) for size in (2, 4, 8)]
    )
    assert same(grown, large)


def steps_of(
    rng: np.random.Generator, mean: np.ndarray[Any, Any], deviation: float, k: int, b: int
) -> dict[str, Any]:
    """The event of a step of k minibatches of b samples with normal gradients."""
    parts = mean + rng.standard_normal((k, len(mean))) * deviation / np.sqrt(b)
    return {
        "event": "step", "samples": k * b, "square": float((parts.mean(0) ** 2).sum()),
        "part_squares": float((parts**2).sum(1).mean()),
    }  # fmt: skip


def test_the_variance_is_that_of_single_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_batches, "MEMORY", 1 - 1e-4)
    rng, mean = np.random.default_rng(0), np.full(10, 0.5)
    test = VarianceTest(0.01, 2, 4, 4)
    for _ in range(10_000):
        assert test.event(steps_of(rng, mean, 3.0, 4, 8)) == 0  # as large as it gets
    assert test._variance == pytest.approx(10 * 9.0, rel=0.05)
    assert test._square == pytest.approx(10 * 0.25, rel=0.05)


def grows_to(theta: float, seed: int = 0) -> int:
    """How many minibatches a step of 2 workers gets that has had 2 of 4 samples; V / |G|² is 36."""
    rng, test = np.random.default_rng(seed), VarianceTest(theta, 2, 2, 1000)
    events = (steps_of(rng, np.full(1000, 0.5), 3.0, 2, 4) for _ in range(400))
    return next((grown for event in events if (grown := test.event(event))), 0)


def test_a_step_grows_to_the_size_at_which_the_test_holds() -> None:
    assert grows_to(0.9) == 0 or grows_to(0.9) <= 7  # 36 / 0.81 = 44 samples
    assert abs(grows_to(0.3) - 36 / 0.09 / 8) <= 6
    assert abs(grows_to(0.1) - 36 / 0.01 / 8) <= 60


@pytest.mark.parametrize("multiple", [1.0, 4.0])
def test_a_step_grows_to_a_multiple_of_the_noise_scale(multiple: float) -> None:
    theta = gs.Phase(epochs=1, noise_multiple=multiple).theta
    assert theta is not None
    assert abs(grows_to(theta) - 36 * multiple / 8) <= 2 * multiple


def test_a_step_never_needs_more_than_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over minibatches of an epoch vary less than of samples that are drawn anew, and over all not at all."""
    monkeypatch.setattr(growing_batches, "MEMORY", 1 - 1e-4)
    rng = np.random.default_rng(0)
    samples = 0.5 + 3.0 * rng.standard_normal((120, 10))
    test = VarianceTest(0.1, 2, 2, 1000, population=120)
    grown = []
    for _ in range(6000):
        parts = samples[rng.permutation(120)[:60]].reshape(2, 30, 10).mean(1)
        event = {"event": "step", "samples": 60, "square": float((parts.mean(0) ** 2).sum())}
        grown.append(test.event({**event, "part_squares": float((parts**2).sum(1).mean())}))
    assert test._variance == pytest.approx(samples.var(0, ddof=1).sum(), rel=0.1)
    assert test._square == pytest.approx((samples.mean(0) ** 2).sum(), rel=0.1)
    assert set(grown) == {0}  # 2 workers of 2 minibatches of 30 have all of 120 samples


def test_a_mean_gradient_that_has_its_own_variance_in_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = VarianceTest._grown

    def biased(self: VarianceTest, each: float) -> int:
        self._square += self._variance / (self._accumulate * each)
        return real(self, each)

    monkeypatch.setattr(VarianceTest, "_grown", biased)
    with pytest.raises(AssertionError):
        test_a_step_grows_to_the_size_at_which_the_test_holds()


@pytest.mark.parametrize(
    ("strategy", "test"),
    [
        ("synchronous", {"variance_test": 0.5}),
        ("allreduce", {"variance_test": 0.5}),
        ("synchronous", {"noise_multiple": 4.0}),
    ],
)
def test_batches_grow_during_a_run_and_every_sample_counts_once(strategy: str, test: dict[str, Any]) -> None:
    """Gradients of tokens point in all directions, so the test says so."""
    phase = gs.Phase(epochs=10, accumulate=2, largest=3, strategy=strategy, **test)
    run = counted(sums=True, workers=2, batch_size=1, phases=[phase])
    assert run.summary["samples_accounted"] == 10 * NUM_SAMPLES
    assert sum(event["samples"] for event in run.events if event["event"] == "step") == 10 * NUM_SAMPLES
    grown = [event["accumulate"] for event in run.events if event["event"] == "phase"]
    assert grown == [2, 3]


def test_a_growth_that_comes_too_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator hears of steps after a while: the last ones may be done then."""
    monkeypatch.setattr("gradstream.coordinator.growing_batches.GROWS_BEFORE", -100)
    phase = gs.Phase(epochs=2, accumulate=2, variance_test=0.5, largest=3)
    run = counted(sums=True, workers=2, batch_size=1, phases=[phase], seed=3)
    assert run.summary["samples_accounted"] == 2 * NUM_SAMPLES


def test_the_lengths_of_gradients_are_measured_as_they_are() -> None:
    model, data = least_squares(8, 5, reduction="mean")
    seen: list[dict[str, Any]] = []
    gs.simulate(
        model, data, workers=1, batch_size=2, on_event=lambda event: seen.append(dict(event)),
        optimizer=gs.optim.SGD(lr=1e-9), phases=[gs.Phase(steps=1, accumulate=4, variance_test=0.9, largest=4)],
    )  # fmt: skip
    (step,) = [event for event in seen if event["event"] == "step"]
    x, y = data.batch(np.arange(8)).inputs, data.batch(np.arange(8)).targets
    gradients = np.asarray(-y)[:, np.newaxis] * np.asarray(x)
    assert step["square"] == pytest.approx(float((gradients.mean(0) ** 2).sum()))
    assert step["part_squares"] > step["square"]


def test_post_local_sgd_learns() -> None:
    """Averages at each step first, then every fourth step."""
    phases = [
        gs.Phase(epochs=6, strategy="allreduce"),
        gs.Phase(epochs=6, strategy=gs.ParameterAveraging(every=4)),
    ]
    model, data = least_squares(48, 8, reduction="mean")
    run = gs.simulate(model, data, workers=2, batch_size=4, optimizer=gs.optim.SGD(lr=0.05), phases=phases)
    best = np.linalg.lstsq(data.batch(np.arange(48)).inputs, data.batch(np.arange(48)).targets, rcond=None)[0]
    assert abs(run.parameters["w"] - best).max() < 0.15


def test_rows_of_a_worker_that_a_later_phase_begins_with_come_after_the_phases_before() -> None:
    model, data = least_squares(48, 4, whole=False)
    phases = [gs.Phase(epochs=2, workers=1, batch_size=16), gs.Phase(epochs=2, workers=3, batch_size=4)]
    run = gs.simulate(model, data, strategy="synchronous", phases=phases)
    assert [row["rank"] for row in run.history[:6]] == [0] * 6
    assert {row["rank"] for row in run.history[6:]} == {0, 1, 2}
    times = [row["time_s"] for row in run.history]
    assert times == sorted(times) and min(times[6:]) >= times[5]
