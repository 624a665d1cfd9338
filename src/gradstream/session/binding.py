"""The parameters that a user's loop holds, and one flat vector: what is between them.

A PyTorch module's parameters are pointed at the flat vector, so nothing is copied. numpy arrays are
held by the user under names of the user's own and cannot be pointed anywhere: they are copied into.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gradstream.errors import ConfigError, GradientError, InternalError
from gradstream.model.base import Layout, Reduction
from gradstream.model.buffers import Buffers
from gradstream.model.built_module import as_numpy
from gradstream.model.fixed import Fixed
from gradstream.model.tree import Tree, leaves
from gradstream.session.watch import ShownParameters

__all__ = ["ArrayBinding", "ModuleBinding", "ParameterBinding"]


class ParameterBinding(ABC):
    """Parameters of a loop of the user's, as a `Model` whose gradients come from elsewhere."""

    reduction: Reduction = "mean"
    layout: Layout

    @abstractmethod
    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the flat vector (E,) with the parameters as the user has made them."""

    @abstractmethod
    def show(self, parameters: torch.Tensor) -> None:
        """From here on the user sees these (E,). The user's thread must be waiting."""

    @abstractmethod
    def take(self, gradient: torch.Tensor) -> None:
        """Writes the user's gradient into the flat vector (E,), zero where there is none.

        Raises:
            GradientError: a gradient of another shape or dtype than its parameter.
        """

    def unchanged(self, where: str) -> None:  # noqa: B027  not all overwrite what the user holds
        """Looks whether the parameters are those that the user was shown. From the user's thread.

        Args:
            where: worker and step, for the message.

        Raises:
            ConfigError: they were changed, which the next `show` would undo.
        """

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of what the user holds besides, of each worker its own: running means."""
        return {}

    def keep(self) -> None:  # noqa: B027  parameters are not the user's to keep
        """The user has made a step, of a replica of its own: what a checkpoint has besides is that of now."""

    def let_go(self) -> None:  # noqa: B027
        """The user's loop is over."""

    def fixed(self) -> Fixed:
        """What the user's module has that this optimizer does not train, and second names of tied weights."""
        return Fixed()

    def load_fixed(self, frozen: Buffers) -> None:  # noqa: B027  arrays have none
        """Sets what is not trained, from a checkpoint. The user's thread must be waiting."""

    def load_buffers(self, buffers: Buffers) -> None:  # noqa: B027  arrays have none
        """Sets them, all workers' means by now. The user's thread must be waiting."""

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters under the user's own names, as views."""
        views = dict(self.layout.views(parameters))
        return {name: views[name].numpy() for name in reversed(views)}

    def gradient(self, *_: Any, **__: Any) -> float:
        """Never asked for."""
        raise InternalError("the gradients of a loop of the user's come from the loop")

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Never asked for."""
        del parameters, inputs
        raise InternalError("the outputs of a loop of the user's are computed in the loop")


class ModuleBinding(ParameterBinding):
    """Parameters of a module that an optimizer updates.

    Args:
        module: gives them their names.
        parameters: those that the optimizer has and that require a gradient.

    Raises:
        ConfigError: none, of several dtypes, neither float32 nor float64, or not in main memory.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._module = module
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        places = {key: place for place, key in enumerate(names)}
        # The last one first, about the order in which a backprop finishes them.
        self._parameters = sorted(parameters, key=lambda p: -places.get(id(p), len(places)))
        tensors = []
        for index, parameter in enumerate(self._parameters):
            name = names.get(id(parameter), f"other.{index}")
            if parameter.device.type != "cpu":
                raise ConfigError(
                    f"parameter {name!r} is on {parameter.device}; a session exchanges parameters in main "
                    'memory: keep the module on "cpu"'
                )
            tensors.append((name, tuple(parameter.shape)))
        dtypes = {str(parameter.dtype) for parameter in self._parameters}
        if len(dtypes) != 1 or not dtypes <= {"torch.float32", "torch.float64"}:
            got = ", ".join(sorted(dtypes)) or "no parameters that require a gradient"
            raise ConfigError(
                f"the optimizer has {got}; expected one dtype, float32 or float64, in which steps are added "
                "up: keep the parameters in float32 (model.float()), and compute in bfloat16 or float16 with "
                "torch.autocast"
            )
        self.layout = Layout.of(tensors, self._parameters[0].dtype)
        self.watch = ShownParameters(module, self._parameters, self.layout)

    def unchanged(self, where: str) -> None:
        """See `ParameterBinding.unchanged`."""
        self.watch.check(where)

    def ranges(self, groups: Sequence[Iterable[nn.Parameter]]) -> list[tuple[str, int, int]]:
        """(number of the group, start, stop): which parts of the flat vector belong to which group."""
        numbers = {id(parameter): str(number) for number, group in enumerate(groups) for parameter in group}
        ranges: list[tuple[str, int, int]] = []
        for parameter, slot in zip(self._parameters, self.layout.slots, strict=True):
            number, start = numbers[id(parameter)], slot.start
            if ranges and ranges[-1][0] == number:
                start = ranges.pop()[1]
            ranges.append((number, start, slot.stop))
        return ranges

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """See `ParameterBinding.buffers`: the persistent ones."""
        return {name: buffer.detach().numpy().copy() for name, buffer in self._buffers()}

    def load_buffers(self, buffers: Buffers) -> None:
        """See `ParameterBinding.load_buffers`."""
        for name, buffer in self._buffers():
            if name in buffers:
                buffer.detach().copy_(torch.from_numpy(buffers[name]))

    def fixed(self) -> Fixed:
        """See `ParameterBinding.fixed`."""
        trained = self._names()
        second = {name: first for name, first in trained.items() if name != first}
        frozen = {name: as_numpy(p.detach()).copy() for name, p in self._state(True) if name not in trained}
        return Fixed(frozen, second)

    def load_fixed(self, frozen: Buffers) -> None:
        """See `ParameterBinding.load_fixed`."""
        for name, parameter in self._state(True):
            if name in frozen:
                parameter.detach().copy_(torch.from_numpy(frozen[name]))

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters under all of their names, those that are not trained among them."""
        views, fixed = dict(self.layout.views(parameters)), self.fixed()
        second = {name: views[first].numpy() for name, first in fixed.second.items()}
        return {**super().tree(parameters), **second, **fixed.frozen}

    def _names(self) -> dict[str, str]:
        """Every name of the parameters that are trained, with the one in the layout."""
        first = {id(p): slot.name for p, slot in zip(self._parameters, self.layout.slots, strict=True)}
        return {name: first[id(p)] for name, p in self._state(True) if id(p) in first}

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return self._state(False)

    def _state(self, parameters: bool) -> list[tuple[str, torch.Tensor]]:
        """The module's parameters, or its persistent buffers, by name as a state dict has them."""
        state = self._module.state_dict(keep_vars=True)
        tensors = [(name, tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)]
        return [(name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter) is parameters]

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """See `ParameterBinding.init`."""
        del seed
        for parameter, (_, view) in zip(self._parameters, self.layout.views(parameters), strict=True):
            view.copy_(parameter.data)

    def show(self, parameters: torch.Tensor) -> None:
        """See `ParameterBinding.show`: views, without copying."""
        for parameter, (_, view) in zip(self._parameters, self.layout.views(parameters), strict=True):
            parameter.data = view
        self.watch.note(parameters)

    def take(self, gradient: torch.Tensor) -> None:
        """See `ParameterBinding.take`."""
        for parameter, (_, view) in zip(self._parameters, self.layout.views(gradient), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                sparse = parameter.grad.layout is not torch.strided
                view.copy_(parameter.grad.to_dense() if sparse else parameter.grad)


class ArrayBinding(ParameterBinding):
    """numpy arrays that are updated in place.

    Args:
        arrays: a tree (dict, list or tuple) of arrays, or one.

    Raises:
        ConfigError: a leaf that is no writable array, or several dtypes, or neither float32 nor float64.
    """

    def __init__(self, arrays: Tree) -> None:
        self._arrays = dict(_named(arrays))
        for name, array in self._arrays.items():
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise ConfigError(
                    f"{name}: got {type(array).__name__}, expected a numpy array that can be written: "
                    "it is updated in place"
                )
        dtypes = {array.dtype.name for array in self._arrays.values()}
        if len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
            got = ", ".join(sorted(dtypes)) or "no arrays"
            raise ConfigError(f"parameters are {got}; expected one dtype, float32 or float64")
        tensors = [(name, array.shape) for name, array in self._arrays.items()][::-1]
        self.layout = Layout.of(tensors, getattr(torch, dtypes.pop()))
        self._gradients: dict[str, np.ndarray[Any, Any]] = {}
        self._shown = torch.empty(0)

    def unchanged(self, where: str) -> None:
        """See `ParameterBinding.unchanged`."""
        for name, view in self.layout.views(self._shown) if len(self._shown) else ():
            if not np.array_equal(view.numpy(), self._arrays[name], equal_nan=True):
                raise ConfigError(
                    f"{where}: array {name!r} was changed since the exchange before, and the next one would "
                    "undo that: have the update rule do it (weight_decay for one), or do it before the first "
                    "exchange, or after session.close"
                )

    @property
    def by_name(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The arrays, by name."""
        return self._arrays

    def check(self, arrays: Tree) -> None:
        """Raises ConfigError unless these are the very arrays that were given first."""
        for name, array in _named(arrays):
            if self._arrays.get(name) is not array:
                raise ConfigError(
                    f"{name} is another array than the one given first: parameters are updated in place, "
                    "so do not make new ones (w += d instead of w = w + d)"
                )

    def give(self, gradients: Tree) -> None:
        """Keeps the gradients for `take`.

        Raises:
            GradientError: not one for each parameter, or of another shape or dtype.
        """
        given = {name: np.asarray(array) for name, array in _named(gradients)}
        if given.keys() != self._arrays.keys():
            raise GradientError(f"gradients of {sorted(given)}; expected those of {sorted(self._arrays)}")
        for name, array in self._arrays.items():
            got = given[name]
            if got.shape != array.shape or got.dtype != array.dtype:
                raise GradientError(
                    f"gradient of {name}: got shape {got.shape} {got.dtype}, "
                    f"expected {array.shape} {array.dtype}"
                )
        self._gradients = given

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """See `ParameterBinding.init`."""
        del seed
        for name, view in self.layout.views(parameters):
            view.numpy()[...] = self._arrays[name]

    def show(self, parameters: torch.Tensor) -> None:
        """See `ParameterBinding.show`: copies."""
        for name, view in self.layout.views(parameters):
            self._arrays[name][...] = view.numpy()
        self._shown = parameters

    def take(self, gradient: torch.Tensor) -> None:
        """See `ParameterBinding.take`."""
        for name, view in self.layout.views(gradient):
            view.numpy()[...] = self._gradients[name]


def _named(tree: Tree) -> list[tuple[str, Any]]:
    return list(leaves(list(tree) if isinstance(tree, tuple) else tree))
