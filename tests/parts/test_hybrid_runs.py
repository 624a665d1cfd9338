"""Runs whose replicas are hybrids, on virtual time, beside the same runs whose replicas are one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.pipeline.hybrid import HYBRIDS
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import QUICK
from split_jobs import CLASSES, difference


def images() -> nn.Module:
    """A network with convolutions, and with linear layers that are divided by rows and by columns."""
    convolutions = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(
        *convolutions, nn.Linear(27, 9), nn.ReLU(), nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, CLASSES)
    ).double()


def run(build: Any = images, storage: MemoryStorage | None = None, **options: Any) -> Any:
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((46, 1, 6, 6)), rng.integers(0, CLASSES, 46)
    data = gs.from_arrays(x[:36], y[:36], test_inputs=x[36:], test_targets=y[36:])
    given = {
        "workers": 1,
        "batch_size": 10,
        "epochs": 2,
        "chunk_elems": 64,
        "deadlines": QUICK,
        "strategy": "allreduce",
    }
    return simulate(
        gs.from_torch(build, nn.functional.cross_entropy), data, storage=storage, **{**given, **options}
    )


@pytest.mark.parametrize("hybrid", HYBRIDS)
@pytest.mark.parametrize("split", [2, 3, 4])
def test_a_hybrid_trains_as_one_process_with_the_same_minibatch(hybrid: Any, split: int) -> None:
    whole, parts = (
        run(evaluate_every=2),
        run(split=split, pipeline=gs.pipeline.Hybrid(hybrid), evaluate_every=2),
    )
    assert difference(whole, parts) < 1e-12
    for mine, theirs in zip(parts.evaluations, whole.evaluations, strict=True):
        assert mine["accuracy"] == theirs["accuracy"] and mine["step"] == theirs["step"]
    steps = [[one["loss"] for one in each.events if one["event"] == "step"] for each in (whole, parts)]
    assert steps[1] == pytest.approx(steps[0], abs=1e-12)
