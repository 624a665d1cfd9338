"""Ways to update components of a vector that others update too: what is taken for it, when, and given back.

    plain, atomic      nothing is taken
    lock               the lock of the whole vector, before the sample is read
    short_lock         the same, when its components are known
    component_locks    a lock of each of its components, when they are known
    round_robin        the turn to write, when the gradient is known; see `sparse.turns`

Each lock that is taken is given back after the last write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gradstream.sparse.atomics import acquire, atomic_add, compiled, release
from gradstream.sparse.turns import await_turn, leave, pass_turn, take_part
from gradstream.sparse.updates import FIRST, WHOLE

__all__ = ["GOT", "WAYS", "Way", "take_nothing"]

GOT = -1
"""Of `take`: all that is needed. Else it has none of the locks, and says which was not to be had."""

Moment = Literal["sample", "read", "write"]
"""Before the sample is read; before the vector is; before the vector is written."""


@compiled
def _add(w: Any, v: int, change: Any) -> None:
    w[v] += change


@compiled
def _add_atomic(w: Any, v: int, change: Any) -> None:
    atomic_add(w, v, change)


@compiled
def take_nothing(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    """Of a moment at which a way takes nothing."""
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
    """In ascending order, all alike: so no two workers wait for each other."""
    for j in range(count):
        if not acquire(locks, FIRST + where[j], me, looks):
            for held in range(j):
                release(locks, FIRST + where[held])
            return int(FIRST + where[j])
    return GOT


@compiled
def _give_each(locks: Any, where: Any, count: int, me: Any) -> None:
    for j in range(count):
        release(locks, FIRST + where[j])


@compiled
def _take_turn(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    """Nobody writes at the same time, whatever becomes of the turn: that is seen to by the lock."""
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
        take: (locks, where, count, me, looks) → `GOT`, or the number of a lock that was not to be had at so
            many looks. For an update of the `count` components at the front of `where`, once they are known.
        give: (locks, where, count, me): gives back what was taken.
        moment: when a sweep takes it.
        begin, end: (locks, me): what is said before the first update of a sweep and after its last.
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
"""For each of `UPDATES`."""
