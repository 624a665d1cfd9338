"""Fault plans: drawn ones violate nothing, each fault of a plan is seen to happen, bugs that were found stay found."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import gradstream as gs
from gradstream.coordinator.durable import StateStore
from kit.faults import (
    Corrupt,
    Cut,
    DiskFull,
    Drain,
    Duplicate,
    Fault,
    FaultPlan,
    Freeze,
    Kill,
    Lose,
    Reorder,
    Slow,
    Stop,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "faults"))

import faults as bench  # type: ignore[import-not-found]  # a script, not typed

SEEDS, BLOCKS, EPOCHS = int(os.environ.get("FAULT_SEEDS", "36")), 4, 1
"""On each of the nine strategies of the bench, a plan without backups, two with, and one with logs, in short runs.

The record of the bench has more and longer.
"""


@pytest.mark.limit_s(60 + SEEDS)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_drawn_faults_violate_nothing(block: int) -> None:
    size = SEEDS // BLOCKS
    found = [bench.tried(seed, EPOCHS) for seed in range(block * size, (block + 1) * size)]
    assert {seed: what for seed, what, _ in found if what} == {}
    planned = sum(len(bench.plan_of(seed, EPOCHS).faults) for seed, *_ in found)
    assert sum(fired.total() for *_, fired in found) > 0.7 * planned


FOUND: dict[str, tuple[gs.Strategy, int, FaultPlan]] = {
    "a push whose last frame was lost was waited for, and its sender told to wait": (
        gs.strategies.AsySG(gradients=2),
        12,
        FaultPlan([Cut("worker-2", "*", 0.3053915644658538, 1.8, both=False)]),
    ),
    "a run ended without a reason, since nobody was left when the coordinator was away": (
        gs.AllReduce(algorithm="ring"),
        427,
        FaultPlan(
            [
                Kill("worker-0", 0.2741277889457881, None),
                Kill("coordinator", 0.4199294676719316, 0.2552732302922245),
                Corrupt("coordinator", "worker-2", 0.05),
                Lose("coordinator", "worker-1", 0.05),
                Corrupt("worker-2", "coordinator", 0.05),
            ]
        ),
    ),
    "a newcomer began with a round of which some chunks had the dead worker's part already": (
        gs.Synchronous(overlap=False),
        461,
        FaultPlan(
            [
                Cut("shard-0", "worker-0", 0.39422204282331214, 0.2),
                Kill("worker-0", 0.45526808120439133, 0.0),
            ]
        ),
    ),
    "a worker that was cut off when the first one had written the model was waited for in its place": (
        gs.Synchronous(),
        512,
        FaultPlan([Cut("worker-1", "coordinator", 0.13489337511038355, 3.0)]),
    ),
    "a newcomer that never heard the coordinator waited for its verdict for ever": (
        gs.Synchronous(),
        71,
        FaultPlan([Cut("*", "worker-1", 0.6323924509624521, 1.8, both=False), Kill("worker-1", 0.76, 0.01)]),
    ),
    "a worker that could not join was told as a failure of the code of another one": (
        gs.Downpour(push_every=2, fetch_every=2),
        273,
        FaultPlan([Lose("worker-2", "coordinator", 0.05)]),
    ),
}
"""Bugs that drawn plans have found: what happened, strategy and seed of the run, and what is left of the plan."""


@pytest.mark.parametrize("what", FOUND)
def test_bugs_that_were_found_stay_mended(what: str) -> None:
    strategy, seed, plan = FOUND[what]
    assert bench.violation(strategy, seed, plan) == ""


FOUND_WHOLE = {
    (280, 6): "a shard that restored its log, cut short by its death, gave up at once on a full disk",
    (353, 6): "the same, while the coordinator's disk came and went",
    (
        2344,
        6,
    ): "the second delivery of a request that had come too early took the caller's place in its group",
    (19, 1): "a worker that came back when no round was left that could be handed over waited for ever",
    (1097, 2): "a run failed, the coordinator died, and its successor did not know that the run had failed",
}
"""Bugs whose plans were not made smaller, by seed and epochs of the bench."""


@pytest.mark.parametrize(("seed", "epochs"), FOUND_WHOLE)
def test_seeds_that_failed_once_pass(seed: int, epochs: int) -> None:
    assert bench.tried(seed, epochs)[1] == ""


def test_what_comes_after_the_end_of_a_run_has_not_fired() -> None:
    early: list[Fault] = [
        Kill("worker-0", 0.3, 0.01),
        Cut("worker-1", "*", 0.2, 0.1),
        Cut("shard-0", "worker-2", 0.3, 0.3, both=False),
        Duplicate("worker-1", "shard-1", 0.5),
        Stop("worker-2", 0.1, 0.1),
        Freeze("shard-1", 0.25, 0.1),
        Slow("worker-1", 0.1, 0.2, 3.0),
        DiskFull("coordinator", 0.2, 0.3),
        Lose("worker-0", "shard-0", 0.05),
        Corrupt("shard-0", "worker-1", 0.2),
        Reorder("worker-2", "shard-0", 0.1),
    ]
    late: list[Fault] = [
        Kill("worker-1", 99.0),
        Drain("worker-2", 99.0),
        Cut("worker-1", "*", 99.0, 0.1),
        *(kind("worker-2", 99.0, 1.0) for kind in (Stop, Freeze)),
        *(Slow("worker-2", 99.0, 1.0, 3.0), DiskFull("coordinator", 99.0, 1.0)),
        # They have nothing to say to each other.
        *(kind("shard-0", "shard-1", 1.0) for kind in (Duplicate, Lose, Corrupt, Reorder)),
    ]
    plan = FaultPlan([*early, *late])
    assert plan.fired == []
    assert bench.violation(gs.Downpour(), 0, plan) == ""
    assert plan.fired == early


def test_the_death_of_the_coordinator_is_a_kind_of_its_own() -> None:
    plan = FaultPlan([Kill("coordinator", 0.3, 0.1)])
    assert bench.violation(gs.Downpour(), 0, plan) == ""
    assert plan.kinds == {"succession": 1}


def test_a_store_that_forgets_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: StateStore, rows: Mapping[str, str], lines: bytes) -> None:
        """Planted: what is said to be stored is not."""

    monkeypatch.setattr(StateStore, "_write", forget)
    plans = [FaultPlan([Kill("coordinator", 0.2 + 0.05 * number, 0.1)]) for number in range(3)]
    assert any(bench.violation(gs.Downpour(), number, plan) for number, plan in enumerate(plans))


def test_the_same_seed_draws_the_same_plan_and_all_kinds_are_drawn() -> None:
    assert bench.plan_of(5).faults == bench.plan_of(5).faults
    drawn = {type(one) for seed in range(100) for one in bench.plan_of(seed).faults}
    assert drawn == {
        *(Kill, Drain, Stop, Freeze, Slow, DiskFull),
        *(Cut, Duplicate, Reorder, Lose, Corrupt),
    }
