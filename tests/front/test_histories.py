"""`tools/histories.py` has runs of every member, and finds what a change of structure has changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gradstream.job.registry import FAMILIES
from gradstream.runtime.simulation import Cost
from gradstream.strategies.synchronous import Synchronous

TOOLS = str(Path(__file__).parents[2] / "tools")
sys.path.insert(0, TOOLS)

import histories  # noqa: E402  # type: ignore[import-not-found]

sys.path.remove(TOOLS)


def of(name: str) -> Any:
    return next(one for one in histories.histories() if one.name == name)


def test_every_strategy_codec_and_update_rule_has_runs() -> None:
    names = [one.name for one in histories.histories()]
    for kind, prefix in (("strategy", ""), ("codec", "codec "), ("optimizer", "optimizer ")):
        for member in FAMILIES[kind]:
            assert any(name.startswith(f"{prefix}{member}:") for name in names), member


def test_other_parameters_times_and_events_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = of("synchronous: even").kept()
    assert histories.differences(kept, of("synchronous: even").kept()) == []
    slower = of("synchronous: even")
    slower.told["config"].costs["gradient"] = Cost(base_s=0.010001)
    assert histories.differences(kept, slower.kept()) == ["numbers", "events", "bits"]
    slower.told["config"].costs["gradient"] = Cost(base_s=0.01)
    other = of("synchronous: even")
    other.job["strategy"] = Synchronous(backup=1)
    assert "parameters" in histories.differences(kept, other.kept())
