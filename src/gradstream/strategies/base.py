"""The `Strategy` protocol: one published way of distributing SGD, client and server in one file.

A strategy has two halves. `train(worker)` is the paper's client and runs on every worker; `rule`
is the paper's server and decides, on every shard, what is done with a push and when a fetch may
be answered. Neither sees a socket: a worker's verbs are all there is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import ClassVar, Literal, Protocol

from gradstream.memory import Vector
from gradstream.model.base import Reduction
from gradstream.optim.base import Optimizer
from gradstream.server.client import Arrival, Update
from gradstream.server.rule import Rule

__all__ = ["Gradient", "Minibatch", "Server", "Strategy", "Worker"]


class Minibatch(Protocol):
    """Samples that this worker goes through in one step."""

    @property
    def num_samples(self) -> int:
        """How many; may be 0 in a round, and is -1 until its gradient is done in a loop of the user's."""
        ...


class Gradient(Protocol):
    """A gradient that is being computed, or has been."""

    @property
    def vector(self) -> Vector:
        """Its elements."""
        ...

    @property
    def samples(self) -> int:
        """Training samples behind it, once it is done; one of none changes nothing wherever it is used."""
        ...

    async def done(self) -> None:
        """Returns when it is complete; raises what computing it raised."""
        ...


class Server(Protocol):
    """The parameter server as a worker sees it: see `gradstream.server.ServerClient`."""

    def fetch_soon(self, *, min_version: int = 0) -> Arrival:
        """Starts a fetch into the spare vector."""
        ...

    async def push_soon(self, update: Update) -> None:
        """Starts a push, once the one before it is done; raises what that one failed with."""
        ...

    async def settle(self) -> None:
        """Returns once the push started last is acknowledged by every shard; raises what it failed with."""
        ...


class Worker(Protocol):
    """One model replica: its batches, its compute, and the verbs of exchange."""

    rank: int
    num_workers: int
    step: int  # local minibatches so far, this one excluded
    version: int  # of the parameters adopted last

    @property
    def server(self) -> Server:
        """The parameter server."""
        ...

    def batches(self) -> AsyncIterator[Minibatch]:
        """This worker's minibatches, in order; ends when every sample of the run is accounted for.

        Before it waits for that, what has been accumulated is pushed.
        """
        ...

    async def gradient(self, batch: Minibatch) -> Gradient:
        """The mean gradient over a minibatch, at the worker's parameters."""
        ...

    def gradient_soon(self, batch: Minibatch) -> Gradient:
        """Starts computing it, as the model gives it: the mean or the sum over samples."""
        ...

    async def adopt(self, arrival: Arrival) -> None:
        """Waits for a fetch; from then on its vector holds the worker's parameters."""
        ...

    async def refresh(self) -> None:
        """Fetches and adopts at once, between two gradients: needs no spare vector."""
        ...

    async def apply(self, gradient: Gradient, lr: float | None = None) -> None:
        """Local step: parameters ← parameters - lr·gradient; the optimizer's lr if None."""
        ...

    async def accumulate(self, gradient: Gradient) -> None:
        """Adds to what `take_accumulated` returns. The first one is taken over, not copied."""
        ...

    async def descend(self, gradient: Gradient, lr: float | None = None, *, momentum: float = 0.0) -> None:
        """`accumulate` and `apply` in one pass over memory, of v ← momentum·v + gradient."""
        ...

    def take_accumulated(self) -> Update:
        """The sum of gradients accumulated since the last call, to be pushed."""
        ...

    def update(self, gradient: Gradient) -> Update:
        """One gradient to be pushed as it becomes ready, for the version it was computed on."""
        ...


class Strategy(ABC):
    """Base of all strategies, which are frozen dataclasses of their options.

    A strategy travels between machines as its name and these fields, never as code.
    """

    cut: ClassVar[Literal["rounds", "partitions"]]
    """How data is divided: rounds that all workers take part in, or a partition for each."""

    survives_worker_loss: ClassVar[bool]
    """Whether the others go on when a worker dies."""

    plain: ClassVar[Mapping[str, object] | None] = None
    """Options with which one worker is plain SGD; None lets `testing.check_strategy` look for them."""

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The update rule where the user names none."""

    @abstractmethod
    async def train(self, worker: Worker) -> None:
        """The client: returns when the worker's share of the run is done."""

    @abstractmethod
    def rule(self, num_workers: int, reduction: Reduction) -> Rule:
        """The server: a pure rule, the same on each shard."""
