"""Detects changes to parameters between two steps that the next exchange would undo.

Under strategies that set the parameters at each step, the exchange sees only gradients: any other change that the
script makes to a parameter would be lost silently. So the step raises an error. It compares values instead of
watching for functions that change parameters:

* every step compares each parameter's storage and version; torch increments the version at each in-place write;
* a write through `.data`, numpy or a fused kernel does not change the version, so every step also compares 65,536
        elements with a copy, at a different place each time, and the first two steps compare a sum of all elements;
* every step checks that the module still has the parameter.

Buffers and frozen parameters are the script's own. They may differ between workers, and are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gradstream.errors import ConfigError
from gradstream.model.base import Layout

SAMPLE_ELEMS = 1 << 16
"""Elements compared at each step: 256 KiB of float32."""

FULL_CHECKS = 3
"""Number of times that all elements are recorded: at `wrap`, and at the first two steps."""

INSTEAD = (
    'use the strategy "synchronous" or "allreduce", where your optimizer makes each step itself, on every worker, as '
    'torch does, or, over slow links, "local-sgd"'
)
"""The remedy for a loop that changes parameters itself."""

Groups = Sequence[Mapping[str, Any]]
Mark = tuple[int, int, tuple[int, ...]]
Link = tuple[dict[str, Any], str, object]


class ParameterWatch:
    """Records parameters when they are set, and checks later that the script has not changed them.

    Args:
        module: the script's module.
        parameters: the exchanged parameters, in the order of `layout`.
        layout: their names and places in the flat vector.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], layout: Layout) -> None:
        self._module = module
        self._parameters = list(zip((slot.name for slot in layout.slots), parameters, strict=True))
        self._layout = layout
        self._names = {id(parameter): name for name, parameter in self._parameters}
        self._links = self._find_links()
        self._inside = {id(parameter) for parameter in module.parameters()} & self._names.keys()
        self._flat: torch.Tensor | None = None
        self._marks: list[Mark] = []
        self._copy, self._copied_at, self._next = torch.empty(0), 0, 0
        self._sums: list[int] = []
        self._num_records = 0

    def record(self, parameters: torch.Tensor) -> None:
        """Records the vector (E,) of which the script's parameters are views."""
        self._flat, bits = parameters, _bits(parameters)
        self._marks = [_mark(parameter) for _, parameter in self._parameters]
        self._copied_at = self._next
        self._copy = bits[self._next : self._next + SAMPLE_ELEMS].clone()
        self._next = (self._next + SAMPLE_ELEMS) if self._next + SAMPLE_ELEMS < len(bits) else 0
        self._num_records += 1
        self._sums = self._summed(bits) if self._num_records <= FULL_CHECKS else []

    def check(self, where: str) -> None:
        """Raises ConfigError if a parameter differs from the one that was recorded."""
        if self._flat is None:
            return
        self.check_module(where)
        for (name, parameter), then in zip(self._parameters, self._marks, strict=True):
            now = _mark(parameter)
            if now != then:
                change = (
                    f"was written to in place (its version is {now[1]}, it was {then[1]})"
                    if now[0] == then[0] and now[2] == then[2]
                    else "was given other data (`parameter.data = ...`, or the module was moved)"
                )
                raise self._changed(name, where, change)
        place = self._place_changed(_bits(self._flat))
        if place is not None:
            name = next(slot.name for slot in self._layout.slots if place < slot.stop)
            raise self._changed(name, where, "was written to, through `.data`, numpy or a fused kernel")

    def check_groups(self, where: str, groups: Groups) -> None:
        """Raises ConfigError if an optimizer has a parameter with a gradient that is not exchanged."""
        for index, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and id(parameter) not in self._names:
                    raise ConfigError(
                        f"{where}: parameter {place} of group {index}, of shape {tuple(parameter.shape)}, "
                        "has a gradient, but was added or unfrozen after session.wrap, so it is not exchanged. "
                        "Pass all parameters to the optimizer before wrap, with requires_grad=True, and freeze "
                        "some afterwards (with fused=False, if the optimizer has momentum or weight decay); or "
                        f"{INSTEAD}"
                    )

    def check_gradients(self, where: str, group: Mapping[str, Any], rule: str) -> None:
        """Raises ConfigError if a parameter has no gradient, but its group's rule would change it."""
        for parameter in group["params"]:
            if parameter.grad is None and id(parameter) in self._names:
                name = self._names[id(parameter)]
                frozen = "" if parameter.requires_grad else ", since it was frozen after session.wrap"
                raise ConfigError(
                    f"{where}: parameter {name!r} has no gradient{frozen}. torch would not change it in this "
                    f"step, but {rule} on the servers would, by momentum, running means or weight decay. Use SGD "
                    "without these; or call session.wrap(model, optimizer, fused=False), if the strategy supports "
                    f"it; or let the loss depend on all parameters; or {INSTEAD}"
                )

    def check_layouts(self, where: str, group: Mapping[str, Any], rule: str) -> None:
        """Raises ConfigError if a gradient is sparse, and torch's optimizer accepts no sparse gradients."""
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ConfigError(
                    f"{where}: the gradient of {self._names.get(id(parameter))!r} has the layout "
                    f"{parameter.grad.layout}, which {rule} supports neither here nor in torch: make the layer "
                    "with sparse=False, or use SGD or Adagrad without weight decay, or torch.optim.SparseAdam"
                )

    # ---- comparisons -------------------------------------------------------------------

    def check_module(self, where: str) -> None:
        """Raises ConfigError if the module no longer has one of the parameters."""
        if all(table.get(key) is there for table, key, there in self._links):
            return
        gone = self._inside - {id(parameter) for parameter in self._module.parameters()}
        for name, parameter in self._parameters:
            if id(parameter) in gone:
                raise ConfigError(
                    f"{where}: the module has lost the parameter {name!r} since session.wrap: your script has "
                    "replaced the parameter or its submodule (load_state_dict(assign=True) does that too), so "
                    "training would change a tensor that the model no longer uses. Build and load the model "
                    "before session.wrap"
                )
        self._links = self._find_links()  # the same parameters at other places

    def _place_changed(self, bits: torch.Tensor) -> int | None:
        at = self._copied_at
        now = bits[at : at + SAMPLE_ELEMS]
        if not torch.equal(now, self._copy):
            return at + int((now != self._copy).nonzero()[0])
        if self._sums:
            sums = self._summed(bits)
            for slot, is_now, was in zip(self._layout.slots, sums, self._sums, strict=True):
                if is_now != was:
                    return slot.start
        return None

    def _summed(self, bits: torch.Tensor) -> list[int]:
        """For each parameter, the sum of its bytes as 64-bit numbers."""
        sums = []
        for slot in self._layout.slots:
            raw = bits[slot.start : slot.stop].numpy().view(np.uint8)
            whole = len(raw) // 8 * 8
            sums.append(int(raw[:whole].view(np.uint64).sum()) + int(raw[whole:].sum()))
        return sums

    def _find_links(self) -> list[Link]:
        """The places of submodules and parameters in the module: (table, key, object)."""
        links: list[Link] = []
        for module in self._module.modules():
            for table in (module._modules, module._parameters):
                if isinstance(table, dict):  # a TorchScript module has others
                    links += [
                        (table, key, there)
                        for key, there in table.items()
                        if isinstance(there, nn.Module) or id(there) in self._names
                    ]
        return links

    def _changed(self, name: str, where: str, change: str) -> ConfigError:
        return ConfigError(
            f"{where}: parameter {name!r} {change} since the last step. This strategy overwrites all parameters at "
            f"each step, so the change would be lost: {INSTEAD}; or change the parameter before session.wrap or "
            "after session.close. To evaluate with other values, set and reset them inside `with "
            "session.evaluation():`"
        )


def _mark(parameter: nn.Parameter) -> Mark:
    return parameter.data_ptr(), parameter._version, parameter.stride()


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """The elements as integers, so that a NaN is equal to itself."""
    return flat.detach().view(torch.int32 if flat.element_size() == 4 else torch.int64)
