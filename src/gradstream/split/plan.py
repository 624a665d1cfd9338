"""The plan of a split model: which part computes what, and what travels between parts. Plain data.

A replica of several processes holds one model. Each process is a *part*. The model's graph is divided into
*stages*, each of which lives on one part and is computed at once; a part may have several. Stages are numbered in
an order in which they can be computed. The last one computes the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

DATA = -1
"""In place of the stage that makes a value: the minibatch itself, which part 0 reads."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one stage makes and others use.

    Args:
        name: its name in the graph.
        source: the stage that makes it, or DATA.
        shape: its shape without the axis of samples, or its whole shape if it has none.
        dtype: its dtype.
        per_sample: its first axis is the samples of the minibatch, and is not in `shape`.
        trained: whether it depends on a parameter that is trained.
    """

    name: str
    source: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_sample: bool = True
    trained: bool = True

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.source != DATA and self.trained and self.dtype.is_floating_point

    def shape_of(self, samples: int) -> tuple[int, ...]:
        """Its shape for this many samples."""
        return (samples, *self.shape) if self.per_sample else self.shape

    def bytes_of(self, samples: int) -> int:
        """Its size in bytes for this many samples."""
        return math.prod(self.shape_of(samples)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of the model that one part computes at once.

    Args:
        number: its number, from 0.
        part: the part on which it lives.
        inputs: names of the values that it uses, of earlier stages or of the minibatch.
        outputs: names of the values that it makes for other stages; the loss is none of them.
        ranges: [start, stop) of the unsplit model's flat vector that it trains, ascending, none adjacent.
    """

    number: int
    part: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The plan of a split model.

    Args:
        parts: number of parts, K.
        stages: all stages, in order of their numbers.
        values: every value that a stage has as an input.
        elems: length of the unsplit model's flat vector. Each element is in the ranges of one stage.
    """

    parts: int
    stages: tuple[Stage, ...]
    values: tuple[Value, ...]
    elems: int

    def value(self, name: str) -> Value:
        """The value of this name."""
        return next(value for value in self.values if value.name == name)

    def stages_of(self, part: int) -> tuple[Stage, ...]:
        """The stages of a part, in order."""
        return tuple(stage for stage in self.stages if stage.part == part)

    def ranges_of(self, part: int) -> tuple[tuple[int, int], ...]:
        """The ranges of the unsplit vector that a part holds, stage by stage. Its own vector is these, joined."""
        return tuple(bounds for stage in self.stages_of(part) for bounds in stage.ranges)

    def part_of(self, value: Value) -> int:
        """The part that makes a value. Part 0 reads the minibatch."""
        return 0 if value.source == DATA else self.stages[value.source].part

    def parts_using(self, value: Value) -> tuple[int, ...]:
        """The other parts to which a value travels, once each."""
        users = {stage.part for stage in self.stages if value.name in stage.inputs}
        return tuple(sorted(users - {self.part_of(value)}))

    def crossings(self) -> Iterator[tuple[Value, int]]:
        """(value, part to which it travels), for all values that cross a cut."""
        for value in self.values:
            for part in self.parts_using(value):
                yield value, part
