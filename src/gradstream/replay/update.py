"""One update of a replay: whose, of which minibatch, computed on what, applied to what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradstream.data.base import BatchRef

__all__ = ["ReplayedUpdate"]

Tree = Callable[[torch.Tensor], Mapping[str, np.ndarray[Any, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedUpdate:
    """What a worker has pushed at once, applied to every chunk.

    Chunks are applied each for itself, so other updates may lie between: `before` and `after` have each
    chunk as it was right before and right after this one.

    Args:
        number: from 1, in the order in which updates were whole; that of each chunk is the recorded one.
        worker: its rank.
        sequence: number of the push: of this worker's, from 1.
        steps: of the worker, whose gradients are in it.
        batches: the minibatches of these steps.
        samples: their sample ids, in order; None where samples have no numbers.
        num_samples: how many.
        lr: learning rate.
        loss: mean over its minibatches; NaN where unknown.
        computed_on: by chunk, the version that the (first) gradient was computed on.
        applied_at: by chunk, the version that it was applied to: minus `computed_on` its staleness.
        gradient_norm: length of what was pushed.
        update_norm: by how far the parameters went: with all that were applied in the same versions; 0 where
            it has only joined a sum, which a later one completes.
        finite: whether all parameters were numbers after it.
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
        """By chunk: versions between the one that it was computed on and the one that it was applied to."""
        return tuple(at - on for on, at in zip(self.computed_on, self.applied_at, strict=True))

    @property
    def before(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters by the user's own names, before it; {} where the replay keeps none."""
        return self._named(self._before)

    @property
    def after(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Parameters after it; {} where the replay keeps none."""
        return self._named(self._after)

    def _named(self, flat: torch.Tensor | None) -> Mapping[str, np.ndarray[Any, Any]]:
        return {} if flat is None or self._tree is None else self._tree(flat)
