"""A worker of a user's own loop dies: the others take over what it had left, or the run says what is lost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradstream as gs
from gradstream.coordinator.lifecycle import Lifecycle, LossTolerance
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.coordinator.nodes import Nodes
from gradstream.coordinator.own_loops import OwnLoops
from gradstream.coordinator.progress import SampleProgress
from gradstream.coordinator.snapshot_rounds import SnapshotRounds
from gradstream.data.base import BatchRef
from gradstream.data.dealing import Epoch, LoopBatch
from gradstream.data.open_ledger import OpenLedger
from gradstream.job.files import load_job
from gradstream.server.aggregation import EveryPush, PushHeader
from gradstream.server.shard.pushes import KeptPushes
from gradstream.server.shard.state import Parked, ShardState
from gradstream.session.bridge import LoopBridge
from gradstream.session.loaders import part_of
from gradstream.session.loaders_part import LoaderPart, Takeover
from gradstream.session.roster import Roster
from gradstream.telemetry.events import StartedEvent
from gradstream.testing.sessions import loop_in_threads
from gradstream.wire import v1
from gradstream.worker.loop import LoopContext

ROOT = Path(__file__).resolve().parents[2]
SHARDS = ("shard-0", "shard-1")

# ---- the ledger alone -------------------------------------------------------------------


class Loop:
    """A worker's loop, as far as the ledger hears of it: its steps, of which some are on their way.

    Args:
        sizes: by epoch, the number of minibatches that the sampler says, and how many there are.
        per_step: minibatches behind a step.
        reach: how many epochs back it can take something over.
        waits: it waits in its last epoch.
    """

    def __init__(
        self,
        ledger: OpenLedger,
        rank: int,
        sizes: list[tuple[int, int]],
        per_step: int,
        reach: int,
        *,
        waits: bool,
    ) -> None:
        self.ledger, self.rank, self.sizes, self.per_step = ledger, rank, sizes, per_step
        self.reach, self.waits = reach, waits
        self.steps: list[list[LoopBatch]] = []
        self.heard = self.asked = 0  # of its steps, how many have receipts; questions
        self.ended = self.is_blocked = self.is_lost = False
        self._script = self._run()

    def advance(self) -> bool:
        """One more step; False where there is none now."""
        return next(self._script, None) is not None and not self.is_blocked

    def hear(self) -> bool:
        if self.heard == len(self.steps):
            return False
        self.heard += self.ledger.receipt(BatchRef(0, self.rank, self.heard), self.rank)
        return True

    def _run(self) -> Iterator[bool]:
        for number in range(len(self.sizes)):
            yield from self._epoch(Epoch(0, number))
        self.ended = True
        self.ledger.ended(self.rank, len(self.steps), 0, len(self.steps))

    def _epoch(self, epoch: Epoch) -> Iterator[bool]:
        dealing, (said, total), taken = self.ledger.dealing, self.sizes[epoch.number], list[LoopBatch]()
        oldest, last = max(0, epoch.number - self.reach), self.waits and epoch.number == len(self.sizes) - 1
        while True:
            self.asked += 1
            places = dealing.deal(self.rank, (self.asked, 1), epoch, said, oldest)
            again = dealing.deal(self.rank, (self.asked, 1), epoch, said, oldest)
            assert list(places) == list(again) or not places
            if places and places[0].number >= self.sizes[places[0].epoch.number][1]:
                dealing.end_epoch(epoch, total)
            elif places:
                self.is_blocked = False
                taken += places
                dealing.use(self.rank, places[0], len(self.steps), 1)
                if len(taken) == self.per_step:
                    self.steps.append(taken)
                    taken = []
                yield True
            elif last and dealing.waits(self.rank, epoch, oldest):
                self.is_blocked = True
                yield True
            else:
                break
        self.is_blocked = False
        dealing.end_epoch(epoch, total)
        if taken:
            self.steps.append(taken)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 1)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_each_minibatch_is_in_the_model_once_or_told_as_missing(
    workers: int,
    drawn: list[tuple[int, int]],
    per_step: int,
    reach: int,
    waits: bool,
    reports: bool,
    data: st.DataObject,
) -> None:
    """Workers die, come back and come in addition; shards have more of a lost one than it could report."""
    ledger = OpenLedger(workers, rounds=False, told_by="shards" if reports else "")
    sizes = [(said, max(1, said + more)) for said, more in drawn]
    make = partial(Loop, ledger, sizes=sizes, per_step=per_step, reach=reach, waits=waits)
    living = {rank: make(rank=rank) for rank in range(workers)}
    dead: list[Loop] = []
    silent: list[Loop] = []  # of whom the shards have not told yet
    for kind, rank in data.draw(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5)), max_size=140)):
        if kind == 0 and rank in living and len(living) > 1:
            dead.append(loop := living.pop(rank))
            ledger.lost(rank, id(loop), SHARDS)
            silent += [loop] if reports else []
        elif kind == 1 and rank not in living and not any(loop.ended for loop in living.values()):
            ledger.come(rank)
            living[rank] = make(rank=rank)
        elif kind == 2 and silent:
            report(ledger, silent.pop(), data)
        elif rank in living:
            living[rank].advance() if kind < 8 else living[rank].hear()
    for loop in silent:
        report(ledger, loop, data)
    for _ in range(2):  # the end of one loop may be what another one waits for
        while sum(loop.advance() or loop.hear() for loop in living.values()):
            pass
    assert all(loop.ended for loop in living.values()) and ledger.finished
    everybody = [*dead, *living.values()]
    done = Counter(place for loop in everybody for step in loop.steps[: loop.heard] for place in step)
    planned = {LoopBatch(Epoch(0, epoch), k) for epoch, (_, total) in enumerate(sizes) for k in range(total)}
    assert set(done) <= planned and set(done.values()) <= {1}
    missing = [loss.missing for loss in ledger.losses()]
    if dead and None not in missing:
        assert sum(one or 0 for one in missing) == len(planned - set(done))
    elif not dead:
        assert not missing and set(done) == planned


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 1)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=60),
)
def test_a_resumed_run_goes_through_what_was_left(
    before: int, after: int, drawn: list[tuple[int, int]], per_step: int, actions: list[tuple[int, int]]
) -> None:
    """At a checkpoint all steps that were made are in the model; then there are as many or other workers."""
    sizes, done = [(said, max(1, said + more)) for said, more in drawn], Counter[LoopBatch]()
    ledgers = OpenLedger(before, rounds=False), OpenLedger(after, rounds=False)
    for ledger, workers in zip(ledgers, (before, after), strict=True):
        make = partial(Loop, ledger, sizes=sizes, per_step=per_step, reach=3, waits=False)
        loops = [make(rank=rank) for rank in range(workers)]
        for kind, rank in actions if ledger is ledgers[0] else ():
            if kind == 0 and rank < workers and any(not loop.is_lost for loop in loops if loop.rank != rank):
                ledger.lost(rank)
                loops[rank].is_lost = True
            elif rank < workers and not loops[rank].is_lost:
                loops[rank].advance()
        while ledger is ledgers[1] and sum(loop.advance() or loop.hear() for loop in loops):
            pass
        while sum(loop.hear() for loop in loops if not loop.is_lost):
            pass
        done.update(place for loop in loops for step in loop.steps[: loop.heard] for place in step)
        if ledger is ledgers[0]:
            ledgers[1].dealing.load(json.loads(json.dumps(ledger.saved())))
    planned = {LoopBatch(Epoch(0, epoch), k) for epoch, (_, total) in enumerate(sizes) for k in range(total)}
    assert set(done.values()) <= {1} and set(done) <= planned
    if not any(more > 0 for _, more in drawn):
        assert set(done) == planned


def report(ledger: OpenLedger, loop: Loop, data: st.DataObject) -> None:
    """Two shards say how much they have of a lost worker; what both have is in the model."""
    has = [data.draw(st.integers(loop.heard, len(loop.steps))) for _ in range(2)]
    for shard, count in zip(SHARDS, has, strict=True):
        ledger.told((loop.rank, id(loop)), shard, count)
    loop.heard = min(has)


def dealt(ledger: OpenLedger, rank: int, number: int, wanted: int = 9, total: int = 8) -> list[int]:
    places = ledger.dealing.deal(rank, (number, wanted), Epoch(0, 0), total, 0)
    return [place.number for place in places]


def test_workers_get_equal_parts_and_what_a_lost_one_has_left() -> None:
    ledger = OpenLedger(2, rounds=False)
    assert dealt(ledger, 1, 1, 2) == [1, 3]
    ledger.dealing.use(1, LoopBatch(Epoch(0, 0), 1), 0, 4)
    ledger.receipt(BatchRef(0, 1, 0), 1)
    assert dealt(ledger, 0, 1, 4) == [0, 2, 4, 6]
    ledger.lost(1)
    assert [loss.missing for loss in ledger.losses()] == [3]
    assert dealt(ledger, 0, 2, 4) == [3, 5, 7, 8]  # nobody knows yet that there is no 8
    ledger.dealing.end_epoch(Epoch(0, 0), 8)
    assert dealt(ledger, 0, 3) == []
    assert [(loss.steps, loss.missing) for loss in ledger.losses()] == [(1, 3)]  # without receipts
    for step, number in enumerate([0, 2, 4, 6, 3, 5, 7]):
        ledger.dealing.use(0, LoopBatch(Epoch(0, 0), number), step, 4)
        ledger.receipt(BatchRef(0, 0, step), 0)
    assert [(loss.steps, loss.missing) for loss in ledger.losses()] == [(1, 0)]
    assert ledger.reassigned(0) == 3
    assert ledger.num_samples == 4  # of the lost worker; the other one tells at its end


def test_who_comes_gets_a_part_of_what_is_left() -> None:
    ledger = OpenLedger(2, rounds=False)
    assert dealt(ledger, 0, 1, 1, 24) == [0]
    ledger.come(2)
    assert dealt(ledger, 2, 1, 99, 24) == [18, 20, 22, 19, 21, 23]
    assert dealt(ledger, 0, 2, 99, 24)[:8] == [2, 4, 6, 8, 10, 12, 14, 16]


def test_what_shards_may_have_is_dealt_when_they_have_told() -> None:
    """A worker that was stopped before it died has pushed more than it could report."""
    ledger = OpenLedger(2, rounds=False, told_by="shards")
    for step, number in enumerate(dealt(ledger, 1, 1, 4)):
        ledger.dealing.use(1, LoopBatch(Epoch(0, 0), number), step, 1)
    ledger.lost(1, 7, SHARDS)
    assert dealt(ledger, 0, 1, 5) == [0, 2, 4, 6, 8]
    assert ledger.dealing.waits(0, Epoch(0, 0), 0)
    ledger.told((1, 7), "shard-0", 3)
    assert dealt(ledger, 0, 2, 1) == [9]
    ledger.told((1, 7), "shard-1", 2)  # a push that was torn: not all of it is in the model
    assert dealt(ledger, 0, 3, 2) == [5, 7]
    assert [(loss.steps, loss.missing) for loss in ledger.losses()] == [(2, 2)]


def test_a_loop_that_breaks_off_leaves_nothing_to_others() -> None:
    ledger = OpenLedger(2, rounds=False)
    first, *_ = dealt(ledger, 1, 1, 3)
    ledger.dealing.drop(1, LoopBatch(Epoch(0, 0), first))
    ledger.ended(1, 0, 0, 0)
    assert dealt(ledger, 0, 1)[:4] == [0, 2, 4, 6]
    assert ledger.losses() == []


def test_a_loop_that_ends_leaves_epochs_that_it_never_began_to_the_others() -> None:
    """Whether the others have begun them before it ended, or begin them later."""
    ledger = OpenLedger(2, rounds=False)
    assert dealt(ledger, 0, 1) == [0, 2, 4, 6]
    ledger.ended(1, 0, 0, 0)  # it never asked for anything
    assert dealt(ledger, 0, 2, 5) == [1, 3, 5, 7, 8]
    ledger.dealing.end_epoch(Epoch(0, 0), 8)
    assert dealt(ledger, 0, 3) == []


@pytest.mark.parametrize("planted", ["own data", "unclear", "nothing dealt"])
def test_what_cannot_be_told_is_unknown(planted: str) -> None:
    ledger = OpenLedger(2, rounds=False)
    if planted != "nothing dealt":
        dealt(ledger, 0, 1)
    if planted == "unclear":
        ledger.dealing.use(1, LoopBatch(Epoch(0, 0), dealt(ledger, 1, 1)[0]), 0, 1)
        ledger.dealing.is_unclear(1)
    ledger.receipt(BatchRef(0, 1, 0), 1)
    ledger.lost(1)
    assert [loss.missing for loss in ledger.losses()] == [None]


def test_shards_count_the_gradients_of_who_has_left() -> None:
    """Those that every chunk has, once nothing of the sender is on its way; initial parameters are no gradient."""
    state = ShardState([0, 1], EveryPush())
    reports: list[v1.SenderPushes] = []
    kept = KeptPushes(state)
    kept.on_report = reports.append

    def push(chunk: int, sequence: int, *, assign: bool = False) -> None:
        header = PushHeader("worker-1", 1, 7, sequence, 4, num_gradients=1 if assign else 2)
        state.push(chunk, Parked(header, object(), assign))
        state.applied(chunk)

    for chunk in (0, 1):
        push(chunk, 1, assign=True)
        push(chunk, 2)
    push(0, 3)
    lost, never = v1.Fenced(sender="worker-1", incarnation=7), v1.Fenced(sender="worker-2", incarnation=8)
    kept.keep({("worker-0", 1)}, [lost, never])
    state.keep_senders({("worker-0", 1)}, kept.fenced)
    kept.report()
    told = [(one.sender, one.incarnation, one.gradients) for one in reports]
    assert told == [("worker-1", 7, 2), ("worker-2", 8, 0)]
    kept.report()
    assert len(reports) == 2
    empty = KeptPushes(ShardState([], EveryPush()))
    empty.on_report = reports.append
    empty.keep([], [lost])
    empty.report()
    assert reports[-1].gradients == 1 << 53  # nothing is lacking there


@pytest.mark.parametrize(
    "said",
    [
        v1.Draw(total=1 << 60),
        v1.Draw(wanted=1 << 20),
        v1.Draw(epoch=1, oldest=2),
        v1.Draw(uses=[v1.Use(place=1, step=1 << 60)]),
        v1.Draw(uses=[v1.Use(place=1, step=-(1 << 60))]),
        v1.Draw(uses=[v1.Use(place=1 << 60)]),
    ],
)
def test_what_cannot_be_is_refused(said: v1.Draw) -> None:
    (loops, worker), good = own_loops(), v1.Draw(total=4, wanted=1, uses=[v1.Use(place=3, step=-3)])
    assert loops.on_request(worker, good, 0.0) == []
    with pytest.raises(gs.errors.RefusedError, match="worker-0"):
        loops.on_request(worker, said, 0.0)


def own_loops(ledger: OpenLedger | None = None) -> tuple[OwnLoops, v1.Node]:
    ledger, nodes = ledger or OpenLedger(2, rounds=False), Nodes(2, 0)
    progress, started = SampleProgress(ledger, None, None), StartedEvent(
        job="j", workers=2, servers=0, strategy="allreduce", optimizer="sgd", num_parameters=0, num_samples=None,
        total_steps=0,
    )  # fmt: skip
    snapshots = SnapshotRounds(progress, nodes, None, OrphanedPushes(progress, nodes, redoes=False))
    life = Lifecycle(started, nodes, progress, snapshots, LossTolerance(survives_worker_loss=True))
    return OwnLoops(ledger, life), v1.Node(name="worker-0", role="worker")


def test_nobody_waits_for_workers_that_a_snapshot_has_paused() -> None:
    """They may have minibatches, but take no step before whoever waits has come to the end of its own."""
    ledger = OpenLedger(2, rounds=False)
    loops, worker = own_loops(ledger)
    for number in range(4):
        assert len(dealt(ledger, 0, number + 1, 1)) == 1
    asked = v1.Draw(number=9, total=8, wanted=1, last=True)
    ledger.dealing.end_epoch(Epoch(0, 0), 8)
    assert loops.answer(worker, asked, 0.0) is None
    loops._life._snapshots.current = SimpleNamespace(pauses_workers=True)  # type: ignore[assignment]
    assert loops.answer(worker, asked, 0.0) == v1.Drawn()


def test_a_worker_that_was_done_leaves_nothing() -> None:
    ledger = OpenLedger(2, rounds=False)
    ledger.receipt(BatchRef(0, 1, 0), 1)
    ledger.ended(1, 1, 8, 1)
    ledger.lost(1)
    assert ledger.losses() == []


# ---- loaders ----------------------------------------------------------------------------


class Reached:
    """Stands for the bridge of worker 0, and the coordinator behind it."""

    def __init__(self, workers: int = 2) -> None:
        self.ledger = OpenLedger(workers, rounds=False)
        self.counts = SimpleNamespace(batches=0, steps=0)
        self.takeover = Takeover(lambda: self.counts.batches, Roster(workers), num_at_first=workers)
        self.takeover.bridge = self  # type: ignore[assignment]
        self.loops = own_loops(self.ledger)

    def loader(self, data: DataLoader[Any], note: Callable[[Any], None] = lambda _: None, **more: Any) -> Any:
        return part_of(data, LoaderPart(0, 2, 7, more.pop("split", False), note, takeover=self.takeover))

    def spawn(self, work: Callable[[Any], Any]) -> Any:
        return asyncio.run(work(SimpleNamespace(endings=self)))

    def result(self, asked: Any) -> Any:
        return asked

    async def draw(self, request: v1.Draw) -> tuple[list[LoopBatch], int]:
        loops, worker = self.loops
        loops.on_request(worker, request, 0.0)
        answer = loops.answer(worker, request, 0.0)
        assert isinstance(answer, v1.Drawn)
        return [LoopBatch(Epoch(request.loader, one.epoch), one.place) for one in answer.places], answer.rest

    def step(self) -> None:
        self.takeover.report()
        self.ledger.receipt(BatchRef(0, 0, self.counts.batches), 0)
        self.counts.batches += 1


class Doubling(DataLoader[Any]):
    """A user's own loader, which changes what it gives."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch * 2 for batch in super().__iter__())


def numbers(count: int) -> Any:
    """A data set: 0.0, 1.0, ..."""
    return list(torch.arange(float(count)))


@pytest.mark.parametrize(
    ("make", "split", "per_step", "factor"),
    [
        (lambda: DataLoader(numbers(24), 2, shuffle=True), False, 1, 1),
        (lambda: DataLoader(numbers(24), 2, shuffle=True), False, 2, 1),
        (lambda: DataLoader(numbers(24), 4, shuffle=True), True, 2, 1),
        (lambda: DataLoader(numbers(25), 4), True, 1, 1),  # one piece of the last minibatch is empty
        (lambda: DataLoader(numbers(24), batch_size=None, shuffle=True), False, 3, 1),
        (lambda: DataLoader(numbers(23), 2, num_workers=1, generator=torch.Generator()), False, 1, 1),
        (lambda: Doubling(numbers(24), 2), False, 1, 2),
    ],
)
def test_a_loader_gives_what_a_lost_worker_had_left(
    make: Callable[[], DataLoader[Any]], split: bool, per_step: int, factor: int
) -> None:
    reached, noted, seen = Reached(), list[Any](), Counter[int]()
    loader = reached.loader(make(), noted.append, split=split)
    wanted = range(0, factor * len(loader.dataset), factor)
    for epoch in range(3):
        for number, batch in enumerate(loader, 1):
            seen.update(int(one) for one in batch.reshape(-1))
            if number % per_step == 0:
                reached.step()
            if (epoch, number) == (1, 2):
                reached.ledger.lost(1)
        reached.step()
        if epoch == 0:
            assert set(seen.values()) == {1} and set(seen) < set(wanted)
            assert loader.batch_size is None or len(seen) == sum(noted)
        else:  # the lost worker has never begun, so this one has taken over its part of the first epoch too
            assert seen == dict.fromkeys(wanted, epoch + 1)
    assert [loss.missing for loss in reached.ledger.losses()] == [0]


def test_a_newcomer_knows_how_many_minibatches_it_gets() -> None:
    """So that a loop that accumulates makes a step with its last ones: `i + 1 == len(loader)`."""
    reached = Reached()
    assert len(dealt(reached.ledger, 1, 1, 3, 12)) == 3
    reached.ledger.lost(0)
    reached.ledger.come(0)
    loader, lengths = reached.loader(DataLoader(numbers(24), 2)), list[int]()
    assert len(loader) == 6  # before its loop: what the others were told, for a schedule made of it
    for _ in loader:
        lengths.append(len(loader))
        reached.step()
    assert lengths[-1] == len(lengths) < 12


@pytest.mark.parametrize("processes", [0, 1])
def test_what_a_resumed_loop_uses_in_a_step_that_changes_nothing_comes_again(processes: int) -> None:
    reached, again = Reached(), [True]
    reached.takeover.is_again = lambda: again[0]
    loader = reached.loader(DataLoader(numbers(24), 2, num_workers=processes))
    used = list[int]()
    for number, batch in enumerate(loader, 1):
        if not again[0]:
            used += [int(one) for one in batch]
            reached.step()
        again[0] = again[0] and number < 2  # two minibatches are behind the step
    reached.step()
    assert sorted(used) == [4 * number + more for number in range(6) for more in (0, 1)]


def test_a_validation_draws_nothing() -> None:
    reached = Reached()
    loader = reached.loader(DataLoader(numbers(24), 2))
    with torch.no_grad():
        assert len(list(loader)) == 6
    assert reached.ledger.dealing._pools == {}


def test_what_a_loop_takes_and_does_not_use_makes_its_losses_unknown() -> None:
    reached = Reached()
    loader = reached.loader(DataLoader(numbers(24), 2))
    for _ in loader:
        break
    for _ in loader:
        reached.step()
    assert reached.takeover.own_data


def test_who_asks_hears_when_the_worker_has_ended() -> None:
    class Silent:
        """A coordinator that does not answer."""

        async def draw(self, _: v1.Draw) -> None:
            asked.set()
            await asyncio.Event().wait()

    asked, bridge = threading.Event(), LoopBridge(None)

    def end() -> None:
        asked.wait()
        bridge.over(gs.errors.PeerLostError("coordinator", "gone"))

    async def begin() -> None:
        bridge.begin(LoopContext(None, Silent(), None, None, None))  # type: ignore[arg-type]

    loop, others = asyncio.new_event_loop(), [threading.Thread(target=end)]
    loop.run_until_complete(begin())
    others.append(threading.Thread(target=loop.run_forever))
    for thread in others:
        thread.start()
    try:
        with pytest.raises(gs.errors.PeerLostError, match="coordinator"):
            bridge.ask(lambda context: context.endings.draw(v1.Draw()))
    finally:
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)
        loop.call_soon_threadsafe(loop.stop)
        for thread in others:
            thread.join()
        loop.close()


def test_a_run_without_deaths_is_as_without_takeover() -> None:
    data = TensorDataset(torch.arange(22.0).reshape(-1, 1))

    def loop(session: gs.Session) -> list[list[int]]:
        model = nn.Linear(1, 1)
        own = torch.Generator().manual_seed(0)  # the global one is shared by the threads of both loops
        loader = session.shard(DataLoader(data, batch_size=2, shuffle=True, generator=own))
        model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        seen: list[list[int]] = []
        for _ in range(2):
            seen.append([])
            for (batch,) in loader:
                seen[-1] += [int(one) for one in batch.flatten()]
                model(batch).sum().backward()
                optimizer.step()
        return seen

    both = loop_in_threads(loop, strategy="downpour")
    for epoch in range(2):
        assert sorted(both[0][epoch] + both[1][epoch]) == list(range(22))


def test_a_checkpoint_without_a_lost_worker_is_no_place_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "own.py").write_text("import gradstream\ngradstream.join('downpour', workers=3)\n")
    found = "checkpoints/7", SimpleNamespace(workers=3, steps={"worker-0": 3, "worker-2": 4})
    module, job = import_module("gradstream._resume"), load_job(str(tmp_path / "own.py"))
    monkeypatch.setattr(module, "to_resume", lambda *_, **__: found)
    monkeypatch.setattr(module, "_check_unchanged", lambda *_, **__: None)  # there is no run of before
    with pytest.raises(gs.errors.ConfigError, match="when 1 of 3 workers were lost"):
        gs.resume(tmp_path, job=job)
    monkeypatch.setattr(module.Resume, "at", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # it goes on
        gs.resume(tmp_path, job=job, allow_lost=True)


# ---- processes --------------------------------------------------------------------------

SCRIPT = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
import gradstream

HERE = Path({here!r})


def wait(event, count=1):  # until the run has as many of these
    while (HERE / "run" / "events.jsonl").read_text().count(event) < count:
        time.sleep(0.01)


session = gradstream.join(deadlines=gradstream.Deadlines(join_s=60, silence_s=20, lease_s=10, retry_s=5))
data = TensorDataset(torch.arange(120.0).reshape(-1, 1))
if {sharded}:
    loader = session.shard(DataLoader(data, batch_size=2, shuffle=True, num_workers={processes}))
else:
    loader = DataLoader(Subset(data, range(session.rank, 120, 3)), batch_size=2)
model = nn.Linear(1, 1)
for parameter in model.parameters():
    nn.init.zeros_(parameter)
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=2**-10))
with open(HERE / f"seen-{{session.rank}}", "w", buffering=1) as seen:
    for epoch in range(3):
        for number, (inputs,) in enumerate(loader):
            if session.rank == 1 and (epoch, number) == (1, 7):
                if not {in_flight}:
                    wait('"event":"step","node":"worker-1"', 27)  # behind the receipts of all but the last
                os.kill(os.getpid(), signal.SIGKILL)
            if session.rank != 1 and (epoch, number) == (1, 15):
                wait('"left"')
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            seen.write(f"{{epoch}} {{' '.join(str(int(one)) for one in inputs.flatten())}}\\n")
session.close()
print("after the end")
"""


def train(
    here: Path,
    *options: str,
    sharded: bool = True,
    processes: int = 0,
    in_flight: bool = False,
    script: str = SCRIPT,
) -> subprocess.CompletedProcess[str]:
    told = {"here": str(here), "sharded": sharded, "processes": processes, "in_flight": in_flight}
    (here / "script.py").write_text(script.format(**told))
    words = ["train", str(here / "script.py"), "--workers", "3", "--run-dir", str(here / "run")]
    if script == SCRIPT:  # nobody comes in the place of the lost worker
        words += ["--set", "max_restarts=0"]
    if "--strategy" not in options:
        words += ["--strategy", "downpour"]
    if not in_flight and script == SCRIPT:
        words += ["--set", "strategy.overlap=false"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "gradstream", *words, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def seen_by(here: Path, rank: int) -> list[tuple[int, ...]]:
    """(epoch, sample, sample) of each step."""
    return [tuple(map(int, line.split())) for line in (here / f"seen-{rank}").read_text().splitlines()]


@pytest.mark.limit_s(200)
@pytest.mark.parametrize(("processes", "in_flight"), [(0, False), (1, True)])
def test_survivors_take_over_what_a_killed_worker_had_left(
    tmp_path: Path, processes: int, in_flight: bool
) -> None:
    done = train(tmp_path, "--json", sharded=True, processes=processes, in_flight=in_flight)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the others have taken over all that it had left" in done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert summary["workers_lost"] == ["worker-1"]
    lost, others = seen_by(tmp_path, 1), seen_by(tmp_path, 0) + seen_by(tmp_path, 2)
    assert len(lost) == 27  # killed in the middle of its second epoch
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "left_over"]
    assert in_flight or told["steps"] in {26, 27}  # a step's event may be one beat ahead of its receipt
    counts = Counter((epoch, one) for epoch, *samples in lost + others for one in samples)
    assert set(counts) == {(epoch, one) for epoch in range(3) for one in range(120)}
    # Steps of the lost worker that have no receipt come again: which ones these are is not always the last.
    assert counts.total() == len(counts) + 2 * (27 - told["steps"])
    assert summary["samples_reassigned"] == 40 - told["steps"]  # the third epoch was divided without it
    assert summary["samples_accounted"] == 2 * (len(others) + told["steps"]) == 360
    if not in_flight:  # else what had left the lost worker may be in the model, too
        found = gs.Run.load(tmp_path / "run").parameters
        assert found["weight"].item() * -(2**10) == 3 * sum(range(120))
        assert found["bias"].item() * -(2**10) == 3 * 120


@pytest.mark.limit_s(200)
def test_without_shard_the_run_ends_with_an_error_unless_that_is_meant(tmp_path: Path) -> None:
    done = train(tmp_path, sharded=False)
    assert done.returncode == 4, done.stderr[-3000:]
    assert (
        "worker-1 was lost when 27 of its steps were in the model, and what it had left is not in the model"
        in done.stderr
    )
    assert "--allow-lost" in done.stderr
    assert "after the end" in done.stdout  # the scripts that are left have gone on to their end
    assert gs.Run.load(tmp_path / "run").parameters
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    done = train(allowed, "--allow-lost", sharded=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "worker-1 was lost when" in done.stderr


RETURNING = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gradstream

HERE = Path({here!r})
session = gradstream.join(deadlines=gradstream.Deadlines(join_s=120, silence_s=20, lease_s=10, retry_s=5))
data = TensorDataset(torch.arange(120.0).reshape(-1, 1))
loader = session.shard(DataLoader(data, batch_size=2, shuffle=True))
model = nn.Linear(1, 1)
for parameter in model.parameters():
    nn.init.zeros_(parameter)
(HERE / f"started-{{session.rank}}-{{os.getpid()}}").touch()
started = len(list(HERE.glob(f"started-{{session.rank}}-*")))
model, optimizer = session.wrap(model, torch.optim.SGD(model.parameters(), lr=2**-10))
counts = {{"lives": 0}}
session.register(counts=counts)
for epoch in session.epochs(3):
    for number, (inputs,) in enumerate(loader):
        if session.rank == 1 and started == 1 and (epoch, number) == (0, 7):
            os.kill(os.getpid(), signal.SIGKILL)
        counts["lives"] = max(counts["lives"], 7)
        if session.rank != 1 and not (HERE / "back").exists():
            time.sleep(1.0)  # so that the run goes on until the new process is there
        if started == 2:
            assert counts["lives"] == 7  # of a worker that was there
            (HERE / "back").touch()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
session.close()
"""


@pytest.mark.limit_s(240)
@pytest.mark.parametrize("strategy", ["downpour", "gossip"])
def test_a_new_process_takes_the_place_of_a_killed_worker(tmp_path: Path, strategy: str) -> None:
    done = train(tmp_path, "--json", "--strategy", strategy, script=RETURNING)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the others have taken over all that it had left" in done.stderr
    assert len(list(tmp_path.glob("started-1-*"))) == 2
    summary = json.loads(done.stdout)["summary"]
    assert (summary["workers_lost"], summary["samples_accounted"]) == (["worker-1"], 360)
    found = gs.Run.load(tmp_path / "run").parameters
    if strategy == "downpour":  # each sample is in the model once an epoch
        assert found["weight"].item() * -(2**10) == 3 * sum(range(120))
        assert found["bias"].item() * -(2**10) == 3 * 120
