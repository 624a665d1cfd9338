"""The base classes of strategies: published ways of distributing SGD, by how their workers exchange.

    ServerStrategy          through the shards of a parameter server
    GroupStrategy           among the workers, in a group without servers
    PeerStrategy            between two workers at a time, without servers
    SharedMemoryStrategy    in one vector in memory that all workers share

A strategy is one file. Its `train(worker)` is the paper's client and runs on every worker. A strategy with servers has
a second part: its `rule` is the paper's server, which decides on every shard when pushes are applied and when a fetch
is answered. A strategy uses no sockets: `api.py` has everything that it may call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError, InternalError, UnknownNameError
from gradstream.model.base import Reduction
from gradstream.optim.base import Optimizer
from gradstream.optim.merge import Add, Replace
from gradstream.strategies.api import (
    GroupWorker,
    PeerWorker,
    ServerWorker,
    SharedMemoryWorker,
)

if TYPE_CHECKING:
    from gradstream.server.aggregation import AggregationRule, Correction


# ---- base --------------------------------------------------------------------------------

BUCKET_BYTES = 4 << 20
"""Smallest size of a bucket, unless the strategy chooses one."""

Pushes = Literal["gradients", "differences", "parameters", "outer_gradients"]
"""The content of a strategy's pushes. It decides which nodes carry out the run's update rule.

gradients: sums of gradients. Shards update the parameters by the run's rule.
differences: terms that the shards add to the parameters, without a rule.
parameters: a worker's own parameters. The shards' parameters become the weighted sum of the pushes.
outer_gradients: pseudo-gradients w_start - w, the distance that a worker has moved. The shards' rule uses them as
    gradients.

Except with gradients, each worker has its own parameters, which `ServerWorker.optimize` updates by the run's rule, the
inner optimizer. The shards have the outer optimizer, `ServerStrategy.outer_optimizer`. The shards' parameters are
evaluated, checkpointed and saved.
"""


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Sends only changed rows: rows of gradients up, rows of parameters down.

    Args:
        threshold: θ, significance from which a row is sent, 0 for every changed row; see `server.rows`.
        relative: True measures θ relative to the size of the parameters, False absolutely.
        block_elems: elements of the rows into which tensors that are not row-sparse are divided.
    """

    threshold: float = 0.0
    relative: bool = True
    block_elems: int = 64


class Strategy(ABC):
    """The base of all strategies. A strategy of your own derives from one of its subclasses.

    `ServerStrategy` is for workers that exchange through servers, `GroupStrategy` for workers that sum among
    themselves, `PeerStrategy` for workers that exchange in pairs, and `SharedMemoryStrategy` for workers that update
    one vector in shared memory. A strategy is a frozen dataclass of its options: other machines get its name and its
    fields, never code.

    Example:
        >>> strategy: gs.Strategy = gs.Downpour(push_every=2)
        >>> strategy.survives_worker_loss
        True
    """

    partitioning: ClassVar[Partitioning]
    """How data is divided: into "rounds" in which all workers take part; as a "queue", from which each worker takes
    minibatches as it needs them; into "partitions", one for each worker, where workers wait for each other and none
    can do more than the others. A job may choose between the last two (`assignment`)."""

    topology: ClassVar[str]
    """How workers exchange, in a word; each base class below sets it."""

    survives_worker_loss: ClassVar[bool]
    """Whether the other workers continue when a worker dies."""

    plain: ClassVar[Mapping[str, object] | None] = None
    """Options with which one worker is plain SGD; None lets `testing.check_strategy` search for them."""

    pipelined: ClassVar[bool] = False
    """Whether it may run in pipelines that do not flush, where gradients are of older parameters than `Worker.version`
    says: it must neither look at their age nor wait for other workers before a minibatch."""

    in_passes: ClassVar[bool] = False
    """Whether each data epoch is one pass at fixed parameters, and each minibatch a portion of it.

    With servers `partitioning` must be "queue": no minibatch of an epoch is assigned before all of the previous epoch
    are in the sum.
    """

    @property
    def title(self) -> str:
        """Name in records and reports; "" for the name under which users know the class."""
        return ""

    @property
    def stands_in(self) -> bool:
        """Whether another worker can compute a lost worker's part of a round.

        With servers, this needs pushes that are the gradient of a minibatch at the round's parameters, without other
        state of the worker. In a group, a round must exchange only the weighted sum of gradients, and `train` must
        keep nothing between rounds, so that it may start again between any two.
        """
        return False

    @property
    def local_steps(self) -> int:
        """H, minibatches of a worker in a round; see `local_rounds`."""
        return 1

    @property
    def local_rounds(self) -> bool:
        """Whether a round without servers consists of local steps, one for each minibatch, whose result is exchanged.

        A worker of a server strategy makes local steps if `pushes` is not "gradients". In a user's training loop, the
        loop's optimizer makes these steps.
        """
        return False

    @property
    def gives_mean(self) -> bool:
        """Whether each round gives every worker the mean gradient over the samples of all workers.

        If so, a user's training loop exchanges only gradients, and its optimizer makes each step on every worker, as in
        `DistributedDataParallel`. Otherwise the loop's parameters are exchanged.
        """
        return False

    def partitioning_of_run(self) -> Partitioning:
        """How data is divided with these options."""
        return self.partitioning

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The default update rule."""

    @abstractmethod
    async def train(self, worker: Any) -> None:
        """The client: returns when the worker's share of the run is done.

        Args:
            worker: the worker of this topology, such as `api.ServerWorker`.
        """


class ServerStrategy(Strategy):
    """The base of strategies whose workers push to the shards of a parameter server, and fetch from them."""

    topology: ClassVar[str] = "servers"

    pushes: ClassVar[Pushes] = "gradients"
    """Content of the pushes; see `Pushes`."""

    @property
    def fewest_chunks(self) -> int:
        """Least number of chunks of the flat vector, if it is long enough; chunks get smaller."""
        return 1

    @property
    def copies(self) -> bool:
        """Whether in passes an idle worker also computes another worker's portion, if it may be done sooner."""
        return True

    @abstractmethod
    async def train(self, worker: ServerWorker) -> None:
        """The client; see `Strategy.train`."""

    @abstractmethod
    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """The server: a pure rule, the same on each shard."""

    def in_group(self) -> GroupStrategy | None:
        """The same method in a group of workers, for runs with `servers=0`; None if it needs servers."""
        return None

    def correction(self) -> Correction | None:
        """A correction of each push on the shards before the rule weighs it; None for none."""
        return None

    def quorum(self, num_workers: int) -> int | None:
        """Number of workers whose pushes make an update, the same workers on every chunk.

        None lets the rule decide, chunk by chunk. With a quorum no update waits for the remaining workers: a late
        worker skips the rounds that ended without it, and the run continues while this many workers are left.
        """
        del num_workers
        return None

    @property
    def decays_gradients(self) -> bool:
        """Whether each gradient has its own weight decay λ·w, at the parameters that it was computed on.

        True for strategies that push sums of gradients, or make local steps: `ServerWorker.gradient` then adds the
        term, and the shards' rule does not. Otherwise the rule adds it once an update.
        """
        return False

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        """The shards' update rule for the weighted sum of an update's pushes, if these are not gradients.

        Each shard has its part of the rule's state, which is in checkpoints. The learning rate is a number, not a
        schedule. See `Pushes`.

        Args:
            inner: the run's optimizer, which the workers use.

        Raises:
            ConfigError: the two rules do not go together.
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
                    f'{type(self).__name__} has pushes = "outer_gradients", but no outer_optimizer(); expected '
                    "this method, which returns the update rule that the shards apply to the pushes"
                )

    def rows(self, tables: bool) -> RowExchange | None:
        """How to exchange only changed rows; None exchanges every chunk whole.

        Args:
            tables: whether the model has row-sparse tensors.
        """
        del tables
        return None


class GroupStrategy(Strategy):
    """The base of strategies whose workers sum their gradients in a group, and make each update themselves."""

    topology: ClassVar[str] = "group"

    algorithm: str = "auto"
    """Algorithm of the sum; see `gradstream.collectives`."""

    exchange: str = "auto"
    """Library that moves the bytes: "auto" is gradstream itself, "torch" is torch.distributed."""

    sharded: bool | None = False
    """Whether each worker updates only its own slices, and keeps the optimizer's state only for these.

    None lets the group decide: if its workers share memory, slices need not be moved.
    """

    @property
    def local_rounds(self) -> bool:
        """See `Strategy.local_rounds`: true if there is an outer rule."""
        return self.outer_rule() is not None

    @property
    def delay(self) -> int:
        """Number of a round's last minibatches that a worker computes while the earlier ones are exchanged."""
        return 0

    async def finish(self, worker: GroupWorker) -> None:
        """Makes the worker's parameters final at the end of the run, by commands on only its own vectors.

        Only a worker that writes the final model calls it.
        """
        del worker

    def checkpointed(self, note: bytes) -> str:
        """Name of the state vector that a checkpoint swaps with the model's parameters.

        Args:
            note: see `Peers.note`.
        """
        del note
        return ""

    def outer_rule(self) -> Optimizer | None:
        """The rule of rounds that exchange pseudo-gradients w - w_i, made by the run's own optimizer.

        None: rounds exchange the model's gradients, and the run's optimizer makes the update.
        """
        return None

    @abstractmethod
    async def train(self, worker: GroupWorker) -> None:
        """The client; see `Strategy.train`."""

    def weight(self, rank: int, samples: Sequence[int], reduction: Reduction) -> float:
        """The weight of a worker's gradient in a round: |B_i| / Σ|B| for means, 1 / Σ|B| for sums.

        With these default weights the sum is the mean over the joined batch.

        Args:
            rank: i, rank of the worker.
            samples: |B_i|, number of samples of every worker, by rank.
            reduction: whether gradients are means or sums over their samples.
        """
        total = sum(samples)
        return (samples[rank] if reduction == "mean" else 1) / total if total else 0.0

    def bucket_elems(self, itemsize_bytes: int, chunk_elems: int) -> int:
        """Approximate number of elements that are exchanged at once, a multiple of 64.

        Args:
            itemsize_bytes: size of an element.
            chunk_elems: elements per chunk of this run. Where all nodes share memory, chunks grow with the model.
                So do buckets: the ranks wait for each other once for each, whatever its length.
        """
        return max(BUCKET_BYTES // itemsize_bytes // 64 * 64, chunk_elems)


class PeerStrategy(Strategy):
    """The base of strategies whose workers have their own parameters, and exchange with one other at a time.

    Workers go through rounds, each at its own time. A worker that is lost is dropped from the rounds until a new
    process takes its place, which begins with a copy of another worker's state.
    """

    topology: ClassVar[str] = "pairs"
    partitioning: ClassVar[Partitioning] = "rounds"
    survives_worker_loss: ClassVar[bool] = True

    every: int = 1
    """H, minibatches of each worker in a round."""

    @property
    @override
    def local_rounds(self) -> bool:
        return True

    @property
    @override
    def local_steps(self) -> int:
        return self.every

    @property
    def state_names(self) -> tuple[str, ...]:
        """Vectors that each worker keeps from round to round besides its parameters, zero at first."""
        return ()

    @property
    def numbers(self) -> Mapping[str, float]:
        """Single numbers that each worker keeps from round to round, with their first values."""
        return {}

    @property
    def encodes(self) -> bool:
        """Whether the first vector of each `PeerWorker.exchange_with` is a difference, which a codec may encode."""
        return False

    @abstractmethod
    async def train(self, worker: PeerWorker) -> None:
        """The client; see `Strategy.train`."""


class SharedMemoryStrategy(Strategy):
    """The base of strategies whose workers, on one machine, update one vector in memory that they share."""

    topology: ClassVar[str] = "shared memory"

    @abstractmethod
    async def train(self, worker: SharedMemoryWorker) -> None:
        """The client; see `Strategy.train`."""


# ---- checks ------------------------------------------------------------------------------
# Checks of strategies' options, with one wording for all.


def check_choice(strategy: str, option: str, got: object, names: Sequence[str]) -> None:
    """Checks that a value is one of these names, or a function.

    Raises:
        UnknownNameError: the value is another name.
        ConfigError: the value is the place of a function, "file.py:function", which only settings look up.
    """
    if callable(got) or got in names:
        return
    if isinstance(got, str) and ":" in got:
        raise ConfigError(
            f"{strategy}({option}={got!r}): expected the function itself; its place is for the command line "
            "and config.toml, which look it up"
        )
    raise UnknownNameError(f"{option} of {strategy}", str(got), names)


def check_count(
    strategy: str, option: str, got: object, what: str, *, least: int = 1, other: str = ""
) -> None:
    """Checks that a value is a whole number: a period of 1.5 steps would never end.

    Args:
        what: the things that are counted, for the message.
        least: smallest number that is allowed.
        other: alternatives to a number, for the message.

    Raises:
        ConfigError: the value is not a whole number, or too small.
    """
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise ConfigError(
            f"{strategy}({option}={got!r}): expected a whole number of {what} of at least {least}{other}"
        )


def check_flag(strategy: str, option: str, got: object, *, may_be_none: bool = False) -> None:
    """Checks that a value is True or False, since Python treats other values, such as "no", as true.

    Args:
        may_be_none: None is allowed too.

    Raises:
        ConfigError: the value is something else.
    """
    if not isinstance(got, bool) and not (may_be_none and got is None):
        expected = "True, False or None" if may_be_none else "True or False"
        raise ConfigError(f"{strategy}({option}={got!r}): expected {expected}")


def check_not_negative(strategy: str, option: str, got: object, what: str = "number") -> None:
    """Checks that a value is a finite number of at least 0.

    Args:
        what: kind of number, for the message.

    Raises:
        ConfigError: the value is no such number.
    """
    if isinstance(got, bool) or not isinstance(got, int | float) or not 0 <= got < math.inf:
        raise ConfigError(f"{strategy}({option}={got!r}): expected a finite {what} of at least 0")
