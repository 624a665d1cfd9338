"""Turns: workers write in the order of their ranks, round after round, and who is away is passed over.

    a worker waits for its turn:    while the turn is another's:
                                        if that one does not take part, pass its turn on
    when it has written:            pass the turn on

The turn is a word, the rank whose it is. That a rank takes part is a lock of its own, which it holds around a
sweep: so it is freed as any lock is when its owner has died, and nothing else has to be done about the dead.

The turn is the order and no more: who has it takes the lock of the whole vector to write. For a rank may
begin to take part, and see that it is its turn, just when another, who has found it away, passes the turn on.
"""

from __future__ import annotations

from typing import Any

from gradstream.sparse.atomics import YIELD_EVERY, compiled, load, release, store, swap_if, yield_core
from gradstream.sparse.updates import RANKS, TURN

__all__ = ["await_turn", "leave", "part_of", "pass_turn", "take_part"]


@compiled
def part_of(locks: Any, rank: int) -> int:
    """Number of the lock that says that a rank takes part: from the end, behind those of components."""
    return len(locks) - 1 - rank


@compiled
def take_part(locks: Any, me: Any) -> None:
    """From now on this worker's turn is waited for."""
    store(locks, part_of(locks, me - 1), me)
    ranks = load(locks, RANKS)
    while ranks < me and not swap_if(locks, RANKS, ranks, me):
        ranks = load(locks, RANKS)


@compiled
def leave(locks: Any, me: Any) -> None:
    """From now on it is passed over."""
    release(locks, part_of(locks, me - 1))


@compiled
def pass_turn(locks: Any, rank: int) -> None:
    """The turn goes from this rank, if it is there still, to the next of those that ever took part."""
    swap_if(locks, TURN, rank, (rank + 1) % load(locks, RANKS))


@compiled
def await_turn(locks: Any, me: Any, looks: int) -> int:
    """-1 when it is this worker's turn; after so many looks the number of the lock of who has it."""
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
