"""Outputs of held-out samples, computed by all parts of a replica, for an evaluation on the worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradstream.checkpoint.format import header_of, of_spec
from gradstream.data.base import Dataset
from gradstream.errors import InternalError
from gradstream.memory import Vector
from gradstream.model.base import Batch, Layout, Reduction
from gradstream.model.buffers import Buffers
from gradstream.pipeline.executor import PipelineExecutor
from gradstream.pipeline.schedule import StagePass
from gradstream.runtime.base import Report, Runtime, Work
from gradstream.split.hybrid_model import HybridModel
from gradstream.split.part_model import PartModel
from gradstream.split.plan import DATA
from gradstream.wire import v1
from gradstream.wire.chunks import PartMap
from gradstream.worker.evaluation import BATCH_SIZE
from gradstream.worker.final_model import FINAL_MODEL
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.gradients import Values, nothing
from gradstream.worker.parts.hybrid import hybrid_outputs

# ---- outputs -----------------------------------------------------------------------------


def test_sizes(data: Dataset) -> list[int]:
    """Sizes of the batches of an evaluation; see `worker.evaluation.evaluate`."""
    total = data.num_test_samples
    return [min(BATCH_SIZE, total - start) for start in range(0, total, BATCH_SIZE)]


async def compute_outputs(
    runtime: Runtime,
    model: PartModel,
    channel: PartChannel,
    parameters: torch.Tensor,
    samples: int,
    batch: Batch | None,
) -> Mapping[str, torch.Tensor] | None:
    """Computes this part's stages for one batch of held-out samples, in evaluation mode.

    Args:
        runtime, model, channel: of this part.
        parameters: its parameters.
        samples: number of samples of the batch.
        batch: the batch, on part 0.

    Returns:
        "outputs", and "loss" if there is one, on the part of the last stage; None on others.
    """
    if isinstance(model, HybridModel):
        return await hybrid_outputs(runtime, model, channel, parameters, samples, batch)
    stages = [StagePass("forward", stage.number, 0) for stage in model.plan.stages_of(model.part)]
    found = _Forward(runtime, model, parameters, samples)
    data = nothing
    if batch is not None:
        stages = [StagePass("forward", DATA, 0), *stages]
        data = Values(model, batch, [0, samples]).of
    channel.sizes = [samples]
    await PipelineExecutor(model.plan, model.part, found, channel, data).run(stages)
    return found.result


class _Forward:
    """Implements `pipeline.executor.Stages` for outputs alone."""

    def __init__(self, runtime: Runtime, model: PartModel, parameters: torch.Tensor, samples: int) -> None:
        self.result: Mapping[str, torch.Tensor] | None = None
        self._runtime = runtime
        self._model = model
        self._parameters = parameters
        self._samples = samples

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Stages`."""
        model, parameters = self._model, self._model.of_stage(stage, self._parameters)
        outputs: Mapping[str, torch.Tensor] = await self._runtime.compute(
            lambda _: model.stages[stage].evaluate(parameters, values),
            work=Work("evaluate", samples=self._samples, share=model.share(stage)),
        )
        if stage == len(model.plan.stages) - 1:
            self.result = outputs
        return outputs

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Stages`."""
        raise InternalError("an evaluation has no backward pass")

    async def weights(self, stage: int, micro_batch: int) -> None:
        """See `Stages`."""
        raise InternalError("an evaluation has no backward pass")


class GivenOutputs:
    """A `Model` whose outputs are there already, in the order in which an evaluation asks for them.

    Args:
        layout, reduction: of the model.
        results: of each batch, as `compute_outputs` returns them.
    """

    def __init__(
        self, layout: Layout, reduction: Reduction, results: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        self.layout = layout
        self.reduction: Reduction = reduction
        self._outputs = deque(result["outputs"] for result in results)
        self._losses = deque(result.get("loss") for result in results)

    def outputs(self, parameters: torch.Tensor, inputs: Any) -> torch.Tensor:
        """See `Model.outputs`."""
        return self._outputs.popleft()

    def held_out_loss(self, parameters: torch.Tensor, batch: Batch) -> float:
        """See `Model`."""
        loss = self._losses.popleft()
        return float("nan") if loss is None else float(loss)

    def init(self, seed: int, parameters: torch.Tensor) -> None:
        """Raises InternalError."""
        raise InternalError("outputs that are there cannot be computed again")

    def gradient(
        self, parameters: torch.Tensor, batch: Batch, gradient: torch.Tensor, *, seed: int, report: Report
    ) -> float:
        """Raises InternalError."""
        raise InternalError("outputs that are there have no gradient")

    def tree(self, parameters: torch.Tensor) -> Mapping[str, np.ndarray[Any, Any]]:
        """No parameters."""
        return {}


# ---- final model -------------------------------------------------------------------------
# The final model of a split replica, as the same file as an unsplit one's. No process has all of it at once.

PIECE_ELEMS = 1 << 22
"""Elements that are sent and written at once."""


def _pieces(elems: int) -> Iterator[tuple[int, int]]:
    for start in range(0, elems, PIECE_ELEMS):
        yield start, min(start + PIECE_ELEMS, elems)


async def send_parameters(channel: PartChannel, parameters: torch.Tensor) -> None:
    """Sends a part's parameters to the worker."""
    for start, stop in _pieces(len(parameters)):
        await channel.give(0, parameters[start:stop])


async def write_final_parts(
    runtime: Runtime,
    channel: PartChannel,
    model: PartModel,
    parameters: Vector,
    specs: tuple[list[v1.TensorSpec], ...],
    others: Buffers,
) -> None:
    """Writes the final model of a split replica. Runs on part 0, while the other parts send their parameters.

    Args:
        runtime: runtime of part 0.
        channel: over which the other parts send.
        model: the model of part 0.
        parameters: the parameters of part 0.
        specs: of the whole model, the parameters, the buffers and the frozen parameters: see `tensor_specs_of`.
        others: the buffers and frozen parameters themselves, by name.

    Raises:
        OSError: the file could not be written; an older one, if there was any, is unchanged.
        PeerLostError: the process of another part was lost before it had sent everything.
    """
    tensors, *rest = [[of_spec(spec) for spec in one] for one in specs]
    behind = [spec for one in rest for spec in one]
    header, storage = header_of([*tensors, *behind]), runtime.storage
    folder, _, _ = FINAL_MODEL.rpartition("/")
    draft, dtype = f"{FINAL_MODEL}.part", model.layout.dtype
    storage.mkdir(folder)

    async def put(at: int, data: bytes | memoryview) -> None:
        work = Work("checkpoint", elems=len(data) // dtype.itemsize)
        await runtime.beside(lambda: storage.patch(draft, [(at, data)]), work=work)

    await put(0, header)
    for part in range(model.plan.parts):
        place = PartMap(model.plan.ranges_of(part))
        for start, stop in _pieces(place.elems):
            own = parameters.tensor[start:stop]
            piece = own if part == model.part else await channel.take(part, stop - start, dtype)
            for at, begin, until in place.pieces(start, stop):
                data = piece[begin - start : until - start].numpy().data.cast("B")
                await put(len(header) + at * dtype.itemsize, data)
    end = len(header) + sum(spec.size_bytes for spec in tensors)
    starts = {
        spec.name: sum(tensor.size_bytes for tensor in tensors[:index]) for index, spec in enumerate(tensors)
    }
    for spec in behind:
        if spec.same_as:
            await put(end, storage.read_at(draft, len(header) + starts[spec.same_as], spec.size_bytes))
        else:
            await put(end, others[spec.name].tobytes())
        end += spec.size_bytes
    storage.rename(draft, FINAL_MODEL)
    storage.sync(folder)
