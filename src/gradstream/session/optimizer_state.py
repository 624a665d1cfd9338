"""The state of a loop's own optimizers in checkpoints: all that `state_dict()` has, as arrays and JSON.

A script that is resumed runs from its top: it sets the options of its parameter groups itself, and its schedulers
come to where they were. So of `param_groups`, only those entries are restored that the optimizer's own `step`
changes, such as the counters of Prodigy and of schedule-free optimizers.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from gradstream.checkpoint.own_state import EXTRA
from gradstream.errors import ConfigError, DataError
from gradstream.model.arrays import Arrays, arrays_of, set_tensor

PLAIN = EXTRA + "plain"
"""Name of the array that holds all that is no tensor, as JSON."""

Entry = tuple[int, str]
"""An entry of `param_groups`: number of the group, and its key."""

_SEQUENCES: Mapping[str, type[Any]] = {"list": list, "tuple": tuple, "set": set}


class OptimizerStates:
    """Saves and restores the state of optimizers.

    Args:
        optimizers: the optimizers, in the order of `Session.wrap`.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._counters: Sequence[set[Entry]] = [
            set() for _ in optimizers
        ]  # the entries that its `step` changes
        self._checked: set[int] = set()

    def watch(self, *, check: bool) -> None:
        """Finds out, from now on, which entries of its groups each optimizer's own `step` changes.

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
        arrays: Arrays = {}
        plain = [_encode(self._told(i), f"optimizer.{i}", arrays) for i in range(len(self._optimizers))]
        return {**arrays, PLAIN: np.frombuffer(json.dumps(plain).encode(), np.uint8)}

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Sets what `saved` has returned; does nothing where it is not there.

        Raises:
            DataError: another version of gradstream has written it, or it is of another number of optimizers.
        """
        if PLAIN not in arrays:
            return
        plain = json.loads(arrays[PLAIN].tobytes())
        if not isinstance(plain, list) or len(plain) != len(self._optimizers):
            raise DataError(
                f"the checkpoint does not have the state of {len(self._optimizers)} optimizers in the form of this "
                "version of gradstream: resume the run with the version, and the script, that wrote it"
            )
        for number, one in enumerate(plain):
            self._load(number, _decode(one, arrays))

    def _told(self, number: int) -> dict[str, Any]:
        """The optimizer's state dict, with those entries of its groups alone that its `step` changes."""
        told = self._optimizers[number].state_dict()
        groups = told["param_groups"]
        return {
            **told,
            "param_groups": [
                (index, key, groups[index][key])
                for index, key in sorted(self._counters[number])
                if index < len(groups) and key in groups[index]
            ],
        }

    def _load(self, number: int, told: dict[str, Any]) -> None:
        optimizer = self._optimizers[number]
        groups = optimizer.param_groups
        for index, key, value in told.pop("param_groups"):
            self._counters[number].add((index, key))
            if index < len(groups):
                groups[index][key] = _placed(value, groups[index].get(key), None, key)
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            optimizer.load_state_dict({**optimizer.state_dict(), **told})
            return
        # torch's own casts states to their parameter's dtype: float32 ones of bfloat16 parameters would lose bits.
        owners = dict(enumerate((p, group) for group in groups for p in group["params"]))
        before = dict(optimizer.state)
        optimizer.state.clear()
        for key, state in told["state"].items():
            owner, group = owners.get(key, (None, {}))
            whose = key if owner is None else owner
            on_device = bool(group.get("capturable") or group.get("fused"))
            optimizer.state[whose] = _placed(state, before.get(whose), owner, "" if on_device else "step")

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
            _encode(self._told(number), f"optimizer.{number}", None)

    def _entries(self, number: int) -> dict[Entry, Any]:
        """What can be compared later of all entries: lists as copies, of a tensor its identity and version."""
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


def _encode(value: Any, where: str, arrays: Arrays | None) -> Any:
    """The value as JSON: what is no plain value is a list that begins with its kind.

    Args:
        where: the value's place, for names and messages.
        arrays: gets the tensors; None leaves them out, to find out whether all can be saved.

    Raises:
        ConfigError: a value can be saved neither as an array nor as JSON.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, torch.Tensor) and not value.is_quantized:
        name = f"{EXTRA}{where}"
        while arrays and name in arrays:  # of the keys 1 and "1"
            name += "'"
        if arrays is not None:
            arrays.update(arrays_of(name, value))
        dtype, layout = (str(kind).removeprefix("torch.") for kind in (value.dtype, value.layout))
        return ["tensor", name, dtype, layout, list(value.shape)]
    if type(value) in (dict, OrderedDict, defaultdict):
        pairs = value.items()
        return ["dict", [[_encode(k, where, arrays), _encode(v, f"{where}.{k}", arrays)] for k, v in pairs]]
    kind = "tuple" if isinstance(value, torch.Size) else type(value).__name__
    if _SEQUENCES.get(kind) is type(value) or isinstance(value, torch.Size):
        return [kind, [_encode(one, f"{where}.{i}", arrays) for i, one in enumerate(value)]]
    raise ConfigError(
        f"checkpoint: {where}, of the state of an optimizer, is a {type(value).__name__}; expected a tensor, a number, "
        "text or None, or a list or dict of these: store it as one of them or keep it outside of the optimizer's "
        "state; or make no checkpoints, join(checkpoint_every=None)"
    )


def _decode(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        name, dtype, layout, shape = rest
        kinds = getattr(torch, dtype), getattr(torch, layout)
        if not isinstance(kinds[0], torch.dtype) or not isinstance(kinds[1], torch.layout):
            raise DataError(f"{name[:80]!r} of the checkpoint is a tensor of an unknown kind, {value[2:4]}")
        tensor = torch.zeros(shape, dtype=kinds[0], layout=kinds[1])
        set_tensor(name, tensor, arrays)
        return tensor
    if kind == "dict":
        return {_decode(key, arrays): _decode(one, arrays) for key, one in rest[0]}
    return _SEQUENCES[kind](_decode(one, arrays) for one in rest[0])


def _placed(value: Any, before: Any, owner: torch.Tensor | None, on_cpu: str, key: Any = None) -> Any:
    """The value with tensors where the optimizer has them: beside those of `before`, or else beside their parameter.

    Args:
        owner: the parameter that the state belongs to; None if it belongs to none.
        on_cpu: key of the tensor that stays in main memory: torch's optimizers count there.
        key: key of the value in its state.
    """
    if isinstance(value, dict):
        was = before if isinstance(before, dict) else {}
        return {k: _placed(one, was.get(k), owner, on_cpu, k) for k, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placed(one, None, owner, on_cpu) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(before, torch.Tensor):
        value = value.to(before.device)
    elif owner is not None and key != on_cpu:
        value = value.to(owner.device)
    if owner is not None and value.shape == owner.shape and value.layout is torch.strided:
        # fused optimizers want the parameter's strides
        return torch.empty_like(owner, dtype=value.dtype, device=value.device).copy_(value).detach()
    return value
