"""Figures, curves and timeline of a report. Every expected value can be computed on paper."""

from __future__ import annotations

from typing import Any

import pytest

from gradstream.report import curves
from gradstream.report.charts import Curve, count_text, histogram, line_chart, size_text, ticks, time_text
from gradstream.report.figures import cost_of, figures_of
from gradstream.report.lanes import REST, lanes_of, pieces
from gradstream.run.launcher_lock import LauncherRecord, launcher_lock
from gradstream.run.result import list_runs

Event = dict[str, Any]


def step(rank: int, number: int, time_s: float, **given: Any) -> Event:
    record = {
        "event": "step",
        "node": f"worker-{rank}",
        "time_s": time_s,
        "rank": rank,
        "step": number,
        "epoch": 0,
    }
    record |= {
        "samples": 10,
        "loss": 1.0,
        "compute_s": 0.5,
        "wait_s": 0.5,
        "compute_at_s": 0.25,
        "waited_for": {},
    }
    return record | given


def event(kind: str, node: str, time_s: float, /, **given: Any) -> Event:
    return {"event": kind, "node": node, "time_s": time_s, **given}


def cpu(node: str, time_s: float, user_s: float) -> Event:
    return event(
        "cpu", node, time_s, role="worker", user_s=user_s, system_s=0.0, compute_s={"apply": user_s / 2}
    )


def test_workers_by_rank_with_their_waiting_by_node() -> None:
    steps = [
        step(10, 0, 1.0),
        step(2, 0, 1.0, waited_for={"worker-10": 0.25}),
        step(2, 1, 2.0, waited_for={"worker-10": 0.5}),
    ]
    moved = event("transfer", "worker-2", 2.0, rank=2, kind="push", seconds=0.5, size_bytes=8)
    figures = figures_of([*steps, moved, moved | {"seconds": 1.5}])
    assert [worker.name for worker in figures.workers] == ["worker-2", "worker-10"]
    two = figures.workers[0]
    assert (two.steps, two.samples, two.compute_s, two.wait_s) == (2, 20, 1.0, 1.0)
    assert two.waited_for == {"worker-10": 0.75}
    assert (two.push_s, two.fetch_s) == (1.0, None)
    assert two.compute_s_per_sample == 0.05
    assert (figures.begin_s, figures.end_s, figures.status) == (0.0, 2.0, "unfinished")


def test_links_add_up_and_shards_take_their_last_cpu_seconds() -> None:
    link = event("link", "worker-0", 1.0, rank=0, shard="shard-1", pushed_bytes=4, fetched_bytes=8)
    applied = event("applied", "shard-1", 1.0, rank=1, updates=3, duplicates=0, dropped=0, refused=0)
    figures = figures_of(
        [
            link | {"staleness": {"0": 1}},
            link | {"staleness": {"0": 2, "3": 1}},
            applied,
            applied,
            cpu("shard-1", 1.0, 2.0),
            cpu("shard-1", 3.0, 6.0),
        ]
    )
    (only,) = figures.links
    assert (only.pushed_bytes, only.fetched_bytes) == (8, 16)
    assert [row.histogram for row in figures.staleness] == [{0: 3, 3: 1}]
    (shard,) = figures.shards
    assert (shard.updates, shard.apply_s, shard.cpu_s) == (6, 3.0, 6.0)
    (node,) = figures.nodes
    assert node.cpu == ((3.0, 2.0),)  # 4 CPU seconds in 2 seconds


def test_nodes_that_joined_left_and_were_lost_and_the_cost() -> None:
    events = [
        event("joined", "coordinator", 0.0, who="worker-0", address="10.0.0.1:5", epoch=1),
        event("joined", "coordinator", 0.0, who="worker-1", address="[::2]:5", epoch=1),
        event("left", "coordinator", 5.0, who="worker-1", lost=True, reason="silent", epoch=2),
        event("ledger", "coordinator", 6.0, epoch=0, samples=10, batches=2, reassigned=3),
        event("finished", "coordinator", 1800.0, samples=10, train_s=1800.0),
        step(0, 0, 2.0),
    ]
    figures = figures_of(events)
    assert figures.status == "finished"
    assert figures.hosts == ("10.0.0.1", "::2")
    assert [(one.kind, one.time_s) for one in figures.story] == [
        ("joined", 0.0), ("joined", 0.0), ("lost", 5.0), ("reassigned", 6.0), ("finished", 1800.0),
    ]  # fmt: skip
    assert [node.lost for node in figures.nodes] == [False, True]
    assert cost_of(figures, 3.0) == (3.0, 2)  # two machines, half an hour


def test_a_run_that_was_stopped_and_resumed() -> None:
    saved = event(
        "checkpoint",
        "coordinator",
        3.0,
        step=4,
        folder="checkpoints/step-4",
        size_bytes=8,
        paused_s=0.5,
        total_s=1.0,
    )
    stopped = event("stopped", "coordinator", 3.0, step=4, folder="checkpoints/step-4")
    resumed = event("resumed", "coordinator", 3.0, step=4, folder="checkpoints/step-4", steps={}, samples=8)
    before = [step(0, 0, 1.0), cpu("worker-0", 1.0, 1.0), cpu("worker-0", 2.0, 3.0), saved, stopped]
    assert figures_of(before).status == "stopped"
    after = [*before, resumed, cpu("worker-0", 4.0, 0.5), cpu("worker-0", 5.0, 1.0)]  # another process
    figures = figures_of(after)
    assert figures.status == "unfinished"
    (node,) = figures.nodes
    assert node.cpu_s == 4.0
    assert node.cpu == ((2.0, 2.0), (5.0, 0.5))
    assert [one.kind for one in figures.story] == ["checkpoint", "stopped", "resumed"]
    assert (
        figures_of([*after, event("finished", "coordinator", 6.0, samples=9, train_s=6.0)]).status
        == "finished"
    )


def test_loss_is_a_mean_weighted_by_samples() -> None:
    steps = [
        step(0, n, float(n + 1), loss=loss, samples=s)
        for n, (loss, s) in enumerate([(4.0, 10), (1.0, 30), (None, 5), (2.0, 5)])
    ]
    points = curves.training(steps, max_points=2)
    assert points == [curves.Point(40, 2.0, 1.75), curves.Point(50, 4.0, 2.0)]
    assert len(curves.training(steps)) == 3


def test_evaluations_are_read_where_there_are_any() -> None:
    found = event(
        "evaluated",
        "worker-0",
        3.0,
        step=2,
        epoch=0,
        samples=64,
        accuracy=0.5,
        loss=None,
        metrics={"top5": 0.9},
    )
    assert curves.evaluated([found], "accuracy") == [curves.Point(64, 3.0, 0.5)]
    assert curves.evaluated([found], "loss") == []
    assert curves.evaluated([found], "top5") == [curves.Point(64, 3.0, 0.9)]


def test_throughput_spreads_samples_over_their_step() -> None:
    steps = [step(0, 0, 1.0), step(0, 1, 2.0, samples=30), step(1, 0, 2.0, compute_s=1.0, wait_s=1.0)]
    points = curves.throughput(steps)  # mean step 4/3 s: one interval of 2 s
    assert points == [(1.0, 25.0)]
    steps = [step(0, n, float(n + 1)) for n in range(4)]
    assert curves.throughput(steps) == [(n + 0.5, 10.0) for n in range(4)]
    assert curves.throughput([]) == []


def test_pieces_of_a_step_lie_around_its_gradient() -> None:
    waited = {"worker-1": 0.2, "worker-0": 0.1, "shard-0": 0.1}
    (lane,) = lanes_of([step(0, 0, 1.0, waited_for=waited)]).lanes
    drawn = [(round(p.begin_s, 6), round(p.end_s, 6), p.name) for p in pieces(lane.steps[0], lane.name)]
    # The gradient is at 0.25 to 0.75; own sums follow it; the others fill what is left.
    assert sorted(drawn) == [
        (0.0, 0.2, "worker-1"), (0.2, 0.25, "shard-0"), (0.75, 0.85, "worker-0"), (0.85, 0.9, "shard-0"),
        (0.9, 1.0, REST),
    ]  # fmt: skip


def test_many_steps_are_drawn_as_few_divided_in_proportion() -> None:
    steps = [step(0, n, float(n + 1), waited_for={"shard-0": 0.25}) for n in range(10)]
    timeline = lanes_of(steps, max_steps=5)
    assert timeline.merged == 2
    spans = timeline.lanes[0].steps
    assert [(s.step, s.count, s.begin_s, s.end_s, s.compute_s) for s in spans][1] == (2, 2, 2.0, 4.0, 1.0)
    assert [(p.top, p.bottom, p.name) for p in pieces(spans[1], "worker-0")] == [
        (0.0, 0.25, "shard-0"),
        (0.25, 0.5, REST),
    ]
    assert lanes_of([step(rank, 0, 1.0) for rank in range(5)], max_lanes=3).num_hidden == 2


def test_charts_of_nothing_are_nothing() -> None:
    assert line_chart([Curve("empty", [], "c0")], title="t", x_label="x") == ""
    assert histogram({}, title="t") == ""
    assert 'points="52.0,' in line_chart([Curve("flat", [(0, 1.0), (2, 1.0)], "c0")], title="t", x_label="x")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_units() -> None:
    assert [size_text(n) for n in (12, 1500, 2.5e9)] == ["12 B", "1.5 kB", "2.5 GB"]
    assert [time_text(s) for s in (0, 5e-5, 0.0123, 3.14159, 125, 7260)] == [
        "0 s", "50 µs", "12.3 ms", "3.14 s", "2 min 5 s", "2 h 1 min",
    ]  # fmt: skip
    assert [count_text(n) for n in (950, 12_345, 4_500_000)] == ["950", "12.3k", "4.5M"]


def test_the_runs_of_a_folder(tmp_path: Any) -> None:
    import json

    from gradstream.errors import ConfigError

    finished = event("finished", "coordinator", 2.0, samples=20, train_s=2.0)
    failed = event("failed", "c", 1.0, culprit="worker-0", error="E", message="m", traceback="")
    found = event(
        "evaluated", "worker-0", 2.0, accuracy=0.75, loss=None, metrics={}, samples=20, step=1, epoch=0
    )
    kinds = {"a": [step(0, 0, 1.0), found, finished], "b": [failed], "c": [step(0, 0, 1.0)], "d": []}
    for name, events in kinds.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        lines = "".join(json.dumps(one) + "\n" for one in events)
        (tmp_path / name / "events.jsonl").write_text(lines + '{"event": "torn')
    (tmp_path / "no run").mkdir()
    runs = list_runs(tmp_path)
    assert [(run["path"].name, run["status"]) for run in runs] == [
        ("a", "finished"), ("b", "failed"), ("c", "unfinished"), ("d", "unfinished"),
    ]  # fmt: skip
    assert (runs[0]["accuracy"], runs[0]["train_s"]) == (0.75, 2.0)
    with (
        launcher_lock(tmp_path / "b", LauncherRecord.here(events_from=0)),
        launcher_lock(tmp_path / "c", LauncherRecord.here(events_from=0)),
    ):
        assert [run["status"] for run in list_runs(tmp_path)] == [
            "finished",
            "failed",
            "running",
            "unfinished",
        ]
    assert [run["status"] for run in list_runs(tmp_path)][2:] == ["unfinished", "unfinished"]
    with pytest.raises(ConfigError, match="no such folder"):
        list_runs(tmp_path / "nowhere")
