"""`from_functions`: makes a `Model` on flat vectors out of functions on numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from gradstream.errors import ConfigError, GradientError, UnknownNameError
from gradstream.model.base import Batch, Layout, Reduction, Slot, check_option, finite_loss
from gradstream.model.buffers import Tree, for_numpy, leaves, numpy_dtype, rebuild
from gradstream.model.rows import RowGradient, Rows
from gradstream.runtime.base import Report

Init = Callable[[int], Tree]
Outputs = Callable[[Any, Any], Any]
Gradients = Callable[[Any, Any, Any], Any]
Loss = Callable[[Any, Any], Any]


def from_functions(
    init: Init,
    outputs: Outputs,
    gradients: Gradients,
    *,
    loss: Loss | None = None,
    reduction: Reduction = "mean",
    dtype: Literal["float32", "float64"] = "float32",
    row_sparse: Sequence[str] = (),
) -> FunctionsModel:
    """Makes a model out of functions on numpy arrays.

    Parameters are one array, or a dict or list of arrays, which may be nested. The functions receive them as
    read-only views. A dict should have the order of the computation, input side first: the gradients of its
    last entries are exchanged first.

    Args:
        init: function from a seed to initial parameters, without side effects. Arrays are cast to `dtype`.
        outputs: function from (parameters, inputs) to outputs, samples along the first axis.
        gradients: function from (parameters, inputs, targets) to gradients in the structure, shapes and
            dtype of the parameters, or to the tuple (loss, gradients).
        loss: function from (outputs, targets) to a number, used where `gradients` returns no loss. Without it
            the loss of such a model is unknown (NaN).
        reduction: whether gradients and loss are the mean or the sum over samples.
        dtype: dtype of the parameters, to which floating-point inputs and targets are cast.
        row_sparse: names of arrays (nested names joined by dots) of which a minibatch uses few rows.
            `gradients` returns `gradstream.model.Rows` for them; strategies that support it send only these.

    Raises:
        ConfigError: an argument is wrong; or, on first use, `init` returns no tree of number arrays.

    Example:
        >>> model = from_functions(
        ...     init=lambda seed: {"w": np.zeros(2)},
        ...     outputs=lambda p, x: x @ p["w"],
        ...     gradients=lambda p, x, y: {"w": 2 / len(x) * x.T @ (x @ p["w"] - y)},
        ... )
        >>> model.layout.elems
        2
    """
    check_option("from_functions", "reduction", reduction, "mean", "sum")
    check_option("from_functions", "dtype", dtype, "float32", "float64")
    if isinstance(row_sparse, str):
        raise ConfigError(f"from_functions: row_sparse is {row_sparse!r}; expected a list of names")
    names = tuple(row_sparse)
    return FunctionsModel(init, outputs, gradients, loss, reduction, getattr(torch, dtype), names)


class FunctionsModel:
    """Calls a user's functions with views of the flat vector. Made by `from_functions`."""

    def __init__(
        self,
        init: Init,
        outputs: Outputs,
        gradients: Gradients,
        loss: Loss | None,
        reduction: Reduction,
        dtype: torch.dtype,
        row_sparse: Sequence[str] = (),
    ) -> None:
        self.reduction: Reduction = reduction
        self._row_sparse = row_sparse
        self._init = init
        self._outputs = outputs
        self._gradients = gradients
        self._loss = loss
        self._dtype = dtype

    @cached_property
    def _shapes(self) -> Tree:
        """The tree of parameters that `init(0)` returns, with shapes (tuples) in place of arrays."""
        tree = self._init(0)
        found = iter([_number_array(name, leaf).shape for name, leaf in leaves(tree)])
        return rebuild(tree, lambda name: next(found))

    @cached_property
    def layout(self) -> Layout:
        """Names and places of the arrays, the last of the tree first."""
        named = list(leaves(self._shapes))
        if not named:
            raise ConfigError("from_functions: init(seed) returned no arrays, expected at least one to train")
        shapes = dict(named)
        for name in self._row_sparse:
            if name not in shapes:
                raise UnknownNameError("row-sparse array", name, list(shapes))
            if not shapes[name]:
                raise ConfigError(
                    f"from_functions: row_sparse names {name!r}, which is a single number; expected an array with "
                    "rows along its first axis"
                )
        return Layout.of(named[::-1], self._dtype, self._row_sparse)

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the flat vector with the user's initial parameters; see `Model.init`."""
        tree = self._init(seed)
        arrays = {name: _number_array(name, leaf) for name, leaf in leaves(tree)}
        if {name: a.shape for name, a in arrays.items()} != dict(leaves(self._shapes)):
            raise ConfigError(
                f"from_functions: init({seed}) returned other names or shapes than init(0), expected the same: "
                "they must not depend on the seed"
            )
        for name, view in self.layout.views(parameters):
            view.numpy()[...] = arrays[name]

    def gradient(
        self,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        *,
        seed: int,
        report: Report,
        rows: RowGradient | None = None,
    ) -> float:
        """Writes the user's gradients into `gradient`; see `Model.gradient`. `seed` is not used.

        Args:
            rows: takes the gradients of row-sparse arrays; `gradient` then has the layout `layout.rest`.

        Raises:
            GradientError: a gradient is missing, unexpected, of the wrong shape or dtype, or the
                loss is not a finite number. The content of `gradient` is then undefined.
        """
        if batch.num_samples == 0:
            gradient.zero_()
            report(len(gradient))
            return 0.0
        tree = self._views(parameters)
        inputs, targets = for_numpy(batch.inputs, self._dtype), for_numpy(batch.targets, self._dtype)
        result = self._gradients(tree, inputs, targets)
        if isinstance(result, tuple):
            if len(result) != 2:
                raise GradientError(
                    f"gradients() returned a tuple of {len(result)}, expected (loss, gradients) "
                    "or gradients alone"
                )
            loss, result = _loss_value(result[0]), result[1]
        elif self._loss is not None:
            loss = _loss_value(self._loss(self._outputs(tree, inputs), targets))
        else:
            loss = math.nan
        self._land(result, gradient, report, rows)
        return loss

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The user's outputs as a tensor; see `Model.outputs`."""
        array = self._outputs(self._views(parameters), for_numpy(inputs, self._dtype))
        return torch.as_tensor(np.asarray(array))

    def loss_of(self, outputs: torch.Tensor, targets: Any) -> float:
        """The user's loss of outputs; NaN if it is unknown."""
        if self._loss is None:
            return math.nan
        return _loss_value(self._loss(outputs.numpy(), for_numpy(targets, self._dtype)))

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters by name (nested names joined by dots), as numpy views of the flat vector."""
        views = dict(self.layout.views(parameters))
        return {name: views[name].numpy() for name in reversed(views)}

    def _views(self, parameters: torch.Tensor) -> Tree:
        """The user's tree with read-only views, so that writing parameters in place raises an error."""
        views = {name: view.numpy() for name, view in self.layout.views(parameters)}
        for view in views.values():
            view.flags.writeable = False
        return rebuild(self._shapes, views.__getitem__)

    def _land(self, tree: Tree, gradient: torch.Tensor, report: Report, rows: RowGradient | None) -> None:
        try:
            got = dict(leaves(tree))
        except ConfigError as error:
            raise GradientError(f"gradients(): {error}") from error
        missing = [s.name for s in self.layout.slots if s.name not in got]
        extra = got.keys() - {s.name for s in self.layout.slots}
        if missing or extra:
            raise GradientError(
                f"gradients() has {sorted(got)}, expected the parameters' own structure: "
                f"missing {sorted(missing)}, not known {sorted(extra)}"
            )
        landing = self.layout if rows is None else self.layout.rest
        places = {slot.name: slot.stop for slot in landing.slots}
        views = dict(landing.views(gradient))
        for slot in self.layout.slots:
            name, leaf, dtype = slot.name, got[slot.name], numpy_dtype(self._dtype)
            if slot.row_sparse:
                sparse = RowGradient([slot], self._dtype) if rows is None else rows
                sparse.add(slot, *_checked_rows(slot, leaf, dtype))
                if rows is None:
                    numbers, values = sparse[slot]
                    views[name].zero_()[numbers] = values.view(-1, *slot.shape[1:])
            else:
                views[name].numpy()[...] = _checked(name, leaf, slot.shape, dtype)
            if name in places:
                report(places[name])
        if not landing.slots:
            report(0)


def _number_array(name: str, leaf: Any) -> np.ndarray[Any, Any]:
    """An initial parameter as an array. Raises ConfigError unless it has real numbers."""
    array = np.asarray(leaf)
    if array.dtype.kind not in "fiu":
        raise ConfigError(
            f"from_functions: init() returned {type(leaf).__name__} of dtype {array.dtype} for {name!r}; "
            "expected an array of real numbers (containers are dicts and lists)"
        )
    return array


def _checked(
    name: str, leaf: Any, shape: tuple[int, ...], dtype: np.dtype[np.floating[Any]]
) -> np.ndarray[Any, Any]:
    """Checks a gradient against the parameter's shape and dtype. Python numbers fit a 0-d parameter."""
    array = np.asarray(leaf)
    if array.shape != shape:
        raise GradientError(
            f"gradient of {name!r} has shape {array.shape}, expected {shape}, the shape of the parameter"
        )
    if array.dtype != dtype and not (shape == () and isinstance(leaf, int | float)):
        remedy = f'return it with .astype("{dtype}")'
        if array.dtype in (np.float32, np.float64):
            remedy += f', or make the model with dtype="{array.dtype}"'
        raise GradientError(f"gradient of {name!r} is {array.dtype}, expected {dtype}: {remedy}")
    return array


def _checked_rows(
    slot: Slot, leaf: Any, dtype: np.dtype[np.floating[Any]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers and values of a row-sparse gradient, checked against the parameter."""
    if not isinstance(leaf, Rows):
        raise GradientError(
            f"gradient of {slot.name!r} is {type(leaf).__name__}, expected gradstream.model.Rows, since "
            "row_sparse names it"
        )
    numbers = np.asarray(leaf.numbers)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise GradientError(
            f"gradient of {slot.name!r}: row numbers are {numbers.dtype} of shape {numbers.shape}, "
            "expected integers of shape (n,)"
        )
    values = _checked(slot.name, leaf.values, (len(numbers), *slot.shape[1:]), dtype)
    return torch.from_numpy(numbers.astype(np.int64)), torch.from_numpy(np.array(values))


def _loss_value(loss: Any) -> float:
    array = np.asarray(loss)
    if array.size != 1 or array.dtype.kind not in "fiu":
        raise GradientError(
            f"loss is {type(loss).__name__} of shape {array.shape} and dtype {array.dtype}, "
            "expected one number"
        )
    return finite_loss(float(array.reshape(())[()]))
