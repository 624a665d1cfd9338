"""Loops drawn at random end as in plain torch, or are refused; and planted faults are found by them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradstream.session.gradients import GradientReducer
from gradstream.session.progress import LoopProgress

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))
tool: Any = importlib.import_module("try_loops")
sys.path.remove(str(REPOSITORY / "tools"))


@pytest.mark.parametrize("way", range(len(tool.WAYS)))
def test_drawn_loops_end_as_in_plain_torch_or_are_refused(way: int) -> None:
    strategy, workers = tool.WAYS[way]
    outcomes = tool.run_loops(tool.program(1000 + way, workers, 5), strategy, workers)
    assert not [f"{fault}: {loop}" for loop, outcome, fault in outcomes if outcome == "differs"]
    assert sum(outcome == "equal" for _, outcome, _ in outcomes) >= 3


def fault_of(**options: Any) -> str:
    """What is wrong with how a loop ends on two workers."""
    sgd = ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})
    loop = tool.Loop(seed=1, optimizers=[sgd], sizes=[[[4, 2]], [[1, 4]], [[2, 3]]], **options)
    ((_, _, fault),) = tool.run_loops([loop], "allreduce", 2)
    return str(fault)


PARTS: list[dict[str, Any]] = [
    *(
        {"backward": how}
        for how in ("by hand, detached", "by hand, summed", "keeps the graph", "second derivatives")
    ),
    *({"model": kind} for kind in ("shared memory", "odd buffers", "sync batch norm")),
    {"model": "wide", "clip": "norm"},
    {"events": {1: "discard"}},
    {"backward": "by hand", "zeroing": "zeros first", "events": {1: "freeze"}},
]
"""Of loops that are drawn rarely, or have differed once."""


@pytest.mark.parametrize("options", PARTS)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_rare_parts_end_as_in_plain_torch(options: dict[str, Any]) -> None:
    assert not fault_of(**options)


REFUSALS: list[dict[str, Any]] = [
    {"ending": "replaced too early", "backward": "join by step", "clip": "replace"},
    {"ending": "clipped by hand", "backward": "by hand", "clip": "norm"},
    {"ending": "hessian", "backward": "hessian"},
    {"ending": "sync batch norm", "model": "sync batch norm"},
]


@pytest.mark.parametrize("options", REFUSALS)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_rare_endings_are_refused(options: dict[str, Any]) -> None:
    assert not fault_of(**options)


def test_a_zero_gradient_where_there_is_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GradientReducer._round

    def planted(self: GradientReducer, *args: Any) -> list[int]:
        found = honest(self, *args)
        for parameter in self._wrapped.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # weight decay and momentum go on
        return found

    assert not fault_of(model="branches")
    monkeypatch.setattr(GradientReducer, "_round", planted)
    assert "momentum_buffer" in fault_of(model="branches")


def test_the_mean_of_clipped_gradients_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GradientReducer._write

    def planted(self: GradientReducer, index: int) -> None:
        gradient = self._wrapped.parameters[index].grad
        if gradient is not None:
            gradient.clamp_(-0.1, 0.1)  # before it is joined: the loop does it once more behind
        honest(self, index)

    assert not fault_of(clip="value")
    monkeypatch.setattr(GradientReducer, "_write", planted)
    assert "not close" in fault_of(clip="value")


def test_workers_that_count_alike_whatever_their_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LoopProgress.take
    assert not fault_of()
    monkeypatch.setattr(LoopProgress, "take", lambda self, *local: min(honest(self, *local), 1))
    assert "not close" in fault_of()


def test_the_tool_adds_to_its_record(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        command = ["--loops", "4", "--length", "4", "--seed", seed]
        assert tool.main([*command, "--record", str(tmp_path / "loops.json")]) == 0
    record = json.loads((tmp_path / "loops.json").read_text())
    assert sum(record["total"].values()) == 8
    assert record["seeds"] == [[0, 0], [1, 1]]
