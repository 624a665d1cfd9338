"""A worker of a user's own loop dies: the others take over what it had left, or the run says what is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from gradstream.data.open_ledger import OpenLedger
from gradstream.data.reassignment import Block, Epoch
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

# ---- the ledger alone -------------------------------------------------------------------

Place = tuple[int, int, int]
"""Epoch, rank, and number in the part of that rank."""


@dataclass
class Loop:
    """A worker's loop, as far as the ledger hears of it: its steps, of which some are on their way."""

    ledger: OpenLedger
    rank: int
    parts: list[int]
    epochs: int
    per_step: int
    reach: int  # how many epochs back it can take something over
    steps: list[list[Place]] = field(default_factory=list)
    heard: int = 0  # of its steps, how many have receipts
    alive: bool = True
    ended: bool = False

    def __post_init__(self) -> None:
        self._script = self._run()

    def advance(self) -> bool:
        """One more step; False where there is none."""
        return next(self._script, None) is not None

    def hear(self) -> bool:
        if self.heard == len(self.steps):
            return False
        self.heard += self.ledger.receipt(BatchRef(0, self.rank, self.heard), self.rank)
        return True

    def _run(self) -> Iterator[bool]:
        for number in range(self.epochs):
            epoch, begin = Epoch(0, number), len(self.steps)
            self.ledger.reassignment.begun(self.rank, epoch, begin)
            for first in range(0, self.parts[self.rank], self.per_step):
                self.steps.append([(number, self.rank, first + k) for k in range(self.per_step)])
                yield True
            while (block := self._take(epoch, begin)) is not None:
                (_, of), rank, first, size = block
                self.steps.append([(of, rank, first + k) for k in range(size)])
                yield True
        self.ended = True
        self.ledger.ended(self.rank, len(self.steps), 0, len(self.steps))

    def _take(self, epoch: Epoch, begin: int) -> Block | None:
        oldest = max(0, epoch.number - self.reach)
        return self.ledger.reassignment.take(
            self.rank, epoch, begin, len(self.steps), self.parts, self.per_step, oldest
        )


@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.data(),
)
def test_each_minibatch_is_in_the_model_once_or_told_as_missing(
    blocks: list[int], epochs: int, per_step: int, reach: int, data: st.DataObject
) -> None:
    config, parts = len(blocks), [per_step * count for count in blocks]
    ledger = OpenLedger(config, rounds=False)
    loops = [Loop(ledger, rank, parts, epochs, per_step, reach) for rank in range(config)]
    actions, in_time = st.tuples(st.integers(0, 7), st.integers(0, config - 1)), True
    for kind, rank in data.draw(st.lists(actions, max_size=99)):
        loop, living = loops[rank], [one for one in loops if one.alive]
        if kind == 0 and loop.alive and len(living) > 1:
            loop.alive = False
            ledger.lost(rank)
            in_time = in_time and not any(one.ended for one in living)
        elif loop.alive:
            loop.advance() if kind < 5 else loop.hear()
    for loop in loops:
        while loop.alive and (loop.advance() or loop.hear()):
            pass
    assert ledger.finished
    done = Counter(place for loop in loops for step in loop.steps[: loop.heard] for place in step)
    planned = {(e, r, k) for e in range(epochs) for r in range(config) for k in range(parts[r])}
    assert set(done) <= planned
    assert set(done.values()) <= {1}
    missing = [(loss.rank, loss.missing) for loss in ledger.losses() if loss.missing]
    left = Counter(rank for _, rank, _ in planned - set(done))
    assert dict(missing) == dict(left)
    if in_time and reach >= epochs - 1:
        assert not missing
    heard = [(loop.rank, place) for loop in loops for step in loop.steps[: loop.heard] for place in step]
    assert ledger.reassigned(0) == sum(rank != place[1] for rank, place in heard)


def lone() -> tuple[OpenLedger, Any]:
    """Worker 1 is lost in its first epoch, when one of its steps is in the model."""
    ledger = OpenLedger(2, rounds=False)
    ledger.reassignment.begun(1, Epoch(0, 0), 0)
    ledger.receipt(BatchRef(0, 1, 0), 1)
    ledger.lost(1)
    return ledger, ledger.reassignment.take


def test_what_is_left_over_is_handed_out_in_steps_of_the_lost_worker() -> None:
    ledger, take = lone()
    epoch = Epoch(0, 0)
    assert take(0, epoch, 0, 3, (6, 5), 2, 0) == Block(epoch, 1, 2, 2)
    assert [loss.missing for loss in ledger.losses()] == [3]
    assert take(0, epoch, 0, 4, (6, 5), 2, 0) == Block(epoch, 1, 4, 1)
    assert take(0, epoch, 0, 5, (6, 5), 2, 0) is None
    assert [loss.missing for loss in ledger.losses()] == [3]  # no receipt yet
    for step in range(5):
        ledger.receipt(BatchRef(0, 0, step), 0)
    assert [loss.missing for loss in ledger.losses()] == [0]
    later = Epoch(0, 1)
    assert take(0, later, 5, 8, (6, 5), 2, 0) == Block(later, 1, 0, 2)  # from now on all of its part


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        ([], 3),  # no loader of shard's
        ([(Epoch(0, 0), 0, 3, (3, 3), 0, 0)], 3),  # steps of different sizes
        ([(Epoch(0, 0), 1, 3, (3, 1), 1, 0)], 3),  # a step before the epoch
        ([(Epoch(0, 0), 0, 3, (3, 1), 1, 0)], 4),  # a step after it
        ([(Epoch(0, 0), 0, 3, (3, 1), 1, 0), (Epoch(0, 1), 5, 8, (3, 1), 1, 0)], 8),  # an epoch left early
    ],
)
def test_what_cannot_be_told_is_unknown(calls: list[Any], steps: int) -> None:
    ledger, take = lone()
    for call in calls:
        take(0, *call)
    ledger.ended(0, steps, 0, steps)
    assert [loss.missing for loss in ledger.losses()] == [None]


def test_what_the_shards_have_is_no_loss() -> None:
    """A worker that was stopped before it died has pushed more than it could report."""
    ledger, take = lone()
    epoch = Epoch(0, 0)
    assert take(0, epoch, 0, 3, (6, 5), 2, 0) == Block(epoch, 1, 2, 2)
    ledger.pushed(1, "shard-0", 3, 2)
    assert [(loss.steps, loss.missing, loss.twice) for loss in ledger.losses()] == [(1, 3, 0)]
    ledger.pushed(1, "shard-1", 4, 2)  # a push that was torn: not all of it is in the model
    for step in range(4):
        ledger.receipt(BatchRef(0, 0, step), 0)
    assert [(loss.steps, loss.missing, loss.twice) for loss in ledger.losses()] == [(3, 0, 1)]
    assert take(0, epoch, 0, 4, (6, 5), 2, 0) is None


def test_shards_count_the_gradients_of_who_has_left() -> None:
    """Those that every chunk has, once nothing of the sender is on its way; initial parameters are no gradient."""
    state = ShardState([0, 1], EveryPush())
    reports: list[v1.SenderPushes] = []
    kept = KeptPushes(state, counts=True)
    kept.on_report = reports.append

    def push(chunk: int, sequence: int, *, assign: bool = False) -> None:
        header = PushHeader("worker-1", 1, 7, sequence, 4, num_gradients=1 if assign else 2)
        state.push(chunk, Parked(header, object(), assign))
        state.applied(chunk)

    for chunk in (0, 1):
        push(chunk, 1, assign=True)
        push(chunk, 2)
    push(0, 3)
    state.keep_senders({("worker-0", 1)})
    kept.report()
    assert [(one.sender, one.incarnation, one.gradients) for one in reports] == [("worker-1", 7, 2)]
    kept.report()
    assert len(reports) == 1


def test_what_a_second_lost_worker_had_taken_over_goes_to_a_third() -> None:
    ledger = OpenLedger(3, rounds=False)
    epoch, take = Epoch(0, 0), ledger.reassignment.take
    ledger.lost(1)  # before its first epoch
    for rank in (0, 2):
        ledger.reassignment.begun(rank, epoch, 0)
    ledger.receipt(BatchRef(0, 2, 0), 2)
    first, second = (take(2, epoch, 0, step, (1, 3, 1), 1, 0) for step in (1, 2))
    assert (first, second) == (Block(epoch, 1, 0, 1), Block(epoch, 1, 1, 1))
    ledger.receipt(BatchRef(0, 2, 2), 2)
    ledger.lost(2)
    assert take(0, epoch, 0, 1, (1, 3, 1), 1, 0) == first
    assert take(0, epoch, 0, 2, (1, 3, 1), 1, 0) == Block(epoch, 1, 2, 1)
    assert take(0, epoch, 0, 3, (1, 3, 1), 1, 0) is None
    for step in range(3):
        ledger.receipt(BatchRef(0, 0, step), 0)
    ledger.ended(0, 3, 3, 3)
    assert [loss.missing for loss in ledger.losses()] == [0, 0]
    assert ledger.reassigned(0) == 3


def test_steps_that_a_lost_worker_made_unevenly_are_handed_out_to_nobody() -> None:
    ledger, take = lone()
    ledger.reassignment.begun(1, Epoch(0, 0), 0, unclear=True)
    assert take(0, Epoch(0, 0), 0, 3, (3, 3), 1, 0) is None
    assert take(0, Epoch(0, 1), 3, 6, (3, 3), 1, 0) == Block(Epoch(0, 1), 1, 0, 1)
    assert [loss.missing for loss in ledger.losses()] == [None]


@pytest.mark.parametrize(
    ("of_lost", "missing"), [([], 0), ([(Epoch(1, 0), 1)], None), ([(Epoch(0, 0), 1)], None)]
)
def test_workers_have_to_go_through_the_same_epochs(
    of_lost: list[tuple[Epoch, int]], missing: int | None
) -> None:
    ledger, take = lone()
    for epoch, step in of_lost:
        ledger.reassignment.begun(1, epoch, step)
    assert take(0, Epoch(0, 0), 0, 1, (1, 1), 1, 0) is None
    ledger.ended(0, 1, 8, 1)
    assert [loss.missing for loss in ledger.losses()] == [missing]


def test_only_so_many_epochs_without_steps_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradstream.data.reassignment.MOST_EPOCHS", 3)
    ledger, take = lone()
    for number in range(9):
        ledger.reassignment.begun(0, Epoch(0, 0) if number == 0 else Epoch(1, number), 0)
    assert len(ledger.reassignment._loops[0].begun) == 3
    assert take(0, Epoch(0, 0), 0, 1, (1, 1), 1, 0) is None
    assert take(0, Epoch(0, 1), 1, 2, (1, 1), 1, 0) is None  # there is no place for it
    assert [loss.missing for loss in ledger.losses()] == [None]


@pytest.mark.parametrize(
    "said",
    [
        v1.TakeOver(epoch=v1.Begun(step=0), parts=[3], per_step=1, step=3),  # of one worker
        v1.TakeOver(epoch=v1.Begun(step=0), parts=[3, 1 << 60], per_step=1, step=3),
        v1.TakeOver(epoch=v1.Begun(step=4), parts=[3, 3], per_step=1, step=3),
        v1.TakeOver(epoch=v1.Begun(step=0), parts=[3, 3], per_step=1, step=1 << 60),
        v1.TakeOver(epoch=v1.Begun(step=-(1 << 60)), parts=[3, 3], per_step=1, step=3),
        v1.TakeOver(epoch=v1.Begun(step=0, epoch=1), oldest=2, parts=[3, 3], per_step=1, step=3),
        v1.TakeOver(epoch=v1.Begun(step=0, epoch=1 << 20), parts=[3, 3], per_step=1, step=3),
    ],
)
def test_what_cannot_be_is_refused(said: v1.TakeOver) -> None:
    (loops, worker), good = own_loops(), v1.TakeOver(epoch=v1.Begun(step=-9), step=-3)
    assert loops.on_request(worker, good, 0.0) == []
    with pytest.raises(gs.errors.RefusedError, match="worker-0"):
        loops.on_request(worker, said, 0.0)


def test_an_epoch_from_an_impossible_step_is_refused() -> None:
    loops, worker = own_loops()
    with pytest.raises(gs.errors.RefusedError, match="worker-0"):
        loops.check(worker, "begun", v1.Begun(step=1 << 60))


def own_loops() -> tuple[OwnLoops, v1.Node]:
    ledger, nodes = lone()[0], Nodes(2, 0)
    progress, started = SampleProgress(ledger, None, None), StartedEvent(
        job="j", workers=2, servers=0, strategy="allreduce", optimizer="sgd", num_parameters=0, num_samples=None,
        total_steps=0,
    )  # fmt: skip
    snapshots = SnapshotRounds(progress, nodes, None, OrphanedPushes(progress, nodes, redoes=False))
    life = Lifecycle(started, nodes, progress, snapshots, LossTolerance(survives_worker_loss=True))
    return OwnLoops(ledger, life), v1.Node(name="worker-0", role="worker")


def test_a_worker_that_was_done_leaves_nothing() -> None:
    ledger = OpenLedger(2, rounds=False)
    ledger.receipt(BatchRef(0, 1, 0), 1)
    ledger.ended(1, 1, 8, 1)
    ledger.lost(1)
    assert ledger.losses() == []


# ---- loaders ----------------------------------------------------------------------------


class Reached:
    """Stands for the bridge of worker 0, whose coordinator has lost worker 1 in its first epoch."""

    def __init__(self, before: int = 0) -> None:
        self.ledger, _ = lone()
        self.take_over = partial(self.ledger.reassignment.take, 0)
        self.begun = partial(self.ledger.reassignment.begun, 0)
        self.steps = -before

    def step(self) -> None:
        if self.steps >= 0:
            self.ledger.receipt(BatchRef(0, 0, self.steps), 0)
        self.steps += 1


class Doubling(DataLoader[Any]):
    """A user's own loader, which changes what it gives."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch * 2 for batch in super().__iter__())


def ignored(_: int | None) -> None:
    """Nobody counts samples."""


def numbers(count: int) -> Any:
    """A data set: 0.0, 1.0, ..."""
    return list(torch.arange(float(count)))


@pytest.mark.parametrize(
    ("make", "split", "per_step", "factor"),
    [
        (lambda: DataLoader(numbers(24), 2, shuffle=True), False, 1, 1),
        (lambda: DataLoader(numbers(24), 2, shuffle=True), False, 2, 1),
        (lambda: DataLoader(numbers(24), 4, shuffle=True), True, 2, 1),
        (lambda: DataLoader(numbers(25), 4), True, 1, 1),  # nothing of the last minibatch is worker 1's
        (lambda: DataLoader(numbers(24), batch_size=None, shuffle=True), False, 3, 1),
        (lambda: DataLoader(numbers(23), 2, num_workers=1, generator=torch.Generator()), False, 1, 1),
        (lambda: Doubling(numbers(24), 2), False, 1, 2),
    ],
)
def test_a_loader_gives_what_a_lost_worker_had_left(
    make: Callable[[], DataLoader[Any]], split: bool, per_step: int, factor: int
) -> None:
    reached = Reached()
    noted: list[Any] = []
    takeover = Takeover(lambda: reached.steps, Roster(1))
    takeover.bridge = reached  # type: ignore[assignment]
    loader = part_of(make(), LoaderPart(0, 2, 7, split, noted.append, takeover=takeover))
    size = len(loader.dataset)
    for epoch in range(2):
        seen: list[int] = []
        for number, batch in enumerate(loader, 1):
            seen += [int(one) for one in batch.reshape(-1)]
            if number % per_step == 0:
                reached.step()
        done = per_step * (1 if loader.batch_size is None else -(-loader.batch_size // (1 + split)))
        assert len(set(seen)) == len(seen) == size - (done if epoch == 0 else 0)
        assert set(seen) <= set(range(0, factor * size, factor))
        assert loader.batch_size is None or sum(noted) == len(seen)
        noted.clear()
    assert [loss.missing for loss in reached.ledger.losses()] == [0]


def test_a_loop_that_accumulates_unevenly_takes_nothing_over() -> None:
    reached = Reached()
    takeover = Takeover(lambda: reached.steps, Roster(1))
    takeover.bridge = reached  # type: ignore[assignment]
    loader = part_of(DataLoader(numbers(24), 2), LoaderPart(0, 2, 7, False, ignored, takeover=takeover))
    for number, _ in enumerate(loader):
        if number in (0, 3, 5):
            reached.step()
    assert number == 5
    assert [loss.missing for loss in reached.ledger.losses()] == [None]


@pytest.mark.parametrize("uses", [0, 1])
def test_what_is_taken_over_and_not_used_is_not_held_to_be_in_the_model(uses: int) -> None:
    reached = Reached()
    takeover = Takeover(lambda: reached.steps, Roster(1))
    takeover.bridge = reached  # type: ignore[assignment]
    loader = part_of(DataLoader(numbers(24), 2), LoaderPart(0, 2, 7, False, ignored, takeover=takeover))
    for _ in range(2):
        for number, _ in enumerate(loader, 1):
            if number > len(loader) + uses:
                break
            reached.step()
    assert [loss.missing for loss in reached.ledger.losses()] == [None]


def test_a_resumed_loop_takes_over_nothing_while_it_passes_by() -> None:
    reached = Reached(before=8)  # one epoch of six minibatches, and two of the next
    reached.ledger.reassignment._loops[1].begun[Epoch(0, 0)] = -4  # so this one had four
    takeover = Takeover(lambda: None if reached.steps == -8 else reached.steps, Roster(1))
    takeover.bridge = reached  # type: ignore[assignment]
    loader = part_of(DataLoader(numbers(24), 2), LoaderPart(0, 2, 7, False, ignored, takeover=takeover))
    seen: list[list[int]] = []
    for _ in range(2):
        seen.append([])
        for batch in loader:
            seen[-1].append(int(batch[0]) // 2)
            reached.step()
    assert seen[0] == [0, 2, 4, 6, 8, 10]
    assert seen[1] == [0, 2, 4, 6, 8, 10, 11, 1, 3, 5, 7, 9, 11]  # 11 of the epoch before as well
    assert [loss.missing for loss in reached.ledger.losses()] == [0]


def test_who_asks_hears_when_the_worker_has_ended() -> None:
    class Silent:
        """A coordinator that does not answer."""

        async def take_over(self, *_: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

    asked, bridge = threading.Event(), LoopBridge(None)  # type: ignore[arg-type]

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
            bridge.take_over(Epoch(0, 0), 0, 1, (1, 1), 1, 0)
    finally:
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)
        loop.call_soon_threadsafe(loop.stop)
        for thread in others:
            thread.join()
        loop.close()


def test_a_validation_neither_takes_over_nor_counts() -> None:
    reached = Reached()
    takeover = Takeover(lambda: reached.steps, Roster(1))
    takeover.bridge = reached  # type: ignore[assignment]
    loader = part_of(DataLoader(numbers(24), 2), LoaderPart(0, 2, 7, False, ignored, takeover=takeover))
    with torch.no_grad():
        assert len(list(loader)) == 6
    assert len(list(loader)) == 6  # no steps
    assert reached.ledger.reassignment._sizes == {}


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
    here: Path, *options: str, sharded: bool, processes: int = 0, in_flight: bool = False
) -> subprocess.CompletedProcess[str]:
    script = here / "script.py"
    told = {"here": str(here), "sharded": sharded, "processes": processes, "in_flight": in_flight}
    script.write_text(SCRIPT.format(**told))
    words = ["train", str(script), "--workers", "3", "--strategy", "downpour", "--run-dir", str(here / "run")]
    if not in_flight:
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
    # What shards have told of only after others had taken it over counts twice, and the run says so.
    twice = re.search(r"(\d+) minibatch(es)? of it may count twice", told["message"])
    assert in_flight or twice is None
    assert counts.total() == len(counts) + 2 * (27 - told["steps"] + (int(twice[1]) if twice else 0))
    assert summary["samples_reassigned"] == 60 - told["steps"]
    assert summary["samples_accounted"] == 2 * len(others)
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
