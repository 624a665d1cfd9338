"""Chooses how a part computes its gradients, by the `pipeline` of its run, and restores what they have of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradstream.checkpoint.own_state import answering, read_own
from gradstream.data.base import Feed
from gradstream.errors import DataError
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import STREAMING, Schedule, make_schedule
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.runtime.base import Runtime, Work
from gradstream.split.part_model import PartModel
from gradstream.transport.base import Endpoint
from gradstream.untrusted import say
from gradstream.worker.config import WorkerConfig
from gradstream.worker.parts.agreement import Agreement
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.decoupled import DecoupledGradients
from gradstream.worker.parts.gradients import AgreedSource, Computed, PartSource
from gradstream.worker.parts.hybrid import HybridGradients
from gradstream.worker.parts.messages import PartReport
from gradstream.worker.parts.pipelined import PartGradients
from gradstream.worker.parts.stream import StreamedGradients

# ---- redone ------------------------------------------------------------------------------
# The gradient of a lost replica's minibatch, computed beside a pipeline that is not empty between two gradients.
#
#     stream of this replica    … F B │ F B │ F B │ F B …      in the parts' order, and never stopped
#     minibatch of a lost one        f   f   b   b             in the gaps: other tags, other memory, other parameters
#
# A stream (`stream`), and parts that train apart (`decoupled`), have no instant at which a further gradient could
# enter: what a pass reads there follows from the order of the minibatches. So the minibatch takes a way of its own,
# by backpropagation through all parts, at parameters that were just fetched. What results is the gradient that a
# flushing pipeline would have pushed: not the one of the weights that the lost replica had, and not a predicted one.
#
# Its micro-batches go through the parts one after the other. That takes K times as long, which the stream does not
# notice, and no more memory than the activations of one micro-batch.


class RedoneGradients(PartGradients):
    """Computes one part's gradients of minibatches of lost replicas. Its channel is one beside that of the stream.

    Running statistics (BatchNorm) of these minibatches reach the worker with those of the stream.
    """

    def __init__(self, config: WorkerConfig, *place: Any) -> None:
        super().__init__(config, *place)
        self._recompute = False

    def _scheduled(self, name: str) -> Schedule:
        del name  # of the stream
        one = make_schedule("1f1b", self.model.plan, 1)[self.model.part]
        return [
            replace(step, micro_batch=micro_batch)
            for micro_batch in range(self._micro_batches)
            for step in one
        ]

    async def _share_buffers(self) -> None:
        """The stream shares them, when it ends."""

    def _look(self, into: torch.Tensor, computed: Computed, num_summed: int, seen: int) -> PartReport:
        return replace(super()._look(into, computed, num_summed, seen), kind="redone")


# ---- sources -----------------------------------------------------------------------------


async def begin_predictors(
    gradients: PartSource, config: WorkerConfig, runtime: Runtime, endpoint: Endpoint, *, late: bool
) -> None:
    """Restores the predictors of a part that trains apart from its checkpoint, and serves them to the next one.

    Args:
        gradients: of the part. Nothing is done for one that has no predictors.
        config, runtime, endpoint: of the process.
        late: it takes the place of a lost process. Its predictors begin at zero.

    Raises:
        DataError: the file in the checkpoint is of other predictors.
    """
    if not isinstance(gradients, DecoupledGradients):
        return
    endpoint.serve("predictors", answering(gradients.state), model=False)
    assert isinstance(config.plan.job.pipeline, SyntheticGradients)
    resume, node = config.plan.resume, runtime.node
    if late or resume is None or resume.predictors != config.plan.job.pipeline.of_parts(config.plan.parts):
        return
    read = partial(read_own, runtime.storage, resume.folder, "predictors", node)
    found = await runtime.beside(read, work=Work("restore"))
    if found is None:
        say(f"{node}: its predictors begin at zero; {resume.folder} on this machine has none of them")
        return
    try:
        gradients.load(found)
    except (RuntimeError, KeyError) as error:
        raise DataError(
            f"{node}: the predictors in {resume.folder} do not fit this model: {error}; resume from another "
            "checkpoint, or under another split, where they begin at zero"
        ) from error


def gradients_of(
    config: WorkerConfig,
    runtime: Runtime,
    model: PartModel,
    channel: PartChannel,
    agreement: Agreement,
    feed: Feed | None,
) -> PartSource:
    """The gradients of one part. For the arguments, see `PartSource`."""
    kind: type[PartSource]
    match config.plan.job.pipeline:
        case SyntheticGradients():
            kind = DecoupledGradients
        case Hybrid():
            kind = HybridGradients
        case name:
            kind = StreamedGradients if name in STREAMING else PartGradients
    channel = channel.encoded(config.plan.job.pipeline_dtype)
    source = kind(config, runtime, model, channel, agreement, feed)
    if not isinstance(source, AgreedSource):
        source.redoing = RedoneGradients(config, runtime, model, channel.beside(), agreement, feed)
    return source
