from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream.checkpoint import verify
from gradstream.data.base import BatchRef
from gradstream.data.open_ledger import OpenLedger
from gradstream.errors import InternalError
from gradstream.job.job import Job
from gradstream.model.buffers import Buffers
from gradstream.report.progress_line import ProgressLine
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing.runs import QUICK, kill_at, least_squares
from gradstream.worker.loop import LoopContext, Round, Turn

RATE = 1 / 64


@dataclass
class Scripted:
    """A loop that goes through minibatches of its own, as a user's would in a thread."""

    inputs: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    sizes: list[int]
    ended: bool = False
    batches: int = 0
    samples: int = 0
    final: torch.Tensor | None = None
    begin_at: int = 0
    skip: int = 0  # minibatches before the run was resumed
    entries: int = 1  # a newcomer can begin with every round, or with every so manieth
    heard: list[tuple[int, list[int], list[int]]] = field(default_factory=list)

    def begin(self, context: LoopContext) -> None:
        self.skip = context.replica.step
        self.begin_at = sum(self.sizes[: self.skip])
        self.contributed: Counter[int] = Counter()

    averages_gradients = goes_on = is_slow = False
    behind = None
    left = None
    stays_out = False

    @property
    def mark(self) -> int:
        return 0 if self.ended else -2 if self.batches % self.entries else 2

    def members(
        self, ranks: Sequence[int], number: int, entered: Sequence[int] = (), *, in_step: bool = True
    ) -> None:
        self.heard.append((number, list(ranks), list(entered)))

    def again(self, current: Round) -> Turn:
        current.gradient.copy_(self.latest)
        return self.turned

    def turn(self, parameters: torch.Tensor, given: Round) -> Turn:
        gradient = given.gradient
        if self.skip + self.batches == len(self.sizes):
            self.ended = True
            gradient.zero_()
            return Turn(0, RATE, math.nan)
        first = self.begin_at + self.samples
        chosen = slice(first, first + self.sizes[self.skip + self.batches])
        x, y = self.inputs[chosen], self.targets[chosen]
        residual = x @ np.round(parameters.numpy() * 4) / 4 - y
        gradient.copy_(torch.from_numpy(residual @ x / len(x)))
        self.batches += 1
        self.samples += len(x)
        self.latest, self.turned = gradient.clone(), Turn(len(x), RATE, float(residual @ residual) / len(x))
        return self.turned

    def state(self) -> dict[str, Any]:
        return {"loop.registered": np.array([self.batches])}

    def restore(self, state: Mapping[str, Any], *, own: bool) -> None:
        self.restored = state, own

    def logged(self) -> tuple[()]:
        return ()

    def finish(self, parameters: torch.Tensor, buffers: Buffers) -> None:
        self.final = parameters.clone()


def round_of(gradient: torch.Tensor) -> Round:
    return Round(gradient, known=lambda turn: None, report=lambda elems: None)


@dataclass
class Own:
    """Every worker's part of one data set: its minibatches by size."""

    sizes: list[list[int]]
    optimizer: str = ""
    averages_gradients: bool = False
    name: str = "own"
    num_samples: int = 0
    num_test_samples: int = 0
    entries: int = 1
    loops: dict[int, Scripted] = field(default_factory=dict)

    def loop(self, rank: int) -> Scripted:
        _, data = least_squares(64, 5, reduction="mean")
        start = sum(map(sum, self.sizes[:rank]))
        ids = np.arange(start, start + sum(self.sizes[rank]))
        batch = data.batch(ids)
        self.loops[rank] = Scripted(batch.inputs, batch.targets, self.sizes[rank], entries=self.entries)
        return self.loops[rank]


def run_of(sizes: list[list[int]], strategy: str | gs.Strategy, **options: Any) -> tuple[gs.Run, Own]:
    model, _ = least_squares(64, 5, reduction="mean")
    data = Own(sizes)
    job = Job(model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=RATE), workers=len(sizes), **options)  # type: ignore[arg-type]
    return gs.simulate(job), data


@pytest.mark.parametrize("overlap", [True, False])
def test_uneven_loops_under_synchronous_are_rounds_of_whoever_has_samples(overlap: bool) -> None:
    sizes = [[8, 8, 4], [8], [4, 8, 8, 8, 4]]
    run, own = run_of(sizes, gs.Synchronous(overlap=overlap), deadlines=QUICK)
    # The same by hand: each round is the mean over the samples of all that took part.
    loops = {rank: own.loop(rank) for rank in range(3)}
    w = torch.zeros(5, dtype=torch.float64)
    for _ in range(5):
        total, gradient = 0, torch.zeros_like(w)
        parts = []
        for loop in loops.values():
            into = torch.zeros_like(w)
            turn = loop.turn(w, round_of(into))
            parts.append((turn.samples, into))
            total += turn.samples
        for samples, part in parts:
            if samples:
                gradient.add_(part, alpha=samples / total)
        w.add_(gradient, alpha=-RATE)
    np.testing.assert_allclose(run.parameters["w"], w.numpy(), rtol=1e-12)
    assert run.summary["samples_accounted"] == 60
    assert [len([r for r in run.history if r["rank"] == rank]) for rank in range(3)] == [3, 1, 5]


@pytest.mark.parametrize("strategy", ["synchronous", gs.Downpour(), gs.Downpour(push_every=2, fetch_every=2)])
def test_everybody_ends_with_the_same_final_parameters(strategy: str | gs.Strategy) -> None:
    run, own = run_of([[8, 8, 8], [8, 8], [8]], strategy)
    for loop in own.loops.values():
        assert loop.final is not None
        np.testing.assert_array_equal(loop.final.numpy(), run.parameters["w"])
    assert run.summary["samples_accounted"] == 48
    assert run.summary["optimizer"] == "sgd"


def test_a_loop_without_any_minibatch_neither_hangs_nor_counts() -> None:
    run, _ = run_of([[8, 8], []], "synchronous")
    alone, _ = run_of([[8, 8]], "synchronous")
    np.testing.assert_array_equal(run.parameters["w"], alone.parameters["w"])
    both, _ = run_of([[], []], "downpour")
    assert both.summary["samples_accounted"] == 0
    np.testing.assert_array_equal(both.parameters["w"], np.zeros(5))


@pytest.mark.parametrize("strategy", ["synchronous", "downpour"])
@pytest.mark.parametrize(
    ("sizes", "brief"), [([[8] * 4, [8] * 3], []), ([[8] * 4, [8], []], ["worker-1", "worker-2"])]
)
def test_a_loop_that_ends_long_before_others_is_named(
    strategy: str, sizes: list[list[int]], brief: list[str]
) -> None:
    run, _ = run_of(sizes, strategy)
    told = [event for event in run.events if event["event"] == "left_over"]
    assert [event["who"] for event in told] == brief
    assert all("the longest one after 4" in event["message"] for event in told)


def test_downpour_with_one_loop_is_plain_sgd() -> None:
    run, own = run_of([[8] * 6], gs.Downpour(overlap=False))
    plain, w = own.loop(0), torch.zeros(5, dtype=torch.float64)
    gradient = torch.zeros_like(w)
    while plain.turn(w, round_of(gradient)).samples:
        w.add_(gradient, alpha=-RATE)
    np.testing.assert_array_equal(run.parameters["w"], w.numpy())


def test_what_a_loop_that_dies_had_left_is_told_and_may_be_allowed() -> None:
    model, _ = least_squares(64, 5, reduction="mean")
    config = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.05)})
    own = Own([[1] * 20, [1] * 20])
    job = Job(model, own, strategy="downpour", optimizer=gs.optim.SGD(lr=RATE), deadlines=QUICK)  # type: ignore[arg-type]
    with pytest.raises(gs.errors.PeerLostError, match="worker-1"):  # nobody knows what it had left
        gs.simulate(job, config=config, script=kill_at("worker-1", 0.4))
    job = dataclasses.replace(job, allow_lost=True)
    run = gs.simulate(job, config=config, script=kill_at("worker-1", 0.4))
    assert run.summary["workers_lost"] == ["worker-1"]
    assert run.summary["samples_accounted"] == 20


@pytest.mark.parametrize("seconds", [0.03, 0.11, 0.16, 0.24, 0.31, 0.37, 0.48, 0.52, 0.66, 0.71, 0.83, 0.97])
def test_a_round_that_a_death_has_broken_is_made_again_once_by_the_others(seconds: float) -> None:
    """The parameters are those of rounds with three workers up to some round, and of two from it on."""
    model, _ = least_squares(64, 5, reduction="mean")
    own, config = Own([[1] * 20] * 3), gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.05)})
    job = Job(model, own, strategy="synchronous", optimizer=gs.optim.SGD(lr=RATE), workers=3, deadlines=QUICK)  # type: ignore[arg-type]
    run = gs.simulate(job, config=config, script=kill_at("worker-1", seconds))
    assert run.summary["workers_lost"] == ["worker-1"]
    for rank in (0, 2):
        final = own.loops[rank].final
        assert final is not None
        np.testing.assert_array_equal(final.numpy(), run.parameters["w"])

    def by_hand(whole: int) -> torch.Tensor:
        loops, w = {rank: own.loop(rank) for rank in range(3)}, torch.zeros(5, dtype=torch.float64)
        for number in range(20):
            there = [rank for rank in range(3) if rank != 1 or number < whole]
            gradients = [torch.zeros_like(w) for _ in there]
            for rank, gradient in zip(there, gradients, strict=True):
                loops[rank].turn(w, round_of(gradient))
            w.add_(torch.stack(gradients).mean(0), alpha=-RATE)
        return w

    w = torch.from_numpy(run.parameters["w"])
    assert any(torch.allclose(w, by_hand(whole), rtol=1e-12, atol=0) for whole in range(21))


@pytest.mark.parametrize("seconds", [0.31, 0.41, 0.43, 0.48, 0.52])
@pytest.mark.parametrize("entries", [1, 2, 3, 7])
def test_a_newcomer_is_in_no_round_with_which_its_loop_cannot_begin(entries: int, seconds: float) -> None:
    model, _ = least_squares(64, 5, reduction="mean")
    own = Own([[1] * 20] * 3, entries=entries)
    config = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.05)})
    job = Job(model, own, strategy="allreduce", optimizer=gs.optim.SGD(lr=RATE), workers=3, deadlines=QUICK)  # type: ignore[arg-type]

    async def script(cluster: Any) -> None:
        await kill_at("worker-1", seconds)(cluster)
        await cluster.restart("worker-1")

    gs.simulate(job, config=config, script=script)
    for rank in (0, 2):
        heard = own.loops[rank].heard
        ((number, ranks),) = [(number, ranks) for number, ranks, entered in heard if entered]
        assert ranks == [0, 1, 2] and (number + 1) % entries == 0
        assert all(ranks == [0, 2] for one, ranks, _ in heard if 0 < one < number)


@pytest.mark.parametrize("slow_s", [2.0, 12.0, 500.0])
def test_the_others_wait_for_a_newcomer_for_a_while_and_say_so(slow_s: float) -> None:
    """Its first gradient takes so long; after `join_s` it is lost alone, and the others make the round without it."""
    model, _ = least_squares(64, 5, reduction="mean")
    own, speeds = Own([[1] * 20] * 3), {"worker-1": 1.0}
    config = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.05)}, speeds=speeds)
    limits, rule = dataclasses.replace(QUICK, join_s=20.0), gs.optim.SGD(lr=RATE)
    job = Job(model, own, strategy="allreduce", optimizer=rule, workers=3, deadlines=limits)  # type: ignore[arg-type]

    async def script(cluster: Any) -> None:
        await kill_at("worker-1", 0.4)(cluster)
        speeds["worker-1"] = 0.05 / slow_s
        await cluster.restart("worker-1")

    run = gs.simulate(job, config=config, script=script)
    shown, lines = ProgressLine(), list[str]()
    for event in run.events:
        shown.update(event)
        lines.append(shown.notice(event))
    told = [event for event in run.events if event["event"] == "entering"]
    left = [event for event in run.events if event["event"] == "left" and event["lost"]]
    assert [event["node"] for event in told] == ["worker-1"] * (slow_s > 3)
    assert any(line.startswith("the others wait for worker-1, for 20 s at most") for line in lines) == bool(
        told
    )
    if slow_s < 20:
        assert len(left) == 1
        return
    assert len(left) == 2
    assert re.search(
        r"did not compute a gradient within 20 s.* before session.wrap; .*join_s", left[1]["reason"]
    )
    assert left[1]["time_s"] < 0.5 + 20 + QUICK.lease_s + 0.5
    assert run.summary["samples_accounted"] == 40


# ---- stopped and resumed --------------------------------------------------------------------

SLOW = gs.sim.SimulationConfig(costs={"gradient": gs.sim.Cost(base_s=0.05)})


def stopped_at(seconds: float, sizes: list[list[int]], strategy: str | gs.Strategy, **options: Any) -> gs.Run:
    """A run that is stopped, and resumed if it was not over by then."""

    async def script(cluster: Any) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.stop()

    storage = MemoryStorage()
    model, _ = least_squares(64, 5, reduction="mean")
    job = Job(model, Own(sizes), strategy=strategy, workers=len(sizes), deadlines=QUICK, **options)  # type: ignore[arg-type]
    try:
        return gs.simulate(job, config=SLOW, storage=storage, script=script)
    except gs.errors.Interrupted as error:
        stopped = error
    manifest = verify(storage, stopped.checkpoint)
    left = [sizes[rank][: manifest.steps[f"worker-{rank}"]] for rank in range(len(sizes))]
    assert manifest.samples == {f"worker-{rank}": sum(part) for rank, part in enumerate(left)}
    return gs.simulate(job, config=SLOW, storage=storage, resume=True)


@pytest.mark.parametrize("seconds", [0.06, 0.12, 0.17, 0.23, 0.3])
def test_a_synchronous_run_of_loops_goes_on_where_it_was_stopped(seconds: float) -> None:
    sizes = [[8, 8, 4, 4], [8], [4, 8, 8, 4, 4, 2]]  # one runs out early: rounds without samples
    rule = gs.optim.SGD(lr=RATE, momentum=0.5)
    whole = stopped_at(100.0, sizes, "synchronous", optimizer=rule)
    run = stopped_at(seconds, sizes, "synchronous", optimizer=rule)
    assert [event for event in run.events if event["event"] == "resumed"]
    np.testing.assert_array_equal(run.parameters["w"], whole.parameters["w"])
    assert run.summary["samples_accounted"] == whole.summary["samples_accounted"] == 62


@pytest.mark.parametrize("strategy", [gs.Downpour(), gs.Downpour(push_every=2, fetch_every=3, overlap=False)])
def test_an_asynchronous_run_of_loops_has_every_sample_once(strategy: gs.Strategy) -> None:
    for seconds in (0.06, 0.11, 0.16):
        run = stopped_at(
            seconds, [[8, 8, 4, 4], [8], [4, 8, 8, 4]], strategy, optimizer=gs.optim.SGD(lr=RATE)
        )
        assert [event for event in run.events if event["event"] == "resumed"]
        assert run.summary["samples_accounted"] == 56


# ---- the ledger alone -------------------------------------------------------------------


def test_rounds_end_for_all_before_the_same_one() -> None:
    ledger = OpenLedger(2, rounds=True)
    assert ledger.ended(0, batches=2, samples=16, next_round=3) is False  # the other still has data
    # The other has run out in round 3, which the first was told to take part in: so both go on to 4.
    assert ledger.ended(1, batches=3, samples=24, next_round=4) is True
    assert ledger.ended(0, batches=2, samples=16, next_round=4) is True


def test_a_round_that_one_was_told_to_take_part_in_is_held_by_all() -> None:
    ledger = OpenLedger(2, rounds=True)
    assert ledger.ended(0, batches=3, samples=3, next_round=4) is False
    assert ledger.ended(1, batches=3, samples=3, next_round=4) is False  # 0 is in it already
    assert ledger.ended(0, batches=3, samples=3, next_round=5) is True
    assert ledger.ended(1, batches=3, samples=3, next_round=5) is True


def test_partitions_end_once_every_minibatch_has_its_receipt() -> None:
    ledger = OpenLedger(2, rounds=False)
    assert ledger.ended(0, batches=1, samples=5, next_round=1) is None
    assert ledger.receipt(BatchRef(0, 0, 0), 0)
    assert not ledger.receipt(BatchRef(0, 0, 0), 0)
    assert ledger.ended(1, batches=2, samples=7, next_round=2) is None
    assert ledger.missing(0) == 2
    assert ledger.receipt(BatchRef(0, 1, 1), 1)
    assert ledger.ended(0, batches=1, samples=5, next_round=1) is None
    assert ledger.receipt(BatchRef(0, 1, 0), 1)
    assert ledger.ended(0, batches=1, samples=5, next_round=1) is True
    assert ledger.finished
    assert (ledger.num_batches(0), ledger.samples(0)) == (3, 12)
    with pytest.raises(InternalError, match="worker 1"):
        ledger.receipt(BatchRef(0, 0, 1), 1)


def test_a_lost_worker_is_not_waited_for() -> None:
    ledger = OpenLedger(2, rounds=False)
    assert ledger.lost(1) == 0
    assert ledger.ended(0, batches=0, samples=0, next_round=1) is True
