"""Small jobs, fault scripts and checkers, for tests of a strategy, a rule or a carrier by simulation.

Three models with results that can be computed on paper:

* `least_squares`: linear regression. On small integers, with parameters rounded to a grid, every sum is exact
  in any order; so a distributed run can be compared bit for bit with one node that computes the joined batch.
* `Tokens`: each sample adds 1 to its own element of every chunk, so the final parameters count the applied
  samples, chunk by chunk. One number shows a push that was lost, applied twice, torn between shards, or sent
  to the wrong shard.
* `Sized`: layers of given sizes and no arithmetic, for shape-only simulations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradstream._simulate import simulate
from gradstream.data import from_arrays
from gradstream.data.arrays import ArrayDataset
from gradstream.model import from_functions
from gradstream.model.base import Batch, Layout, Model, Reduction
from gradstream.optim import SGD
from gradstream.run.result import Run
from gradstream.run.simulated import Script, SimulatedCluster
from gradstream.runtime.base import Report
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.testing.tokens import Silent, Tokens, numbered

QUICK = Deadlines(join_s=5.0, silence_s=0.2, lease_s=2.0, retry_s=30.0)
"""Short deadlines, for a simulated network that loses frames."""

UNSTEADY = SimulationConfig(
    costs={"gradient": Cost(base_s=0.03, jitter=Exponential()), "apply": Cost(base_s=1e-3)},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3)),
)
"""Computing and the network take random times; the network is reliable."""

NUM_SAMPLES = 24
"""Samples of `count_tokens`."""


def count_tokens(**options: Any) -> Run:
    """Simulates a small run of `Tokens`, in three chunks: three workers, two shards, and `UNSTEADY` times.

    Args:
        options: as for `simulate`; they replace these.
    """
    defaults: dict[str, Any] = {
        "optimizer": SGD(lr=1.0),
        "workers": 3,
        "servers": 2,
        "batch_size": 2,
        "chunk_elems": 64,
        "deadlines": QUICK,
        "config": UNSTEADY,
    }
    return simulate(Tokens(num_chunks=3), numbered(NUM_SAMPLES), **{**defaults, **options})


def least_squares(
    num_samples: int,
    num_features: int,
    *,
    seed: int = 0,
    whole: bool = True,
    grid: float | None = None,
    reduction: Reduction = "sum",
    dtype: str = "float64",
) -> tuple[Model, ArrayDataset]:
    """Linear regression: loss = Σ (x·w - y)² / 2 over samples, or its mean; w begins at 0.

    Args:
        num_samples, num_features: size of the data.
        seed: seed of the data.
        whole: whether the data are integers from -2 to 2; otherwise they are normally distributed.
        grid: the gradient is computed at w rounded to multiples of this number. With a power of 2 and `whole`, sums
            of gradients are exact in any order, for any number of steps.
        reduction: reduction of loss and gradient over samples.
        dtype: dtype of the parameters, "float32" or "float64".
    """
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((num_samples, num_features)), rng.standard_normal(num_samples)
    if whole:
        x, y = np.clip(np.rint(x), -2, 2), np.clip(np.rint(y), -2, 2)

    def at(w: Any) -> Any:
        return w if grid is None else np.round(w / grid).astype(w.dtype) * w.dtype.type(grid)

    def gradients(parameters: Any, inputs: Any, targets: Any) -> tuple[float, Any]:
        residual = inputs @ at(parameters["w"]) - targets
        count = len(targets) if reduction == "mean" else 1
        gradient = (residual @ inputs) / inputs.dtype.type(count)
        return float(residual @ residual) / 2 / count, {"w": gradient}

    model = from_functions(
        init=lambda seed: {"w": np.zeros(num_features)},
        outputs=lambda parameters, inputs: inputs @ parameters["w"],
        gradients=gradients,
        reduction=reduction,
        dtype=dtype,  # type: ignore[arg-type]  # one of its literals, or it says so
    )
    return model, from_arrays(x.astype(dtype), y.astype(dtype))


def busy(num_samples: int, *, passes: int = 150) -> tuple[Model, ArrayDataset]:
    """`least_squares` of 2000 features whose gradient takes some milliseconds, in proportion to its samples.

    Args:
        num_samples: number of samples of the data.
        passes: number of passes over the minibatch for one gradient, so that computing takes the time.
    """
    model, data = least_squares(num_samples, 2000)
    inner: Any = model.gradient

    def gradient(parameters: Any, batch: Any, into: Any, **options: Any) -> Any:
        for _ in range(passes):
            batch.inputs @ parameters.numpy()
        return inner(parameters, batch, into, **options)

    model.gradient = gradient  # type: ignore[method-assign, assignment]
    return model, data


def slow(num_samples: int, *, pause_s: float = 0.01, until: Path | None = None) -> tuple[Model, ArrayDataset]:
    """`least_squares` of 2000 features whose gradient sleeps: a long run that leaves the cores idle.

    Args:
        num_samples: number of samples of the data.
        pause_s: seconds for which each gradient sleeps.
        until: a file; once it is there, gradients no longer sleep. So a run lasts until its test has seen enough.
    """
    model, data = least_squares(num_samples, 2000)
    inner: Any = model.gradient

    def gradient(*arguments: Any, **options: Any) -> Any:
        if until is None or not until.exists():
            time.sleep(pause_s)  # noqa: TID251  # as the user's own code may
        return inner(*arguments, **options)

    model.gradient = gradient  # type: ignore[method-assign]
    return model, data


class Sized(Silent):
    """Layers of given sizes, in the order in which a backward pass finishes them. Gradients are 0.

    Args:
        layers_elems: elements of each layer.
    """

    def __init__(self, layers_elems: Sequence[int]) -> None:
        tensors = [(f"layer{index}", (elems,)) for index, elems in enumerate(layers_elems)]
        super().__init__(Layout.of(tensors, torch.float32))

    def gradient(
        self, parameters: torch.Tensor, batch: Batch, gradient: torch.Tensor, *, seed: int, report: Report
    ) -> float:
        """See `Model.gradient`."""
        gradient.zero_()
        for elems in self.layout.milestones:
            report(elems)
        return math.nan


def kill_at(name: str, seconds: float) -> Script:
    """A script that kills a node at an instant of virtual time, as SIGKILL would."""

    async def script(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.kill(name)

    return script


def replace_at(name: str, seconds: float, after_s: float = 0.0) -> Script:
    """A script that kills a worker at an instant of virtual time, and starts a new process in its place later."""

    async def script(cluster: SimulatedCluster) -> None:
        await kill_at(name, seconds)(cluster)
        await cluster.virtual.runtime("director").sleep(after_s)
        await cluster.restart(name)

    return script
