"""A hybrid's gradients: each part reads and computes its own samples, and its pieces of the model-parallel layers.

Before a gradient, every part gets the data-parallel layers from the parts that train them; behind it, these get the sum
of all parts' gradients: the two halves of an allreduce. Between them go the turns of `pipeline.hybrid`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch

from gradstream.data.base import BatchRef, Feed
from gradstream.data.feed import IdFeed, feed_of
from gradstream.errors import InternalError, NonFiniteError
from gradstream.memory import Vector
from gradstream.model.base import Batch
from gradstream.pipeline.hybrid import Hybrid, HybridTurn, make_turns, run_turns
from gradstream.runtime.base import Runtime, Work
from gradstream.split.hybrid_model import HybridModel
from gradstream.split.part_model import PartModel
from gradstream.worker.computed import ComputedGradient
from gradstream.worker.config import WorkerConfig
from gradstream.worker.gradient import hash_seed
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.gradients import AgreedSource, Computed


class HybridGradients(AgreedSource):
    """Computes one part's gradients of a hybrid."""

    def __init__(self, config: WorkerConfig, runtime: Runtime, model: PartModel, *place: Any) -> None:
        super().__init__(config, runtime, model, *place)
        assert config.batch_plan is not None
        assert isinstance(model, HybridModel) and isinstance(config.plan.job.pipeline, Hybrid)
        self._hybrid = model
        self._kind = config.plan.job.pipeline.turns
        self._reader_of = partial(feed_of, config.plan.job.data, config.batch_plan, seed=config.plan.job.seed)
        self._reader = self._reader_of(rank=config.rank)

    def of_rank(self, rank: int, feed: Feed | None) -> HybridGradients:
        """See `PartSource`: every part reads its samples of the other worker's minibatch itself."""
        other = cast(HybridGradients, super().of_rank(rank, feed))
        other._reader = self._reader_of(rank=rank)
        return other

    async def _compute(self, parameters: Vector, gradient: ComputedGradient) -> tuple[Computed, float]:
        runtime, model, batch = self._runtime, self._hybrid, gradient.batch
        turns, begun_ns = make_turns(self._kind, batch.num_samples, model.plan.parts), runtime.now()
        rows = [turn.samples[model.part] for turn in turns if turn.num_read(model.part)]
        values: Mapping[str, torch.Tensor] = {}
        first = 0
        if rows:
            first, last = rows[0][0], rows[-1][1]
            read = await self.meter.compute(
                lambda: self._own_samples(batch.ref, first, last), work=Work("read", samples=last - first)
            )
            values = model.values(read)
            first = first if read.num_samples == last - first else 0
        read_s = (runtime.now() - begun_ns) / 1e9
        own, into = parameters.tensor, gradient.vector.tensor
        common = await _gathered(runtime, self._channel, model, own, range(model.plan.parts))
        passes = _Passes(self, gradient, common, own)
        into.zero_()
        await run_turns(
            model.plan,
            model.part,
            turns,
            passes,
            self._channel,
            lambda name, some: values[name][some[0] - first : some[1] - first],
        )
        await self._scatter(passes.common_gradient, into)
        return passes, read_s

    def _own_samples(self, ref: BatchRef, first: int, last: int) -> Batch:
        """Samples [first, last) of a minibatch, or all of it where the feed can only read that."""
        if type(self._reader) is IdFeed:  # others may draw random numbers, for one sample after the other
            return self._reader.read_some(ref, first, last)
        return self._reader.read(ref)

    async def _scatter(self, common: torch.Tensor, into: torch.Tensor) -> None:
        """Sums the gradients of this part's share, which all parts have, in their order."""
        model, channel, found = self._hybrid, self._channel, dict[int, torch.Tensor]()
        share = into[: model.share_elems(model.part)]

        async def exchange(part: int) -> None:
            theirs = torch.cat([*model.pieces_of(part, common), common[:0]])
            if part == model.part:
                found[part] = theirs
                return
            await self._runtime.gather(channel.give(part, theirs), receive(part))

        async def receive(part: int) -> None:
            found[part] = await channel.take(part, len(share), share.dtype)

        await self._runtime.gather(*map(exchange, range(model.plan.parts)))

        def add() -> None:
            for part in range(model.plan.parts):
                share.add_(found[part])

        await self.meter.compute(add, work=Work("reduce", elems=len(share) * (model.plan.parts - 1)))

    def stage_seed(self, step: int, turn: int) -> int:
        """Seed of the random numbers of a turn: every part draws others, since it has other samples."""
        parts = self._hybrid.plan.parts
        return hash_seed(self._seed, self._rank, step, turn * parts + self._hybrid.part)


class _Passes(Computed):
    """Implements `pipeline.hybrid.HybridStages` for one gradient."""

    def __init__(
        self, source: HybridGradients, gradient: ComputedGradient, common: torch.Tensor, own: torch.Tensor
    ) -> None:
        super().__init__()
        self.common_gradient = torch.zeros_like(common)
        self._source, self._model, self._meter = source, source._hybrid, source.meter
        self._common, self._own, self._into = common, own, gradient.vector.tensor
        self._step, self._total = gradient.step, gradient.batch.num_samples
        self._saved: dict[tuple[int, int], object] = {}

    def _weight(self, stage: int, samples: int) -> float:
        """The factor of a loss of this many samples in that of the minibatch."""
        last = stage == len(self._model.plan.stages) - 1
        return samples / self._total if last and self._model.reduction == "mean" else 1.0

    async def forward(
        self, stage: int, turn: int, samples: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `HybridStages`."""
        model, parameters = self._model, self._model.of(stage, self._own, self._common)
        seed = self._source.stage_seed(self._step, turn)

        def compute() -> tuple[dict[str, torch.Tensor], object]:
            try:
                return model.model_of(stage).forward(parameters, values, seed=seed, samples=samples)
            except (
                NonFiniteError
            ) as error:  # of the loss: the other parts continue, and the gradient is refused
                self.refused = str(error)
                return {"loss": torch.tensor(math.nan)}, None

        outputs, saved = await self._meter.compute(
            compute, work=Work("forward", samples=samples, share=model.share(stage))
        )
        self._saved[stage, turn] = saved
        if "loss" in outputs:
            self.loss = (self.loss or 0.0) + self._weight(stage, samples) * float(outputs["loss"])
        return outputs

    async def backward(
        self, stage: int, turn: int, samples: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `HybridStages`."""
        model, saved, weight = self._model, self._saved.pop((stage, turn)), self._weight(stage, samples)
        into = model.of(stage, self._into, self.common_gradient)
        if saved is None:
            return model.unknown(stage, samples)

        def compute() -> dict[str, torch.Tensor]:
            returned = model.model_of(stage).backward(saved, gradients, into, weight=weight, add=True)
            return {name: one if weight == 1 else one * weight for name, one in returned.items()}

        work = Work("backward", samples=samples, share=model.share(stage))
        return await self._meter.compute(compute, work=work)


async def _gathered(
    runtime: Runtime, channel: PartChannel, model: HybridModel, own: torch.Tensor, users: Iterable[int]
) -> torch.Tensor:
    """The vector of the data-parallel layers, of which each part gives its share to all `users`."""
    common = torch.empty(model.common_elems, dtype=own.dtype)
    share = own[: model.share_elems(model.part)]

    async def put(part: int) -> None:
        given = share if part == model.part else await channel.take(part, model.share_elems(part), own.dtype)
        model.put_share(part, given, common)

    gives = [channel.give(part, share) for part in users if part != model.part]
    takes = map(put, range(model.plan.parts)) if model.part in users else ()
    await runtime.gather(*gives, *takes)
    return common


async def hybrid_outputs(
    runtime: Runtime,
    model: HybridModel,
    channel: PartChannel,
    own: torch.Tensor,
    samples: int,
    batch: Batch | None,
) -> Mapping[str, torch.Tensor] | None:
    """Outputs of a hybrid, as of `compute_outputs`. Part 0 computes what is data parallel, and has the result."""
    common = await _gathered(runtime, channel, model, own, (0,))
    values = {} if batch is None else model.values(batch)
    found = _Outputs(runtime, model, common, own)
    edges = (0, *[samples] * model.plan.parts)
    turn = HybridTurn(tuple(pairwise(edges)), edges)
    data: Callable[[str, tuple[int, int]], torch.Tensor] = lambda name, rows: values[name]  # noqa: E731
    await run_turns(model.plan, model.part, [turn], found, channel, data, backward=False)
    return found.result


class _Outputs:
    """Implements `pipeline.hybrid.HybridStages` for outputs alone."""

    def __init__(self, runtime: Runtime, model: HybridModel, common: torch.Tensor, own: torch.Tensor) -> None:
        self.result: Mapping[str, torch.Tensor] | None = None
        self._runtime, self._model, self._common, self._own = runtime, model, common, own

    async def forward(
        self, stage: int, turn: int, samples: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `HybridStages`."""
        model, parameters = self._model, self._model.of(stage, self._own, self._common)
        outputs: Mapping[str, torch.Tensor] = await self._runtime.compute(
            lambda _: model.model_of(stage).evaluate(parameters, values),
            work=Work("evaluate", samples=samples, share=model.share(stage)),
        )
        if stage == len(model.plan.stages) - 1:
            self.result = outputs
        return outputs

    async def backward(
        self, stage: int, turn: int, samples: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `HybridStages`."""
        raise InternalError("an evaluation has no backward pass")
