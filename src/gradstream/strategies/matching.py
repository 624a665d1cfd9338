"""The pairs of workers in a round of pairwise exchange: a pure function, which every worker computes for itself.

    all ranks, in a random order of the round   3 0 | 4 1 | 5 2        neighbours are partners
    rank 4 is gone                              3 0 | - 1 | 5 2        rank 1 has no partner
    ranks 4 and 5 are gone                      3 0 | - 1 | - 2        those without a partner meet each other: 1 and 2

The order contains all ranks of the run's beginning, present or not, and those up to the highest present one. A worker
that dies, or takes a lost one's place, changes only the pairs of its own partner and of workers without one. If the
number of workers is odd, one has no partner and makes the round alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import TypeVar

from gradstream.errors import ConfigError
from gradstream.optim import SGD

# ---- matching ----------------------------------------------------------------------------

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


def matching(seed: int, number: int, workers: int, live: Collection[int]) -> list[Pair]:
    """The pairs of a round.

    Args:
        seed: seed of the run.
        number: number of the round.
        workers: W, number of ranks at the run's beginning, present or not.
        live: the present ranks.

    Returns:
        The pairs; each rank is in at most one.
    """
    workers = max(workers, *(1 + rank for rank in live)) if live else workers
    order = _order(seed, number, workers)
    pairs, left = list[Pair](), list[int]()
    for first in range(0, workers, 2):
        there = [rank for rank in order[first : first + 2] if rank in live]
        if len(there) == 2:
            pairs.append(_pair(*there))
        else:
            left += there
    pairs += [_pair(*left[first : first + 2]) for first in range(0, len(left) - 1, 2)]
    return pairs


def partner_of(rank: int, seed: int, number: int, workers: int, live: Collection[int]) -> int | None:
    """The partner of a rank in a round, or None. Arguments as for `matching`."""
    for one, other in matching(seed, number, workers, live):
        if rank in (one, other):
            return other if rank == one else one
    return None


def _order(seed: int, number: int, workers: int) -> Sequence[int]:
    """All ranks, in the order of a hash that no library version changes."""

    def key(rank: int) -> bytes:
        return blake2b(f"{seed}/{number}/{rank}".encode(), digest_size=16).digest()

    return sorted(range(workers), key=key)


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)


# ---- outer -------------------------------------------------------------------------------
# The outer optimizer of strategies with local steps: SGD with Nesterov's or plain momentum.

T = TypeVar("T")


def outer_sgd(strategy: str, lr: float, momentum: float, *, nesterov: bool) -> SGD:
    """V ← μ·v + Δ;  w ← w - ν·(Δ + μ·v), or w ← w - ν·v without Nesterov.

    Args:
        strategy: name of its class, for messages.
        lr: ν, > 0.
        momentum: μ, in [0, 1).
        nesterov: without effect at μ = 0.

    Raises:
        ConfigError: a value is out of its range, or ν is a schedule.
    """
    return check_outer(
        strategy, lr, momentum, lambda: SGD(lr, momentum=momentum, nesterov=nesterov and momentum != 0)
    )


def check_outer(strategy: str, lr: float, momentum: float, make: Callable[[], T]) -> T:
    """Makes an outer rule of these two options; a ConfigError names them. Raises as `outer_sgd`."""
    if callable(lr):
        raise ConfigError(
            f"{strategy}(outer_lr={lr}): expected a number; only the workers' optimizer can have a schedule"
        )
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{strategy}(outer_lr={lr!r}, outer_momentum={momentum!r}): {error}") from error
