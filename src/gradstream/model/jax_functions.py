"""`from_jax`: makes a `Model` on flat vectors out of pure functions of JAX.

JAX is imported when a model is first used, never before a fork, since it starts threads. This module does not
change JAX's configuration, and does not use `jax.distributed`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from gradstream.errors import ConfigError, GradientError
from gradstream.model.base import Batch, Layout, Reduction, check_option, finite_loss
from gradstream.model.buffers import for_numpy
from gradstream.runtime.base import Report

Init = Callable[[int], Any]
Outputs = Callable[[Any, Any], Any]
Loss = Callable[..., Any]
Array = np.ndarray[Any, Any]


def from_jax(
    init: Init,
    outputs: Outputs,
    loss: Loss,
    *,
    reduction: Reduction = "mean",
    dtype: Literal["float32", "float64"] = "float32",
) -> JaxModel:
    """Makes a model out of pure functions of JAX. Needs the extra: `pip install 'gradstream[jax]'`.

    It differentiates and compiles the functions: `jax.jit` traces `outputs` and `loss` once for each shape of
    batch. Parameters are any pytree; their names are its paths, joined by dots. The pytree should have the
    order of the computation, as in `from_functions` (JAX sorts the keys of dicts).

    Args:
        init: pure function from a seed to initial parameters. Arrays are cast to `dtype`.
        outputs: function from (parameters, inputs) to outputs, samples along the first axis.
        loss: function from (parameters, batch) or (parameters, batch, rng) to a scalar, or to (scalar, aux),
            of which aux is dropped. The batch is the pair (inputs, targets), or the inputs if there are no
            targets. `rng` is a JAX key for dropout, a function of (run seed, worker, step).
        reduction: whether the loss is the mean or the sum over samples.
        dtype: dtype of the parameters. Floating-point inputs and targets are cast to it. For "float64" JAX's
            64-bit mode is on while these functions run, and nowhere else.

    Raises:
        ConfigError: an argument is wrong; or, on first use, JAX is not installed or `init` returns
            no tree of number arrays.

    Example:
        >>> model = from_jax(
        ...     init=lambda seed: {"w": np.zeros(2)},
        ...     outputs=lambda p, x: x @ p["w"],
        ...     loss=lambda p, batch: ((batch[0] @ p["w"] - batch[1]) ** 2).mean(),
        ... )  # doctest: +SKIP
    """
    check_option("from_jax", "reduction", reduction, "mean", "sum")
    check_option("from_jax", "dtype", dtype, "float32", "float64")
    return JaxModel(init, outputs, loss, reduction, getattr(torch, dtype))


@dataclass(frozen=True)
class _Functions:
    """The structure of the parameters and the compiled functions, made on first use."""

    treedef: Any
    layout: Layout
    names: tuple[str, ...]  # names of the leaves, in the tree's order
    outputs: Callable[[Any, Any], Any]
    loss_and_gradient: Callable[[Any, Any, Any], Any]


class JaxModel:
    """Calls a user's JAX functions with views of the flat vector. Made by `from_jax`.

    It has no state of a replica, so simulated workers share one instance and its compiled functions.
    """

    def __init__(
        self, init: Init, outputs: Outputs, loss: Loss, reduction: Reduction, dtype: torch.dtype
    ) -> None:
        self.reduction: Reduction = reduction
        self._init = init
        self._outputs = outputs
        self._loss = loss
        self._dtype = dtype
        self._takes_rng = _takes_rng(loss)

    def __deepcopy__(self, memo: object) -> JaxModel:
        return self

    @property
    def layout(self) -> Layout:
        """Names and places of the arrays, the last of the tree first. The first use calls `init`."""
        return self._functions.layout

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the flat vector with the user's initial parameters; see `Model.init`."""
        functions = self._functions
        with precision(self._dtype):
            named, treedef = _named(import_jax(), self._init(seed))
        shapes = {slot.name: slot.shape for slot in functions.layout.slots}
        if treedef != functions.treedef or {name: array.shape for name, array in named.items()} != shapes:
            raise ConfigError(
                f"from_jax: init({seed}) returned another tree or other shapes than init(0), expected the same: "
                "they must not depend on the seed"
            )
        for name, view in functions.layout.views(parameters):
            view.numpy()[...] = named[name]

    def gradient(
        self,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        *,
        seed: int,
        report: Report,
    ) -> float:
        """Writes the gradient of the loss at `parameters` into `gradient`; see `Model.gradient`.

        Raises:
            GradientError: the loss is not one finite real number. The content of `gradient` is then
                undefined.
        """
        functions = self._functions
        if batch.num_samples == 0:
            gradient.zero_()
            report(functions.layout.elems)
            return 0.0
        inputs, targets = for_numpy(batch.inputs, self._dtype), for_numpy(batch.targets, self._dtype)
        whole = inputs if targets is None else (inputs, targets)
        with precision(self._dtype):
            loss, tree = functions.loss_and_gradient(self._tree(parameters), whole, _seed32(seed))
            leaves = dict(zip(functions.names, functions.treedef.flatten_up_to(tree), strict=True))
            value = finite_loss(float(loss))
            # Results are read in JAX's memory, and copied once, to their places.
            for slot, (name, view) in zip(
                functions.layout.slots, functions.layout.views(gradient), strict=True
            ):
                view.numpy()[...] = np.asarray(leaves[name])
                report(slot.stop)
        return value

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """The user's outputs as a tensor; see `Model.outputs`."""
        with precision(self._dtype):
            found = self._functions.outputs(self._tree(parameters), for_numpy(inputs, self._dtype))
            array = np.asarray(found)
        if array.dtype.kind not in "biufc":  # bfloat16, which torch cannot read from numpy
            array = array.astype(np.float32)
        return torch.from_numpy(array.copy())

    calls_itself = False

    def held_out_loss(self, parameters: torch.Tensor, batch: Batch) -> float:
        """The user's loss; NaN if it draws random numbers, since it may be another one in training."""
        if self._takes_rng:
            return math.nan
        inputs, targets = for_numpy(batch.inputs, self._dtype), for_numpy(batch.targets, self._dtype)
        with precision(self._dtype):
            whole = inputs if targets is None else (inputs, targets)
            loss, _ = self._functions.loss_and_gradient(self._tree(parameters), whole, _seed32(0))
        return float(loss)

    def tree(self, parameters: torch.Tensor) -> Mapping[str, Array]:
        """Parameters by name, as numpy views of the flat vector, in the order of the tree."""
        views = dict(self.layout.views(parameters))
        return {name: views[name].numpy() for name in self._functions.names}

    def _tree(self, parameters: torch.Tensor) -> Any:
        """The user's tree with views. JAX has finished reading them when its results are complete."""
        return self._functions.treedef.unflatten(self.tree(parameters).values())

    @cached_property
    def _functions(self) -> _Functions:
        jax = import_jax()
        with precision(self._dtype):
            named, treedef = _named(jax, self._init(0))
        if not named:
            raise ConfigError("from_jax: init(seed) returned no arrays, expected at least one to train")
        layout = Layout.of([(name, array.shape) for name, array in reversed(named.items())], self._dtype)

        def scalar(parameters: Any, batch: Any, seed: Any) -> Any:
            rng = (jax.random.key(seed),) if self._takes_rng else ()
            return _scalar(self._loss(parameters, batch, *rng))

        return _Functions(
            treedef, layout, tuple(named), jax.jit(self._outputs), jax.jit(jax.value_and_grad(scalar))
        )


def import_jax(who: str = "from_jax") -> ModuleType:
    """JAX. Raises ConfigError, which says who needs it, where it is not installed."""
    try:
        import jax
        import jax.experimental
    except ImportError as error:
        raise ConfigError(f"{who} needs JAX ({error}): pip install 'gradstream[jax]'") from error
    return jax


def precision(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The context in which JAX computes in this dtype: with its 64-bit mode for float64."""
    if dtype != torch.float64:
        return nullcontext()
    jax = import_jax()
    enable: Callable[[bool], AbstractContextManager[Any]]
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    return enable(True)


def _takes_rng(loss: Loss) -> bool:
    """Whether the loss has a third argument without a default, or one named rng or key."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = [p for p in inspect.signature(loss).parameters.values() if p.kind in positional]
    except (TypeError, ValueError):
        return False  # the signature is not known: pass two arguments
    third = parameters[2] if len(parameters) > 2 else None
    return third is not None and (third.default is third.empty or third.name in ("rng", "key"))


def _named(jax: ModuleType, tree: Any) -> tuple[dict[str, Array], Any]:
    """(arrays by their dotted paths, in the tree's order; structure of the tree)."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    named: dict[str, Array] = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "parameters"
        array = np.asarray(leaf)
        if array.dtype.name == "bfloat16":
            array = array.astype(np.float32)
        if array.dtype.kind not in "fiu":
            raise ConfigError(
                f"from_jax: init() returned {type(leaf).__name__} of dtype {array.dtype} for {name!r}; "
                "expected an array of real numbers"
            )
        if name in named:
            raise ConfigError(
                f"from_jax: two arrays are named {name!r}, expected different names: names of nested keys are "
                "joined by dots, so do not use dots in the keys"
            )
        named[name] = array
    return named, treedef


def _scalar(found: Any) -> Any:
    """Takes the loss from the result of a loss function, and checks it while it is traced."""
    loss = found[0] if isinstance(found, tuple) else found
    if isinstance(found, tuple) and len(found) != 2:
        raise GradientError(f"loss() returned a tuple of {len(found)}, expected a scalar or (scalar, aux)")
    shape = getattr(loss, "shape", ())
    kind = np.dtype(loss.dtype).name if hasattr(loss, "dtype") else type(loss).__name__
    if shape != ():
        raise GradientError(f"loss has shape {tuple(shape)}, expected a scalar: take its mean or sum")
    if "float" not in kind:
        raise GradientError(f"loss is {kind}, expected a floating-point number")
    return loss


def _seed32(seed: int) -> np.uint32:
    """A seed for a JAX key, the same in 32-bit and 64-bit mode."""
    return np.uint32((seed ^ (seed >> 32)) & 0xFFFFFFFF)
