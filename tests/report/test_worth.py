"""A run that is slower than one of its machines is told so, once, from its first minute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from gradstream.report.straggler import LEAST_STEPS, LOOK_S, Worth


def events(
    compute_s: list[float], wait_s: float, *, far: int = 1, local: bool = False, steps: int = 60
) -> Iterator[dict[str, Any]]:
    """Workers in lockstep, of which the last `far` are on machines of their own."""
    workers = len(compute_s)
    yield {"event": "started", "workers": workers, "trains_locally": local}
    for rank in range(workers - far, workers):
        yield {"event": "machine", "state": "joined", "who": f"m{rank}", "nodes": [f"worker-{rank}"]}
    long_s = max(compute_s) + wait_s
    for step in range(steps):
        for rank, own_s in enumerate(compute_s):
            yield {
                "event": "step",
                "node": f"worker-{rank}",
                "time_s": (step + 1) * long_s,
                "samples": 32,
                "compute_s": own_s,
            }


def told(*given: Any, **options: Any) -> list[str]:
    worth = Worth()
    return [text for event in events(*given, **options) if (text := worth.note(event))]


def test_two_machines_that_wait_more_than_they_compute_are_slower_than_one() -> None:
    (text,) = told([1.0, 1.0], 2.0)
    assert "21 samples/s together, and this machine alone would do 32" in text, text
    assert re.search("workers wait 6[78]% of the time", text) and "local-sgd" in text


def test_the_machine_that_would_be_faster_is_named() -> None:
    (text,) = told([4.0, 1.0], 0.5)
    assert "and m1 alone would do 32" in text


def test_workers_of_one_machine_count_together() -> None:
    (text,) = told([1.0, 1.0, 1.0], 1.0)
    assert re.search("4[78] samples/s together, and this machine alone would do 64", text)


def test_a_strategy_that_exchanges_rarely_already_is_not_advised() -> None:
    (text,) = told([1.0, 1.0], 2.0, local=True)
    assert "local-sgd" not in text and "a longer period" in text


@pytest.mark.parametrize(
    ("compute_s", "wait_s", "options"),
    [
        ([1.0, 1.0], 0.5, {}),
        ([1.0, 1.0], 1.0, {}),  # as fast as one
        ([1.0, 1.0], 5.0, {"far": 0}),  # one machine: nothing to compare
        ([1.0, 1.0], 2.0, {"steps": LEAST_STEPS}),
        ([0.1, 0.1], 0.2, {"steps": int(LOOK_S / 0.3)}),  # not a minute yet
    ],
)
def test_what_is_faster_or_not_known_is_not_told(compute_s: list[float], wait_s: float, options: Any) -> None:
    assert told(compute_s, wait_s, **options) == []


@pytest.mark.parametrize("left", [True, False])
def test_a_minute_with_a_death_in_it_is_not_judged(left: bool) -> None:
    """Everybody waits until the loss is noticed: that is no fault of the network."""
    worth, found = Worth(), list[str]()
    given = list(events([1.0, 1.0], 0.0, steps=22))
    for event in given:
        found.append(worth.note(event))
    if left:
        found.append(worth.note({"event": "left", "who": "worker-1", "lost": True}))
    for step in range(40):  # 45 s later
        found.append(worth.note({**given[-2], "time_s": 67.0 + step}))
    assert any(found) is not left


def test_the_first_step_of_each_worker_does_not_count() -> None:
    """It compiles kernels, and reads files."""
    worth = Worth()
    found = []
    for event in events([1.0, 1.0], 0.1):
        if event["event"] == "step" and event["time_s"] < 2.0:
            event["compute_s"] = 100.0
        found.append(worth.note(event))
    assert not any(found)
