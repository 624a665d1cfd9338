"""The figures of a run from its events. Every expected value can be computed on paper."""

from __future__ import annotations

from typing import Any

import pytest

from gradstream.report.summary import history_of, staleness_of, summary_of
from gradstream.telemetry import events as ev


def step(rank: int, number: int, time_s: float, **given: Any) -> dict[str, Any]:
    record = {
        "event": "step",
        "node": f"worker-{rank}",
        "time_s": time_s,
        "rank": rank,
        "step": number,
        "epoch": 0,
        "samples": 10,
        "loss": 1.0,
        "compute_s": 0.5,
        "wait_s": 0.25,
    }
    return {**record, **given}


def exchange(rank: int, staleness: dict[str, int]) -> dict[str, Any]:
    return {
        "event": "exchange",
        "node": f"worker-{rank}",
        "time_s": 3.0,
        "rank": rank,
        "pushed_bytes": 100,
        "fetched_bytes": 200,
        "pushes": 1,
        "fetches": 2,
        "retries": 0,
        "staleness": staleness,
    }


def cpu(node: str, role: str, user_s: float, kinds: dict[str, float]) -> dict[str, Any]:
    record = {"event": "cpu", "node": node, "time_s": 1.0, "role": role, "user_s": user_s, "system_s": 0.5}
    return {**record, "compute_s": kinds}


def test_a_run_without_events_has_no_figures() -> None:
    summary = summary_of([])
    assert summary["steps"] == 0
    assert summary["samples_per_s"] is None
    assert summary["staleness_mean"] is None
    assert summary["failed"] is None


def test_rows_are_in_the_order_of_time() -> None:
    rows = history_of([step(1, 0, 2.0), {"event": "late"}, step(0, 0, 1.0)])
    assert [row["rank"] for row in rows] == [0, 1]
    assert set(rows[0]) >= {"step", "epoch", "rank", "samples", "loss", "time_s"}


def test_rate_is_samples_over_the_train_time_that_the_coordinator_measured() -> None:
    finished = {"event": "finished", "node": "coordinator", "time_s": 9.0, "samples": 20, "train_s": 4.0}
    summary = summary_of([step(0, 0, 1.0), step(1, 0, 1.5), finished])
    assert summary["train_s"] == 3.75  # the first step began at 1.0 - 0.5 - 0.25
    assert summary["samples_per_s"] == 20 / 3.75
    assert summary["samples_accounted"] == 20


def test_a_run_cut_short_is_timed_by_its_steps() -> None:
    summary = summary_of([step(0, 0, 1.0), step(0, 1, 2.5)])
    assert summary["train_s"] == 2.25  # from 1.0 - 0.5 - 0.25 to 2.5
    assert summary["samples_accounted"] is None


def test_loss_is_the_mean_over_samples_of_the_last_epoch() -> None:
    steps = [
        step(0, 0, 1.0, loss=9.0),
        step(0, 1, 2.0, epoch=1, loss=1.0, samples=30),
        step(1, 1, 2.0, epoch=1, loss=3.0, samples=10),
        step(2, 1, 2.0, epoch=1, loss=None, samples=10),
    ]
    assert summary_of(steps)["loss"] == 1.5


def test_staleness_adds_up_over_workers() -> None:
    events = [exchange(0, {"0": 3, "2": 1}), exchange(1, {"2": 4})]
    assert staleness_of(events) == {0: 3, 2: 5}
    summary = summary_of(events)
    assert summary["staleness_mean"] == pytest.approx(10 / 8)
    assert summary["staleness_max"] == 2
    assert (summary["pushed_bytes"], summary["fetched_bytes"], summary["fetches"]) == (200, 400, 4)


def test_cpu_counts_each_process_once_and_adds_up_roles() -> None:
    events = [
        cpu("worker-0", "worker", 1.0, {"gradient": 0.5}),
        cpu("worker-0", "worker", 3.0, {"gradient": 2.0}),
        cpu("worker-1", "worker", 2.0, {"gradient": 1.0, "copy": 0.25}),
        cpu("shard-0", "shard", 1.0, {"apply": 1.0}),
    ]
    summary = summary_of(events)
    assert summary["cpu_s"] == {"shard": 1.5, "worker": 6.0}
    assert summary["cpu_work_s"]["worker"] == {"gradient": 3.0, "copy": 0.25}


def test_losses_and_failures_are_named() -> None:
    left = {
        "event": "left",
        "node": "coordinator",
        "time_s": 1.0,
        "lost": True,
        "reason": "silent",
        "epoch": 2,
    }
    failed = {"event": "failed", "node": "coordinator", "time_s": 1.0, "culprit": "worker-1"}
    failed |= {"error": "PeerLostError", "message": "gone", "traceback": ""}
    summary = summary_of([{**left, "who": "worker-1"}, {**left, "who": "worker-0", "lost": False}, failed])
    assert summary["workers_lost"] == ["worker-1"]
    assert summary["failed"] == {"culprit": "worker-1", "error": "PeerLostError", "message": "gone"}


def test_real_events_are_understood() -> None:
    """What nodes encode is what is read here: no name of a field has drifted."""
    import json

    records: list[ev.Event] = [
        ev.StartedEvent(
            job="j",
            workers=1,
            servers=1,
            strategy="downpour",
            optimizer="sgd",
            num_parameters=3,
            num_samples=4,
            total_steps=2,
        ),
        ev.StepEvent(rank=0, step=0, epoch=0, samples=4, loss=float("nan"), compute_s=0.1, wait_s=0.0),
        ev.ExchangeEvent(
            rank=0, pushed_bytes=1, fetched_bytes=1, pushes=1, fetches=1, retries=0, staleness={"1": 1}
        ),
        ev.AppliedEvent(rank=0, updates=1, duplicates=0, dropped=0, refused=0, min_version=1, max_version=1),
        ev.LedgerEvent(epoch=0, samples=4, batches=1, reassigned=0),
        ev.CpuEvent(role="worker", user_s=1.0, system_s=0.0),
        ev.LoopLagEvent(role="worker", p99_ms=1.0, max_ms=2.0),
        ev.MemoryEvent(role="worker", peak_bytes=7, peak_own_bytes=5),
        ev.FinishedEvent(samples=4, train_s=2.0),
    ]
    summary = summary_of([json.loads(ev.encode(r, node="worker-0", time_s=1.0)) for r in records])
    assert summary["samples_per_s"] == pytest.approx(4 / 1.1)  # the first step began at 0.9
    assert summary["loss"] is None
    assert summary["updates"] == 1
    assert summary["peak_memory_bytes"] == {"worker-0": 7}
    assert summary["loop_late_max_ms"] == {"worker": 2.0}
