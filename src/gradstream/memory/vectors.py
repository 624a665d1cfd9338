"""Allocation and ownership of flat vectors.

A `Vector` is one contiguous run of elements; a `Span` is a range of it. Code that reads a span *borrows* it for
reading, and code that fills a span borrows it for writing. Two loans conflict when they overlap and at least one of
them writes: the second borrower gets a `LentMemoryError` at once, which names both. A computation holds its loans
while it runs (on virtual time: for the whole charged interval), a carrier holds them until its call returns. So a
fetch into parameters that are being differentiated raises an error, and does not make a wrong gradient.

Shape-only memory has sizes and no elements (torch's meta device). With it the simulator moves 64 replicas of a
large model through the same code without holding any of them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from gradstream.errors import LentMemoryError

ALIGNMENT_BYTES = 64
"""Alignment of every vector: a cache line, and the widest SIMD register."""

WORTH_BYTES = 8 << 20
"""Memory of this size is given back to the system when it is not needed any more."""


@dataclass(slots=True, eq=False)
class Loan:
    """A borrowed range of a vector. The borrower can give the lower part back early."""

    start: int
    stop: int
    write: bool
    to: str
    queue: object = None


class Home(Protocol):
    """Memory that other processes can map, too (`segments.Segment`)."""

    fd: int
    size_bytes: int


class Vector:
    """One contiguous flat vector, and the loans of its ranges.

    Args:
        name: name for messages, such as "parameters".
        tensor: the elements, one-dimensional and contiguous.
        home: shared memory that contains the vector; None for a vector in memory of this process alone.
        offset_bytes: byte of `home` at which the vector begins.
    """

    __slots__ = ("_loans", "home", "name", "offset_bytes", "tensor")

    def __init__(
        self, name: str, tensor: torch.Tensor, home: Home | None = None, offset_bytes: int = 0
    ) -> None:
        assert tensor.dim() == 1 and tensor.is_contiguous()
        self.name = name
        self.tensor = tensor
        self.home = home
        self.offset_bytes = offset_bytes
        self._loans: list[Loan] = []

    def __len__(self) -> int:
        return self.tensor.numel()

    def __getitem__(self, index: slice) -> Span:
        start, stop, step = index.indices(len(self))
        assert step == 1
        return Span(self, start, stop)

    @property
    def all(self) -> Span:
        """The whole vector as a span."""
        return Span(self, 0, len(self))

    @property
    def lent(self) -> bool:
        """Whether a part of the vector is borrowed."""
        return bool(self._loans)

    def borrow(self, start: int, stop: int, *, write: bool, to: str, queue: object = None) -> Loan:
        """Lends [start, stop). End the loan with `give_back`.

        Args:
            start, stop: the range.
            write: whether the borrower writes.
            to: name of the borrower, for messages.
            queue: loans with the same queue do not conflict: their borrowers use the memory one after the other.

        Raises:
            LentMemoryError: an overlapping loan exists and one of the two writes.
        """
        for loan in self._loans:
            if queue is not None and loan.queue is queue:
                continue
            overlap = max(start, loan.start) < min(stop, loan.stop)  # nothing overlaps an empty range
            if overlap and (loan.write or write):
                verb, state = ("write", "read") if write else ("read", "written")
                raise LentMemoryError(
                    f"{to} wants to {verb} {self.name}[{start}:{stop}], which is being "
                    f"{'written' if loan.write else state} at [{loan.start}:{loan.stop}] by {loan.to}; "
                    "receive into a back buffer and swap that in at a step boundary"
                )
        loan = Loan(start, stop, write, to, queue)
        self._loans.append(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """Ends a loan."""
        if loan not in self._loans:
            raise LentMemoryError(f"{self.name}: {loan} was given back twice")
        self._loans.remove(loan)


@dataclass(frozen=True, slots=True)
class Span:
    """The elements [start, stop) of a vector."""

    vector: Vector
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tensor(self) -> torch.Tensor:
        """A view of the elements, for the borrower of the span. A write to it changes the vector."""
        return self.vector.tensor[self.start : self.stop]

    @contextmanager
    def borrowed(self, *, write: bool, to: str) -> Iterator[torch.Tensor]:
        """Borrows the span for a `with` block, and yields the view."""
        loan = self.vector.borrow(self.start, self.stop, write=write, to=to)
        try:
            yield self.tensor
        finally:
            self.vector.give_back(loan)


class Loans(ExitStack):
    """Loans of several spans, given back together."""

    def __init__(self) -> None:
        super().__init__()
        self._writes: list[Loan] = []

    def add(self, span: Span, *, write: bool, to: str, queue: object = None) -> None:
        """Borrows one more span."""
        loan = span.vector.borrow(span.start, span.stop, write=write, to=to, queue=queue)
        self.callback(span.vector.give_back, loan)
        if write:
            self._writes.append(loan)

    def release_below(self, elems: int) -> None:
        """Gives back the written spans up to this element of their vectors: everything below is final."""
        for loan in self._writes:
            loan.start = min(max(loan.start, elems), loan.stop)


def borrow_all(reads: Iterable[Span], writes: Iterable[Span], *, to: str, queue: object = None) -> Loans:
    """Borrows all of these spans, or none of them. The result is a context manager, which gives them back."""
    loans = Loans()
    try:
        for span in reads:
            loans.add(span, write=False, to=to, queue=queue)
        for span in writes:
            loans.add(span, write=True, to=to, queue=queue)
    except BaseException:
        loans.close()
        raise
    return loans


@dataclass(slots=True)
class Memory:
    """Allocates vectors, and counts their bytes.

    Args:
        shape_only: whether to allocate sizes without elements.
        allocated_bytes: bytes of the allocated vectors, by name.
    """

    shape_only: bool = False
    allocated_bytes: dict[str, int] = field(default_factory=dict)

    def allocate(
        self, elems: int, dtype: torch.dtype, name: str, *, exchanged: bool = False, lead_bytes: int = 0
    ) -> Vector:
        """Allocates a vector of zeros, aligned to 64 bytes; without storage if `shape_only`.

        The system provides a page when it is first written.

        Args:
            elems: length of the vector.
            dtype: type of its elements.
            name: name of the vector, for messages.
            exchanged: whether peers get the elements. If this memory can, it puts the vector where peers can read it
                in place (`segments.SharedMemory`).
            lead_bytes: distance of the first element from a multiple of 64 bytes; see `Layout.lead_bytes`.
        """
        used_bytes = self.allocated_bytes.get(name, 0)
        self.allocated_bytes[name] = used_bytes + elems * dtype.itemsize
        return self._allocate(elems, dtype, name, exchanged=exchanged, lead_bytes=lead_bytes)

    def free(self, vector: Vector) -> None:
        """Subtracts a vector from `allocated_bytes`. The caller drops the vector, which frees the memory."""
        left_bytes = self.allocated_bytes.get(vector.name, 0) - vector.tensor.nbytes
        self.allocated_bytes[vector.name] = left_bytes
        if left_bytes <= 0:
            del self.allocated_bytes[vector.name]

    def _allocate(
        self, elems: int, dtype: torch.dtype, name: str, *, exchanged: bool, lead_bytes: int
    ) -> Vector:
        del exchanged  # no other process sees this memory
        itemsize_bytes = dtype.itemsize
        if self.shape_only:
            return Vector(name, torch.empty(elems, dtype=dtype, device="meta"))
        raw = np.zeros(elems * itemsize_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
        skip_bytes = (lead_bytes - raw.ctypes.data) % ALIGNMENT_BYTES
        aligned = torch.from_numpy(raw[skip_bytes : skip_bytes + elems * itemsize_bytes])
        return Vector(name, aligned.view(dtype))


def trim(freed_bytes: int) -> None:
    """Returns freed pages to the system, if the C library can (glibc), and if they are worth it.

    Nodes run with an allocator that keeps pages, since each step needs them again. It should not keep pages that
    were needed only once, such as those of a model's initial parameters.

    Args:
        freed_bytes: about how many bytes were freed. For less than `WORTH_BYTES` nothing is done: the C library walks
            through all that it has, and what is given back has to be asked for again.
    """
    if freed_bytes < WORTH_BYTES:
        return
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if malloc_trim is not None:
        malloc_trim(0)
