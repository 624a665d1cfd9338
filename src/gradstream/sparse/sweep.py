"""The innermost loop of HOGWILD!, and the addition of a whole gradient, for each update scheme.

A problem has two functions for the arithmetic of a sample (see `sparse.model`):

    touched(table, i, where) -> count            the components that sample i touches, ascending, each once
    gradient(w, table, i, where, count, into)    ∂f_i on them, at the current w; returns f_i

`access` is a `LockAccess`. Reads are never atomic, and writes only as far as `update` says (`sparse.update_schemes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradstream.sparse.atomics import compiled, swap_if
from gradstream.sparse.update_schemes import GOT, SCHEMES, take_nothing

NEXT, LOCK = 0, 1
"""Words of a state: the next sample, or element, and the lock that was not free, or `GOT`."""

# ---- one sample after the other ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernels:
    """Machine code of one problem, compiled when it is first called.

    Args:
        sweep: (w, table, ids, rate, access, state, room) → Σ f_i: makes an update of each sample, from
            ids[state[NEXT]] on. It stops before a sample for which a lock is not free.
        total: (w, table, ids, into, room) → Σ f_i; adds Σ ∂f_i to `into`, which is dense.
        loss: (w, table, ids, room) → Σ f_i.
    """

    sweep: Callable[..., float]
    total: Callable[..., float]
    loss: Callable[..., float]


@functools.cache
def kernels_of(touched: Callable[..., int], gradient: Callable[..., float], update: str) -> Kernels:
    """Compiles a problem's two functions, once in a process.

    Args:
        touched, gradient: Python functions that numba can compile, or has compiled.
        update: one of `UPDATES`.
    """
    touch, differentiate = _compiled_once(touched), _compiled_once(gradient)
    scheme = SCHEMES[update]
    before_sample, before_reading, before_writing = (
        scheme.take if scheme.moment == moment else take_nothing for moment in ("sample", "read", "write")
    )
    add, give, begin, end = scheme.add, scheme.give, scheme.begin, scheme.end

    @compiled
    def sweep(w: Any, table: Any, ids: Any, rate: Any, access: Any, state: Any, room: Any) -> float:
        locks, me, looks = access
        where, into = room
        k, loss, blocked = state[NEXT], 0.0, GOT
        begin(locks, me)
        while k < len(ids):
            blocked = before_sample(locks, where, 0, me, looks)
            if blocked != GOT:
                break
            count = touch(table, ids[k], where)
            blocked = before_reading(locks, where, count, me, looks)
            if blocked != GOT:
                break
            loss_of_one = differentiate(w, table, ids[k], where, count, into)
            blocked = before_writing(locks, where, count, me, looks)
            if blocked != GOT:
                break
            loss += loss_of_one
            for j in range(count):
                add(w, where[j], -(rate * into[j]))
            give(locks, where, count, me)
            k += 1
        end(locks, me)
        state[NEXT], state[LOCK] = k, blocked
        return loss

    @compiled
    def total(w: Any, table: Any, ids: Any, sums: Any, room: Any) -> float:
        where, into = room
        loss = 0.0
        for k in range(len(ids)):
            count = touch(table, ids[k], where)
            loss += differentiate(w, table, ids[k], where, count, into)
            for j in range(count):
                sums[where[j]] += into[j]
        return loss

    @compiled
    def loss(w: Any, table: Any, ids: Any, room: Any) -> float:
        where, into = room
        loss = 0.0
        for k in range(len(ids)):
            count = touch(table, ids[k], where)
            loss += differentiate(w, table, ids[k], where, count, into)
        return loss

    return Kernels(sweep, total, loss)


@functools.cache
def _compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return function if hasattr(function, "py_func") else compiled(function)


# ---- whole vectors ----------------------------------------------------------------------------


@functools.cache
def adder_of(update: str) -> Callable[..., None]:
    """Machine code of w ← w - rate·gradient: (w, gradient, rate, access, state) → None.

    It does not write elements whose gradient is 0, so that an unchanged cache line stays where it
    is. It holds the lock of the whole and the turn from the first element to the last, and locks of components
    one at a time.
    """
    scheme = SCHEMES[update]
    take, add, give, begin, end = scheme.take, scheme.add, scheme.give, scheme.begin, scheme.end

    @compiled
    def add_each(w: Any, gradient: Any, rate: Any, access: Any, state: Any) -> None:
        locks, me, looks = access
        where = np.zeros(1, np.int64)
        for v in range(state[NEXT], len(w)):
            if gradient[v] != 0:
                where[0] = v
                blocked = take(locks, where, 1, me, looks)
                if blocked != GOT:
                    state[NEXT], state[LOCK] = v, blocked
                    return
                add(w, v, -(rate * gradient[v]))
                give(locks, where, 1, me)
        state[NEXT] = len(w)

    @compiled
    def add_at_once(w: Any, gradient: Any, rate: Any, access: Any, state: Any) -> None:
        locks, me, looks = access
        where = np.zeros(0, np.int64)
        begin(locks, me)
        state[LOCK] = take(locks, where, 0, me, looks)
        if state[LOCK] == GOT:
            for v in range(len(w)):
                if gradient[v] != 0:
                    add(w, v, -(rate * gradient[v]))
            give(locks, where, 0, me)
            state[NEXT] = len(w)
        end(locks, me)

    made: Callable[..., None] = add_each if update == "component_locks" else add_at_once
    return made


# ---- locks of dead workers --------------------------------------------------------------------------


@compiled
def _free(locks: Any, at: int, owner: Any) -> bool:
    return bool(swap_if(locks, at, owner, 0))


def free(locks: np.ndarray[Any, Any], at: int, owner: int) -> bool:
    """Releases a lock of an owner that is dead. Returns whether that owner still held it."""
    return bool(_free(locks, at, np.int32(owner)))
