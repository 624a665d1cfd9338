"""Turns: workers write in the order of their ranks, round after round. A worker that takes no part is skipped.

    a worker waits for its turn:    while another rank has the turn:
                                        if that rank takes no part, pass its turn on
    when it has written:            pass the turn on

The turn is a word: the rank that writes next. A rank takes part while it holds its own lock, from the
beginning of a sweep to its end. So this lock is freed like any other when its owner has died.

The turn only sets the order: the rank that has it also takes the lock of the whole vector to write. For a rank may
begin to take part, and see that it has the turn, just when another one that has found it away passes the turn on.
"""

from __future__ import annotations

from typing import Any

from gradstream.sparse.atomics import YIELD_EVERY, compiled, load, release, store, swap_if, yield_core
from gradstream.sparse.updates import RANKS, TURN


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
