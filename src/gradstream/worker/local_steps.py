"""`LocalSteps`: pseudo-gradients, the distance that a worker moves in some minibatches of local training.

w_i ← w;   for each part of the minibatch:  w_i ← InnerOpt(w_i, g);   "gradient" ← w - w_i

`LocalParameters` yields w_i itself, for strategies in which each worker keeps parameters of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from gradstream.data.plan import parts_of
from gradstream.errors import NonFiniteError
from gradstream.memory import Memory, Vector
from gradstream.model.base import Batch, usable
from gradstream.runtime.base import Report
from gradstream.worker.computed import ComputedGradient, Result
from gradstream.worker.gradient import Differentiator
from gradstream.worker.updater import Updater, UpdateRule

UNSENT = "unsent"
"""Name of the vector of unsent steps since the last exchange began, in checkpoints."""


class LocalSteps(Differentiator):
    """Implements `GradientSource`: w - w_i as a mean over samples, or times their number for models that compute sums.

    With `unsent`, the last minibatches of a round may be deferred (`ComputedGradient.later`): `go_on` trains on them
    while w - w_i is exchanged, and their steps u are part of the w - w_i of the next round:

        w_i ← w - u;   minibatches;   "gradient" ← w - w_i;   w_i' ← w_i;   minibatches of `later`;   u ← w_i' - w_i

    A step that is repeated after its round was given up starts from the earlier u and inner optimizer state. If a
    minibatch of `later` is not finite, u is set to zero and the next step is refused.

    Args:
        arguments: as for `Differentiator`. Each minibatch's gradient is clipped.
        memory: allocates w_i, the inner optimizer's state and a copy of that state.
        rule: the inner optimizer.
        unsent: u, (E,); None if no minibatches are deferred.
    """

    def __init__(
        self,
        *arguments: object,
        memory: Memory,
        rule: UpdateRule,
        unsent: Vector | None = None,
        **options: object,
    ) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        layout = self._model.layout
        elems, dtype = layout.elems, layout.dtype
        self._local = memory.allocate(elems, dtype, "local parameters", lead_bytes=layout.lead_bytes)
        self._updater = Updater(memory.allocate, *rule, [(0, elems)], dtype)
        self._unsent = unsent
        self._beside: Vector | None = None  # gradients of `later`, while the step's vector is exchanged
        if unsent is not None:
            self._beside = memory.allocate(elems, dtype, "gradient beside", lead_bytes=layout.lead_bytes)
        self._kept: dict[str, Vector] = self._copies(memory)
        self._updates = 0
        self._begun = (-1, 0)  # the current step, and the updates before it
        self._spoilt = self._to_refuse = ""  # why the next step, and the current one, will be refused

    @property
    def _states(self) -> Mapping[str, Vector]:
        """Vectors that are kept from step to step."""
        return self._updater.state if self._unsent is None else {**self._updater.state, UNSENT: self._unsent}

    def _copies(self, memory: Memory) -> dict[str, Vector]:
        """Memory for copies of these vectors from before the current step."""
        layout = self._model.layout
        return {name: memory.allocate(layout.elems, layout.dtype, f"kept {name}") for name in self._states}

    def milestones(self, gradient: ComputedGradient) -> Sequence[int]:
        """See `GradientSource`: nothing is final before the last minibatch."""
        return (len(gradient.vector),)

    @override
    def compute(self, parameters: torch.Tensor, gradient: ComputedGradient, report: Report) -> Result:
        self._read_ns = 0
        self._begin(gradient.step)
        local, unsent = self._local.tensor, self._unsent
        try:
            if self._to_refuse:
                raise NonFiniteError(self._to_refuse)
            local.copy_(parameters)
            if unsent is not None:
                local.sub_(unsent.tensor)
            loss, norm = self._go(gradient, gradient.vector.tensor)
        except NonFiniteError as error:
            return Result(math.nan, None, self._read_ns / 1e9, str(error))
        self._put(parameters, gradient)
        if unsent is not None:
            unsent.tensor.copy_(local) if gradient.later else unsent.tensor.zero_()
        report(len(gradient.vector))
        return Result(loss, norm, self._read_ns / 1e9)

    def go_on(self, gradient: ComputedGradient, before: Result) -> Result:
        """Trains on `later`. Returns the figures of the whole step.

        Args:
            gradient: the complete gradient. It is not read, since it may already contain those of other workers.
            before: its figures.

        Raises:
            UserCodeError, GradientError, DataError: as `compute`.
        """
        assert self._beside is not None and self._unsent is not None
        unsent, samples = self._unsent.tensor, gradient.batch.num_samples
        self._read_ns = 0
        try:
            loss, norm = self._go(gradient, self._beside.tensor, later=True)
        except NonFiniteError as error:
            self._spoilt = str(error)
            unsent.zero_()
            return replace(before, read_s=before.read_s + self._read_ns / 1e9)
        unsent.sub_(self._local.tensor)
        if self._model.reduction == "sum":
            loss += before.loss
        elif gradient.later_samples < samples:
            loss += (before.loss - loss) * (1 - gradient.later_samples / samples)
        norm = before.norm if norm is None else max(norm, before.norm or 0.0)
        return Result(loss, norm, before.read_s + self._read_ns / 1e9)

    def _begin(self, step: int) -> None:
        states = [(vector.tensor, self._kept[name].tensor) for name, vector in self._states.items()]
        again = step == self._begun[0]
        for state, kept in states:
            state.copy_(kept) if again else kept.copy_(state)
        if again:
            self._updates = self._begun[1]
        else:
            self._begun = (step, self._updates)
            self._to_refuse = self._spoilt
        self._spoilt = ""

    def _go(
        self, gradient: ComputedGradient, into: torch.Tensor, *, later: bool = False
    ) -> tuple[float, float | None]:
        """The mean loss (or sum), and the largest norm of a gradient before clipping."""
        batch, local = gradient.batch, self._local.tensor
        sums = self._model.reduction == "sum"
        samples = gradient.later_samples if later else batch.num_samples - gradient.later_samples
        loss, norm = 0.0, None
        every = batch.samples or parts_of(self._plan, batch.ref)
        first = len(every) - gradient.later
        read = (
            part if isinstance(part, Batch) else self._read(part, gradient.step)
            for part in (every[first:] if later else every[:first])
        )
        for index, part in enumerate((part for part in read if part.num_samples), first if later else 0):
            found = self._differentiate(local, gradient, part, index, 1.0, into, lambda elems: None)
            loss += found * (1.0 if sums else part.num_samples / samples)
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
        return loss, norm

    def _put(self, parameters: torch.Tensor, gradient: ComputedGradient) -> None:
        """Writes the result into the gradient's vector."""
        into = gradient.vector.tensor
        torch.sub(parameters, self._local.tensor, out=into)
        if self._model.reduction == "sum" and not gradient.mean:
            into.mul_(gradient.batch.num_samples)


class LocalParameters(LocalSteps):
    """Implements `GradientSource` by w_i. No step is ever repeated, so the inner optimizer's state has no copy."""

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
        """Sets the number of inner steps so far."""
        self._updates = count

    def _copies(self, memory: Memory) -> dict[str, Vector]:
        return {}

    def _begin(self, step: int) -> None:
        pass

    def _put(self, parameters: torch.Tensor, gradient: ComputedGradient) -> None:
        gradient.vector.tensor.copy_(self._local.tensor)
