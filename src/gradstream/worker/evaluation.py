"""Evaluation on held-out samples: accuracy, loss and metrics of a model, and when a run evaluates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from gradstream.data.base import BatchRef, Dataset
from gradstream.errors import GradientError, UserCodeError
from gradstream.job.metrics import Metric, Metrics, users_code
from gradstream.job.plan import EvaluationPlan
from gradstream.model.base import Batch, Model, Reduction, leaves_of
from gradstream.worker.schedule import Schedule

# ---- evaluation --------------------------------------------------------------------------

BATCH_SIZE = 256

IGNORED = -100
"""The target class that is ignored, as in PyTorch's losses."""

Compared = Literal["yes", "broadcast", "no"]
"""Whether outputs and targets can be compared; "broadcast": equally many elements in different shapes."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation on held-out samples.

    Args:
        accuracy: fraction of samples whose largest output is that of the target class; None in regression.
        loss: mean squared error in regression; else the model's own loss per sample, in evaluation mode; None if
            that is unknown (`from_functions` without `loss`, a loss of JAX that takes a key) or not finite.
        num_samples: number of held-out samples.
        metrics: value of each of the user's metrics over all samples, by name.
        own_loss: `loss` is the model's own.
    """

    accuracy: float | None
    loss: float | None
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    own_loss: bool = False


def evaluate(
    model: Model,
    parameters: torch.Tensor,
    data: Dataset,
    metrics: Mapping[str, Metric] | None = None,
    *,
    batch_size: int = BATCH_SIZE,
) -> Evaluation:
    """Evaluates a model on every held-out sample.

    Integer targets mean classification, with one output per class along the last axis; other tensors mean
    regression. Where outputs or targets are trees, or there are no targets, the result has the model's own loss
    and the metrics.

    Args:
        model: the model.
        parameters: (E,), read.
        data: has the held-out samples.
        metrics: the user's metrics, by name.
        batch_size: number of samples of a batch.

    Raises:
        UserCodeError: the model, the data set or a metric raised; or a metric or the loss is not finite.
    """
    tally = _Tally(Metrics(metrics or {}, data.num_test_samples))
    for start in range(0, data.num_test_samples, batch_size):
        ids = np.arange(start, min(start + batch_size, data.num_test_samples), dtype=np.int64)
        with users_code("model or the data set"):
            batch = data.test_batch(ids)
            outputs = _outputs(model, parameters, batch, needed=bool(metrics))
        compared = tally.add(batch, outputs)
        if compared == "broadcast":
            _check_not_broadcast(model, parameters, batch, outputs)
        loss = None
        if tally.classes:
            tally.losses += _loss_beside_accuracy(model, parameters, batch, outputs)
        elif not tally.elems and hasattr(model, "held_out_loss"):
            loss = _own_loss(model, parameters, batch)
            if loss is not None:
                tally.add_loss(loss, batch, model.reduction)
        if compared == "no" and loss is None and not metrics:
            raise _not_alike(outputs, batch.targets)
    return tally.evaluation()


def check_outputs(model: Model, parameters: torch.Tensor, data: Dataset) -> None:
    """Computes the outputs of one held-out sample, which metrics need, if the loss calls the module itself.

    Raises:
        UserCodeError: the module cannot be called with a batch's inputs.
    """
    if getattr(model, "calls_itself", False):
        with users_code("module, called with the inputs alone as metrics need it (spread=True may help),"):
            model.outputs(parameters, data.test_batch(np.zeros(1, np.int64)).inputs)


def check_goals(evaluation: Evaluation, goals: Collection[str]) -> None:
    """Checks that an evaluation has the figures that end the run ("accuracy", "test_loss"; metrics always exist).

    Raises:
        UserCodeError: one is missing, so the run would never reach its goal.
    """
    for goal, value in (("accuracy", evaluation.accuracy), ("test_loss", evaluation.loss)):
        if goal in goals and value is None:
            other = "test_loss" if goal == "accuracy" else "accuracy"
            raise UserCodeError(
                f"until({goal}=…) would never end the run: its evaluations have no {goal}. Give until({other}=…). "
                "Classifiers have an accuracy, if outputs have one score for each class along their last axis; "
                "other models a loss"
            )


def _check_not_broadcast(model: Any, parameters: torch.Tensor, batch: Batch, outputs: torch.Tensor) -> None:
    """Raises UserCodeError if PyTorch warns that the loss compares every output with every target."""
    if not hasattr(model, "held_out_loss"):
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _own_loss(model, parameters, batch)
    if any("target size" in str(one.message) for one in told):
        raise UserCodeError(
            f"in an evaluation, outputs have shape {tuple(outputs.shape)} and targets "
            f"{tuple(np.shape(batch.targets))}: the loss compares every output with every target, so nothing "
            "was learned. Give targets the shape of outputs, targets[:, None], or outputs that of targets, "
            "outputs.squeeze(-1)"
        )


def _not_alike(outputs: torch.Tensor, targets: Any) -> UserCodeError:
    got, expected = tuple(outputs.shape), torch.as_tensor(targets)
    scores = expected.is_floating_point() and got[:-1] == tuple(expected.shape)
    return UserCodeError(
        f"in an evaluation, outputs have shape {got} and targets {tuple(expected.shape)} of {expected.dtype}; "
        "expected outputs of the shape of the targets (regression), or targets of integers and outputs with "
        "an axis more, one score a class (classification)"
        + ("; labels of classes must be integers: targets.astype('int64')" if scores else "")
    )


def _own_loss(model: Any, parameters: torch.Tensor, batch: Batch) -> float | None:
    """The model's own loss; None if held-out targets are only for metrics, so the loss refuses them."""
    try:
        with users_code("loss"):
            loss: float = model.held_out_loss(parameters, batch)
            return loss
    except UserCodeError:
        if model.calls_itself:  # the evaluation has no other figure
            raise
        return None


def _loss_beside_accuracy(model: Any, parameters: torch.Tensor, batch: Batch, outputs: torch.Tensor) -> float:
    """The sum of a classifier's loss over the samples of a batch; NaN if it is unknown."""
    if not (hasattr(model, "loss_of") or hasattr(model, "held_out_loss")):
        return math.nan
    try:
        with users_code("loss"):
            given = hasattr(model, "loss_of") and not getattr(model, "calls_itself", False)
            targets = torch.as_tensor(batch.targets)
            loss: float = model.loss_of(outputs, targets) if given else model.held_out_loss(parameters, batch)
    except (UserCodeError, GradientError):
        return math.nan  # held-out targets may be for the accuracy alone
    return loss * (batch.num_samples if model.reduction == "mean" else 1)


def _outputs(model: Model, parameters: torch.Tensor, batch: Batch, *, needed: bool) -> Any:
    """The outputs, for metrics and to compare with targets; None if only the loss can call the module."""
    if needed or not getattr(model, "calls_itself", False):
        return model.outputs(parameters, batch.inputs)
    if batch.targets is None:
        return None
    try:
        return model.outputs(parameters, batch.inputs)
    except Exception:
        return None


@dataclass(slots=True)
class _Tally:
    """Sums over the batches of an evaluation."""

    metrics: Metrics
    correct: int = 0
    squares: float = 0.0
    elems: int = 0  # number of targets that were compared
    samples: int = 0
    classes: bool = False
    losses: float = 0.0  # sum of the model's own losses
    has_loss: bool = False

    def add_loss(self, loss: float, batch: Batch, reduction: Reduction) -> None:
        if not math.isfinite(loss):
            raise UserCodeError(
                f"in an evaluation, the loss gave {loss} for {_held_out(batch)}; expected a finite number: look at "
                "these samples, or lower the learning rate"
            )
        self.losses += loss * (batch.num_samples if reduction == "mean" else 1)
        self.has_loss = True

    def add(self, batch: Batch, outputs: Any) -> Compared:
        targets: Any = batch.targets
        compared: Compared = "yes"
        if isinstance(targets, np.ndarray | np.generic | torch.Tensor):
            targets = torch.as_tensor(targets)
            if isinstance(outputs, torch.Tensor):
                _check_numbers(outputs, batch)
                compared = self._compare(outputs, targets)
        self.samples += batch.num_samples
        self.metrics.add(batch, outputs, targets)
        return compared

    def _compare(self, outputs: torch.Tensor, targets: torch.Tensor) -> Compared:
        self.classes = not targets.is_floating_point() and outputs.shape[:-1] == targets.shape
        if self.classes:
            labels = targets[targets != IGNORED]
            if len(labels) and not 0 <= labels.min() <= labels.max() < outputs.shape[-1]:
                raise UserCodeError(
                    f"in an evaluation, targets are classes from {int(labels.min())} to {int(labels.max())}, "
                    f"but the model gives scores of {outputs.shape[-1]}: expected 0 to "
                    f"{outputs.shape[-1] - 1} ({IGNORED} marks what does not count)"
                )
            self.correct += int((outputs.argmax(-1) == targets).sum())
            self.elems += len(labels)
            return "yes"
        if outputs.numel() != targets.numel():
            return "no"
        self.squares += float((outputs.double() - targets.double().view_as(outputs)).square().sum())
        self.elems += targets.numel()
        return "yes" if outputs.shape == targets.shape else "broadcast"

    def evaluation(self) -> Evaluation:
        compared = self.elems > 0
        loss = self.losses / self.samples if self.has_loss else None
        if compared:
            own = self.losses / self.samples if math.isfinite(self.losses) else None
            loss = own if self.classes else self.squares / self.elems
        return Evaluation(
            self.correct / self.elems if compared and self.classes else None,
            loss,
            self.samples,
            self.metrics.values(),
            own_loss=loss is not None and (self.classes or not compared),
        )


def _held_out(batch: Batch) -> str:
    """Names the samples of a batch; those of a stream have no numbers."""
    return f"held-out samples {batch.ids[0]} to {batch.ids[-1]}" if len(batch.ids) else "held-out samples"


def _check_numbers(outputs: torch.Tensor, batch: Batch) -> None:
    """Raises UserCodeError if an output is NaN."""
    wrong = torch.isnan(outputs)
    if not wrong.any():
        return
    first = int(wrong.nonzero()[0][0]) if outputs.dim() else 0
    name = f"held-out sample {batch.ids[first]}" if len(outputs) == len(batch.ids) else "held-out samples"
    inputs = [torch.as_tensor(leaf) for _, leaf in leaves_of(batch.inputs) if not isinstance(leaf, str)]
    bad = any(bool(torch.isnan(leaf).any()) for leaf in inputs)
    raise UserCodeError(
        f"in an evaluation, the model gave NaN for {name}"
        + (
            "; held-out inputs have NaN: look at the data"
            if bad
            else "; the inputs have none: look at the model, or lower the learning rate"
        )
    )


# ---- due evaluations ---------------------------------------------------------------------
# Determines after which minibatches of a worker an evaluation is due.


class DueEvaluations:
    """Counts the evaluations of a run as its minibatches arrive.

    Args:
        plan: when the run evaluates.
        schedule: tells the place of each minibatch in the run.

    Attributes:
        late: this worker joined after training had begun, so earlier evaluations are not its own.
    """

    def __init__(self, plan: EvaluationPlan, schedule: Schedule) -> None:
        self.late = False
        self._plan = plan
        self._schedule = schedule
        self._num_due: int | None = None  # number of evaluations up to the last minibatch

    def newly_due(self, refs: Sequence[BatchRef]) -> int | None:
        """The step after which an evaluation has become due with these minibatches; None for none.

        A worker that takes minibatches from a queue may get none of that step; then its first minibatch of a later step
        counts. No evaluation is due after the last step, since the final parameters are evaluated anyway.
        """
        last = self._schedule.position(refs[-1])
        period = self._plan.period(last)
        if period is None:
            return None
        if self._num_due is None:
            begin = self._schedule.position(refs[0]) if self.late else self._schedule.first
            self._num_due = begin.step // period
        before = self._num_due
        self._num_due = max(before, (last.step + 1) // period)
        over = last.step + 1 >= last.num_steps
        return self._num_due * period if self._num_due > before and not over else None
