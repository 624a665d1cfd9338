"""The protocols of a strategy, one published way of distributing SGD: one protocol for each way of exchange.

    ServerStrategy          through the shards of a parameter server
    GroupStrategy           among the workers, in a group without servers
    SharedMemoryStrategy    in one vector in memory that all workers share

A strategy is one file. Its `train(worker)` is the paper's client and runs on every worker. Through servers
it has a second half: `rule` is the paper's server, and decides on every shard what becomes of a push and when
a fetch may be answered. A third half, `drive(run)`, is optional: it runs once, on the coordinator, and says
which workers take part when. No strategy sees a socket: all it may call is in `api.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gradstream.data.base import Partitioning
from gradstream.errors import InternalError
from gradstream.model.base import Reduction
from gradstream.model.factors import FactoredLayer
from gradstream.optim.base import Optimizer
from gradstream.optim.merge import Add, Replace
from gradstream.strategies.api import GroupWorker, Participation, ServerWorker, SharedMemoryWorker

if TYPE_CHECKING:  # runs without servers import nothing of them
    from gradstream.server.aggregation import AggregationRule
    from gradstream.server.correction import Correction

__all__ = ["GroupStrategy", "Pushes", "RowExchange", "ServerStrategy", "SharedMemoryStrategy", "Strategy"]

BUCKET_BYTES = 4 << 20
"""Least size of a bucket, for a strategy that does not choose one."""

Pushes = Literal["gradients", "differences", "parameters", "outer_gradients"]
"""What a strategy's pushes hold, and so which nodes carry out the run's update rule.

gradients: sums of gradients. Shards update the parameters by the run's rule.
differences: terms that the shards add to the parameters; they do nothing else.
parameters: a worker's own parameters. Those of the shards become the weighted sum of what workers push.
outer_gradients: the distance w_start - w that a worker has come. To the shards' rule it is a gradient.

With all but gradients, each worker has parameters of its own, which `ServerWorker.optimize` updates by the
run's rule, the inner optimizer. Shards have the outer one, `ServerStrategy.outer_optimizer`. The parameters
of the shards are evaluated, checkpointed and saved.
"""


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Sends only what has changed: rows of gradients up, rows of parameters down.

    Args:
        threshold: θ, significance from which a row is sent, 0 for every row; see `worker.replica.row_sum`.
        relative: θ is relative to the size of the parameters; else it is absolute.
        block_elems: length of the rows into which tensors that are not row-sparse are divided.
    """

    threshold: float = 0.0
    relative: bool = True
    block_elems: int = 64


class Strategy(ABC):
    """The base of all strategies; yours derives from the one below that exchanges as yours does.

    A strategy is a frozen dataclass of its options. It travels between machines as its name and these
    fields, never as code.

    Example:
        >>> strategy: gs.Strategy = gs.Downpour(push_every=2)
        >>> strategy.survives_worker_loss
        True
    """

    partitioning: ClassVar[Partitioning]
    """How data is divided: "rounds" in which all workers take part; a "queue", of which each worker takes
    minibatches as it needs them; "partitions", one for each worker, where workers meet and none can do more
    than the others. A job may choose the other one of the last two (`assignment`)."""

    survives_worker_loss: ClassVar[bool]
    """Whether the others go on when a worker dies."""

    plain: ClassVar[Mapping[str, object] | None] = None
    """Options with which one worker is plain SGD; None lets `testing.check_strategy` look for them."""

    @property
    def gives_mean(self) -> bool:
        """Whether each round gives every worker the mean gradient over the samples of all workers.

        A training loop of the user's own then exchanges gradients alone, and its optimizer makes each step
        on every worker, as in `DistributedDataParallel`. Otherwise the parameters are exchanged.
        """
        return False

    def partitioning_of_run(self) -> Partitioning:
        """How data is divided with these options."""
        return self.partitioning

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The update rule of a run whose user names none."""

    @abstractmethod
    async def train(self, worker: Any) -> None:
        """The client: returns when the worker's share of the run is done.

        Args:
            worker: the one of the way of exchange, such as `api.ServerWorker`.
        """


class ServerStrategy(Strategy):
    """The base of strategies whose workers push to the shards of a parameter server, and fetch from them."""

    pushes: ClassVar[Pushes] = "gradients"
    """What its pushes hold; see `Pushes`."""

    @abstractmethod
    async def train(self, worker: ServerWorker) -> None:
        """The client; see `Strategy.train`."""

    @abstractmethod
    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """The server: a pure rule, the same on each shard."""

    def correction(self) -> Correction | None:
        """What a shard does to a push before the rule weighs it; None for nothing."""
        return None

    def quorum(self, num_workers: int) -> int | None:
        """How many of the workers' pushes make an update, the same ones on every chunk.

        None leaves it to the rule, chunk by chunk. With a quorum no update waits for the remaining workers: a
        late worker skips the rounds that went on without it, and the run goes on while so many are left.
        """
        del num_workers
        return None

    @property
    def decays_gradients(self) -> bool:
        """Whether each gradient has its own weight decay λ·w, at the parameters that it was computed on.

        For strategies that push or apply sums of gradients, or make local steps: `ServerWorker.gradient` adds
        the term, and the shards' rule does not. Otherwise the rule adds it once an update.
        """
        return False

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        """The shards' update rule for the weighted sum of an update's pushes, where they are no gradients.

        Its state lies on the shards, each of which has its part, and in checkpoints. Its learning rate is a
        number, and no schedule. See `Pushes`.

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

    def rows(self, tables: bool) -> RowExchange | None:
        """How only what has changed is exchanged; None exchanges every chunk whole.

        Args:
            tables: the model has row-sparse tensors.
        """
        del tables
        return None

    async def drive(self, run: Participation) -> None:
        """Says which workers take part when: warm starts, waves. Runs once, on the coordinator.

        Optional: without it all workers take part from the beginning. When it returns, participation stays as
        it is then. In rounds no worker can be missing, so `partitioning` must not be "rounds".
        """
        await run.set_active_workers(len(run.workers))

    def drives(self) -> bool:
        """Whether `drive` has anything to do, with these options."""
        return type(self).drive is not ServerStrategy.drive


class GroupStrategy(Strategy):
    """The base of strategies whose workers sum their gradients in a group, and make each update themselves."""

    algorithm: str = "auto"
    """How the group sums; see `gradstream.collectives`."""

    exchange: str = "auto"
    """Library that moves the bytes: "auto" is gradstream itself, "torch" is torch.distributed."""

    sharded: bool | None = False
    """Whether each worker updates its own slices alone, and keeps the optimizer's state of these alone.

    None leaves it to the group: where its workers share memory, slices need not be moved.
    """

    factors: bool | None = None
    """Whether gradients of wide layers are sent as factors; None where that is cheaper."""

    @abstractmethod
    async def train(self, worker: GroupWorker) -> None:
        """The client; see `Strategy.train`."""

    def weight(self, rank: int, samples: Sequence[int], reduction: Reduction) -> float:
        """The weight of a worker's gradient in a round: by default, that of the mean over the joined batch.

        |B_i| / Σ|B| for means, 1 / Σ|B| for sums.

        Args:
            rank: i, of the worker.
            samples: |B_i| of every worker, by rank.
            reduction: whether gradients are means or sums over their samples.
        """
        total = sum(samples)
        return (samples[rank] if reduction == "mean" else 1) / total if total else 0.0

    def as_factors(self, layer: FactoredLayer, rows: int, workers: int, near: bool) -> bool:
        """Whether the gradient of a linear layer is sent as its factors; see `AllReduce`.

        Args:
            layer: its shape.
            rows: samples of a worker, at most.
            workers: number of workers.
            near: they are on one machine.
        """
        del layer, rows, workers, near
        return False

    def bucket_elems(self, itemsize_bytes: int, chunk_elems: int) -> int:
        """About how many elements are exchanged at once; a multiple of 64.

        Args:
            itemsize_bytes: size of an element.
            chunk_elems: elements per chunk of this run. Where all nodes share memory, chunks grow with the
                model, and so do buckets: the ranks meet once for each, whatever its length.
        """
        return max(BUCKET_BYTES // itemsize_bytes // 64 * 64, chunk_elems)


class SharedMemoryStrategy(Strategy):
    """The base of strategies whose workers, on one machine, update one vector in memory that they share."""

    @abstractmethod
    async def train(self, worker: SharedMemoryWorker) -> None:
        """The client; see `Strategy.train`."""
