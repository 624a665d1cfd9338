"""Everything that the modules and optimizers of a loop hold: by name, as arrays that can travel.

Where gradients alone are exchanged, every worker has a whole replica of its own, and its own optimizer moves
it. The run sees what it holds in three parts: the modules' parameters, which a saved model has; their
buffers, which are averaged; and what nobody but the loop goes on with, such as momentum.
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

__all__ = ["LoopState"]

Array = np.ndarray[Any, Any]
PLAIN = EXTRA + "plain"
"""Name of what is no tensor: numbers and flags of optimizers, and the loop's own counts, as JSON."""


class LoopState:
    """What a worker's loop trains with.

    Args:
        modules: of several, names begin with the number of the module: "1.fc.weight".
        optimizers: whose state goes on in a resumed run.

    Attributes:
        parameters: all of the modules' and optimizers', each once, with its first name.
        counts: numbers of the loop that a resumed run goes on from.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self.counts: dict[str, int] = {}
        self._kept: dict[int, torch.Tensor] = {}
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
        """Parameters under all of their names, as `load_state_dict` expects them; copies."""
        return {name: _array(p).copy() for name, p in self._all_parameters()}

    def buffers(self) -> dict[str, Array]:
        """Persistent buffers: running means; copies. While the loop runs, as they were at its last step."""
        state = {name: tensor for name, tensor in self._state() if not isinstance(tensor, nn.Parameter)}
        return {name: _array(self._kept.get(id(buffer), buffer)).copy() for name, buffer in state.items()}

    def keep(self) -> None:
        """A step was made: a checkpoint that comes before the next one has the buffers of now."""
        tensors = [tensor for folder, key in self._places if (tensor := folder.get(key)) is not None]
        if [*self._kept] != [id(tensor) for tensor in tensors]:
            self._kept = {id(tensor): tensor.detach().clone() for tensor in tensors}
        elif tensors:
            torch._foreach_copy_(list(self._kept.values()), tensors)

    def let_go(self) -> None:
        """The loop is over: buffers are what they are."""
        self._kept, self._places = {}, []

    def load_buffers(self, buffers: Buffers) -> None:
        """Sets those that are named."""
        for name, tensor in self._state():
            if name in buffers and not isinstance(tensor, nn.Parameter):
                _set(tensor, buffers[name])

    def extra(self) -> dict[str, Array]:
        """Optimizers' state, buffers that no state dict has, and counts: names begin with `EXTRA`.

        Raises:
            ConfigError: an optimizer remembers something that is neither a tensor nor a number.
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
                    f"{name} is a {type(value).__name__}: what an optimizer remembers is kept in checkpoints "
                    "where it is a tensor or a number"
                )
        return {**arrays, PLAIN: np.frombuffer(json.dumps(plain).encode(), np.uint8)}

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Sets what `saved` and `extra` have given; names that are not known are passed over."""
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
        """State alone: rates and other options of the groups are as the script has made them."""
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
                        device = torch.device("cpu")  # where torch's own optimizers count
                    tensor = torch.from_numpy(arrays[name]).to(device, getattr(torch, value))
                    if tensor.shape == parameter.shape:  # fused optimizers want it in the parameter's order
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
        """Under every name that a state dict has, and those that only an optimizer knows."""
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


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _array(tensor: torch.Tensor) -> Array:
    """As numpy has it; of a dtype that numpy has not, as float32, which holds each of its values."""
    here = tensor.detach().cpu()
    return (here.float() if here.dtype == torch.bfloat16 else here).numpy()


def _set(tensor: torch.Tensor, array: Array) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(array).view(tensor.shape))
