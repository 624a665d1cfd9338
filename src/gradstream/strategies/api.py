"""What a strategy sees of a run: the verbs of a worker, of what it exchanges by, and of a drive.

    Minibatch ──▶ Gradient ──▶ Server │ Peers │ Shared
         ▲                               │
         └──────────── Worker ◀──────────┘

Neither a socket nor a file is among them. Those who implement them are in `gradstream.worker`, and of
`Participation` in `gradstream.coordinator`; a strategy of a user's own is written against these protocols alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from gradstream.memory import Vector
from gradstream.model.base import Reduction
from gradstream.server.client.arrival import Arrival
from gradstream.server.update import Update

__all__ = ["Bucket", "Gradient", "Minibatch", "Participation", "Peers", "Server", "Shared", "Worker"]

Bucket = tuple[int, int]
"""Elements [start, stop) of the flat vector, which are exchanged together."""


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

    @property
    def clock(self) -> int:
        """How many updates this worker has made with `advance_clock`."""
        ...

    def fetch_soon(self, *, min_version: int = 0, own: bool = True, min_clock: int = 0) -> Arrival:
        """Starts a fetch into the spare vector; unless `own`, it does not wait for this worker's pushes.

        With `min_clock` it waits for so many updates of every worker that takes part.
        """
        ...

    async def push_soon(self, update: Update, *, advance_clock: bool = False) -> None:
        """Starts a push, once the one before it is done; raises what that one failed with.

        With `advance_clock` it is one more update on this worker's clock.
        """
        ...

    async def flush(self) -> None:
        """Returns once the push started last is acknowledged by every shard; raises what it failed with."""
        ...

    async def pause(self) -> None:
        """From here on no update waits for this worker, until it calls `resume`; its pushes are settled.

        For rules that wait for workers (`AggregationRule.among`): in `flush`, for one.
        """
        ...

    async def resume(self) -> None:
        """Updates wait for this worker again, from the next one on."""
        ...


class Peers(Protocol):
    """The workers of a run without servers, as one of them sees them: see `gradstream.worker.replica.peers`.

    All of them call the same verbs in the same order.
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
        """Training samples behind this round's gradient of each worker, by rank. May wait for them."""
        ...

    async def allreduce(self, gradient: Gradient, bucket: Bucket, weight: float) -> None:
        """Σ weight·gradient over all workers, of one bucket: as soon as backprop is done with it.

        Raises:
            PeerLostError, DeadlineError: naming a worker. No update will be made of this round.
            What computing the gradient raised.
        """
        ...

    async def reduce_scatter(self, gradient: Gradient, bucket: Bucket, weight: float) -> None:
        """The same, but each worker gets its own slice of the sum alone."""
        ...

    async def update(self, gradient: Gradient) -> None:
        """One update w ← Opt(w, Σ), of all elements whose sums this worker has; at the rate of this round.

        Of a round in which no worker had samples nothing is changed. Its minibatch is in the model then.
        """
        ...

    async def all_gather(self) -> None:
        """Every worker's slices of the parameters, to all: all have all of them afterwards."""
        ...


class Shared(Protocol):
    """The parameters of a run whose workers have one vector in shared memory; see `strategies.hogwild`.

    Both verbs read and write it while others do, as `update` says: one of `sparse.updates.UPDATES`. What they
    were given is in the model when they return.
    """

    @property
    def sparse(self) -> bool:
        """Whether the model has a way to go through single samples."""
        ...

    async def sweep(self, batch: Minibatch, update: str) -> None:
        """Each sample of a minibatch, in order, is an update: w_v ← w_v - η·g_v where it touches v.

        Raises:
            GradientError: the loss is not finite. What was computed is in the parameters.
            DeadlineError: naming a worker that keeps a lock.
        """
        ...

    async def add(self, gradient: Gradient, update: str) -> None:
        """Component by component, w ← w - η·gradient, at the rate of its minibatch. Raises DeadlineError."""
        ...


class Worker(Protocol):
    """One model replica: its batches, its compute, and the verbs of exchange."""

    rank: int
    num_workers: int
    reduction: Reduction  # whether gradients are means or sums over their samples
    step: int  # local minibatches so far, this one excluded
    since: int  # the same since it was let in, or has come to its phase: all before that is in the model
    version: int  # of the parameters that gradients are computed on; of their oldest chunk
    clock: int  # these have so many updates of every worker that takes part; this one's all, where applied

    @property
    def unpushed(self) -> int:
        """Minibatches that are behind no update yet: accumulated, or gone through by `optimize`."""
        ...

    @property
    def phase(self) -> str:
        """What `drive` calls what is done now, as of this minibatch; "" where nobody drives."""
        ...

    @property
    def server(self) -> Server:
        """The parameter server; raises InternalError where the strategy has none."""
        ...

    @property
    def group(self) -> Peers:
        """The other workers; raises InternalError where the strategy goes through servers."""
        ...

    @property
    def shared(self) -> Shared:
        """The vector of all workers; raises InternalError where each has its own."""
        ...

    def batches(
        self,
        flush: Callable[[], Awaitable[None]] | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Minibatch]:
        """This worker's minibatches, in order; ends when every sample of the run is accounted for.

        Args:
            flush: awaited before this worker waits for others, at the end and for a checkpoint: returns
                when all that it has computed is in the model. None pushes what has been accumulated.
            before: awaited before each minibatch is begun. The place to wait for other workers' clocks: who
                waits there stands for a cut, for which the others stand too. With it this worker takes
                part in clocks, but for when it has nothing to do: nobody waits for it then.
        """
        ...

    async def gradient(self, batch: Minibatch) -> Gradient:
        """The mean gradient over a minibatch, at the worker's parameters.

        With its weight decay, where the strategy says `decays_gradients`.
        """
        ...

    def gradient_soon(self, batch: Minibatch) -> Gradient:
        """Starts computing it, as the model gives it: the mean or the sum over samples."""
        ...

    async def swap_in(self, arrival: Arrival) -> None:
        """Waits for a fetch; from then on its vector holds the worker's parameters."""
        ...

    async def pull(self, *, own: bool = True, min_clock: int = 0) -> None:
        """Fetches and adopts at once, between two gradients: needs no spare vector; see `Server`."""
        ...

    async def apply(self, gradient: Gradient, lr: float | None = None) -> None:
        """Local step: parameters ← parameters - lr·gradient; the optimizer's lr if None."""
        ...

    async def accumulate(self, gradient: Gradient) -> None:
        """Adds to what `take_accumulated` returns. The first one is taken over, not copied.

        The sum is applied at the rate of the first one; the others are weighed by their own over that.
        """
        ...

    async def local_step(self, gradient: Gradient, lr: float | None = None, *, momentum: float = 0.0) -> None:
        """`accumulate` and `apply` in one pass over memory, of v ← momentum·v + gradient."""
        ...

    async def optimize(self, gradient: Gradient) -> None:
        """One update of this worker's own parameters by the run's rule: w ← Opt(w, gradient).

        Its minibatch is behind the next `pull_towards`, `take_parameters` or `take_outer_gradient`. The
        rule's state (a velocity, say) is this worker's own, in as many vectors as the rule has; a checkpoint
        leaves it out.
        """
        ...

    async def pull_towards(self, arrival: Arrival, share: float) -> Update:
        """Moves this worker's parameters x some of the way to those fetched, y: an elastic pull.

        d = share·(x - y), computed once;  x ← x - d. Pushed, d moves the server's as far towards x.
        It lies in the vector of the fetch, which is the spare one again once the push is settled.

        Returns:
            d, to be pushed, with all minibatches since the last one behind it.
        """
        ...

    async def start_from(self, arrival: Arrival) -> None:
        """Waits for a fetch: this worker's own parameters begin as a copy of it, w_start.

        w_start stays in the vector of the fetch, which is the spare one again: until the next fetch.
        """
        ...

    async def take_outer_gradient(self) -> Update:
        """w_start - w, to be pushed, with all minibatches since the last one behind it: from `start_from` on.

        It takes the place of w_start. Call `start_from` before the next step.
        """
        ...

    def take_parameters(self) -> Update:
        """This worker's own parameters, to be pushed, with all minibatches since the last one behind them.

        Nothing may change them until the push is settled: fetch, and adopt what comes.
        """
        ...

    def take_state(self, beside: Update) -> Sequence[Update]:
        """The state vectors of this worker's rule, each to be pushed to the shards' own of its name.

        Args:
            beside: the push of the parameters, which they weigh as much as.
        """
        ...

    async def refresh_state(self) -> None:
        """The state vectors of the shards take the place of this worker's own."""
        ...

    def take_accumulated(self) -> Update:
        """The sum of gradients accumulated since the last call, to be pushed."""
        ...

    def update(self, gradient: Gradient) -> Update:
        """One gradient to be pushed as it becomes ready, for the version it was computed on."""
        ...


class Participation(Protocol):
    """A run as its strategy's `drive` sees it, on the coordinator.

    No worker takes part before `set_active_workers`. Progress is counted in samples that are in the model.
    Those before a resume count, too: a drive that goes by progress continues where it was.
    """

    @property
    def workers(self) -> Sequence[str]:
        """Names of the workers that are there, by rank."""
        ...

    @property
    def num_samples(self) -> int:
        """Of a data epoch. Raises ConfigError in a stream, which does not count."""
        ...

    @property
    def total_samples(self) -> int:
        """That the run goes through in all. Raises the same."""
        ...

    @property
    def samples(self) -> int:
        """That are in the model. Raises the same."""
        ...

    async def set_active_workers(self, count: int, phase: str = "") -> None:
        """From now on `count` workers take part: those of the lowest ranks; one that is lost is replaced.

        The others are held back: they finish the minibatch that they are in and push everything, and
        others may take what is left of their data. Returns when they have.

        Args:
            count: more than there are means all of them.
            phase: what `Worker.phase` says from the next minibatch on. A worker that comes to another one
                pushes everything before.
        """
        ...

    async def until(self, *, samples: float | None = None, seconds: float | None = None) -> None:
        """Returns once so many samples are in the model, or so many seconds of training have passed.

        Samples are heard of with the workers' reports, a quarter of a second late or so.

        Raises:
            UserCodeError: no worker takes part, so that there will be no progress.
        """
        ...
