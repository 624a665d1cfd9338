"""The demo learns, without network and data of one's own."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream.cli.demo import (
    BATCH_SIZE,
    COUNTERS,
    EACH,
    IMAGES,
    KillSchedule,
    broken_promises,
    run_with_faults,
    table_of,
)
from gradstream.job.files import load_job
from gradstream.report.charts import WIDTH, legend
from gradstream.report.story import deaths_of


def test_the_loss_of_the_demo_falls() -> None:
    run = gs.simulate(load_job("gradstream.cli.demo:job"), epochs=None, steps=60)
    losses = [row["loss"] for row in run.history]
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:20])  # 1.07 and 2.13


def test_the_schedule_of_kills_is_drawn_from_a_seed_and_spares_the_last_worker() -> None:
    workers = ["worker-0", "worker-1", "worker-2"]
    drawn = list(KillSchedule(7, workers).left)
    assert drawn == list(KillSchedule(7, workers).left) != list(KillSchedule(8, workers).left)
    assert Counter(node for _, node in drawn) == {
        "coordinator": 1,
        "shard-1": 1,
        **dict.fromkeys(workers, EACH),
    }
    schedule = KillSchedule(7, workers)
    assert schedule.due(0.5, set(workers)) is None
    at_s, first = drawn[0]
    assert schedule.due(at_s, {first}) is None  # the last one
    assert schedule.due(at_s, {*workers} - {first}) is None  # it does not take part
    assert schedule.due(at_s, set(workers)) == first
    assert schedule.due(at_s, set(workers)) is None


def test_deaths_are_read_from_events() -> None:
    def event(kind: str, time_s: float, node: str = "launcher", **rest: Any) -> dict[str, Any]:
        return {"event": kind, "time_s": time_s, "node": node, **rest}

    events = [
        event("joined", 0.0, who="worker-1"),
        event("step", 0.9, "worker-1"),
        event("left", 1.25, who="worker-1", lost=True),
        event("exited", 1.0, who="worker-1", status=-9),  # known later
        event("step", 1.05, "worker-1"),  # of the dead process, reported late
        event("joined", 1.5, who="worker-1"),
        event("step", 1.75, "worker-1"),
        event("exited", 2.0, who="coordinator", status=-9),
        event("exited", 2.5, who="worker-1", status=-9),
        event("coordinator", 3.0),
        event("exited", 4.0, who="worker-0", status=75),
        event("exited", 4.5, who="shard-1", status=-9),
        event("joined", 4.75, who="shard-1"),
        event("restored", 5.0, "shard-1"),
    ]
    first, second, third, fourth = deaths_of(events)
    assert (first.who, first.noticed_s, first.back_s) == ("worker-1", 0.25, 0.75)
    assert (second.who, second.noticed_s, second.back_s) == ("coordinator", None, 1.0)
    assert (third.who, third.noticed_s, third.back_s) == ("worker-1", None, None)
    assert (fourth.who, fourth.back_s) == ("shard-1", 0.5)
    assert [line.split() for line in table_of([first])][1] == [
        "worker-1",
        "1.0",
        "s",
        "0.25",
        "s",
        "0.75",
        "s",
    ]


def test_the_keys_of_a_picture_lie_beside_one_another_in_every_font() -> None:
    keys = {"c0": "loss, with kills", "c1": "a worker dies", "c2": "W" * 40, "c3": "a", "c4": "one & another"}
    told = "\n".join(legend(keys))
    marks = [float(x) for x in re.findall(r'<line class="line c\d" x1="([\d.]+)"', told)]
    texts = [
        (float(x), float(long)) for x, long in re.findall(r'<text x="([\d.]+)".* textLength="([\d.]+)"', told)
    ]
    assert len(marks) == len(texts) == len(keys) and "one &amp; another" in told
    ends = [x + long for x, long in texts]
    assert all(end < mark for end, mark in zip(ends, marks[1:], strict=False))
    assert marks[0] >= 0 and max(ends) <= WIDTH


def test_a_broken_promise_is_said() -> None:
    """Planted: an image counts twice, one is missing on one shard, a chunk lacks a push, a minibatch has no receipt."""
    epochs = 2
    whole = {name: np.full(IMAGES, epochs, np.float32) for name in COUNTERS}
    pushes = epochs * IMAGES // BATCH_SIZE
    versions = [{"event": "applied", "node": "shard-0", "min_version": pushes, "max_version": pushes}]

    def run(parameters: Any, events: Any, accounted: int = epochs * IMAGES) -> Any:
        summary = {"samples_accounted": accounted}
        return SimpleNamespace(parameters=parameters, events=events, summary=summary)

    assert broken_promises(run(whole, versions), epochs) == []
    twice, missing = (
        {**whole, COUNTERS[0]: whole[COUNTERS[0]] + np.eye(IMAGES, dtype="f4")[3] * by} for by in (1, -1)
    )
    assert "too often" in broken_promises(run(twice, versions), epochs)[0]
    assert "missing" in broken_promises(run(missing, versions), epochs)[0]
    torn = [{**versions[0], "min_version": pushes - 1}]
    assert "shard-0 have had" in broken_promises(run(whole, torn), epochs)[0]
    assert "receipt" in broken_promises(run(whole, versions, 7), epochs)[0]


@pytest.mark.process  # which its command starts
@pytest.mark.limit_s(300)
def test_processes_are_killed_and_each_image_is_in_the_model_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradstream.cli.demo.GAP_S", (0.3, 0.6))
    monkeypatch.setattr("gradstream.cli.demo.EACH", 1)
    assert run_with_faults(seed=1, epochs=1)
    said = capsys.readouterr()
    assert "kill -9" in said.err
    assert "each of 5,000 images is in the model 1 times" in said.out
    (drawn,) = tmp_path.glob("runs/*/faults.svg")
    assert "is killed" in drawn.read_text()
