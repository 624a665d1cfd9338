"""The ledger of an open-ended run: how many minibatches there will be, nobody knows.

Each worker goes through data of its own until it has no more, and then says how much that was. What a
lost worker had left, others take over where they can tell what it was (see `Reassignment`); else the run is
without it.

In rounds, all workers must stop before the same round, though they run out of data at different
times, and a worker that takes part in a round cannot stop before it is over. So a worker that has
run out asks before each further round, in which it takes part without samples. A round that anybody
was told to take part in is held by all; the run is over before the first one that nobody was told
to, once everybody has run out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradstream.data.base import BatchRef
from gradstream.data.progress import DataProgress
from gradstream.data.reassignment import Reassignment
from gradstream.data.receipts import Receipts
from gradstream.errors import InternalError

__all__ = ["LostSamples", "OpenLedger"]


BRIEF = 0.75
"""Of the longest loop's minibatches. A worker may have one less in each epoch."""

MAX_AHEAD = 1 << 20
"""How far beyond all others a receipt may be: each that is missing between takes memory."""


@dataclass(slots=True)
class _Sequence(Receipts):
    """The minibatches of one worker, numbered from 0."""

    total: int | None = None  # how many there were, once the worker has run out
    samples: int = 0
    lost: bool = False

    @property
    def accounted(self) -> bool:
        return self.lost or (self.total is not None and self.low >= self.total)


@dataclass(frozen=True, slots=True)
class LostSamples:
    """What became of a lost worker's part.

    Args:
        rank: of the worker.
        steps: how many of its steps are in the model.
        missing: how many minibatches of its part are not; None where that is unknown.
    """

    rank: int
    steps: int
    missing: int | None


class OpenLedger:
    """Accounts for the minibatches of workers that bring their own. No I/O, as `Ledger`.

    Args:
        num_workers: how many bring data.
        rounds: they take part in rounds together; otherwise each stops when it has run out.

    Attributes:
        left_over: what lost workers have left, and who takes it over.
    """

    num_epochs = 1
    """There is one data epoch as far as the ledger knows: a loop counts its own."""

    def __init__(self, num_workers: int, *, rounds: bool) -> None:
        self._sequences = [_Sequence() for _ in range(num_workers)]
        self._rounds = rounds
        self.reassignment = Reassignment(self._sequences)
        self._held = -1  # the last round that a worker without data was told to take part in

    num_complete = 0
    """Nobody knows when it is complete before the run is over."""

    @property
    def num_receipts(self) -> int:
        """How many minibatches have a receipt."""
        return sum(sequence.count for sequence in self._sequences)

    @property
    def num_rounds(self) -> int:
        """How many each worker has, in the mean."""
        return self.num_receipts // len(self._sequences)

    def progress(self) -> DataProgress:
        """Nothing that has a number: how far each loop is, it says itself (see `checkpoint.own_state`)."""
        return DataProgress()

    @property
    def finished(self) -> bool:
        """Whether every worker has run out, and each of its minibatches has a receipt."""
        return all(sequence.accounted for sequence in self._sequences)

    def ended(self, rank: int, batches: int, samples: int, next_round: int) -> bool | None:
        """A worker has run out of data, after so many minibatches of so many samples.

        Args:
            next_round: the round that it would take part in next, without samples.

        Returns:
            Whether the run is over for it. False: it takes part in `next_round`. None: wait for others.
        """
        sequence = self._sequences[rank]
        sequence.total, sequence.samples = batches, samples
        self.reassignment.ended(rank, batches)
        if not self._rounds:
            return True if self.finished else None
        everybody = all(sequence.lost or sequence.total is not None for sequence in self._sequences)
        if everybody and next_round > self._held:
            return True
        self._held = max(self._held, next_round)
        return False

    most_begun = 1 << 53
    """The most minibatches that one worker can have begun: as many as its loop likes."""

    def knows(self, ref: BatchRef, worker: int) -> bool:
        """Whether this may be a minibatch of the worker's: its own, and not far beyond what has receipts."""
        if worker != ref.partition or ref.epoch != 0 or not 0 <= ref.partition < len(self._sequences):
            return False
        sequence = self._sequences[ref.partition]
        return 0 <= ref.batch < sequence.count + MAX_AHEAD

    def receipt(self, ref: BatchRef, worker: int) -> bool:
        """Notes that a minibatch of `worker`'s is in the model. True the first time."""
        if worker != ref.partition or ref.epoch != 0:
            raise InternalError(f"a receipt of worker {worker} for {ref}: minibatches are each worker's own")
        return self._sequences[ref.partition].add(ref.batch)

    def lost(self, rank: int) -> int:
        """A worker is gone. What it had left is not handed out, but asked for: see `left_over`. Returns 0."""
        self._sequences[rank].lost = True
        self.reassignment.lost(rank)
        return 0

    def losses(self) -> list[LostSamples]:
        """What became of the parts of lost workers that had not done all of theirs. In rounds nobody asks."""
        if self._rounds:
            return []
        lost = [(rank, sequence) for rank, sequence in enumerate(self._sequences) if sequence.lost]
        return [
            LostSamples(rank, sequence.count, self.reassignment.missing(rank))
            for rank, sequence in lost
            if sequence.total is None or sequence.low < sequence.total
        ]

    def brief(self) -> dict[int, tuple[int, int]]:
        """By rank, loops that were much shorter than the longest one: (minibatches, those of the longest).

        Loops of `shard`'s loaders are about as long as one another, unless somebody has taken something over.
        """
        if any(sequence.lost for sequence in self._sequences):
            return {}
        longest = max(sequence.total or 0 for sequence in self._sequences)
        totals = {rank: sequence.total or 0 for rank, sequence in enumerate(self._sequences)}
        return {rank: (total, longest) for rank, total in totals.items() if total < BRIEF * longest}

    def num_batches(self, epoch: int) -> int:
        """How many minibatches the workers that have run out had, without rounds they had no samples in."""
        del epoch
        return sum(sequence.total or 0 for sequence in self._sequences)

    def samples(self, epoch: int) -> int:
        """Of how many samples."""
        del epoch
        return sum(sequence.samples for sequence in self._sequences)

    @property
    def num_samples(self) -> int:
        """Samples that the workers which have run out have brought."""
        return self.samples(0)

    def missing(self, epoch: int) -> int:
        """How many of those have no receipt yet."""
        del epoch
        return sum(
            max(0, (sequence.total or 0) - sequence.low) for sequence in self._sequences if not sequence.lost
        )

    def complete(self, epoch: int) -> bool:
        """As `finished`: there is one epoch."""
        del epoch
        return self.finished

    def reassigned(self, epoch: int) -> int:
        """How many minibatches of lost workers others have taken over."""
        del epoch
        return self.reassignment.num_taken
