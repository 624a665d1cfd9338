"""Staleness by worker and shard: counted by hand, and shown wherever a run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.report.staleness import quantile, staleness_by
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.testing.runs import least_squares


def link(worker: int, shard: int, counts: dict[str, int]) -> dict[str, Any]:
    return {"event": "link", "node": f"worker-{worker}", "shard": f"shard-{shard}", "staleness": counts}


EVENTS = [
    link(0, 0, {"0": 1, "2": 1}),
    link(10, 1, {"7": 1}),
    link(2, 1, {"1": 4}),
    link(0, 0, {"2": 2}),
    link(0, 1, {}),
]


def test_rows_are_by_worker_and_shard_or_summed() -> None:
    rows = list(staleness_by(EVENTS))
    assert [(row.worker, row.shard, row.chunks) for row in rows] == [
        ("worker-0", "shard-0", 4), ("worker-2", "shard-1", 4), ("worker-10", "shard-1", 1),
    ]  # fmt: skip
    assert rows[0].histogram == {0: 1, 2: 3}
    assert (rows[0].mean, rows[0].p50, rows[0].p99, rows[0].largest) == (1.5, 2, 2, 2)
    assert [row.histogram for row in staleness_by(EVENTS, "shard")] == [{0: 1, 2: 3}, {1: 4, 7: 1}]
    assert [row.worker for row in staleness_by(EVENTS, "worker")] == ["worker-0", "worker-2", "worker-10"]
    (whole,) = staleness_by(EVENTS, "run")
    assert str(whole) == "mean 1.89, p50 1, p99 7, largest 7"


def test_quantiles_are_values_that_occur() -> None:
    counts = {0: 50, 3: 49, 9: 1}
    assert [quantile(counts, share) for share in (0.0, 0.5, 0.51, 0.99, 1.0)] == [0, 0, 3, 3, 9]
    assert quantile({}, 0.5) == 0


@pytest.fixture(scope="module")
def run() -> gs.Run:
    model, data = least_squares(48, 130)
    config = SimulationConfig(costs={"gradient": Cost(base_s=0.1)}, speeds={"worker-2": 0.25})
    return simulate(
        model,
        data,
        strategy="downpour",
        workers=3,
        servers=2,
        batch_size=2,
        epochs=4,
        chunk_elems=64,
        config=config,
    )


def test_the_table_shows_a_slow_worker_with_the_counted_staleness(run: gs.Run) -> None:
    by_worker = {row.worker: row.mean for row in run.staleness("worker")}
    assert by_worker["worker-2"] > 1.4 * max(by_worker["worker-0"], by_worker["worker-1"])
    (whole,) = run.staleness("run")
    assert whole.histogram == run.summary["staleness"]
    assert sum(row.chunks for row in run.staleness()) == whole.chunks
    assert len(run.staleness()) == 6
    assert "worker-2" in repr(run.staleness()) and "p99" in repr(run.staleness())
    assert run.staleness()._repr_html_().count("<svg") == 6
    assert f"p99 {whole.p99}, largest {whole.largest}" in repr(run)


def test_the_report_and_the_trace_show_it(run: gs.Run, tmp_path: Path) -> None:
    page = run.report(tmp_path / "report.html").read_text()
    for row in [*run.staleness(), *run.staleness("worker"), *run.staleness("shard"), *run.staleness("run")]:
        assert str(row) in page
    trace = json.loads(run.trace(tmp_path / "trace.json").read_text())["traceEvents"]
    seen = [one["args"]["largest"] for one in trace if one["name"] == "staleness"]
    assert max(seen) == run.summary["staleness_max"]


def test_of_shared_memory_minibatches_are_counted(tmp_path: Path) -> None:
    model, data = least_squares(48, 130)
    run = simulate(model, data, strategy="hogwild", workers=3, batch_size=2, epochs=1)
    (whole,) = run.staleness("run")
    assert whole.histogram == run.summary["staleness"] and whole.chunks == 24 and whole.mean > 1
    assert [(row.worker, row.shard) for row in run.staleness()] == [
        (f"worker-{i}", "memory") for i in range(3)
    ]
    page = run.report(tmp_path / "report.html").read_text()
    for row in [*run.staleness(), whole]:
        assert str(row) in page
    assert "bars count minibatches" in page


def test_a_strategy_without_servers_has_none(tmp_path: Path) -> None:
    model, data = least_squares(48, 130)
    run = simulate(model, data, strategy="allreduce", workers=3, epochs=1)
    assert not run.staleness() and "none" in repr(run.staleness())
    assert "None: workers sum" in run.report(tmp_path / "report.html").read_text()
