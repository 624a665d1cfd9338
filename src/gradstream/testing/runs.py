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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradstream._simulate import simulate
from gradstream.data import from_arrays
from gradstream.data.arrays import ArrayDataset
from gradstream.model import from_functions
from gradstream.model.base import Batch, Layout, Model, Reduction
from gradstream.model.torch_module import TorchModel, from_torch
from gradstream.optim import SGD
from gradstream.run.result import Run
from gradstream.run.simulated import Script, SimulatedCluster
from gradstream.runtime.base import Report
from gradstream.runtime.deadlines import Deadlines
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig

# ---- tokens ------------------------------------------------------------------------------
# The token oracle: runs whose final parameters are an exact count of the samples in the model, chunk by chunk.
#
# Each sample adds 1 to its own element of every chunk. So one number of the final parameters shows a push that was
# lost, applied twice, torn between chunks, or sent to the wrong chunk, whatever happened to the nodes:
#
#     run = gs.simulate(Tokens(3), numbered(24), optimizer=gs.optim.SGD(lr=1.0), chunk_elems=64, epochs=2, ...)
#     audit = TokenAudit.of(run, num_samples=24, epochs=2)      # lost 0, doubled 0, torn 0
#
# The update rule has to be plain SGD at rate 1, and the strategy has to push gradients that the shards add up.
# `token_layers` is the same as a module of torch, for replicas that are split over processes.

TOKENS_PER_CHUNK = 64
"""Elements of the smallest chunk, and so the largest number of samples that `Tokens` counts one by one in it."""


def numbered(num_samples: int) -> ArrayDataset:
    """A data set in which each sample is its own number, for `Tokens`."""
    numbers = np.arange(num_samples, dtype=np.int64)
    return from_arrays(numbers, numbers)


class Silent:
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


class Tokens(Silent):
    """Each sample of a batch has the gradient -1 in its own element of every chunk, else 0.

    With plain SGD of rate 1 the parameters count the applied samples (exact below 2²⁴). The number of a sample
    selects its element, so use `numbered` data of at most `tokens` samples, and chunks of `tokens` elements.
    Gradients are sums, whatever `reduction` says.

    Args:
        num_chunks: number of chunks.
        tokens: elements of a chunk, a multiple of 64: the most samples that are counted one by one.
    """

    def __init__(self, num_chunks: int, tokens: int = TOKENS_PER_CHUNK) -> None:
        super().__init__(Layout.of([("tokens", (num_chunks, tokens))], torch.float32))
        self._tokens = tokens

    def gradient(
        self, parameters: torch.Tensor, batch: Batch, gradient: torch.Tensor, *, seed: int, report: Report
    ) -> float:
        """See `Model.gradient`."""
        gradient.zero_()
        gradient.view(-1, self._tokens)[:, torch.as_tensor(batch.ids)] = -1.0
        report(len(gradient))
        return 0.0


class _TokenLayer(nn.Module):
    """Adds its parameters at the number of each sample to the last column. The columns before say the number."""

    def __init__(self, num_chunks: int, tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(num_chunks, tokens))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number, total = x[:, :-1], x[:, -1:]
        return torch.cat([number, total + (number @ self.tokens.T).sum(1, keepdim=True)], dim=1)


class _OneHot(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.numbers: torch.Tensor
        self.register_buffer("numbers", torch.arange(tokens + 1))  # that of the last column is no sample's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(1).eq(self.numbers).float()


def token_layers(num_layers: int, num_chunks: int, tokens: int = TOKENS_PER_CHUNK) -> TorchModel:
    """As `Tokens`, in layers that can be split over the processes of a replica.

    Gradients are sums over the samples of a micro-batch, and the gradient of a minibatch is the mean over its
    micro-batches: so the update rule is plain SGD at a rate of their number, where all have equally many samples.

    Args:
        num_layers: number of layers.
        num_chunks: number of chunks of each layer.
        tokens: elements of a chunk; see `Tokens`.
    """

    def build() -> nn.Module:
        return nn.Sequential(_OneHot(tokens), *(_TokenLayer(num_chunks, tokens) for _ in range(num_layers)))

    return from_torch(build, lambda outputs, targets: -outputs[:, -1].sum())


def token_counts(run: Run, num_samples: int) -> np.ndarray[Any, Any]:
    """How often each sample is in the model of a run of `Tokens`, or of layers of them: shape (chunks, samples)."""
    whole = np.concatenate([array for name, array in run.parameters.items() if name.endswith("tokens")])
    counts: np.ndarray[Any, Any] = np.rint(whole).astype(np.int64)
    return counts[:, :num_samples]


@dataclass(frozen=True, slots=True)
class TokenAudit:
    """How a run of `Tokens` differs from one in which every chunk has every sample once per data epoch.

    Args:
        lost: sum over samples of max(0, epochs − c), where c is the sample's count in the chunk that counts it least.
        doubled: sum over samples of max(0, c − epochs), where c is the count in the chunk that counts it most.
        torn: number of samples whose counts differ between chunks.
    """

    lost: int
    doubled: int
    torn: int

    @classmethod
    def of(cls, run: Run, num_samples: int, epochs: int) -> TokenAudit:
        """Audits the final parameters of a run over `num_samples` samples, for so many data epochs."""
        counts = token_counts(run, num_samples)
        fewest, most = counts.min(axis=0), counts.max(axis=0)
        return cls(
            lost=int(np.maximum(epochs - fewest, 0).sum()),
            doubled=int(np.maximum(most - epochs, 0).sum()),
            torn=int((most > fewest).sum()),
        )

    @property
    def exact(self) -> bool:
        """Whether every chunk has every sample exactly once per data epoch."""
        return self == TokenAudit(0, 0, 0)


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


# ---- small jobs --------------------------------------------------------------------------

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
