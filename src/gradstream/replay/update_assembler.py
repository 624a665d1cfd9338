"""Assembles updates of the whole model from the gradients, pushes and chunk updates that a replay observes."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gradstream.data.base import BatchRef
from gradstream.replay.update import ReplayedUpdate, Tree
from gradstream.server.shard.event_schedule import UpdateDue
from gradstream.server.shard.row_store import elements_of
from gradstream.server.update import Update as Push
from gradstream.wire.chunks import ChunkMap
from gradstream.worker.observer import Observer


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
    """Observes the workers and shards of a replay, and puts each update into `complete` once all its chunks had it.

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

    def computed(self, rank: int, ref: BatchRef, step: int, loss: float) -> None:
        """See `Observer`."""
        self._gradients[rank, ref] = (step, loss)

    def handed_over(self, rank: int, update: Push) -> None:
        """See `Observer`."""
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
            found = self._open[key]
            found.on[due.chunk], found.at[due.chunk] = push.base_version, due.step - 1
            found.gradient_squares += 0.0 if part is None else _squares(part)
            found.update_squares += squares
            found.finite = found.finite and finite
            if self._keep:
                start, stop = self._chunks.bounds(due.chunk)
                if found.before is None or found.after is None:
                    found.before, found.after = (
                        torch.full((self._chunks.elems,), math.nan, dtype=self._dtype) for _ in range(2)
                    )
                found.before[start:stop], found.after[start:stop] = before, update.parameters
            if len(found.at) == self._num_chunks(*key):
                self._close(self._open.pop(key), *key, push.lr, push.samples)

    def _close(self, found: _OpenUpdate, rank: int, sequence: int, lr: float, num_samples: int) -> None:
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
                computed_on=tuple(found.on[chunk] for chunk in sorted(found.on)),
                applied_at=tuple(found.at[chunk] for chunk in sorted(found.at)),
                gradient_norm=math.sqrt(found.gradient_squares),
                update_norm=math.sqrt(found.update_squares),
                finite=found.finite,
                _tree=self._tree,
                _before=found.before,
                _after=found.after,
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
