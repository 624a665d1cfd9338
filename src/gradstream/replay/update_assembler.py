"""Puts updates together out of what is heard of them: gradients, pushes, and one chunk after the other."""

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

__all__ = ["UpdateAssembler"]

Ids = Callable[[BatchRef], Sequence[int] | None]


@dataclass(slots=True)
class _Open:
    """An update that is not whole yet."""

    on: dict[int, int] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    gradient_squares: float = 0.0
    update_squares: float = 0.0
    finite: bool = True
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None


class UpdateAssembler(Observer):
    """Hears of everything that workers and shards of a replay do.

    Args:
        chunks: of the model.
        dtype: of its parameters.
        tree: names of its parameters.
        ids: the samples of a minibatch.
        keep: parameters before and after each update.
    """

    def __init__(self, chunks: ChunkMap, dtype: torch.dtype, tree: Tree, ids: Ids, *, keep: bool) -> None:
        self.whole: deque[ReplayedUpdate] = deque()  # and not fetched from here yet
        self.num_updates = 0
        self._chunks = chunks
        self._dtype = dtype
        self._tree = tree
        self._ids = ids
        self._keep = keep
        self._gradients: dict[tuple[int, BatchRef], tuple[int, float]] = {}  # step and loss
        self._handed: defaultdict[int, list[Push]] = defaultdict(list)  # by rank
        self._open: defaultdict[tuple[int, int], _Open] = defaultdict(_Open)
        self._before: dict[int, torch.Tensor] = {}  # by chunk, while it is updated

    # ---- workers ------------------------------------------------------------------------

    def computed(self, rank: int, ref: BatchRef, step: int, loss: float) -> None:
        """See `Observer`."""
        self._gradients[rank, ref] = (step, loss)

    def handed_over(self, rank: int, update: Push) -> None:
        """See `Observer`."""
        if update.refs:
            self._handed[rank].append(update)

    # ---- shards -------------------------------------------------------------------------

    def begins(self, updating: UpdateDue) -> None:
        """An update of a chunk begins."""
        self._before[updating.due.chunk] = updating.parameters.clone()

    def done(self, updating: UpdateDue) -> None:
        """It is done: that of one or several pushes, or none yet where they only joined the chunk's sum."""
        due, before = updating.due, self._before.pop(updating.due.chunk)
        start, stop = self._chunks.bounds(due.chunk)
        squares = _squares(updating.parameters - before)
        finite = bool(torch.isfinite(updating.parameters).all())
        parts = iter(updating.parts)
        for held in due.update:
            one = held.header
            part = None if one.empty else elements_of(next(parts))
            if held.assign:
                continue
            found = self._open[one.rank, one.sequence]
            found.on[due.chunk], found.at[due.chunk] = one.base_version, due.step - 1
            found.gradient_squares += 0.0 if part is None else _squares(part)
            found.update_squares += squares
            found.finite = found.finite and finite
            if self._keep:
                for name, elements in (("before", before), ("after", updating.parameters)):
                    self._vector(found, name)[start:stop] = elements
            if len(found.at) == self._chunks.num_chunks:
                self._close(one.rank, one.sequence, one.lr, one.samples)

    def _vector(self, found: _Open, name: str) -> torch.Tensor:
        vector: torch.Tensor | None = getattr(found, name)
        if vector is None:
            vector = torch.empty(self._chunks.elems, dtype=self._dtype)
            setattr(found, name, vector)
        return vector

    def _close(self, rank: int, sequence: int, lr: float, num_samples: int) -> None:
        found = self._open.pop((rank, sequence))
        refs = self._refs(rank, sequence)
        known = [self._gradients.pop((rank, ref), (-1, math.nan)) for ref in refs]
        ids = [self._ids(ref) for ref in refs]
        losses = [loss for step, loss in known if step >= 0]
        self.num_updates += 1
        self.whole.append(
            ReplayedUpdate(
                number=self.num_updates,
                worker=rank,
                sequence=sequence,
                steps=tuple(step for step, _ in known if step >= 0),
                batches=refs,
                samples=None if None in ids else tuple(number for some in ids for number in some or ()),
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

    def _refs(self, rank: int, sequence: int) -> tuple[BatchRef, ...]:
        handed = self._handed[rank]
        for push in handed:
            if push.sequence == sequence:
                handed.remove(push)
                return tuple(push.refs)
        return ()


def _squares(elements: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(elements, dtype=torch.float64).item()) ** 2
