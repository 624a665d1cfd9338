"""One update of a replay: its worker, its samples, and the versions it was computed on and applied to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradstream.data.base import BatchRef

Tree = Callable[[torch.Tensor], Mapping[str, np.ndarray[Any, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedUpdate:
    """One push of a worker, applied to every chunk that it has: to all, but under `streaming-diloco`.

    Each chunk is updated by itself, so other updates may lie in between: `before` and `after` have each chunk as it
    was directly before and directly after this update, and NaN for chunks that it has not.

    Args:
        number: number of the update, from 1, in the order in which updates reached their last chunk.
        worker: rank of the worker.
        sequence: number of the push among those of the worker, from 1.
        steps: steps of the worker whose gradients are in the push, and with it in updates of every chunk.
        batches: minibatches of these steps.
        samples: sample ids of the minibatches, in order; None if samples have no ids.
        num_samples: number of samples.
        lr: learning rate.
        loss: mean loss of the minibatches; NaN if unknown.
        computed_on: by chunk, the version that the first gradient was computed on.
        applied_at: by chunk, the version that the push was applied to; its staleness is the difference.
        gradient_norm: length of the pushed vector.
        update_norm: length of the change of the parameters, which includes all pushes applied in the same versions;
            0 if the push only joined a sum that a later push completes.
        finite: whether all parameters were finite after it.
    """

    number: int
    worker: int
    sequence: int
    steps: tuple[int, ...]
    batches: tuple[BatchRef, ...]
    samples: tuple[int, ...] | None
    num_samples: int
    lr: float
    loss: float
    computed_on: tuple[int, ...]
    applied_at: tuple[int, ...]
    gradient_norm: float
    update_norm: float
    finite: bool
    _tree: Tree | None = field(default=None, repr=False)
    _before: torch.Tensor | None = field(default=None, repr=False)
    _after: torch.Tensor | None = field(default=None, repr=False)

    @property
    def staleness(self) -> tuple[int, ...]:
        """By chunk, the number of versions from `computed_on` to `applied_at`."""
        return tuple(at - on for on, at in zip(self.computed_on, self.applied_at, strict=True))

    @property
    def before(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters before the update, by their names in the model; {} if the replay keeps none."""
        return self._named(self._before)

    @property
    def after(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters after the update; {} if the replay keeps none."""
        return self._named(self._after)

    def _named(self, flat: torch.Tensor | None) -> Mapping[str, np.ndarray[Any, Any]]:
        return {} if flat is None or self._tree is None else self._tree(flat)
