"""The gradients of one part where successive minibatches are in the pipeline at once.

    gradient of minibatch t:   passes of the part's endless schedule up to its last backward of t
                               F F F B(0) │ update │ F B(1) │ update │ F B(2) │ …

Forwards of later minibatches are among these passes: the replica has admitted those (`Window`). After each gradient the
strategy makes its update, as in any run. So strategies do not know of streams, and each part updates when its own
gradient is there: parts agree on nothing. Which version of the weights a pass reads is said in `pipeline.schedule`.
The part keeps copies of versions: the parameters themselves may change at every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from gradstream.collectives.schedule import cuts_of
from gradstream.errors import InternalError, NonFiniteError
from gradstream.memory import Vector
from gradstream.pipeline.executor import PipelineExecutor
from gradstream.pipeline.schedule import (
    StagePass,
    check_streaming,
    depths,
    endless_schedule,
    version_read,
    versions_held,
)
from gradstream.runtime.base import Work
from gradstream.split.part_model import PartModel
from gradstream.split.plan import SplitPlan
from gradstream.worker.computed import ComputedGradient, Result
from gradstream.worker.config import WorkerConfig
from gradstream.worker.parts.agreement import Window
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.gradients import PartSource, Values, nothing
from gradstream.worker.parts.pipelined import Passes, PassThread, dropped, pass_thread


def ahead_of(name: str, model: PartModel, micro_batches: int) -> int:
    """How many minibatches a part must know beyond the one whose gradient is due, since its passes read them.

    At least 1, by which the part knows the end of the stream. Part 0 admits minibatches for the others: for it, the
    number is its own plus the largest of theirs.

    Args:
        name: name of the pipeline schedule.
        model: model of the part.
        micro_batches: number of micro-batches of a minibatch.

    Raises:
        UnknownNameError, ConfigError: see `check_streaming`.
    """
    plan = model.plan
    check_streaming(name, plan, micro_batches)
    ahead = [_ahead(name, plan, part, micro_batches) for part in range(plan.parts)]
    return ahead[0] + max(ahead[1:], default=0) if model.part == 0 else ahead[model.part]


def _ahead(name: str, plan: SplitPlan, part: int, micro_batches: int) -> int:
    schedule, newest, most = endless_schedule(name, plan, part), 0, 0
    for minibatch in range(4 * max(depths(plan))):
        for step in _until(schedule, len(plan.stages_of(part)), (minibatch + 1) * micro_batches):
            newest = max(newest, step.micro_batch // micro_batches)
        most = max(most, newest - minibatch)
    return max(1, most)


def _until(schedule: Iterator[StagePass], stages: int, micro_batches: int) -> Iterator[StagePass]:
    """The next passes of a part of this many stages, up to the backwards of this many micro-batches."""
    while stages:
        step = next(schedule)
        stages -= step.kind == "backward" and step.micro_batch == micro_batches - 1
        yield step


class StreamedGradients(PartSource):
    """Computes one part's gradients where the minibatches of a stream (`Window`) follow each other without a flush.

    Raises:
        ConfigError: `pipeline=` cannot train this model, or not with this `micro_batches=`; see `check_streaming`.
    """

    def __init__(self, config: WorkerConfig, *place: Any) -> None:
        super().__init__(config, *place)
        self.name, self.micro_batches = str(config.plan.job.pipeline), config.plan.job.micro_batches
        self.recompute = config.plan.job.recompute
        self._agreement.window = Window(ahead_of(self.name, self.model, self.micro_batches))
        self._stream: _Stream | None = None

    async def _compute_jointly(self, parameters: Vector, gradient: ComputedGradient) -> Result:
        window = self._agreement.window
        if self._stream is None or self._stream.number != window.number:
            thread = await pass_thread(self._runtime, self._channel)
            self._stream = _Stream(self, thread, parameters, gradient, window, self._channel)
        stream = self._stream
        read_s = await self._read_ahead(stream, gradient)
        await stream.compute(parameters, gradient)
        report, num_summed = await self._report(gradient, stream)
        if report.refused:
            raise NonFiniteError(
                f"{self.where(gradient)}: {report.refused}; under pipeline={self.name!r} other parts may have made "
                "their updates, so that it cannot be left out: lower the learning rate, scale the inputs, or take "
                "pipeline='1f1b'"
            )
        if window.last:
            await self._agreement.share_buffers()
        await self._scale(gradient, 1.0, num_summed)
        return Result(await self._agreement.loss(report), None, read_s)

    async def _read_ahead(self, stream: _Stream, gradient: ComputedGradient) -> float:
        """Takes in the minibatches that were admitted, and reads them on part 0. Returns the seconds."""
        begun_ns, feed = self._runtime.now(), self._feed
        for ahead, (ref, samples) in enumerate(self._agreement.window.stream):
            if stream.done + ahead < stream.admitted:
                continue
            values, cuts = None, cuts_of(samples, min(self.micro_batches, samples))
            if feed is not None:
                work = Work("read", samples=samples)
                values = Values(
                    self.model, await self.meter.compute(partial(feed.read, ref), work=work), cuts
                )
            stream.admit(gradient.step + ahead, cuts, values)
        return 0.0 if feed is None else (self._runtime.now() - begun_ns) / 1e9


class _Stream(Passes):
    """One stream in one part. Its minibatches are numbered from 0, and each has M micro-batches at most.

    Attributes:
        number: number of the stream.
        admitted: number of minibatches that passes may compute.
        done: number of those whose gradients are there; also the version of the part's weights.
    """

    def __init__(
        self,
        source: StreamedGradients,
        thread: PassThread | None,
        parameters: Vector,
        gradient: ComputedGradient,
        window: Window,
        channel: PartChannel,
    ) -> None:
        model, sizes = source.model, dict[int, int]()
        super().__init__(source, thread, parameters, gradient, sizes)
        self.number, self.admitted, self.done = window.number, 0, 0
        self._window, self._name, self._micro_batches = window, source.name, source.micro_batches
        self._recompute = source.recompute
        self._schedule = endless_schedule(source.name, model.plan, model.part)
        held = versions_held(source.name, model.plan, model.part)
        # Where all passes of a minibatch are in one call, they read the parameters themselves.
        self._copies = held > 1 or source.name != "pipedream"
        self._reads = []  # but of the copies
        self._versions = [torch.empty(0)] * held
        self._steps: dict[int, tuple[int, int]] = {}  # (step, number of samples) of a minibatch
        self._losses: dict[int, float] = {}  # of minibatches
        self._values: dict[int, Values | None] = {}
        channel.sizes = self._own_sizes = sizes
        self._executor = PipelineExecutor(model.plan, model.part, self, thread or channel, self._value)

    def admit(self, step: int, cuts: Sequence[int], values: Values | None) -> None:
        """Lets passes compute one more minibatch.

        Args:
            step: number of its step.
            cuts: edges of its micro-batches.
            values: its values, on part 0.
        """
        first = self.admitted * self._micro_batches
        self._own_sizes.update(enumerate((stop - start for start, stop in pairwise(cuts)), first))
        self._steps[self.admitted], self._values[self.admitted] = (step, cuts[-1]), values
        self.admitted += 1

    async def compute(self, parameters: Vector, gradient: ComputedGradient) -> None:
        """Computes the next gradient: w_v are the `parameters`, for v updates."""
        self._gradient, self._written = gradient, set()
        await self._keep(parameters)
        stages, end = len(self._source.model.stages), (self.done + 1) * self._micro_batches
        passes = [step for step in _until(self._schedule, stages, end) if self._exists(step)]
        if self._recompute:
            self._drops = dropped(passes)
        await self.carry_out(self._executor, passes)
        first = self.done * self._micro_batches
        for micro_batch in range(first, first + self._micro_batches):
            self._own_sizes.pop(micro_batch, None)
        self.loss = self._losses.pop(self.done, None)
        del self._steps[self.done], self._values[self.done]
        self._window.stream.popleft()
        self.done += 1

    async def _keep(self, parameters: Vector) -> None:
        """Keeps this version as long as passes may read it, in memory of its own: see `versions_held`."""
        place, source = self.done % len(self._versions), self._source
        if not self._copies:
            self._versions[place], self._reads = parameters.tensor, [parameters.all]
            return
        if not len(self._versions[place]):
            self._versions[place] = torch.empty_like(parameters.tensor)
        await source.meter.compute(
            lambda: self._versions[place].copy_(parameters.tensor),
            work=Work("copy", elems=len(parameters)),
            reads=[parameters.all],
        )

    def _exists(self, step: StagePass) -> bool:
        """Whether the stream has this micro-batch: after its end, and in small minibatches, some are missing."""
        if step.micro_batch // self._micro_batches >= self.admitted and not self._window.closing:
            raise InternalError(f"{step} is due, and {self.admitted} minibatches are admitted")
        return step.micro_batch in self._own_sizes

    def _value(self, name: str, micro_batch: int) -> torch.Tensor:
        minibatch, number = divmod(micro_batch, self._micro_batches)
        values = self._values[minibatch]
        return nothing(name, micro_batch) if values is None else values.of(name, number)

    # ---- see `Passes` ---------------------------------------------------------------------

    def weight(self, micro_batch: int) -> float:
        """The weight of a micro-batch in the gradient of its minibatch."""
        if self._source.model.reduction == "sum":
            return 1.0
        return self._own_sizes[micro_batch] / self._steps[micro_batch // self._micro_batches][1]

    def step_of(self, micro_batch: int) -> int:
        """The step of its minibatch."""
        return self._steps[micro_batch // self._micro_batches][0]

    def seed(self, micro_batch: int) -> int:
        """The seed of its random numbers."""
        minibatch, number = divmod(micro_batch, self._micro_batches)
        return self._source.stage_seed(self._steps[minibatch][0], number)

    def read(self, stage: int, micro_batch: int) -> torch.Tensor:
        """The parameters of a stage that a forward reads."""
        model = self._source.model
        version = version_read(self._name, model.plan, micro_batch // self._micro_batches, self.done)
        return model.of_stage(stage, self._versions[version % len(self._versions)])

    def add_loss(self, micro_batch: int, loss: float) -> None:
        """Adds a micro-batch's share of the loss."""
        minibatch = micro_batch // self._micro_batches
        self._losses[minibatch] = self._losses.get(minibatch, 0.0) + loss
