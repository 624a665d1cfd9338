"""Shards die at any instant, and new processes of them go on: every chunk has every sample exactly once.

A scenario is a seed: strategy, shards, the kind of backup, network, checkpoints, deaths of shards, and perhaps of a
worker and of the coordinator besides. Faults that are planted must show in the counts.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream._train import launch
from gradstream.errors import ConfigError, PeerLostError
from gradstream.job.files import load_job
from gradstream.memory import Span, Vector
from gradstream.run.local import LocalCluster
from gradstream.run.local.environment import node_environment
from gradstream.run.planning import plan_run
from gradstream.runtime.simulation import Link
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.shard import copies
from gradstream.server.shard.backup import BackupHolder, BackupLog, BackupOnPeer
from gradstream.server.shard.copies import ChunkCopies
from gradstream.testing import TokenAudit, Tokens, numbered
from gradstream.testing.runs import QUICK, UNSTEADY, count_tokens, kill_at
from gradstream.testing.trials import Record, bad_world, observed
from gradstream.wire import v1
from kit.faults import FaultPlan, Kill

SAMPLES, EPOCHS, WORKERS = 24, 4, 3
SEEDS = int(os.environ.get("SHARD_SEEDS", "8"))

STRATEGIES: tuple[gs.strategies.ServerStrategy, ...] = (
    gs.Downpour(),
    gs.Synchronous(),
    gs.SSP(bound=1),
    gs.Downpour(push_every=3, fetch_every=2),
    gs.SSP(bound=0),
    gs.strategies.AsySG(gradients=2),
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
            if acknowledge == "replicated":  # it takes longer then until a backup is whole again
                deaths = [deaths[0], *(one for one in deaths if one.node.startswith("worker"))]
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


def run_of(scenario: Scenario) -> tuple[gs.Run, FaultPlan]:
    config, plan = UNSTEADY, FaultPlan(scenario.deaths)
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
        script=plan,
    )
    return run, plan


def violation(seed: int) -> tuple[str, FaultPlan]:
    """What a scenario has lost, doubled or torn; "" for nothing."""
    scenario = Scenario.of(seed)
    run, plan = run_of(scenario)
    audit = TokenAudit.of(run, SAMPLES, EPOCHS)
    return "" if audit.exact else f"{scenario}: {audit}", plan


def audit_of(scenario: Scenario) -> TokenAudit:
    return TokenAudit.of(run_of(scenario)[0], SAMPLES, EPOCHS)


@pytest.mark.limit_s(60 + 2 * SEEDS)
def test_every_chunk_has_every_sample_once_whenever_shards_die() -> None:
    kinds = Counter[str]()
    for seed in range(SEEDS):
        fault, plan = violation(seed)
        assert not fault
        kinds.update(one.node.partition("-")[0] for one in plan.fired if isinstance(one, Kill))
    assert kinds["shard"] >= SEEDS
    assert kinds["worker"] and kinds["coordinator"]


@pytest.mark.parametrize(
    ("strategy", "optimizer", "acknowledge"),
    [
        (gs.Synchronous(), gs.optim.Adam(lr=0.01), "logged"),
        (gs.Synchronous(), gs.optim.Adam(lr=0.01), "replicated"),
        (gs.Synchronous(aggregate="median"), gs.optim.Momentum(lr=0.01), "replicated"),
        (gs.SSP(bound=0), gs.optim.Adagrad(lr=0.01), "logged"),
    ],
    ids=["adam-logged", "adam-replicated", "median", "ssp"],
)
def test_in_rounds_a_death_changes_no_bit(strategy: Any, optimizer: Any, acknowledge: Any) -> None:
    """Optimizer state, sums and rounds go on as if nothing had happened."""
    from gradstream.testing.runs import least_squares

    model, data = least_squares(48, 400, whole=False)

    def run(script: Any) -> Any:
        return simulate(
            model, data, strategy=strategy, optimizer=optimizer, workers=3, servers=2, batch_size=4, epochs=3,
            chunk_elems=64, deadlines=QUICK, config=UNSTEADY, script=script, acknowledge=acknowledge,
        ).parameters["w"]  # fmt: skip

    expected = run(None)
    plan = FaultPlan([Kill("shard-0", 0.05, 0.02), Kill("shard-1", 0.45, 0.0)])
    got = run(plan)
    assert len(plan.fired) == 2
    # Under SSP a round of 0 sums in the order of arrival.
    assert np.array_equal(got, expected) or (
        isinstance(strategy, gs.SSP) and np.allclose(got, expected, 1e-12)
    )


# ---- what ends the run ------------------------------------------------------------------------


def test_a_copy_in_the_backup_has_all_pushes_that_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that backups over slow links take a part of the bytes that one for each push would."""
    copies_made, keep = Counter[int](), ChunkCopies.keep

    async def counted(self: ChunkCopies, chunk: int) -> None:
        copies_made[chunk] += 1
        await keep(self, chunk)

    monkeypatch.setattr(ChunkCopies, "keep", counted)
    scenario = replace(one_death(1), strategy=gs.Downpour(), acknowledge="replicated", shards=2, deaths=())
    audit = audit_of(scenario)
    assert audit.exact, audit
    pushes = EPOCHS * SAMPLES // 2
    assert 0 < max(copies_made.values()) < pushes, copies_made


def test_a_shard_and_the_one_with_its_backup_die_together() -> None:
    plan = FaultPlan([Kill("shard-0", 0.2, 0.5), Kill("shard-1", 0.21, 0.5)])
    with pytest.raises(PeerLostError, match="no other shard has a whole backup of shard-0, shard-1"):
        count_tokens(strategy="downpour", epochs=4, acknowledge="replicated", script=plan)


def test_a_shard_that_nobody_starts_again_is_waited_for_in_vain() -> None:
    with pytest.raises(PeerLostError, match=r"shard-1: no new process of it has joined within 30 s"):
        count_tokens(strategy="downpour", epochs=4, acknowledge="logged", script=kill_at("shard-1", 0.2))


def test_without_a_backup_the_error_names_the_remedy() -> None:
    with pytest.raises(PeerLostError, match="acknowledge='replicated' or 'logged' keeps a backup"):
        count_tokens(strategy="downpour", epochs=4, script=kill_at("shard-1", 0.2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "allreduce", "servers": None}, "strategy=AllReduce: it has no servers"),
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
        put, before = cls.put, dict[Any, tuple[v1.Backup, Sequence[Span]]]()

        async def put_later(self: Any, new: v1.Backup, spans: Sequence[Span] = ()) -> None:
            """Keeps the state before the last update; of the first one at once, or nobody would go on."""
            key, copies = (
                (id(self), new.chunk.index),
                [Vector("a copy", one.tensor.clone()).all for one in spans],
            )
            held, before[key] = before.get(key), (new, copies)
            await put(self, *(held or (new, spans)))

        patch.setattr(cls, "put", put_later)

    late(BackupLog)
    late(BackupOnPeer)


def without_windows(patch: pytest.MonkeyPatch) -> None:
    """Backups do not have the numbers of the pushes that they hold."""
    patch.setattr(copies, "_windows", lambda state: [])


def without_estates(patch: pytest.MonkeyPatch) -> None:
    """Backups do not have the minibatches of recent pushes."""
    patch.setattr(ChunkCopies, "_restored", _forgetting(ChunkCopies._restored))


def _forgetting(restored: Callable[[ChunkCopies, v1.ChunkBackup], Any]) -> Any:
    def of(self: ChunkCopies, backup: v1.ChunkBackup) -> Any:
        del backup.pushes[:]
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


def one_death(seed: int) -> Scenario:
    """Downpour over a bad network, with one death of a shard."""
    at_s = random.Random(seed).uniform(0.05, 0.4)
    deaths = (Kill("shard-0", at_s, 0.0),)
    scenario = Scenario.of(seed)
    return replace(scenario, strategy=gs.Downpour(), checkpoints=None, deaths=deaths, bad=True, shards=2)


def a_worker_too(seed: int) -> Scenario:
    """A worker dies just after a shard has come back."""
    rng = random.Random(seed)
    at_s = rng.uniform(0.05, 0.4)
    deaths = (Kill("shard-0", at_s, 0.0), Kill("worker-1", at_s + rng.uniform(0.0, 0.08), None))
    return Scenario(seed, "logged", gs.Downpour(), 1 + seed % 2, deaths, checkpoints=None, bad=False)


@pytest.mark.parametrize(
    ("plant", "scenario"),
    [
        (answered_before, one_death(2)),
        (answered_before, one_death(3)),
        (without_windows, one_death(13)),
        (half_copied, one_death(3)),
        (without_estates, a_worker_too(4)),
    ],
)
def test_an_audit_shows_every_planted_fault(plant: Any, scenario: Scenario) -> None:
    assert audit_of(scenario).exact
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert not audit_of(scenario).exact


# ---- for real -----------------------------------------------------------------------------------


class Strikes:
    """Kills shard 0, and shard 1 once a new process of shard 0 has the backup of shard 1."""

    def __init__(self, cluster: LocalCluster, after: str) -> None:
        self._cluster = cluster
        self._after = after
        self._steps = 0
        self.killed: list[str] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        self._steps += event["event"] == "step"
        back = event["event"] == self._after
        if (self._steps == 20 and not self.killed) or (self.killed == ["shard-0"] and back):
            self.killed.append(f"shard-{len(self.killed)}")
            self._cluster.signal(self.killed[-1], signal.SIGKILL)


@pytest.mark.process
@pytest.mark.parametrize(("acknowledge", "carrier"), [("replicated", "auto"), ("logged", "tcp")])
def test_killed_shards_come_back(tmp_path: Path, acknowledge: Any, carrier: Any) -> None:
    (tmp_path / "job.py").write_text(JOB)
    given = load_job(str(tmp_path / "job.py"))
    plan = plan_run(replace(given, acknowledge=acknowledge, carrier=carrier), "killed")
    (tmp_path / "run").mkdir()
    with LocalCluster(tmp_path / "run/logs", node_environment(2), shards=True) as cluster:
        strikes = Strikes(cluster, "backed_up" if acknowledge == "replicated" else "joined")
        run = launch(plan, tmp_path / "run", cluster=cluster, on_event=strikes)
    assert strikes.killed == ["shard-0", "shard-1"]
    assert TokenAudit.of(run, 64, 8).exact
    joined = Counter(event["who"] for event in run.events if event["event"] == "joined")
    assert (joined["shard-0"], joined["shard-1"]) == (2, 2)


JOB = """
import gradstream as gs
from gradstream.testing import Tokens, numbered


def job():
    model, sgd = Tokens(8), gs.optim.SGD(lr=1.0)
    options = {"workers": 2, "servers": 2, "batch_size": 2, "epochs": 8, "chunk_elems": 64}
    return gs.Job(model, numbered(64), strategy="downpour", optimizer=sgd, **options)
"""
