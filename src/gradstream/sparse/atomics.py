"""Instructions that numba does not offer: an atomic add to an element of an array, and locks that are words.

They work between processes on memory that these share, since the processor makes an instruction atomic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

YIELD_EVERY = 16
"""After this many looks at a lock a worker yields its core, which the holder of the lock may need."""

yield_core = types.ExternalFunction("sched_yield", types.int32())


def compiled(function: F) -> F:
    """Compiles a function when it is first called. The machine code runs without the GIL.

    It adds floating-point numbers in the order written, and fuses nothing.
    """
    made: Any = numba.njit(nogil=True, error_model="numpy")(function)
    return cast(F, made)


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """The address of an element."""
    made = context.make_array(kind)(context, builder, array)
    item: Any = cgutils.get_item_pointer  # numba's own is half typed
    return item(context, builder, kind, made, [index], wraparound=False)


def _atomic_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] += value, as one instruction: no other worker can act between the load and the store."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _place(context, builder, signature.args[0], given[0], given[1])
        builder.atomic_rmw("fadd", place, given[2], "monotonic")
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


def _swap_if(typing: Any, array: Any, index: Any, expected: Any, wanted: Any) -> Any:
    """array[index] ← wanted if it is `expected`, as one instruction. Returns whether it was."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _place(context, builder, signature.args[0], given[0], given[1])
        pair = builder.cmpxchg(place, given[2], given[3], "acq_rel", "monotonic")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.intp, array.dtype, array.dtype), generate


def _load(typing: Any, array: Any, index: Any) -> Any:
    """array[index], loaded from memory each time."""

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
    """Takes a lock, whose word is then `me`. Returns False if it was not free at any of `looks` looks."""
    for look in range(looks):
        if load(locks, at) == 0 and swap_if(locks, at, 0, me):  # a mere look takes no cache line away
            return True
        if look % YIELD_EVERY == YIELD_EVERY - 1:
            yield_core()
    return False


@compiled
def release(locks: Any, at: int) -> None:
    """Releases a lock."""
    store(locks, at, 0)
