"""All that a strategy may call: its worker, what the worker exchanges through, and the run's participation.

    Minibatch ──▶ Gradient ──▶ Server │ Peers │ Shared
         ▲                               │
         └──────────── Worker ◀──────────┘

There is one worker for each way of exchange: `ServerWorker`, `GroupWorker`, `SharedMemoryWorker`. None has a
socket or a file. `gradstream.worker` implements them, and `gradstream.coordinator` implements `Participation`;
a strategy of your own needs no more than these protocols.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from gradstream.memory import Vector
from gradstream.model.base import Reduction

if TYPE_CHECKING:  # runs without servers import nothing of them
    from gradstream.server.client.arrival import Arrival
    from gradstream.server.update import Update

__all__ = [
    "Bucket",
    "Gradient",
    "GroupWorker",
    "Minibatch",
    "Participation",
    "Peers",
    "Server",
    "ServerWorker",
    "Shared",
    "SharedMemoryWorker",
    "Worker",
]

Bucket = tuple[int, int]
"""Elements [start, stop) of the flat vector that are exchanged together."""


class Minibatch(Protocol):
    """Samples that this worker goes through in one step."""

    @property
    def num_samples(self) -> int:
        """Number of its samples; may be 0 in a round.

        In a training loop of the user's own it is -1 until the gradient is done.
        """
        ...


class Gradient(Protocol):
    """A gradient that is being computed, or has been."""

    @property
    def vector(self) -> Vector:
        """Its elements."""
        ...

    @property
    def samples(self) -> int:
        """Training samples behind it, once it is done; one of no samples changes nothing wherever it is used."""
        ...

    async def done(self) -> None:
        """Returns when it is complete; raises the error that computing it raised."""
        ...


class Server(Protocol):
    """The parameter server as a worker sees it: see `gradstream.server.ServerClient`."""

    @property
    def clock(self) -> int:
        """Number of updates that this worker has made with `advance_clock`."""
        ...

    def fetch_soon(self, *, min_version: int = 0, own: bool = True, min_clock: int = 0) -> Arrival:
        """Starts a fetch into the back buffer.

        Args:
            min_version: version that every chunk must have reached.
            own: wait for this worker's own pushes.
            min_clock: number of updates of every participating worker to wait for.
        """
        ...

    async def push_soon(self, update: Update, *, advance_clock: bool = False) -> None:
        """Starts a push once the one before it is done; raises the error that one failed with.

        Args:
            update: gradients or parameters to push.
            advance_clock: count this update on the worker's clock.
        """
        ...

    async def flush(self) -> None:
        """Returns once every shard has acknowledged the last push; raises the error that it failed with."""
        ...

    async def pause(self) -> None:
        """From now on no update waits for this worker, until it calls `resume`. Its pushes must be flushed.

        For rules that wait for workers (`AggregationRule.among`). A worker that takes its
        minibatches from `batches(waited_for=True)` calls neither.
        """
        ...

    async def resume(self) -> None:
        """From the next update on, updates wait for this worker again."""
        ...


class Peers(Protocol):
    """The workers of a run without servers, as one of them sees them: see `gradstream.worker.replica.peers`.

    All of them call the same methods in the same order.
    """

    @property
    def sharded(self) -> bool:
        """Whether each worker updates its own slices alone: as the strategy says, or else the group."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The parts of the flat vector that are exchanged one after the other, in backward order."""
        ...

    async def samples(self, gradient: Gradient) -> Sequence[int]:
        """Training samples behind this round's gradient of each worker, by rank. May wait for the workers."""
        ...

    async def allreduce(self, gradient: Gradient, bucket: Bucket, weight: float) -> None:
        """Σ weight·gradient over all workers, of one bucket: as soon as backprop is done with it.

        Raises:
            PeerLostError, DeadlineError: a worker, which is named, was lost. This round makes no update.
            Exception: the error that computing the gradient raised.
        """
        ...

    async def reduce_scatter(self, gradient: Gradient, bucket: Bucket, weight: float) -> None:
        """The same, but each worker gets its own slice of the sum alone."""
        ...

    async def update(self, gradient: Gradient) -> None:
        """One update w ← Opt(w, Σ), of all elements whose sums this worker has; at the rate of this round.

        A round in which no worker had samples changes nothing. The minibatch counts as done afterwards.
        """
        ...

    async def all_gather(self) -> None:
        """Sends every worker's slices of the parameters to all: afterwards each has all of them."""
        ...


class Shared(Protocol):
    """The parameters of a run whose workers have one vector in shared memory; see `strategies.hogwild`.

    Both methods read and write it while other workers do; `update` says how: one of `sparse.updates.UPDATES`.
    When they return, the update is in the model.
    """

    @property
    def sparse(self) -> bool:
        """Whether the model can go through single samples."""
        ...

    async def sweep(self, batch: Minibatch, update: str) -> None:
        """Makes each sample of a minibatch an update, in order: w_v ← w_v - η·g_v where it touches v.

        Raises:
            GradientError: the loss is not finite. The parameters hold the update already.
            DeadlineError: a worker, which is named, keeps a lock.
        """
        ...

    async def add(self, gradient: Gradient, update: str) -> None:
        """Component by component, w ← w - η·gradient, at the rate of its minibatch. Raises DeadlineError."""
        ...


class Worker(Protocol):
    """One model replica: its minibatches and its gradients, whatever the way of exchange."""

    rank: int
    num_workers: int
    reduction: Reduction  # whether gradients are means or sums over their samples
    step: int  # minibatches of this worker so far, the present one excluded
    version: int  # of the parameters that gradients are computed on; of their oldest chunk

    async def gradient(self, batch: Minibatch) -> Gradient:
        """The mean gradient over a minibatch, at the worker's parameters.

        It includes weight decay where the strategy says `decays_gradients`.
        """
        ...

    def gradient_soon(self, batch: Minibatch) -> Gradient:
        """Starts computing a gradient, as the model gives it: the mean or the sum over samples."""
        ...


class GroupWorker(Worker, Protocol):
    """A worker that sums gradients with the others of its group."""

    @property
    def group(self) -> Peers:
        """The other workers."""
        ...

    def batches(self) -> AsyncIterator[Minibatch]:
        """This worker's minibatches, in order; ends when every sample of the run is accounted for."""
        ...


class SharedMemoryWorker(Worker, Protocol):
    """A worker that updates a vector in shared memory."""

    @property
    def shared(self) -> Shared:
        """The vector of all workers."""
        ...

    def batches(self) -> AsyncIterator[Minibatch]:
        """This worker's minibatches, in order; ends when every sample of the run is accounted for."""
        ...


class ServerWorker(Worker, Protocol):
    """A worker that pushes to the shards of a parameter server, and fetches from them."""

    since: (
        int  # like `step`, since it was set active or has come to its phase: all before that is in the model
    )
    clock: int  # updates of every participating worker that its parameters have; its own all, where applied

    @property
    def resumed(self) -> bool:
        """Whether this worker was paused before its present minibatch; see `waited_for` of `batches`."""
        ...

    @property
    def unpushed(self) -> int:
        """Minibatches in no update yet: accumulated, or gone through by `optimize`."""
        ...

    @property
    def phase(self) -> str:
        """The name that `drive` gives to the present phase, as of this minibatch; "" without a drive."""
        ...

    @property
    def server(self) -> Server:
        """The parameter server."""
        ...

    def batches(
        self,
        flush: Callable[[], Awaitable[None]] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        waited_for: bool = False,
    ) -> AsyncIterator[Minibatch]:
        """This worker's minibatches, in order; ends when every sample of the run is accounted for.

        Args:
            flush: awaited before this worker waits for others, at the end and for a checkpoint: returns
                when everything that it has computed is in the model. None pushes the accumulated gradients.
            before: awaited before each minibatch. The place to wait for other workers' clocks: a worker that
                waits there can stop for a checkpoint, for which the others stop too. With it this worker
                takes part in clocks, except while it has nothing to do: then no worker waits for it.
            waited_for: updates wait for this worker (its rule is an `AggregationRule` with `among`), except
                from a `flush` to the next minibatch: then it is paused.
        """
        ...

    async def swap_in(self, arrival: Arrival) -> None:
        """Waits for a fetch; from then on its vector holds the worker's parameters."""
        ...

    async def pull(self, *, own: bool = True, min_clock: int = 0) -> None:
        """Fetches and swaps in at once, between two gradients: needs no back buffer; see `Server`."""
        ...

    async def apply(self, gradient: Gradient, lr: float | None = None) -> None:
        """Local step: parameters ← parameters - lr·gradient; the optimizer's lr if None."""
        ...

    async def accumulate(self, gradient: Gradient) -> None:
        """Adds to the sum that `take_accumulated` returns. The first gradient's vector becomes the sum.

        The sum is applied at the rate of its first gradient; each other one is weighed by its own rate over that.
        """
        ...

    async def local_step(self, gradient: Gradient, lr: float | None = None, *, momentum: float = 0.0) -> None:
        """`accumulate` and `apply` in one pass over memory, of v ← momentum·v + gradient."""
        ...

    def take_accumulated(self) -> Update:
        """The sum of gradients accumulated since the last call, to be pushed."""
        ...

    def update(self, gradient: Gradient) -> Update:
        """One gradient to be pushed as it becomes ready, for the version it was computed on."""
        ...

    # ---- parameters of the worker's own: `pushes` other than "gradients" -------------------------

    async def optimize(self, gradient: Gradient) -> None:
        """One update of this worker's own parameters by the run's rule: w ← Opt(w, gradient).

        Its minibatch is part of the next `pull_towards`, `take_parameters` or `take_outer_gradient`. The
        rule's state (a velocity, say) is this worker's own, in as many vectors as the rule has; a checkpoint
        leaves it out.
        """
        ...

    async def pull_towards(self, arrival: Arrival, share: float) -> Update:
        """Moves this worker's parameters x some of the way to the fetched ones, y: an elastic pull.

        d = share·(x - y), computed once;  x ← x - d. Pushed, d moves the server's as far towards x.
        It lies in the vector of the fetch, which is the back buffer again once the push is done.

        Returns:
            d, to be pushed, on behalf of all minibatches since the last push.
        """
        ...

    async def start_from(self, arrival: Arrival) -> None:
        """Waits for a fetch: this worker's own parameters begin as a copy of it, w_start.

        w_start stays in the vector of the fetch, which is the back buffer again, until the next fetch.
        """
        ...

    async def take_outer_gradient(self) -> Update:
        """w_start - w, to be pushed, on behalf of all minibatches since the last push; see `start_from`.

        It takes the place of w_start. Call `start_from` before the next step.
        """
        ...

    def take_parameters(self) -> Update:
        """This worker's own parameters, to be pushed, on behalf of all minibatches since the last push.

        Nothing may change them until the push is done: fetch, and swap in the result.
        """
        ...

    def take_state(self, beside: Update) -> Sequence[Update]:
        """The state vectors of this worker's rule, each to be pushed to the shards' own of its name.

        Args:
            beside: the push of the parameters, whose weight they get.
        """
        ...

    async def refresh_state(self) -> None:
        """Replaces this worker's own state vectors by those of the shards."""
        ...


class Participation(Protocol):
    """A run as its strategy's `drive` sees it, on the coordinator.

    No worker takes part before the first `set_active_workers`. Progress is counted in samples that are in the
    model, those before a resume included: a drive that goes by progress continues where it was.
    """

    @property
    def workers(self) -> Sequence[str]:
        """Names of the workers that have joined, by rank."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples of a data epoch. Raises ConfigError in a stream, which does not count them."""
        ...

    @property
    def total_samples(self) -> int:
        """Samples that the run goes through in all. Raises the same."""
        ...

    @property
    def samples(self) -> int:
        """Samples that are in the model. Raises the same."""
        ...

    async def set_active_workers(self, count: int, phase: str = "") -> None:
        """From now on `count` workers take part: those of the lowest ranks; the next rank replaces a lost one.

        The others are paused: they finish their present minibatch and push everything, and other workers may
        take the rest of their data. Returns when they have.

        Args:
            count: number of workers; a larger number than there are means all.
            phase: value of `ServerWorker.phase` from the next minibatch on. A worker pushes everything before
                it enters another phase.
        """
        ...

    async def until(self, *, samples: float | None = None, seconds: float | None = None) -> None:
        """Returns once so many samples are in the model, or so many seconds of training have passed.

        The count of samples follows the workers' reports, about a quarter of a second late.

        Raises:
            UserCodeError: no worker takes part, so there will be no progress.
        """
        ...
