"""Warm starts: one worker trains alone, the others wait, and no sample is lost."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Coroutine
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data import BatchRef, Ledger, PartitionPlan, QueuePlan
from gradstream.data.plan import epoch_order
from gradstream.errors import ConfigError, Interrupted
from gradstream.report.figures import figures_of
from gradstream.report.lanes import lanes_of
from gradstream.report.progress_line import ProgressLine
from gradstream.report.reason import reason_of
from gradstream.report.sections import workers
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.strategies.together import StaleGradients
from gradstream.telemetry.events import EventDict
from gradstream.testing import properties
from gradstream.testing.runs import QUICK, UNSTEADY, kill_at, least_squares, replace_at
from gradstream.testing.tokens import Tokens, check_exactly_once, numbered
from gradstream.testing.trials import bad_world

NUM_TOKENS, EPOCHS = 24, 6
WARM: dict[str, dict[str, Any]] = {
    "epochs": {"warm_start": "1.5epochs"},
    "samples": {"warm_start": 12, "fetch_every": 3},
}


def tokens(strategy: gs.Strategy, **options: Any) -> gs.Run:
    """A run in which everything applied can be counted."""
    options = {"workers": 4, "epochs": EPOCHS, "config": UNSTEADY, **options}
    return simulate(
        Tokens(num_chunks=3), numbered(NUM_TOKENS), strategy=strategy, optimizer=gs.optim.SGD(lr=1.0), servers=2,
        batch_size=2, chunk_elems=64, deadlines=QUICK, **options,
    )  # fmt: skip


def turns(run: gs.Run) -> list[EventDict]:
    return [event for event in run.events if event["event"] == "warm_start"]


def steps_between(run: gs.Run, begin_s: float, end_s: float) -> set[str]:
    """Names of the workers that have begun a minibatch in this time."""
    steps = [event for event in run.events if event["event"] == "step"]
    return {
        event["node"]
        for event in steps
        if begin_s < event["time_s"] - event["compute_s"] - event["wait_s"] <= end_s
    }


# ---- nothing lost, nothing twice --------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "overlap", "seed"), [("epochs", True, 1), ("epochs", False, 0), ("samples", True, 0)]
)
def test_every_sample_once_and_no_worker_computes_that_waits(length: str, overlap: bool, seed: int) -> None:
    run = tokens(gs.Downpour(push_every=2, overlap=overlap, **WARM[length]), seed=seed)
    check_exactly_once(run, NUM_TOKENS, EPOCHS)
    ledger = [event for event in run.events if event["event"] == "ledger"]
    assert [event["epoch"] for event in ledger] == list(range(EPOCHS))
    begins, ends = turns(run)
    assert (begins["alone"], begins["samples"], len(begins["waiting"])) == ("worker-0", 0, 3)
    assert (ends["alone"], ends["waiting"]) == ("", [])
    assert steps_between(run, begins["time_s"], ends["time_s"] - 0.01) == {"worker-0"}
    assert len(steps_between(run, ends["time_s"], 1e9)) == 4


def test_the_others_begin_when_so_many_samples_are_in_the_model() -> None:
    """Gradients of 3 s: a report that is a quarter of a second late is then at most one step of each worker."""
    slow = SimulationConfig(costs={"gradient": Cost(base_s=3.0)}, network=UNSTEADY.network)
    told = turns(tokens(gs.Downpour(**WARM["samples"]), config=slow))
    assert 12 <= told[1]["samples"] <= 12 + 2


def test_parts_of_workers_that_wait_are_for_the_one_that_trains() -> None:
    """With partitions the first one goes through those of all."""
    strategy = gs.Downpour(warm_start="1.5epochs")
    run = tokens(strategy, config=bad_world(4, 2), shares=[1, 0, 2, 1], assignment="partitions")
    check_exactly_once(run, NUM_TOKENS, EPOCHS)
    assert turns(run)[1]["samples"] >= 1.5 * NUM_TOKENS


@pytest.mark.parametrize(("length", "rank"), [("epochs", 0), ("epochs", 1), ("samples", 0), ("samples", 2)])
def test_a_worker_is_lost_whoever_and_whenever(length: str, rank: int) -> None:
    """In the warm start another worker takes the place of a lost one."""
    script = kill_at(f"worker-{rank}", random.Random(f"{rank} {length}").uniform(0.01, 1.0))
    run = tokens(gs.Downpour(push_every=2, **WARM[length]), seed=rank, script=script)
    check_exactly_once(run, NUM_TOKENS, EPOCHS)


def test_the_next_one_takes_the_place_of_a_lost_one() -> None:
    run = tokens(gs.Downpour(warm_start="3epochs"), script=kill_at("worker-0", 0.3))
    assert [event["alone"] for event in turns(run)] == ["worker-0", "worker-1", ""]
    assert [event["waiting"] for event in turns(run)][1:] == [["worker-2", "worker-3"], []]
    assert turns(run)[-1]["samples"] >= 3 * NUM_TOKENS


def test_one_that_comes_back_waits_too() -> None:
    run = tokens(gs.Downpour(warm_start="3epochs"), script=replace_at("worker-0", 0.3, 0.05))
    check_exactly_once(run, NUM_TOKENS, EPOCHS)
    assert [event["alone"] for event in turns(run)] == ["worker-0", "worker-1", ""]
    back_s = [e["time_s"] for e in run.events if e["event"] == "joined" and e["who"] == "worker-0"][-1]
    assert steps_between(run, back_s, turns(run)[-1]["time_s"] - 0.01) == {"worker-1"}
    assert "worker-0" in steps_between(run, turns(run)[-1]["time_s"], 1e9)


def stop_at(seconds: float) -> Callable[[Any], Coroutine[Any, Any, None]]:
    async def script(cluster: Any) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.stop()

    return script


@pytest.mark.parametrize("length", WARM)
def test_stopped_anywhere_it_goes_on_where_it_was(length: str) -> None:
    rng, stops = random.Random(5), 0
    for _ in range(2):
        storage, when_s = MemoryStorage(), rng.uniform(0.05, 1.0)
        strategy = gs.Downpour(push_every=2, **WARM[length])
        try:
            run = tokens(strategy, storage=storage, script=stop_at(when_s))
        except Interrupted:
            stops += 1
            run = tokens(strategy, storage=storage, resume=True)
        check_exactly_once(run, NUM_TOKENS, EPOCHS)
    assert stops


def test_a_resumed_run_has_its_warm_start_behind_it() -> None:
    strategy, storage = gs.Downpour(warm_start="1epoch"), MemoryStorage()
    with pytest.raises(Interrupted):
        tokens(strategy, storage=storage, script=stop_at(0.7))
    run = tokens(strategy, storage=storage, resume=True)
    (resumed,) = [event for event in run.events if event["event"] == "resumed"]
    assert resumed["samples"] > 2 * NUM_TOKENS
    assert not turns(run)
    assert len(steps_between(run, 0.0, 1e9)) == 4


# ---- the ledger -------------------------------------------------------------------------------


class Owners:
    """Three workers that go through their minibatches."""

    def __init__(self, batch_size: int, queue: bool) -> None:
        self.ledger = Ledger((QueuePlan if queue else PartitionPlan)(18, batch_size, 3), epochs=2)
        self.owners: dict[BatchRef, int] = {}
        self.in_hand: list[list[BatchRef]] = [[], [], []]
        self.held: set[int] = set()
        self.lost: set[int] = set()

    def ask(self, rank: int) -> None:
        self.in_hand[rank] += self.ledger.leases.hand_out(rank, 2)

    def take(self, rank: int) -> None:
        """A minibatch is begun, and gets its receipt before anything else happens."""
        if self.in_hand[rank]:
            ref = self.in_hand[rank].pop(0)
            assert ref not in self.owners, f"{ref} is with {self.owners[ref]} and {rank}"
            self.owners[ref] = rank
            assert self.ledger.receipt(ref, rank)

    def hold(self, rank: int) -> None:
        self.ledger.leases.open(rank, to_all=True)
        self.held.add(rank)

    def let_in(self, rank: int) -> None:
        self.ledger.leases.open(rank, to_all=False)
        self.held.discard(rank)

    def lose(self, rank: int) -> None:
        self.ledger.lost(rank)
        self.lost.add(rank)
        self.in_hand[rank].clear()

    def end(self) -> None:
        """One of the workers that are left ends the run alone."""
        survivor, *others = [rank for rank in range(3) if rank not in self.lost]
        for rank in others:
            self.lose(rank)
        for _ in range(36):
            self.ask(survivor)
            self.take(survivor)
            self.take(survivor)


@settings(max_examples=150)
@given(st.data())
def test_whichever_worker_waits_or_is_lost_each_minibatch_has_one_owner(data: st.DataObject) -> None:
    run = Owners(data.draw(st.integers(1, 3)), data.draw(st.booleans()))
    working, away = (
        [Owners.ask, Owners.take, Owners.take, Owners.hold],
        [Owners.let_in],
    )
    for _ in range(data.draw(st.integers(0, 60))):
        rank = data.draw(st.sampled_from([rank for rank in range(3) if rank not in run.lost]))
        dies = [Owners.lose] if len(run.lost) < 2 else []
        data.draw(st.sampled_from((away if rank in run.held else working) + dies))(run, rank)
    run.end()
    assert run.ledger.finished
    assert len(run.owners) == run.ledger.num_receipts


def test_what_a_run_goes_through_in_all() -> None:
    plan = PartitionPlan(20, 3, 2)
    for limits in ({"epochs": 5}, {"steps": 7}):
        ledger = Ledger(plan, epochs=limits.get("epochs"), steps=limits.get("steps"))
        assert ledger.total_samples == sum(ledger.samples(epoch) or 0 for epoch in range(ledger.num_epochs))


# ---- phases -----------------------------------------------------------------------------------


def phased(first: int | str, second: int | str) -> gs.Run:
    """Two phases of two epochs each, with warm starts."""
    each = [gs.Phase(epochs=2, strategy=gs.Downpour(warm_start=length)) for length in (first, second)]
    return tokens(gs.Downpour(), epochs=None, phases=each)


def test_the_warm_start_of_a_phase_counts_from_the_beginning_of_the_run() -> None:
    run = phased("0.5epochs", "3epochs")
    check_exactly_once(run, NUM_TOKENS, 4)
    assert [event["alone"] for event in turns(run)] == ["worker-0", "", "worker-0", ""]
    assert turns(run)[2]["samples"] == 2 * NUM_TOKENS
    assert turns(run)[3]["samples"] >= 3 * NUM_TOKENS
    with pytest.raises(ConfigError, match=r"takes all 96 samples of the run up to the end of phases\[1\]"):
        phased("0.5epochs", "4epochs")


def test_nobody_hears_of_a_warm_start_that_was_over_before() -> None:
    assert [event["alone"] for event in turns(phased("1epochs", "1epochs"))] == ["worker-0", ""]
    run = phased(47, 47)  # the warm start ends with its phase
    assert [event["alone"] for event in turns(run)] == ["worker-0"]
    first_s, second_s = [event["time_s"] for event in run.events if event["event"] == "phase"]
    paused_s = [worker.paused_s for worker in figures_of(run.events).workers]
    assert paused_s == pytest.approx([0.0, *[second_s - first_s] * 3], abs=0.01)


# ---- arithmetic -------------------------------------------------------------------------------

FEATURES = 200


@pytest.mark.parametrize("shards", [1, 2])
def test_alone_a_replica_is_one_node_that_goes_through_all_of_the_data(shards: int) -> None:
    """Bit for bit, in the order of samples of one node, with the server's own rule."""
    model, data = least_squares(96, FEATURES, whole=False, reduction="mean")
    rule = gs.optim.Adagrad(lr=0.05, initial_accumulator=0.01)
    w, gradient = torch.zeros(2, FEATURES, dtype=torch.float64)
    sums = torch.full((FEATURES,), 0.01, dtype=torch.float64)
    for step in range(3 * 24):
        epoch, batch = divmod(step, 24)
        model.gradient(
            w, data.batch(epoch_order(96, 3, epoch)[4 * batch : 4 * batch + 4]), gradient,
            seed=0, report=lambda _: None,
        )  # fmt: skip
        rule.apply(w, gradient, {"sum": sums}, lr=0.05, step=step + 1)
    run = simulate(
        model, data, strategy=gs.Downpour(push_every=3, fetch_every=2, local_momentum=0.9, warm_start=3 * 96 - 1),
        optimizer=rule, workers=4, servers=shards, batch_size=4, epochs=3, chunk_elems=64, seed=3, config=UNSTEADY,
        deadlines=QUICK,
    )  # fmt: skip
    assert np.array_equal(run.parameters["w"], w.numpy())
    assert {event["rank"] for event in run.events if event["event"] == "step"} == {0}


def adagrad_counts(**options: Any) -> np.ndarray[Any, Any]:
    """Parameters of `Tokens` by Adagrad: each sample is pushed once an epoch, with gradient -1."""
    run = simulate(
        Tokens(num_chunks=3), numbered(NUM_TOKENS), optimizer=gs.optim.Adagrad(lr=1.0, initial_accumulator=0.5),
        strategy=gs.Downpour(warm_start="3epochs"),
        workers=4, servers=2, batch_size=2, epochs=EPOCHS, chunk_elems=64, config=UNSTEADY, deadlines=QUICK,
        **options,
    )  # fmt: skip
    return run.parameters["tokens"][:, :NUM_TOKENS]


def test_adagrads_sums_go_on_when_the_others_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever worker pushes at whichever time, the k-th push of a sample is a step of 1 / √(½ + k)."""
    expected = sum(1 / math.sqrt(0.5 + k) for k in range(1, EPOCHS + 1))
    assert np.allclose(adagrad_counts(), expected, rtol=1e-6)

    # The planted fault: the sums begin anew with the 37th update, when the others join.
    inner = gs.optim.Adagrad.apply

    def forgets(
        self: gs.optim.Adagrad, parameters: Any, gradient: Any, state: Any, *, lr: float, step: int
    ) -> None:
        if step == 37:
            state["sum"].fill_(0.5)
        inner(self, parameters, gradient, state, lr=lr, step=step)

    monkeypatch.setattr(gs.optim.Adagrad, "apply", forgets)
    assert not np.allclose(adagrad_counts(), expected, rtol=1e-6)


LENGTH: dict[str, Any] = {"warm_start": 6}
STRATEGIES: dict[str, Any] = {
    "downpour": gs.Downpour(**LENGTH),
    "staleness-aware": gs.strategies.StalenessAware(**LENGTH),
    "softsync": gs.Softsync(**LENGTH),
    "asysg": gs.strategies.AsySG(gradients=2, **LENGTH),
    "dc-asgd": gs.strategies.DCASGD(overlap=True, **LENGTH),
}


@pytest.mark.parametrize(
    ("name", "law"),
    [
        *product(STRATEGIES, ["travels"]),
        *product(["downpour", "softsync", "dc-asgd"], ["plain"]),
        *product(["downpour", "dc-asgd"], ["repeatable", "ends", "resumes", "deaths"]),
    ],
)
@pytest.mark.usefixtures("few_seeds")
def test_the_laws_of_strategies_hold_with_a_warm_start(name: str, law: str) -> None:
    assert getattr(properties, law)(STRATEGIES[name])


def test_a_worker_that_waited_begins_with_the_newest_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap it has a fetch of the run's first instant; the 24 gradients of the warm start came after it."""
    strategy = gs.strategies.DCASGD(strength=0.0, overlap=True, warm_start="2epochs")
    run = tokens(strategy)
    check_exactly_once(run, NUM_TOKENS, EPOCHS)
    assert run.summary["staleness_max"] < 24

    # The planted fault: the worker computes on that fetch.
    monkeypatch.setattr(StaleGradients, "fetch", fetch_as_in_the_middle)
    assert tokens(strategy).summary["staleness_max"] >= 24


async def fetch_as_in_the_middle(self: StaleGradients, worker: Any, pending: Any, *, overlap: bool) -> Any:
    await worker.swap_in(pending or worker.server.fetch_soon())
    return worker.server.fetch_soon() if overlap else None


# ---- progress and report ------------------------------------------------------------------


def test_a_worker_that_waits_is_neither_slow_nor_dead() -> None:
    run = tokens(gs.Downpour(warm_start="3epochs"))
    progress = ProgressLine()
    said, lines = list[str](), list[str]()
    for event in run.events:
        progress.update(event)
        lines.append(progress.line())
        said += [progress.notice(event)] if event["event"] == "warm_start" else []
    assert said == [
        "warm start: worker-0 trains alone, 3 workers wait",
        "the warm start is over: all workers train",
    ]
    assert any("4/4 workers (3 wait) · " in line for line in lines)
    assert "wait)" not in next(line for line in reversed(lines) if " workers" in line)

    figures = figures_of(run.events)
    first, *others = figures.workers
    together_s = turns(run)[-1]["time_s"]
    assert first.paused_s == 0
    assert [worker.paused_s for worker in others] == pytest.approx([together_s] * 3)
    reason = reason_of(figures)
    assert (reason.kind, reason.culprit) == ("paused", "")
    assert [moment.text for moment in figures.story if moment.kind == "warm_start"] == said
    lanes = lanes_of(run.events).lanes
    assert [len(lane.pauses) for lane in lanes] == [0, 1, 1, 1]
    assert "paused" in workers(figures, {})
    assert "paused" not in workers(figures_of(tokens(gs.Downpour()).events), {})


# ---- refused ---------------------------------------------------------------------------------


def test_a_warm_start_that_takes_the_whole_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is left for all workers together"):
        tokens(gs.Downpour(warm_start=f"{EPOCHS}epochs"))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"warm_start": "2 minutes"}, "Downpour.warm_start='2 minutes'"),
        ({"warm_start": -1}, "at least 0"),
        ({"warm_start": True}, "Downpour.warm_start=True"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        gs.Downpour(**options)
