"""Sparse problems as models: linear classifiers and regression, matrix completion, and user-defined ones.

    f(w) = 1/n Σ_i f_i(w_e),   e the components that sample i touches

A problem is two functions that numba compiles (see `sparse.sweep`): one finds the components that a sample
touches, the other its gradient on these. So HOGWILD! makes no pass over the vector. Any other strategy gets the
dense gradient of a minibatch, the mean over its samples.

L2 regularisation covers touched components alone, as in the paper:

    l2/2 |w|² = 1/n Σ_i l2/2 Σ_{v∈e} (n/d_v)·w_v²      where d_v samples touch v

It is exact in expectation, and needs η·l2·n/d_v < 1 for the rarest component.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradstream.errors import ConfigError, GradientError, UnknownNameError
from gradstream.model.base import Layout, Reduction
from gradstream.model.batch import Batch
from gradstream.runtime.base import Report
from gradstream.sparse.data import CsrTable, SparseDataset, SparseRows
from gradstream.sparse.updates import LockAccess, check_compiler

__all__ = ["SparseModel", "SweepState", "from_samples", "linear", "matrix_completion"]

Array = np.ndarray[Any, Any]
Touched = Callable[[Any, int, Any], int]
Gradient = Callable[[Any, Any, int, Any, int, Any], float]
Scores = Callable[[Array, SparseRows], Array]


@dataclass(slots=True)
class SweepState:
    """The memory of a sweep, and how far it is.

    Args:
        parameters: (E,); other workers update them at the same time.
        locks: words of all locks; see `sparse.updates`.
        me: rank of this worker + 1, which it writes into a lock that it holds.
        state: words of the kernels: the next sample, and the lock that was not free.
    """

    parameters: torch.Tensor
    locks: Array
    me: int
    state: Array = field(default_factory=lambda: np.zeros(2, np.int64))

    def access(self, looks: int) -> LockAccess:
        """The locks as the kernels take them; `looks` is the number of looks at a lock that is not free."""
        return LockAccess(self.locks, np.int32(self.me), looks)

    def blocked(self, num: int) -> bool:
        """Whether the sweep has stopped before sample `num`, at lock `state[1]`."""
        return int(self.state[0]) < num


class SparseModel:
    """A problem as a `Model` that also has `sweep`. Made by `linear`, `matrix_completion` and `from_samples`.

    Args:
        layout: layout of its parameters, float32.
        functions: returns the two functions of `sparse.sweep`, the same at each call.
        most: (table) to the most components that a sample of it touches.
        scores: (w, samples) to outputs, (b,) or (b, ...); None if the model is never evaluated.
        start: (seed, parameters): fills in initial parameters; None leaves zeros.
        classes: whether outputs are scores of class 1 against class 0.
    """

    reduction: Reduction = "mean"

    def __init__(
        self,
        layout: Layout,
        functions: Callable[[], tuple[Touched, Gradient]],
        most: Callable[[CsrTable], int],
        scores: Scores | None = None,
        start: Callable[[int, torch.Tensor], None] | None = None,
        classes: bool = False,
    ) -> None:
        self.layout = layout
        self._functions = functions
        self._most = most
        self._scores = scores
        self._start = start
        self._classes = classes
        self._room: tuple[int, tuple[Array, Array]] = (0, (np.zeros(0, np.uint32), np.zeros(0, np.float32)))

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """See `Model.init`."""
        parameters.zero_()
        if self._start is not None:
            self._start(seed, parameters)

    def sweep(self, rows: SparseRows, rate: float, update: str, looks: int, at: SweepState) -> float:
        """Makes an update of each sample in turn, from `at.state` on.

        Args:
            rows: the samples.
            rate: η.
            update: one of `sparse.updates.UPDATES`.
            looks: looks at a lock before the sweep stops (`SweepState.blocked`).
            at: state of the sweep, which is updated.

        Returns:
            The sum of the losses of these samples, each before its own update.
        """
        kernels, table = self._kernels(update), rows.table
        loss: float = kernels.sweep(
            at.parameters.numpy(),
            table,
            np.ascontiguousarray(rows.ids),  # numba would compile anew for another layout
            np.float32(rate),
            at.access(looks),
            at.state,
            self._room_for(table),
        )
        return loss

    def gradient(
        self, parameters: torch.Tensor, batch: Batch, gradient: torch.Tensor, *, seed: int, report: Report
    ) -> float:
        """The mean gradient of a minibatch, dense; see `Model.gradient`."""
        rows, into = self.rows(batch), gradient.numpy()
        into[:] = 0
        loss = 0.0
        if len(rows):
            room = self._room_for(rows.table)
            loss = self._kernels().total(
                parameters.numpy(), rows.table, np.ascontiguousarray(rows.ids), into, room
            ) / len(rows)
            into /= np.float32(len(rows))
        report(len(into))
        return loss

    def objective(self, parameters: Any, data: SparseDataset) -> float:
        """f(w), the mean over all training samples with regularisation. `parameters` are (E,)."""
        table = data.tables[0]
        ids = np.arange(len(table.targets), dtype=np.int64)
        w = np.ascontiguousarray(parameters, np.float32)
        total: float = self._kernels().loss(w, table, ids, self._room_for(table))
        return total / len(ids)

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """(b,) numbers, or (b, 2) scores of a classifier, where class 0 has 0. See `Model.outputs`."""
        if self._scores is None:
            raise ConfigError(
                "this sparse model has no `scores`: pass from_samples a function that evaluates it"
            )
        found = np.asarray(self._scores(parameters.numpy(), inputs))
        return torch.as_tensor(np.stack([np.zeros_like(found), found], axis=-1) if self._classes else found)

    def tree(self, parameters: torch.Tensor) -> Mapping[str, Array]:
        """See `Model.tree`."""
        return {name: view.numpy() for name, view in self.layout.views(parameters)}

    def rows(self, batch: Batch) -> SparseRows:
        """The samples of a minibatch. Raises GradientError if they are not sparse."""
        if not isinstance(batch.inputs, SparseRows):
            raise GradientError(
                f"inputs are {type(batch.inputs).__name__}; a sparse model goes through sparse data: "
                "gradstream.sparse.from_csr, from_ratings or from_svmlight"
            )
        return batch.inputs

    def _kernels(self, update: str = "plain") -> Any:
        check_compiler("a sparse model")
        from gradstream.sparse.sweep import kernels_of

        return kernels_of(*self._functions(), update)

    def _room_for(self, table: CsrTable) -> tuple[Array, Array]:
        """Memory for one sample's components and gradient."""
        if self._room[0] != id(table):
            most = max(1, self._most(table))
            self._room = id(table), (np.zeros(most, np.uint32), np.zeros(most, np.float32))
        return self._room[1]


def from_samples(
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    touched: Touched,
    gradient: Gradient,
    *,
    most: int | Callable[[CsrTable], int],
    scores: Scores | None = None,
    start: Callable[[int, torch.Tensor], None] | None = None,
    classes: bool = False,
) -> SparseModel:
    """A sparse model from two functions, which numba compiles. Both get the whole table (`sparse.CsrTable`).

    Args:
        tensors: names and shapes of the parameters; they lie in this order in the flat vector w.
        touched: (table, i, where) to count: writes the components of w that sample i touches, ascending and
            each once, to the front of `where`.
        gradient: (w, table, i, where, count, into) to the sample's loss: writes the gradient on these
            components to the front of `into`. Other workers may change w meanwhile.
        most: the most components that a sample touches, or a function of the table.
        scores: (w, rows) to outputs, with numpy, for evaluation; `rows` are `SparseRows`.
        start: (seed, parameters): fills in initial parameters, (E,); None leaves zeros.
        classes: whether scores are of class 1 against class 0.

    Example:
        >>> def touched(table, i, where):
        ...     where[0] = table.indices[i]
        ...     return 1
        >>> def gradient(w, table, i, where, count, into):
        ...     into[0] = w[where[0]] - table.targets[i]
        ...     return 0.5 * into[0] ** 2
        >>> model = from_samples([("w", (10,))], touched, gradient, most=1)
        >>> model.layout.elems
        10
    """
    number = (lambda _: most) if isinstance(most, int) else most
    layout = Layout.of(tensors, torch.float32)
    return SparseModel(layout, lambda: (touched, gradient), number, scores, start, classes)


# ---- linear ---------------------------------------------------------------------------------


def _logistic(margin: float, target: float) -> tuple[float, float]:
    """log(1 + e^(-y·m)) and its derivative by m, for y = ±1 as targets 1 and 0."""
    y = 1.0 if target > 0 else -1.0
    z = -y * margin
    if z > 0:
        grown = math.exp(-z)
        return z + math.log1p(grown), -y / (1 + grown)
    grown = math.exp(z)
    return math.log1p(grown), -y * grown / (1 + grown)


def _hinge(margin: float, target: float) -> tuple[float, float]:
    """max(0, 1 - y·m) and a subgradient."""
    y = 1.0 if target > 0 else -1.0
    short = 1.0 - y * margin
    return (short, -y) if short > 0 else (0.0, 0.0)


def _squared(margin: float, target: float) -> tuple[float, float]:
    """(m - y)²/2 and its derivative."""
    error = margin - target
    return 0.5 * error * error, error


LOSSES: Mapping[str, Callable[[float, float], tuple[float, float]]] = {
    "logistic": _logistic,
    "hinge": _hinge,
    "squared": _squared,
}


def linear(num_features: int, *, loss: str = "logistic", l2: float = 0.0) -> SparseModel:
    """The model w·x: logistic regression, the linear support vector machine of the paper, or least squares.

    Args:
        num_features: d; the parameters are {"w": (d,)}, and begin at 0.
        loss: "logistic", "hinge" or "squared".
        l2: λ of λ/2 |w|² in the mean loss; see the module.

    Raises:
        UnknownNameError: there is no such loss.
        ConfigError: l2 is negative, or there are no features.
    """
    if loss not in LOSSES:
        raise UnknownNameError("loss of a sparse linear model", loss, LOSSES)
    if not 0 <= l2 < math.inf or num_features < 1:
        raise ConfigError(f"linear({num_features}, l2={l2}): expected at least 1 feature, and l2 >= 0")
    layout = Layout.of([("w", (num_features,))], torch.float32)
    return SparseModel(
        layout, lambda: _linear_functions(loss, float(l2)), _longest, _margins, classes=loss != "squared"
    )


def _touched_row(table: Any, i: int, where: Any) -> int:
    # An index into a slice needs no check of its sign.
    features = table.indices[table.indptr[i] : table.indptr[i + 1]]
    for j in range(len(features)):
        where[j] = features[j]
    return len(features)


@functools.cache
def _linear_functions(loss: str, l2: float) -> tuple[Touched, Gradient]:
    from gradstream.sparse.atomics import compiled

    link, regular = compiled(LOSSES[loss]), l2 > 0

    def gradient(w: Any, table: Any, i: int, where: Any, count: int, into: Any) -> float:
        x = table.values[table.indptr[i] : table.indptr[i + 1]]
        margin, penalty = 0.0, 0.0
        for j in range(count):
            margin += w[where[j]] * x[j]
        value, derivative = link(margin, table.targets[i])
        slope = np.float32(derivative)
        for j in range(count):
            into[j] = slope * x[j]
            if regular:
                at = w[where[j]]
                pull = l2 * table.scale[where[j]] * at
                into[j] += pull
                penalty += 0.5 * pull * at
        return value + penalty

    return _touched_row, gradient


def _longest(table: CsrTable) -> int:
    return int(np.diff(table.indptr).max(initial=0))


def _margins(w: Array, rows: SparseRows) -> Array:
    table, ids = rows.table, rows.ids
    begins, sizes = table.indptr[ids], table.indptr[ids + 1] - table.indptr[ids]
    owner = np.repeat(np.arange(len(ids)), sizes)
    at = np.repeat(begins - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(sizes.sum())
    products = w[table.indices[at]] * table.values[at]
    return np.bincount(owner, products, minlength=len(ids)).astype(np.float32)


# ---- matrix completion ------------------------------------------------------------------------


def matrix_completion(
    shape: tuple[int, int], rank: int, *, l2: float = 0.0, spread: float | None = None
) -> SparseModel:
    """A matrix L·Rᵀ of low rank through its known entries: 1/n Σ (L_i·R_j - M_ij)²/2 + l2/2 (|L|² + |R|²).

    An entry touches one row of L and one of R. Data are made by `from_ratings`.

    Args:
        shape: (m, k) of the matrix; the parameters are {"L": (m, rank), "R": (k, rank)}.
        rank: r.
        l2: λ of the regularisation, over touched rows; see the module.
        spread: standard deviation of the initial factors; None takes 1/√r.

    Raises:
        ConfigError: a number is out of range.
    """
    if min(*shape, rank) < 1 or not 0 <= l2 < math.inf:
        raise ConfigError(f"matrix_completion({shape}, {rank}, l2={l2}): expected sizes from 1 and l2 >= 0")
    layout = Layout.of([("L", (shape[0], rank)), ("R", (shape[1], rank))], torch.float32)
    deviation = 1 / math.sqrt(rank) if spread is None else spread

    def start(seed: int, parameters: torch.Tensor) -> None:
        drawn = np.random.default_rng(seed).standard_normal(len(parameters), np.float32)
        parameters.copy_(torch.from_numpy(drawn * np.float32(deviation)))

    def scores(w: Array, rows: SparseRows) -> Array:
        factors = w.reshape(-1, rank)
        first = rows.table.indptr[rows.ids]
        pairs = factors[rows.table.indices[first]] * factors[rows.table.indices[first + 1]]
        return np.asarray(pairs.sum(axis=1))

    return SparseModel(layout, lambda: _factors_of(rank, float(l2)), lambda _: 2 * rank, scores, start)


@functools.cache
def _factors_of(rank: int, l2: float) -> tuple[Touched, Gradient]:
    regular = l2 > 0

    def touched(table: Any, i: int, where: Any) -> int:
        first = table.indptr[i]
        for side in range(2):
            row = table.indices[first + side]
            for j in range(rank):
                where[side * rank + j] = row * rank + j
        return 2 * rank

    def gradient(w: Any, table: Any, i: int, where: Any, count: int, into: Any) -> float:
        product, penalty = 0.0, 0.0
        for j in range(rank):
            product += w[where[j]] * w[where[rank + j]]
        error = product - table.targets[i]
        first = table.indptr[i]
        for side in range(2):
            other, pull = (1 - side) * rank, 0.0
            if regular:
                pull = l2 * table.scale[table.indices[first + side]]
            for j in range(rank):
                at = w[where[side * rank + j]]
                into[side * rank + j] = error * w[where[other + j]] + pull * at
                penalty += 0.5 * pull * at * at
        return float(0.5 * error * error + penalty)

    return touched, gradient
