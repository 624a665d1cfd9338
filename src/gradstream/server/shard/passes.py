"""`ChunkProcedure`: the record that a chunk has of a procedure, and of the portions of the present pass in its sum.

A portion is in the sum at most once, whichever worker computed it and however often. A portion of another pass is
refused, since it was computed at other parameters. All of this is in backups, checkpoints and handovers, so a
procedure goes on between any two of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradstream.server.aggregation import PushHeader
from gradstream.wire import v1


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
        notes = {one.number: one.note for one in messages if one.note}
        found = {one.chunk: cls.of(one) for one in messages}
        for procedure in found.values():
            procedure.note = notes.get(procedure.number, b"")
        return found

    @classmethod
    def of(cls, message: v1.Procedure) -> ChunkProcedure:
        """The result of `message`, read again."""
        portions = {one.first: (one.samples, one.loss) for one in message.portions}
        scalars = tuple(message.scalars)
        return cls(
            message.number, message.note, message.by, scalars, message.pass_number, portions, message.accepted
        )
