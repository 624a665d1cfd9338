"""The worker of a replica of several processes: what it has beside what every worker has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property, partial

import numpy as np
import torch

from gradstream.coordinator.client.member import Member
from gradstream.data.base import Dataset, Feed, Ids
from gradstream.data.feed import feed_of
from gradstream.memory import Vector
from gradstream.model.base import Batch
from gradstream.model.buffers import Buffers
from gradstream.runtime.base import Runtime, Work
from gradstream.split.part_model import PartModel
from gradstream.transport.base import Endpoint
from gradstream.wire.chunks import replica_of
from gradstream.worker.batch_gate import BatchGate
from gradstream.worker.config import WorkerConfig
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.gradients import PartPlace
from gradstream.worker.parts.lead import PartLead
from gradstream.worker.parts.outputs import GivenOutputs, compute_outputs, test_sizes, write_final_parts
from gradstream.worker.parts.sources import begin_predictors, gradients_of
from gradstream.worker.registration import tensor_specs_of


class ReplicaLead:
    """What the worker of a split replica does with its parts.

    Args:
        runtime, endpoint, member, config: of the worker.
        gate: its gate.
        failed: reports that this node cannot continue.

    Attributes:
        parts: leads the parts.
        close: hears no reports any more.
    """

    def __init__(
        self,
        runtime: Runtime,
        endpoint: Endpoint,
        member: Member,
        config: WorkerConfig,
        gate: BatchGate,
        failed: Callable[[Exception], Awaitable[None]],
    ) -> None:
        assert isinstance(config.model, PartModel)
        self._runtime = runtime
        self._endpoint = endpoint
        self._member = member
        self._config = config
        self._model = config.model
        self._names = replica_of(config.rank, config.plan.parts)
        limits = config.plan.job.deadlines.silence_s, config.micro_batch_samples
        self._channel = PartChannel(runtime, endpoint, self._names, config.model, failed, *limits)
        self.parts = PartLead(self._channel, config.model, config.plan.parts, gate, member)
        self.close = self._channel.close

    async def begin(self) -> None:
        """Returns when all parts are in the run."""
        names = {*self._names}
        await self._member.heard(lambda: names <= {node.name for node in self._member.notice.nodes})
        self.parts.start()
        gradients, late = self.place.gradients, self._member.since > 0
        await begin_predictors(gradients, self._config, self._runtime, self._endpoint, late=late)

    @cached_property
    def place(self) -> PartPlace:
        """See `Assembly`."""
        config = self._config
        feeds = partial(_feed, config)
        feed = feeds(config.rank)
        gradients = gradients_of(config, self._runtime, self._model, self._channel, self.parts, feed)
        return PartPlace(gradients, self.parts.pushed, self.parts, feeds)

    async def outputs(
        self, parameters: torch.Tensor, data: Dataset, buffers: Buffers, *, newest: bool
    ) -> GivenOutputs:
        """Outputs of all held-out samples, in evaluation mode.

        Args:
            parameters: of this part.
            buffers: of the whole model; {} leaves all as they are.
            data: has the samples.
            newest: the other parts take the newest parameters of the model, not their replica's.
        """
        async with self.parts.turn(None):
            return await self._outputs(parameters, data, buffers, newest=newest)

    async def _outputs(
        self, parameters: torch.Tensor, data: Dataset, buffers: Buffers, *, newest: bool
    ) -> GivenOutputs:
        model = self._model
        before = model.buffers() if buffers else {}
        if buffers:
            model.load_buffers(buffers)
            await self.parts.spread_buffers()
        self.parts.begin_outputs(newest=newest)
        last, results, begin = model.plan.stages[-1].part, [], 0
        for size in test_sizes(data):
            ids = np.arange(begin, begin + size, dtype=np.int64)
            batch = await self._runtime.compute(partial(_read, data, ids), work=Work("read", samples=size))
            begin += size
            result = await compute_outputs(self._runtime, model, self._channel, parameters, size, batch)
            if result is None:
                result = await self._channel.take_outputs(last, size, has_loss=batch.targets is not None)
            results.append(result)
        if before:
            model.load_buffers(before)  # the parts get theirs before the next minibatch
        return GivenOutputs(model.whole, model.reduction, results)

    async def write_final(self, parameters: Vector, buffers: Buffers) -> None:
        """Writes the final model of all parts."""
        self.parts.send()
        specs = tensor_specs_of(self._model)
        others = {**buffers, **self._model.fixed().frozen}
        await write_final_parts(self._runtime, self._channel, self._model, parameters, specs, others)


def _feed(config: WorkerConfig, rank: int) -> Feed:
    assert config.batch_plan is not None
    return feed_of(config.plan.job.data, config.batch_plan, rank, config.plan.job.seed)


def _read(data: Dataset, ids: Ids, report: object) -> Batch:
    del report
    return data.test_batch(ids)
