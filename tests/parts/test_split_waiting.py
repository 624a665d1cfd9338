"""The time that each process of a split replica computes and waits, from its events."""

from __future__ import annotations

import pytest

from split_jobs import EQUAL, run


@pytest.mark.parametrize(("split", "micro_batches"), [(2, 1), (2, 3), (3, 6)])
def test_each_part_idles_as_the_formula_of_the_pipeline_says(split: int, micro_batches: int) -> None:
    done = run(workers=1, split=split, micro_batches=micro_batches, config=EQUAL)
    reports = [event for event in done.events if event["event"] == "part"]
    assert {event["node"] for event in reports} == {"worker-0", *(f"part{k}-0" for k in range(1, split))}
    minibatches = {event["node"]: 0 for event in reports}
    for event in reports:
        minibatches[event["node"]] += event["minibatches"]
    assert set(minibatches.values()) == {12}
    compute_s, wait_s = (sum(event[name] for event in reports) for name in ("compute_s", "wait_s"))
    bubble = (split - 1) / (micro_batches + split - 1)
    assert wait_s / (compute_s + wait_s) == pytest.approx(bubble, rel=0.05)
