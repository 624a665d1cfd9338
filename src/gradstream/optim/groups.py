"""Parameter groups: hyper-parameters of their own for parts of the model, chosen by name.

    groups = [{"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "lr_scale": 10.0}]

A parameter has the settings of every group that matches its name; where two set the same thing, the
later one counts (`head.bias` has both above). A name is matched here to its range of the flat vector, and
each range gets a rule of its own.

Fused kernels round the elements at the end of a range differently from those inside, so ranges are
not simply updated one by one: a block of 64 elements that several ranges share is computed whole with
each of their rules, and each range takes its own elements of it. So an element's bits depend on its rule
alone, not on where a range, a chunk or a shard ends.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.optim._check import not_negative
from gradstream.optim.base import Optimizer, skips_zeros
from gradstream.optim.decay import without_l2

__all__ = ["GroupedRule", "ParameterGroup", "Range", "groups_of"]

BLOCK_ELEMS = 64
"""Ranges that begin at multiples of this have the bits of the whole; chunks begin at such."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """What some parameters have of their own.

    Args:
        match: patterns of names with *, ? and [..]; one of them must fit.
        lr_scale: factor of the learning rate, 0 holds the parameters still; None says nothing about it.
        settings: fields of the update rule.
    """

    match: tuple[str, ...]
    lr_scale: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether a parameter belongs to it."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)


def groups_of(given: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> tuple[ParameterGroup, ...]:
    """Groups as a job has them, checked against the update rule.

    Raises:
        UnknownNameError: a setting that the rule does not have; says the nearest one.
        ConfigError: no pattern, a value out of its range, or a setting that must be the same everywhere.
    """
    groups = []
    for index, entry in enumerate(given):
        where = f"groups[{index}]"
        if "match" not in _table(entry):
            raise ConfigError(f'{where} is {entry!r}: expected a table such as {{"match": "*.bias", ...}}')
        match = entry["match"]
        patterns = (match,) if isinstance(match, str) else match
        named = isinstance(patterns, list | tuple) and all(isinstance(one, str) for one in patterns)
        if not named or not patterns:
            raise ConfigError(f"{where}: match is {match!r}; expected a pattern of names, or a list of them")
        settings = {key: value for key, value in entry.items() if key not in ("match", "lr_scale")}
        scale = entry.get("lr_scale")
        if scale is not None:
            not_negative(where, "lr_scale", scale)
        _rule_with(optimizer, settings, where)
        groups.append(ParameterGroup(tuple(patterns), scale, settings))
    return tuple(groups)


def _table(entry: object) -> Mapping[str, Any]:
    return entry if isinstance(entry, Mapping) else {}


def _rule_with(optimizer: Optimizer, settings: Mapping[str, Any], where: str) -> Optimizer:
    """The update rule with these fields of its own."""
    if not settings:
        return optimizer
    record = cast(Any, optimizer)
    if not dataclasses.is_dataclass(record):
        raise ConfigError(f"{where}: {type(optimizer).__name__} is no dataclass, so only lr_scale can be set")
    names = [entry.name for entry in dataclasses.fields(record) if entry.init and entry.name != "lr"]
    for name in settings:
        if name == "lr":
            raise ConfigError(f"{where}: lr is the same for all; give lr_scale, which multiplies it")
        if name not in names:
            raise UnknownNameError(f"setting of {where}", name, [*names, "lr_scale", "match"])
    try:
        rule: Optimizer = dataclasses.replace(cast(Any, record), **settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if (rule.state_names, rule.state_init) != (optimizer.state_names, optimizer.state_init):
        raise ConfigError(
            f"{where}: {', '.join(settings)} would change what state the rule keeps "
            f"({_state(rule)}, elsewhere {_state(optimizer)}); that must be the same for all parameters"
        )
    return rule


def _state(rule: Optimizer) -> str:
    return f"{', '.join(rule.state_names) or 'none'} from {rule.state_init:g}"


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [start, stop) under one rule, at `lr_scale` times the rate."""

    start: int
    stop: int
    rule: Optimizer
    lr_scale: float


class GroupedRule:
    """An update rule with settings of their own for some ranges of the flat vector.

    Args:
        optimizer: the rule, for all that no group matches.
        groups: checked with it by `groups_of`.
        tensors: (name, start, stop) of every parameter, in the order of the vector.

    Raises:
        UnknownNameError: a pattern that no name fits; says the nearest name.
    """

    def __init__(
        self, optimizer: Optimizer, groups: Sequence[ParameterGroup], tensors: Iterable[tuple[str, int, int]]
    ) -> None:
        tensors = list(tensors)
        names = [name for name, _, _ in tensors]
        for index, group in enumerate(groups):
            for pattern in group.match:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UnknownNameError(f"parameter: nothing fits groups[{index}].match", pattern, names)
        self._ranges: list[Range] = []
        for name, start, stop in tensors:
            settings: dict[str, Any] = {}
            scale = 1.0
            for group in groups:
                if group.has(name):
                    settings |= group.settings
                    scale = scale if group.lr_scale is None else group.lr_scale
            self._append(Range(start, stop, _rule_with(optimizer, settings, name), scale))

    @property
    def skips_zeros(self) -> bool:
        """Where the rule of each range does."""
        return all(skips_zeros(one.rule) for one in self._ranges)

    @property
    def ranges(self) -> Sequence[Range]:
        """What it is made of, in the order of the vector."""
        return self._ranges

    def without_l2(self) -> GroupedRule:
        """The same, for gradients that have their weight decay already; see `optim.decay`."""
        same = copy.copy(self)
        same._ranges = [dataclasses.replace(one, rule=without_l2(one.rule)) for one in self._ranges]
        return same

    def _append(self, new: Range) -> None:
        last = self._ranges[-1] if self._ranges else None
        if last is not None and (last.rule, last.lr_scale) == (new.rule, new.lr_scale):
            self._ranges[-1] = dataclasses.replace(last, stop=new.stop)
        elif new.start < new.stop:
            self._ranges.append(new)

    def apply(
        self,
        offset: int,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        *,
        lr: float,
        step: int,
    ) -> None:
        """One update in place; see `Optimizer.apply`.

        Args:
            offset: where in the flat vector the elements begin: a multiple of 64.
        """
        elems = len(parameters)
        ranges = [
            dataclasses.replace(one, start=max(one.start - offset, 0), stop=min(one.stop - offset, elems))
            for one in self._ranges
            if one.start < offset + elems and one.stop > offset
        ]
        for one in ranges:
            start = -(-one.start // BLOCK_ELEMS) * BLOCK_ELEMS
            stop = elems if one.stop == elems else one.stop // BLOCK_ELEMS * BLOCK_ELEMS
            if start < stop:
                cut = slice(start, stop)
                parts = {name: vector[cut] for name, vector in state.items()}
                one.rule.apply(parameters[cut], gradient[cut], parts, lr=lr * one.lr_scale, step=step)
        for block in sorted({one.stop // BLOCK_ELEMS for one in ranges[:-1] if one.stop % BLOCK_ELEMS}):
            start = block * BLOCK_ELEMS
            cut = slice(start, min(start + BLOCK_ELEMS, elems))
            shared = [one for one in ranges if one.start < cut.stop and one.stop > start]
            vectors = {"": parameters[cut], **{name: vector[cut] for name, vector in state.items()}}
            _apply_shared(shared, start, vectors, gradient[cut], lr, step)

    def apply_some(
        self,
        places: torch.Tensor,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        *,
        lr: float,
        step: int,
    ) -> None:
        """One update in place of some elements; see `Optimizer.apply`.

        Args:
            places: (n,) int64, growing: where in the flat vector each of them belongs.
        """
        for one in self._ranges:
            low, high = torch.searchsorted(places, torch.tensor([one.start, one.stop])).tolist()
            if low < high:
                parts = {name: vector[low:high] for name, vector in state.items()}
                rate = lr * one.lr_scale
                one.rule.apply(parameters[low:high], gradient[low:high], parts, lr=rate, step=step)


def _apply_shared(
    ranges: Sequence[Range],
    offset: int,
    vectors: Mapping[str, torch.Tensor],
    gradient: torch.Tensor,
    lr: float,
    step: int,
) -> None:
    """Updates a block with the rules of several ranges: each takes its elements of the whole block's update.

    Args:
        vectors: parameters under "", and the state.
    """
    before = {name: vector.clone() for name, vector in vectors.items()}
    for one in ranges:
        after = {name: vector.clone() for name, vector in before.items()}
        parameters = after.pop("")
        one.rule.apply(parameters, gradient, after, lr=lr * one.lr_scale, step=step)
        own = slice(max(one.start - offset, 0), one.stop - offset)
        for name, vector in {"": parameters, **after}.items():
            vectors[name][own] = vector[own]
