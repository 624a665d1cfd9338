"""The user's metrics of an evaluation: functions of all outputs, and objects that are updated batch by batch."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from gradstream.errors import GradstreamError, UserCodeError
from gradstream.model.base import Batch, leaves_of, map_leaves

MAX_KEPT_BYTES = 512 << 20
"""Most bytes of outputs and targets to keep for metrics that are functions."""


class UpdatedMetric(Protocol):
    """A metric that is updated batch by batch, like those of torchmetrics and torcheval. `reset` may be missing."""

    def update(self, outputs: Any, targets: Any) -> Any:
        """Takes the outputs and targets of a batch."""

    def compute(self) -> Any:
        """The value over all batches: a number."""


Metric: TypeAlias = Callable[[Any, Any], Any] | UpdatedMetric | type[UpdatedMetric]
"""A function of the (outputs, targets) of all held-out samples that returns one number; or an `UpdatedMetric`.

Outputs are those of the model on torch tensors; targets are tensors too.
"""


class Metrics:
    """The metrics of one evaluation.

    Args:
        given: the user's metrics, by name.
        num_samples: number of held-out samples.
    """

    def __init__(self, metrics: Mapping[str, Metric], num_samples: int) -> None:
        self._metrics = metrics
        self._num_samples = num_samples
        self._updated = dict[str, Any]()
        for name, metric in metrics.items():
            if hasattr(metric, "update") and hasattr(metric, "compute"):
                with users_code(f"metric {name!r}"):
                    made = metric() if isinstance(metric, type) else copy.deepcopy(metric)
                    getattr(made, "reset", lambda: None)()
                self._updated[name] = made
        self._functions = [name for name in metrics if name not in self._updated]
        self._kept: list[tuple[Any, Any]] = []
        self._counts: list[int] = []
        self._kept_bytes = 0

    def add(self, batch: Batch, outputs: Any, targets: Any) -> None:
        """Takes a batch.

        Raises:
            UserCodeError: a metric raised; or outputs need too much memory to be kept for a metric that is a function.
        """
        for name, metric in self._updated.items():
            with users_code(f"metric {name!r}"):
                metric.update(outputs, targets)
        if not self._functions:
            return
        parts = [*leaves_of(outputs), *leaves_of(targets)]
        self._kept_bytes += sum(int(getattr(leaf, "nbytes", 0)) for _, leaf in parts)
        self._counts.append(batch.num_samples)
        whole_bytes = self._kept_bytes * self._num_samples // max(1, sum(self._counts))
        if whole_bytes > MAX_KEPT_BYTES:
            raise UserCodeError(
                f"in an evaluation, the metric {self._functions[0]!r} is a function of the outputs for all "
                f"{self._num_samples:,} held-out samples, which take {whole_bytes / 1e6:,.0f} MB with their targets; "
                f"expected at most {MAX_KEPT_BYTES / 1e6:,.0f} MB. {_INSTEAD}"
            )
        own = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, outputs)
        self._kept.append((own, targets))

    def values(self) -> dict[str, float]:
        """The value of each metric. Raises UserCodeError if a metric raised, or its value is no finite number."""
        values = dict[str, float]()
        outputs = targets = None
        if self._functions:
            outputs, targets = (
                _joined(trees, self._counts, f"{what} for the metric {self._functions[0]!r}")
                for what, trees in zip(("outputs", "targets"), zip(*self._kept, strict=True), strict=True)
            )
        for name, metric in self._metrics.items():
            with users_code(f"metric {name!r}"):
                function: Any = metric
                value = self._updated[name].compute() if name in self._updated else function(outputs, targets)
                values[name] = float(value)
            if not math.isfinite(values[name]):
                raise UserCodeError(
                    f"in an evaluation, the metric {name!r} gave {values[name]} for {self._num_samples:,} held-out "
                    "samples; expected a finite number"
                )
        return values


_INSTEAD = "An object with update(outputs, targets) and compute(), as torchmetrics has them, gets them batch by batch"


def _joined(trees: Sequence[Any], counts: Sequence[int], what: str) -> Any:
    """Joins the trees of several batches into one. Raises UserCodeError if they do not fit together."""
    first = trees[0]
    if len(trees) == 1 or all(tree is None for tree in trees):
        return first
    if all(isinstance(tree, Mapping) and tree.keys() == first.keys() for tree in trees):
        return {key: _joined([tree[key] for tree in trees], counts, f"{what}[{key!r}]") for key in first}
    if all(isinstance(tree, tuple) and len(tree) == len(first) for tree in trees):
        parts = [
            _joined(branches, counts, f"{what}[{index}]")
            for index, branches in enumerate(zip(*trees, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if all(isinstance(tree, list) and len(tree) == count for tree, count in zip(trees, counts, strict=True)):
        return [sample for tree in trees for sample in tree]
    kind = next((kind for kind in (torch.Tensor, np.ndarray) if isinstance(first, kind)), None)
    if kind is not None and all(isinstance(tree, kind) and tree.ndim for tree in trees):
        per_sample = {len(tree) / count for tree, count in zip(trees, counts, strict=True)}
        if len(per_sample) == 1 and len({tree.shape[1:] for tree in trees}) == 1:
            return torch.cat(list(trees)) if kind is torch.Tensor else np.concatenate(trees)
    got = ", ".join(
        str(tuple(tree.shape)) if hasattr(tree, "shape") else type(tree).__name__ for tree in trees[:3]
    )
    raise UserCodeError(
        f"in an evaluation, the {what} cannot be put together from those of its batches: got {got}; expected arrays of "
        f"one shape a sample, samples along the first axis. {_INSTEAD}"
    )


@contextmanager
def users_code(whose: str) -> Iterator[None]:
    """Adds the origin to an error of the user's code in an evaluation, and keeps its traceback."""
    try:
        yield
    except GradstreamError:
        raise
    except (Exception, SystemExit) as error:
        message = f"in an evaluation, the {whose} raised {type(error).__name__}: {error}"
        raise UserCodeError(message, traceback.format_exc()) from error
