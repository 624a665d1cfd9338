"""`ChunkProcedure`: the record that a chunk has of a procedure, and of the portions of the current pass in its sum.

A portion is in the sum at most once, whichever worker computed it and however often. A portion of another pass is
refused, since it was computed at other parameters. All of this is in backups, checkpoints and handovers, so a
procedure continues between any two of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradstream.server.aggregation import PushHeader
from gradstream.wire import v1

# ---- passes ------------------------------------------------------------------------------


@dataclass(slots=True)
class ChunkProcedure:
    """The procedure on one chunk.

    Args:
        number: number of the last step; 0 before the first.
        note: from which any worker continues the procedure; opaque.
        by: the worker that has brought it.
        scalars: results of the last step on this chunk.
        pass_number: 1 + number of the pass whose portions are taken; 0 before the first.
        portions: the portions of that pass that were taken: (samples, mean loss) by number.
        accepted: whether vector "x" has an iterate that the method has accepted.
    """

    number: int = 0
    note: bytes = b""
    by: str = ""
    scalars: Sequence[float] = ()
    pass_number: int = 0
    portions: dict[int, tuple[int, float]] = field(default_factory=dict)
    accepted: bool = False

    def refuses(self, new: PushHeader) -> bool:
        """Whether a push is of another pass, or has a portion that is in the sum. Other pushes have no portion."""
        return bool(new.portion) and (new.round + 1 != self.pass_number or new.portion in self.portions)

    def take(self, new: PushHeader) -> None:
        """Notes that a portion is in the sum."""
        if new.portion:
            self.portions[new.portion] = new.samples, new.loss

    def begin(self, pass_number: int) -> None:
        """Begins a pass, with no portion."""
        self.pass_number, self.portions = pass_number, {}

    def summary(self, chunk: int) -> v1.Procedure:
        """The last step's results, and the sums over the portions in the order of their numbers."""
        taken = [self.portions[number] for number in sorted(self.portions)]
        samples = sum(count for count, _ in taken)
        finite = all(count and math.isfinite(loss) for count, loss in taken)
        loss = sum(count * loss for count, loss in taken) / samples if samples and finite else math.inf
        total = v1.Portion(first=len(taken), samples=samples, loss=loss)
        return v1.Procedure(
            number=self.number,
            scalars=self.scalars,
            pass_number=self.pass_number,
            portions=[total],
            chunk=chunk,
        )

    def message(self, chunk: int) -> v1.Procedure:
        """All of it, for another process."""
        portions = [
            v1.Portion(first=number, samples=samples, loss=loss)
            for number, (samples, loss) in self.portions.items()
        ]
        return v1.Procedure(
            number=self.number,
            note=self.note,
            by=self.by,
            scalars=self.scalars,
            pass_number=self.pass_number,
            portions=portions,
            chunk=chunk,
            accepted=self.accepted,
        )

    @staticmethod
    def messages(procedures: Mapping[int, ChunkProcedure]) -> list[v1.Procedure]:
        """All of it for a checkpoint, by chunk; nothing without a step. A note is only in the first of its step."""
        known: set[int] = set()
        out = []
        for chunk, procedure in procedures.items():
            if procedure.number:
                out.append(procedure.message(chunk))
                if procedure.number in known:
                    out[-1].ClearField("note")
                known.add(procedure.number)
        return out

    @classmethod
    def restored(cls, messages: Sequence[v1.Procedure]) -> dict[int, ChunkProcedure]:
        """The result of `messages` of all shards, by chunk."""
        notes = {message.number: message.note for message in messages if message.note}
        found = {message.chunk: cls.of(message) for message in messages}
        for procedure in found.values():
            procedure.note = notes.get(procedure.number, b"")
        return found

    @classmethod
    def of(cls, message: v1.Procedure) -> ChunkProcedure:
        """The result of `message`, read again."""
        portions = {portion.first: (portion.samples, portion.loss) for portion in message.portions}
        scalars = tuple(message.scalars)
        return cls(
            message.number, message.note, message.by, scalars, message.pass_number, portions, message.accepted
        )


# ---- clocks ------------------------------------------------------------------------------
# Clocks: the number of updates of each worker that each chunk of a shard includes.
#
# A worker's clock is the number of its updates, and every push has the clock of its worker. A chunk keeps, for each
# worker, the clock of the worker's newest push in it. If c is the smallest of these clocks, the chunk includes the
# first c updates of every worker.
#
# A worker that has nothing to do takes no part, and nobody waits for it. When it resumes, its clock becomes the clock
# of the slowest worker, unless its own is later. A lost worker does not resume, even if a message of it still
# arrives; a process that takes its place enters like a worker that resumes, at clock 0. Pure: no I/O.
#
# Reference: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013.

NOBODY = 1 << 62
"""The smallest clock where no worker takes part: nobody waits."""


class Clocks:
    """Keeps each worker's clock, chunk by chunk, and tells the smallest.

    Args:
        chunks: numbers of this shard's chunks.
        num_workers: number of workers; all take part at first, at clock 0.

    Attributes:
        entered: by rank, the clock at which a worker has last resumed.
    """

    def __init__(self, chunks: Iterable[int], num_workers: int) -> None:
        self._in = dict.fromkeys(range(num_workers))
        self._lost: set[int] = set()
        self._at: dict[int, dict[int, int]] = {chunk: {} for chunk in chunks}  # by chunk and rank
        self.entered: dict[int, int] = {}

    @property
    def present(self) -> frozenset[int]:
        """The ranks of the workers that take part."""
        return frozenset(self._in)

    def at(self, chunk: int) -> Mapping[int, int]:
        """The clocks of a chunk, by rank; a worker without a push is missing."""
        return self._at[chunk]

    def advance(self, chunk: int, rank: int, clock: int) -> None:
        """Notes that a chunk includes a worker's first `clock` updates. Clocks never go back."""
        at = self._at[chunk]
        at[rank] = max(clock, at.get(rank, 0))

    def slowest(self, chunk: int) -> int:
        """The smallest clock of a chunk; `NOBODY` where no worker takes part."""
        at = self._at[chunk]
        if not at and self._in:  # also where the strategy has no clocks
            return 0
        return min((at.get(rank, 0) for rank in self._in), default=NOBODY)

    def behind(self, chunk: int, clock: int) -> list[int]:
        """The ranks of the workers that take part and have not reached this clock."""
        at = self._at[chunk]
        return [rank for rank in sorted(self._in) if at.get(rank, 0) < clock]

    def pause(self, rank: int) -> None:
        """Stops waiting for a worker: it has nothing to do for now."""
        self._in.pop(rank, None)

    def resume(self, rank: int, clock: int) -> int:
        """Lets a worker take part from this clock on, a paused worker from the slowest worker's clock if that is later.

        Returns:
            The worker's clock from now on, on all chunks of this shard.
        """
        if rank not in self._in:
            found = (self.slowest(chunk) for chunk in self._at)
            clock = max([clock, *(slowest for slowest in found if slowest < NOBODY)])
        for chunk in self._at:
            self.advance(chunk, rank, clock)
        self.entered[rank] = clock
        if rank not in self._lost:
            self._in[rank] = None
        return clock

    def lacks(self, ranks: Collection[int]) -> bool:
        """Whether `keep` would change anything."""
        return not set(ranks).isdisjoint(self._lost) or not self._in.keys() <= set(ranks)

    def keep(self, ranks: Collection[int]) -> None:
        """Stops waiting for all other workers: they are lost. A lost one of these ranks may take part again."""
        self._lost.difference_update(ranks)
        for rank in [rank for rank in self._in if rank not in ranks]:
            self.pause(rank)
            self._lost.add(rank)
            self.entered.pop(rank, None)
            for at in self._at.values():
                at.pop(rank, None)
