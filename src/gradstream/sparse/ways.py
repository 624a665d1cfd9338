"""Ways to update components of a vector that others update too: which locks they take, and when.

    plain, atomic      no lock
    lock               the lock of the whole vector, before the sample is read
    short_lock         the lock of the whole vector, once the components of the sample are known
    component_locks    a lock of each component of the sample, once they are known
    round_robin        the turn to write, once the gradient is known; see `sparse.turns`

Each lock is released after the last write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gradstream.sparse.atomics import acquire, atomic_add, compiled, release
from gradstream.sparse.turns import await_turn, leave, pass_turn, take_part
from gradstream.sparse.updates import FIRST, WHOLE

GOT = -1
"""`take` returns this if it has all locks. Otherwise it has none, and returns the number of one that was not free."""

Moment = Literal["sample", "read", "write"]
"""When a way takes its locks: before the sample is read, before the vector is read, before it is written."""


@compiled
def _add(w: Any, v: int, change: Any) -> None:
    w[v] += change


@compiled
def _add_atomic(w: Any, v: int, change: Any) -> None:
    atomic_add(w, v, change)


@compiled
def take_nothing(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    """`take` at a moment at which a way takes no lock."""
    return GOT


@compiled
def _give_nothing(locks: Any, where: Any, count: int, me: Any) -> None:
    pass


@compiled
def _take_whole(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    return GOT if acquire(locks, WHOLE, me, looks) else WHOLE


@compiled
def _give_whole(locks: Any, where: Any, count: int, me: Any) -> None:
    release(locks, WHOLE)


@compiled
def _take_each(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    """All workers take locks in ascending order, so that no two wait for each other."""
    for j in range(count):
        if not acquire(locks, FIRST + where[j], me, looks):
            for taken in range(j):
                release(locks, FIRST + where[taken])
            return int(FIRST + where[j])
    return GOT


@compiled
def _give_each(locks: Any, where: Any, count: int, me: Any) -> None:
    for j in range(count):
        release(locks, FIRST + where[j])


@compiled
def _take_turn(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    """Waits for the turn, and takes the lock, which prevents concurrent writes even if the turn is passed on."""
    awaited = await_turn(locks, me, looks)
    if awaited != GOT:
        return awaited
    return GOT if acquire(locks, WHOLE, me, looks) else WHOLE


@compiled
def _give_turn(locks: Any, where: Any, count: int, me: Any) -> None:
    pass_turn(locks, me - 1)
    release(locks, WHOLE)


@compiled
def _nothing(locks: Any, me: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Way:
    """A way to update, in machine code.

    Args:
        add: (w, v, change): w_v ← w_v + change.
        take: (locks, where, count, me, looks) → `GOT`, or the number of a lock that was not free at any of
            `looks` looks. It is for an update of the `count` components at the front of `where`.
        give: (locks, where, count, me): releases the locks.
        moment: when a sweep calls `take`.
        begin, end: (locks, me): called before the first update of a sweep and after its last.
    """

    add: Callable[..., None]
    take: Callable[..., int] = take_nothing
    give: Callable[..., None] = _give_nothing
    moment: Moment = "read"
    begin: Callable[..., None] = _nothing
    end: Callable[..., None] = _nothing


WAYS: Mapping[str, Way] = {
    "atomic": Way(_add_atomic),
    "plain": Way(_add),
    "lock": Way(_add, _take_whole, _give_whole, "sample"),
    "short_lock": Way(_add, _take_whole, _give_whole, "read"),
    "component_locks": Way(_add, _take_each, _give_each, "read"),
    "round_robin": Way(_add, _take_turn, _give_turn, "write", begin=take_part, end=leave),
}
"""A way for each of `UPDATES`."""
