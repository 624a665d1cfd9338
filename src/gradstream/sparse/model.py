"""Sparse models: problems whose samples touch few components of the parameters each.

    f(w) = 1/n Σ_i f_i(w_e),   e the components that sample i touches

A problem is two functions that numba compiles (see `sparse.sweep`): one finds the components that a sample
touches, the other its gradient on these. So HOGWILD! makes no pass over the vector. Any other strategy gets the
dense gradient of a minibatch, the mean over its samples. `sparse.problems` has problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradstream.errors import ConfigError, GradientError
from gradstream.model.base import Batch, Layout, Reduction
from gradstream.runtime.base import Report
from gradstream.sparse.data import CsrTable, SparseDataset, SparseRows
from gradstream.sparse.updates import LockAccess, check_compiler

Array = np.ndarray[Any, Any]
Touched = Callable[[Any, int, Any], int]
Gradient = Callable[[Any, Any, int, Any, int, Any], float]
Scores = Callable[[Array, SparseRows], Array]


@dataclass(slots=True)
class SweepState:
    """What a worker's sweep over its samples reads and writes, and how far it has come.

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
    """A problem as a `Model` that also has `sweep`. Made by `from_samples`, and by the functions of `sparse.problems`.

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
                f"inputs are {type(batch.inputs).__name__}; a sparse model needs sparse data: "
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
