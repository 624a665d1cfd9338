"""`LocalSteps`: in the place of a gradient, the way that a worker comes when it trains alone for some minibatches.

w_i ← w;   for each part of the minibatch:  w_i ← InnerOpt(w_i, g);   "gradient" ← w - w_i

`LocalParameters` gives w_i itself, where each worker goes on with parameters of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from gradstream.data.joined import parts_of
from gradstream.errors import NonFiniteError
from gradstream.memory import Memory, Vector
from gradstream.model.check import usable
from gradstream.runtime.base import Report
from gradstream.worker.computed import ComputedGradient, Result
from gradstream.worker.gradient import Differentiator
from gradstream.worker.replica.updater import Updater, UpdateRule


class LocalSteps(Differentiator):
    """Implements `GradientSource`: w - w_i, as a mean over samples, or times their number for models that give sums.

    A step that is computed again, since its round was given up, begins with the inner optimizer's state as it was.

    Args:
        arguments: as for `Differentiator`. Gradients of minibatches are clipped one by one.
        memory: allocates w_i, the inner optimizer's state and a copy of that.
        rule: the inner optimizer.
    """

    def __init__(self, *arguments: object, memory: Memory, rule: UpdateRule, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        layout = self._model.layout
        elems, dtype = layout.elems, layout.dtype
        self._local = memory.allocate(elems, dtype, "local parameters", lead_bytes=layout.lead_bytes)
        self._updater = Updater(memory.allocate, *rule, [(0, elems)], dtype)
        self._kept: dict[str, Vector] = self._copies(memory)
        self._updates = 0
        self._begun = (-1, 0)  # the present step, and the updates before it

    def _copies(self, memory: Memory) -> dict[str, Vector]:
        """Memory for the inner optimizer's state as it was before the present step."""
        layout = self._model.layout
        names = self._updater.state
        return {name: memory.allocate(layout.elems, layout.dtype, f"kept {name}") for name in names}

    def milestones(self, gradient: ComputedGradient) -> Sequence[int]:
        """See `GradientSource`: nothing is final before the last minibatch."""
        return (len(gradient.vector),)

    def compute(self, parameters: torch.Tensor, gradient: ComputedGradient, report: Report) -> Result:
        """See `GradientSource`."""
        self._read_ns = 0
        self._begin(gradient.step)
        try:
            loss, norm = self._go(parameters, gradient)
        except NonFiniteError as error:
            return Result(math.nan, None, self._read_ns / 1e9, str(error))
        report(len(gradient.vector))
        return Result(loss, norm, self._read_ns / 1e9)

    def _begin(self, step: int) -> None:
        states = [(vector.tensor, self._kept[name].tensor) for name, vector in self._updater.state.items()]
        again = step == self._begun[0]
        for state, kept in states:
            state.copy_(kept) if again else kept.copy_(state)
        if again:
            self._updates = self._begun[1]
        else:
            self._begun = (step, self._updates)

    def _go(self, parameters: torch.Tensor, gradient: ComputedGradient) -> tuple[float, float | None]:
        """The mean loss, or its sum, and the largest length of a gradient before it was clipped."""
        batch, into, local = gradient.batch, gradient.vector.tensor, self._local.tensor
        sums = self._model.reduction == "sum"
        local.copy_(parameters)
        loss, norm = 0.0, None
        parts = batch.samples or (self._read(part, gradient.step) for part in parts_of(self._plan, batch.ref))
        for index, part in enumerate(part for part in parts if part.num_samples):
            found = self._differentiate(local, gradient, part, index, 1.0, into, lambda elems: None)
            loss += found * (1.0 if sums else part.num_samples / batch.num_samples)
            if sums:
                into.mul_(1 / part.num_samples)
            if math.isinf(found) or not usable(into):
                what = f"loss is {found}" if math.isinf(found) else "gradient has a NaN or an infinity"
                raise NonFiniteError(
                    f"{self._where(batch.ref, gradient.step)}, minibatch {index}: the {what}"
                )
            if self._clip:
                norm = max(norm or 0.0, self._clip.apply(into, 1) or 0.0)
            self._updates += 1
            self._updater.update(local, [(0, into)], lr=gradient.lr, step=self._updates)
        self._put(parameters, gradient)
        return loss, norm

    def _put(self, parameters: torch.Tensor, gradient: ComputedGradient) -> None:
        """Writes the result where gradients are written."""
        into = gradient.vector.tensor
        torch.sub(parameters, self._local.tensor, out=into)
        if self._model.reduction == "sum" and not gradient.mean:
            into.mul_(gradient.batch.num_samples)


class LocalParameters(LocalSteps):
    """Implements `GradientSource`: w_i. No step is computed again, so the inner optimizer's state has no copy."""

    @property
    def state(self) -> Mapping[str, Vector]:
        """State of the inner optimizer, by name."""
        return self._updater.state

    @property
    def updates(self) -> int:
        """Number of inner steps so far."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        """Goes on after so many inner steps."""
        self._updates = count

    def _copies(self, memory: Memory) -> dict[str, Vector]:
        return {}

    def _begin(self, step: int) -> None:
        pass

    def _put(self, parameters: torch.Tensor, gradient: ComputedGradient) -> None:
        gradient.vector.tensor.copy_(self._local.tensor)
