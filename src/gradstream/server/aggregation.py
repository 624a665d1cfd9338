"""The `AggregationRule`: what a shard does with a push, and when a fetch may be answered.

A rule is the server half of a strategy, and pure: it looks at a chunk's version and at the
contributions that have arrived for it, and says which of them form the next update, in which order
and with which weights. Arithmetic, waiting and talking are the shard's.

What is due need not be applied at once. A rule that has `completes` (`GrowingSumRule`) lets contributions be
summed on the shard as they come: each is acknowledged once it is in the sum, so that nobody keeps it for
the server to wait with; the chunk's version goes up when the sum is applied.

A rule that waits for every worker has `among` (`WaitingRule`): the shard knows who takes part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradstream.errors import ConfigError

__all__ = [
    "AggregationRule",
    "EveryN",
    "EveryPush",
    "FetchTerms",
    "GrowingSumRule",
    "PushHeader",
    "WaitingRule",
    "among",
    "by_round",
    "completes_of",
    "in_step",
    "rank_of",
]


_NAME = re.compile(r"[a-z]+-([0-9]{1,7})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PushHeader:
    """One chunk of one push, without its elements.

    Args:
        sender: node name.
        rank: the worker's rank.
        incarnation: of the sender.
        sequence: number of the push: per sender and incarnation, from 1.
        samples: training samples behind it.
        num_gradients: minibatch gradients summed in it.
        learning_rate: to apply it with.
        round: synchronous strategies: the version it is meant for.
        base_version: version of the chunk that the gradient was computed on.
        empty: the sender contributes nothing this time; there are no elements.
        clock: of the sender, once this is in; 0 where it keeps none (see `clocks.py`).
        loss: mean over the samples; NaN where nobody has said.
        vector: what it is a contribution to: "" the parameters, else a state vector of the update rule.
    """

    sender: str
    rank: int
    incarnation: int
    sequence: int
    samples: int
    num_gradients: int = 1
    learning_rate: float = 0.0
    round: int = 0
    base_version: int = 0
    empty: bool = False
    clock: int = 0
    loss: float = math.nan
    vector: str = ""


def rank_of(sender: str) -> int:
    """The rank of a node, from its name: a role and a rank, as in "worker-3".

    Raises:
        ConfigError: it is no such name.
    """
    found = _NAME.fullmatch(sender)
    if found is None:
        raise ConfigError(
            f"{sender[:64]!r} is no name of a node: expected a role and a rank, as in 'worker-3'"
        )
    return int(found[1])


@dataclass(frozen=True, slots=True)
class FetchTerms:
    """What a fetch asks of a chunk before it is sent.

    Args:
        min_version: this version or a later one.
        after_sequence: this push of the same sender must have been applied, or be in the sum (0: none).
        flush: the chunk's sum must be empty: what it holds is applied, though no update is due.
        beside: no gradient will be computed on it.
        min_clock: every worker that takes part must be there.
    """

    sender: str
    incarnation: int
    min_version: int = 0
    after_sequence: int = 0
    flush: bool = False
    beside: bool = False
    min_clock: int = 0


class AggregationRule(Protocol):
    """The server half of a strategy."""

    def drops(self, version: int, new: PushHeader) -> bool:
        """Whether a contribution comes too late to be used (an expected outcome, not an error)."""
        ...

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """Those contributions that form the next update now, in the order of summation; or none."""
        ...

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """The factor of each contribution in the sum Σ weight·elements that the optimizer is given.

        Args:
            version: of the chunk before this update; minus a contribution's base_version, its staleness.
            update: as `due` chose it.
        """
        ...

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """Names of the senders whose contributions the next update waits for."""
        ...


Completes = Callable[[int, int, Sequence[PushHeader]], bool]


class GrowingSumRule(AggregationRule, Protocol):
    """A rule whose updates are sums that grow on the shard."""

    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        """Whether the chunk's sum is applied now that these contributions are added; else it goes on.

        Args:
            version: of the chunk, as for `weights`.
            summed: contributions that the sum held before; one without elements joins no sum.
            update: as `due` chose it.
        """
        ...


class WaitingRule(AggregationRule, Protocol):
    """A rule whose updates wait for workers, and which others must not wait for."""

    def among(self, present: frozenset[int]) -> AggregationRule:
        """The same rule, which waits for none but these ranks: the others are lost, or have nothing to do."""
        ...


def among(rule: AggregationRule, present: frozenset[int]) -> AggregationRule:
    """A rule of those who take part; one that does not ask who does is as it was."""
    found: Callable[[frozenset[int]], AggregationRule] | None = getattr(rule, "among", None)
    return rule if found is None else found(present)


def in_step(rule: AggregationRule) -> bool:
    """Whether a rule has `in_step = True`: an update is the sum of one clock's contributions.

    It is applied once every worker that takes part has brought its own: see `clocks.py`.
    """
    return bool(getattr(rule, "in_step", False))


def by_round(rule: AggregationRule) -> bool:
    """Whether a rule has `by_round = True`: the version of a chunk is the number of its round.

    A command that changes parameters leaves it as it is then; else it counts as an update.
    """
    return bool(getattr(rule, "by_round", False))


def completes_of(rule: AggregationRule) -> Completes:
    """A rule's `completes`; of one that has none, each update that is due is applied at once."""
    found: Completes = getattr(rule, "completes", _always)
    return found


def _always(version: int, summed: int, update: Sequence[PushHeader]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class EveryPush:
    """Every contribution is an update of its own, applied as it comes: asynchronous SGD."""

    def drops(self, version: int, new: PushHeader) -> bool:
        """Never."""
        return False

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """The oldest."""
        return parked[:1]

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1."""
        return (1.0,)

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """Nobody."""
        return ()


@dataclass(frozen=True, slots=True)
class EveryN(EveryPush):
    """Contributions are summed as they come, and every `count` of them are an update.

    Args:
        count: at least 1, which is `EveryPush` itself.
    """

    count: int

    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        """Once there are `count`."""
        return summed + len(update) >= self.count
