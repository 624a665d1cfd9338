"""A worker of a user's own loop dies in a group: the others make the round again, and deal out what it had left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradstream.session import deals
from gradstream.session.bridge import LoopBridge
from gradstream.session.deals import LoaderDeals, Part, deal
from gradstream.session.loaders_part import Takeover

ROOT = Path(__file__).resolve().parents[2]

# ---- the deal alone ---------------------------------------------------------------------


def test_what_a_lost_worker_had_left_is_dealt_out_in_the_order_of_ranks() -> None:
    parts: dict[int, Part] = {rank: [(f"{rank}{column}", 2) for column in range(4)] for rank in range(3)}
    deal(parts, [7, 8, 9, 10], {1: 9})
    assert [batch for batch, _ in parts[0]] == ["00", "01", "02", "03", "12"]
    assert [batch for batch, _ in parts[1]] == ["10", "11"]
    assert [batch for batch, _ in parts[2]] == ["20", "21", "22", "23", "13"]


def test_a_repeat_of_a_lost_worker_is_dealt_to_nobody_and_fills_count_no_samples() -> None:
    parts: dict[int, Part] = {0: [("a", 2)], 1: [("b", 2)], 2: [("c", 2)], 3: [("a", 0)]}
    deal(parts, [0], {1: 0, 3: 0})
    assert parts == {0: [("a", 2), ("b", 2)], 1: [], 2: [("c", 2), ("b", 0)], 3: []}


class Loops:
    """Loops of several workers in step, as far as a loader sees them: rounds of `per_round` minibatches each."""

    def __init__(
        self, workers: int, batches: int, epochs: int, per_round: int, stops: Mapping[int, int] | None = None
    ) -> None:
        self.batches, self.epochs, self.per_round = batches, epochs, per_round
        self.stops = stops or {}  # by epoch, the column at which the scripts break off
        self.workers = workers
        self.number = 0  # of the next round
        self.lost: dict[int, int] = {}
        self.used: Counter[tuple[int, int]] = Counter()
        self.takeovers = [Takeover(lambda: self.number) for _ in range(workers)]
        for takeover in self.takeovers:
            takeover.bridge = self.bridge()
        self.deals = [
            LoaderDeals(takeover, rank, workers, self.part_of) for rank, takeover in enumerate(self.takeovers)
        ]
        self.scripts = {rank: self.script(rank) for rank in range(workers)}

    def bridge(self) -> Any:
        counts = SimpleNamespace(batches=0, steps=0)
        return SimpleNamespace(counts=counts, lost=lambda workers: dict(self.lost))

    def part_of(self, epoch: int, rank: int) -> Part:
        own: Part = [((epoch, one), 1) for one in range(rank, self.batches, self.workers)]
        return own + [((epoch, 0), 0)] * (-(-self.batches // self.workers) - len(own))

    def script(self, rank: int) -> Iterator[tuple[Any, int | None]]:
        takeover, deals = self.takeovers[rank], self.deals[rank]
        for epoch in range(self.epochs):
            one_epoch, stop = deals.begin(epoch), self.stops.get(epoch, self.batches)
            for column, one in enumerate(self.part_of(epoch, rank)):
                if column == stop:
                    break
                one_epoch.next()
                takeover.bridge.counts.steps += 1  # type: ignore[misc, union-attr]
                yield one
            else:
                for chosen in deals.rest(one_epoch):
                    takeover.bridge.counts.steps += 1  # type: ignore[misc, union-attr]
                    yield from chosen

    def round(self, dying: set[int]) -> bool:
        """Makes a round, in which some die before it is whole. Returns whether loops go on."""
        given: dict[int, list[tuple[Any, int | None]]] = {}
        for rank, script in self.scripts.items():
            if rank not in self.lost:
                given[rank] = [one for _, one in zip(range(self.per_round), script, strict=False)]
        dying &= given.keys()
        if len(dying) == len(given):
            dying.pop()
        self.lost |= dict.fromkeys(dying, self.number)
        left = {rank: own for rank, own in given.items() if rank not in dying}
        assert len({len(own) for own in left.values()}) == 1, "loops are not in step"
        for own in left.values():
            self.used.update(batch for batch, samples in own if samples)
        self.number += 1
        return any(left.values())

    def check(self) -> None:
        columns = -(-self.batches // self.workers)
        every = {(epoch, one) for epoch in range(self.epochs) for one in range(self.batches)}
        broken = {epoch for epoch, stop in self.stops.items() if stop < columns}
        missing = {one for one in every - self.used.keys() if one[0] not in broken}
        assert all(count == 1 for count in self.used.values()), "a minibatch counts twice"
        left = [self.deals[rank].undealt() for rank in range(self.workers) if rank not in self.lost]
        assert all(one == left[0] for one in left)
        unclear = {self.takeovers[rank].own_data for rank in range(self.workers) if rank not in self.lost}
        assert len(unclear) == 1
        assert not any(unclear) or broken or self.per_round > columns  # a round of several epochs
        assert any(unclear) or left[0].total() == len(missing), "minibatches are lost without a word"


@given(data=st.data())
def test_each_minibatch_is_in_the_model_once_or_told_as_left(data: st.DataObject) -> None:
    draw = data.draw
    workers, batches, epochs = draw(st.integers(1, 5)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    stops = draw(st.dictionaries(st.integers(0, 3), st.integers(0, 12), max_size=1), label="breaks")
    loops = Loops(workers, batches, epochs, draw(st.integers(1, 5)), stops)
    goes_on = True
    while goes_on:
        goes_on = loops.round(draw(st.sets(st.integers(0, workers - 1), max_size=2), label="dying"))
    loops.check()


@pytest.mark.parametrize("planted", ["one too few", "twice", "a repeat that counts"])
def test_the_check_of_counts_finds_planted_faults(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(parts: dict[int, Part], rounds: list[int], lost: dict[int, int]) -> None:
        before = {rank: len(part) for rank, part in parts.items()}
        deal(parts, rounds, lost)
        for rank, part in parts.items():
            if len(part) > before[rank]:
                batch, samples = part[-1]
                if planted == "a repeat that counts":
                    part[-1] = batch, 1
                else:
                    part[-1] = (
                        (batch, 0)
                        if planted == "one too few"
                        else (parts[min(parts.keys() - lost.keys())][0][0], samples)
                    )

    def run() -> None:
        loops = Loops(workers=3, batches=10, epochs=2, per_round=1)
        loops.round(set())
        loops.round({1})
        while loops.round(set()):
            pass
        loops.check()

    run()
    monkeypatch.setattr(deals, "deal", wrong)
    with pytest.raises(AssertionError):
        run()


def test_a_worker_that_was_never_in_the_group_is_lost_from_the_first_round_on() -> None:
    bridge = LoopBridge(SimpleNamespace())  # type: ignore[arg-type]
    assert bridge.lost(3) == {}
    bridge.members([0, 2], 0)
    assert bridge.lost(3) == {1: 0}
    bridge.members([2], 5)
    assert bridge.lost(3) == {0: 5, 1: 0}


# ---- processes --------------------------------------------------------------------------

SCRIPT = """
import json, os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import gradstream

strategy, here, rank, at, where, sharded = json.loads(sys.argv[1])
options = {"every": 3} if strategy == "local-sgd" else {}
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
    if session.rank == rank and made == at:
        os.kill(os.getpid(), signal.SIGKILL)


made, model = 0, Used()
if where == "backward":
    model.uses.register_hook(die)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.arange(N)), batch_size=8, shuffle=True)
loader = session.shard(loader) if sharded else loader
model, optimizer = session.wrap(model, optimizer)
for epoch in range(EPOCHS):
    for (ids,) in loader:
        if where == "step":
            die()
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
        made += 1
session.close()
used = [0] * N
for index in torch.nonzero(model.uses.detach()).flatten().tolist():
    used[index % N] += 1
with open(f"{here}/{session.rank}.json", "w") as out:
    json.dump({"used": used, "made": made, "sum": float(model.uses.sum())}, out)
"""


def train(
    here: Path, strategy: str, *, at: int, where: str, sharded: bool = True
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """Runs the script on three workers, of which worker-1 dies, and returns what the others have found."""
    (here / "script.py").write_text(SCRIPT)
    told = json.dumps([strategy, str(here), 1, at, where, sharded])
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
        ("allreduce", 6, "step"),
        ("local-sgd", 4, "step"),
        ("local-sgd", 6, "backward"),
    ],
)
def test_a_loop_goes_on_without_a_killed_worker_and_each_sample_counts_once_an_epoch(
    tmp_path: Path, strategy: str, at: int, where: str
) -> None:
    done, left = train(tmp_path, strategy, at=at, where=where)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(left) == 2
    assert left[0] == left[1]
    assert set(left[0]["used"]) == {2}  # by one worker in each of two epochs
    assert "worker-1 was lost" in done.stderr
    assert "the others have taken over all that it had left" in done.stderr
    assert "accounted for  214 samples" in done.stdout + done.stderr


@pytest.mark.limit_s(200)
def test_what_a_killed_worker_had_left_of_data_of_its_own_is_named(tmp_path: Path) -> None:
    done, left = train(tmp_path, "allreduce", at=6, where="step", sharded=False)
    assert done.returncode == 4, done.stderr[-3000:]
    assert len(left) == 2  # the scripts that are left have gone on to their end
    assert "worker-1 was lost" in done.stderr
    assert "what it had left is not in the model" in done.stderr
