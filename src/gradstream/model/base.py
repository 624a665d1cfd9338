"""The `Model` contract: what the user brings, seen as one flat vector.

Parameters are any tree of arrays to their owner; inside gradstream they are one contiguous
vector in backward order, the layer whose gradient is ready first at the front, in which each
tensor is a view. So "the first n elements are final" describes the state of a backprop.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from gradstream.memory import ALIGNMENT_BYTES
from gradstream.model.batch import Batch
from gradstream.runtime.base import Report

__all__ = ["Batch", "Layout", "Model", "Reduction", "Slot"]

Reduction = Literal["mean", "sum"]
"""Whether a model's loss and gradient are the mean or the sum over a batch's samples."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor's place in the flat vector: elements [start, stop), row-major.

    `row_sparse`: a minibatch has a gradient in few of its rows (along the first axis); see `model.rows`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    row_sparse: bool = False

    @property
    def row_elems(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and places of all tensors, in backward order, without gaps."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        tensors: Sequence[tuple[str, tuple[int, ...]]],
        dtype: torch.dtype,
        row_sparse: Container[str] = (),
    ) -> Layout:
        """Packs (name, shape) pairs, given in backward order. Those named by `row_sparse` are so."""
        slots, start = [], 0
        for name, shape in tensors:
            stop = start + math.prod(shape)
            slots.append(Slot(name, tuple(shape), start, stop, name in row_sparse))
            start = stop
        return cls(tuple(slots), dtype)

    @property
    def elems(self) -> int:
        """Length of the flat vector."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def tables(self) -> tuple[Slot, ...]:
        """The row-sparse tensors."""
        return tuple(slot for slot in self.slots if slot.row_sparse)

    @property
    def rest(self) -> Layout:
        """The other tensors alone, packed: what a gradient has besides rows."""
        tensors = [(slot.name, slot.shape) for slot in self.slots if not slot.row_sparse]
        return Layout.of(tensors, self.dtype)

    @property
    def lead_bytes(self) -> int:
        """How far past a multiple of 64 bytes flat vectors begin, so that the largest tensor begins at one.

        Tensors follow one another without gaps, so most cut cache lines: a matrix product is written a
        quarter slower to such a place (measured, AVX-512, 1500 x 49152: 0.53 s against 0.40 s).
        """
        largest = max(self.slots, key=lambda slot: slot.stop - slot.start, default=None)
        return 0 if largest is None else -largest.start * self.dtype.itemsize % ALIGNMENT_BYTES

    @property
    def milestones(self) -> tuple[int, ...]:
        """The ends of the tensors: what a backprop reports as it goes."""
        return tuple(slot.stop for slot in self.slots)

    @property
    def fingerprint(self) -> int:
        """64 bits that differ when a name, shape, place, the dtype or what is row-sparse does. Never 0."""
        text = repr((self.dtype, [(s.name, s.shape) for s in self.slots]))
        if self.tables:
            text += repr([slot.name for slot in self.tables])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") | 1

    def views(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view of `flat` in the tensor's own shape), in backward order."""
        for slot in self.slots:
            yield slot.name, flat[slot.start : slot.stop].view(slot.shape)


class Model(Protocol):
    """A model's outputs and gradients, on flat vectors. One worker drives one instance.

    One that holds more than its parameters has two more methods (see `model.buffers`):

        buffers() -> Mapping[str, np.ndarray]               copies
        load_buffers(buffers: Mapping[str, np.ndarray])     names that it does not know are passed over

    One that can tell its loss on held-out samples has another, for where no accuracy can be told:

        held_out_loss(parameters, batch: Batch) -> float    mean or sum, as `reduction` says; evaluation mode
        calls_itself: bool                                  its loss may not need `outputs`, nor they work

    One whose layout has row-sparse tensors takes `rows: RowGradient` in `gradient`: their gradients go there,
    and into a vector of `layout.rest` alone goes what is left. Without it everything goes into (E,).
    """

    reduction: Reduction

    @property
    def layout(self) -> Layout:
        """Names and places of the trained tensors."""
        ...

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Fills the flat vector (E,) with initial parameters: a pure function of `seed`."""
        ...

    def gradient(
        self,
        parameters: torch.Tensor,
        batch: Batch,
        gradient: torch.Tensor,
        *,
        seed: int,
        report: Report,
    ) -> float:
        """Writes the gradient of the loss at `parameters` (E,) into `gradient` (E,).

        Args:
            seed: for dropout and the like; a function of (run seed, worker, step).
            report: call with n once the first n elements of `gradient` are final; values grow,
                the last one is E.

        Returns:
            The loss (mean or sum over samples, as `reduction` says; NaN where unknown).

        Raises:
            GradientError: wrong shape or dtype, naming the tensor, what it got and expected.
        """
        ...

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Outputs for a batch of inputs, in evaluation mode. Samples along the first axis."""
        ...

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters under the user's own names, as numpy views or copies."""
        ...
