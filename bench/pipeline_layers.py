"""A network of linear layers with ReLU, divided into stages: what the benchmarks of pipelines train."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from gradstream.pipeline.executor import TensorTransfer
from gradstream.split.plan import DATA, SplitPlan, Stage, Value


def chain_of_layers(sizes: Sequence[int], parts: int) -> SplitPlan:
    """A stage on each part, of as many layers as the others, or one more."""
    edges = [(len(sizes) - 1) * part // parts for part in range(parts + 1)]
    elems = [sum(a * b + b for a, b in shapes(sizes, edges, part)) for part in range(parts)]
    ends = [sum(elems[: part + 1]) for part in range(parts)]
    stages = tuple(
        Stage(
            part,
            part,
            ((f"h{part - 1}" if part else "inputs"), *(("targets",) if part == parts - 1 else ())),
            (f"h{part}",) if part < parts - 1 else (),
            ((ends[part] - elems[part], ends[part]),),
        )
        for part in range(parts)
    )
    values = (
        Value("inputs", DATA, (sizes[0],), torch.float32),
        Value("targets", DATA, (), torch.int64),
        *(Value(f"h{part}", part, (sizes[edges[part + 1]],), torch.float32) for part in range(parts - 1)),
    )
    return SplitPlan(parts, stages, values, ends[-1])


def shapes(sizes: Sequence[int], edges: Sequence[int], part: int) -> list[tuple[int, int]]:
    """(inputs, outputs) of each layer of a part."""
    return list(pairwise(sizes))[edges[part] : edges[part + 1]]


def initial_weights(sizes: Sequence[int], parts: int, seed: int) -> list[Tensor]:
    """Weights of each part: He's normal, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    edges = [(len(sizes) - 1) * part // parts for part in range(parts + 1)]
    weights = []
    for part in range(parts):
        pieces = []
        for inputs, outputs in shapes(sizes, edges, part):
            pieces += [
                torch.randn(inputs * outputs, generator=generator) * (2 / inputs) ** 0.5,
                torch.zeros(outputs),
            ]
        weights.append(torch.cat(pieces))
    return weights


class LayerStages:
    """Implements `WeightedStages`, and `Stages` with the newest weights. SGD with momentum.

    Args:
        sizes: sizes of the layers.
        plan: plan of `chain_of_layers`.
        weights: weights of each stage.
        share: share of a micro-batch in its minibatch.
        lr: learning rate.
        momentum: coefficient of momentum.

    Attributes:
        most_saved: for each stage, the most micro-batches whose activations it held.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        plan: SplitPlan,
        weights: Mapping[int, Tensor],
        *,
        share: float = 1.0,
        lr: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        self._sizes, self._plan, self._own = sizes, plan, weights
        self._share, self._lr, self._momentum = share, lr, momentum
        self._edges = [(len(sizes) - 1) * part // plan.parts for part in range(plan.parts + 1)]
        self._gradients = {stage: torch.zeros_like(tensor) for stage, tensor in weights.items()}
        self._velocities = {stage: torch.zeros_like(tensor) for stage, tensor in weights.items()}
        self._saved: dict[int, dict[int, tuple[Tensor, Tensor, Tensor]]] = defaultdict(dict)
        self.most_saved = [0] * plan.parts

    async def forward(
        self, stage: int, micro_batch: int, values: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """See `WeightedStages.forward`."""
        first, *targets = values.values()
        inputs = first.detach().requires_grad_(stage > 0)
        # .data: delayed gradients change weights in place that a backward reads later, on purpose.
        leaf = (self._own[stage] if weights is None else weights).data.requires_grad_()
        hidden, begin = inputs, 0
        for width, units in shapes(self._sizes, self._edges, stage):
            matrix = leaf[begin : begin + width * units].view(units, width)
            bias = leaf[begin + width * units : begin + width * units + units]
            begin += width * units + units
            hidden = functional.linear(hidden, matrix, bias)
            if not (targets and begin == len(leaf)):
                hidden = hidden.relu()
        out = functional.cross_entropy(hidden, targets[0]) * self._share if targets else hidden
        saved = self._saved[stage]
        saved[micro_batch] = inputs, leaf, out
        self.most_saved[stage] = max(self.most_saved[stage], len(saved))
        return {name: out.detach() for name in self._plan.stages[stage].outputs}

    async def backward(
        self, stage: int, micro_batch: int, gradients: Mapping[str, Tensor], weights: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        """See `WeightedStages.backward`."""
        inputs, leaf, out = self._saved[stage].pop(micro_batch)
        wanted = [leaf, inputs] if inputs.requires_grad else [leaf]
        found = torch.autograd.grad(out, wanted, next(iter(gradients.values()), None))
        self._gradients[stage] += found[0]
        return {name: found[1] for name in self._plan.stages[stage].inputs[:1] if inputs.requires_grad}

    async def weights(self, stage: int, micro_batch: int) -> None:
        """Backwards here are whole."""
        raise NotImplementedError

    async def update(self, stage: int, minibatch: int, weights: Tensor) -> None:
        """See `WeightedStages.update`."""
        velocity = self._velocities[stage].mul_(self._momentum).add_(self._gradients[stage])
        weights.sub_(velocity, alpha=self._lr)
        self._gradients[stage].zero_()


class LocalChannel:
    """Implements `TensorChannel` between parts of one process."""

    def __init__(self) -> None:
        self._arrived: dict[TensorTransfer, asyncio.Future[Tensor]] = defaultdict(asyncio.Future)

    async def send(self, transfer: TensorTransfer, tensor: Tensor) -> None:
        """See `TensorChannel.send`."""
        self._arrived[transfer].set_result(tensor)

    async def receive(self, transfer: TensorTransfer) -> Tensor:
        """See `TensorChannel.receive`."""
        tensor = await self._arrived[transfer]
        del self._arrived[transfer]
        return tensor
