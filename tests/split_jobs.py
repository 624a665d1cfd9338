"""A small network and its runs on virtual time, whole and split."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import nn

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.run.result import Run
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import QUICK

SAMPLES, FEATURES, CLASSES = 36, 6, 4

EQUAL = gs.sim.SimulationConfig(
    costs={"forward": gs.sim.Cost(per_sample_s=1e-3), "backward": gs.sim.Cost(per_sample_s=2e-3)},
    network=gs.sim.Network(bandwidth_bytes_s=math.inf, link=gs.sim.Link(latency_s=0)),
)
"""Every stage takes equally long, whatever its size, and nothing else takes any time."""


def net() -> nn.Module:
    """A small network, with layers of different sizes."""
    layers = [nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES)).double()


def data() -> Any:
    """Classes of normally distributed samples, some of them held out."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((SAMPLES + 10, FEATURES))
    y = rng.integers(0, CLASSES, SAMPLES + 10)
    return gs.from_arrays(x[:SAMPLES], y[:SAMPLES], test_inputs=x[SAMPLES:], test_targets=y[SAMPLES:])


def run(
    *,
    build: Any = net,
    loss: Any = nn.functional.cross_entropy,
    storage: MemoryStorage | None = None,
    **options: Any,
) -> Run:
    """Trains the network on virtual time."""
    given: dict[str, Any] = {
        "workers": 2,
        "batch_size": 6,
        "epochs": 2,
        "chunk_elems": 64,
        "deadlines": QUICK,
    }
    model = gs.from_torch(build, loss)
    return simulate(model, data(), storage=storage, **{**given, **options})


def difference(one: Run, other: Run) -> float:
    """The largest difference between the final parameters of two runs."""
    a, b = one.parameters, other.parameters
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)
