"""Workers that exchange in pairs die: others tell whose steps they have, and what nobody has is made again."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

import pytest

from gradstream.data.base import BatchRef
from gradstream.data.dealing import Epoch, LoopBatch
from gradstream.data.open_ledger import MORE_ROUNDS, OpenLedger
from gradstream.wire import v1
from gradstream.worker.pairs.contents import Contents

EPOCHS, TOTAL = 2, 24


class Worker:
    """A loop in pairs, as far as the ledger and the others hear of it.

    Attributes:
        has: what its parameters contain: (minibatch, incarnation, step).
        reports: on their way to the ledger.
        shared: steps that it has told to be shared.
    """

    def __init__(self, ledger: OpenLedger, rank: int, incarnation: int, per_step: int) -> None:
        self.ledger, self.rank, self.incarnation, self.per_step = ledger, rank, incarnation, per_step
        self.has: set[tuple[LoopBatch, int, int]] = set()
        self.reports = deque[Callable[[], object]]()
        self.contents = Contents((f"worker-{rank}", incarnation), self._report)
        self.shared = self.step = self.asked = self.epoch = 0
        self.is_ready = self.is_over = False

    def _report(self, report: v1.BeatReport, *, soon: bool = True) -> None:
        one, ledger, rank = report.contained, self.ledger, self.rank
        if report.HasField("contained"):
            lost = int(one.sender.partition("-")[2]), one.incarnation
            self.reports.append(lambda: ledger.told(lost, f"worker-{rank}", one.gradients))
        else:
            self.shared = report.shared
            self.reports.append(lambda: ledger.shared(rank, report.shared))

    def copy(self, other: Worker) -> None:
        self.has, self.step, self.is_ready = set(other.has), other.step, True
        self.contents.copied(other.contents.numbers())

    def round(self) -> None:
        """Makes a step; one without minibatches, if the loop is through."""
        dealing, number, rank, taken = self.ledger.dealing, self.step, self.rank, list[LoopBatch]()
        while self.epoch < EPOCHS and len(taken) < self.per_step:
            self.asked += 1
            places = dealing.deal(rank, (self.asked, 1), Epoch(0, self.epoch), TOTAL, 0)
            if places and places[0].number < TOTAL:
                dealing.use(rank, places[0], number, 1)
                taken += places
            else:
                dealing.end_epoch(Epoch(0, self.epoch), TOTAL)
                self.epoch += not places
        self.has |= {(place, self.incarnation, number) for place in taken}
        self.step += 1
        self.reports.append(lambda: self.ledger.receipt(BatchRef(0, rank, number), rank))
        self.contents.given(self.step)

    def take(self, other: Worker) -> None:
        """Takes the parameters of another one."""
        self.contents.taken(other.contents.given(other.step))
        self.has |= other.has
        other.contents.shared()


class Run:
    """A run by a plan that is drawn.

    Attributes:
        living: by rank.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.workers, self.incarnations = self.rng.randint(2, 5), 100
        self.ledger = OpenLedger(self.workers, rounds=True, told_by="workers")
        self.per_step = self.rng.randint(1, 2)
        self.living: dict[int, Worker] = {}
        for rank in range(self.workers):
            self.come(rank)
            self.living[rank].is_ready = True

    def come(self, rank: int) -> None:
        self.incarnations += 1
        self.living[rank] = Worker(self.ledger, rank, self.incarnations, self.per_step)

    @property
    def ready(self) -> list[Worker]:
        return [one for one in self.living.values() if one.is_ready]

    def act(self) -> None:
        """Something happens: a step, an exchange, a message, a death, a newcomer."""
        ready, kind, rank = self.ready, self.rng.randrange(13), self.rng.randrange(self.workers + 1)
        one = self.rng.choice(ready)
        other = self.rng.choice([worker for worker in ready if worker is not one] or [one])
        if kind < 3:
            one.round()
        elif kind < 7 and one is not other:
            one.take(other)
            if self.rng.random() < 0.7:  # else that half has failed, or is given to another one
                other.take(one)
        elif kind < 9:
            self.deliver(self.rng.choice(list(self.living.values())))
        elif kind in (9, 10):
            both = [
                worker for worker in self.living.values() if worker.rank in (rank, self.rng.choice([rank, 0]))
            ]
            if self.may_die(both):
                self.die(both)
        elif kind > 10 and rank not in self.living and all(worker.epoch < EPOCHS for worker in ready):
            self.ledger.come(rank)
            self.come(rank)
        elif kind > 10 and rank in self.living and not self.living[rank].is_ready:
            self.living[rank].copy(one)

    def may_die(self, both: list[Worker]) -> bool:
        """Only while nothing else is lost with these: what they alone have is their own, and not told as shared."""
        others = [worker.has for worker in self.ready if worker not in both]
        alone = set[tuple[LoopBatch, int, int]]().union(*(one.has for one in both)).difference(*others)
        shared = {one.incarnation: one.shared for one in both}
        own = all(by in shared and step >= shared[by] for _, by, step in alone)
        return own and bool(others) and not self.ledger.gone

    def die(self, both: list[Worker]) -> None:
        """They die at the same time, as on one machine."""
        for one in both:
            del self.living[one.rank]
            for _ in range(self.rng.randint(0, len(one.reports))):
                one.reports.popleft()()
        left = [*both, *self.living.values()]
        for one in both:
            left.remove(one)
            self.ledger.teller_lost(f"worker-{one.rank}")
            self.ledger.lost(one.rank, one.incarnation, [f"worker-{other.rank}" for other in left])

    def deliver(self, one: Worker) -> None:
        """A worker hears of who is there, and what it has reported arrives."""
        nodes = [
            v1.Node(name=f"worker-{rank}", role="worker", rank=rank, incarnation=worker.incarnation)
            for rank, worker in self.living.items()
        ]
        fenced = [v1.Fenced(sender=f"worker-{rank}", incarnation=number) for rank, number in self.ledger.gone]
        one.contents.hear(v1.Notice(nodes=nodes, fenced=fenced))
        while one.reports:
            one.reports.popleft()()

    def end(self) -> None:
        """All loops go to their ends, and meet until the run is over."""
        for one in self.living.values():
            self.deliver(one)
            if not one.is_ready:
                one.copy(self.ready[0])
        ends: dict[int, int] = {}
        while not all(one.is_over for one in self.living.values()):
            for rank, one in self.living.items():
                one.round()
                if one.epoch == EPOCHS:
                    ends.setdefault(rank, one.step)
                    one.is_over = bool(self.ledger.ended(rank, ends[rank], 0, one.step))
            pair = self.rng.sample(self.ready, 2) if len(self.living) > 1 else self.ready * 2
            pair[0].take(pair[1])
            pair[1].take(pair[0])
            for one in self.living.values():
                self.deliver(one)


def outcome(seed: int) -> tuple[int, int]:
    """The numbers of minibatches that the model has twice, and that are lost without being told."""
    run = Run(seed)
    for _ in range(150):
        run.act()
    run.end()
    assert run.ledger.finished
    uses = Counter(
        place for place, _, _ in set[tuple[LoopBatch, int, int]]().union(*(one.has for one in run.ready))
    )
    missing = [loss.missing for loss in run.ledger.losses()]
    lost = 0 if None in missing else EPOCHS * TOTAL - len(uses) - sum(one or 0 for one in missing)
    return uses.total() - len(uses), lost


def test_each_minibatch_is_in_somebodys_parameters_once_or_told_as_missing() -> None:
    assert {outcome(seed) for seed in range(500)} == {(0, 0)}


def no_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpenLedger, "told", lambda ledger, lost, who, count: TOLD(ledger, lost, who, 0))


def receipts_suffice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpenLedger, "_received", OpenLedger._made)


def newcomers_know_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Contents, "copied", lambda contents, numbers: None)


def partners_alone_count(patch: pytest.MonkeyPatch) -> None:
    own = Contents.given
    patch.setattr(
        Contents, "given", lambda one, steps: [told for told in own(one, steps) if told.sender == one._me[0]]
    )


TOLD = OpenLedger.told


@pytest.mark.parametrize(
    "plant", [no_answers, receipts_suffice, newcomers_know_nothing, partners_alone_count]
)
def test_a_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(outcome(seed) != (0, 0) for seed in range(500))


def test_what_a_lost_partner_is_giving_is_told_at_the_end_of_the_exchange() -> None:
    """Until then nobody knows; and what others give later is told once more."""
    told: list[tuple[str, int]] = []
    contents = Contents(
        ("worker-0", 1),
        lambda report, **_: told.append((report.contained.sender, report.contained.gradients)),
    )
    lost = [v1.Fenced(sender=f"worker-{rank}", incarnation=7) for rank in (1, 2)]
    with contents.meeting("worker-1"):
        contents.hear(v1.Notice(fenced=lost))
        assert told == [("worker-2", 0)]
        contents.taken([v1.SenderPushes(sender="worker-1", incarnation=7, gradients=5)])
    assert told == [("worker-2", 0), ("worker-1", 5)]
    with contents.meeting("worker-3"):
        contents.taken([v1.SenderPushes(sender="worker-2", incarnation=7, gradients=3)])
    assert told[2:] == [("worker-2", 3)]
    contents.hear(v1.Notice())
    contents.taken(
        [v1.SenderPushes(sender="worker-2", incarnation=7, gradients=4)]
    )  # by one that has not heard
    assert told[3:] == [] and contents.given(1) == [
        v1.SenderPushes(sender="worker-0", incarnation=1, gradients=1)
    ]


def test_workers_that_cannot_meet_end_all_the_same() -> None:
    ledger = OpenLedger(2, rounds=True, told_by="workers")
    for rank in (0, 1):
        ledger.receipt(BatchRef(0, rank, 0), rank)
        ledger.ended(rank, 1, 4, 1)
    assert ledger.ended(0, 1, 4, 2) is False
    assert ledger.ended(0, 1, 4, 1 + MORE_ROUNDS) is True
