"""The state of a loop's own modules and optimizers, as named arrays that a run can save and send.

Where only gradients are exchanged, every worker has a whole replica, which its own optimizer updates. The run
saves the replica in three parts: the modules' parameters, for the saved model; their buffers, averaged over the
workers; and the state that only the loop needs to go on, for example momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gradstream.checkpoint.own_state import EXTRA
from gradstream.model.arrays import Arrays, arrays_of, set_tensor
from gradstream.model.buffers import Buffers
from gradstream.model.fixed import Fixed
from gradstream.session.binding import GradientBinding
from gradstream.session.gradient_vector import vector_of
from gradstream.session.optimizer_state import OptimizerStates

Array = np.ndarray[Any, Any]


class ReplicaBinding(GradientBinding):
    """Presents the modules and optimizers of a loop to the run, where the loop's own optimizers make the steps.

    Args:
        modules: modules of the loop. If there are several, names begin with their number: "1.fc.weight".
        optimizers: optimizers whose state a resumed run restores.

    Attributes:
        parameters: all parameters of the modules and optimizers, each once, under its first name.
        names: the names of `parameters`, those with a place in the vector first.
        vector: the vector that a round carries.
        states: the state of the optimizers.

    Raises:
        ConfigError: see `vector_of`.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self.states = OptimizerStates(optimizers)
        self._snapshot: dict[int, torch.Tensor] = {}
        self._places = [
            (part._buffers, key)
            for module in modules
            for part in module.modules()
            for key, buffer in part._buffers.items()
            if buffer is not None
        ]
        self.parameters: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, tensor in self._state():
            if isinstance(tensor, nn.Parameter) and id(tensor) not in seen:
                seen.add(id(tensor))
                self.parameters[name] = tensor
        for index, parameter in enumerate(self._optimized()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                self.parameters[f"other.{index}"] = parameter
        self.names, self.vector = vector_of(self.parameters)
        super().__init__(self.vector)

    def saved(self) -> Arrays:
        """Copies of the parameters under all of their names, as `load_state_dict` expects them."""
        return _arrays(self._all_parameters())

    def buffers(self) -> Arrays:
        """See `ParameterBinding.buffers`. While the loop runs, they are those of its last step."""
        state = [(name, tensor) for name, tensor in self._state() if not isinstance(tensor, nn.Parameter)]
        return _arrays((name, self._snapshot.get(id(buffer), buffer)) for name, buffer in state)

    def snapshot_buffers(self) -> None:
        """See `ParameterBinding.snapshot_buffers`."""
        tensors = [tensor for folder, key in self._places if (tensor := folder.get(key)) is not None]
        if [*self._snapshot] != [id(tensor) for tensor in tensors]:
            self._snapshot = {id(tensor): tensor.detach().clone() for tensor in tensors}
        elif tensors:
            torch._foreach_copy_(list(self._snapshot.values()), tensors)

    def release(self) -> None:
        """See `ParameterBinding.release`."""
        self._snapshot, self._places = {}, []

    def load_buffers(self, buffers: Buffers) -> None:
        """See `ParameterBinding.load_buffers`."""
        for name, tensor in self._state():
            if not isinstance(tensor, nn.Parameter):
                set_tensor(name, tensor, buffers)

    def fixed(self) -> Fixed:
        """All parameters, since no round carries them."""
        return Fixed(self.saved())

    def tree(self, parameters: torch.Tensor) -> Mapping[str, Array]:
        """The parameters of the modules."""
        del parameters
        return self.saved()

    def extra(self) -> Mapping[str, Array]:
        """The state of the optimizers and the buffers that are not persistent; names begin with `EXTRA`.

        Raises:
            ConfigError: see `OptimizerStates.saved`.
        """
        buffers = _arrays((f"{EXTRA}buffer.{name}", tensor) for name, tensor in self._unsaved())
        return {**buffers, **self.states.saved()}

    def load_fixed(self, frozen: Buffers) -> None:
        """Sets the arrays that `saved` and `extra` have returned; ignores other names."""
        for name, parameter in self._all_parameters():
            set_tensor(name, parameter, frozen)
        for name, buffer in self._unsaved():
            set_tensor(f"{EXTRA}buffer.{name}", buffer, frozen)
        self.states.load(frozen)

    def _optimized(self) -> Iterator[nn.Parameter]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _all_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters under every name of a state dict; then those that only an optimizer has."""
        for name, tensor in self._state():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor
        yield from ((name, p) for name, p in self.parameters.items() if name.startswith("other."))

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self._named_modules():
            for name, tensor in module.state_dict(keep_vars=True).items():
                if isinstance(tensor, torch.Tensor):
                    yield prefix + name, tensor

    def _unsaved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that are not persistent."""
        saved = {id(tensor) for _, tensor in self._state()}
        for prefix, module in self._named_modules():
            for name, buffer in module.named_buffers():
                if id(buffer) not in saved:
                    yield prefix + name, buffer

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        several = len(self._modules) > 1
        for index, module in enumerate(self._modules):
            yield f"{index}." if several else "", module


def _arrays(tensors: Iterable[tuple[str, torch.Tensor]]) -> Arrays:
    return {key: array for name, one in tensors for key, array in arrays_of(name, one).items()}
