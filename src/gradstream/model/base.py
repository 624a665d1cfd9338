"""The `Model` contract: a user's model on one flat vector.

For the user, parameters are any tree of arrays. Inside gradstream they are one contiguous vector, of which each
tensor is a view, in backward order: the layer whose gradient is ready first stands at the front. So "the first
n elements are final" describes how far a backward pass has come.
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
        """Packs (name, shape) pairs, given in backward order. `row_sparse` names the row-sparse ones."""
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
        """Layout of the other tensors alone: a gradient without its rows."""
        tensors = [(slot.name, slot.shape) for slot in self.slots if not slot.row_sparse]
        return Layout.of(tensors, self.dtype)

    @property
    def lead_bytes(self) -> int:
        """Offset of flat vectors from a multiple of 64 bytes, with which their largest tensor begins at a multiple.

        Tensors follow one another without gaps, so most begin inside a cache line. Writing a matrix product
        there takes a quarter longer (measured, AVX-512, 1500 x 49152: 0.53 s against 0.40 s).
        """
        largest = max(self.slots, key=lambda slot: slot.stop - slot.start, default=None)
        return 0 if largest is None else -largest.start * self.dtype.itemsize % ALIGNMENT_BYTES

    @property
    def milestones(self) -> tuple[int, ...]:
        """The ends of the tensors, which a backward pass reports as it goes."""
        return tuple(slot.stop for slot in self.slots)

    @property
    def fingerprint(self) -> int:
        """64 bits that differ if a name, a shape, a place, the dtype or a row-sparse mark differs. Never 0."""
        text = repr((self.dtype, [(s.name, s.shape) for s in self.slots]))
        if self.tables:
            text += repr([slot.name for slot in self.tables])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") | 1

    def views(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view of `flat` in the tensor's own shape), in backward order."""
        for slot in self.slots:
            yield slot.name, flat[slot.start : slot.stop].view(slot.shape)


class Model(Protocol):
    """Computes a model's outputs and gradients on flat vectors. Each worker has its own instance.

    A model that has buffers (see `model.buffers`) has two more methods:

        buffers() -> Mapping[str, np.ndarray]               copies
        load_buffers(buffers: Mapping[str, np.ndarray])     ignores names that it does not know

    A model that can compute its loss on held-out samples has one of the first two; evaluations use them:

        loss_of(outputs, targets) -> float                  of outputs that are there; mean or sum, as `reduction` says
        held_out_loss(parameters, batch: Batch) -> float    the same, in evaluation mode; where there is no accuracy
        calls_itself: bool                                  the loss calls the module; `outputs` may not work

    A model whose layout has row-sparse tensors takes `rows: RowGradient` in `gradient`. If it is given, their
    gradients go there, and all others into a vector of `layout.rest`. Otherwise all go into (E,).
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
            seed: seed of random numbers (dropout); a function of (run seed, worker, step).
            report: call with n once the first n elements of `gradient` are final; values grow,
                the last one is E.

        Returns:
            The loss (mean or sum over samples, as `reduction` says; NaN where unknown).

        Raises:
            GradientError: a gradient has the wrong shape or dtype; the message names the tensor.
        """
        ...

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Outputs for a batch of inputs, in evaluation mode. Samples along the first axis."""
        ...

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters under the user's own names, as numpy views or copies."""
        ...
