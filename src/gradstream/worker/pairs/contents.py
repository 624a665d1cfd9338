"""`Contents`: whose steps a worker's parameters contain, in users' own loops that exchange in pairs.

    worker-0   worker-1   worker-2      how many first steps of 0, 1 and 2 the parameters of each contain
     4 · 2      · 5 2      · · 3
     4 5 2 ◀──▶ 4 5 2      · · 3        an exchange joins what both contain
     4 5 2      (lost)     · · 3        worker-0 tells the coordinator "5", worker-2 "0": the model has 5 of worker-1

Whatever parameters contain of a worker's process are its first steps, so one number says it. Of a lost process the
largest number of a living worker counts: its later minibatches go to others. A step that nobody else contains yet is
not shared: if its worker is lost, it is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from gradstream.transport.limits import worker_rank
from gradstream.wire import v1

MOST = 1 << 53
"""Most steps that a partner may name."""

Sender = tuple[str, int]
"""Name and incarnation of a worker's process."""


class Contents:
    """The numbers of one worker. No I/O: notices and partners' numbers come in, reports go out.

    Args:
        me: this process.
        report: sends a report to the coordinator; None in runs whose minibatches are planned, which need none of this.
    """

    def __init__(self, me: Sender, report: Callable[..., None] | None) -> None:
        self._me = me
        self._report = report
        self._steps: dict[Sender, int] = {}
        self._there: set[Sender] = set()  # members, and lost processes of which the coordinator asks
        self._gone: set[Sender] = set()  # of which it asks no more
        self._told: dict[Sender, int] = {}  # of lost processes; -1: nothing yet
        self._giver = ""

    # ---- exchanges ------------------------------------------------------------------------

    def given(self, steps: int) -> Sequence[v1.SenderPushes]:
        """What the parameters contain when this worker gives them, after so many steps of its own."""
        if self._report is None:
            return ()
        self._steps[self._me] = steps
        return [
            v1.SenderPushes(sender=name, incarnation=incarnation, gradients=count)
            for (name, incarnation), count in self._steps.items()
        ]

    @contextmanager
    def meeting(self, giver: str) -> Iterator[None]:
        """An exchange: until its end nobody knows what is taken of the giver, should it be lost meanwhile."""
        self._giver = giver
        try:
            yield
        finally:
            self._giver = ""
            self._tell()

    def taken(self, contain: Iterable[v1.SenderPushes]) -> None:
        """The parameters contain what another worker's contain, too."""
        self._join(((one.sender, one.incarnation), one.gradients) for one in contain)

    def shared(self) -> None:
        """Another worker's parameters contain all steps that were given last, or there is no other worker."""
        if self._report is not None:
            self._report(v1.BeatReport(shared=self._steps[self._me]), soon=False)

    def _join(self, counts: Iterable[tuple[Sender, int]]) -> None:
        for who, count in counts:
            if (
                who != self._me
                and who not in self._gone
                and worker_rank(who[0]) is not None
                and count <= MOST
            ):
                self._steps[who] = max(count, self._steps.get(who, 0))

    # ---- newcomers ------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """The same as numbers of 64 bits, for a worker that copies the parameters: rank, incarnation, steps, ..."""
        return [
            number
            for (name, incarnation), count in self._steps.items()
            for number in (worker_rank(name) or 0, incarnation - (incarnation >> 63 << 64), count)
        ]

    def copied(self, numbers: Sequence[int]) -> None:
        """Takes over the `numbers` of the worker whose parameters were copied."""
        self._join(
            ((f"worker-{rank}", incarnation % (1 << 64)), count)
            for rank, incarnation, count in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        )
        self._tell()

    # ---- lost workers ---------------------------------------------------------------------

    def hear(self, notice: v1.Notice) -> None:
        """Tells of lost processes that a notice names, and forgets those of which it asks no more."""
        fenced = {(one.sender, one.incarnation) for one in notice.fenced}
        there = fenced | {(node.name, node.incarnation) for node in notice.nodes if node.role == "worker"}
        self._gone |= self._there - there
        self._there = there
        self._steps = {who: count for who, count in self._steps.items() if who not in self._gone}
        self._told = {who: self._told.get(who, -1) for who in fenced}
        self._tell()

    def _tell(self) -> None:
        for who, told in self._told.items():
            count = self._steps.get(who, 0)
            if self._report is not None and count > told and who[0] != self._giver:
                self._told[who] = count
                name, incarnation = who
                lost = v1.SenderPushes(sender=name, incarnation=incarnation, gradients=count)
                self._report(v1.BeatReport(contained=lost))
