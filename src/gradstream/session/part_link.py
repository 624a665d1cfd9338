"""`PartLink`: joint actions of the processes of a split model in a user's loop.

agree     all parts are at the same point of the same script, with the same minibatch
forward   each part computes its stages; all get the output
backward  the last part has the gradient of the output; it goes back through the stages
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import map_aggregate

from gradstream.errors import ConfigError, InternalError, ReplicasDifferError
from gradstream.memory import Vector
from gradstream.model.base import Batch
from gradstream.pipeline.executor import PipelineExecutor
from gradstream.pipeline.schedule import StagePass
from gradstream.runtime.base import Runtime, Work
from gradstream.session.bridge import LoopBridge
from gradstream.split.graph import Form, form_of
from gradstream.split.part_model import PartModel
from gradstream.split.plan import DATA
from gradstream.worker.gradient import hash_seed
from gradstream.worker.loop import LoopContext
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.gradients import Values, nothing
from gradstream.worker.parts.outputs import send_parameters, write_final_parts
from gradstream.worker.registration import tensor_specs_of

Act = Literal["split", "forward", "backward", "clip_grad_norm_", "close"]
_ACTS: Sequence[Act] = ("split", "forward", "backward", "clip_grad_norm_", "close")

NEAR = 1e-4
"""Relative difference between two sums of an output's gradient that rounding can explain."""


@dataclass(slots=True, eq=False)
class _Outputs:
    """The tensors among a module's outputs with their graph, and later their gradients from the loop."""

    tensors: list[torch.Tensor]
    gradients: Sequence[torch.Tensor | None] = ()


class OutputHook:
    """Stands in for a loss: keeps the module's outputs, and starts the backward pass from their gradients."""

    def __init__(self) -> None:
        self.last = _Outputs([])

    def __call__(self, outputs: Any, targets: object) -> torch.Tensor:
        """Returns a scalar whose backward pass is that of the outputs."""
        del targets
        self.last = _Outputs(_tensors_in(outputs))
        scalar: torch.Tensor = _Begin.apply(self.last, *self.last.tensors)  # type: ignore[no-untyped-call]
        return scalar


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: _Outputs, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.outputs = outputs
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *ctx.outputs.gradients


@dataclass(slots=True, eq=False)
class PartPass:
    """A forward pass of this part.

    Args:
        results: the tensors among the model's outputs.
        saved: what the backward needs, by stage; {} if there is no backward, or it has run.
        outputs: `results` with their graph, on the part that has it.
    """

    number: int
    samples: int
    results: list[torch.Tensor]
    saved: dict[int, object]
    outputs: _Outputs


class PartLink:
    """One process of a split model. The user's thread calls its methods.

    Args:
        bridge: the worker beside the loop.
        model: this part's model, whose loss is `hook`.
        hook: see `OutputHook`.
        names: node names of the processes, by part.
        pipeline_dtype: see `Session.split`.
        seed: seed of the random numbers in passes; the same in all parts.
        silence_s: see `PartChannel`.

    Attributes:
        forms: how the shape of each output tensor depends on the number of samples.

    Raises:
        ConfigError: an output cannot be sent to the other parts.
    """

    def __init__(
        self,
        bridge: LoopBridge,
        model: PartModel,
        hook: OutputHook,
        names: Sequence[str],
        pipeline_dtype: str | None,
        *,
        seed: int,
        silence_s: float,
    ) -> None:
        self.forms = _forms_of(model)
        self._bridge = bridge
        self._model = model
        self._hook = hook
        self._seed = seed
        self._passes = 0
        self._others = [part for part in range(len(names)) if part != model.part]
        self._last = model.plan.stages[-1].part
        self._own = [stage.number for stage in model.plan.stages_of(model.part)]

        async def connect(context: LoopContext) -> PartChannel:
            return PartChannel(context.runtime, context.endpoint, [*names], model, context.failed, silence_s)

        self._channel = bridge.ask(connect)
        self._encoded = self._channel.encoded(pipeline_dtype)

    # ---- agreement ----------------------------------------------------------------------

    def agree(self, act: Act, *numbers: float, near: float = 0.0) -> None:
        """Waits until all parts do the same thing.

        Args:
            act: what this part does.
            numbers: at most two, which must be equal in all parts up to `near`.

        Raises:
            ReplicasDifferError: another part does something else.
        """
        own = torch.tensor([_ACTS.index(act), *numbers, *[0.0] * (2 - len(numbers))], dtype=torch.float64)
        for part, other in zip(self._others, self._all_to_all(own), strict=True):
            if own[0] != other[0]:
                raise ReplicasDifferError(
                    f"part {self._model.part} of a split model does {act}, and part {part} {_ACTS[int(other[0])]}: "
                    "expected the same calls of the model in the same order in every process. Look for code that "
                    "depends on session.rank or session.is_main: evaluate in all processes, and print in one"
                )
            if not torch.allclose(own, other, rtol=0, atol=near, equal_nan=True):
                what = "gradients of its output" if act == "backward" else "inputs"
                raise ReplicasDifferError(
                    f"{act} of a split model: parts {part} and {self._model.part} have different {what}; expected "
                    "the same minibatch in every process: call session.shard(loader) after session.split, and seed "
                    "what the script draws"
                )

    def sum(self, number: float) -> float:
        """The sum of all parts' numbers, added in their order."""
        numbers = self._all_to_all(torch.tensor([number], dtype=torch.float64))
        numbers.insert(self._model.part, torch.tensor([number], dtype=torch.float64))
        return float(torch.stack(numbers).sum())

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcasts part 0's float64 tensor to all parts."""
        received = self._all_to_all(tensor if self._model.part == 0 else torch.zeros_like(tensor))
        return received[0] if self._model.part else tensor

    def _all_to_all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Exchanges tensors with the other parts. Returns theirs, in the order of the parts."""

        async def exchange(context: LoopContext) -> list[torch.Tensor]:
            give = [self._channel.give(part, mine) for part in self._others]
            take = [self._channel.take(part, len(mine), mine.dtype) for part in self._others]
            found: list[Any] = await context.runtime.gather(*take, *give)
            return found[: len(take)]

        return self._bridge.ask(exchange)

    # ---- passes -------------------------------------------------------------------------

    def forward(self, parameters: torch.Tensor, batch: Batch, *, training: bool) -> PartPass:
        """Computes the model for a minibatch, together with all other parts.

        Args:
            parameters: (E,), of this part.
            training: whether the model is in train() mode.
        """
        model, samples = self._model, batch.num_samples
        values = Values(model, batch, [0, samples])
        digest = 0
        for value in model.plan.values:
            if value.source == DATA:
                tensor = values.of(value.name, 0).contiguous()
                digest = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data, digest)
        self.agree("forward", digest, 2 * samples + training)
        seed = hash_seed(self._seed, 0, self._passes)
        self._passes += 1
        saved: dict[int, object] = {}
        found = _Outputs([])

        def compute(stage: int, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            own = model.of_stage(stage, parameters)
            if training:
                outputs, saved[stage] = model.stages[stage].forward(own, given, seed=seed, samples=samples)
            else:
                outputs = model.stages[stage].evaluate(own, given)
            return outputs

        async def run(context: LoopContext) -> list[torch.Tensor]:
            channel = self._encoded if training else self._channel
            channel.sizes = [samples]
            passes = [StagePass("forward", stage, 0) for stage in self._own]
            passes = [StagePass("forward", DATA, 0), *passes] if model.part == 0 else passes
            stages = _Stages(context.runtime, compute)
            data = values.of if model.part == 0 else nothing
            await PipelineExecutor(model.plan, model.part, stages, channel, data).run(passes)
            if model.part == self._last:
                nonlocal found
                found = self._hook.last if training else _Outputs(_tensors_in(stages.result["outputs"]))
                results = [tensor.detach() for tensor in found.tensors]
                for result in results:
                    sends = [self._channel.give(part, result) for part in self._others]
                    await context.runtime.gather(*sends)
                return results
            return [await self._take(form, samples) for form in self.forms]

        results = self._bridge.ask(run)
        return PartPass(self._passes, samples, results, saved, found)

    async def _take(self, form: Form, samples: int) -> torch.Tensor:
        shape = [length * samples if axis == form.axis else length for axis, length in enumerate(form.shape)]
        elems = torch.Size(shape).numel()
        return (await self._channel.take(self._last, elems, form.dtype)).view(shape)

    def backward(self, made: PartPass, gradients: Sequence[torch.Tensor | None], into: torch.Tensor) -> None:
        """Computes this part's gradient of a pass.

        Args:
            made: the pass.
            gradients: gradients of its results; None for a result that nothing depends on.
            into: (E,), overwritten.
        """
        filled = [
            torch.zeros_like(result) if gradient is None else gradient
            for gradient, result in zip(gradients, made.results, strict=True)
        ]
        parts = [one for one in filled if one.is_floating_point()]
        total = sum(float(part.sum(dtype=torch.float64)) for part in parts)
        size = sum(float(part.abs().sum(dtype=torch.float64)) for part in parts)
        self.agree("backward", made.number, total, near=min(0.5, NEAR * size))
        saved, made.saved = made.saved, {}
        made.outputs.gradients = gradients

        def compute(stage: int, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return self._model.stages[stage].backward(saved[stage], given, self._model.of_stage(stage, into))

        async def run(context: LoopContext) -> None:
            self._encoded.sizes = [made.samples]
            passes = [StagePass("backward", stage, 0) for stage in reversed(self._own)]
            stages = _Stages(context.runtime, compute)
            model = self._model
            await PipelineExecutor(model.plan, model.part, stages, self._encoded, nothing).run(passes)

        self._bridge.ask(run)

    # ---- the end ------------------------------------------------------------------------

    def write_final(self, parameters: torch.Tensor) -> None:
        """Writes the final model of all parts into the run directory, in the same file as an unsplit model."""
        model = self._model

        async def run(context: LoopContext) -> None:
            if model.part:
                if model.buffer_elems(model.part):
                    await self._channel.give(0, model.packed_buffers(model.part))
                await send_parameters(self._channel, parameters)
                return
            for part in self._others:
                if elems := model.buffer_elems(part):
                    model.unpack_buffers(part, await self._channel.take(part, elems, torch.float64))
            others = {**model.buffers(), **model.fixed().frozen}
            vector, specs = Vector("parameters", parameters), tensor_specs_of(model)
            await write_final_parts(context.runtime, self._channel, model, vector, specs, others)

        self._bridge.ask(run)


class _Stages:
    """Implements `pipeline.executor.Stages` in its own thread: the node's arithmetic thread waits for the loop."""

    def __init__(
        self,
        runtime: Runtime,
        compute: Callable[[int, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    ) -> None:
        self.result: Mapping[str, Any] = {}  # of the last stage that was computed
        self._runtime = runtime
        self._compute = compute

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Stages`."""
        work = Work("forward")
        self.result = await self._runtime.beside(lambda: self._compute(stage, values), work=work)
        return self.result

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """See `Stages`."""
        return await self._runtime.beside(lambda: self._compute(stage, gradients), work=Work("backward"))

    async def weights(self, stage: int, micro_batch: int) -> None:
        """See `Stages`: a loop has no such passes."""
        raise InternalError(f"stage {stage}: a loop computes the gradients of weights with its backward")


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_aggregate(tree, lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    return found


def _forms_of(model: PartModel) -> list[Form]:
    """The form of each output tensor. Raises ConfigError for one that cannot be sent to the other parts."""
    nodes: list[fx.Node] = []
    fx.map_arg(model.plan.graph.output.args[0], nodes.append)
    forms = [form_of(node) for node in nodes]
    for node, form in zip(nodes, forms, strict=True):
        if form is None:
            raise ConfigError(
                f"session.split: the module's output {node} is not a tensor with exactly one sample axis; expected "
                "such tensors, or tensors whose shape does not depend on the number of samples, such as a mean loss"
            )
    return [form for form in forms if form is not None]
