"""The study: what is due follows from what is there, and its page says what the record says."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradstream.data.base import BatchRef, PartitionSpec

Modules = Any
TABLE = re.compile(r"<!-- begin: (.+?) -->.*?<!-- end: \1 -->", re.DOTALL)
PERCENT = re.compile(r"\d+\.\d %")


@pytest.fixture
def study(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Modules:
    """The package studies/async_study/study."""
    for folder in ("bench", "studies/async_study"):
        monkeypatch.syspath_prepend(str(repository / folder))
    for name in ("findings", "ledger", "methods", "page", "runs", "scenes", "subject"):
        importlib.import_module(f"study.{name}")
    return importlib.import_module("study")


def a_scene(study: Modules, *names: str, **fields: Any) -> Any:
    """Of these methods: two rates over a fifth of 10 epochs, the better one under two seeds."""
    given = {"rates": (0.1, 1.0), "rungs": ((0.2, 1),), "seeds": (1, 2), **fields}
    methods = tuple(study.methods.BY_NAME[name] for name in names)
    return study.scenes.Scene("equal", "Equal machines", methods, **given)


def a_row(key: Any, accuracy: float, *, epoch_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    """A finished run whose accuracy grows evenly over its epochs, 10 evaluations."""
    begin, epochs = 0.1, key.epochs
    curve = [
        [450 * epochs * at, epoch_s * epochs * at / 10, begin + (accuracy - begin) * at / 10]
        for at in range(1, 11)
    ]
    return {
        **asdict(key),
        "accuracy": accuracy,
        "failed": None,
        "curve": curve,
        "virtual_s": epoch_s * epochs,
        "staleness_mean": 29.0,
        "staleness_max": 33,
        "updates": 10,
        "moved_bytes": 8.0,
        "cpu_s": 1.0,
        "commit": "c0ffee",
        **fields,
    }


def worked_off(study: Modules, scene: Any, accuracy: Any, **fields: Any) -> dict[Any, Any]:
    """All rows of a scene, in the order in which they come due."""
    rows: dict[Any, Any] = {}
    while (key := study.ledger.due([scene], rows, ())) is not None:
        rows[key] = a_row(key, accuracy(key), **fields)
    return rows


def test_rates_are_halved_then_the_best_one_comes_under_other_seeds(study: Modules) -> None:
    rungs = ((0.1, 2), (0.5, 1))
    scene = a_scene(study, "downpour", rates=(0.01, 0.1, 1.0), rungs=rungs)
    # The best rate of the first rung is not that of the second one.
    scores = {0.01: (0.2, 0.2), 0.1: (0.7, 0.8), 1.0: (0.75, 0.5)}
    rows = worked_off(study, scene, lambda key: scores[key.lr][key.epochs > 1.0])
    assert [(key.lr, key.seed, key.epochs) for key in rows] == [
        *((lr, 0, 1.0) for lr in (0.01, 0.1, 1.0)),
        *((lr, 0, 5.0) for lr in (0.1, 1.0)),
        *((0.1, seed, 10.0) for seed in (1, 2)),
    ]
    unit = study.ledger.Unit(scene, scene.methods[0], scene.epochs)
    assert study.ledger.best_rate(unit, rows) == 0.1
    assert study.ledger.best_rate(unit, {}) is None


def test_a_slower_method_is_run_again_for_as_long_as_the_clock_takes(study: Modules) -> None:
    scene = a_scene(study, "downpour", "synchronous", timed=("synchronous",))
    rows: dict[Any, Any] = {}
    while (key := study.ledger.due([scene], rows, ())) is not None:
        rows[key] = a_row(key, 0.8, epoch_s=2.0 if key.method == "synchronous" else 1.0)
    assert study.ledger.equal_s(scene, rows) == pytest.approx(10.0)
    timed = next(unit for unit in study.ledger.units(scene, rows) if unit.timed)
    assert (timed.name, timed.epochs) == ("synchronous-timed", 5.0)
    assert {key.epochs for key in rows if key.method == "synchronous"} == {2.0, 10.0, 1.0, 5.0}
    found = study.findings.findings(scene, rows)["units"]["synchronous-timed"]
    assert found["virtual_s"] == pytest.approx(10.0)


def test_who_borrows_a_rate_is_not_tuned(study: Modules) -> None:
    scene = a_scene(study, "single", "downpour", borrowed="single")
    rows = worked_off(study, scene, lambda key: 0.8 if key.lr == 1.0 else 0.5)
    assert [(key.lr, key.seed) for key in rows if key.method == "downpour"] == [(1.0, 1), (1.0, 2)]


def test_every_method_can_be_made(study: Modules) -> None:
    for scene in study.scenes.SCENES:
        names = [method.name for method in scene.methods]
        assert len(names) == len(set(names))
        for method in scene.methods:
            assert method.made() is not None
            rule = method.optimizer(0.1, 8.0)
            assert rule is None or rule.lr is not None  # a batch method has no rate to tune
    every = [*study.methods.METHODS, *study.methods.POWERS]
    assert {method.exponent for method in every} - {None} == set(study.methods.EXPONENTS)


def test_a_rate_is_not_chosen_by_the_images_that_are_reported(study: Modules) -> None:
    select, report = study.subject.data("select"), study.subject.data("report")
    held_out = [one.test_batch(np.arange(one.num_test_samples)).inputs for one in (select, report)]
    train = select.batch(np.arange(select.num_samples)).inputs
    np.testing.assert_array_equal(train, report.batch(np.arange(report.num_samples)).inputs)
    images = [{image.tobytes() for image in np.asarray(one)} for one in (*held_out, train)]
    assert [len(one) for one in images] == [500, 1000, 4500]
    assert not images[0] & images[1] and not images[0] & images[2]
    assert {scene.data(study.scenes.TUNING_SEED).num_test_samples for scene in study.scenes.SCENES[:1]} == {
        500
    }


@pytest.mark.parametrize("cut", ["partitions", "rounds"])
def test_each_worker_keeps_its_own_classes(study: Modules, cut: Any) -> None:
    data = study.subject.data(by_label=True)
    plan = data.plan(
        PartitionSpec(partitioning=cut, batch_size=4, workers=30, seed=7, shares=None, epochs=2, steps=None)
    )
    seen = []
    for worker in range(30):
        ids = [
            plan.ids(BatchRef(epoch, worker, batch))
            for epoch in range(2)
            for batch in range(plan.batches_in(worker, epoch))
        ]
        own = np.unique(np.concatenate(ids))
        assert len(own) == 150
        assert len(np.unique(data.batch(own).targets)) <= 2
        seen.append(own)
    assert len(np.unique(np.concatenate(seen))) == 4500


def test_figures_of_a_method(study: Modules) -> None:
    scene = a_scene(study, "downpour", "synchronous", rates=(0.1, 0.3, 1.0))
    tuned = {0.1: 0.9, 0.3: 0.89, 1.0: 0.1}
    reported = {"downpour": {1: 0.86, 2: 0.90}, "synchronous": {1: 0.84, 2: 0.87}}
    rows = worked_off(study, scene, lambda key: reported[key.method][key.seed] if key.seed else tuned[key.lr])
    found = study.findings.findings(scene, rows)["units"]["downpour"]
    assert found["rate"] == 0.1 and found["at_edge"]
    assert found["near"] == pytest.approx(2 / 3)
    assert found["accuracy"] == pytest.approx(0.88)
    assert found["deviation"] == pytest.approx(0.02 * 2**0.5)
    assert found["iteration_s"] == pytest.approx(study.findings.ITERATION / 4500)
    # 0.1 + 0.76 t and 0.1 + 0.8 t reach the target.
    share = study.ledger.TARGET - 0.1
    assert found["seconds"] == pytest.approx(10 * (share / 0.76 + share / 0.8) / 2)
    # Seed by seed 0.02 and 0.03 more: 0.025, give or take t / sqrt(2) deviations.
    mean, half = found["minus"]["synchronous"]
    assert mean == pytest.approx(0.025)
    assert half == pytest.approx(12.706 * 0.005 * 2**0.5 / 2**0.5)


def test_who_does_not_reach_the_target_under_every_seed_has_no_time(study: Modules) -> None:
    scene = a_scene(study, "downpour")
    rows = worked_off(study, scene, lambda key: 0.9 if key.seed != 2 else 0.5)
    found = study.findings.findings(scene, rows)["units"]["downpour"]
    assert (found["seconds"], found["reached"]) == (None, 1)


def test_a_difference_within_its_interval_is_said_to_be_none(study: Modules) -> None:
    assert study.page._difference((0.01, 0.004)) == "+1.0 ± 0.4"
    assert study.page._difference((-0.003, 0.004)) == "-0.3 ± 0.4 ="


def test_a_run_that_broke_down_never_reaches_anything(study: Modules) -> None:
    row = a_row(study.runs.Key("equal", "downpour", 3.0, 0, 10.0), 0.1, failed="GradientError")
    assert study.ledger.seconds_to(row, 0.5) is None


def test_a_study_that_was_stopped_goes_on_where_it_was(study: Modules, tmp_path: Path) -> None:
    scene, path = a_scene(study, "downpour", "single"), tmp_path / "rows.jsonl"
    keys = [study.runs.Key("equal", "downpour", lr, 0, 2.0) for lr in (0.1, 1.0)]
    lines = [json.dumps(a_row(key, 0.5)) for key in keys]
    path.write_text(lines[0] + "\n" + lines[1][:40])  # stopped in the middle of a line
    study.ledger.work_off(
        lambda rows, begun: study.ledger.due([scene], rows, begun),
        lambda key: a_row(key, 0.6, cpu_s=2.0),
        path,
        processes=2,
    )
    rows = study.ledger.read_rows(path)
    assert len(rows) == len(path.read_text().splitlines()) == 2 * (2 + 2)
    assert [key for key, row in rows.items() if row["cpu_s"] == 1.0] == keys[:1]


def test_a_run_that_fails_otherwise_ends_the_study(
    study: Modules, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = study.runs.Key("equal", "downpour", 0.1, 0, 10.0)

    def work(key: Any) -> Any:
        raise ValueError("no such network")

    with pytest.raises(SystemExit, match=r"downpour.*the run failed"):
        study.ledger.work_off(
            lambda rows, begun: None if begun else key, work, tmp_path / "rows.jsonl", processes=1
        )
    assert "no such network" in capfd.readouterr().err


def test_a_small_study_runs(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "studies/async_study/async_study.py", "--quick", "--into", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=repository, env=environment, check=True, capture_output=True, timeout=200)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["complete"]
    tuned = record["scenes"]["equal"]["units"]["downpour"]
    assert tuned["rate"] == 0.01
    assert tuned["failed"] == ["3"]
    assert tuned["accuracy"] > 0.5
    assert tuned["staleness_mean"] > 25
    for found in record["scenes"]["figure-4"]["units"].values():
        begin, end = found["curve"][0], found["curve"][-1]
        assert begin[:2] == [0, 0.0]  # the common warm start
        assert 0.7 < begin[2] < end[2]
        assert begin[3] < end[3]
        assert 18.0 < found["staleness_mean"] < 19.0  # of 20 replicas, the first pushes of which are fresher


@pytest.mark.parametrize("name", ["study", "distbelief"])
def test_percentages_in_the_text_are_in_the_tables(study: Modules, name: str) -> None:
    page = study.page.path_of(name).read_text()
    tables = "".join(found[0] for found in TABLE.finditer(page))
    assert tables
    assert set(PERCENT.findall(TABLE.sub("", page))) <= set(PERCENT.findall(tables))


def test_pages_say_what_the_record_says(study: Modules, repository: Path) -> None:
    record = json.loads((repository / "studies/async_study/record.json").read_text())
    pages = study.page.tables(record)
    assert len(pages) == 2 + len(study.page.OWN)
    for name, tables in pages.items():
        page = study.page.path_of(name).read_text()
        for place, text in tables.items():
            assert f"<!-- begin: {place} -->\n{text}\n<!-- end: {place} -->" in page, (name, place)
