"""The state of a user's modules and optimizers, as named arrays that a run can save and send.

If only gradients are exchanged, every worker has a whole replica, which its own optimizer updates. The run saves the
replica in three parts: the modules' parameters, for the saved model; their buffers, averaged over the workers; and
state that only a resumed loop needs, for example momentum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from gradstream.checkpoint.own_state import EXTRA
from gradstream.errors import ConfigError, DataError
from gradstream.model.buffers import Arrays, Buffers, arrays_of, set_tensor
from gradstream.model.built_module import Fixed, named, unwrapped
from gradstream.session.binding import GradientBinding
from gradstream.session.gradient_vector import vector_of
from gradstream.session.registered import Held, decode, encode, packed, placed

# ---- optimizer state ---------------------------------------------------------------------
# The state of a user's optimizers in checkpoints: all of `state_dict()`, as arrays and JSON.
#
# A resumed script runs from its top: it sets the options of its parameter groups itself, and its schedulers reach
# the same point again. So only those entries of `param_groups` are restored that the optimizer's own `step` changes,
# such as the counters of Prodigy and of schedule-free optimizers. All entries are kept under "groups" beside them, for
# `gradstream.checkpoints`.

PLAIN = EXTRA + "plain"
"""Name of the array that holds everything but tensors, as JSON."""

NAMES = "names"
"""The entry of a group with the names of its parameters."""

Entry = tuple[int, str]
"""An entry of `param_groups`: number of the group, and its key."""

_REFUSAL = (
    "checkpoint: {where}, of the state of an optimizer, is a {kind}; expected {expected}: store it as one of them or "
    "keep it outside of the optimizer's state; or make no checkpoints, join(checkpoint_every=None)"
)


class OptimizerStates:
    """Saves and restores the state of optimizers.

    Args:
        optimizers: the optimizers, in the order of `Session.wrap`.
        names: names of their parameters, by id.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self._optimizers = optimizers
        self._names = names
        self._counters: Sequence[set[Entry]] = [
            set() for _ in optimizers
        ]  # the entries that its `step` changes
        self._checked: set[int] = set()

    def watch(self, *, check: bool) -> None:
        """Records from now on which entries of its groups each optimizer's own `step` changes.

        Args:
            check: raises ConfigError after an optimizer's first step if `saved` would.
        """
        for number, optimizer in enumerate(self._optimizers):
            before: dict[Entry, Any] = {}
            optimizer.register_step_pre_hook(self._hook(number, before, self._begin_step))
            optimizer.register_step_post_hook(self._hook(number, before, self._end_step))
            if not check:
                self._checked.add(number)

    def saved(self) -> Arrays:
        """The state as arrays, whose names begin with `EXTRA`.

        Raises:
            ConfigError: a state has a value that is neither a tensor nor a plain one.
        """
        held: Held = {}
        plain = [
            encode(self._saved_state(i), f"optimizer.{i}", held, _REFUSAL)
            for i in range(len(self._optimizers))
        ]
        return packed(plain, PLAIN, held)

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restores the arrays of `saved`; does nothing if they are missing.

        Raises:
            DataError: another version of gradstream wrote them, or the number of optimizers differs.
        """
        if PLAIN not in arrays:
            return
        plain = json.loads(arrays[PLAIN].tobytes())
        if not isinstance(plain, list) or len(plain) != len(self._optimizers):
            raise DataError(
                f"the checkpoint does not have the state of {len(self._optimizers)} optimizers in the form of this "
                "version of gradstream: resume the run with the version, and the script, that wrote it"
            )
        for number, encoded in enumerate(plain):
            self._load(number, decode(encoded, arrays))

    def _saved_state(self, number: int) -> dict[str, Any]:
        """The optimizer's state dict; of its groups, the entries that its `step` changes, and all that are plain."""
        told = self._optimizers[number].state_dict()
        groups = told["param_groups"]
        named = [
            [self._names.get(id(parameter), "") for parameter in group["params"]]
            for group in self._optimizers[number].param_groups
        ]
        return {
            **told,
            "groups": [
                {**{key: value for key, value in group.items() if _is_plain(value)}, NAMES: names}
                for group, names in zip(groups, named, strict=False)
            ],
            "param_groups": [
                (index, key, groups[index][key])
                for index, key in sorted(self._counters[number])
                if index < len(groups) and key in groups[index]
            ],
        }

    def _load(self, number: int, told: dict[str, Any]) -> None:
        optimizer = self._optimizers[number]
        groups = optimizer.param_groups
        told.pop("groups", None)
        for index, key, value in told.pop("param_groups"):
            self._counters[number].add((index, key))
            if index < len(groups):
                groups[index][key] = placed(value, groups[index].get(key), None, key)
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            optimizer.load_state_dict({**optimizer.state_dict(), **told})
            return
        # torch's own casts states to their parameter's dtype: float32 states of bfloat16 parameters would lose bits.
        owners = dict(enumerate((p, group) for group in groups for p in group["params"]))
        before = dict(optimizer.state)
        optimizer.state.clear()
        for key, state in told["state"].items():
            owner, group = owners.get(key, (None, {}))
            whose = key if owner is None else owner
            on_device = bool(group.get("capturable") or group.get("fused"))
            optimizer.state[whose] = placed(state, before.get(whose), owner, "" if on_device else "step")

    # ---- hooks --------------------------------------------------------------------------

    def _hook(
        self, number: int, before: dict[Entry, Any], call: Callable[[int, dict[Entry, Any]], None]
    ) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer is self._optimizers[number]:  # a copy has the same hooks
                call(number, before)

        return hook

    def _begin_step(self, number: int, before: dict[Entry, Any]) -> None:
        before.clear()
        before.update(self._entries(number))

    def _end_step(self, number: int, before: dict[Entry, Any]) -> None:
        changed = {
            at for at, value in self._entries(number).items() if at not in before or before[at] != value
        }
        self._counters[number].update(changed)
        if number not in self._checked:
            self._checked.add(number)
            encode(self._saved_state(number), f"optimizer.{number}", {}, _REFUSAL)

    def _entries(self, number: int) -> dict[Entry, Any]:
        """All entries in a form to compare later: lists as copies, tensors by identity and version."""
        return {
            (index, key): (id(value), value._version)
            if isinstance(value, torch.Tensor)
            else type(value)(value)
            if type(value) in (list, dict, set)
            else value
            for index, group in enumerate(self._optimizers[number].param_groups)
            for key, value in group.items()
            if key != "params"
        }


def _is_plain(value: Any) -> bool:
    """Whether `encode` takes an entry of a group."""
    try:
        encode(value, "", {}, _REFUSAL)
    except ConfigError:
        return False
    return True


# ---- replica -----------------------------------------------------------------------------

Array = np.ndarray[Any, Any]


class ReplicaBinding(GradientBinding):
    """Presents a loop's modules and optimizers to a run in which the loop's own optimizers make the steps.

    Args:
        modules: the loop's modules. With several, names begin with their number: "1.fc.weight".
        optimizers: optimizers whose state a resumed run restores.

    Attributes:
        parameters: all parameters of the modules and optimizers, each once, under its first name.
        names: names of `parameters`: first those with a place in the vector.
        vector: the vector that a round carries.
        states: the state of the optimizers.

    Raises:
        ConfigError: see `vector_of`.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._modules = modules
        self._optimizers = optimizers
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
        self.states = OptimizerStates(optimizers, {id(p): name for name, p in self.parameters.items()})
        self.names, self.vector = vector_of(self.parameters)
        super().__init__(self.vector)

    def saved(self) -> Arrays:
        """Copies of the parameters under all of their names, as `load_state_dict` expects them."""
        return _arrays(self._all_parameters())

    def buffers(self) -> Arrays:
        """See `ParameterBinding.buffers`. While the loop runs, returns those of its last step."""
        state = [(name, tensor) for name, tensor in self._state() if not isinstance(tensor, nn.Parameter)]
        return _arrays((name, self._snapshot.get(id(buffer), buffer)) for name, buffer in state)

    @override
    def snapshot_buffers(self) -> None:
        tensors = [tensor for folder, key in self._places if (tensor := folder.get(key)) is not None]
        if [*self._snapshot] != [id(tensor) for tensor in tensors]:
            self._snapshot = {id(tensor): tensor.detach().clone() for tensor in tensors}
        elif tensors:
            torch._foreach_copy_(list(self._snapshot.values()), tensors)

    @override
    def release(self) -> None:
        self._snapshot, self._places = {}, []

    @override
    def load_buffers(self, buffers: Buffers) -> None:
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
        return {**super().extra(), **buffers, **self.states.saved()}

    def load_fixed(self, frozen: Buffers) -> None:
        """Restores the arrays of `saved` and `extra`; ignores other names."""
        super().load_fixed(frozen)
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
        """Parameters under every name of a state dict, then those that only an optimizer has."""
        for name, tensor in self._state():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor
        yield from ((name, p) for name, p in self.parameters.items() if name.startswith("other."))

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self._named_modules():
            for name, tensor in named(module.state_dict(keep_vars=True).items()):
                if isinstance(tensor, torch.Tensor):
                    yield prefix + name, tensor

    def _unsaved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that are not persistent."""
        saved = {id(tensor) for _, tensor in self._state()}
        for prefix, module in self._named_modules():
            for name, buffer in named(module.named_buffers()):
                if id(buffer) not in saved:
                    yield prefix + name, buffer

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        several = len(self._modules) > 1
        for index, module in enumerate(self._modules):
            yield f"{index}." if several else "", unwrapped(module)


def _arrays(tensors: Iterable[tuple[str, torch.Tensor]]) -> Arrays:
    return {key: array for name, tensor in tensors for key, array in arrays_of(name, tensor).items()}
