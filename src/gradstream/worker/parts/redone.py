"""The gradient of a lost replica's minibatch, computed beside a pipeline that is not empty between two gradients.

    stream of this replica    … F B │ F B │ F B │ F B …      in the parts' order, and never stopped
    minibatch of a lost one        f   f   b   b             in the gaps: other tags, other memory, other parameters

A stream (`stream`), and parts that train apart (`decoupled`), have no instant at which a further gradient could enter:
what a pass reads there follows from the order of the minibatches. So the minibatch takes a way of its own, by
backpropagation through all parts, at parameters that were just fetched. What results is the gradient that a flushing
pipeline would have pushed: not the one of the weights that the lost replica had, and not a predicted one.

Its micro-batches go through the parts one after the other. That takes K times as long, which the stream does not
notice, and no more memory than the activations of one micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gradstream.pipeline.schedule import Schedule, make_schedule
from gradstream.worker.config import WorkerConfig
from gradstream.worker.parts.gradients import Computed
from gradstream.worker.parts.messages import PartReport
from gradstream.worker.parts.pipelined import PartGradients


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
