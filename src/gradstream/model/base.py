"""The `Model` contract: a user's model on one flat vector.

For the user, parameters are any tree of arrays. Inside gradstream they are one contiguous vector, of which each
tensor is a view, in backward order: the layer whose gradient is ready first stands at the front. So "the first
n elements are final" describes how far a backward pass has come.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from gradstream.errors import ConfigError, NonFiniteError
from gradstream.memory import ALIGNMENT_BYTES
from gradstream.runtime.base import Report

# ---- batch -------------------------------------------------------------------------------
# A batch, which a data set gives and a model takes, and the trees that its parts may be.

Tree = Any
"""A mapping, tuple (named or not) or list of trees, or a leaf: anything else."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples to compute a gradient on.

    Args:
        inputs: an array or tensor, or a tree of them, samples along the first axis. Samples of
            varying length come as a list with one array for each, or padded.
        targets: arrays or tensors of the same kind; None if there are only inputs.
        num_samples: number of samples; 0 if a worker has none in a round.
        ids: the position of each sample in the data set; empty in a stream, whose samples have none.
    """

    inputs: Tree
    targets: Tree
    num_samples: int
    ids: np.ndarray[Any, np.dtype[np.int64]]


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with `fn(leaf)` in place of each leaf. Mappings become dicts."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(fn, branch) for key, branch in tree.items()}
    if isinstance(tree, tuple):
        branches = [map_leaves(fn, branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    if isinstance(tree, list):
        return [map_leaves(fn, branch) for branch in tree]
    return fn(tree)


def leaves_of(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) in order. A path is the Python expression behind the tree's name: "['x'][0]"."""
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from leaves_of(branch, f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, branch in enumerate(tree):
            yield from leaves_of(branch, f"{path}[{index}]")
    else:
        yield path, tree


# ---- base --------------------------------------------------------------------------------

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
        held_out_loss(parameters, batch: Batch) -> float    the same, in evaluation mode; if there is no accuracy
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
            The loss (mean or sum over samples, as `reduction` says; NaN if unknown).

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


# ---- check -------------------------------------------------------------------------------
# Checks of a model's arguments, of its loss, and of vectors.


def check_option(function: str, option: str, got: object, *names: str) -> None:
    """Raises ConfigError unless an argument of a `from_...` function is one of these names."""
    if got not in names:
        expected = " or ".join(map(repr, names))
        raise ConfigError(f"{function}: {option} is {got!r}; expected {expected}")


def finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass over the memory and without a temporary.

    A sum is finite only if all its terms are, so the sum decides in nearly all cases. A sum that is not finite
    may merely have overflowed; then each element is checked.
    """
    if math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all().item())


def length(tensor: torch.Tensor) -> float:
    """Euclidean length; NaN or infinite if an element is, or where the sum of squares overflows the dtype.

    One pass over the memory, without a temporary.
    """
    flat = tensor.flatten()
    return math.sqrt(torch.dot(flat, flat).item())


def usable(gradient: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, and the sum of their squares is finite in the gradient's own dtype.

    Norms and update rules with squares (Adam, Adagrad) need that. The norm of a usable float32 gradient is below
    1.9e19, so sums of usable gradients do not overflow either.
    """
    return math.isfinite(length(gradient))


def check_updated(vectors: Iterable[torch.Tensor], where: str, lr: float, step: int) -> None:
    """Raises NonFiniteError unless parameters and state are finite after an update: a rate is too large.

    Args:
        vectors: parameters and state that the update has changed.
        where: which part of them, in words.
        lr: learning rate of the update.
        step: number of the update.
    """
    if not all(map(finite, vectors)):
        raise NonFiniteError(
            f"update {step}, {where}: at learning rate {lr:g} a parameter, or the optimizer's state, has become NaN "
            "or infinite, although no gradient was; lower the learning rate, or clip the gradient. The newest "
            "checkpoint has the parameters before"
        )


def finite_loss(value: float) -> float:
    """Raises NonFiniteError unless the loss is a finite number. Returns it."""
    if not math.isfinite(value):
        raise NonFiniteError(
            f"loss is {value}, expected a finite number: lower the learning rate, or check this batch's inputs"
        )
    return value
