"""The state of a loop's own modules and optimizers, as named arrays that can be saved and sent.

Where only gradients are exchanged, every worker has a whole replica, and its own optimizer moves it. The run
saves the replica in three parts: the modules' parameters, which a saved model has; their buffers, which are
averaged over workers; and what only the loop needs to go on, such as momentum.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gradstream.checkpoint.own_state import EXTRA
from gradstream.errors import ConfigError
from gradstream.model.buffers import Buffers
from gradstream.model.fixed import Fixed
from gradstream.session.binding import GradientBinding
from gradstream.session.gradient_vector import GradientVector

__all__ = ["LoopState", "ReplicaBinding"]

Array = np.ndarray[Any, Any]
PLAIN = EXTRA + "plain"
"""Name of the array that holds numbers and flags of optimizers, and the loop's counts, as JSON."""


class LoopState:
    """Reads and writes the state of the modules and optimizers that a loop trains with.

    Args:
        modules: modules of the loop. If there are several, names begin with their number: "1.fc.weight".
        optimizers: optimizers whose state a resumed run restores.

    Attributes:
        parameters: all parameters of the modules and optimizers, each once, under its first name.
        counts: numbers from which a resumed loop goes on.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self.counts: dict[str, int] = {}
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

    def saved(self) -> dict[str, Array]:
        """Copies of the parameters under all of their names, as `load_state_dict` expects them."""
        return {name: _array(p).copy() for name, p in self._all_parameters()}

    def buffers(self) -> dict[str, Array]:
        """Copies of the persistent buffers (running means). While the loop runs: as they were at its last step."""
        state = {name: tensor for name, tensor in self._state() if not isinstance(tensor, nn.Parameter)}
        return {name: _array(self._snapshot.get(id(buffer), buffer)).copy() for name, buffer in state.items()}

    def snapshot_buffers(self) -> None:
        """Copies all buffers after a step: a checkpoint before the next step has these."""
        tensors = [tensor for folder, key in self._places if (tensor := folder.get(key)) is not None]
        if [*self._snapshot] != [id(tensor) for tensor in tensors]:
            self._snapshot = {id(tensor): tensor.detach().clone() for tensor in tensors}
        elif tensors:
            torch._foreach_copy_(list(self._snapshot.values()), tensors)

    def release(self) -> None:
        """Drops the copies: the loop is over, and its buffers do not change any more."""
        self._snapshot, self._places = {}, []

    def load_buffers(self, buffers: Buffers) -> None:
        """Sets the buffers that are named."""
        for name, tensor in self._state():
            if name in buffers and not isinstance(tensor, nn.Parameter):
                _set(tensor, buffers[name])

    def extra(self) -> dict[str, Array]:
        """State of the optimizers, buffers that are not persistent, and counts: names begin with `EXTRA`.

        Raises:
            ConfigError: the state of an optimizer has a value that is neither a tensor nor a number.
        """
        arrays = {f"{EXTRA}buffer.{name}": _array(tensor).copy() for name, tensor in self._unsaved()}
        plain: dict[str, Any] = {"counts": self.counts}
        for name, value in self._remembered():
            if isinstance(value, torch.Tensor):
                arrays[name] = _array(value).copy()
                plain[name] = str(value.dtype).removeprefix("torch.")
            elif isinstance(value, int | float | bool | None):
                plain[name] = [value]
            else:
                raise ConfigError(
                    f"checkpoint: {name.removeprefix(EXTRA)} is a {type(value).__name__}; expected a tensor, a "
                    "number, a bool or None: checkpoints can hold no other state of an optimizer"
                )
        return {**arrays, PLAIN: np.frombuffer(json.dumps(plain).encode(), np.uint8)}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Sets the arrays that `saved` and `extra` have returned; ignores names that it does not know."""
        for name, parameter in self._all_parameters():
            if name in arrays:
                _set(parameter, arrays[name])
        for name, buffer in self._unsaved():
            if (key := f"{EXTRA}buffer.{name}") in arrays:
                _set(buffer, arrays[key])
        if PLAIN in arrays:
            plain = json.loads(arrays[PLAIN].tobytes())
            self.counts.update(plain.pop("counts"))
            self._load_optimizers(arrays, plain)

    def _load_optimizers(self, arrays: Mapping[str, Array], plain: Mapping[str, Any]) -> None:
        """Sets the state only: learning rates and other options of the groups stay as the script set them."""
        for number, optimizer in enumerate(self._optimizers):
            for place, parameter in enumerate(_parameters_of(optimizer)):
                prefix = f"{EXTRA}optimizer.{number}.{place}."
                for name, value in plain.items():
                    if not name.startswith(prefix):
                        continue
                    key = name.removeprefix(prefix)
                    if isinstance(value, list):
                        optimizer.state[parameter][key] = value[0]
                        continue
                    before = optimizer.state[parameter].get(key)
                    device = before.device if isinstance(before, torch.Tensor) else parameter.device
                    if key == "step" and not isinstance(before, torch.Tensor):
                        device = torch.device("cpu")  # torch's optimizers count there
                    tensor = torch.from_numpy(arrays[name]).to(device, getattr(torch, value))
                    if tensor.shape == parameter.shape:  # fused optimizers want the parameter's strides
                        tensor = torch.empty_like(parameter, dtype=tensor.dtype, device=device).copy_(tensor)
                    optimizer.state[parameter][key] = tensor

    def _remembered(self) -> Iterator[tuple[str, Any]]:
        for number, optimizer in enumerate(self._optimizers):
            for place, parameter in enumerate(_parameters_of(optimizer)):
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"{EXTRA}optimizer.{number}.{place}.{key}", value

    def _optimized(self) -> Iterator[nn.Parameter]:
        for optimizer in self._optimizers:
            yield from _parameters_of(optimizer)

    def _all_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Under every name of a state dict; then those that only an optimizer has."""
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


class ReplicaBinding(GradientBinding):
    """Presents a loop whose own optimizers move its modules to the run.

    Args:
        replica: state of the modules and optimizers.
        vector: what a round carries.
    """

    def __init__(self, replica: LoopState, vector: GradientVector) -> None:
        super().__init__(vector)
        self._replica = replica

    def buffers(self) -> dict[str, Array]:
        """See `ParameterBinding.buffers`."""
        return self._replica.buffers()

    def snapshot_buffers(self) -> None:
        """See `ParameterBinding.snapshot_buffers`."""
        self._replica.snapshot_buffers()

    def release(self) -> None:
        """See `ParameterBinding.release`."""
        self._replica.release()

    def load_buffers(self, buffers: Buffers) -> None:
        """See `ParameterBinding.load_buffers`."""
        self._replica.load_buffers(buffers)

    def fixed(self) -> Fixed:
        """All parameters, since no round carries them."""
        return Fixed(self._replica.saved())

    def extra(self) -> Mapping[str, Array]:
        """See `model.fixed.extra_of`."""
        return self._replica.extra()

    def load_fixed(self, frozen: Buffers) -> None:
        """See `ParameterBinding.load_fixed`; sets the arrays of `extra` too."""
        self._replica.load(frozen)

    def tree(self, parameters: torch.Tensor) -> Mapping[str, Array]:
        """Parameters of the modules."""
        del parameters
        return self._replica.saved()


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _array(tensor: torch.Tensor) -> Array:
    """The tensor as a numpy array; bfloat16, which numpy lacks, becomes float32, which has all of its values."""
    here = tensor.detach().cpu()
    return (here.float() if here.dtype == torch.bfloat16 else here).numpy()


def _set(tensor: torch.Tensor, array: Array) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(array).view(tensor.shape))
