"""Parameter groups: other hyper-parameters for some parameters, which are selected by name.

    groups = [{"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "lr_scale": 10.0}]

A parameter has the settings of every group that matches its name (`head.bias` has both above); if two groups
set the same field, the later one counts. Each name is mapped to its range of the flat vector, and each range
gets its own rule.

Fused kernels round the elements at the end of a range differently from those inside. So a block of 64 elements
that several ranges share is computed whole with each of their rules, and each range takes its own elements of
the result. An element's bits then depend only on its rule, and not on where a range, a chunk or a shard ends.

A rule that is `PerTensor` has one range for each tensor, with the tensor's number in the model. Its sums are added up
over all pieces of a tensor, whoever holds them:

    partial_sums(range of the vector) ─▶ (tensor, sums) ─▶ add_up ─▶ sums of each tensor ─▶ apply

A matrix of a rule that is `PerMatrix` has a range of its own as well, which is updated at once.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch

from gradstream.errors import ConfigError, InternalError, UnknownNameError
from gradstream.optim._check import not_negative
from gradstream.optim.adagrad import Adagrad
from gradstream.optim.adam import Adam, AdamW
from gradstream.optim.base import ByShape, Optimizer, PerMatrix, PerTensor, State, Sums, skips_zeros
from gradstream.optim.sgd import SGD

# ---- decay -------------------------------------------------------------------------------
# Weight decay as a part of the gradient: g ← g + λ·w, where w are the parameters at which g was computed.
#
# An update rule adds λ·w once for each update. That is too little where an update is the sum of several gradients, or
# where a worker makes local steps in between. Then the worker adds λ·w to each gradient, and the shards apply the
# rule without it (`ServerStrategy.decays_gradients`).


def l2_of(rule: Optimizer) -> float:
    """λ of the term λ·w that a rule adds to the gradient; 0 if it adds none.

    AdamW subtracts its decay from the parameters, not from the gradient, so it has no such term. A rule of the
    user's is taken to have none.
    """
    if isinstance(rule, SGD | Adagrad | Adam) and not isinstance(rule, AdamW):
        return rule.weight_decay
    return 0.0


def without_l2(rule: Optimizer) -> Optimizer:
    """The same rule for gradients that contain the term already."""
    if isinstance(rule, SGD | Adagrad | Adam) and l2_of(rule):
        return dataclasses.replace(rule, weight_decay=0.0)
    return rule


# ---- groups ------------------------------------------------------------------------------

Piece = tuple[int, Sums]
"""Number of a tensor of the model, and sums over some of its elements."""

BLOCK_ELEMS = 64
"""Ranges that begin at multiples of this have the bits of the whole vector. Chunks begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Settings for the parameters whose names match.

    Args:
        match: patterns of names with *, ? and [..]; one of them must match.
        lr_scale: factor of the learning rate; 0 freezes the parameters, None leaves the rate to other groups.
        settings: fields of the update rule with their values.
    """

    match: tuple[str, ...]
    lr_scale: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the group matches a parameter's name."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)


def groups_of(given: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> tuple[ParameterGroup, ...]:
    """Checks the groups of a job against its update rule.

    Raises:
        UnknownNameError: the rule does not have a setting; the message names the nearest one.
        ConfigError: a group has no pattern, a value is out of its range, or a setting must be the same for all
            parameters.
    """
    groups = []
    for index, entry in enumerate(given):
        where = f"groups[{index}]"
        if "match" not in _table(entry):
            raise ConfigError(f'{where} is {entry!r}: expected a table such as {{"match": "*.bias", ...}}')
        match = entry["match"]
        patterns = (match,) if isinstance(match, str) else match
        named = isinstance(patterns, list | tuple) and all(isinstance(pattern, str) for pattern in patterns)
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
    """The update rule with these fields replaced."""
    if not settings:
        return optimizer
    record = cast(Any, optimizer)
    if not dataclasses.is_dataclass(record):
        raise ConfigError(
            f"{where}: {type(optimizer).__name__} is not a dataclass, so groups can set only lr_scale"
        )
    names = [entry.name for entry in dataclasses.fields(record) if entry.init and entry.name != "lr"]
    for name in settings:
        if name == "lr":
            raise ConfigError(
                f"{where}: got lr={settings[name]!r}, but all groups share the learning rate of the optimizer; "
                "set lr_scale, the group's factor of this rate: lr_scale=0.1, for example"
            )
        if name not in names:
            raise UnknownNameError(f"setting of {where}", name, [*names, "lr_scale", "match"])
    try:
        rule: Optimizer = dataclasses.replace(cast(Any, record), **settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if (rule.state_names, rule.state_init) != (optimizer.state_names, optimizer.state_init):
        raise ConfigError(
            f"{where}: {', '.join(settings)} would give this group other state vectors ({_state(rule)}) than the "
            f"optimizer has ({_state(optimizer)}), but they must be the same for all parameters: leave the setting "
            "out of the group, or set it in the optimizer"
        )
    return rule


def _state(rule: Optimizer) -> str:
    return f"{', '.join(rule.state_names) or 'none'} from {rule.state_init:g}"


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [start, stop) with one rule, at `lr_scale` times the learning rate.

    `tensor`: number of the tensor whose sums the rule needs; None if it needs none.
    `matrix`: shape of the matrix that the range is, where the rule is for whole ones; else None.
    """

    start: int
    stop: int
    rule: Optimizer
    lr_scale: float
    tensor: int | None = None
    matrix: tuple[int, ...] | None = None

    def apply(
        self,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        sums: Mapping[int, Sums],
        *,
        lr: float,
        step: int,
    ) -> None:
        """One update of elements of this range, in place. `sums`: of each whole tensor, by its number."""
        rate = lr * self.lr_scale
        if self.matrix is not None:
            if math.prod(self.matrix) != len(parameters):
                raise InternalError(
                    f"{self.rule} got {len(parameters)} elements of a matrix of shape {self.matrix}; expected all"
                )
            whole = {name: vector.view(self.matrix) for name, vector in state.items()}
            matrix, slope = parameters.view(self.matrix), gradient.view(self.matrix)
            cast(PerMatrix, self.rule).apply_matrix(matrix, slope, whole, lr=rate, step=step)
            return
        if self.tensor is None:
            self.rule.apply(parameters, gradient, state, lr=rate, step=step)
            return
        if self.tensor not in sums:
            raise InternalError(f"{self.rule} has no sums of tensor {self.tensor} in update {step}")
        rule = cast(PerTensor, self.rule)
        rule.apply_with(sums[self.tensor], parameters, gradient, state, lr=rate, step=step)


def add_up(pieces: Iterable[Piece]) -> dict[int, Sums]:
    """The sums of each whole tensor. The order of the pieces does not change a bit of them."""
    parts: defaultdict[int, list[Sums]] = defaultdict(list)
    for tensor, sums in pieces:
        parts[tensor].append(sums)
    return {
        tensor: (_exact_sum([first for first, _ in found]), _exact_sum([second for _, second in found]))
        for tensor, found in parts.items()
    }


def _exact_sum(terms: Sequence[float]) -> float:
    return math.fsum(terms) if all(map(math.isfinite, terms)) else math.nan


class GroupedRule:
    """An update rule with other settings for some ranges of the flat vector.

    Args:
        optimizer: the rule for all parameters that no group matches.
        groups: groups that `groups_of` has checked.
        tensors: (name, start, stop) of every parameter, in the order of the vector.
        names: of all parameters of the model, where the vector is a part of it.
        shapes: of each tensor of the model, by name; only a rule that is `ByShape` needs them.

    Attributes:
        num_tensors: number of tensors of the model.

    Raises:
        UnknownNameError: a pattern matches no name; the message gives the nearest name.
        ConfigError: the rule needs shapes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[ParameterGroup],
        tensors: Iterable[tuple[str, int, int]],
        names: Sequence[str] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        tensors = list(tensors)
        names = [name for name, _, _ in tensors] if names is None else names
        for index, group in enumerate(groups):
            for pattern in group.match:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UnknownNameError(f"parameter: nothing fits groups[{index}].match", pattern, names)
        self.num_tensors = len(names)
        self._ranges: list[Range] = []
        for name, start, stop in tensors:
            settings: dict[str, Any] = {}
            scale = 1.0
            for group in groups:
                if group.has(name):
                    settings |= group.settings
                    scale = scale if group.lr_scale is None else group.lr_scale
            rule = _rule_with(optimizer, settings, name)
            if not isinstance(rule, ByShape):
                self._append(Range(start, stop, rule, scale))
                continue
            if shapes is None:
                raise ConfigError(
                    f"{rule} needs the shapes of tensors, but here a model is one vector; expected a rule for single "
                    "elements, such as SGD or AdamW"
                )
            rule = rule.of(len(shapes[name]))
            tensor = names.index(name) if isinstance(rule, PerTensor) else None
            matrix = shapes[name] if isinstance(rule, PerMatrix) else None
            self._append(Range(start, stop, rule, scale, tensor, matrix))

    @property
    def skips_zeros(self) -> bool:
        """True if it is for the rule of each range."""
        return all(skips_zeros(one.rule) for one in self._ranges)

    @property
    def ranges(self) -> Sequence[Range]:
        """Ranges with one rule each, in the order of the vector."""
        return self._ranges

    def without_l2(self) -> GroupedRule:
        """The same rule for gradients that contain their weight decay already; see `l2_of`."""
        same = copy.copy(self)
        same._ranges = [dataclasses.replace(one, rule=without_l2(one.rule)) for one in self._ranges]
        return same

    def _append(self, new: Range) -> None:
        last = self._ranges[-1] if self._ranges else None
        alike = last is not None and last == dataclasses.replace(new, start=last.start, stop=last.stop)
        if last is not None and alike and new.matrix is None:
            self._ranges[-1] = dataclasses.replace(last, stop=new.stop)
        elif new.start < new.stop:
            self._ranges.append(new)

    def apply(
        self,
        offset: int,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        sums: Mapping[int, Sums] | None = None,
        *,
        lr: float,
        step: int,
    ) -> None:
        """One update in place; see `Optimizer.apply`.

        Args:
            offset: index of the first element in the flat vector, a multiple of 64.
            sums: of each whole tensor in the range, by its number, where the rule needs them.
        """
        elems, sums = len(parameters), sums or {}
        ranges = self._within(offset, elems)
        for one in ranges:
            if one.matrix is not None:
                cut = slice(one.start, one.stop)
                parts = {name: vector[cut] for name, vector in state.items()}
                one.apply(parameters[cut], gradient[cut], parts, sums, lr=lr, step=step)
                continue
            start = -(-one.start // BLOCK_ELEMS) * BLOCK_ELEMS
            stop = elems if one.stop == elems else one.stop // BLOCK_ELEMS * BLOCK_ELEMS
            if start < stop:
                cut = slice(start, stop)
                parts = {name: vector[cut] for name, vector in state.items()}
                one.apply(parameters[cut], gradient[cut], parts, sums, lr=lr, step=step)
        for block in sorted({one.stop // BLOCK_ELEMS for one in ranges[:-1] if one.stop % BLOCK_ELEMS}):
            start = block * BLOCK_ELEMS
            cut = slice(start, min(start + BLOCK_ELEMS, elems))
            shared = [
                one for one in ranges if one.start < cut.stop and one.stop > start and one.matrix is None
            ]
            vectors = {"": parameters[cut], **{name: vector[cut] for name, vector in state.items()}}
            _apply_shared(shared, start, vectors, gradient[cut], sums, lr, step)

    def _within(self, offset: int, elems: int) -> list[Range]:
        """The parts of the ranges within `elems` elements from `offset`, counted from there."""
        return [
            dataclasses.replace(one, start=max(one.start - offset, 0), stop=min(one.stop - offset, elems))
            for one in self._ranges
            if one.start < offset + elems and one.stop > offset
        ]

    @property
    def per_tensor(self) -> bool:
        """Whether an update needs sums over whole tensors."""
        return any(one.tensor is not None for one in self._ranges)

    @property
    def whole_matrices(self) -> bool:
        """Whether an update needs all elements of some matrices at once."""
        return any(one.matrix is not None for one in self._ranges)

    def partial_sums(
        self, offset: int, parameters: torch.Tensor, gradient: torch.Tensor, state: State, *, step: int
    ) -> list[Piece]:
        """The sums of each tensor over its elements in this range, which an update needs; changes nothing.

        Args:
            offset: index of the first element in the flat vector.
        """
        found: list[Piece] = []
        for one in self._within(offset, len(parameters)):
            if one.tensor is not None:
                cut = slice(one.start, one.stop)
                parts = {name: vector[cut] for name, vector in state.items()}
                rule = cast(PerTensor, one.rule)
                found.append(
                    (one.tensor, rule.partial_sums(parameters[cut], gradient[cut], parts, step=step))
                )
        return found

    def apply_some(
        self,
        places: torch.Tensor,
        parameters: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        *,
        lr: float,
        step: int,
    ) -> None:
        """Updates n elements in place; see `Optimizer.apply`. All vectors have these elements alone.

        Args:
            places: (n,) int64, ascending: index of each element in the flat vector of the model.
        """
        for one in self._ranges:
            low, high = torch.searchsorted(places, torch.tensor([one.start, one.stop])).tolist()
            if low < high:
                parts = {name: vector[low:high] for name, vector in state.items()}
                one.apply(parameters[low:high], gradient[low:high], parts, {}, lr=lr, step=step)


def _apply_shared(
    ranges: Sequence[Range],
    offset: int,
    vectors: Mapping[str, torch.Tensor],
    gradient: torch.Tensor,
    sums: Mapping[int, Sums],
    lr: float,
    step: int,
) -> None:
    """Updates a block with the rule of each range, and takes from each result the range's own elements.

    Args:
        vectors: the parameters under "", and the state vectors by name.
    """
    before = {name: vector.clone() for name, vector in vectors.items()}
    for one in ranges:
        after = {name: vector.clone() for name, vector in before.items()}
        parameters = after.pop("")
        one.apply(parameters, gradient, after, sums, lr=lr, step=step)
        own = slice(max(one.start - offset, 0), one.stop - offset)
        for name, vector in {"": parameters, **after}.items():
            vectors[name][own] = vector[own]
