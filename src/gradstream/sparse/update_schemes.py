"""Schemes to update components of a vector that other workers update too: which locks they take, and when.

    plain, atomic      no lock
    lock               the lock of the whole vector, before the sample is read
    short_lock         the lock of the whole vector, once the components of the sample are known
    component_locks    a lock of each component of the sample, once they are known
    round_robin        the turn to write, once the gradient is known; see "turns" below

Each lock is released after the last write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gradstream.sparse.atomics import (
    YIELD_EVERY,
    acquire,
    atomic_add,
    compiled,
    load,
    release,
    store,
    swap_if,
    yield_core,
)
from gradstream.sparse.updates import FIRST, RANKS, TURN, WHOLE

# ---- turns -------------------------------------------------------------------------------
# Turns: workers write in the order of their ranks, round after round. A worker that takes no part is skipped.
#
#     a worker waits for its turn:    while another rank has the turn:
#                                         if that rank takes no part, pass its turn on
#     when it has written:            pass the turn on
#
# The turn is a word: the rank that writes next. A rank takes part while it holds its own lock, from the beginning of
# a sweep to its end. So this lock is freed like any other when its owner has died.
#
# The turn only sets the order: the rank that has it also takes the lock of the whole vector to write. For a rank may
# begin to take part, and see that it has the turn, just when another one that has found it away passes the turn on.


@compiled
def part_of(locks: Any, rank: int) -> int:
    """Number of the lock that a rank holds while it takes part. These locks come last, in falling order of ranks."""
    return len(locks) - 1 - rank


@compiled
def take_part(locks: Any, me: Any) -> None:
    """Begins to take part: others wait for this worker's turn from now on."""
    store(locks, part_of(locks, me - 1), me)
    ranks = load(locks, RANKS)
    while ranks < me and not swap_if(locks, RANKS, ranks, me):
        ranks = load(locks, RANKS)


@compiled
def leave(locks: Any, me: Any) -> None:
    """Stops taking part: others skip this worker from now on."""
    release(locks, part_of(locks, me - 1))


@compiled
def pass_turn(locks: Any, rank: int) -> None:
    """Passes the turn, if this rank still has it, to the next rank among those that ever took part."""
    swap_if(locks, TURN, rank, (rank + 1) % load(locks, RANKS))


@compiled
def await_turn(locks: Any, me: Any, looks: int) -> int:
    """-1 when this worker has the turn. After `looks` looks, the number of the lock of the rank that has it."""
    turn = load(locks, TURN)
    for look in range(looks):
        if turn + 1 == me:
            return -1
        if load(locks, part_of(locks, turn)) == 0:
            pass_turn(locks, turn)
        elif look % YIELD_EVERY == YIELD_EVERY - 1:
            yield_core()
        turn = load(locks, TURN)
    return part_of(locks, turn)


# ---- schemes -----------------------------------------------------------------------------

GOT = -1
"""`take` returns this if it has all locks. Otherwise it has none, and returns the number of a lock that was taken."""

Moment = Literal["sample", "read", "write"]
"""When a scheme takes its locks: before it reads the sample, reads the vector, or writes it."""


@compiled
def _add(w: Any, v: int, change: Any) -> None:
    w[v] += change


@compiled
def _add_atomic(w: Any, v: int, change: Any) -> None:
    atomic_add(w, v, change)


@compiled
def take_nothing(locks: Any, where: Any, count: int, me: Any, looks: int) -> int:
    """`take` at a moment at which a scheme takes no lock."""
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
class UpdateScheme:
    """An update scheme, in machine code.

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


SCHEMES: Mapping[str, UpdateScheme] = {
    "atomic": UpdateScheme(_add_atomic),
    "plain": UpdateScheme(_add),
    "lock": UpdateScheme(_add, _take_whole, _give_whole, "sample"),
    "short_lock": UpdateScheme(_add, _take_whole, _give_whole, "read"),
    "component_locks": UpdateScheme(_add, _take_each, _give_each, "read"),
    "round_robin": UpdateScheme(_add, _take_turn, _give_turn, "write", begin=take_part, end=leave),
}
"""The scheme of each of `UPDATES`."""
