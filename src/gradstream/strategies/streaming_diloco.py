"""Streaming DiLoCo: DiLoCo in which one fragment of the model travels at a time, while workers continue computing.

    client i, fragments p = 0 ... P-1:                     server, chunk by chunk, as in `diloco`:
      w_start ← w_i ← fetch()                                Δ_p ← mean_i Δ_i,p, of all workers that take part
      H/P times:  w_i ← InnerOpt(w_i, ∇ℓ(w_i; batch))        v_p ← μ·v_p + Δ_p
      p ← next;  push(Δ_i,p ← (w_start - w_i)_p)             w_p ← w_p - ν·(Δ_p + μ·v_p)
      y_p ← fetch()
      τ of the next minibatches later:  (w_i)_p ← α·(w_i)_p + (1 - α)·y_p;  (w_start)_p ← y_p

Each fragment has an outer step every H minibatches, H/P after the fragment before it. So an exchange is of N/P
elements, and of the bytes of `diloco` none are saved, but the peak is P times lower. With τ > 0 the exchange continues
while the worker makes the next τ minibatches. Nothing is waited for where a link carries it in their time.

The chunks of the flat vector are dealt to the fragments: "sequential" gives each neighbours, "strided" every P-th
chunk. Which fragment is next follows from the versions of its chunks: the one with the fewest outer steps, the first of
several. Every worker knows these versions, since no update continues without its push. So all agree, whenever they
have joined.

P = 1, τ = 0, α = 0 is `diloco`, bit for bit. α = 0 forgets what a fragment has moved in the τ minibatches of its
exchange.
With α = 1 a worker takes nothing of the others: the server averages runs that know nothing of each other. With one
worker, ν = 1, μ = 0, and τ = 0 it is the inner optimizer alone, to the rounding of w - (w - w_i).

Bytes a step and worker: 4N/H up, 4N/H down (float32), in exchanges of N/P; codec "float4" makes the first 1/7. An outer
step of a fragment waits for all workers. A lost one is skipped from then on. For a checkpoint, and at the end,
workers take in what is on its way, and all fragments have one more outer step: then every minibatch is in the model.

Reference: Douillard and others, "Streaming DiLoCo with overlapping communication: towards a distributed free lunch",
2025 (arXiv 2501.18512), Algorithm 2 (α = 0.5, 4-bit outer gradients). Different here: fragments are of chunks, not of
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, get_args

from gradstream.data.base import Partitioning
from gradstream.errors import ConfigError
from gradstream.model.base import Reduction
from gradstream.optim import SGD, AdamW
from gradstream.optim.base import Optimizer
from gradstream.server.aggregation import AggregationRule, PushHeader
from gradstream.server.client.fetch import Arrival
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.averaging import Averaged
from gradstream.strategies.base import Pushes, ServerStrategy, check_choice, check_count
from gradstream.strategies.matching import outer_sgd

Pattern = Literal["sequential", "strided"]
Fragment = Sequence[int]
"""The chunks of a fragment."""


@dataclass(frozen=True, slots=True)
class InStep(Averaged):
    """The server: the mean of Δ_i of all workers that take part, all from the w_start that the chunk has now."""

    def drops(self, version: int, new: PushHeader) -> bool:
        """Whether Δ is from another w_start.

        A worker that joins may read a chunk just before an update without it. It gets its turn from what it fetches.
        """
        return new.base_version != version


@dataclass(frozen=True, slots=True)
class StreamingDiLoCo(ServerStrategy):
    """Local training with an outer optimizer, exchanged one fragment after the other; see the module.

    Args:
        every: H, inner steps between two outer steps of a fragment, at least `fragments`.
        fragments: P, number of fragments, at least 1; a model of fewer than 64·P² elements may have fewer.
        pattern: which chunks make a fragment: "sequential" or "strided".
        delay: τ, minibatches that a worker makes while an exchange is in progress, 0 to H // P.
        mixing: α, share of its own parameters that a worker keeps when a fragment arrives, in [0, 1].
        outer_lr: ν, learning rate of the outer steps, > 0.
        outer_momentum: μ, share of the outer velocity that each step keeps, in [0, 1).

    Example:
        >>> strategy = gs.StreamingDiLoCo(every=4, fragments=2)
        >>> run = gs.simulate(model, data, strategy=strategy, workers=2, batch_size=8, epochs=2)
        >>> run.summary["steps"], run.summary["samples_accounted"]
        (16, 128)
    """

    every: int = 10
    fragments: int = 4
    pattern: Pattern = "sequential"
    delay: int = 1
    mixing: float = 0.5
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    partitioning: ClassVar[Partitioning] = "partitions"
    survives_worker_loss: ClassVar[bool] = True
    pushes: ClassVar[Pushes] = "outer_gradients"
    plain: ClassVar[Mapping[str, object] | None] = {
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "delay": 0,
        "mixing": 0.0,
    }

    def __post_init__(self) -> None:
        check_count("StreamingDiLoCo", "every", self.every, "steps")
        check_count("StreamingDiLoCo", "fragments", self.fragments, "fragments")
        check_choice("StreamingDiLoCo", "pattern", self.pattern, get_args(Pattern))
        gap = self.every // self.fragments
        if not gap:
            raise ConfigError(
                f"StreamingDiLoCo(every={self.every}, fragments={self.fragments}): expected at most {self.every} "
                "fragments, since one travels after a minibatch"
            )
        if not 0 <= self.delay <= gap:
            raise ConfigError(
                f"StreamingDiLoCo(every={self.every}, fragments={self.fragments}, delay={self.delay}): expected a "
                f"delay of 0 to {gap} minibatches, since the next fragment leaves when the last has arrived"
            )
        if not 0 <= self.mixing <= 1:
            raise ConfigError(f"StreamingDiLoCo(mixing={self.mixing}): expected a number in [0, 1]")
        self._outer()  # raises

    @property
    def fewest_chunks(self) -> int:
        """One for each fragment."""
        return self.fragments

    def optimizer(self) -> Optimizer:
        """AdamW on the workers, as in the paper."""
        return AdamW(lr=4e-4, weight_decay=0.1)

    def outer_optimizer(self, inner: Optimizer) -> Optimizer:
        """SGD with Nesterov's momentum, on the shards: each chunk has its own velocity."""
        del inner
        return self._outer()

    def _outer(self) -> SGD:
        return outer_sgd("StreamingDiLoCo", self.outer_lr, self.outer_momentum, nesterov=True)

    def divided(self, num_chunks: int) -> Sequence[Fragment]:
        """The fragments of a vector of this many chunks; none is empty."""
        count = min(self.fragments, num_chunks)
        if self.pattern == "strided":
            return [range(first, num_chunks, count) for first in range(count)]
        ends = [part * num_chunks // count for part in range(count + 1)]
        return [range(*bounds) for bounds in pairwise(ends)]

    async def train(self, worker: ServerWorker) -> None:
        """The client, Algorithm 2."""
        server, fragments = worker.server, self.divided(len(worker.versions))
        steps, slot = 0, 1  # minibatches since `begin`; the next fragment leaves after slot·H/P of them
        left_at = 0
        pending: Arrival | None = None

        async def begin() -> None:
            nonlocal steps, slot
            await worker.start_from(server.fetch_soon())
            steps, slot = 0, 1

        async def take_in() -> None:
            nonlocal pending
            if pending is not None:
                await worker.mix_with(pending, self.mixing)
                pending = None

        async def flush() -> None:
            await take_in()
            if worker.unpushed:
                await server.push_soon(await worker.take_outer_gradient())
            await server.flush()

        await begin()
        async for batch in worker.batches(flush, waited_for=True):
            if worker.resumed:
                await begin()
            await worker.optimize(await worker.gradient(batch))
            steps += 1
            if steps - left_at >= self.delay:
                await take_in()
            if steps == slot * self.every // len(fragments):
                await take_in()
                chunks = turn(worker.versions, fragments)
                await server.push_soon(await worker.take_outer_gradient(chunks))
                pending = server.fetch_soon(chunks=chunks)
                slot, left_at = slot + 1, steps
                if not self.delay:
                    await take_in()

    def rule(self, num_workers: int, reduction: Reduction) -> AggregationRule:
        """The mean of the pushes of all workers that take part; see `InStep`."""
        return InStep(frozenset(range(num_workers)))


def turn(versions: Sequence[int], fragments: Sequence[Fragment]) -> Fragment:
    """The fragment whose outer step is next: that with the fewest, the first of several.

    After a death, or for a worker that has joined in the middle, some chunks of it may have that step already. They
    are skipped.
    """
    fewest = min(versions, default=0)
    left = ([chunk for chunk in fragment if versions[chunk] == fewest] for fragment in fragments)
    return next(filter(None, left), ())
