"""The `AggregationRule`: what a shard does with pushes, and when a fetch may be answered.

A rule is the server half of a strategy, and it is pure: it looks at a chunk's version and at the pushes that wait
for it, and decides which of them form the next update, in which order and with which weights. Arithmetic, waiting
and messages are the shard's.

By default an update is applied as soon as it is due. A rule that overrides `completes` has pushes summed on the
shard as they come. Each push is acknowledged once it is in the sum, so its sender need not keep it; the chunk's
version goes up when the sum is applied.

A rule that waits for every worker overrides `among`: the shard knows which workers take part.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gradstream.errors import ConfigError

__all__ = ["AggregationRule", "EveryN", "EveryPush", "FetchTerms", "PushHeader", "rank_of"]


_NAME = re.compile(r"[a-z]+-([0-9]{1,7})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PushHeader:
    """One chunk of one push, without its elements.

    Args:
        sender: node name of the worker.
        rank: rank of the worker.
        incarnation: incarnation of the worker.
        sequence: number of the push; each incarnation of a worker counts from 1.
        samples: number of training samples behind it.
        num_gradients: number of minibatch gradients summed in it.
        lr: learning rate to apply it with.
        round: version that the push is meant for; only synchronous strategies set it.
        base_version: version of the chunk that the gradient was computed on.
        empty: the push has no elements for this chunk; the worker contributes nothing this time.
        clock: clock of the worker once this push is applied; 0 where workers have none (see `clocks.py`).
        loss: mean loss over the samples; NaN where unknown.
        vector: vector that is pushed to: "" for the parameters, else a state vector of the update rule.
    """

    sender: str
    rank: int
    incarnation: int
    sequence: int
    samples: int
    num_gradients: int = 1
    lr: float = 0.0
    round: int = 0
    base_version: int = 0
    empty: bool = False
    clock: int = 0
    loss: float = math.nan
    vector: str = ""


def rank_of(sender: str) -> int:
    """The rank in a node's name, which is a role and a rank: 3 of "worker-3".

    Raises:
        ConfigError: the name has another form.
    """
    found = _NAME.fullmatch(sender)
    if found is None:
        raise ConfigError(
            f"{sender[:64]!r} is no name of a node: expected a role and a rank, as in 'worker-3'"
        )
    return int(found[1])


@dataclass(frozen=True, slots=True)
class FetchTerms:
    """The conditions under which a shard may answer a fetch of a chunk.

    Args:
        sender: node name of the reader.
        incarnation: incarnation of the reader.
        min_version: the chunk must have this version or a later one.
        after_sequence: the reader's push of this number must be applied, or be in the chunk's sum; 0 for none.
        flush: the chunk's sum must be empty: the shard applies it now, though no update is due.
        beside: the reader computes no gradient on what it gets.
        min_clock: every worker that takes part must have reached this clock.
    """

    sender: str
    incarnation: int
    min_version: int = 0
    after_sequence: int = 0
    flush: bool = False
    beside: bool = False
    min_clock: int = 0


class AggregationRule(ABC):
    """The server half of a strategy. Derive from it; only `due` and `weights` have no default."""

    __slots__ = ()

    @property
    def lockstep(self) -> bool:
        """Whether an update is the sum of one clock's pushes.

        The shard applies it once every worker that takes part has pushed its own: see `clocks.py`.
        """
        return False

    @property
    def by_round(self) -> bool:
        """Whether a chunk's version is the number of its round.

        A command that changes parameters leaves the version as it is then; else it counts as an update.
        """
        return False

    @property
    def paced(self) -> bool:
        """Whether the shard reads the pushes of a round side by side; see `push_pacer.py`.

        True only where each update needs a push of every worker.
        """
        return False

    def drops(self, version: int, new: PushHeader) -> bool:
        """Whether a push comes too late to be used, which is an expected outcome and not an error."""
        return False

    @abstractmethod
    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """The pushes that form the next update now, in the order of summation; empty while none is due."""

    @abstractmethod
    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """The factor of each push in the sum Σ weight·elements that the optimizer is given.

        Args:
            version: version of the chunk before this update; minus a push's base_version, its staleness.
            update: the pushes that `due` chose.
        """

    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        """Whether the chunk's sum is applied once these pushes are added; else it goes on growing.

        Args:
            version: version of the chunk, as for `weights`.
            summed: number of pushes in the sum before; a push without elements joins no sum.
            update: the pushes that `due` chose.
        """
        return True

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """Names of the nodes whose pushes the next update waits for."""
        return ()

    def among(self, present: frozenset[int]) -> AggregationRule:
        """The same rule, waiting for workers of these ranks only: the others are lost, or have nothing to do."""
        return self


@dataclass(frozen=True, slots=True)
class EveryPush(AggregationRule):
    """Every push is an update of its own, applied as it comes: asynchronous SGD."""

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """The oldest push."""
        return parked[:1]

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1."""
        return (1.0,)


@dataclass(frozen=True, slots=True)
class EveryN(EveryPush):
    """Pushes are summed as they come, and every `count` of them are an update.

    Args:
        count: pushes to an update, at least 1, which is `EveryPush` itself.
    """

    count: int

    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        """Whether there are `count`."""
        return summed + len(update) >= self.count
