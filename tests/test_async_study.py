"""The study: what is due follows from what is there, and its page says what the record says."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Modules = Any
TABLE = re.compile(r"<!-- begin: (.+?) -->.*?<!-- end: \1 -->", re.DOTALL)
PERCENT = re.compile(r"\d+\.\d %")


@pytest.fixture
def study(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Modules:
    """The package bench/study."""
    monkeypatch.syspath_prepend(str(repository / "bench"))
    for name in ("findings", "ledger", "methods", "page", "runs", "subject"):
        importlib.import_module(f"study.{name}")
    return importlib.import_module("study")


def a_row(study: Modules, key: Any, accuracy: float, **fields: Any) -> dict[str, Any]:
    """A finished run whose accuracy grows evenly over 10 epochs of a second each."""
    chance = study.runs.CHANCE
    curve = [[500 * e, float(e), chance + (accuracy - chance) * e / 10] for e in range(1, 11)]
    row = {
        "accuracy": accuracy,
        "failed": None,
        "curve": curve,
        "virtual_s": 10.0,
        "staleness_mean": 29.0,
        "staleness_max": 33,
        "updates": 10,
        "moved_bytes": 8.0,
    }
    return {"method": key.method, "lr": key.lr, "seed": key.seed, "epochs": key.epochs, **row, **fields}


def test_the_grid_comes_first_then_the_best_rate_under_other_seeds(study: Modules) -> None:
    budget = study.ledger.Budget(rates=(0.1, 1.0), epochs=10, tuning_seed=0, seeds=(1, 2))
    methods = [one for one in study.methods.METHODS if one.name == "downpour"]
    rows: dict[Any, Any] = {}
    done = []
    while (key := study.ledger.due(methods, rows, (), budget)) is not None:
        done.append((key.lr, key.seed))
        rows[key] = a_row(study, key, 0.8 if key.lr == 0.1 else 0.1)
    assert done == [(0.1, 0), (1.0, 0), (0.1, 1), (0.1, 2)]
    assert study.ledger.best_rate(rows, "downpour", budget) == 0.1
    assert study.ledger.best_rate({}, "downpour", budget) is None


def test_every_method_can_be_made(study: Modules) -> None:
    names = [method.name for method in study.methods.METHODS]
    assert len(names) == len(set(names))
    for method in study.methods.METHODS:
        assert method.made() is not None
        assert method.optimizer(0.1, 8.0).lr is not None
    compared = {method.exponent for method in study.methods.METHODS} - {None}
    assert compared == set(study.methods.EXPONENTS)


def test_figures_of_a_method(study: Modules) -> None:
    budget = study.ledger.Budget(rates=(0.1, 0.3, 1.0), epochs=10, tuning_seed=0, seeds=(1, 2))
    methods = [one for one in study.methods.METHODS if one.name == "downpour"]
    key = study.runs.Key
    rows = {}
    for lr, seed, accuracy in ((0.1, 0, 0.9), (0.3, 0, 0.89), (1.0, 0, 0.1), (0.1, 1, 0.86), (0.1, 2, 0.90)):
        one = key("downpour", lr, seed, 10)
        rows[one] = a_row(study, one, accuracy)
    found = study.findings.findings(methods, rows, budget)["methods"]["downpour"]
    assert found["rate"] == 0.1
    assert found["near"] == pytest.approx(2 / 3)
    assert found["accuracy"] == pytest.approx(0.88)
    assert found["deviation"] == pytest.approx(0.02 * 2**0.5)
    assert found["iteration_s"] == pytest.approx(10.0 * study.findings.ITERATION / 5000)
    # 0.1 + 0.76 t and 0.1 + 0.8 t reach the target; both factors make the time.
    share = study.findings.TARGET - 0.1
    assert found["iterations"] == pytest.approx(5000 / 120 * (share / 0.76 + share / 0.8) / 2)
    assert found["seconds"] == pytest.approx(10 * (share / 0.76 + share / 0.8) / 2)
    assert found["at_equal_s"] == pytest.approx(0.88)  # its own end is the equal time


def test_a_run_that_broke_down_is_chance(study: Modules) -> None:
    row = a_row(study, study.runs.Key("downpour", 3.0, 0, 10), 0.1, failed="GradientError")
    assert study.findings.at_time(row, 5.0) == study.runs.CHANCE
    assert study.findings.samples_to(row, 0.5) is None


def test_a_study_that_was_stopped_goes_on_where_it_was(study: Modules, tmp_path: Path) -> None:
    budget = study.ledger.Budget(rates=(0.1, 1.0), epochs=10, tuning_seed=0, seeds=(1, 2))
    methods = [one for one in study.methods.METHODS if one.name in ("downpour", "single")]
    path = tmp_path / "rows.jsonl"
    first = [a_row(study, study.runs.Key("downpour", lr, 0, 10), 0.5, wall_s=1.0) for lr in (0.1, 1.0)]
    lines = [json.dumps(row) for row in first]
    path.write_text(lines[0] + "\n" + lines[1][:40])  # stopped in the middle of a line

    def due(rows: Any, begun: Any) -> Any:
        return study.ledger.due(methods, rows, begun, budget)

    def work(key: Any) -> Any:
        return a_row(study, key, 0.6, wall_s=2.0)

    study.ledger.work_off(due, work, path, processes=2)
    rows = study.ledger.read_rows(path)
    assert len(rows) == len(path.read_text().splitlines()) == 2 * (2 + 2)
    assert [key for key, row in rows.items() if row["wall_s"] == 1.0] == [
        study.runs.Key("downpour", 0.1, 0, 10)
    ]


def test_a_run_that_fails_otherwise_ends_the_study(
    study: Modules, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = study.runs.Key("downpour", 0.1, 0, 10)

    def work(key: Any) -> Any:
        raise ValueError("no such network")

    with pytest.raises(SystemExit, match=r"downpour.*the run failed"):
        study.ledger.work_off(
            lambda rows, begun: None if begun else key, work, tmp_path / "rows.jsonl", processes=1
        )
    assert "no such network" in capfd.readouterr().err


def test_a_small_study_runs(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "bench/async_study.py", "--quick", "--into", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=repository, env=environment, check=True, capture_output=True, timeout=100)
    assert len((tmp_path / "async-study.jsonl").read_text().splitlines()) == 2 * (2 + 1)
    record = json.loads((tmp_path / "async-study.json").read_text())
    tuned = record["findings"]["methods"]["downpour"]
    assert tuned["rate"] == 0.01
    assert tuned["failed"] == ["3"]
    assert tuned["accuracy"] > 0.6
    assert tuned["staleness_mean"] > 25


@pytest.mark.parametrize("name", ["study", "distbelief"])
def test_percentages_in_the_text_are_in_the_tables(repository: Path, name: str) -> None:
    page = (repository / "docs" / "strategies" / f"{name}.md").read_text()
    tables = "".join(found[0] for found in TABLE.finditer(page))
    assert tables
    assert set(PERCENT.findall(TABLE.sub("", page))) <= set(PERCENT.findall(tables))


def test_what_other_pages_say_of_the_study_is_in_its_tables(repository: Path) -> None:
    folder = repository / "docs" / "strategies"
    tables = "".join(found[0] for found in TABLE.finditer((folder / "study.md").read_text()))
    pages = [page for page in folder.glob("*.md") if page.stem not in ("index", "study", "distbelief")]
    about = [
        paragraph
        for page in pages
        for paragraph in page.read_text().split("\n\n")
        if "async_study.py" in paragraph and "](study.md)" in paragraph
    ]
    assert len(about) == 8
    for paragraph in about:
        assert PERCENT.findall(paragraph)
        assert set(PERCENT.findall(paragraph)) <= set(PERCENT.findall(tables)), paragraph


def test_a_small_figure_runs(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "bench/distbelief_figures.py", "--quick", "--into", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=repository, env=environment, check=True, capture_output=True, timeout=100)
    record = json.loads((tmp_path / "distbelief.json").read_text())
    for rule in ("sgd", "adagrad"):
        found = record["findings"][f"{rule}-5"]
        begin, end = found["curve"][0], found["curve"][-1]
        assert begin[:2] == [0, 0.0]  # the common warm start
        assert 0.7 < begin[2] < end[2]
        assert begin[3] < end[3]
        assert found["staleness_mean"] == pytest.approx(4.0, abs=0.1)


def test_the_figures_page_says_what_the_record_says(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_path = repository / "bench" / "results" / "distbelief.json"
    monkeypatch.syspath_prepend(str(repository / "bench"))
    figures: Any = importlib.import_module("distbelief_figures")
    page = (repository / "docs" / "strategies" / "distbelief.md").read_text()
    for name, text in figures.tables(json.loads(record_path.read_text())).items():
        assert f"<!-- begin: {name} -->\n{text}\n<!-- end: {name} -->" in page, name


def test_the_page_says_what_the_record_says(study: Modules, repository: Path) -> None:
    record_path = repository / "bench" / "results" / "async-study.json"
    record = json.loads(record_path.read_text())
    page = (repository / "docs" / "strategies" / "study.md").read_text()
    for name, text in study.page.study_tables(record).items():
        assert f"<!-- begin: {name} -->\n{text}\n<!-- end: {name} -->" in page, name
