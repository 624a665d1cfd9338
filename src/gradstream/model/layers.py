"""`from_layers`: makes a `Model` out of layer functions, of JAX or of torch. It can be split between layers.

    x ─ layer 0 ─▶ ─ layer 1 ─▶ … ─▶ outputs ─ loss(outputs, targets) ─▶ scalar

Each layer becomes a module of torch with the layer's parameters. One of JAX is one operation, which JAX compiles and
differentiates; torch sees its arrays alone. So all that runs do with a module of torch, they do with these too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradstream.errors import ConfigError
from gradstream.model.base import Reduction, check_option
from gradstream.model.buffers import Tree, leaves, rebuild
from gradstream.model.built_module import put_tensor
from gradstream.model.jax_functions import import_jax, precision
from gradstream.model.torch_module import TorchModel, from_torch

Layer = tuple[Callable[[int], Tree], Callable[..., Any]] | Callable[[Any], Any]


def from_layers(
    layers: Sequence[Layer],
    loss: Callable[[Any, Any], Any],
    *,
    of: Literal["jax", "torch"],
    reduction: Reduction = "mean",
    dtype: Literal["float32", "float64"] = "float32",
) -> TorchModel:
    """Makes a model out of layers that are computed one after the other; `split=` cuts it between layers alone.

    Parameters are named by the number of their layer: "0.w". A process of a split replica calls `init` of its own
    layers only.

    Args:
        layers: pairs (init, apply). `init(seed)` gives a layer's parameters: a dict or list of arrays, nested or not,
            or one array. `apply(parameters, x)` gives its output from the output of the layer before; the first
            gets the inputs. Each is one array, with the samples along the first axis. A layer without parameters
            is a function of x alone.
        loss: function from (outputs, targets) to a scalar.
        of: whose functions they are. Those of JAX are pure, and compiled once for each shape; they need the extra
            `gradstream[jax]`.
        reduction: whether the loss is the mean or the sum over samples.
        dtype: dtype of the parameters. Floating-point inputs and targets are cast to it.

    Raises:
        ConfigError: an argument is wrong. On first use: no layer has parameters, or they are no numbers.

    Example:
        >>> def linear(seed):
        ...     return {"w": torch.ones(3, 1)}
        >>> model = from_layers([(linear, lambda p, x: x @ p["w"])], lambda y, t: ((y - t) ** 2).mean(), of="torch")
        >>> model.layout.elems
        3
    """
    check_option("from_layers", "of", of, "jax", "torch")
    check_option("from_layers", "dtype", dtype, "float32", "float64")
    kind: torch.dtype = getattr(torch, dtype)
    made: list[tuple[Callable[[int], Tree] | None, Callable[..., Any]]] = []
    for number, layer in enumerate(layers):
        pair: tuple[Any, ...] = layer if isinstance(layer, tuple) else (None, _without_parameters(layer))
        if len(pair) != 2 or not callable(pair[1]) or not (pair[0] is None or callable(pair[0])):
            raise ConfigError(
                f"from_layers: layers[{number}] is {layer!r}; expected a pair of functions (init, apply), or a "
                "function of x"
            )
        made.append((pair[0], _JaxFunction(pair[1], kind) if of == "jax" else pair[1]))
    kinds = _JaxLayer if of == "jax" else _TorchLayer
    swapped: Callable[..., Any] = lambda targets, outputs: loss(outputs, targets)  # noqa: E731
    compiled = _JaxFunction(swapped, kind) if of == "jax" else swapped

    def build() -> nn.Module:
        return nn.Sequential(*(kinds(init, apply, kind) for init, apply in made))

    return from_torch(build, lambda outputs, targets: compiled(targets, outputs), reduction=reduction)


def _without_parameters(apply: Any) -> Callable[..., Any] | None:
    return (lambda parameters, x: apply(x)) if callable(apply) else None


class _Layer(nn.Module):
    """A layer with its parameters.

    Args:
        init, apply: see `from_layers`; a layer without `init` has none.
        dtype: of the parameters.
    """

    def __init__(
        self, init: Callable[[int], Tree] | None, apply: Callable[..., Any], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._call = apply
        self._tree: Tree = {}
        if init is not None:
            self._tree = self._make(init, int(torch.randint(2**31, ())), dtype)

    def _make(self, init: Callable[[int], Tree], seed: int, dtype: torch.dtype) -> Tree:
        """Makes the parameters. Returns a tree of their structure."""
        raise NotImplementedError

    def _parameter(self, name: str) -> Any:
        return reduce(getattr, name.split("."), self)

    def forward(self, x: Any) -> Any:
        """Computes the layer."""
        return self._call(rebuild(self._tree, self._parameter), x)


class _TorchLayer(_Layer):
    def _make(self, init: Callable[[int], Tree], seed: int, dtype: torch.dtype) -> Tree:
        tree = init(seed)
        for name, tensor in leaves(tree):
            put_tensor(self, name, nn.Parameter(torch.as_tensor(tensor).to(dtype)))
        return rebuild(tree, lambda name: None)


class _JaxLayer(_Layer):
    def _make(self, init: Callable[[int], Tree], seed: int, dtype: torch.dtype) -> Tree:
        with precision(dtype):
            tree = import_jax("from_layers").eval_shape(lambda: init(seed))
        places = {}
        for name, array in leaves(tree):
            parameter = nn.Parameter(torch.empty(array.shape, dtype=dtype))
            put_tensor(self, name, parameter)
            places[name] = parameter
        # While a part of a split model is built, the parameters of others are shapes alone.
        with torch._C.DisableTorchFunction():
            if any(place.device.type != "meta" for place in places.values()):
                with precision(dtype):
                    values = dict(leaves(init(seed)))
                for name, place in places.items():
                    if place.device.type != "meta":
                        place.detach().numpy()[...] = values[name]
        return rebuild(tree, lambda name: None)


class _JaxFunction:
    """Calls a function of JAX on tensors of torch, and gives torch its gradient.

    Args:
        function: of (parameters, x), two trees of arrays, to an array.
        dtype: of the parameters; float64 has JAX's 64-bit mode on in the function.
    """

    def __init__(self, function: Callable[[Any, Any], Any], dtype: torch.dtype) -> None:
        self._function = function
        self._dtype = dtype
        self._operations: dict[str, type[torch.autograd.Function]] = {}  # by the structure of the trees

    def __deepcopy__(self, memo: object) -> _JaxFunction:
        return self  # it has no state: simulated workers share what was compiled

    def __call__(self, parameters: Any, x: Any) -> torch.Tensor:
        """The function's result."""
        tensors, structure = tree_flatten((parameters, x))
        key = str(structure)
        if key not in self._operations:
            self._operations[key] = _operation_of(self._function, structure, self._dtype)
        result: torch.Tensor = self._operations[key].apply(*tensors)  # type: ignore[no-untyped-call]
        return result


def _operation_of(
    function: Callable[..., Any], structure: Any, dtype: torch.dtype
) -> type[torch.autograd.Function]:
    """A function of torch that computes a function of JAX, of trees of this structure."""
    jax = import_jax("from_layers")

    def of_list(arrays: list[Any]) -> Any:
        return function(*tree_unflatten(arrays, structure))

    def with_pullback(trained: list[Any], arrays: list[Any]) -> Any:
        def of_trained(trained: list[Any]) -> Any:
            given = iter(trained)
            return of_list([next(given) if array is None else array for array in arrays])

        return jax.vjp(of_trained, trained)

    alone, forward_of, back = jax.jit(of_list), jax.jit(with_pullback), jax.jit(lambda pull, g: pull(g)[0])

    class JaxOperation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            with precision(dtype):
                if any(tensor.device.type == "meta" for tensor in tensors):
                    given = [
                        jax.ShapeDtypeStruct(tuple(tensor.shape), _numpy_dtype(tensor.dtype))
                        for tensor in tensors
                    ]
                    shape = jax.eval_shape(of_list, given)
                    kind = torch.from_numpy(np.empty(0, shape.dtype)).dtype
                    return torch.empty(tuple(shape.shape), dtype=kind, device="meta")
                arrays = [tensor.detach().numpy() for tensor in tensors]
                needed = [
                    need and tensor.is_floating_point()
                    for need, tensor in zip(ctx.needs_input_grad, tensors, strict=True)
                ]
                if not any(needed):
                    return _tensor(alone(arrays))
                trained = [array for array, need in zip(arrays, needed, strict=True) if need]
                rest = [None if need else array for array, need in zip(arrays, needed, strict=True)]
                result, ctx.pull = forward_of(trained, rest)
                return _tensor(result)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            with precision(dtype):
                found = iter(back(ctx.pull, gradients[0].contiguous().numpy()))
                return tuple(_tensor(next(found)) if need else None for need in ctx.needs_input_grad)

    return JaxOperation


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))
