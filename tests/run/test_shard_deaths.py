"""Shards die at any instant, and new processes of them go on: every chunk has every sample exactly once.

A scenario is a seed: strategy, shards, the kind of backup, network, checkpoints, deaths of shards, and perhaps of a
worker and of the coordinator besides. Faults that are planted must show in the counts.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.durable.store import StateStore
from gradstream.errors import ConfigError, PeerLostError
from gradstream.memory import Span
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Link
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.shard import backup as backups
from gradstream.server.shard.backup import ShardBackup
from gradstream.server.shard.backup_log import BackupLog
from gradstream.server.shard.backup_peer import BackupHolder, BackupOnPeer
from gradstream.testing import TokenAudit, Tokens, numbered
from gradstream.testing.faults import FaultPlan, Kill
from gradstream.testing.runs import QUICK, UNSTEADY, count_tokens, kill_at
from gradstream.testing.trials import Record, bad_world, observed
from gradstream.wire import v1

SAMPLES, EPOCHS, WORKERS = 24, 4, 3
SEEDS = int(os.environ.get("SHARD_SEEDS", "40"))

STRATEGIES: tuple[gs.strategies.ServerStrategy, ...] = (
    gs.Downpour(),
    gs.Synchronous(),
    gs.SSP(bound=1),
    gs.Downpour(push_every=3, fetch_every=2),
    gs.SSP(bound=0),
    gs.AsySG(gradients=2),
    gs.Downpour(overlap=False),
    gs.Synchronous(overlap=False),
)


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    acknowledge: Any
    strategy: gs.strategies.ServerStrategy
    shards: int
    deaths: tuple[Kill, ...]
    checkpoints: int | None
    bad: bool  # the network loses, delays and doubles frames

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(f"shards/{seed}")
        acknowledge = rng.choice(("logged", "replicated"))
        shards = rng.randint(1 if acknowledge == "logged" else 2, 3)
        deaths, at_s = [], rng.uniform(0.02, 0.4)
        for _ in range(rng.randint(1, 2)):
            deaths.append(Kill(f"shard-{rng.randrange(shards)}", at_s, rng.choice((0.0, 0.02, 0.2))))
            at_s += rng.uniform(0.0, 0.3) if acknowledge == "logged" else rng.uniform(0.8, 1.0)
        if rng.random() < 0.5:
            worker = f"worker-{rng.randrange(WORKERS)}"
            deaths.append(Kill(worker, rng.uniform(0.02, 0.5), rng.choice((None, 0.0, 0.1))))
        if rng.random() < 0.3:
            deaths.append(Kill("coordinator", rng.uniform(0.02, 0.5), rng.choice((0.01, 0.2))))
        return cls(
            seed,
            acknowledge,
            STRATEGIES[seed % len(STRATEGIES)],
            shards,
            tuple(deaths),
            rng.choice((None, None, 5)),
            rng.random() < 0.3,
        )


class Deaths:
    """The script of a scenario; it keeps the coordinator's state."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan

    def store(self, job: str) -> StateStore:
        return StateStore(":memory:", job)

    async def __call__(self, cluster: SimulatedCluster) -> None:
        await self._plan.script(cluster)


def run_of(scenario: Scenario, deaths: Sequence[Kill]) -> tuple[gs.Run, FaultPlan, list[Any]]:
    config, plan, events = UNSTEADY, FaultPlan(deaths), list[Any]()
    if scenario.bad:
        config = bad_world(WORKERS, scenario.shards)
        names = [f"shard-{rank}" for rank in range(scenario.shards)]
        bad = Link(latency_s=1e-3, jitter_s=4e-3, loss=0.02, duplicate=0.5)
        links = {**config.network.links, **{(a, b): bad for a in names for b in names if a != b}}
        config = replace(config, network=replace(config.network, links=links))
    run = simulate(
        Tokens(num_chunks=5),
        numbered(SAMPLES),
        strategy=observed(scenario.strategy, Record(unweighted=True)),
        optimizer=gs.optim.SGD(lr=1.0),
        workers=WORKERS,
        servers=scenario.shards,
        batch_size=2,
        epochs=EPOCHS,
        chunk_elems=64,
        seed=scenario.seed,
        deadlines=QUICK,
        config=config,
        storage=MemoryStorage(),
        acknowledge=scenario.acknowledge,
        checkpoint_every=scenario.checkpoints,
        script=Deaths(plan) if deaths else None,
        on_event=events.append,
    )
    return run, plan, events


def violation(seed: int) -> tuple[str, FaultPlan]:
    """What a scenario has lost, doubled or torn; "" for nothing."""
    scenario = Scenario.of(seed)
    run, plan, _ = run_of(scenario, scenario.deaths)
    audit = TokenAudit.of(run, SAMPLES, EPOCHS)
    return "" if audit.exact else f"{scenario}: {audit}", plan


@pytest.mark.limit_s(60 + 2 * SEEDS)
def test_every_chunk_has_every_sample_once_whenever_shards_die() -> None:
    kinds = Counter[str]()
    for seed in range(SEEDS):
        fault, plan = violation(seed)
        assert not fault
        kinds.update(one.node.partition("-")[0] for one in plan.fired)
    assert kinds["shard"] >= SEEDS
    assert kinds["worker"] and kinds["coordinator"]


@pytest.mark.parametrize("acknowledge", ["logged", "replicated"])
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (gs.Synchronous(), gs.optim.Adam(lr=0.01)),
        (gs.Synchronous(aggregate="median"), gs.optim.Momentum(lr=0.01)),
        (gs.SSP(bound=0), gs.optim.Adagrad(lr=0.01)),
    ],
    ids=["adam", "median", "ssp"],
)
def test_in_rounds_a_death_changes_no_bit(strategy: Any, optimizer: Any, acknowledge: Any) -> None:
    """Optimizer state, sums and rounds go on as if nothing had happened."""
    from gradstream.testing.runs import least_squares

    model, data = least_squares(48, 400, whole=False)

    def run(script: Any) -> Any:
        return simulate(
            model, data, strategy=strategy, optimizer=optimizer, workers=3, servers=2, batch_size=4, epochs=4,
            chunk_elems=64, deadlines=QUICK, config=UNSTEADY, script=script, acknowledge=acknowledge,
        ).parameters["w"]  # fmt: skip

    expected = run(None)
    for at_s in (0.05, 0.11, 0.23, 0.31):
        plan = FaultPlan([Kill("shard-0", at_s, 0.02), Kill("shard-1", at_s + 0.4, 0.0)])
        got = run(plan.script)
        assert plan.fired
        # Under SSP a round of 0 sums in the order of arrival.
        assert np.array_equal(got, expected) or (
            isinstance(strategy, gs.SSP) and np.allclose(got, expected, 1e-12)
        )


# ---- what ends the run ------------------------------------------------------------------------


def test_a_shard_and_the_one_with_its_backup_die_together() -> None:
    plan = FaultPlan([Kill("shard-0", 0.2, 0.5), Kill("shard-1", 0.21, 0.5)])
    with pytest.raises(PeerLostError, match="no other shard has a whole backup of shard-0, shard-1"):
        count_tokens(strategy="downpour", epochs=4, acknowledge="replicated", script=plan.script)


def test_a_shard_that_nobody_starts_again_is_waited_for_in_vain() -> None:
    with pytest.raises(PeerLostError, match=r"shard-1: no new process of it has joined within 30 s"):
        count_tokens(strategy="downpour", epochs=4, acknowledge="logged", script=kill_at("shard-1", 0.2))


def test_without_a_backup_the_error_names_the_remedy() -> None:
    with pytest.raises(PeerLostError, match="acknowledge='replicated' or 'logged' keeps a backup"):
        count_tokens(strategy="downpour", epochs=4, script=kill_at("shard-1", 0.2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "allreduce", "servers": None}, "AllReduce has no servers"),
        ({"strategy": gs.Synchronous(backup=1)}, "a quorum decides over all shards at once"),
        ({"strategy": "dc-asgd"}, "corrects pushes by what each worker has read"),
        ({"strategy": "downpour", "record": True}, "a recording has one file for each shard"),
        ({"strategy": "downpour", "servers": 1, "acknowledge": "replicated"}, "take servers=2 or more"),
        ({"strategy": "downpour", "acknowledge": "log"}, "unknown acknowledge 'log'"),
    ],
)
def test_what_no_backup_holds_for_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        count_tokens(**{"epochs": 1, "acknowledge": "logged", **options})


# ---- planted faults ---------------------------------------------------------------------------


def answered_before(patch: pytest.MonkeyPatch) -> None:
    """A backup is made after its push was acknowledged."""

    def late(cls: Any) -> None:
        put, before = cls.put, dict[int, tuple[v1.Backup, Sequence[Span]]]()

        async def put_later(self: Any, new: v1.Backup, spans: Sequence[Span] = ()) -> None:
            """Keeps the state before the last update."""
            held, before[id(self), new.chunk.index] = before.get((id(self), new.chunk.index)), (new, spans)  # type: ignore[index, call-overload, assignment]
            if held is not None:
                await put(self, *held)

        patch.setattr(cls, "put", put_later)

    late(BackupLog)
    late(BackupOnPeer)


def without_windows(patch: pytest.MonkeyPatch) -> None:
    """Backups do not have the numbers of the pushes that they hold."""
    patch.setattr(backups, "_windows", lambda state: [])


def without_estates(patch: pytest.MonkeyPatch) -> None:
    """Backups do not have the minibatches of recent pushes."""
    patch.setattr(ShardBackup, "_restored", _forgetting(ShardBackup._restored))


def _forgetting(restored: Callable[[ShardBackup, v1.ChunkBackup], Any]) -> Any:
    def of(self: ShardBackup, backup: v1.ChunkBackup) -> Any:
        del backup.estates[:]
        return restored(self, backup)

    return of


def half_copied(patch: pytest.MonkeyPatch) -> None:
    """The holder answers before it has copied the elements, and loses one copy in four."""
    copy, count = BackupHolder._copy, [0]

    async def some(self: BackupHolder, spans: Any, parts: Any) -> None:
        count[0] += 1
        if count[0] % 4:
            await copy(self, spans, parts)

    patch.setattr(BackupHolder, "_copy", some)


@pytest.mark.parametrize("plant", [answered_before, without_windows, half_copied, without_estates])
def test_an_audit_shows_every_planted_fault(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(60):
            if plant is half_copied and Scenario.of(seed).acknowledge != "replicated":
                continue
            try:
                if violation(seed)[0]:
                    return
            except gs.errors.GradstreamError:
                return  # shards that do not fit together are noticed by a check, too
    raise AssertionError(f"{plant.__name__} shows in none of 60 scenarios")


# ---- for real -----------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(("acknowledge", "carrier"), [("replicated", "auto"), ("logged", "tcp")])
def test_killed_shards_come_back(tmp_path: Path, acknowledge: Any, carrier: Any) -> None:
    plan = FaultPlan([Kill("shard-0", 0.3), Kill("shard-1", 1.5), Kill("worker-1", 1.7)])
    job = tmp_path / "job.py"
    job.write_text(JOB)
    with plan.on_processes(tmp_path / "run") as on_event:
        run = gs.train(
            gs.load_job(str(job)),
            acknowledge=acknowledge,
            carrier=carrier,
            run_dir=tmp_path / "run",
            on_event=on_event,
        )
    assert TokenAudit.of(run, 64, 40).exact
    assert {one.node for one in plan.fired} >= {"shard-0"}
    back = [event["who"] for event in run.events if event["event"] == "joined"]
    assert back.count("shard-0") == 2


JOB = """
import gradstream as gs
from gradstream.testing import Tokens, numbered

job = gs.Job(
    Tokens(8), numbered(64), strategy="downpour", optimizer=gs.optim.SGD(lr=1.0), workers=2, servers=2, batch_size=2,
    epochs=40, chunk_elems=64,
)
"""
