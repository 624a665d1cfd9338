"""Connects the parameters of a user's loop to the flat vector that is exchanged.

A PyTorch module's parameters become views of the vector, so nothing is copied. numpy arrays cannot become views:
they are copied into (see `arrays.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from gradstream.errors import ConfigError, InternalError
from gradstream.model.base import Layout, Reduction
from gradstream.model.buffers import Arrays, Buffers, arrays_of, set_tensor
from gradstream.model.built_module import Fixed, check_untied, named, unwrapped
from gradstream.session.gradient_vector import GradientVector
from gradstream.session.watch import ParameterWatch


class EntryState(Protocol):
    """What a newcomer has to know besides the model: see `SessionEntry`."""

    def saved(self) -> Arrays:
        """The state as arrays; {} before the first step."""
        ...

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Takes what `saved` of another worker has returned."""
        ...


class ParameterBinding(ABC):
    """Presents the parameters of a user's loop to the run as a `Model` whose gradients the loop computes."""

    reduction: Reduction = "mean"
    layout: Layout
    entry: EntryState | None = None
    """The session's own state, which a newcomer needs too."""

    @abstractmethod
    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the flat vector (E,) with the user's initial parameters."""

    @abstractmethod
    def set_parameters(self, parameters: torch.Tensor) -> None:
        """Sets the user's parameters to this vector (E,). The user's thread must be waiting."""

    @abstractmethod
    def copy_gradient(self, gradient: torch.Tensor) -> None:
        """Writes the user's gradient into the flat vector (E,), with zeros for parameters that have none.

        Raises:
            GradientError: a gradient has another shape or dtype than its parameter.
        """

    def extra(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """State besides the model, such as the optimizer's. Names begin with `EXTRA`."""
        return {}

    def entry_state(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """What a newcomer needs besides `fixed` and `extra`, while the loop waits for the exchange of a round."""
        return {} if self.entry is None else self.entry.saved()

    @contextmanager
    def showing(self, parameters: torch.Tensor, own: torch.Tensor | None) -> Iterator[None]:
        """Shows the user these parameters (E,) until the context ends, then `own` again unless it is None."""
        self.set_parameters(parameters)
        try:
            yield
        finally:
            if own is not None:
                self.set_parameters(own)

    def check_unchanged(self, where: str) -> None:  # noqa: B027  not all overwrite the user's parameters
        """Checks that the script has not changed the parameters since they were set. Called from the user's thread.

        Args:
            where: worker and step, for the message.

        Raises:
            ConfigError: the script has changed them, and the next `set_parameters` would undo that.
        """

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of this worker's buffers, such as running means."""
        return {}

    def snapshot_buffers(self) -> None:  # noqa: B027  needed only where the loop moves the parameters
        """Copies the buffers for a checkpoint, after a step of the user's own optimizer."""

    def release(self) -> None:  # noqa: B027  needed only with `snapshot_buffers`
        """Drops the copies when the user's loop has ended."""

    def fixed(self) -> Fixed:
        """Parameters that the optimizer does not train, and the other names of tied weights."""
        return Fixed()

    def load_fixed(self, frozen: Buffers) -> None:
        """Sets what these three return, of a checkpoint or a worker. The user's thread must be waiting."""
        if self.entry is not None:
            self.entry.load(frozen)

    def load_buffers(self, buffers: Buffers) -> None:  # noqa: B027  arrays have none
        """Sets the buffers to the means over all workers. The user's thread must be waiting."""

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Views of the parameters under the user's own names."""
        views = dict(self.layout.views(parameters))
        return {name: views[name].numpy() for name in reversed(views)}

    def gradient(self, *_: Any, **__: Any) -> float:
        """Raises InternalError: the user's loop computes the gradients."""
        raise InternalError(
            "a worker asked a session for a gradient, but the user's loop computes the gradients"
        )

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Raises InternalError: the user's loop computes the outputs."""
        del parameters, inputs
        raise InternalError("a worker asked a session for outputs, but the user's loop computes the outputs")


class GradientBinding(ParameterBinding):
    """A binding for loops that exchange only gradients: the user's thread reads and writes the vector itself.

    Args:
        vector: the vector that a round carries.
    """

    def __init__(self, vector: GradientVector) -> None:
        self.layout = vector.layout

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the vector with zeros: there is no mean gradient yet."""
        del seed
        parameters.zero_()

    def set_parameters(self, parameters: torch.Tensor) -> None:
        """Does nothing: the user's thread reads the mean gradient."""

    def copy_gradient(self, gradient: torch.Tensor) -> None:
        """Does nothing: the user's thread has written the gradient."""


class ModuleBinding(ParameterBinding):
    """Makes the parameters of a module views of the flat vector.

    Args:
        module: the user's module. Parameters have its names.
        parameters: parameters of the optimizer that require a gradient.

    Raises:
        ConfigError: there are no parameters, their dtypes differ or are neither float32 nor float64, or a
            parameter is not in main memory or shares memory with another tensor.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        check_untied(module, parameters)
        self._module = unwrapped(module)
        names = {id(parameter): name for name, parameter in named(self._module.named_parameters())}
        places = {key: place for place, key in enumerate(names)}
        # The last one first: backward finishes gradients in about that order.
        self._parameters = sorted(parameters, key=lambda p: -places.get(id(p), len(places)))
        tensors = []
        for index, parameter in enumerate(self._parameters):
            name = names.get(id(parameter), f"other.{index}")
            if parameter.device.type != "cpu":
                raise ConfigError(
                    f"session.wrap: parameter {name!r} is on {parameter.device}; this strategy exchanges "
                    'parameters in main memory: keep the module on "cpu", or use the strategy "synchronous" '
                    'or "allreduce", which support any device'
                )
            tensors.append((name, tuple(parameter.shape)))
        dtypes = {str(parameter.dtype) for parameter in self._parameters}
        if len(dtypes) != 1 or not dtypes <= {"torch.float32", "torch.float64"}:
            got = ", ".join(sorted(dtypes)) or "no parameters that require a gradient"
            raise ConfigError(
                f"session.wrap: the optimizer has {got}; expected one dtype for all parameters, float32 or "
                "float64: keep the parameters in float32 (model.float()), and compute in bfloat16 or float16 "
                "with torch.autocast"
            )
        self.layout = Layout.of(tensors, self._parameters[0].dtype)
        self.watch = ParameterWatch(module, self._parameters, self.layout)

    @override
    def check_unchanged(self, where: str) -> None:
        self.watch.check(where)

    def ranges(self, groups: Sequence[Iterable[nn.Parameter]]) -> list[tuple[str, int, int]]:
        """(number of the group, start, stop) of each part of the flat vector."""
        numbers = {id(parameter): str(number) for number, group in enumerate(groups) for parameter in group}
        ranges: list[tuple[str, int, int]] = []
        for parameter, slot in zip(self._parameters, self.layout.slots, strict=True):
            number, start = numbers[id(parameter)], slot.start
            if ranges and ranges[-1][0] == number:
                start = ranges.pop()[1]
            ranges.append((number, start, slot.stop))
        return ranges

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """See `ParameterBinding.buffers`: persistent buffers."""
        return self._arrays(self._buffers())

    @override
    def load_buffers(self, buffers: Buffers) -> None:
        for name, buffer in self._buffers():
            set_tensor(name, buffer, buffers)

    @override
    def fixed(self) -> Fixed:
        trained = self._names()
        second = {name: first for name, first in trained.items() if name != first}
        return Fixed(self._arrays([one for one in self._state(True) if one[0] not in trained]), second)

    @override
    def load_fixed(self, frozen: Buffers) -> None:
        super().load_fixed(frozen)
        trained = self._names()
        for name, parameter in self._state(True):
            if name not in trained:
                set_tensor(name, parameter, frozen)

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """All parameters, trained or not, under all of their names."""
        views, fixed = dict(self.layout.views(parameters)), self.fixed()
        second = {name: views[first].numpy() for name, first in fixed.second.items()}
        return {**super().tree(parameters), **second, **fixed.frozen}

    def _names(self) -> dict[str, str]:
        """Maps every name of a trained parameter to its name in the layout."""
        first = {id(p): slot.name for p, slot in zip(self._parameters, self.layout.slots, strict=True)}
        return {name: first[id(p)] for name, p in self._state(True) if id(p) in first}

    def _arrays(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Arrays:
        return {key: array for name, tensor in tensors for key, array in arrays_of(name, tensor).items()}

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return self._state(False)

    def _state(self, parameters: bool) -> list[tuple[str, torch.Tensor]]:
        """The module's parameters, or its persistent buffers, under the names of its state dict."""
        state = named(self._module.state_dict(keep_vars=True).items())
        tensors = [(name, tensor) for name, tensor in state if isinstance(tensor, torch.Tensor)]
        return [(name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter) is parameters]

    @override
    def init(self, seed: int, parameters: torch.Tensor) -> None:
        del seed
        for parameter, (_, view) in zip(self._parameters, self.layout.views(parameters), strict=True):
            view.copy_(parameter.data)

    def set_parameters(self, parameters: torch.Tensor) -> None:
        """Makes the module's parameters views of this vector."""
        self._point_at(parameters)
        self.watch.record(parameters)

    def _point_at(self, parameters: torch.Tensor) -> None:
        """Makes the module's parameters views of this vector (E,)."""
        for parameter, (_, view) in zip(self._parameters, self.layout.views(parameters), strict=True):
            parameter.data = view

    @override
    def copy_gradient(self, gradient: torch.Tensor) -> None:
        for parameter, (_, view) in zip(self._parameters, self.layout.views(gradient), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                sparse = parameter.grad.layout is not torch.strided
                view.copy_(parameter.grad.to_dense() if sparse else parameter.grad)
