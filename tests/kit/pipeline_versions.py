"""A plain model of streams: the version that each pass reads, what a part keeps, and stages that read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from gradstream.errors import InternalError
from gradstream.pipeline.schedule import Kind, Schedule, StagePass, check_streaming, version_read
from gradstream.split.plan import DATA, SplitPlan


def weight_versions(
    name: str, plan: SplitPlan, schedules: Sequence[Schedule], *, micro_batches: int = 1
) -> dict[StagePass, int]:
    """The version that each forward and backward of a stream reads.

    Args:
        name: one of STREAMING.
        plan: plan of the split model.
        schedules: the schedules of all parts for the whole stream.
        micro_batches: micro-batches of a minibatch, M: 1, but for "2bw".

    Raises:
        UnknownNameError, ConfigError: the arguments do not go together.
    """
    check_streaming(name, plan, micro_batches)
    versions: dict[StagePass, int] = {}
    for part, schedule in enumerate(schedules):
        done = {stage.number: 0 for stage in plan.stages_of(part)}  # backwards
        for step in (step for step in schedule if step.stage != DATA):
            newest = min(done.values()) // micro_batches
            if step.kind == "forward":
                versions[step] = version_read(name, plan, step.micro_batch // micro_batches, newest)
            else:
                forward = StagePass("forward", step.stage, step.micro_batch)
                versions[step] = newest if name == "delayed" else versions[forward]
                done[step.stage] += 1
    return versions


class WeightedStages(Protocol):
    """What a part computes, with given weights."""

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """As `Stages.forward`."""
        ...

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, torch.Tensor], weights: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        """As `Stages.backward`. Where nothing is stashed, `weights` are newer than those of the forward."""
        ...

    async def update(self, stage: int, minibatch: int, weights: torch.Tensor) -> None:
        """Updates the weights in place by the sum of the minibatch's gradients. There is one optimizer state."""
        ...


class WeightStash:
    """The versions of one stage's weights that passes still read, and the newest.

    A version stays in the memory where forwards have read it, since a graph of autograd refers to that.

    Args:
        weights: (elems,) version 0. Written while it is the newest and nobody reads it any more.
        reads: the version of each read to come, in any order.

    Attributes:
        newest: (elems,) the newest version.
        most: the most versions that have been held at once.
    """

    def __init__(self, weights: torch.Tensor, reads: Iterable[int]) -> None:
        self.newest, self.most = weights, 1
        self._number, self._left = 0, Counter(reads)
        self._older: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []

    def read(self, version: int) -> torch.Tensor:
        """(elems,) that version, which stays as it is until `advance` after its last read."""
        self._left[version] -= 1
        if version == self._number:
            return self.newest
        if version not in self._older:
            raise InternalError(f"version {version} of the weights is not held: the newest is {self._number}")
        if self._left[version] == 0:
            self._free.append(self._older[version])
            return self._older.pop(version)
        return self._older[version]

    def advance(self) -> torch.Tensor:
        """(elems,) memory of the next version, which has the values of the newest until the caller updates it."""
        if self._left[self._number]:
            self._older[self._number] = self.newest
            memory = self._free.pop() if self._free else torch.empty_like(self.newest)
            self.newest = memory.copy_(self.newest)
        self._number += 1
        self.most = max(self.most, 1 + len(self._older))
        return self.newest


class StashedStages:
    """Implements `Stages` for the stages of one part in a stream: each pass reads the weights of its version.

    Args:
        stages: computes with the weights that it is given.
        weights: weights of each stage of the part, by its number.
        schedule: schedule of the part for the whole stream.
        versions: the version that each pass reads: see `weight_versions`.
        micro_batches: micro-batches of a minibatch.

    Attributes:
        stashes: the versions of each stage.
        trace: each pass that was computed, and the version that it read.
    """

    def __init__(
        self,
        stages: WeightedStages,
        weights: Mapping[int, torch.Tensor],
        schedule: Schedule,
        versions: Mapping[StagePass, int],
        micro_batches: int = 1,
    ) -> None:
        self._stages, self._versions, self._micro_batches = stages, versions, micro_batches
        reads: dict[int, list[int]] = {number: [] for number in weights}
        for step in schedule:
            if step.stage != DATA:
                reads[step.stage].append(versions[step])
        self.stashes = {number: WeightStash(weights[number], reads[number]) for number in weights}
        self.trace: list[tuple[StagePass, int]] = []
        self._left = len(self.stashes)  # stages with backwards of the minibatch to come

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Stages.forward`."""
        weights = self._read("forward", stage, micro_batch)
        return await self._stages.forward(stage, micro_batch, values, weights)

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Stages.backward`. The last one of a minibatch updates the weights of all stages."""
        weights = self._read("backward", stage, micro_batch)
        results = await self._stages.backward(stage, micro_batch, gradients, weights)
        minibatch, number = divmod(micro_batch, self._micro_batches)
        self._left -= number == self._micro_batches - 1
        if not self._left:
            self._left = len(self.stashes)
            for each, stash in self.stashes.items():
                await self._stages.update(each, minibatch, stash.advance())
        return results

    async def weights(self, stage: int, micro_batch: int) -> None:
        """Raises InternalError: schedules of streams have no separate passes for gradients of weights."""
        raise InternalError(
            f"stage {stage}, micro-batch {micro_batch}: got a pass for the gradients of weights alone, expected "
            "forward or backward: a stream's backward computes both gradients"
        )

    def _read(self, kind: Kind, stage: int, micro_batch: int) -> torch.Tensor:
        step = StagePass(kind, stage, micro_batch)
        self.trace.append((step, self._versions[step]))
        return self.stashes[stage].read(self._versions[step])
