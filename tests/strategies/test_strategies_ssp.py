"""Stale synchronous parallel: no worker reads parameters older than the bound, and none waits before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.base import BatchRef, Partitioning
from gradstream.data.plan import PartitionPlan
from gradstream.job.files import load_job
from gradstream.model.base import Batch, Layout
from gradstream.optim.base import Optimizer
from gradstream.optim.schedules import Position
from gradstream.runtime.base import Report
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, NoJitter, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.aggregation import EveryPush, FetchTerms, PushHeader
from gradstream.server.shard.passes import NOBODY, Clocks
from gradstream.server.shard.state import Acknowledge, Apply, Parked, Release, ShardState
from gradstream.strategies import ServerWorker
from gradstream.strategies.ssp import Lockstep
from gradstream.testing import check_strategy
from gradstream.testing.runs import Tokens, check_exactly_once, least_squares, numbered
from gradstream.testing.trials import token_run

WORKERS, CLOCKS = 4, 24
SAMPLES = WORKERS * CLOCKS  # each minibatch is one sample


def config(*, jitter_s: float = 2e-2) -> SimulationConfig:
    """Gradients and links as slow as they like."""
    return SimulationConfig(
        costs={"gradient": Cost(base_s=0.01, jitter=Exponential()), "apply": Cost(base_s=5e-4)},
        network=Network(link=Link(latency_s=1e-3, jitter_s=jitter_s)),
    )


@dataclass(frozen=True, slots=True)
class Read:
    """The parameters that a worker's gradient was computed on.

    Args:
        rank: of the worker.
        clock: its own: minibatches before this one.
        included: by chunk and rank, how many of that worker's first minibatches are in the parameters.
    """

    rank: int
    clock: int
    included: tuple[tuple[int, ...], ...]


class Witness(Tokens):
    """Tokens that record their parameters, which show the minibatches that are in them."""

    def __init__(self, seed: int) -> None:
        super().__init__(num_chunks=2)
        self.layout = Layout.of([("tokens", (2, 128))], torch.float32)
        self.line = lines_of(SAMPLES, WORKERS, seed)
        self.reads: list[Read] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Witness:
        return self  # all workers write into one list

    def gradient(
        self, parameters: torch.Tensor, batch: Batch, gradient: torch.Tensor, *, seed: int, report: Report
    ) -> float:
        assert batch.ids is not None
        (sample,) = batch.ids
        rank, clock = next(
            (rank, line.index(sample)) for rank, line in enumerate(self.line) if sample in line
        )
        counts = parameters.view(2, 128).round().to(torch.int64).tolist()
        included = tuple(tuple(prefix(chunk, line) for line in self.line) for chunk in counts)
        self.reads.append(Read(rank, clock, included))
        gradient.zero_()
        gradient.view(2, 128)[:, int(sample)] = -1.0
        report(len(gradient))
        return 0.0


def prefix(chunk: list[int], line: list[int]) -> int:
    """How many of a worker's minibatches are in a chunk, which must be its first ones, each once."""
    there = [chunk[sample] for sample in line]
    count = sum(there)
    assert there == [1] * count + [0] * (len(line) - count), "not the first ones, or one of them twice"
    return count


def lines_of(samples: int, workers: int, seed: int) -> list[list[int]]:
    """By worker, the samples that it goes through one by one."""
    plan = PartitionPlan(samples, 1, workers, seed=seed)
    return [
        [int(plan.ids(BatchRef(0, rank, k))[0]) for k in range(plan.batches_in(rank, 0))]
        for rank in range(workers)
    ]


def check_bound(reads: list[Read], bound: int) -> int:
    """The four assertions of the method, at each read; returns how far apart clocks were, at most.

    Raises:
        AssertionError: an update of clock ≤ c - s - 1 is missing, or an own one, or one is too far ahead.
    """
    begun, furthest = [0] * WORKERS, 0
    for read in reads:
        begun[read.rank] = read.clock + 1
        for chunk, included in enumerate(read.included):
            where = f"worker-{read.rank} at clock {read.clock}, chunk {chunk}, has {included}"
            assert min(included) >= read.clock - bound, f"{where}: older than {bound} clocks"
            assert included[read.rank] == read.clock, f"{where}: its own updates are not what it sees"
            furthest = max(furthest, read.clock - min(included))
        ahead = read.clock - (min(begun) - 1)
        assert ahead <= bound + 1, f"{where}, {ahead} clocks ahead of one that has begun {begun}"
    return furthest


def reads_of(strategy: gs.Strategy, seed: int, **options: Any) -> list[Read]:
    model = Witness(seed)
    options = {"config": config(), **options}
    simulate(
        model, numbered(SAMPLES), strategy=strategy, optimizer=gs.optim.SGD(lr=1.0), workers=WORKERS, servers=2,
        batch_size=1, epochs=1, chunk_elems=128, seed=seed, **options,
    )  # fmt: skip
    assert len(model.reads) == SAMPLES
    return model.reads


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_read_is_older_than_the_bound_and_some_are_as_old(bound: int) -> None:
    assert max(check_bound(reads_of(gs.SSP(bound), seed), bound) for seed in range(2)) == bound


@pytest.mark.parametrize("bound", [0, 2])
def test_cuts_end_no_wait_and_let_nobody_run_ahead(bound: int) -> None:
    """Workers that wait for a clock stand for a checkpoint, and those that they wait for are held."""
    reads = reads_of(gs.SSP(bound), 1, storage=MemoryStorage(), checkpoint_every=10)
    assert check_bound(reads, bound) == bound


@dataclass(frozen=True, slots=True)
class OneOff(gs.SSP):
    """Planted: reads locally for one clock too many."""

    async def _read(self, worker: ServerWorker) -> None:
        needed = max(0, worker.server.clock - self.bound - 1)
        if worker.version < 0 or worker.clock < needed:
            await worker.pull(min_clock=needed)


@dataclass(frozen=True, slots=True)
class Blind(gs.SSP):
    """Planted: a worker does not see its own updates before it fetches."""

    async def train(self, worker: ServerWorker) -> None:
        async for batch in worker.batches(before=partial(self._read, worker)):
            await worker.accumulate(await worker.gradient(batch))
            await worker.server.push_soon(worker.take_accumulated(), advance_clock=True)


@pytest.mark.parametrize("bound", [0, 3])
def test_the_checker_notices_a_bound_that_is_off_by_one(bound: int) -> None:
    with pytest.raises(AssertionError, match=f"older than {bound} clocks"):
        check_bound(reads_of(OneOff(bound), 0), bound)
    if bound:  # at 0 nobody sees what is in the sum
        check_bound(reads_of(OneOff(bound), 0), bound + 1)


def test_the_checker_notices_who_does_not_see_its_own_updates() -> None:
    with pytest.raises(AssertionError, match="its own updates"):
        check_bound(reads_of(Blind(3), 0), 3)


def test_the_checker_notices_a_shard_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clocks, "slowest", lambda self, chunk: NOBODY)
    with pytest.raises(AssertionError, match="older than 3 clocks"):
        check_bound(reads_of(gs.SSP(3), 0), 3)


# ---- equal methods ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Barrier(gs.Synchronous):
    """Synchronous SGD on the minibatches that SSP's workers have."""

    partitioning: ClassVar[Partitioning] = "partitions"


@pytest.mark.parametrize(
    "optimizer", [gs.optim.SGD, partial(gs.optim.SGD, momentum=0.5)], ids=["sgd", "momentum"]
)
def test_bound_0_is_synchronous_bit_for_bit(optimizer: Callable[..., gs.optim.SGD]) -> None:
    """Σ η·gᵢ is 4η times the mean of four, and on whole numbers any order of summing gives the same bits."""
    model, data = least_squares(64, 300, grid=2.0**-10, reduction="mean")
    lr = 2.0**-9
    job: dict[str, Any] = {"workers": 4, "servers": 2, "batch_size": 4, "epochs": 2, "chunk_elems": 64}

    def end(strategy: gs.Strategy, rate: float, seed: int) -> np.ndarray[Any, Any]:
        run = simulate(
            model,
            data,
            strategy=strategy,
            optimizer=optimizer(lr=rate),
            seed=seed,
            **job,
            config=config(),
        )
        w: np.ndarray[Any, Any] = run.parameters["w"]
        return w

    expected = end(Barrier(), 4 * lr, seed=0)
    assert np.abs(expected).max() > 0
    assert np.array_equal(end(gs.SSP(bound=0), lr, seed=0), expected)
    assert not np.array_equal(end(gs.SSP(bound=2), lr, seed=0), expected)


# At bound 0, by 4 workers: a rule, and the rule of synchronous SGD with the same result.
SAME_AS_SYNCHRONOUS: dict[str, tuple[Optimizer, Optimizer]] = {
    "momentum": (
        gs.optim.SGD(1e-3, momentum=0.5, weight_decay=0.1),
        gs.optim.SGD(4e-3, momentum=0.5, weight_decay=0.1),
    ),
    "nesterov": (gs.optim.Nesterov(1e-3, 0.5), gs.optim.Nesterov(4e-3, 0.5)),
    "adagrad": (
        gs.optim.Adagrad(0.1, eps=4e-3, initial_accumulator=0.16, weight_decay=0.1),
        gs.optim.Adagrad(0.1, eps=1e-3, initial_accumulator=0.01, weight_decay=0.1),
    ),
    "adam": (gs.optim.Adam(0.1, eps=4e-3, weight_decay=0.1), gs.optim.Adam(0.1, eps=1e-3, weight_decay=0.1)),
    "adamw": (gs.optim.AdamW(0.1, eps=4e-3), gs.optim.AdamW(0.1, eps=1e-3)),
}


@pytest.mark.parametrize("rule", SAME_AS_SYNCHRONOUS)
def test_bound_0_is_synchronous_at_the_rate_that_the_rule_makes_of_a_sum(rule: str) -> None:
    model, data = least_squares(64, 300, whole=False, reduction="mean")
    job: dict[str, Any] = {"workers": 4, "servers": 2, "batch_size": 4, "epochs": 1, "chunk_elems": 64}
    mine, theirs = SAME_AS_SYNCHRONOUS[rule]
    found = simulate(model, data, strategy=gs.SSP(bound=0), optimizer=mine, config=config(), **job)
    expected = simulate(model, data, strategy=Barrier(), optimizer=theirs, config=config(), **job)
    assert np.abs(expected.parameters["w"]).max() > 1e-3
    np.testing.assert_allclose(found.parameters["w"], expected.parameters["w"], rtol=0, atol=1e-11)


def test_the_rate_of_the_theorem_counts_the_updates_of_all_workers() -> None:
    """As many updates at σ/√t as P workers make in their first steps go as far as at their own rates."""
    sigma, workers, steps = 0.3, 8, 2000
    lr = gs.schedules.InverseRoot(sigma / workers**0.5)
    own = [lr(Position(step, steps, steps)) for step in range(steps)]
    theorem = [sigma / t**0.5 for t in range(1, workers * steps + 1)]
    assert own[-1] == pytest.approx(theorem[-1])
    assert workers * sum(own) == pytest.approx(sum(theorem), rel=0.02)


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    assert not check_strategy(gs.SSP(bound=1)).broken


@pytest.mark.parametrize("bound", [0, 1, 3, 7])
def test_like_workers_fetch_every_s_to_s_plus_1_steps(bound: int) -> None:
    """A copy serves until it is s clocks old; it has the others' updates that the server had at its fetch."""
    even = SimulationConfig(
        costs={"gradient": Cost(base_s=0.1, jitter=NoJitter())}, network=Network(link=Link(1e-4))
    )
    run = simulate(
        Witness(0), numbered(SAMPLES), strategy=gs.SSP(bound), optimizer=gs.optim.SGD(lr=1.0), workers=WORKERS,
        servers=2, batch_size=1, epochs=1, chunk_elems=128, config=even,
    )  # fmt: skip
    fetches = run.summary["fetches"] - 1  # the final one
    assert SAMPLES / (bound + 1) <= fetches <= SAMPLES / max(1, bound) + WORKERS


# ---- waiting workers --------------------------------------------------------------------------


def test_who_is_through_or_never_begins_holds_nobody_back() -> None:
    """Shares of 1 : 1 : 6: the last worker has the others' time to itself, and one has no share at all."""
    run = simulate(
        Tokens(4), numbered(64), strategy=gs.SSP(1), optimizer=gs.optim.SGD(lr=1.0), workers=4, servers=2,
        batch_size=1, epochs=2, shares=[1, 1, 6, 0], chunk_elems=64, config=config(),
    )  # fmt: skip
    check_exactly_once(run, 64, 2)


@pytest.mark.parametrize("bound", [0, 2])
def test_deaths_hold_nobody_back(bound: int) -> None:
    """Nothing is lost, and each remaining worker finishes; one that takes minibatches over takes part again."""
    for seed in (0, 3):
        outcome = token_run(
            gs.SSP(bound), workers=4, epochs=3, seed=seed, kill=(f"worker-{seed}", 0.02 + 0.015 * seed)
        )
        assert outcome.run is not None, f"seed {seed}: {outcome.ending}"
        assert outcome.lost == [f"worker-{seed}"]


def test_clocks_of_those_who_take_part() -> None:
    clocks = Clocks([0, 1], 3)
    for chunk in (0, 1):
        for rank, clock in ((0, 5), (1, 7), (2, 6)):
            clocks.advance(chunk, rank, clock)
    assert clocks.slowest(0) == 5
    assert clocks.behind(0, 7) == [0, 2]
    clocks.pause(0)
    assert clocks.slowest(0) == 6
    assert clocks.resume(0, 5) == 6, "it comes back at the clock of the slowest"
    assert (clocks.slowest(0), clocks.slowest(1)) == (6, 6)
    clocks.pause(1)
    assert clocks.resume(1, 7) == 7, "and never goes back itself"
    clocks.keep({1})
    assert clocks.slowest(0) == 7
    assert clocks.resume(2, 9) == 9
    assert clocks.slowest(0) == 7, "who is lost does not come back"
    clocks.pause(1)
    assert clocks.slowest(0) == NOBODY


def test_a_fetch_waits_for_the_slowest_and_says_so() -> None:
    state = ShardState([0], EveryPush(), workers=2)
    push = partial(PushHeader, "worker-0", 0, 1, samples=1)
    assert isinstance(state.push(0, Parked(push(sequence=1), "init", assign=True))[0], Apply)
    state.applied(0)
    assert isinstance(state.push(0, Parked(push(sequence=2, clock=1), "a"))[0], Apply)
    state.applied(0)
    terms = FetchTerms("worker-0", 1, after_sequence=2, min_clock=1)
    assert state.fetch(0, terms, "fetch") == []
    assert state.awaited([0], terms.min_clock) == ["worker-1"]
    state.clocks.pause(1)
    assert state.clocks_changed() == [Release("fetch", 0)]
    assert state.clocks_changed() == []


def test_in_step_a_clock_is_one_update_also_where_the_last_to_come_leaves() -> None:
    state = ShardState([0], Lockstep(), workers=3)
    state.push(0, Parked(PushHeader("worker-0", 0, 1, 1, samples=1), "init", assign=True))
    state.applied(0)
    for rank in (2, 0):
        (due,) = state.push(0, Parked(PushHeader(f"worker-{rank}", rank, 1, 5, samples=1, clock=1), rank))
        assert isinstance(due, Apply)
        assert not due.completes
        assert isinstance(state.applied(0)[0], Acknowledge), "nobody keeps it for the others to come"
    assert state.fetch(0, FetchTerms("worker-0", 1, min_clock=1), "fetch") == []
    state.clocks.pause(1)
    (due,) = state.clocks_changed()
    assert isinstance(due, Apply)
    assert (due.update, due.summed, due.completes) == ((), 2, True)
    assert state.applied(0) == [Release("fetch", 0)]
    assert state.version(0) == 1


# ---- processes --------------------------------------------------------------------------------

JOB = """
import json, os
import numpy as np
import gradstream as gs

def gradients(parameters, inputs, targets):
    (sample,), counts = inputs, np.rint(parameters["w"]).astype(int)
    with open(f"reads-{os.getpid()}", "a") as file:
        print(json.dumps([int(sample), counts.tolist()]), file=file)
    gradient = np.zeros((3, 192), np.float32)
    gradient[:, int(sample)] = -1.0
    return 0.0, {"w": gradient}

def job():
    model = gs.from_functions(
        init=lambda seed: {"w": np.zeros((3, 192), np.float32)},
        outputs=lambda parameters, inputs: inputs,
        gradients=gradients,
    )
    numbers = np.arange(192)
    return gs.Job(
        model, gs.from_arrays(numbers, numbers), strategy=gs.SSP(bound=1), optimizer=gs.optim.SGD(lr=1.0),
        workers=3, servers=2, batch_size=1, epochs=1, chunk_elems=192, seed=5,
    )
"""


def test_processes_keep_to_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokens.py").write_text(JOB)
    run = gs.train(load_job("tokens.py"))
    assert np.array_equal(run.parameters["w"], np.ones((3, 192)))
    lines, reads = lines_of(192, 3, seed=5), []
    for path in tmp_path.glob("reads-*"):
        for sample, counts in map(json.loads, path.read_text().splitlines()):
            rank, clock = next((r, line.index(sample)) for r, line in enumerate(lines) if sample in line)
            included = tuple(tuple(prefix(chunk, line) for line in lines) for chunk in counts)
            reads.append(Read(rank, clock, included))
    assert len(reads) == 192
    for read in reads:
        for chunk in read.included:
            assert min(chunk) >= read.clock - 1
            assert chunk[read.rank] == read.clock
    assert 192 // 2 <= run.summary["fetches"] <= 192 + 3
