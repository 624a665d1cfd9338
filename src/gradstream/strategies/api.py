"""Everything that a strategy may call: its worker, and the worker's means of exchange.

    Minibatch ──▶ Gradient ──▶ Server │ Peers │ Shared
         ▲                               │
         └──────────── Worker ◀──────────┘

Each topology has its worker: `ServerWorker`, `GroupWorker`, `PeerWorker`, `SharedMemoryWorker`. None has a socket or a
file. `gradstream.worker` implements them; your own strategy needs only these protocols.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gradstream.memory import Vector
from gradstream.model.base import Reduction

if TYPE_CHECKING:  # runs without servers do not import them
    from gradstream.server.client.fetch import Arrival
    from gradstream.server.client.push import Update
    from gradstream.server.procedure import StepResult
    from gradstream.wire import v1

Bucket = tuple[int, int]
"""Elements [start, stop) of the flat vector that are exchanged together."""


class Minibatch(Protocol):
    """The samples of one step of this worker."""

    @property
    def num_samples(self) -> int:
        """Number of samples; may be 0 in a round.

        In a user's training loop it is -1 until the gradient is done.
        """
        ...

    @property
    def epoch(self) -> int:
        """Number of its data epoch, from 0."""
        ...


class Gradient(Protocol):
    """A gradient, possibly still being computed."""

    @property
    def vector(self) -> Vector:
        """Its elements."""
        ...

    @property
    def samples(self) -> int:
        """Number of training samples in it, once it is done. A gradient of 0 samples changes nothing."""
        ...

    async def done(self) -> None:
        """Returns when the gradient is complete; raises the error of its computation."""
        ...


class Server(Protocol):
    """The parameter server as a worker sees it; see `gradstream.server.client.client.ServerClient`."""

    @property
    def clock(self) -> int:
        """Number of updates that this worker has pushed with `advance_clock`."""
        ...

    def fetch_soon(
        self,
        *,
        min_version: int = 0,
        own: bool = True,
        min_clock: int = 0,
        chunks: Sequence[int] | None = None,
    ) -> Arrival:
        """Starts a fetch into the back buffer.

        Args:
            min_version: version that every chunk must have reached.
            own: whether to wait for this worker's own pushes.
            min_clock: number of updates, by the clock of every participating worker, to wait for.
            chunks: numbers of the chunks to fetch; None for all. See `ServerWorker.mix_with`.
        """
        ...

    async def push_soon(self, update: Update, *, advance_clock: bool = False) -> None:
        """Starts a push once the previous one is done; raises the error of the previous one.

        Args:
            update: gradients or parameters to push.
            advance_clock: whether this update counts on the worker's clock.
        """
        ...

    async def step(self, step: v1.Procedure, commands: Sequence[v1.Command]) -> StepResult:
        """Makes every chunk carry out a step of a procedure once, whichever worker sends it; see `strategies.batch`."""
        ...

    async def flush(self) -> None:
        """Returns once every shard has acknowledged the last push; raises the error of that push."""
        ...

    async def pause(self) -> None:
        """Stops updates from waiting for this worker, until it calls `resume`. Its pushes must be flushed.

        For rules that wait for workers (`AggregationRule.among`). `batches(waited_for=True)` calls both methods.
        """
        ...

    async def resume(self) -> None:
        """Makes updates wait for this worker again, from the next one on."""
        ...


class Peers(Protocol):
    """The group of workers of a run without servers, as a worker sees it; see `gradstream.worker.group.replica`.

    All of them call the same methods in the same order.
    """

    note: (
        bytes  # the strategy's state besides vectors, kept between rounds, equal on all workers; b"" at first
    )

    @property
    def sharded(self) -> bool:
        """Whether each worker updates only its own slices: as the strategy says, or as the group decides."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The parts of the flat vector, which are exchanged one after the other, in backward order."""
        ...

    async def samples(self, gradient: Gradient) -> Sequence[int]:
        """Number of samples in each worker's gradient in this round, by rank. May wait for the workers."""
        ...

    async def allreduce(self, gradient: Gradient, bucket: Bucket, weight: float) -> None:
        """Computes Σ weight·gradient over all workers for one bucket, as soon as backprop has finished the bucket.

        Raises:
            PeerLostError, DeadlineError: the named worker was lost. This round makes no update.
            Exception: the error of the gradient's computation.
        """
        ...

    async def reduce_scatter(self, gradient: Gradient, bucket: Bucket, weight: float) -> None:
        """Like `allreduce`, but each worker gets only its own slice of the sum."""
        ...

    async def update(self, gradient: Gradient) -> None:
        """Makes one update w ← Opt(w, Σ) of all elements whose sums this worker has, at the rate of this round.

        A round in which no worker had samples changes nothing. Afterwards the minibatch counts as done.
        """
        ...

    async def all_gather(self) -> None:
        """Sends every worker's slices of the parameters to all workers, so that each has all parameters."""
        ...

    async def total_loss(self, gradient: Gradient) -> float:
        """Sum of the losses of all samples in this round; infinite where a loss or a gradient is not finite.

        Waits for the workers. Call it before `update`, and store its effect in `note` after `update`, so that
        checkpoints, and workers that join between two rounds, have both from the same round.
        """
        ...

    async def command(self, commands: Sequence[v1.Command]) -> Sequence[float]:
        """Carries out commands on this worker's vectors: "" is the parameters, other names are the update rule's state.

        All workers issue the same commands between the same two rounds. Not with `sharded`.

        Returns:
            The dot products, in order.
        """
        ...

    async def leave_out(self, batch: Minibatch) -> None:
        """Skips a round in which no worker computes anything: the minibatch counts as done. Waits for the workers."""
        ...


class Shared(Protocol):
    """The parameters of a run, in one vector in memory that the workers share; see `strategies.hogwild`.

    Both methods read and write the vector while other workers do, by the scheme that `update` names (one of
    `sparse.updates.UPDATES`). When they return, the update is in the model.
    """

    @property
    def sparse(self) -> bool:
        """Whether the model can compute the gradients of single samples."""
        ...

    async def sweep(self, batch: Minibatch, update: str) -> None:
        """Makes an update for each sample of a minibatch, in order: w_v ← w_v - η·g_v for each v that it touches.

        Raises:
            GradientError: the loss is not finite. The parameters hold the update already.
            DeadlineError: the named worker keeps a lock.
        """
        ...

    async def add(self, gradient: Gradient, update: str) -> None:
        """Makes w ← w - η·gradient component by component, η the rate of the minibatch. Raises DeadlineError."""
        ...


class Worker(Protocol):
    """One model replica: its minibatches and gradients, in any topology."""

    rank: int
    num_workers: int
    reduction: Reduction  # whether gradients are means or sums over their samples
    step: int  # number of this worker's minibatches before the current one
    version: int  # version of the parameters that gradients are computed on (of the oldest chunk)
    evaluated: str  # state vector of a batch method that evaluations use as parameters; "" for the parameters

    async def gradient(self, batch: Minibatch) -> Gradient:
        """Computes the mean gradient over a minibatch, at the worker's parameters.

        It includes weight decay where the strategy's `decays_gradients` is True.
        """
        ...

    def gradient_soon(self, batch: Minibatch) -> Gradient:
        """Starts computing a gradient: the mean or the sum over samples, by the model's `reduction`."""
        ...

    async def converged(self, reason: str, loss: float) -> None:
        """Tells the coordinator that the method has ended, which ends the run or its current phase.

        Returns when the coordinator wants workers to stop after a minibatch. That may be only for a checkpoint: a
        worker that gets another minibatch skips it, and calls this again.
        """
        ...


class GroupWorker(Worker, Protocol):
    """A worker that sums gradients with the others of its group."""

    @property
    def group(self) -> Peers:
        """The other workers."""
        ...

    def ends_epoch(self, batch: Minibatch) -> bool:
        """Whether the round of this minibatch is the last one of its data epoch."""
        ...

    def batches(self) -> AsyncIterator[Minibatch]:
        """This worker's minibatches, in order; ends when every sample of the run is accounted for."""
        ...


class PeerWorker(Worker, Protocol):
    """A worker that has its own parameters, and exchanges with one other worker at a time.

    Its `version` is the number of rounds that it has completed.
    """

    seed: int  # the run's seed
    parameters: Vector  # at the beginning of the current round
    state: Mapping[str, Vector]  # see `PeerStrategy.state_names`
    numbers: Mapping[str, Vector]  # of one element each; see `PeerStrategy.numbers`

    @property
    def live(self) -> Sequence[int]:
        """Ranks of the present workers, including this one, as far as this worker knows."""
        ...

    def batches(self) -> AsyncIterator[Minibatch]:
        """This worker's minibatches, in order; ends when every sample of the run is accounted for."""
        ...

    async def local_steps(self, batch: Minibatch) -> Vector:
        """Makes a local step for each part of a minibatch by the run's rule, x ← Opt(x, g), starting from `parameters`.

        Returns:
            x after the last step, in separate memory; a copy of the parameters if there are no samples or a gradient is
            not finite.
        """
        ...

    async def exchange_with(self, partner: int | None, vectors: Sequence[Vector]) -> Sequence[Vector] | None:
        """Exchanges vectors with the partner of this round, which passes equally many. Call it once a round.

        Waits for the partner, which may still be in an earlier round, as long as it is not silent.

        Args:
            partner: rank of another worker; None for none.
            vectors: lent for reading until the call returns. A vector that a codec encodes (`PeerStrategy.encodes`) is
                overwritten with what the partner decodes.

        Returns:
            The partner's vectors, which may be read until the next call; None if this worker continues alone: there is
            no partner, or it is lost, or it has gone on without this one. The partner then does not have the vectors
            of this worker either, unless their connection broke at the last message.
        """
        ...

    async def pass_on(
        self, to: int | None, giver: int | None, vectors: Sequence[Vector]
    ) -> tuple[bool, Sequence[Vector] | None]:
        """Sends vectors to one worker, and receives those of another. Call it once a round, instead of `exchange_with`.

        Args:
            to: rank of the worker that gets them; None for none.
            giver: rank of the worker that sends to this one; None if `to` is None.
            vectors: lent for reading until the call returns.

        Returns:
            Whether `to` has them; and the vectors of `giver`, or None: see `exchange_with`. The two are independent of
            each other, unless they are one worker.
        """
        ...

    async def work(
        self, arithmetic: Callable[[], object], reads: Sequence[Vector], writes: Sequence[Vector]
    ) -> None:
        """Carries out arithmetic on whole vectors."""
        ...

    def go_on_from(self, vector: Vector) -> None:
        """Ends the round: the next begins with these parameters, and the minibatch counts as done.

        Args:
            vector: `parameters`, or the vector of `local_steps`.
        """
        ...


class SharedMemoryWorker(Worker, Protocol):
    """A worker that updates a vector in shared memory."""

    @property
    def shared(self) -> Shared:
        """The vector that all workers share."""
        ...

    def batches(self) -> AsyncIterator[Minibatch]:
        """This worker's minibatches, in order; ends when every sample of the run is accounted for."""
        ...


class ServerWorker(Worker, Protocol):
    """A worker that pushes to the shards of a parameter server, and fetches from them."""

    clock: int  # number of updates of every participating worker that its parameters have

    @property
    def since(self) -> int:
        """Number of minibatches that this worker has finished since it began."""
        ...

    @property
    def resumed(self) -> bool:
        """Whether this worker was paused before its current minibatch; see `waited_for` of `batches`."""
        ...

    @property
    def unpushed(self) -> int:
        """Number of minibatches that are not in updates of every chunk: accumulated, or used by `optimize`."""
        ...

    @property
    def versions(self) -> Sequence[int]:
        """The version that this worker has fetched last, by chunk of the flat vector."""
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
            flush: awaited before this worker waits for others, at the end and for a checkpoint. It returns when
                all results of this worker are in the model. None pushes the accumulated gradients.
            before: awaited before each minibatch. Wait for other workers' clocks only there: a worker that waits
                there can pause for a checkpoint, for which the others pause too. With it, this worker takes part in
                clocks; while it has nothing to do, no worker waits for it.
            waited_for: whether updates wait for this worker (its rule is an `AggregationRule` with `among`). It is
                paused from a `flush` to the next minibatch.
        """
        ...

    async def swap_in(self, arrival: Arrival) -> None:
        """Waits for a fetch; its vector holds the worker's parameters from then on."""
        ...

    async def pull(self, *, own: bool = True, min_clock: int = 0) -> None:
        """Fetches and swaps in, between two gradients; needs no back buffer. See `Server.fetch_soon`."""
        ...

    async def apply(self, gradient: Gradient, lr: float | None = None) -> None:
        """Local step: parameters ← parameters - lr·gradient; the optimizer's lr if None."""
        ...

    async def accumulate(self, gradient: Gradient) -> None:
        """Adds a gradient to the sum that `take_accumulated` returns. The first gradient's vector becomes the sum.

        If gradients have different learning rates, the sum has the rate η of the first gradient, and gradient i
        is added with the weight η_i/η.
        """
        ...

    async def local_step(self, gradient: Gradient, lr: float | None = None, *, momentum: float = 0.0) -> None:
        """`accumulate` and `apply` in one pass over memory, of v ← momentum·v + gradient."""
        ...

    def take_accumulated(self) -> Update:
        """The sum of the gradients accumulated since the last call, to be pushed."""
        ...

    def update(self, gradient: Gradient) -> Update:
        """One gradient, to be pushed chunk by chunk while it is computed."""
        ...

    async def portion(self, gradient: Gradient) -> Update:
        """One gradient as a portion of a pass, to be pushed: the pass is the data epoch of its minibatch.

        Waits for the gradient. A gradient that is not finite counts as a portion without samples.
        """
        ...

    def leave_out(self, batch: Minibatch) -> Update:
        """An update without a gradient, to be pushed for a skipped minibatch, which counts as done."""
        ...

    # ---- the worker's own parameters: `pushes` other than "gradients" -------------------------

    async def optimize(self, gradient: Gradient) -> None:
        """Makes one update of this worker's own parameters by the run's rule: w ← Opt(w, gradient).

        Its minibatch is part of the next `pull_towards`, `take_parameters` or `take_outer_gradient`. The rule's state,
        such as a velocity, stays on the worker and is in no checkpoint.
        """
        ...

    async def pull_towards(self, arrival: Arrival, share: float) -> Update:
        """Moves this worker's parameters x by a share of their distance to the fetched ones, y: an elastic pull.

        d = share·(x - y), computed once;  x ← x - d. When d is pushed, the server's parameters move as far
        towards x. d lies in the vector of the fetch, which is the back buffer again once the push is done.

        Returns:
            d, to be pushed for all minibatches since the last push.
        """
        ...

    async def start_from(self, arrival: Arrival) -> None:
        """Waits for a fetch, and makes this worker's own parameters a copy of it, w_start.

        The vector of the fetch, which is the back buffer again, holds w_start until the next fetch.
        """
        ...

    async def rebase_on(self, arrival: Arrival) -> None:
        """Waits for a fetch y, and adds to it what this worker has moved since its last push: w ← y + (w - w_pushed).

        y is w_start from then on. The push was that of `take_outer_gradient(goes_on=True)`.
        """
        ...

    async def mix_with(self, arrival: Arrival, share: float) -> None:
        """Waits for a fetch y, of all chunks or some, and mixes it in there: w ← share·w + (1 - share)·y.

        y is w_start of these chunks from then on. A share of 0 takes y, bit for bit.
        """
        ...

    async def take_outer_gradient(
        self, chunks: Sequence[int] | None = None, *, goes_on: bool = False
    ) -> Update:
        """w_start - w, to be pushed for all minibatches since the last push; see `start_from`.

        It overwrites w_start. Call `start_from` before the next step; of some chunks, `mix_with` before the next push.

        Args:
            chunks: numbers of the chunks to push; None for all. The push counts for the minibatches that every chunk
                has with it.
            goes_on: the worker makes steps before it has fetched, and then calls `rebase_on`. That needs memory for a
                copy of w.
        """
        ...

    def take_parameters(self) -> Update:
        """This worker's own parameters, to be pushed for all minibatches since the last push.

        They must not change until the push is done: fetch, and swap in the result.
        """
        ...

    def take_state(self, beside: Update) -> Sequence[Update]:
        """The state vectors of this worker's rule, each to be pushed to the shards' vector of the same name.

        Args:
            beside: the push of the parameters; the state vectors get its weight.
        """
        ...

    async def refresh_state(self) -> None:
        """Replaces this worker's state vectors by the shards' vectors."""
        ...
