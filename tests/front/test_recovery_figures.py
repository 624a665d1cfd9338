"""What `bench/recovery.py` and `studies/tax/tax.py` make of events and times, on planted ones."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of bench/ or of a study, by name."""
    for folder in ("bench", "studies/storm", "studies/tax"):
        monkeypatch.syspath_prepend(str(repository / folder))
    return importlib.import_module


def step(node: str, begun_s: float, took_s: float = 0.1) -> dict[str, Any]:
    return {"event": "step", "node": node, "time_s": begun_s + took_s, "compute_s": took_s}


def of_coordinator(kind: str, time_s: float, **more: Any) -> dict[str, Any]:
    return {"event": kind, "node": "coordinator", "time_s": time_s, **more}


def test_the_death_of_a_worker_is_timed_from_events(bench: Any) -> None:
    events = [
        step("worker-0", 0.95),  # was under way: says nothing
        step("worker-2", 0.95),
        of_coordinator("left", 1.2, who="worker-2"),
        step("worker-0", 1.1),
        step("worker-0", 1.9),  # it has the update of the one before
        step("worker-1", 1.0),
        step("worker-1", 1.7),
        of_coordinator("joined", 2.5, who="worker-2"),
        step("worker-2", 2.9),
    ]
    found = bench("recovery").recovery(events, "worker-2", 1.0)
    assert found == {"noticed_s": 0.2, "committed_s": 0.9, "joined_s": 1.5, "back_s": 2.0}
    without = bench("recovery").recovery(events[:4], "worker-2", 1.0)
    assert without == {"noticed_s": 0.2, "committed_s": None, "joined_s": None, "back_s": None}


def test_the_death_of_the_coordinator_counts_steps_meanwhile(bench: Any) -> None:
    events = [step("worker-0", 1.0 + 0.2 * number) for number in range(10)]
    events.append(of_coordinator("coordinator", 1.85, ruling=2))
    found = bench("recovery").recovery(events, "coordinator", 1.0)
    assert (found["back_s"], found["steps_meanwhile"], found["committed_s"]) == (0.85, 4.0, 0.2)


def test_percentiles_are_values_that_were_measured(bench: Any) -> None:
    each = [{"who": "worker-0", "back_s": float(value)} for value in range(1, 102)]
    found = bench("recovery").figures([*each, {"who": "worker-1", "back_s": None}])
    assert found == {"back_s": {"p50": 51.0, "p90": 91.0, "p99": 100.0, "largest": 101.0, "n": 101}}


def test_a_kill_of_an_own_loop_is_timed_from_its_log(bench: Any) -> None:
    loops = bench("own_loops")
    lines = [
        "0 7 0.95 1.05 3 24 1",  # was under way: says nothing
        "0 7 1.05 1.20 4 16 1",
        "1 8 1.00 1.10 4 16 1",
        "2 9 1.40 1.50 5 16 0",  # has come, with no samples yet
        "2 9 1.50 1.75 6 24 1",
    ]
    commits, kills = [loops.Commit.of(*line.split()) for line in lines], [(2, 1.0), (1, 1.6), (2, 1.7)]
    assert loops.after(commits, kills[:2], 0) == pytest.approx((0.2, 0.75))
    assert loops.after(commits, kills, 0) == (pytest.approx(0.2), None)  # killed again before
    assert loops.after(commits, kills, 1) == (None, None)
    rounds = {
        "seconds": 30,
        "steps": 900,
        "samples": 21600,
        "lost": 8,
        "doubled": 0,
        "kills": [(0.2, 0.5), (0.3, None)],
    }
    assert list(loops.figures([rounds]).values()) == [1800, 43200, 0.2, 0.3, 0.5, float("inf"), 8, 0]


def test_a_worker_takes_part_from_its_first_step_to_its_death_unless_it_stands_still(bench: Any) -> None:
    storm = bench("storm")
    events: list[dict[str, Any]] = [{"event": "finished", "time_s": 100.0}]
    for rank in range(storm.WORKERS):
        name = f"worker-{rank}"
        events += [{"event": "joined", "who": name, "time_s": 0.0}]
        events += [{"event": "step", "node": name, "time_s": at_s} for at_s in (10.0, 20.0, 90.0)]
    whole_s = storm.WORKERS * 90.0
    assert storm.present_s(events, []) == whole_s
    assert storm.present_s(events, [("worker-1", 5.0, 15.0)]) == whole_s - 5.0
    events += [
        {"event": "left", "who": "worker-2", "lost": True, "time_s": 30.0},
        {"event": "joined", "who": "worker-2", "time_s": 40.0},
    ]
    assert storm.present_s(events, [("worker-2", 25.0, 35.0)]) == whole_s - 60.0 - 5.0


def test_a_tax_that_is_planted_shows(bench: Any) -> None:
    tax = bench("tax")
    found = tax.ratio([(1.1, 1.0), (2.2, 2.0), (3.3, 3.0)])
    assert found["ratio"] == pytest.approx(1.1)
    assert found["interval"] == pytest.approx([1.1, 1.1])
    count = sum(map(len, tax.PROTECTIONS.values()))
    runs = [{"cpu_s": 10.0, "functions": [[0.1, 5.0]] + [[0.0, 0.0]] * (count - 1)}] * 2
    assert tax.shares(runs)["finite"]["share"] == pytest.approx(0.01)
    assert tax.shares(runs)["ledger"]["share"] == 0.0


def test_every_protection_that_the_tax_names_is_there(bench: Any) -> None:
    for functions in bench("tax").PROTECTIONS.values():
        for path in functions:
            module, _, name = path.partition(":")
            owner: Any = importlib.import_module(module)
            for part in name.split("."):
                owner = getattr(owner, part)
            assert callable(owner), path
