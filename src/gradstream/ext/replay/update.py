"""One update of a replay: its worker, its samples, and the versions on which it was computed and applied."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from gradstream.data.base import BatchRef
from gradstream.errors import ConfigError
from gradstream.server.client.push import Update as Push
from gradstream.server.rows import elements_of
from gradstream.server.shard.event_schedule import UpdateDue
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.computed import Observer

# ---- update ------------------------------------------------------------------------------

Tree = Callable[[torch.Tensor], Mapping[str, np.ndarray[Any, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedUpdate:
    """One push of a worker, applied to every chunk that it contains: all chunks, except under `streaming-diloco`.

    Each chunk is updated independently, so other updates may lie in between: `before` and `after` have each chunk
    directly before and directly after this update, and NaN for chunks that it does not contain.

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


# ---- finding -----------------------------------------------------------------------------
# Conditions that stop a replay at an update.

StopCondition = Callable[[ReplayedUpdate], bool]

JUMP = 3.0
"""A loss of this many times the median of the losses before it is a jump."""
RECENT, FIRST = 32, 8
"""A median is of the 32 losses before, and of at least 8."""


def at_update(number: int) -> StopCondition:
    """Finds the update of this number, from 1."""
    return lambda update: update.number == number


def of_step(worker: int, step: int) -> StopCondition:
    """Finds the update with the gradient of a worker's step; ranks and steps count from 0."""
    return lambda update: update.worker == worker and step in update.steps


def at_chunk_version(version: int, chunk: int = 0) -> StopCondition:
    """Finds the update that made this version of a chunk, from 1; the last one if several did.

    Raises:
        ConfigError: there is no such version, or no such chunk. Version 0 is the initial parameters.
    """
    if version < 1 or chunk < 0:
        raise ConfigError(f"version={version}, chunk={chunk}: expected at least 1, and a chunk from 0 on")

    def found(update: ReplayedUpdate) -> bool:
        if chunk >= len(update.applied_at):
            raise ConfigError(f"chunk={chunk}: the model has chunks 0 to {len(update.applied_at) - 1}")
        return update.applied_at[chunk] == version - 1

    return found


def not_finite() -> StopCondition:
    """Finds the first update after which a parameter is not finite, or whose loss is infinite."""
    return lambda update: not update.finite or math.isinf(update.loss)


def loss_jump(times: float = JUMP) -> StopCondition:
    """Finds the first update whose loss is more than `times` the median of the 32 losses before it."""
    recent: deque[float] = deque(maxlen=RECENT)

    def found(update: ReplayedUpdate) -> bool:
        loss = update.loss
        jumps = len(recent) >= FIRST and loss > times * statistics.median(recent)
        if math.isfinite(loss):
            recent.append(loss)
        return jumps

    return found


# ---- update assembler --------------------------------------------------------------------
# Assembles updates of the whole model from the gradients, pushes and chunk updates that a replay observes.


@dataclass(slots=True)
class _OpenUpdate:
    """An update that some chunks have not had yet. `on`: base version by chunk. `at`: version it was applied to."""

    on: dict[int, int] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    gradient_squares: float = 0.0
    update_squares: float = 0.0
    finite: bool = True
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None


class UpdateAssembler(Observer):
    """Observes the workers and shards of a replay, and puts updates into `complete` once all chunks have them.

    Args:
        chunks: chunks of the model.
        dtype: type of the parameters.
        tree: returns the parameters by name.
        samples_of: returns the sample ids of a minibatch, or None.
        keep: whether to keep the parameters before and after each update.
    """

    def __init__(
        self,
        chunks: ChunkMap,
        dtype: torch.dtype,
        tree: Tree,
        samples_of: Callable[[BatchRef], Sequence[int] | None],
        *,
        keep: bool,
    ) -> None:
        self.complete: deque[ReplayedUpdate] = deque()
        self._num_updates = 0
        self._chunks = chunks
        self._dtype = dtype
        self._tree = tree
        self._samples_of = samples_of
        self._keep = keep
        self._gradients: dict[tuple[int, BatchRef], tuple[int, float]] = {}  # step and loss
        self._pushes: defaultdict[int, list[Push]] = defaultdict(list)  # by rank
        self._open: defaultdict[tuple[int, int], _OpenUpdate] = defaultdict(_OpenUpdate)  # by rank, sequence
        self._before: dict[int, torch.Tensor] = {}  # by chunk, while it is updated

    # ---- workers ------------------------------------------------------------------------

    @override
    def computed(self, rank: int, ref: BatchRef, step: int, loss: float) -> None:
        self._gradients[rank, ref] = (step, loss)

    @override
    def handed_over(self, rank: int, update: Push) -> None:
        if update.refs or update.chunks is not None:
            self._pushes[rank].append(update)

    # ---- shards -------------------------------------------------------------------------

    def begin(self, update: UpdateDue) -> None:
        """Keeps the parameters of a chunk before its update."""
        self._before[update.due.chunk] = update.parameters.clone()

    def applied(self, update: UpdateDue) -> None:
        """Notes the update of a chunk, for each push in it. A push may only have joined the chunk's sum."""
        due, before = update.due, self._before.pop(update.due.chunk)
        squares = _squares(update.parameters - before)
        finite = bool(torch.isfinite(update.parameters).all())
        parts = iter(update.parts)
        for parked in due.update:
            push = parked.header
            part = None if push.empty else elements_of(next(parts))
            if parked.assign:
                continue
            key = (push.rank, push.sequence)
            open_update = self._open[key]
            open_update.on[due.chunk], open_update.at[due.chunk] = push.base_version, due.step - 1
            open_update.gradient_squares += 0.0 if part is None else _squares(part)
            open_update.update_squares += squares
            open_update.finite = open_update.finite and finite
            if self._keep:
                start, stop = self._chunks.bounds(due.chunk)
                if open_update.before is None or open_update.after is None:
                    open_update.before, open_update.after = (
                        torch.full((self._chunks.elems,), math.nan, dtype=self._dtype) for _ in range(2)
                    )
                open_update.before[start:stop], open_update.after[start:stop] = before, update.parameters
            if len(open_update.at) == self._num_chunks(*key):
                self._close(self._open.pop(key), *key, push.lr, push.samples)

    def _close(self, update: _OpenUpdate, rank: int, sequence: int, lr: float, num_samples: int) -> None:
        refs = self._refs(rank, sequence)
        computed = [self._gradients.pop((rank, ref), (-1, math.nan)) for ref in refs]
        losses = [loss for step, loss in computed if step >= 0]
        samples = [self._samples_of(ref) for ref in refs]
        self._num_updates += 1
        self.complete.append(
            ReplayedUpdate(
                number=self._num_updates,
                worker=rank,
                sequence=sequence,
                steps=tuple(step for step, _ in computed if step >= 0),
                batches=refs,
                samples=None if None in samples else tuple(number for ids in samples for number in ids or ()),
                num_samples=num_samples,
                lr=lr,
                loss=math.fsum(losses) / len(losses) if losses else math.nan,
                computed_on=tuple(update.on[chunk] for chunk in sorted(update.on)),
                applied_at=tuple(update.at[chunk] for chunk in sorted(update.at)),
                gradient_norm=math.sqrt(update.gradient_squares),
                update_norm=math.sqrt(update.update_squares),
                finite=update.finite,
                _tree=self._tree,
                _before=update.before,
                _after=update.after,
            )
        )

    def _push(self, rank: int, sequence: int) -> Push | None:
        return next((push for push in self._pushes[rank] if push.sequence == sequence), None)

    def _num_chunks(self, rank: int, sequence: int) -> int:
        push = self._push(rank, sequence)
        return self._chunks.num_chunks if push is None or push.chunks is None else len(push.chunks)

    def _refs(self, rank: int, sequence: int) -> tuple[BatchRef, ...]:
        push = self._push(rank, sequence)
        if push is None:
            return ()
        self._pushes[rank].remove(push)
        return tuple(push.refs)


def _squares(elements: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(elements, dtype=torch.float64).item()) ** 2
