"""Finds out what a script has done to its parameters between two steps, where the exchange would undo it.

Under an asynchronous or a local strategy, parameters come from the exchange at each step, and the exchange
hears of gradients alone. Whatever else a script does to a parameter is lost at the next step, without a word.
So the step refuses to go on. It looks at what has changed, and knows no list of functions that change things:

* every step looks at each parameter's storage and version, which torch counts up with each write in place;
* writes through `.data`, numpy or a fused kernel do not count up: so 65,536 elements a step are compared to
  a copy, from another place each time, and all elements by their sum at the first two steps;
* every step looks at whether the module still has the parameter.

Buffers and frozen parameters are the script's own. They differ between workers, and nobody looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gradstream.errors import ConfigError
from gradstream.model.base import Layout

__all__ = ["INSTEAD", "ShownParameters"]

SAMPLE_ELEMS = 1 << 16
"""Elements compared at each step: 256 KiB of float32."""

WHOLE_SHOWS = 3
"""All elements are looked at after so many shows: the first one is of `wrap`, each other one of a step."""

INSTEAD = (
    'use the strategy "synchronous" or "allreduce", where your optimizer makes each step itself, on every '
    "worker, as torch does"
)
"""What does everything that a loop does alone."""

Groups = Sequence[Mapping[str, Any]]
Mark = tuple[int, int, tuple[int, ...]]
Link = tuple[dict[str, Any], str, object]


class ShownParameters:
    """What parameters are when the script gets to see them, and whether they still are.

    Args:
        module: the script's.
        parameters: those that are exchanged, in the order of `layout`.
        layout: their names and places.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], layout: Layout) -> None:
        self._module = module
        self._parameters = list(zip((slot.name for slot in layout.slots), parameters, strict=True))
        self._layout = layout
        self._names = {id(parameter): name for name, parameter in self._parameters}
        self._links = self._found()
        self._inside = {id(parameter) for parameter in module.parameters()} & self._names.keys()
        self._flat: torch.Tensor | None = None
        self._marks: list[Mark] = []
        self._copy, self._copied_at, self._next = torch.empty(0), 0, 0
        self._sums: list[int] = []
        self._num_shows = 0

    def note(self, parameters: torch.Tensor) -> None:
        """The script sees these (E,) from here on; its parameters are views of them."""
        self._flat, bits = parameters, _bits(parameters)
        self._marks = [_mark(parameter) for _, parameter in self._parameters]
        self._copied_at = self._next
        self._copy = bits[self._next : self._next + SAMPLE_ELEMS].clone()
        self._next = (self._next + SAMPLE_ELEMS) if self._next + SAMPLE_ELEMS < len(bits) else 0
        self._num_shows += 1
        self._sums = self._summed(bits) if self._num_shows <= WHOLE_SHOWS else []

    def check(self, where: str) -> None:
        """Raises ConfigError where a parameter is not what the script was shown."""
        if self._flat is None:
            return
        self._check_module(where)
        for (name, parameter), then in zip(self._parameters, self._marks, strict=True):
            now = _mark(parameter)
            if now != then:
                what = (
                    f"was written to in place (its version is {now[1]}, it was {then[1]})"
                    if now[0] == then[0] and now[2] == then[2]
                    else "was given other data (`parameter.data = ...`, or the module was moved)"
                )
                raise self._changed(name, where, what)
        place = self._place_changed(_bits(self._flat))
        if place is not None:
            name = next(slot.name for slot in self._layout.slots if place < slot.stop)
            raise self._changed(name, where, "was written to, through `.data`, numpy or a fused kernel")

    def check_groups(self, where: str, groups: Groups) -> None:
        """Raises ConfigError where an optimizer would make a step with a parameter that is not exchanged."""
        for index, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and id(parameter) not in self._names:
                    raise ConfigError(
                        f"{where}: parameter {place} of group {index}, of shape {tuple(parameter.shape)}, "
                        "has a gradient and is not exchanged: it was added or unfrozen after session.wrap. "
                        "Give the optimizer all parameters before, with requires_grad=True, and freeze them "
                        "after that (where the rule has momentum or weight decay: with fused=False); or "
                        f"{INSTEAD}"
                    )

    def check_gradients(self, where: str, group: Mapping[str, Any], rule: str) -> None:
        """Raises ConfigError where a parameter has no gradient: the rule of its group would move it."""
        for parameter in group["params"]:
            if parameter.grad is None and id(parameter) in self._names:
                name = self._names[id(parameter)]
                frozen = "" if parameter.requires_grad else ", and requires none any more (it was frozen)"
                raise ConfigError(
                    f"{where}: parameter {name!r} has no gradient{frozen}. torch leaves it as it is in this "
                    f"step; {rule} on the servers would move it by its momentum, running means or weight "
                    "decay. Use SGD without these; or session.wrap(model, optimizer, fused=False), if the "
                    f"strategy can; or a backward() that reaches all parameters; or {INSTEAD}"
                )

    def check_layouts(self, where: str, group: Mapping[str, Any], rule: str) -> None:
        """Raises ConfigError where a gradient is sparse, of a rule for which torch takes no such."""
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ConfigError(
                    f"{where}: the gradient of {self._names.get(id(parameter))!r} has the layout "
                    f"{parameter.grad.layout}, which {rule} does not take in torch either: use sparse=False, "
                    "SGD or Adagrad without weight decay, or torch.optim.SparseAdam"
                )

    # ---- what has changed ---------------------------------------------------------------

    def _check_module(self, where: str) -> None:
        if all(table.get(key) is there for table, key, there in self._links):
            return
        gone = self._inside - {id(parameter) for parameter in self._module.parameters()}
        for name, parameter in self._parameters:
            if id(parameter) in gone:
                raise ConfigError(
                    f"{where}: the module does not have the parameter {name!r} of session.wrap any more: it, "
                    "or a part of the module with it, was replaced (load_state_dict(assign=True) does that "
                    "too). The one that is trained would be in no model: build and load the model before "
                    "session.wrap"
                )
        self._links = self._found()  # the same parameters at other places

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
        """A sum of each parameter's bytes, eight of them at a time."""
        sums = []
        for slot in self._layout.slots:
            raw = bits[slot.start : slot.stop].numpy().view(np.uint8)
            whole = len(raw) // 8 * 8
            sums.append(int(raw[:whole].view(np.uint64).sum()) + int(raw[whole:].sum()))
        return sums

    def _found(self) -> list[Link]:
        """Where the module has its parts, and its parts the parameters."""
        links: list[Link] = []
        for module in self._module.modules():
            for table in (module._modules, module._parameters):
                if isinstance(table, dict):  # that of a TorchScript module is none
                    links += [
                        (table, key, there)
                        for key, there in table.items()
                        if isinstance(there, nn.Module) or id(there) in self._names
                    ]
        return links

    def _changed(self, name: str, where: str, what: str) -> ConfigError:
        return ConfigError(
            f"{where}: parameter {name!r} {what} since it was shown to the script. This strategy sets all "
            f"parameters at each step, and would undo that: {INSTEAD}; or change it before session.wrap or "
            "after session.close. To evaluate with others, change it and back in `with session.evaluation():`"
        )


def _mark(parameter: nn.Parameter) -> Mark:
    return parameter.data_ptr(), parameter._version, parameter.stride()


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """The elements as whole numbers, so that those that are not numbers are equal to themselves."""
    return flat.detach().view(torch.int32 if flat.element_size() == 4 else torch.int64)
