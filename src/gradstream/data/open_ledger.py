"""The ledger of an open-ended run, in which the number of minibatches is unknown.

Each worker reads its own data until it has no more, and then reports how much it was. Where minibatches are dealt out
(see `Dealing`), others take over what a lost worker had left; otherwise the run continues without it.

In rounds, all workers must stop before the same round, although they run out of data at different times, and a worker
that takes part in a round cannot stop before its end. So a worker without data asks before each further round, in which
it takes part without samples. If the coordinator tells one worker to take part in a round, all workers do. When all
workers are without data, the run ends before the first round in which none was told to take part.

A lost worker has pushed, or exchanged in pairs, more than it could report. So others tell: with servers every shard has
to have a gradient; in pairs it is enough that one living worker's parameters contain a step. There a receipt only says
that the worker's own parameters contain it, so a step is the worker's until it is shared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gradstream.data.base import BatchRef, DataProgress
from gradstream.data.dealing import Dealing, Process
from gradstream.data.leases import Receipts
from gradstream.errors import InternalError

BRIEF = 0.75
"""Share of the longest loop's minibatches, below which a loop is much shorter. A part may have one minibatch less."""

MORE_ROUNDS = 16
"""Most rounds of pairs after the longest loop, in which each worker is to meet another one."""

MAX_AHEAD = 1 << 20
"""How far a receipt may be ahead of all others, since each missing one in between takes memory."""


@dataclass(slots=True)
class LoopSequence(Receipts):
    """The minibatches of one worker, numbered from 0."""

    total: int | None = None  # number of minibatches, once the worker is without data
    samples: int = 0
    lost: bool = False
    returned: bool = False  # a new process has taken its place
    enters: bool = False  # a new process has come, and has no receipt yet
    begins_late: bool = False  # in rounds: its first receipt has the number of the others' present round
    missed: int = 0  # rounds in which the worker took no part
    earlier: int = 0  # receipts of earlier processes of the worker, which have numbered their own steps
    earlier_samples: int = 0

    @property
    def is_through(self) -> bool:
        """Whether the worker is without data, and all of its minibatches have receipts."""
        return self.total is not None and self.low >= self.total

    @property
    def num_steps(self) -> int:
        """Number of minibatches with a receipt."""
        return self.earlier + self.count - self.missed

    def come(self) -> None:
        """Notes that a new process of the worker begins with a later round."""
        self.returned |= self.lost
        self.lost, self.enters, self.begins_late, self.total = False, True, True, None

    def add(self, k: int) -> bool:
        """See `Receipts`."""
        if self.begins_late and k >= self.low:
            self.begins_late, self.missed = False, self.missed + k - self.count
            self.low, self.ahead = k, set()
        self.enters &= self.begins_late
        return Receipts.add(self, k)

    @property
    def accounted(self) -> bool:
        """Whether nothing more is expected of the worker."""
        return self.lost or self.is_through


@dataclass(slots=True)
class Gone:
    """A lost process of a worker, of which not all who may have something of it have told yet.

    Args:
        sequence: its minibatches.
        awaited: names of those who have not.
        gradients: number of its first gradients that are in the model, as far as the others have told.
    """

    sequence: LoopSequence
    awaited: set[str]
    gradients: int


class Left(NamedTuple):
    """What lost workers had left of the data, as far as a loop in rounds knows.

    Args:
        batches: by rank of a lost worker, the minibatches of its loaders that no worker computed.
        own_data: some minibatches came from no loader that is shared out, so `batches` is not all.
        contributed: by rank of each worker, its samples in the model.
    """

    batches: Mapping[int, int]
    own_data: bool
    contributed: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class LostSamples:
    """The samples of a lost worker.

    Args:
        rank: rank of the worker.
        steps: number of its steps in the model.
        missing: number of minibatches of its part that are not in the model; None if unknown.
        is_exact: all of these steps have receipts. In rounds the last ones may have none.
    """

    rank: int
    steps: int
    missing: int | None
    is_exact: bool = True


class OpenLedger:
    """Accounts for the minibatches of workers that bring their own data. No I/O, as in `Ledger`.

    Args:
        num_workers: number of workers that bring data.
        rounds: whether they take part in rounds together; otherwise each stops when it is without data.
        deals: whether minibatches are dealt out here: see `dealing`. Else the workers do that in their rounds.
        told_by: who tells how many gradients of a lost worker the model has: "shards", "workers" (in pairs), or nobody.
        first: number of the first rounds of a worker that are no minibatches of its loop, in which it only meets the
            others.

    Attributes:
        is_ending: in rounds, some worker was told that the run is over for it, so nobody can come any more.
        dealing: deals out the minibatches, where workers do not do that in rounds by themselves.
        gone: by rank and incarnation, the lost processes of which not all have told.
    """

    num_epochs = 1
    """The ledger sees the run as one data epoch; a loop counts its own epochs."""

    KEPT = ("_sequences", "_dropped", "is_ending", "_last_round", "_left", "_own_data", "gone", "_shared")
    """See `coordinator.durable`."""

    def __init__(
        self,
        num_workers: int,
        *,
        rounds: bool,
        first: int = 0,
        deals: bool = True,
        told_by: Literal["shards", "workers", ""] = "",
    ) -> None:
        self._sequences = [LoopSequence() for _ in range(num_workers)]
        self._num_first = num_workers
        self._rounds = rounds
        self._deals = deals
        self._told_by = told_by
        self._first = first
        self._dropped = 0
        self.dealing = Dealing(range(num_workers), self._received)
        self.gone: dict[Process, Gone] = {}
        self._shared: dict[int, int] = {}  # in pairs: by rank, how many first steps another worker has
        self.is_ending = False
        self._last_round = -1  # the last round to which a worker without data was told
        self._left: dict[int, int] = {}  # by rank of a lost worker, in rounds
        self._own_data: bool | None = None  # None: no worker knows what is left

    num_complete = 0
    """It is unknown when the epoch is complete until the run is over."""

    @property
    def num_receipts(self) -> int:
        """The number of minibatches with a receipt."""
        return sum(sequence.num_steps for sequence in self._sequences)

    def _received(self, rank: int, step: int) -> bool:
        """Whether a worker's step stays in the model if the worker is lost."""
        if self._told_by == "workers":
            return step < self._shared.get(rank, 0)
        return self._made(rank, step)

    def _made(self, rank: int, step: int) -> bool:
        return step < 0 or self._sequences[rank].received(step)

    @property
    def num_rounds(self) -> int:
        """The number of rounds; where workers go on by themselves, the mean number of receipts of one."""
        if self._rounds:
            return max(sequence.count for sequence in self._sequences)
        return self.num_receipts // len(self._sequences)

    def progress(self) -> DataProgress:
        """No progress, since samples have no ids; each loop keeps its own (see `checkpoint.own_state`)."""
        return DataProgress()

    @property
    def finished(self) -> bool:
        """Whether every worker is without data, and each of its minibatches has a receipt."""
        return all(sequence.accounted for sequence in self._sequences)

    def ended(
        self, rank: int, batches: int, samples: int, next_round: int, left: Left | None = None
    ) -> bool | None:
        """Notes that a worker is without data.

        Args:
            rank: rank of the worker.
            batches: number of its minibatches.
            samples: number of its samples.
            next_round: the next round in which it could take part, without samples.
            left: what lost workers had left, which all workers in rounds know alike.

        Returns:
            Whether the run is over for it. False: it takes part in `next_round`. None: it waits for others.
        """
        sequence = self._sequences[rank]
        sequence.total = batches
        before = sequence.samples if not self._deals and sequence.returned else 0
        sequence.samples = max(samples + sequence.earlier_samples, before)
        self.dealing.ended(rank)
        if left is not None:
            self._own_data = bool(self._own_data) or left.own_data
            for other, batches in left.batches.items():  # whoever ended early may know of fewer
                self._left[other] = max(batches, self._left.get(other, 0))
            for other, contributed in left.contributed.items():
                if self._sequences[other].lost or self._sequences[other].returned:
                    self._sequences[other].samples = max(self._sequences[other].samples, contributed)
        if not self._rounds:
            return True if self.finished else None
        everybody = all(sequence.lost or sequence.total is not None for sequence in self._sequences)
        if everybody and next_round > self._last_round and self._all_shared(next_round):
            self.is_ending = True
            return True
        self._last_round = max(self._last_round, next_round)
        return False

    def _all_shared(self, number: int) -> bool:
        """Whether everything outlives any one worker; in pairs that cannot meet, whether they have tried enough."""
        if self._told_by != "workers":
            return True
        there = {rank: one.total or 0 for rank, one in enumerate(self._sequences) if not one.lost}
        all_shared = all(self._shared.get(rank, 0) >= total for rank, total in there.items())
        return all_shared or number >= max(there.values()) + MORE_ROUNDS

    @property
    def reading(self) -> list[int]:
        """Ranks of the workers that are not lost, are in the rounds, and may have more data."""
        return [
            rank
            for rank, one in enumerate(self._sequences)
            if not (one.lost or one.enters) and one.total is None
        ]

    most_begun = 1 << 53
    """The most minibatches that one worker can have begun; its loop has no limit."""

    def knows(self, ref: BatchRef, worker: int) -> bool:
        """Whether this may be a minibatch of the worker: of its own part, and not far ahead of its receipts."""
        if worker != ref.partition or ref.epoch != 0 or not 0 <= ref.partition < len(self._sequences):
            return False
        most = max(sequence.count for sequence in self._sequences)  # a newcomer begins where the others are
        return 0 <= ref.batch < most + MAX_AHEAD

    def receipt(self, ref: BatchRef, worker: int) -> bool:
        """Notes that a minibatch of a worker is in the model. Returns True the first time."""
        if worker != ref.partition or ref.epoch != 0:
            raise InternalError(
                f"got a receipt for {ref} of worker {worker}; expected partition {worker} and epoch 0, since each "
                "worker of this run reads its own data"
            )
        return self._sequences[ref.partition].add(ref.batch)

    def refuse(self, ref: BatchRef, samples: int) -> None:
        """Notes that a worker's gradient over so many samples was refused, which its loop counts as any other."""
        del ref
        self._dropped += samples

    @property
    def dropped(self) -> Mapping[int, int]:
        """By data epoch, the number of samples whose gradients were refused."""
        return {0: self._dropped} if self._dropped else {}

    def lost(self, rank: int, incarnation: int = 0, tellers: Collection[str] = ()) -> int:
        """Notes that a worker is lost. Others get its minibatches (see `dealing`). Returns 0.

        Args:
            rank: rank of the worker.
            incarnation: of its process.
            tellers: names of the shards or, without servers, of the other workers. Others get nothing of what the
                worker had begun before all have told how many of its gradients they have.
        """
        process, sequence = (rank, incarnation), self._sequences[rank]
        sequence.lost = True
        self.dealing.lost(process)
        self._shared.pop(rank, None)
        most = 0 if self._told_by == "workers" else sequence.count + MAX_AHEAD
        self.gone[process] = Gone(sequence, set(tellers if self._told_by else ()), most)
        self._settle(process)
        sequence.samples = max(sequence.samples, self.dealing.samples[rank])
        return 0

    @property
    def num_workers(self) -> int:
        """Number of workers that have ever been there."""
        return len(self._sequences)

    def come(self, rank: int) -> None:
        """Notes that a worker has come to the run, which has begun: in the place of a lost one, or a further one."""
        while len(self._sequences) <= rank:  # whoever has a rank in between has not come yet
            self._sequences.append(LoopSequence(total=0))
        self.dealing.come(rank)
        old = self._sequences[rank]
        if self._rounds and self._told_by != "workers":
            old.come()
            old.earlier_samples = old.samples if self._deals else 0  # a group tells of them when it ends
            return
        self._sequences[rank] = LoopSequence(
            returned=old.lost or old.returned,
            enters=True,
            begins_late=self._rounds,
            earlier=old.num_steps,
            earlier_samples=old.samples,
        )

    def enters(self, rank: int) -> bool:
        """Whether a worker has come to a run that had begun, and has nothing in the model yet."""
        return self._sequences[rank].enters

    def is_late(self, rank: int) -> bool:
        """Whether a worker has come to a run that had begun."""
        return rank >= self._num_first or self._sequences[rank].returned

    def shared(self, rank: int, steps: int) -> None:
        """Notes that so many first steps of a worker in pairs are in another worker's parameters, too."""
        self._shared[rank] = max(steps, self._shared.get(rank, 0))

    def told(self, process: Process, who: str, gradients: int) -> None:
        """Takes a report on a lost process.

        Args:
            process: rank and incarnation.
            who: name of the shard or worker that tells. A worker may tell again, when it has got more of another one.
            gradients: number of gradients, the lost worker's first ones, that all of its chunks or its parameters have.
        """
        gone, in_pairs = self.gone.get(process), self._told_by == "workers"
        if gone is None or not (in_pairs or who in gone.awaited):
            return
        gone.awaited.discard(who)
        gone.gradients = (max if in_pairs else min)(gone.gradients, gradients)
        self._settle(process)

    def teller_lost(self, who: str) -> None:
        """Waits no longer for the reports of a lost node: a shard may have had anything, a worker's part is gone."""
        for process in list(self.gone):
            self.told(process, who, 0)

    def _settle(self, process: Process) -> None:
        """Gives others what the model does not have of a lost process, once all have told."""
        gone, rank = self.gone[process], process[0]
        if gone.awaited:
            return
        del self.gone[process]
        sequence, now = gone.sequence, self._sequences[rank]
        steps, samples = sequence.num_steps, self.dealing.samples[rank]
        if self._told_by == "shards":
            for step in range(sequence.low, gone.gradients):
                sequence.add(step)
        if self._told_by == "workers":
            sequence.missed += max(0, sequence.count - max(sequence.missed, gone.gradients))
            self.dealing.resolve(process, lambda step: step < gone.gradients)
        else:
            self.dealing.resolve(process, lambda step: step < 0 or sequence.received(step))
        more = self.dealing.samples[rank] - samples
        if now is not sequence:  # another process has come meanwhile
            now.earlier += sequence.num_steps - steps
            now.earlier_samples += more
        if now.lost:
            now.samples = max(now.samples, self.dealing.samples[rank])
        elif now.total is not None:
            now.samples += more

    def losses(self) -> list[LostSamples]:
        """The samples of lost workers that had not finished their parts; none in rounds of which no loop knows that."""
        ranked = list(enumerate(self._sequences))
        if not self._deals:
            # A worker may have been lost, and have come back, before this plan of the run.
            known = [
                (rank, one)
                for rank, one in ranked
                if one.returned or (not one.is_through if one.lost else rank in self._left)
            ]
            missing = {rank: None if self._own_data else self._left.get(rank, 0) for rank, _ in known}
            return [
                LostSamples(rank, sequence.num_steps, missing[rank], is_exact=False)
                for rank, sequence in (known if self._own_data is not None else [])
            ]
        return [
            LostSamples(
                rank,
                sequence.num_steps,
                self.dealing.missing(rank, sequence.num_steps),
                is_exact=not (self._rounds or sequence.returned),
            )
            for rank, sequence in ranked
            if sequence.returned or (sequence.lost and not sequence.is_through)
        ]

    def brief(self) -> dict[int, tuple[int, int]]:
        """By rank, loops shorter than `BRIEF` of the longest loop: (minibatches, minibatches of the longest).

        Loops over loaders of `shard` have about the same length, unless one has come late, or another has taken
        something over.
        """
        if self.dealing.num_taken:
            return {}
        totals = {
            rank: max(0, (sequence.total or 0) - self._first)
            for rank, sequence in enumerate(self._sequences[: self._num_first])
            if not (sequence.lost or sequence.returned)
        }
        longest = max(totals.values(), default=0)
        return {rank: (total, longest) for rank, total in totals.items() if total < BRIEF * longest}

    def saved(self) -> list[Any]:
        """What is not in the model, for a checkpoint: see `Dealing.saved`."""
        return self.dealing.saved(self._made)

    def num_batches(self, epoch: int) -> int:
        """The number of minibatches of workers without data, except rounds without samples."""
        del epoch
        return sum(sequence.total or 0 for sequence in self._sequences)

    def samples(self, epoch: int) -> int:
        """The number of samples in them."""
        del epoch
        return sum(sequence.samples for sequence in self._sequences)

    @property
    def contributed(self) -> list[int]:
        """By rank, the samples of a worker without data."""
        return [sequence.samples for sequence in self._sequences]

    @property
    def num_samples(self) -> int:
        """The number of samples of workers without data, but for those whose gradients were refused."""
        return max(0, self.samples(0) - self._dropped)

    def missing(self, epoch: int) -> int:
        """The number of those minibatches without a receipt."""
        del epoch
        return sum(
            max(0, (sequence.total or 0) - sequence.low) for sequence in self._sequences if not sequence.lost
        )

    def complete(self, epoch: int) -> bool:
        """The same as `finished`, since there is one epoch."""
        del epoch
        return self.finished

    def reassigned(self, epoch: int) -> int:
        """The number of minibatches of lost workers that others have computed."""
        del epoch
        return self.dealing.num_taken
