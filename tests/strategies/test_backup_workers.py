"""Backup workers: every update is of the same N of N + b contributions, and says of which samples."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import ConfigError, PeerLostError
from gradstream.report.page import PageSource, page
from gradstream.report.staleness import quorums
from gradstream.run.result import Run
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, LogNormal, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.aggregation import FetchTerms, PushHeader
from gradstream.server.shard.agreement import Quorum
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.state import Acknowledge, Apply, Parked, QuorumDecision, Release, ShardState
from gradstream.strategies.synchronous import SynchronousRound
from gradstream.telemetry.events import EventDict
from gradstream.testing.runs import QUICK, Sized, kill_at, least_squares, numbered
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap

LR = 2.0**-7
GRID = 2.0**-10
FEATURES = 300  # 5 chunks of 64 elements

# ---- which contributions ------------------------------------------------------------------


def first_shard(decisions: list[QuorumDecision], *, needed: int, num_shards: int, num_chunks: int) -> Quorum:
    """The part of a first shard of as many chunks in all; its decisions go into a list."""
    rule = SynchronousRound(3, "mean", backup=1)
    config = ShardConfig(0, num_shards, rule, gs.optim.SGD(LR), quorum=needed)
    served: Any = SimpleNamespace(serve=lambda method, handler: None)
    runtime: Any = None
    return Quorum(runtime, served, config, ChunkMap(64 * num_chunks, 64, num_shards), decisions.append)


def test_a_contribution_is_whole_with_its_last_chunk() -> None:
    decisions: list[QuorumDecision] = []
    quorum = first_shard(decisions, needed=1, num_shards=1, num_chunks=3)
    for chunk in (0, 2, 0):
        quorum.came(0, 1, chunk)
    quorum.came(0, 2, 0)
    assert decisions == []
    quorum.came(0, 1, 1)
    assert decisions == [QuorumDecision(0, (1,))]
    for chunk in (1, 2):
        quorum.came(0, 2, chunk)  # too late to matter
    assert decisions == [QuorumDecision(0, (1,))]


def test_the_first_n_that_every_shard_holds_are_chosen_once() -> None:
    decisions: list[QuorumDecision] = []
    quorum = first_shard(decisions, needed=2, num_shards=2, num_chunks=2)

    def num_decided(said: Sequence[tuple[int, int, int]]) -> list[int]:
        """Number of decisions after each message of (shard, round, rank)."""
        counts = []
        for shard, round_, rank in said:
            quorum.hear(shard, v1.Whole(round=round_, rank=rank))
            counts.append(len(decisions))
        return counts

    said = [(0, 0, 3), (1, 0, 3), (0, 0, 3), (0, 0, 1), (0, 0, 2), (1, 0, 2), (1, 0, 1), (0, 1, 1)]
    assert num_decided(said) == [0] * 5 + [1] * 3
    assert decisions == [QuorumDecision(0, (2, 3))]
    assert num_decided([(1, 1, 1), (0, 1, 3), (1, 1, 3)]) == [1, 1, 2]
    assert decisions[-1] == QuorumDecision(1, (1, 3))


def contribution(rank: int, round_: int, sequence: int) -> PushHeader:
    return PushHeader(f"worker-{rank}", rank, 1, sequence, samples=1, round=round_, base_version=round_)


def shard(num_chunks: int = 1) -> ShardState:
    """Three workers, of which two are needed; the initial parameters are there."""
    state = ShardState(range(num_chunks), SynchronousRound(3, "mean", backup=1), quorum=True)
    for chunk in range(num_chunks):
        state.push(chunk, Parked(contribution(9, 0, 1), f"init-{chunk}", assign=True))
        state.applied(chunk)
    return state


def test_a_shard_waits_for_the_verdict_and_drops_what_it_leaves_out() -> None:
    state = shard()
    for rank in (2, 0, 1):
        assert state.push(0, Parked(contribution(rank, 0, 1), rank)) == []
    assert state.fetch(0, FetchTerms("worker-1", 1, min_version=1, after_sequence=1), "late") == []
    dropped, apply = state.decide(QuorumDecision(0, (0, 2)))
    assert isinstance(dropped, Acknowledge)
    assert (dropped.token, dropped.outcome) == (1, "dropped")
    assert isinstance(apply, Apply)
    assert [held.token for held in apply.update] == [0, 2]  # by rank
    assert Release("late", 0) in state.applied(0)
    # The answer was lost: the retry hears the same again, from those that were applied too.
    again = [state.push(0, Parked(contribution(rank, 0, 1), "again"))[0] for rank in (0, 1)]
    assert [one.outcome for one in again if isinstance(one, Acknowledge)] == ["duplicate", "dropped"]


def test_a_fetch_that_is_there_before_its_own_late_push_is_answered() -> None:
    state = shard()
    for rank in (0, 2):
        state.push(0, Parked(contribution(rank, 0, 1), rank))
    state.decide(QuorumDecision(0, (0, 2)))
    state.applied(0)
    assert state.fetch(0, FetchTerms("worker-1", 1, min_version=1, after_sequence=1), "f") == []
    answers = state.push(0, Parked(contribution(1, 0, 1), 1))
    assert [type(one) for one in answers] == [Acknowledge, Release]


# ---- the result depends on the accepted samples alone -------------------------------------


def rounds_of(run: Run) -> list[EventDict]:
    return [event for event in run.events if event["event"] == "round"]


def replayed(model: Any, data: Any, batches: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """One node that goes through exactly these samples: a loop of a gradient and a step of torch.optim."""
    w = torch.zeros(model.layout.elems, dtype=model.layout.dtype, requires_grad=True)
    w.grad = torch.zeros_like(w)
    optimizer = torch.optim.SGD([w], lr=LR, momentum=0.5, fused=True)
    with torch.no_grad():
        for ids in batches:
            model.gradient(w.detach(), data.batch(np.array(ids)), w.grad, seed=0, report=lambda _: None)
            w.grad.mul_(1 / len(ids))
            optimizer.step()
    return w.detach().numpy()


POOR = Link(latency_s=1e-3, jitter_s=1e-3, loss=0.01, duplicate=0.05)
NODES = [f"worker-{rank}" for rank in range(5)] + [f"shard-{rank}" for rank in range(3)]
NOISY = {"gradient": Cost(base_s=1e-2, jitter=Exponential()), "apply": Cost(base_s=1e-3)}
WORLDS = {
    "noisy": SimulationConfig(costs=NOISY),
    "slow link": SimulationConfig(costs=NOISY, network=Network(cards={"worker-1": 2e5, "shard-0": 2e6})),
    "slow worker": SimulationConfig(costs=NOISY, speeds={"worker-0": 0.1}),
    "lossy": SimulationConfig(
        costs=NOISY,
        network=Network(links={(a, b): POOR for a in NODES for b in NODES if "shard" in a + b}),
    ),
}


def backed_up(
    config: SimulationConfig, *, workers: int = 5, backup: int = 1, **options: Any
) -> tuple[Run, bool]:
    """A run on integer data, and whether it has the bits of one node with the accepted samples."""
    model, data = least_squares(160, FEATURES, grid=GRID)
    options = {"steps": 12, "servers": 2, "chunk_elems": 64, "batch_size": 4, "deadlines": QUICK, **options}
    strategy = options.pop("strategy", None) or gs.Synchronous(backup=backup)
    run = simulate(
        model,
        data,
        strategy=strategy,
        workers=workers,
        config=config,
        optimizer=gs.optim.Momentum(LR, 0.5),
        **options,
    )
    expected = replayed(model, data, [event["ids"] for event in rounds_of(run)])
    return run, run.parameters["w"].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("config", "servers"), [("noisy", 1), ("noisy", 3), ("slow link", 2), ("slow worker", 1), ("lossy", 3)]
)
def test_equals_one_node_with_exactly_the_accepted_samples(config: str, servers: int) -> None:
    run, same = backed_up(WORLDS[config], servers=servers, seed=servers)
    rounds = rounds_of(run)
    assert [event["round"] for event in rounds] == list(range(12))
    assert all(len(event["accepted"]) == 4 and len(event["ids"]) == 16 for event in rounds)
    assert all(sorted(event["accepted"] + event["left_out"]) == list(range(5)) for event in rounds)
    assert same
    assert any(event["left_out"] != rounds[0]["left_out"] for event in rounds) or config != "noisy"


def test_late_steps_are_told_and_every_samples_fate_is_known() -> None:
    strategy = gs.Synchronous(backup=1, overlap=False)
    joined, _ = backed_up(WORLDS["noisy"], epochs=2, steps=None, accumulate=2)
    assert [len(event["ids"]) for event in rounds_of(joined)] == [32] * 8
    assert joined.summary["samples_accounted"] == 2 * 128
    run, same = backed_up(WORLDS["slow worker"], epochs=3, steps=None, strategy=strategy)
    assert same
    steps = [event for event in run.events if event["event"] == "step"]
    accepted = {(event["round"], rank) for event in rounds_of(run) for rank in event["accepted"]}
    assert {(e["step"], e["rank"]) for e in steps if not e["late"]} == accepted
    assert {e["rank"] for e in steps if e["late"]} >= {0}
    ledger = [event for event in run.events if event["event"] == "ledger"]
    assert [(event["samples"], event["dropped"]) for event in ledger] == [(160, 32)] * 3
    assert run.summary["samples_accounted"] == 3 * 128
    by_epoch = [sum(len(event["ids"]) for event in rounds_of(run) if event["epoch"] == n) for n in range(3)]
    assert by_epoch == [128] * 3


def test_the_report_says_who_was_late() -> None:
    run, _ = backed_up(WORLDS["slow worker"], steps=30)
    head, rows = quorums(run.events)
    assert head == ["worker", ">in updates", ">of all", ">late", ">skipped"]
    late, skipped = int(rows[0][3]), int(rows[0][4])
    assert rows[0][:3] == ["worker-0", str(30 - late - skipped), f"{(30 - late - skipped) / 30:.0%}"]
    assert run.summary["late"]["worker-0"] == late
    assert skipped > late > 0
    assert "<h2>Backup workers</h2>" in page(PageSource(title="x", events=run.events))


def test_chunks_that_decided_each_for_itself_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: every chunk takes the first four contributions that it gets."""

    def candidates(self: ShardState, state: Any) -> list[PushHeader]:
        return [held.header for held in state.parked][:4]

    assert backed_up(WORLDS["slow link"])[1]
    monkeypatch.setattr(ShardState, "_candidates", candidates)
    assert not backed_up(WORLDS["slow link"])[1]


# ---- deaths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 3])
def test_a_dead_worker_eats_one_of_b_and_the_run_goes_on(victim: int) -> None:
    for seed in range(2):
        at_s = random.Random(seed).uniform(0.0, 0.15)
        run, same = backed_up(WORLDS["noisy"], seed=seed, script=kill_at(f"worker-{victim}", at_s))
        assert run.summary["workers_lost"] == [f"worker-{victim}"]
        rounds = rounds_of(run)
        assert len(rounds) == 12
        assert same, at_s
        assert rounds[-1]["left_out"] == [victim]
        assert run.summary["samples_accounted"] == 12 * 16


def test_with_fewer_than_n_left_the_run_ends_naming_who_was_lost() -> None:
    async def two_deaths(cluster: SimulatedCluster) -> None:
        for victim, seconds in (("worker-1", 0.03), ("worker-4", 0.04)):
            await cluster.virtual.runtime("director").sleep(seconds)
            cluster.kill(victim)

    with pytest.raises(PeerLostError, match="needs 4 workers") as raised:
        backed_up(WORLDS["noisy"], script=two_deaths)
    assert raised.value.peer == "worker-4"


# ---- cuts -----------------------------------------------------------------------------------


def test_a_run_that_was_stopped_goes_on_and_counts_what_it_dropped() -> None:
    model, data = least_squares(160, FEATURES, grid=GRID)
    for seed in range(2):
        storage = MemoryStorage()
        options: dict[str, Any] = {"epochs": 3, "steps": None, "storage": storage, "seed": seed}
        stopped: list[EventDict] = []

        async def stop(cluster: SimulatedCluster) -> None:
            await cluster.virtual.runtime("director").sleep(0.15)
            cluster.stop()

        with pytest.raises(gs.errors.Interrupted):
            backed_up(WORLDS["noisy"], script=stop, on_event=stopped.append, **options)
        resumed, _ = backed_up(WORLDS["noisy"], resume=True, **options)
        before = [event for event in stopped if event["event"] == "round"]
        after = rounds_of(resumed)
        assert 0 < len(before) < 24
        assert [event["round"] for event in before + after] == list(range(24))
        expected = replayed(model, data, [event["ids"] for event in before + after])
        assert resumed.parameters["w"].tobytes() == expected.tobytes()
        (finished,) = [event for event in resumed.events if event["event"] == "finished"]
        assert (finished["samples"], finished["dropped"]) == (3 * 128, 3 * 32)


def test_checkpoints_and_evaluations_on_the_way() -> None:
    model, data = least_squares(160, 64, grid=GRID)
    data = gs.from_arrays(data.inputs, data.targets, data.inputs[:8], data.targets[:8])
    run = simulate(
        model, data, strategy=gs.Synchronous(backup=2), workers=6, epochs=4, batch_size=4, chunk_elems=64,
        config=WORLDS["slow worker"], optimizer=gs.optim.SGD(lr=LR), evaluate_every=5, checkpoint_every=6,
        storage=MemoryStorage(), deadlines=QUICK,
    )  # fmt: skip
    assert not [event for event in run.events if event["event"] == "checkpoint_failed"]
    assert [event["step"] for event in run.events if event["event"] == "checkpoint"]
    # The worker that evaluates is the slow one: it looks once it has heard of a round that was due.
    seen = [row["step"] for row in run.evaluations]
    assert seen == sorted(set(seen))
    assert seen[-1] == len(rounds_of(run))
    assert len(seen) >= 3


def test_a_goal_ends_the_run_after_a_whole_round() -> None:
    run, same = backed_up(WORLDS["noisy"], steps=200, until=gs.until(samples=300))
    assert same
    assert run.summary["samples_accounted"] == 16 * len(rounds_of(run))
    assert 300 <= run.summary["samples_accounted"] < 3200


# ---- how long a round takes -----------------------------------------------------------------


def order_statistic(needed: int, backup: int) -> float:
    """The N-th of N + b exponential times with mean 1."""
    return sum(1 / i for i in range(backup + 1, needed + backup + 1))


def round_times(needed: int, backup: int, steps: int, seed: int) -> list[float]:
    """Seconds from one verdict to the next, of exponential gradients with mean 1 and nothing else."""
    config = SimulationConfig(
        costs={"gradient": Cost(base_s=1.0, jitter=Exponential())},
        network=Network(bandwidth_bytes_s=math.inf, link=Link(latency_s=0.0)),
        shape_only=True,
    )
    run = simulate(
        Sized([64]), numbered(1024), config=config, workers=needed + backup, batch_size=1, steps=steps,
        strategy=gs.Synchronous(backup=backup), chunk_elems=64, seed=seed,
    )  # fmt: skip
    ends: dict[int, float] = {}
    for event in run.events:
        if event["event"] == "step" and not event["late"]:
            ends[event["step"]] = min(event["time_s"], ends.get(event["step"], math.inf))
    edges = [0.0, *(ends[step] for step in range(steps))]
    return [after - before for before, after in itertools.pairwise(edges)]


def test_a_round_that_all_begin_together_takes_the_order_statistic() -> None:
    """The sheet's figures, 5.19 for 100 of 100 and 3.10 for 96 of 100, are of this formula."""
    assert order_statistic(100, 0) == pytest.approx(5.19, abs=0.005)
    assert order_statistic(96, 4) == pytest.approx(3.10, abs=0.005)
    needed, backup, seeds = 6, 2, 20
    first = [round_times(needed, backup, 1, seed)[0] for seed in range(seeds)]
    variance = sum(1 / i**2 for i in range(backup + 1, needed + backup + 1))
    assert np.mean(first) == pytest.approx(
        order_statistic(needed, backup), abs=3 * math.sqrt(variance / seeds)
    )


def recursion(needed: int, backup: int, rounds: int, seed: int) -> float:
    """Mean seconds a round where a late worker finishes its gradient, then begins the newest round."""
    rng = random.Random(seed)
    workers = needed + backup
    ends = [(rng.expovariate(1.0), rank, 0) for rank in range(workers)]
    heapq.heapify(ends)
    version, now = 0, 0.0
    ready: list[int] = []
    while version < rounds:
        now, rank, of = heapq.heappop(ends)
        if of < version:  # late: dropped, and on with what is newest
            heapq.heappush(ends, (now + rng.expovariate(1.0), rank, version))
            continue
        ready.append(rank)
        if len(ready) == needed:
            version += 1
            for done in ready:
                heapq.heappush(ends, (now + rng.expovariate(1.0), done, version))
            ready = []
    return now / rounds


def test_rounds_in_a_row_take_longer_since_who_is_late_still_computes() -> None:
    needed, backup, steps = 6, 2, 50
    times = round_times(needed, backup, steps, seed=1)
    expected = recursion(needed, backup, 20_000, seed=0)
    assert expected > order_statistic(needed, backup)
    assert expected < order_statistic(needed + backup, 0)
    assert np.mean(times) == pytest.approx(expected, abs=3 * float(np.std(times)) / math.sqrt(steps))


# ---- refused combinations --------------------------------------------------------------------


def test_backup_that_makes_no_sense() -> None:
    model, data = least_squares(64, 4)
    with pytest.raises(ConfigError, match="expected a number of workers"):
        gs.Synchronous(backup=-1)
    with pytest.raises(ConfigError, match="expected at most 1"):
        simulate(model, data, strategy=gs.Synchronous(backup=2), workers=2, epochs=1)
    with pytest.raises(ConfigError, match="leave out shares, or leave out backup"):
        simulate(model, data, strategy=gs.Synchronous(backup=1), workers=2, epochs=1, shares="measured")
    nothings: list[Any] = [{"batch_size": [0, 8]}, {"shares": [1.0, 0.0]}]
    for nothing in nothings:
        with pytest.raises(ConfigError, match="a worker without samples would always be among the fastest"):
            simulate(model, data, strategy=gs.Synchronous(backup=1), workers=2, epochs=1, **nothing)


def test_without_backup_nothing_is_told_of_rounds() -> None:
    run, _ = backed_up(SimulationConfig(costs={"gradient": Cost(jitter=LogNormal(0.1))}), backup=0)
    assert rounds_of(run) == []
    assert run.summary["samples_accounted"] == 12 * 20
