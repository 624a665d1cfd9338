"""A shard of a part that dies comes back from its backup: a file, or the next shard of the same part."""

from __future__ import annotations

from typing import Any

import pytest

import gradstream as gs
from gradstream.runtime.simulation import Cost, SimulationConfig
from kit.faults import FaultPlan, Kill
from split_jobs import SAMPLES, difference, run

CONFIG = SimulationConfig(costs={"forward": Cost(base_s=0.01), "backward": Cost(base_s=0.02)})


def trained(script: Any, acknowledge: str, strategy: Any = "synchronous") -> gs.Run:
    """A run of two replicas of two parts, with two shards each."""
    return run(
        strategy=strategy, split=2, servers=2, epochs=4, config=CONFIG, script=script, acknowledge=acknowledge
    )


@pytest.mark.parametrize("acknowledge", ["replicated", "logged"])
def test_in_rounds_deaths_of_shards_of_every_part_change_no_bit(acknowledge: str) -> None:
    deaths = [Kill(f"shard-{rank}", 0.1 + 0.12 * rank, 0.02) for rank in range(4)]
    plan = FaultPlan(deaths)
    done = trained(plan, acknowledge)
    assert len(plan.fired) == 4
    assert difference(trained(None, acknowledge), done) == 0.0


def test_two_shards_with_backups_of_different_parts_may_die_at_once() -> None:
    plan = FaultPlan([Kill("shard-1", 0.2, 0.02), Kill("shard-2", 0.2, 0.02)])  # neighbours, of parts 0 and 1
    done = trained(plan, "replicated", "downpour")
    assert len(plan.fired) == 2 and done.summary["samples"] >= 4 * SAMPLES
