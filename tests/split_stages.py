"""All stages of a split model in one process, and the same gradient from the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from gradstream.model import Batch, TorchModel
from gradstream.split.cut import TorchPlan, plan_placed, plan_split
from gradstream.split.divide import divide, divisible, part_of_piece
from gradstream.split.graph import minibatch_values, record
from gradstream.split.stage_model import StageModel


def batch_of(inputs: Any, targets: Any, num_samples: int | None = None) -> Batch:
    count = len(targets) if num_samples is None else num_samples
    return Batch(inputs, targets, count, np.arange(count))


def whole_gradient(model: TorchModel, batch: Batch, parameters: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the whole model."""
    gradient = torch.empty_like(parameters)
    return model.gradient(parameters, batch, gradient, seed=0, report=lambda _: None), gradient


def whole_parameters(model: TorchModel, seed: int = 3) -> torch.Tensor:
    parameters = torch.empty(model.layout.elems, dtype=model.layout.dtype)
    model.init(seed, parameters)
    return parameters


def placed_by(
    model: TorchModel, batch: Batch, parts: int, places: Mapping[str, int | Sequence[int]]
) -> TorchPlan:
    """The plan with modules, or operations, on the parts that are named; others are with the operation before.

    Several parts divide the layer.
    """
    graph = record(model, batch)
    for name, place in places.items():
        if not isinstance(place, int):
            (node,) = (node for node in graph.nodes if _path(node) == name)
            assert divisible(graph, node)
            graph = divide(graph, node, [(part in place) / len(place) for part in range(parts)])
    placed: dict[fx.Node, int] = {}
    part = 0
    for node in graph.nodes:
        path = node.name if node.name in places else _path(node)
        while path and not isinstance(places.get(path), int):
            path = path.rpartition(".")[0]
        own, named = part_of_piece(node), places.get(path)
        part = part if own is not None or not isinstance(named, int) else named
        placed[node] = part if own is None else own
    return plan_placed(graph, placed, parts)


def _path(node: fx.Node) -> str:
    """Qualified name of the module in which an operation is."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


class Stages:
    """All stages of a plan, each with its own vector."""

    def __init__(self, model: TorchModel, plan: TorchPlan) -> None:
        self.plan = plan
        self.models = [StageModel(model, plan, number) for number in range(len(plan.stages))]
        self.travelled: dict[tuple[str, int], int] = {}
        """Bytes of each value to each part that it travelled to, in the last forward."""

    @classmethod
    def of(cls, model: TorchModel, batch: Batch, parts: int, **options: Any) -> Stages:
        places = options.pop("map", None)
        if places is not None:
            return cls(model, placed_by(model, batch, parts, places))
        return cls(model, plan_split(model, batch, parts, **options))

    def init(self, seed: int = 3) -> list[torch.Tensor]:
        vectors = [torch.full((m.layout.elems,), torch.nan, dtype=m.layout.dtype) for m in self.models]
        for model, vector in zip(self.models, vectors, strict=True):
            model.init(seed, vector)
        return vectors

    def divide(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The vector of each stage, out of the whole one."""
        return [
            torch.cat([whole[start:stop] for start, stop in stage.ranges] or [whole[:0]])
            for stage in self.plan.stages
        ]

    def joined(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        """The whole vector, out of those of the stages. NaN where no stage has an element."""
        whole = torch.full((self.plan.elems,), torch.nan, dtype=vectors[0].dtype)
        for stage, vector in zip(self.plan.stages, vectors, strict=True):
            at = 0
            for start, stop in stage.ranges:
                whole[start:stop] = vector[at : at + stop - start]
                at += stop - start
            assert at == len(vector)
        return whole

    def gradient(
        self, vectors: list[torch.Tensor], batch: Batch, *, seed: int = 0, halves: bool = False
    ) -> tuple[float, torch.Tensor]:
        """Loss and whole gradient. What a stage does not declare as an input, it cannot use.

        With `halves`, those of the weights come when all stages have those of their inputs.
        """
        values = minibatch_values(self.plan.graph, batch)
        self.travelled = {}
        saved = []
        for stage, model, vector in zip(self.plan.stages, self.models, vectors, strict=True):
            given = {name: values[name].clone() for name in stage.inputs}
            for name, tensor in given.items():
                if self.plan.part_of(self.plan.value(name)) != stage.part:
                    self.travelled[name, stage.part] = tensor.nbytes
            outputs, graph = model.forward(vector, given, seed=seed, samples=batch.num_samples, halves=halves)
            assert set(outputs) - {"loss"} == set(stage.outputs)
            values |= outputs
            saved.append(graph)
        back: dict[str, torch.Tensor] = {}
        gradients = [torch.full_like(vector, torch.nan) for vector in vectors]
        for stage, model, gradient, graph in reversed(
            list(zip(self.plan.stages, self.models, gradients, saved, strict=True))
        ):
            wanted = {name: back[name] for name in stage.outputs if self.plan.value(name).has_gradient}
            returned = (
                model.backward_inputs(graph, wanted) if halves else model.backward(graph, wanted, gradient)
            )
            for name, tensor in returned.items():
                back[name] = back[name] + tensor if name in back else tensor
        if halves:
            for model, gradient, graph in zip(self.models, gradients, saved, strict=True):
                model.backward_weights(graph, gradient)
        return float(values["loss"]), self.joined(gradients)

    def evaluate(
        self, vectors: list[torch.Tensor], batch: Batch, *, targets: bool = True
    ) -> Mapping[str, Any]:
        """What the last stage returns in eval() mode."""
        values: dict[str, Any] = minibatch_values(self.plan.graph, batch)
        if not targets:
            values = {name: value for name, value in values.items() if not name.startswith("targets")}
        for stage, model, vector in zip(self.plan.stages, self.models, vectors, strict=True):
            values |= model.evaluate(
                vector, {name: values[name] for name in stage.inputs if targets or name in values}
            )
        return values
