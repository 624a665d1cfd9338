"""The `Strategy` protocol: one published way of distributing SGD, client and server in one file.

A strategy has two halves. `train(worker)` is the paper's client and runs on every worker; `rule`
is the paper's server and decides, on every shard, what is done with a push and when a fetch may
be answered. Neither sees a socket: a worker's verbs are all there is (`verbs.py`). Where it needs a
third, `drive(run)` runs once, on the coordinator, and says who takes part and when.

Where workers exchange in a group, there is no server, and `train` is the whole of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradstream.data.base import Partitioning
from gradstream.errors import InternalError
from gradstream.model.base import Reduction
from gradstream.model.factors import FactoredLayer
from gradstream.optim.base import Optimizer
from gradstream.optim.merge import Add, Replace
from gradstream.server.aggregation import AggregationRule
from gradstream.server.correction import Correction
from gradstream.strategies.api import Participation, Worker

__all__ = ["Pushes", "RowExchange", "Strategy"]

BUCKET_BYTES = 4 << 20
"""Of a strategy that does not say, at least."""

Pushes = Literal["gradients", "differences", "parameters", "outer_gradients"]
"""What a strategy's pushes hold, and so where the run's update rule is carried out.

gradients: sums of gradients. Shards update the parameters by the run's rule.
differences: what is to be added to the parameters. Shards add it, and nothing else.
parameters: a worker's own parameters. Those of the shards become the weighted sum of what workers push.
outer_gradients: how far a worker has come, w_start - w. To the shards' rule it is a gradient.

Of all but gradients, each worker has parameters of its own, which `Worker.optimize` updates by the run's
rule, the inner optimizer. Shards have the outer one, `Strategy.outer_optimizer`. What they hold is evaluated,
kept and saved.
"""


@dataclass(frozen=True, slots=True)
class RowExchange:
    """How only what has changed is exchanged: rows of gradients up, rows of parameters down.

    Args:
        threshold: θ of what is significant enough to be sent, 0 for everything; see `worker.replica.row_sum`.
        relative: to the parameters' own size, or to 1.
        block_elems: what belongs to no row-sparse tensor has rows of so many elements.
    """

    threshold: float = 0.0
    relative: bool = True
    block_elems: int = 64


class Strategy(ABC):
    """Base of all strategies, which are frozen dataclasses of their options.

    A strategy travels between machines as its name and these fields, never as code.

    Example:
        >>> strategy: gs.Strategy = gs.Downpour(push_every=2)
        >>> strategy.survives_worker_loss
        True
    """

    partitioning: ClassVar[Partitioning]
    """How data is divided: "rounds" that all workers take part in; a "queue", of which each takes minibatches
    as it needs them; "partitions", one for each worker, where workers meet and none can do more than the
    others. A job may ask for another of the last two (`assignment`)."""

    survives_worker_loss: ClassVar[bool]
    """Whether the others go on when a worker dies."""

    through: ClassVar[Literal["servers", "group", "shared"]] = "servers"
    """Where gradients are brought together: on servers; without any, among the workers, in a group; or in one
    vector in memory that all workers share."""

    pushes: ClassVar[Pushes] = "gradients"
    """What its pushes hold, and so who carries out the run's update rule; see `Pushes`."""

    @property
    def decays_gradients(self) -> bool:
        """Through servers: whether each gradient has its own weight decay λ·w, at the parameters it is of.

        For strategies that push or apply sums of gradients, or make local steps: `Worker.gradient` adds the
        term, and the shards' rule does not. Else the rule adds it once an update.
        """
        return False

    @property
    def gives_mean(self) -> bool:
        """Whether each round gives every worker the mean gradient over the samples of all workers.

        A loop of the user's own then exchanges gradients alone, and its own optimizer makes each step on
        every worker, as in `DistributedDataParallel`. Else the parameters are exchanged.
        """
        return False

    algorithm: str = "auto"
    """In a group: how it sums; see `gradstream.collectives`."""

    exchange: str = "auto"
    """In a group: who moves the bytes: "auto" is gradstream itself, "torch" is torch.distributed."""

    sharded: bool | None = False
    """In a group: each worker updates its own slices alone, and has the optimizer's state of these alone.

    None leaves it to the group: where its workers share memory, slices need not be moved.
    """

    factors: bool | None = None
    """In a group: whether gradients of wide layers go as factors; None where that pays."""

    plain: ClassVar[Mapping[str, object] | None] = None
    """Options with which one worker is plain SGD; None lets `testing.check_strategy` look for them."""

    def partitioning_of_run(self) -> Partitioning:
        """How data is divided with these options; `partitioning`, where they do not matter for it."""
        return self.partitioning

    def quorum(self, num_workers: int) -> int | None:
        """How many of the workers' contributions make an update, the same ones on every chunk.

        None leaves it to the rule, chunk by chunk. With a quorum nobody waits for the workers beyond it:
        who is late skips the rounds that went on without it, and the run goes on while so many are left.
        """
        del num_workers
        return None

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The update rule where the user names none."""

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        """What shards do with the weighted sum of an update's pushes; see `Pushes`.

        Its state lies on the shards, each has its part, and in checkpoints. Its rate is a number, and no
        schedule. Of a strategy whose pushes are gradients it is the run's optimizer itself, and nobody asks.

        Args:
            inner: the run's optimizer, which is the workers'.

        Raises:
            ConfigError: the two do not go together.
        """
        match self.pushes:
            case "gradients":
                return inner
            case "differences":
                return Add()
            case "parameters":
                return Replace()
            case "outer_gradients":
                raise InternalError(
                    f'{type(self).__name__} says pushes = "outer_gradients" and has no outer_optimizer(): '
                    "what do its shards do with them?"
                )

    @abstractmethod
    async def train(self, worker: Worker) -> None:
        """The client: returns when the worker's share of the run is done."""

    async def drive(self, run: Participation) -> None:
        """What is to happen once in a run, on the coordinator: warm starts, waves. See `Participation`.

        Optional: where a strategy has none, all workers take part from the begin. When it returns, it stays
        as it is then. In rounds nobody can be missing, so `partitioning` must not be "rounds".
        """
        await run.set_active_workers(len(run.workers))

    def drives(self) -> bool:
        """Whether `drive` has anything to do, with these options."""
        return type(self).drive is not Strategy.drive

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """The server: a pure rule, the same on each shard. None of a strategy that goes through a group."""
        raise InternalError(f"{type(self).__name__} has no rule: what does its server do with a push?")

    def correction(self) -> Correction | None:
        """The server: what a shard does to a contribution before the rule weighs it. None for nothing."""
        return None

    def rows(self, tables: bool) -> RowExchange | None:
        """Through servers: how only what has changed is exchanged; None exchanges all of every chunk.

        Args:
            tables: the model has row-sparse tensors.
        """
        del tables
        return None

    def as_factors(self, layer: FactoredLayer, rows: int, workers: int, near: bool) -> bool:
        """In a group: whether the gradient of a linear layer goes as its factors; see `AllReduce`.

        Args:
            layer: its shape.
            rows: samples of a worker, at most.
            workers: how many.
            near: they are on one machine.
        """
        del layer, rows, workers, near
        return False

    def bucket_elems(self, itemsize_bytes: int, chunk_elems: int) -> int:
        """In a group: about how many elements are exchanged at once; a multiple of 64.

        Args:
            itemsize_bytes: of an element.
            chunk_elems: elements per chunk of this run. Where all nodes share memory, chunks grow with the
                model, and so do buckets: each costs what its ranks do to meet, whatever its length.
        """
        return max(BUCKET_BYTES // itemsize_bytes // 64 * 64, chunk_elems)
