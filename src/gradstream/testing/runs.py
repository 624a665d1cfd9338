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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradstream.data import from_arrays
from gradstream.data.arrays import ArrayDataset
from gradstream.job.job import Deadlines
from gradstream.model import from_functions
from gradstream.model.base import Batch, Layout, Model, Reduction
from gradstream.run.result import Run
from gradstream.run.simulated import Script, SimulatedCluster
from gradstream.runtime.base import Report

__all__ = [
    "QUICK",
    "Sized",
    "Tokens",
    "busy",
    "check_exactly_once",
    "check_nothing_lost",
    "kill_at",
    "least_squares",
    "numbered",
    "replace_at",
    "token_counts",
]

QUICK = Deadlines(join_s=5.0, silence_s=0.2, lease_s=2.0, retry_s=30.0)
"""Short deadlines, for a simulated network that loses frames."""

TOKENS_PER_CHUNK = 64
"""Elements of the smallest chunk, and so the largest number of samples that `Tokens` can count separately."""


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


def numbered(num_samples: int) -> ArrayDataset:
    """A data set in which each sample is its own number, for `Tokens`."""
    numbers = np.arange(num_samples, dtype=np.int64)
    return from_arrays(numbers, numbers)


class _Silent:
    """Base of these models: no outputs, and a tree that is the layout."""

    reduction: Reduction = "mean"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the parameters with zeros."""
        parameters.zero_()

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Returns the inputs: there is nothing to learn."""
        return torch.as_tensor(np.asarray(inputs))

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """The tensors by name."""
        return {name: view.numpy() for name, view in self.layout.views(parameters)}


class Tokens(_Silent):
    """Each sample of a batch has the gradient -1 in its own element of every chunk, else 0.

    With plain SGD of rate 1 the parameters count the applied samples (exact below 2²⁴). The number of a sample
    selects its element, so use `numbered` data of at most 64 samples, and chunks of 64 elements. Gradients are
    sums, whatever `reduction` says.

    Args:
        num_chunks: number of chunks.
    """

    def __init__(self, num_chunks: int) -> None:
        super().__init__(Layout.of([("tokens", (num_chunks, TOKENS_PER_CHUNK))], torch.float32))

    def gradient(
        self,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        *,
        seed: int,
        report: Report,
    ) -> float:
        """See `Model.gradient`."""
        gradient.zero_()
        gradient.view(-1, TOKENS_PER_CHUNK)[:, torch.as_tensor(batch.ids)] = -1.0
        report(len(gradient))
        return 0.0


class Sized(_Silent):
    """Layers of given sizes, in the order in which a backward pass finishes them. Gradients are 0.

    Args:
        layers_elems: elements of each layer.
    """

    def __init__(self, layers_elems: Sequence[int]) -> None:
        tensors = [(f"layer{index}", (elems,)) for index, elems in enumerate(layers_elems)]
        super().__init__(Layout.of(tensors, torch.float32))

    def gradient(
        self,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        *,
        seed: int,
        report: Report,
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


def token_counts(run: Run, num_samples: int) -> np.ndarray[Any, Any]:
    """How often each sample is in the model of a run of `Tokens`: shape (chunks, samples)."""
    counts: np.ndarray[Any, Any] = np.rint(run.parameters["tokens"]).astype(np.int64)
    return counts[:, :num_samples]


def check_exactly_once(run: Run, num_samples: int, epochs: int) -> None:
    """Checks that every sample of every data epoch was applied once to every chunk.

    Raises:
        AssertionError: it was not; the message has the sample, the chunk, and the numbers got and expected.
    """
    counts = token_counts(run, num_samples)
    for chunk, sample in np.argwhere(counts != epochs):
        raise AssertionError(
            f"sample {sample} was applied {counts[chunk, sample]} times to chunk {chunk}; "
            f"pushed {epochs} times, once per data epoch"
        )


def check_nothing_lost(run: Run, num_samples: int, epochs: int) -> None:
    """Checks a run after the death of a worker: nothing is missing, and only repeated minibatches count twice.

    Other workers compute the minibatches again that the dead worker had pushed and for which no receipt
    had arrived: these may be in the model twice, in some chunks or in all.

    Raises:
        AssertionError: a sample is missing in a chunk, or more samples are repeated than minibatches were.
    """
    counts = token_counts(run, num_samples)
    for chunk, sample in np.argwhere(counts < epochs):
        raise AssertionError(
            f"sample {sample} was applied {counts[chunk, sample]} times to chunk {chunk}; "
            f"expected at least {epochs}, once per data epoch"
        )
    ledger = [event for event in run.events if event["event"] == "ledger"]
    assert [event["epoch"] for event in ledger] == list(range(epochs)), ledger
    assert all(event["samples"] == num_samples for event in ledger), ledger
    redone = sum(event["reassigned"] for event in ledger)
    excess = int((counts - epochs).sum(axis=1).max())
    largest = max(event["samples"] for event in run.events if event["event"] == "step")
    assert excess <= redone * largest, f"{excess} samples twice, but only {redone} batches were redone"
