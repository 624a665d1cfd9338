"""The gradient of a part that trains apart from the others, in a run: see `pipeline.synthetic`.

    minibatch t ─ inputs ─▶ forward ─ outputs ─▶ part above
                               │  predictors learn the targets of minibatch t - LAG
    part below ◀─ targets ─ backward, from predicted gradients ─▶ the part's gradient

A part waits for its inputs, unless it predicts them, and for the targets of its predictors. `PartMeter` counts both.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradstream.errors import ConfigError, NonFiniteError
from gradstream.memory import Vector
from gradstream.model.base import usable
from gradstream.pipeline.executor import TensorTransfer
from gradstream.pipeline.synthetic import LAG, Predictor, SyntheticGradients, label_features
from gradstream.runtime.base import Work, awaited_later
from gradstream.split.part_model import PartModel
from gradstream.split.plan import DATA, Value
from gradstream.worker.computed import ComputedGradient, Result
from gradstream.worker.config import WorkerConfig
from gradstream.worker.gradient import hash_seed
from gradstream.worker.parts.gradients import PartSource
from gradstream.worker.parts.messages import PartReport

TARGETS = "targets"

AGO = "ago"
"""In the names of a state: how many minibatches before the last one a lesson is of."""


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What one predictor has seen of a minibatch, and what is to come of it.

    Args:
        value: name of what it predicts.
        predictor: learns it.
        seen: what it has predicted from.
        labels: features of the labels; None if it sees none.
        targets: the pieces, whose sum it should have predicted.
        scale: factor of their sum.
    """

    value: str
    predictor: Predictor
    seen: torch.Tensor
    labels: torch.Tensor | None
    targets: Sequence[asyncio.Future[torch.Tensor]]
    scale: float

    async def target(self) -> torch.Tensor:
        """What it should have predicted, when that has come."""
        pieces = [await task for task in self.targets]
        return sum(pieces[1:], pieces[0]) * self.scale


class DecoupledGradients(PartSource):
    """Computes one part's gradients, with predictors in place of the other parts.

    Raises:
        ConfigError: predictors cannot see these targets, or these inputs.
    """

    def __init__(self, config: WorkerConfig, *place: Any) -> None:
        super().__init__(config, *place)
        assert isinstance(config.plan.job.pipeline, SyntheticGradients)
        how = self._how = config.plan.job.pipeline
        plan, self._part = self.model.plan, self.model.part
        stage = plan.stages[self._part]  # parts that train apart have one stage each
        self._data = [value for value in plan.values if value.source == DATA]
        inputs = [plan.value(name) for name in stage.inputs if plan.value(name) not in self._data]
        self._guessed = [value for value in inputs if how.inputs and value.has_gradient]
        self._received = [value for value in inputs if value not in self._guessed]
        self._outputs = [plan.value(name) for name in stage.outputs]
        self._labels = label_width(self._data, self.model) if how.labels else 0
        self._predictors = {
            value.name: self._predictor(value.shape, self._labels, value)
            for value in self._outputs
            if value.has_gradient
        }
        self._predictors |= {
            value.name: self._predictor((input_width(self._data),), 0, value) for value in self._guessed
        }
        self._lessons: dict[int, list[_Lesson]] = {}  # by minibatch
        self._sizes: dict[int, int] = {}
        self._number = 0  # of the minibatch, from 1: outputs of held-out samples travel as micro-batch 0

    def _predictor(self, seen: Sequence[int], labels: int, value: Value) -> Predictor:
        seed = hash_seed(self._seed, 0, self.model.plan.values.index(value), self._part)
        return Predictor(seen, labels, value.shape, self._how, seed=seed, dtype=value.dtype)

    async def _compute_jointly(self, parameters: Vector, gradient: ComputedGradient) -> Result:
        model, size, into = self.model, gradient.batch.num_samples, gradient.vector
        stage, share = model.stages[self._part], model.share(self._part)
        self._number += 1
        self._sizes[self._number] = size
        self._channel.sizes = self._sizes
        data, read_s = await self._minibatch(gradient)
        labels = label_features(data[TARGETS], self._labels, model.layout.dtype) if self._labels else None
        values = {**data, **await self._inputs(data)}
        seed = self.stage_seed(gradient.step, 0)
        outputs, saved = await self.meter.compute(
            lambda: stage.forward(parameters.tensor, values, seed=seed, samples=size),
            work=Work("forward", samples=size, share=share),
            reads=[parameters.all],
        )
        for value in self._outputs:
            for part in model.plan.parts_using(value):
                await self._send(value, part, outputs[value.name])
        await self._learn(self._number - LAG)
        predicted = await self._predict(outputs, labels)
        returned = await self.meter.compute(
            lambda: stage.backward(saved, predicted, into.tensor),
            work=Work("backward", samples=size, share=share),
            writes=[into.all],
        )
        for name, tensor in returned.items():
            value = model.plan.value(name)
            await self._send(value, model.plan.part_of(value), tensor, gradient=True)
        await self.meter.compute(
            lambda: self._bound(gradient), work=Work("copy", elems=len(into)), writes=[into.all]
        )
        gradient.ready.advance(len(into))
        mine = PartReport("gradient", loss=outputs["loss"].item() if "loss" in outputs else None)
        return Result(self._agreement.note(mine), None, read_s)

    def _bound(self, gradient: ComputedGradient) -> None:
        """Bounds the elements of the gradient. Raises NonFiniteError if one is not a finite number."""
        into, sums = gradient.vector.tensor, self.model.reduction == "sum"
        num_summed = gradient.batch.num_samples if sums else 1
        if not usable(into):
            raise NonFiniteError(
                f"{self.where(gradient)}: the gradient of part {self._part} has a NaN or an infinity. The others "
                "train apart and may have gone on, so the run ends: lower the learning rate, or that of the predictors"
            )
        if (bound := self._clip.value) is not None:
            into.clamp_(-bound * num_summed, bound * num_summed)
        if gradient.mean and sums:
            into.div_(num_summed)

    # ---- checkpoints ------------------------------------------------------------------------

    async def state(self) -> dict[str, torch.Tensor]:
        """What the predictors have, and have yet to learn, by name; between two minibatches."""
        found = {
            f"{value}/{name}": tensor
            for value, predictor in self._predictors.items()
            for name, tensor in predictor.state().items()
        }
        for number, lessons in self._lessons.items():
            for lesson in lessons:
                name = f"{lesson.value}/{AGO}{self._number - number}/"
                found |= {name + "seen": lesson.seen, name + "target": await lesson.target()}
                found |= {} if lesson.labels is None else {name + "labels": lesson.labels}
        return {name: tensor.clone() for name, tensor in found.items()}  # no two share memory

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over what `state` has returned in an earlier process of this part, before the first minibatch.

        Raises:
            RuntimeError, KeyError: it is that of other predictors.
        """
        for value, predictor in self._predictors.items():
            own = f"{value}/"
            mine = {name[len(own) :]: tensor for name, tensor in state.items() if name.startswith(own)}
            predictor.load({name: tensor for name, tensor in mine.items() if not name.startswith(AGO)})
            for name in (name for name in mine if name.endswith("/seen")):
                ago = name.partition("/")[0]
                target = asyncio.get_running_loop().create_future()
                target.set_result(mine[f"{ago}/target"])
                lesson = _Lesson(value, predictor, mine[name], mine.get(f"{ago}/labels"), [target], 1.0)
                self._lessons.setdefault(-int(ago[len(AGO) :]), []).append(lesson)

    # ---- values -----------------------------------------------------------------------------

    async def _minibatch(self, gradient: ComputedGradient) -> tuple[dict[str, torch.Tensor], float]:
        """The values of the minibatch that this part needs, which part 0 sends, and the seconds of reading."""
        read, read_s = await self._read(gradient, [0, gradient.batch.num_samples])
        if read is None:
            return {value.name: await self._receive(value, 0) for value in self._needed(self._part)}, read_s
        for part in range(1, self.model.plan.parts):
            for value in self._needed(part):
                await self._send(value, part, read.of(value.name, 0))
        return {value.name: read.of(value.name, 0) for value in self._needed(0)}, read_s

    def _needed(self, part: int) -> list[Value]:
        """The values of the minibatch that a part uses: its stage, or a predictor."""
        used, how = self.model.plan.stages[part].inputs, self._how
        return [
            value
            for value in self._data
            if value.name in used or (how.labels if value.name == TARGETS else how.inputs and part > 0)
        ]

    async def _inputs(self, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values that this part has from others: they are received, or predicted and received later."""
        home = self.model.plan.part_of
        found = {value.name: await self._receive(value, home(value)) for value in self._received}
        if self._guessed:
            seen = torch.cat([data[v.name].flatten(1) for v in self._data if v.name != TARGETS], 1)
        for value in self._guessed:
            found[value.name] = await self._guess(value, seen, None, 1.0)
            self._expect(value, [home(value)], seen, None, 1.0)
        return found

    async def _send(self, value: Value, part: int, tensor: torch.Tensor, *, gradient: bool = False) -> None:
        transfer = TensorTransfer(value.name, self._number, self._part, part, gradient)
        await self._channel.send(transfer, tensor)

    async def _receive(self, value: Value, part: int, *, gradient: bool = False) -> torch.Tensor:
        return await self._channel.receive(
            TensorTransfer(value.name, self._number, part, self._part, gradient)
        )

    # ---- predictors -------------------------------------------------------------------------

    async def _predict(
        self, outputs: Mapping[str, torch.Tensor], labels: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The predicted gradients of the outputs. Predictors know those of each sample's loss."""
        samples = self._sizes[self._number] if self.model.reduction == "mean" else 1
        predicted = {}
        for value in self._outputs:
            if value.has_gradient:
                seen = outputs[value.name]
                predicted[value.name] = await self._guess(value, seen, labels, 1 / samples)
                self._expect(value, self.model.plan.parts_using(value), seen, labels, samples)
        return predicted

    async def _guess(
        self, value: Value, seen: torch.Tensor, labels: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        predictor = self._predictors[value.name]
        return await self.meter.compute(
            lambda: predictor.predict(seen, labels).mul_(scale), work=self._work("predict", predictor, seen)
        )

    def _expect(
        self,
        value: Value,
        parts: Sequence[int],
        seen: torch.Tensor,
        labels: torch.Tensor | None,
        scale: float,
    ) -> None:
        """Begins to receive what a predictor should have predicted for the current minibatch."""
        back = value in self._outputs
        receiving = [
            awaited_later(
                self._runtime.spawn(
                    self._receive(value, part, gradient=back),
                    name=f"{self._runtime.node}-{value.name}-{part}",
                )
            )
            for part in parts
        ]
        lesson = _Lesson(value.name, self._predictors[value.name], seen, labels, receiving, scale)
        self._lessons.setdefault(self._number, []).append(lesson)

    async def _learn(self, number: int) -> None:
        """Lets the predictors learn from what has come of a minibatch; waits for what has not."""
        self._sizes.pop(number, None)
        for lesson in self._lessons.pop(number, ()):
            target = await lesson.target()
            await self.meter.compute(
                partial(lesson.predictor.learn, lesson.seen, lesson.labels, target),
                work=self._work("learn", lesson.predictor, lesson.seen),
            )

    def _work(self, kind: str, predictor: Predictor, seen: torch.Tensor) -> Work:
        return Work(kind, samples=len(seen), share=predictor.elems / self.model.whole.elems)


def label_width(data: Sequence[Value], model: PartModel) -> int:
    """The number of label features: classes of the model's output, or numbers of a target.

    Raises:
        ConfigError: the targets are no such thing.
    """
    targets = next((value for value in data if value.name == TARGETS), None)
    if targets is not None and targets.dtype.is_floating_point:
        return math.prod(targets.shape)
    if targets is not None and targets.shape == ():
        return model.output.shape[-1]
    got = "a tree of tensors" if targets is None else f"integers of shape {targets.shape} a sample"
    raise ConfigError(
        f"SyntheticGradients(labels=True): targets are {got}; expected one class (an integer) or floats for each "
        "sample. For other targets take labels=False"
    )


def input_width(data: Sequence[Value]) -> int:
    """The number of features of a sample of the model's inputs. Raises ConfigError unless they are numbers."""
    inputs = [value for value in data if value.name.partition(".")[0] != TARGETS]
    if not all(value.dtype.is_floating_point and value.per_sample for value in inputs):
        kinds = ", ".join(f"{value.name}: {value.dtype}" for value in inputs)
        raise ConfigError(
            f"SyntheticGradients(inputs=True): the model's inputs are {kinds}; expected floating-point numbers of "
            "each sample, from which others can be predicted: take inputs=False"
        )
    return sum(math.prod(value.shape) for value in inputs)
