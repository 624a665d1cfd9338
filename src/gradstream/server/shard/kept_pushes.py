"""The minibatches of recent pushes, in case their sender dies before the coordinator has their receipts.

A push of a lost worker may be torn: applied by some chunks and not by others. Once the shard refuses the worker, and
the pushes that had arrived are applied, it reports for each push whether its chunks have it. The coordinator then lets
a living worker redo what is torn (`coordinator/orphaned_pushes.py`), for which the shard keeps the lost worker's
windows of sequence numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from gradstream.errors import RefusedError
from gradstream.server.shard.state import Sender, ShardState
from gradstream.wire import v1

MOST_KEPT = 4096
"""The most minibatches that a shard keeps of one sender. The oldest beyond that are forgotten; should the sender die,
others compute them again."""


@dataclass(slots=True)
class _Kept:
    pushes: dict[int, tuple[v1.Receipt, ...]] = field(default_factory=dict)  # by sequence number, in order
    count: int = 0

    def forget(self, sequence: int) -> None:
        self.count -= len(self.pushes.pop(sequence))


class KeptPushes:
    """What a shard keeps of each sender's pushes, and reports of lost ones. No I/O.

    Args:
        state: the state machine of the chunks.
        counts: whether to report how many gradients of a lost worker are in the chunks, where its pushes name no
            minibatches: a user's own loop does not know whose samples the others compute again.

    Attributes:
        on_report: called with the pushes of each lost worker, once.
    """

    def __init__(self, state: ShardState, *, counts: bool = False) -> None:
        self.on_report: Callable[[v1.SenderPushes], None] = lambda pushes: None
        self._state = state
        self._counts = counts
        self._named: set[Sender] = set()  # whose pushes name their minibatches
        self._kept: dict[Sender, _Kept] = {}
        self._substitutes: dict[Sender, dict[int, str]] = {}  # of lost workers, by number of a torn push
        self._reported: set[Sender] = set()

    @property
    def fenced(self) -> Collection[Sender]:
        """Lost workers whose pushes are not settled."""
        return self._substitutes.keys()

    def note(self, sender: Sender, push: v1.Push) -> None:
        """Keeps the minibatches of a push that begins, and frees those that the coordinator has receipts of."""
        if not push.batches:
            return
        self._named.add(sender)
        kept = self._kept.get(sender, _Kept())
        while kept.pushes and (oldest := next(iter(kept.pushes))) <= push.settled:
            kept.forget(oldest)
        self._add(sender, push.sequence, tuple(push.batches))

    def _add(self, sender: Sender, sequence: int, batches: tuple[v1.Receipt, ...]) -> None:
        kept = self._kept.setdefault(sender, _Kept())
        if sequence in kept.pushes:  # a retry
            return
        kept.pushes[sequence] = batches
        kept.count += len(batches)
        while kept.count > MOST_KEPT:
            kept.forget(next(iter(kept.pushes)))

    def backup(self) -> list[v1.SenderPushes]:
        """What the shard keeps of each sender, for `restore`."""
        return [
            v1.SenderPushes(
                sender=name,
                incarnation=incarnation,
                pushes=[v1.KeptPush(sequence=number, batches=names) for number, names in kept.pushes.items()],
            )
            for (name, incarnation), kept in self._kept.items()
        ]

    def restore(self, kept: Iterable[v1.SenderPushes]) -> None:
        """Adds what an earlier process of the shard has kept."""
        for one in kept:
            for push in one.pushes:
                self._add((one.sender, one.incarnation), push.sequence, tuple(push.batches))

    def keep(self, members: Collection[Sender], fenced: Iterable[v1.Fenced]) -> None:
        """Frees what belongs to nobody in the run, and to no lost worker that the coordinator names."""
        self._substitutes = {
            (one.sender, one.incarnation): {redo.sequence: redo.substitute for redo in one.redos}
            for one in fenced
        }
        self._reported &= self._substitutes.keys()
        stay = {*members, *self._substitutes}
        self._kept = {sender: kept for sender, kept in self._kept.items() if sender in stay}

    def report(self) -> None:
        """Reports the lost workers of which no push is on its way into a chunk any more."""
        for sender in self._substitutes:
            if sender not in self._reported and self._state.withdraw(sender):
                self._reported.add(sender)
                self.on_report(self._pushes_of(sender))
        for sender, gradients in self._state.departed().items():
            if self._counts and sender not in self._named:
                name, incarnation = sender
                chunks = len(self._state.chunks)
                self.on_report(
                    v1.SenderPushes(sender=name, incarnation=incarnation, chunks=chunks, gradients=gradients)
                )
            self._named.discard(sender)

    def _pushes_of(self, sender: Sender) -> v1.SenderPushes:
        kept, state = self._kept.pop(sender, _Kept()), self._state
        pushes = [
            v1.KeptPush(sequence=sequence, batches=names, applied=state.num_applied(sender, sequence))
            for sequence, names in kept.pushes.items()
        ]
        name, incarnation = sender
        return v1.SenderPushes(sender=name, incarnation=incarnation, chunks=len(state.chunks), pushes=pushes)

    def check_substitute(self, opened: v1.Open, push: v1.Push) -> None:
        """Refuses a push for a lost worker which the coordinator has not asked its sender for, as far as is known here.

        Raises:
            RefusedError: STALE_EPOCH, so that the sender tries again: it may have been told before this shard.
        """
        name, incarnation = push.behalf.sender, push.behalf.incarnation
        substitute = self._substitutes.get((name, incarnation), {}).get(push.sequence)
        if substitute != opened.sender:
            text = f"{opened.sender} pushes number {push.sequence} for {name[:64]}"
            expected = f"from {substitute}" if substitute else "no such push"
            raise RefusedError("shard", "STALE_EPOCH", f"{text}; expected {expected}")
