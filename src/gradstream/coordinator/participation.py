"""Who takes part in a run that its strategy drives, and who is held back: a pure state machine.

    held ──engaged──▶ in ──no longer engaged──▶ held, until it stands ──▶ held

The strategy says how many workers are to take part: those of the lowest ranks that are there. So one that is
lost is replaced by the first that is held back. A worker that is no longer to take part finishes the
minibatch it is in, pushes everything, and says that it stands. Only then is it known which of the minibatches
that it was handed it has not begun, and others get those.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.data.ledger import Ledger
from gradstream.wire import v1

__all__ = ["ParticipationSchedule"]


@dataclass(slots=True)
class _Turn:
    """One worker's. Nobody has begun anything when a run begins: all are held back, and stand."""

    number: int = 1
    held: bool = True
    stands: bool = True


class ParticipationSchedule:
    """Whose turn it is.

    Args:
        ledger: gives others what a worker has in hand that is held back.
        num_workers: W.
    """

    def __init__(self, ledger: Ledger, num_workers: int) -> None:
        self.phase = ""
        self.wanted = 0
        self._ledger = ledger
        self._turns = {f"worker-{rank}": _Turn() for rank in range(num_workers)}
        for rank in range(num_workers):
            ledger.hold(rank)

    @property
    def held(self) -> list[str]:
        """Names of the workers that are held back, by rank."""
        return [name for name, turn in self._turns.items() if turn.held]

    @property
    def engaged(self) -> list[str]:
        """Names of those that take part."""
        return [name for name, turn in self._turns.items() if not turn.held]

    @property
    def awaited(self) -> list[str]:
        """Who still finishes what it has begun before it stands."""
        return [name for name, turn in self._turns.items() if not turn.stands]

    def set_active_workers(self, count: int, phase: str) -> None:
        """So many workers are to take part from now on."""
        self.wanted, self.phase = count, phase
        self._turn_over()

    def stands(self, who: str, number: int) -> bool:
        """A worker says that all it has begun is in the model. False if that was of another turn."""
        turn = self._turns.get(who)
        if turn is None or turn.stands or number != turn.number:
            return False
        turn.stands = True
        self._ledger.hold(_rank(who))
        self._turn_over()
        return True

    def lost(self, who: str) -> bool:
        """A worker is gone; the ledger has heard of it. Returns whether another takes its place."""
        before = self.engaged
        self._turns.pop(who, None)
        self._turn_over()
        return any(name not in before for name in self.engaged)

    def dismiss(self) -> bool:
        """Nothing is left to do: all may go and find that out. Returns whether anybody was held back."""
        if not self.held:
            return False
        self.set_active_workers(len(self._turns), self.phase)
        return True

    def turn_of(self, who: str) -> v1.Turn:
        """A worker's, as it is told it."""
        turn = self._turns[who]
        return v1.Turn(number=turn.number, held=turn.held)

    def as_notice(self) -> v1.Drive:
        """As every node is told it."""
        return v1.Drive(turns={name: self.turn_of(name) for name in self._turns}, phase=self.phase)

    def _turn_over(self) -> None:
        for place, (name, turn) in enumerate(self._turns.items()):
            if place < self.wanted and turn.held and turn.stands:
                turn.held = False
                self._ledger.let_in(_rank(name))
                turn.number += 1
            elif place >= self.wanted and not turn.held:
                turn.held, turn.stands = True, False
                turn.number += 1


def _rank(name: str) -> int:
    return int(name.rpartition("-")[2])
