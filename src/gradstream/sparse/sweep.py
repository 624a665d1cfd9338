"""The innermost loop of HOGWILD!, and the addition of a whole gradient: both for each way to update.

A sample's arithmetic is two functions of the problem's (see `sparse.model`):

    touched(table, i, where) -> count            the components that sample i touches, ascending, each once
    gradient(w, table, i, where, count, into)    ∂f_i on them, at w as it is; returns f_i

Nothing here is atomic beyond what `update` says, and the reads never are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradstream.sparse.atomics import acquire, atomic_add, compiled, release, swap_if
from gradstream.sparse.updates import FIRST, WHOLE

__all__ = ["Kernels", "adder_of", "free", "kernels_of"]

NEXT, LOCK = 0, 1
"""Words of a state: the sample, or element, to go on with; and the lock that was not to be had."""

GOT = -1
"""Of `take`: all locks that are needed. Else it has none of them, and says which was not to be had."""


# ---- ways to update -------------------------------------------------------------------------


@compiled
def _add(w: Any, v: int, change: Any) -> None:
    w[v] += change


@compiled
def _add_atomic(w: Any, v: int, change: Any) -> None:
    atomic_add(w, v, change)


@compiled
def _take_nothing(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    return GOT


@compiled
def _give_nothing(locks: Any, where: Any, count: int) -> None:
    pass


@compiled
def _take_whole(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    return GOT if acquire(locks, WHOLE, me, looks) else WHOLE


@compiled
def _give_whole(locks: Any, where: Any, count: int) -> None:
    release(locks, WHOLE)


@compiled
def _take_each(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    """In ascending order, all alike: so no two workers wait for each other."""
    for j in range(count):
        if not acquire(locks, FIRST + where[j], me, looks):
            for held in range(j):
                release(locks, FIRST + where[held])
            return int(FIRST + where[j])
    return GOT


@compiled
def _give_each(locks: Any, where: Any, count: int) -> None:
    for j in range(count):
        release(locks, FIRST + where[j])


WAYS: dict[str, tuple[Any, Any, Any]] = {
    "atomic": (_take_nothing, _add_atomic, _give_nothing),
    "plain": (_take_nothing, _add, _give_nothing),
    "lock": (_take_whole, _add, _give_whole),
    "component_locks": (_take_each, _add, _give_each),
}
"""For each of `UPDATES`: what takes locks, adds to a component, and gives the locks back."""


# ---- one sample after the other ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernels:
    """Machine code of one problem, made when it is first called.

    Args:
        sweep: (w, table, ids, rate, locks, me, looks, state, room) → Σ f_i: from sample ids[state[NEXT]] on,
            each is an update of its own. It stops before one that needs a lock which is not to be had.
        total: (w, table, ids, into, room) → Σ f_i; adds Σ ∂f_i to `into`, which is dense.
        loss: (w, table, ids, room) → Σ f_i.
    """

    sweep: Callable[..., float]
    total: Callable[..., float]
    loss: Callable[..., float]


@functools.cache
def kernels_of(touched: Callable[..., int], gradient: Callable[..., float], update: str) -> Kernels:
    """Machine code of a problem's two functions, once in a process.

    Args:
        touched, gradient: Python that numba can compile, or has compiled.
        update: one of `UPDATES`.
    """
    touch, differentiate = _compiled_once(touched), _compiled_once(gradient)
    take, add, give = WAYS[update]

    @compiled
    def sweep(
        w: Any, table: Any, ids: Any, rate: Any, locks: Any, me: Any, looks: int, state: Any, room: Any
    ) -> float:
        where, into = room
        loss = 0.0
        for k in range(state[NEXT], len(ids)):
            count = touch(table, ids[k], where)
            blocked = take(locks, where, count, me, looks)
            if blocked != GOT:
                state[NEXT], state[LOCK] = k, blocked
                return loss
            loss += differentiate(w, table, ids[k], where, count, into)
            for j in range(count):
                add(w, where[j], -(rate * into[j]))
            give(locks, where, count)
        state[NEXT] = len(ids)
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
    """Machine code of w ← w - rate·gradient: (w, gradient, rate, locks, me, looks, state) → None.

    What is 0 is not written: a cache line stays where it is if nothing of it changes. Locks are of the whole
    vector from the first element to the last, or of one element at a time.
    """
    take, add, give = WAYS[update]

    @compiled
    def add_each(w: Any, gradient: Any, rate: Any, locks: Any, me: Any, looks: int, state: Any) -> None:
        where = np.zeros(1, np.int64)
        for v in range(state[NEXT], len(w)):
            if gradient[v] != 0:
                where[0] = v
                blocked = take(locks, where, 1, me, looks)
                if blocked != GOT:
                    state[NEXT], state[LOCK] = v, blocked
                    return
                add(w, v, -(rate * gradient[v]))
                give(locks, where, 1)
        state[NEXT] = len(w)

    @compiled
    def add_at_once(w: Any, gradient: Any, rate: Any, locks: Any, me: Any, looks: int, state: Any) -> None:
        where = np.zeros(0, np.int64)
        blocked = take(locks, where, 0, me, looks)
        if blocked != GOT:
            state[LOCK] = blocked
            return
        for v in range(len(w)):
            if gradient[v] != 0:
                add(w, v, -(rate * gradient[v]))
        give(locks, where, 0)
        state[NEXT] = len(w)

    made: Callable[..., None] = add_each if update == "component_locks" else add_at_once
    return made


# ---- locks of the dead --------------------------------------------------------------------------


@compiled
def _free(locks: Any, at: int, owner: Any) -> bool:
    return bool(swap_if(locks, at, owner, 0))


def free(locks: np.ndarray[Any, Any], at: int, owner: int) -> bool:
    """Takes a lock from an owner who is dead; whether it was still theirs."""
    return bool(_free(locks, at, np.int32(owner)))
