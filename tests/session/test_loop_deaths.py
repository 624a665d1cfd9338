"""A worker of a user's own loop dies in a group: the others make the round again, and deal out what it had left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradstream.session.deals import LoaderDeals
from gradstream.session.loaders_part import Dealt, Takeover
from gradstream.session.roster import Roster

ROOT = Path(__file__).resolve().parents[2]

# ---- the deals alone --------------------------------------------------------------------

Batch = tuple[int, int]


def test_a_roster_knows_who_makes_which_round_and_who_has_come() -> None:
    roster = Roster(3)
    assert roster.of(0) == roster.now == (0, 1, 2)
    roster.change(0, [0, 2])  # worker-1 was never there
    assert roster.of(-4) == roster.of(0) == (0, 2)
    roster.change(5, [2])
    roster.change(5, [1, 2], [1])  # in the same round
    assert roster.newest == (1,)
    roster.change(8, [0, 1, 2], [0])
    assert [roster.of(number) for number in (4, 5, 7, 8)] == [(0, 2), (1, 2), (1, 2), (0, 1, 2)]
    assert [roster.since(rank, 9) for rank in range(3)] == [8, 5, None]
    assert [roster.since(rank, 7) for rank in range(1, 3)] == [5, None]
    assert (roster.first, roster.newest) == (2, (0,))
    at_once = Roster(2)
    at_once.change(0, [0, 1])
    at_once.change(0, [0, 1], [0])  # worker-0 has died, and come back, in the very first round
    assert at_once.first == 1
    other = Roster(3)
    other.load(json.loads(json.dumps(roster.saved())))
    assert other.changes == roster.changes


class Worker:
    """One worker's loop, as far as a loader sees it, with a sampler that draws some minibatches ahead."""

    def __init__(self, loops: Loops, rank: int, roster: Roster, came: Any = None) -> None:
        self.loops = loops
        self.batches = 0 if came is None else loops.number  # rounds handed in
        self.counts = SimpleNamespace(batches=self.batches, steps=0)
        self.takeover = Takeover(
            lambda: self.batches,
            roster,
            num_at_first=len(roster.changes[0].ranks),
            in_rounds=True,
            steps_a_round=loops.per_round if loops.local_rounds else 1,
        )
        self.takeover.bridge = SimpleNamespace(counts=self.counts)  # type: ignore[assignment]
        self.deals = LoaderDeals(self.takeover, rank, loops.split, lambda batch, which: batch[which], len)
        if came is not None:
            self.deals.load(came)
        self.script = self.run()

    def run(self) -> Iterator[Dealt]:
        loops, deals = self.loops, self.deals
        for epoch in range(loops.epochs):
            stop = loops.stops.get(epoch, 1 << 30)
            drawn = self.draws(epoch)
            ahead = list(islice(drawn, loops.ahead))
            for taken in count():
                ahead += islice(drawn, 1)
                if not ahead or taken == stop:
                    break
                assert deals.rest(loops.batches) > 0
                deals.take()
                self.counts.steps += 1
                yield ahead.pop(0)
            if not ahead:
                for dealt in iter(deals.draw, None):
                    assert deals.rest(loops.batches) > 0
                    deals.take()
                    self.counts.steps += 1
                    yield dealt
                assert not deals.is_open or deals.rest(loops.batches) == 0
            deals.over()

    def draws(self, epoch: int) -> Iterator[Dealt]:
        whole: Iterator[Any] = (
            [(epoch, one, part) for part in range(2)] for one in range(self.loops.batches)
        )
        self.deals.begin(epoch, whole)
        yield from iter(self.deals.draw, None)

    def hand_in(self, most: int) -> list[Dealt]:
        given = [one for _, one in zip(range(most), self.script, strict=False)]
        self.batches += 1
        self.counts.batches += 1
        return given


class Loops:
    """Loops of several workers in step: rounds of `per_round` minibatches each. Workers are lost, and come."""

    def __init__(
        self,
        workers: int,
        batches: int,
        epochs: int,
        per_round: int = 1,
        *,
        stops: Mapping[int, int] | None = None,  # by epoch, the column at which the scripts break off
        ahead: int = 0,
        split: bool = False,
        local_rounds: bool = False,
    ) -> None:
        self.batches, self.epochs, self.per_round = batches, epochs, per_round
        self.stops, self.ahead, self.split, self.local_rounds = stops or {}, ahead, split, local_rounds
        self.number = 0  # of the next round
        self.used: Counter[Any] = Counter()
        self.live = {rank: Worker(self, rank, Roster(workers)) for rank in range(workers)}
        for worker in self.live.values():
            worker.takeover.roster.change(0, range(workers))

    def round(self, dying: Collection[int] = (), coming: Collection[int] = ()) -> bool:
        """Makes a round, in which some die, and others come, before it is whole. Returns whether loops go on."""
        given = {rank: worker.hand_in(self.per_round) for rank, worker in self.live.items()}
        assert len({len(own) for own in given.values()}) == 1, "loops are not in step"
        goes_on = any(given.values())
        if self.stops or any(len(own) < self.per_round for own in given.values()):
            coming = ()  # it would break off elsewhere; the loops have ended: nobody would share with it
        dead = set(dying) & self.live.keys()
        if len(dead) == len(self.live):
            dead.pop()
        for rank in dead:
            del self.live[rank], given[rank]
        others = [*self.live.values()]
        state = json.dumps([others[0].deals.saved(), others[0].takeover.roster.saved()])
        for rank in (new := set(coming) - self.live.keys()):
            deals, changes = json.loads(state)
            roster = Roster(1)
            roster.load(changes)
            self.live[rank] = Worker(self, rank, roster, deals)
        for worker in self.live.values():
            worker.takeover.roster.change(self.number, sorted(self.live), sorted(new))
        for rank in new:
            given[rank] = self.live[rank].hand_in(1 if self.local_rounds else self.per_round)
            assert not any(samples for _, samples in given[rank]), "a newcomer's first round counts samples"
        for own in given.values():
            self.used.update(sample for batch, samples in own if samples for sample in batch)
        self.number += 1
        return goes_on

    def check(self) -> None:
        epochs = range(self.epochs)
        every = {(epoch, one, part) for epoch in epochs for one in range(self.batches) for part in range(2)}
        missing = {one for one in every - self.used.keys() if one[0] not in self.stops}
        assert all(count == 1 for count in self.used.values()), "a sample counts twice"
        left = [worker.deals.left().total() for worker in self.live.values()]
        assert all(one == left[0] for one in left)
        assert not missing or left[0], "samples are lost without a word"
        pieces = sum(len(one) for one in {one[:2]: 0 for one in missing})
        assert self.stops or self.split or left[0] == len({one[:2] for one in missing}) or pieces == 0
        assert self.stops or missing or not left[0], "samples in the model are told as lost"
        for worker in self.live.values():
            assert not worker.takeover.own_data
            assert len(worker.deals._batches) <= left[0] + 64, "minibatches are kept for nothing"


@given(data=st.data())
def test_each_sample_is_in_the_model_once_or_told_as_left(data: st.DataObject) -> None:
    draw = data.draw
    workers, batches, epochs = draw(st.integers(1, 5)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    stops = draw(st.dictionaries(st.integers(0, 3), st.integers(1, 12), max_size=1), label="breaks")
    per_round = draw(st.integers(1, 5))
    loops = Loops(
        workers,
        batches,
        epochs,
        per_round,
        stops=stops,
        ahead=draw(st.integers(0, 3), label="ahead"),
        split=draw(st.booleans(), label="split"),
        local_rounds=draw(st.booleans(), label="local rounds"),
    )
    ranks = st.sets(st.integers(0, workers), max_size=2)
    while loops.round(draw(ranks, label="dying"), draw(ranks, label="coming")):
        pass
    loops.check()


def planted(loops: type[LoaderDeals], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault into all deals."""
    take_back, load = loops._settle, loops.load

    def forgets(self: LoaderDeals, **options: bool) -> None:
        take_back(self, **options)
        self._returned.clear()

    def anew(self: LoaderDeals, came: Any) -> None:
        load(self, {**came, "place": 0} if fault == "an epoch begun twice" else {**came, "returned": []})

    if fault == "what a lost worker had is forgotten":
        monkeypatch.setattr(loops, "_settle", forgets)
    else:
        monkeypatch.setattr(loops, "load", anew)
        if fault == "an epoch begun twice":
            monkeypatch.setattr(loops, "begin", begins_anew(loops.begin))


def begins_anew(begin: Any) -> Any:
    def wrong(self: LoaderDeals, number: int, order: Iterator[Any]) -> None:
        if self._came is not None:
            self._came = {**self._came, "place": 0}
        begin(self, number, order)

    return wrong


@pytest.mark.parametrize("fault", ["what a lost worker had is forgotten", "an epoch begun twice"])
def test_the_check_of_counts_finds_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        loops = Loops(workers=3, batches=10, epochs=2)
        loops.round()
        loops.round({1})
        loops.round(coming={1})
        while loops.round():
            pass
        loops.check()

    run()
    planted(LoaderDeals, fault, monkeypatch)
    with pytest.raises(AssertionError):
        run()


# ---- processes --------------------------------------------------------------------------

SCRIPT = """
import json, os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gradstream

strategy, here, rank, at, where, sharded, waits, differs = json.loads(sys.argv[1])
plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
options = {"local-sgd": {"every": 3}, "diloco": {"every": 3, **plain}}.get(strategy, {})
if strategy == "post-local":
    local = gradstream.Phase(strategy="local-sgd", strategy_options={"every": 3})
    session = gradstream.join(workers=3, phases=[gradstream.Phase(steps=6), local])
else:
    session = gradstream.join(strategy, strategy_options=options, workers=3)
N, EPOCHS, USES = 8 * 13 + 3, 2, 60


class Used(nn.Module):
    # The gradient of a minibatch has an entry for each of its samples, so the parameters tell what was used.
    def __init__(self):
        super().__init__()
        self.pad = nn.Parameter(torch.zeros(300_000, dtype=torch.float64))  # more than one piece of anything
        self.uses = nn.Parameter(torch.zeros(3 * USES * N, dtype=torch.float64))

    def forward(self, ids):
        return self.uses[ids + (session.rank * USES + made) * N].sum() / len(ids) + 0 * self.pad.sum()


def die(gradient=None):
    if session.rank == rank and made == at and is_first:
        os.kill(os.getpid(), signal.SIGKILL)


try:
    os.close(os.open(f"{here}/begun-{session.rank}", os.O_CREAT | os.O_EXCL))
    is_first, made = True, 0
except FileExistsError:  # a process in the place of a lost one
    is_first, made = False, USES // 2
model = Used()
if where == "backward":
    model.uses.register_hook(die)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.arange(N)), batch_size=8, shuffle=True)
loader = session.shard(loader) if sharded else loader
again = f"{here}/again"
if not is_first:
    open(again, "w").close()
model, optimizer = session.wrap(model, optimizer)
for epoch in range(EPOCHS):
    for (ids,) in loader:
        if where == "step":
            die()
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
        made += 1
        if differs and not is_first:
            model.pad.data.add_(1e-3)  # as a step at another rate would
        while waits == "within" and is_first and made == at + 2 and not os.path.exists(again):
            time.sleep(0.05)
        time.sleep(0.2 if waits == "within" else 0)
events = f"{here}/run/events.jsonl"
while waits == "at the end" and session.rank == 0 and open(events).read().count('"event":"joined"') < 4:
    time.sleep(0.05)  # worker-2 closes its session; the newcomer comes to this round
session.close()
used = [0] * N
for index in torch.nonzero(model.uses.detach()).flatten().tolist():
    used[index % N] += 1
with open(f"{here}/{session.rank}.json", "w") as out:
    told = {"used": used, "sum": float(model.uses.detach().sum()), "main": session.is_main, "first": is_first}
    json.dump({**told, "steps": session.step, "world": session.world_size}, out)
"""


def train(
    here: Path,
    strategy: str,
    *,
    at: int,
    where: str,
    sharded: bool = True,
    waits: str = "",
    differs: bool = False,
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """Runs the script on three workers, of which worker-1 dies, and returns what the others have found."""
    (here / "script.py").write_text(SCRIPT)
    told = json.dumps([strategy, str(here), 1, at, where, sharded, waits, differs])
    words = ["train", str(here / "script.py"), "--run-dir", str(here / "run"), "--", told]
    done = subprocess.run(
        [sys.executable, "-m", "gradstream", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    return done, [json.loads(file.read_text()) for file in sorted(here.glob("[0-9].json"))]


@pytest.mark.limit_s(200)
@pytest.mark.parametrize(
    ("strategy", "at", "where"),
    [
        ("allreduce", 3, "backward"),
        ("synchronous", 6, "step"),
        ("local-sgd", 4, "step"),
        ("local-sgd", 6, "backward"),
        ("post-local", 3, "backward"),
        ("post-local", 5, "step"),
        ("post-local", 6, "step"),
        ("post-local", 8, "backward"),
    ],
)
def test_a_loop_goes_on_without_a_killed_worker_and_each_sample_counts_once_an_epoch(
    tmp_path: Path, strategy: str, at: int, where: str
) -> None:
    done, left = train(tmp_path, strategy, at=at, where=where)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(left) >= 2  # a process in the place of the lost one may have come in time
    assert all((one["used"], one["sum"]) == (left[0]["used"], left[0]["sum"]) for one in left)
    assert set(left[0]["used"]) == {2}  # by one worker in each of two epochs
    assert "worker-1 was lost" in done.stderr
    assert "the others have taken over all that it had left" in done.stderr
    assert "in the model   214 samples" in done.stdout + done.stderr


@pytest.mark.limit_s(200)
def test_the_others_take_over_where_servers_merge_what_workers_have_trained(tmp_path: Path) -> None:
    done, left = train(tmp_path, "diloco", at=5, where="step")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(left) >= 2  # a process in the place of the lost one may have come in time
    assert all(set(one["used"]) == {2} for one in left)
    assert "the others have taken over all that it had left" in done.stderr


@pytest.mark.limit_s(200)
@pytest.mark.parametrize(
    ("strategy", "at"), [("allreduce", 3), ("local-sgd", 3), ("post-local", 3), ("post-local", 8)]
)
def test_a_new_process_takes_the_place_of_a_killed_worker(tmp_path: Path, strategy: str, at: int) -> None:
    done, left = train(tmp_path, strategy, at=at, where="step", waits="within")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "worker-1 is back" in done.stderr
    assert [one["first"] for one in left] == [True, False, True]
    assert [one["main"] for one in left] == [True, False, False]
    assert {one["steps"] for one in left} == {left[0]["steps"]}
    assert {one["world"] for one in left} == {3}
    assert all((one["used"], one["sum"]) == (left[0]["used"], left[0]["sum"]) for one in left)
    assert set(left[0]["used"]) == {2}
    assert "in the model   214 samples" in done.stdout + done.stderr


@pytest.mark.limit_s(200)
def test_a_new_process_that_comes_to_the_last_round_stays_out(tmp_path: Path) -> None:
    done, left = train(tmp_path, "local-sgd", at=4, where="step", waits="at the end")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "worker-1 is back" in done.stderr
    assert "its loop has ended without a step" not in done.stderr
    assert all((one["used"], one["world"]) == ([2] * 107, 2) for one in left)


@pytest.mark.limit_s(200)
def test_a_newcomer_that_makes_other_steps_is_lost_alone(tmp_path: Path) -> None:
    done, left = train(tmp_path, "allreduce", at=3, where="step", waits="within", differs=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "it could not stay in step: ReplicasDifferError" in done.stderr
    assert "the others go on: register what changes its steps" in done.stderr
    assert {one["first"] for one in left} == {True}
    assert left[0]["sum"] == left[1]["sum"]
    assert set(left[0]["used"]) == {2}


@pytest.mark.limit_s(200)
def test_what_a_killed_worker_had_left_of_data_of_its_own_is_named(tmp_path: Path) -> None:
    done, left = train(tmp_path, "allreduce", at=6, where="step", sharded=False)
    assert done.returncode == 4, done.stderr[-3000:]
    assert len(left) == 2  # the scripts that are left have gone on to their end
    assert "worker-1 was lost" in done.stderr
    assert "what it had left is not in the model" in done.stderr
