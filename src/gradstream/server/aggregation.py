"""`AggregationRule`: decides which pushes make an update of a chunk, and with which weights.

A rule is the server half of a strategy, and it is pure: given a chunk's version and its waiting pushes, it chooses the
pushes of the next update, their order and their weights. The shard does the arithmetic, waiting and messages.

By default the shard applies an update as soon as it is due. Under a rule that overrides `completes`, the shard adds
pushes to a sum as they arrive. It acknowledges each push once the sum contains it, so the sender need not keep it; the
chunk's version increases when the shard applies the sum.

A rule that waits for every worker overrides `among`, by which the shard tells it which workers take part.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradstream.errors import ConfigError

if TYPE_CHECKING:
    from gradstream.server.robust import RobustRule


_NAME = re.compile(r"[a-z]+[0-9]{0,4}-([0-9]{1,7})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PushHeader:
    """One chunk of one push, without its elements.

    Args:
        sender: node name of the worker.
        rank: rank of the worker.
        incarnation: incarnation of the worker.
        sequence: number of the push; each incarnation of a worker counts from 1.
        samples: number of training samples that the gradients were computed on.
        num_gradients: number of minibatch gradients that the push sums.
        lr: learning rate to apply the push with.
        round: version that the push is meant for; only synchronous strategies set it.
        base_version: version of the chunk that the gradient was computed on.
        empty: whether the push has no elements for this chunk: the worker contributes nothing this time.
        clock: clock of the worker once this push is applied; 0 if workers have none (see `passes.py`).
        loss: mean loss over the samples; NaN if unknown.
        vector: vector that the push changes: "" for the parameters, else a state vector of the update rule.
        redone: whether another worker pushes in the name of this lost worker. It belongs to no clock.
        length: Euclidean length of the elements; infinite if unknown.
        portion: number of the portion of a pass (`round`) that the push contains; 0 if there are no passes.
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
    redone: bool = False
    length: float = math.inf
    portion: int = 0


def rank_of(sender: str) -> int:
    """The rank in a node's name, which consists of a role and a rank: 3 for "worker-3".

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
        flush: whether the chunk's sum must be empty: the shard applies it now, though no update is due.
        min_clock: every worker that takes part must have reached this clock.
    """

    sender: str
    incarnation: int
    min_version: int = 0
    after_sequence: int = 0
    flush: bool = False
    min_clock: int = 0


class AggregationRule(ABC):
    """The server half of a strategy. Derive from it; only `due` and `weights` have no default."""

    __slots__ = ()

    @property
    def lockstep(self) -> bool:
        """Whether an update is the sum of the pushes of one clock.

        The shard applies the sum once every worker that takes part has pushed for that clock: see `passes.py`.
        """
        return False

    @property
    def clocked(self) -> bool:
        """Whether workers have clocks: they count updates (`advance_clock`), or updates wait for participating workers.

        Shards refuse clocks, and requests to take part or not, under any other rule.
        """
        return self.lockstep or type(self).among is not AggregationRule.among

    @property
    def by_round(self) -> bool:
        """Whether a chunk's version is the number of its round.

        Then a command that changes parameters does not change the version. Otherwise it counts as an update.
        """
        return False

    @property
    def paced(self) -> bool:
        """Whether the shard reads the pushes of a round side by side; see `push_handler.py`.

        True only if each update needs a push of every worker.
        """
        return False

    @property
    def robust(self) -> RobustRule | None:
        """How contributions are combined if not by a weighted sum; `weights` then scales each of them.

        With a `WholeRule` the strategy has a quorum of all workers.
        """
        return None

    def drops(self, version: int, new: PushHeader) -> bool:
        """Whether the shard drops a push that comes too late. The worker is told; it is not an error."""
        return False

    @abstractmethod
    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """The pushes of the next update, in the order of summation; none while no update is due."""

    @abstractmethod
    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """The weight of each push in the sum Σ weight·elements that the optimizer gets.

        Args:
            version: version of the chunk before this update. The staleness of a push is this minus its
                `base_version`.
            update: the pushes that `due` chose.
        """

    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        """Whether the shard applies the chunk's sum once it contains these pushes, instead of waiting for more.

        Args:
            version: version of the chunk, as for `weights`.
            summed: number of pushes in the sum so far; a push without elements joins no sum.
            update: the pushes that `due` chose.
        """
        return True

    def awaited(self, version: int, parked: Sequence[PushHeader]) -> Sequence[str]:
        """Names of the nodes whose pushes the next update waits for."""
        return ()

    def among(self, present: frozenset[int]) -> AggregationRule:
        """The same rule for workers of these ranks, when others are lost or have nothing to do."""
        return self


@dataclass(frozen=True, slots=True)
class EveryPush(AggregationRule):
    """Makes every push an update, which the shard applies at once: asynchronous SGD."""

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        """The oldest push."""
        return parked[:1]

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        """1 for each push."""
        return (1.0,)


@dataclass(frozen=True, slots=True)
class EveryN(EveryPush):
    """Sums pushes as they arrive, and makes every `count` of them an update.

    Args:
        count: number of pushes to an update, at least 1; 1 is `EveryPush`.
    """

    count: int

    def completes(self, version: int, summed: int, update: Sequence[PushHeader]) -> bool:
        """Whether the sum has `count` pushes."""
        return summed + len(update) >= self.count
