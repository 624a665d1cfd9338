"""The time that each process of a split replica computes and waits, from its events."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import gradstream as gs
from split_jobs import EQUAL, FEATURES, run


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


def deep() -> nn.Module:
    """Eight equal layers."""
    layers = [layer for _ in range(7) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(FEATURES, FEATURES)).double()


ALIKE = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(per_sample_s=0.1)})
"""A pass costs its stage's share of a second's tenth, and nothing else costs anything."""


@pytest.mark.parametrize(
    ("pipeline", "left"), [("1f1b", 1.0), ("gpipe", 1.0), ("interleaved", 1 / 2), ("zero-bubble", 1 / 3)]
)
def test_a_schedule_leaves_its_part_of_the_bubble(pipeline: Any, left: float) -> None:
    """Interleaving by two stages a part halves it; zero-bubble leaves a third: pages of the papers."""
    parts, count = 4, 12
    done = run(
        build=deep,
        workers=1,
        split=parts,
        micro_batches=count,
        batch_size=36,
        pipeline=pipeline,
        strategy="allreduce",
        config=ALIKE,
    )
    reports = [event for event in done.events if event["event"] == "part"]
    compute_s, wait_s = (sum(event[name] for event in reports) for name in ("compute_s", "wait_s"))
    bubble = left * (parts - 1) / count
    assert wait_s / (compute_s + wait_s) == pytest.approx(bubble / (1 + bubble), rel=0.05)
