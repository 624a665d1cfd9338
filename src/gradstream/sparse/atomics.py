"""Instructions that numba has no name for: an atomic add to an element of an array, and locks that are words.

They work between processes, on memory that these share: what makes an instruction atomic is the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = [
    "YIELD_EVERY",
    "acquire",
    "atomic_add",
    "compiled",
    "load",
    "release",
    "store",
    "swap_if",
    "yield_core",
]

F = TypeVar("F", bound=Callable[..., Any])

YIELD_EVERY = 16
"""Looks at a lock between two offers of the core to whoever may hold it."""

yield_core = types.ExternalFunction("sched_yield", types.int32())


def compiled(function: F) -> F:
    """Machine code of a function, made when it is first called. It keeps no lock of Python's.

    Floating-point numbers are added in the order written: no reordering, no fusing.
    """
    made: Any = numba.njit(nogil=True, error_model="numpy")(function)
    return cast(F, made)


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """The address of an element."""
    made = context.make_array(kind)(context, builder, array)
    item: Any = cgutils.get_item_pointer  # numba's own is half typed
    return item(context, builder, kind, made, [index], wraparound=False)


def _atomic_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] += value, as one: nobody sees or does anything between the load and the store."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _place(context, builder, signature.args[0], given[0], given[1])
        builder.atomic_rmw("fadd", place, given[2], "monotonic")
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


def _swap_if(typing: Any, array: Any, index: Any, expected: Any, wanted: Any) -> Any:
    """array[index] ← wanted if it is `expected`, as one; whether it was."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _place(context, builder, signature.args[0], given[0], given[1])
        pair = builder.cmpxchg(place, given[2], given[3], "acq_rel", "monotonic")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.intp, array.dtype, array.dtype), generate


def _load(typing: Any, array: Any, index: Any) -> Any:
    """array[index], looked up in memory each time: not what an earlier look has found."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _place(context, builder, signature.args[0], given[0], given[1])
        return builder.load_atomic(place, "monotonic", signature.args[0].dtype.bitwidth // 8)

    return array.dtype(array, types.intp), generate


def _store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] ← value, after everything that was written before."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _place(context, builder, signature.args[0], given[0], given[1])
        builder.store_atomic(given[2], place, "release", signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


atomic_add: Any = intrinsic(_atomic_add)
swap_if: Any = intrinsic(_swap_if)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)


@compiled
def acquire(locks: Any, at: int, me: int, looks: int) -> bool:
    """Takes a lock, whose word is then `me`; False where it was not free at any of so many looks."""
    for look in range(looks):
        if load(locks, at) == 0 and swap_if(locks, at, 0, me):  # who only looks takes no cache line away
            return True
        if look % YIELD_EVERY == YIELD_EVERY - 1:
            yield_core()
    return False


@compiled
def release(locks: Any, at: int) -> None:
    """Gives a lock back."""
    store(locks, at, 0)
