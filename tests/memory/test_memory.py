"""Loans of ranges of a vector: conflicts, narrowing, shape-only memory."""

from __future__ import annotations

import pytest
import torch

from gradstream.errors import LentMemoryError
from gradstream.memory import Memory, Vector, borrow_all
from gradstream.memory.segments import SharedMemory
from gradstream.model.base import Layout


def vector(elems: int = 10, name: str = "parameters") -> Vector:
    return Memory().allocate(elems, torch.float32, name)


def test_any_number_of_readers_and_no_writer() -> None:
    shared = vector()
    conflict = r"fetch wants to write parameters\[5:10\].*read at \[[04]:"
    with (
        shared[0:6].borrowed(write=False, to="one"),
        shared[4:10].borrowed(write=False, to="two"),
        pytest.raises(LentMemoryError, match=conflict),
    ):
        shared.borrow(5, 10, write=True, to="fetch")
    shared.give_back(shared.borrow(0, 10, write=True, to="fetch"))
    assert not shared.lent


def test_one_writer_and_nobody_else() -> None:
    shared = vector()
    loan = shared.borrow(2, 5, write=True, to="gradient")
    for write in (False, True):
        with pytest.raises(LentMemoryError, match=r"\[2:5\] by gradient"):
            shared.borrow(4, 8, write=write, to="push")
    shared.borrow(5, 8, write=True, to="neighbour")
    shared.borrow(0, 2, write=False, to="neighbour")
    shared.give_back(loan)
    shared.borrow(2, 5, write=False, to="push")


def test_empty_ranges_never_conflict() -> None:
    shared = vector()
    shared.borrow(0, 10, write=True, to="all")
    shared.borrow(3, 3, write=True, to="nothing")
    half = vector()
    with borrow_all([], [half[0:5]], to="gradient") as loans:
        loans.release_below(5)
        half.borrow(0, 10, write=False, to="push")


def test_giving_back_twice_is_an_error() -> None:
    shared = vector()
    loan = shared.borrow(0, 1, write=True, to="me")
    shared.give_back(loan)
    with pytest.raises(LentMemoryError, match="twice"):
        shared.give_back(loan)


def test_written_loans_shrink_from_below_and_reads_do_not() -> None:
    target, source = vector(), vector(name="source")
    with borrow_all([source.all], [target.all], to="gradient") as loans:
        loans.release_below(4)
        target.borrow(0, 4, write=False, to="push")
        with pytest.raises(LentMemoryError):
            target.borrow(3, 5, write=False, to="push")
        loans.release_below(2)  # never grows again
        target.borrow(3, 4, write=False, to="push")
        with pytest.raises(LentMemoryError):
            source.borrow(0, 1, write=True, to="fetch")
        loans.release_below(100)
        target.borrow(4, 10, write=False, to="push")
    source.borrow(0, 1, write=True, to="fetch")


def test_all_or_nothing() -> None:
    free, taken = vector(), vector(name="taken")
    taken.borrow(0, 1, write=True, to="somebody")
    with pytest.raises(LentMemoryError):
        borrow_all([free.all, taken.all], [], to="me")
    assert not free.lent


def test_a_loan_ends_with_its_block_whatever_happens() -> None:
    shared = vector()
    with pytest.raises(LentMemoryError), shared.all.borrowed(write=True, to="me"):
        shared.borrow(0, 1, write=True, to="you")
    assert not shared.lent


def test_who_queues_for_the_same_core_does_not_conflict() -> None:
    shared, core = vector(), object()
    shared.borrow(0, 10, write=True, to="first", queue=core)
    shared.borrow(0, 10, write=True, to="second", queue=core)
    with pytest.raises(LentMemoryError):
        shared.borrow(0, 10, write=False, to="push")
    with pytest.raises(LentMemoryError):
        shared.borrow(0, 10, write=False, to="another core", queue=object())


def test_memory_is_zero_aligned_and_billed() -> None:
    memory = Memory()
    for elems, dtype in ((1, torch.float32), (1000, torch.float64), (0, torch.float32)):
        made = memory.allocate(elems, dtype, "spare")
        assert made.tensor.dtype == dtype
        assert made.tensor.data_ptr() % 64 == 0 or not elems
        assert torch.equal(made.tensor, torch.zeros(elems, dtype=dtype))
    assert memory.allocated_bytes == {"spare": 4 + 8000}


def test_spans_are_views() -> None:
    shared = vector()
    shared[2:4].tensor.fill_(1)
    assert shared.tensor.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert len(shared[2:4]) == 2
    assert len(shared[8:99]) == 2


def test_shape_only_memory_has_a_bill_and_no_elements() -> None:
    memory = Memory(shape_only=True)
    made = memory.allocate(1 << 40, torch.float32, "parameters")
    assert made.tensor.is_meta
    assert memory.allocated_bytes == {"parameters": 4 << 40}
    made.borrow(0, 1 << 39, write=True, to="gradient")
    with pytest.raises(LentMemoryError):
        made.borrow(0, 1, write=False, to="push")


@pytest.mark.parametrize("memory", [Memory(), SharedMemory()])
def test_the_largest_tensor_of_a_flat_vector_begins_at_a_cache_line(memory: Memory) -> None:
    layout = Layout.of([("bias", (5,)), ("weight", (300, 64)), ("first", (7,))], torch.float32)
    vector = memory.allocate(
        layout.elems, layout.dtype, "gradient", exchanged=True, lead_bytes=layout.lead_bytes
    )
    views = dict(layout.views(vector.tensor))
    assert views["weight"].data_ptr() % 64 == 0
    assert views["bias"].data_ptr() % 64 == layout.lead_bytes == 44
    assert not vector.tensor.any()
