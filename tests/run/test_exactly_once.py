"""Workers die at any instant, and every chunk has every sample exactly once all the same.

A scenario is a seed: workers, shards, chunks, strategy, network, checkpoints, deaths; the second death may hit the
substitute while it redoes a push. Faults that are planted must show in the counts.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.errors import Interrupted
from gradstream.job.losses import losses_of
from gradstream.run.simulated import Script, SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.client.client import ServerClient
from gradstream.server.client.push import PendingPushRequest
from gradstream.server.shard.inspection import Inspection
from gradstream.server.shard.state import ShardState
from gradstream.server.shard.store import ShardStore
from gradstream.testing import TokenAudit, Tokens, numbered
from gradstream.testing.runs import NUM_SAMPLES, QUICK, UNSTEADY, count_tokens
from gradstream.testing.trials import Record, bad_world, observed
from gradstream.transport.endpoint import AccessControl, EndpointCore
from gradstream.wire import v1
from kit.faults import Cut, FaultPlan

SAMPLES, EPOCHS = 32, 3
SEEDS = range(int(os.environ["ONCE_SEEDS"])) if "ONCE_SEEDS" in os.environ else range(9, 18)
"""Nine have each strategy once; of these, two tear a push."""

STRATEGIES: tuple[gs.strategies.ServerStrategy, ...] = (
    gs.Downpour(overlap=False),
    gs.Downpour(),
    gs.Downpour(push_every=3, fetch_every=2),
    gs.SSP(bound=2),
    gs.SSP(bound=0),
    gs.strategies.AsySG(gradients=2),
    gs.Softsync(),
    gs.strategies.StalenessAware(),
    gs.strategies.DCASGD(),
)


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    strategy: gs.strategies.ServerStrategy
    workers: int
    servers: int
    kills: tuple[tuple[str, float], ...]
    follows: bool  # the substitute dies while it redoes a push
    checkpoints: int | None
    stop_s: float | None
    bad: bool  # the network loses, delays and doubles frames

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(seed)
        workers = rng.randint(2, 4)
        victims = rng.sample(range(workers), rng.randint(1, workers - 1))
        follows = workers > 2 and rng.random() < 0.4
        kills = [(f"worker-{rank}", rng.uniform(0.03, 0.6)) for rank in victims[: 1 if follows else None]]
        return cls(
            seed,
            STRATEGIES[seed % len(STRATEGIES)],
            workers,
            rng.randint(1, 3),
            tuple(sorted(kills, key=lambda kill: kill[1])),
            follows,
            rng.choice((None, None, 5)),
            rng.uniform(0.1, 0.5) if rng.random() < 0.2 else None,
            rng.random() < 0.3,
        )


@dataclass
class Outcome:
    """What became of a scenario."""

    audit: TokenAudit
    deaths: int
    minibatches: Counter[str]
    events: list[Any]


def script_of(scenario: Scenario, stop: bool) -> Script:
    async def script(cluster: SimulatedCluster) -> None:
        director, rng = cluster.virtual.runtime("director"), random.Random(scenario.seed)
        now = 0.0
        for name, seconds in scenario.kills:
            await director.sleep(seconds - now)
            now = seconds
            cluster.kill(name)
        if stop and scenario.stop_s is not None:
            await director.sleep(max(0.0, scenario.stop_s - now))
            cluster.stop()
        for _ in range(2000 if scenario.follows else 0):
            membership = cluster.coordinator.membership if cluster.coordinator else None
            if membership is not None and (redos := membership.lead(OrphanedPushes).redos):
                substitute = redos[0].substitute
                await director.sleep(rng.uniform(0.0, 0.03))
                cluster.kill(f"worker-{substitute}")
                return
            await director.sleep(5e-4)

    return script


def once(scenario: Scenario) -> Outcome:
    """Simulates a scenario; a run that was stopped is resumed."""
    events: list[Any] = []
    costs = {"gradient": Cost(base_s=0.02, jitter=Exponential()), "apply": Cost(base_s=1e-3)}
    config = bad_world(scenario.workers, scenario.servers)
    if not scenario.bad:  # a chunk takes more than a millisecond
        network = Network(bandwidth_bytes_s=2e5, link=Link(latency_s=1e-3, jitter_s=1e-3))
        config = SimulationConfig(costs=costs, network=network)
    storage = MemoryStorage()
    options: dict[str, Any] = {
        "strategy": observed(scenario.strategy, Record(unweighted=True)), "optimizer": gs.optim.SGD(lr=1.0),
        "workers": scenario.workers, "servers": scenario.servers, "batch_size": 2, "epochs": EPOCHS,
        "chunk_elems": 64, "seed": scenario.seed, "deadlines": QUICK, "config": config, "storage": storage,
        "on_event": events.append, "checkpoint_every": scenario.checkpoints,
    }  # fmt: skip
    model, data = Tokens(num_chunks=5), numbered(SAMPLES)
    try:
        run = simulate(model, data, script=script_of(scenario, stop=True), **options)
    except Interrupted:
        run = simulate(model, data, resume=True, **options)
    minibatches: Counter[str] = Counter()
    for event in (event for event in events if event["event"] == "settled"):
        minibatches.update({what: event[what] for what in ("in_model", "torn", "again")})
    deaths = sum(event["event"] == "left" and event["lost"] for event in events)
    return Outcome(TokenAudit.of(run, SAMPLES, EPOCHS), deaths, minibatches, events)


FOUND = {
    113: "a late copy of the substitute's stream brought its chunks when the redo was done, and the windows were freed",
    489: "the same, under ssp",
}
"""Seeds that have shown a fault, and which."""


@pytest.mark.limit_s(60 + len(SEEDS))
def test_every_chunk_has_every_sample_once_whenever_workers_die() -> None:
    total, deaths = Counter[str](), 0
    for seed in (*SEEDS, *FOUND):
        outcome = once(Scenario.of(seed))
        assert outcome.audit.exact, (Scenario.of(seed), outcome.audit)
        total += outcome.minibatches
        deaths += outcome.deaths
    print(f"{len(SEEDS)} seeds, {deaths} deaths: {dict(total)}")
    assert deaths > len(SEEDS) // 2
    assert (
        min(total["in_model"], total["torn"], total["again"]) > len(SEEDS) // 20
    )  # the hard cases did happen


# ---- planted faults -------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def no_deduplication(patch: pytest.MonkeyPatch) -> None:
    """Shards take every copy of a push that is redone."""
    push = ShardState.push

    def forgetful(self: ShardState, chunk: int, new: Any) -> Any:
        if new.header.redone:
            self.chunks[chunk].windows.pop((new.header.sender, new.header.incarnation), None)
        return push(self, chunk, new)

    patch.setattr(ShardState, "push", forgetful)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """Shards go on taking pushes of a worker that counts as lost, and lives."""
    objection = AccessControl.objection

    def of_today(self: AccessControl, opened: v1.Open, *given: Any, **named: Any) -> Any:
        opened.epoch = max(opened.epoch, self._identity.epoch)
        return objection(self, opened, *given, **named)

    patch.setattr(AccessControl, "objection", of_today)
    patch.setattr(Inspection, "check_member", lambda self, opened: None)
    patch.setattr(EndpointCore, "members_changed", lambda *given: None)


def new_identity(patch: pytest.MonkeyPatch) -> None:
    """The substitute redoes a torn push as a push of its own."""

    async def redo(self: ServerClient, update: Any, behalf: Any, sequence: int) -> None:
        self._sequence += 1
        await PendingPushRequest(self._links, update, self._sequence, None).run()

    patch.setattr(ServerClient, "redo", redo)


def misrouted(patch: pytest.MonkeyPatch) -> None:
    """A shard adds one push to chunk 1 to another of its chunks."""
    update, count = ShardStore.update, [0]

    def into_another(self: ShardStore, chunk: int, *given: Any, **named: Any) -> None:
        count[0] += chunk == 1
        other = next((one for one in self.here if one != 1), 1)
        update(self, other if (chunk, count[0]) == (1, 5) else chunk, *given, **named)

    patch.setattr(ShardStore, "update", into_another)


def without_estates(patch: pytest.MonkeyPatch) -> None:
    """What a lost worker had without a receipt is handed out again, without a question: as it was before."""
    inner = losses_of
    for place in ("run.nodes", "worker.config"):
        patch.setattr(
            f"gradstream.{place}.losses_of",
            lambda plan, **options: replace(inner(plan, **options), redoes=False),
        )


def torn_as_whole(patch: pytest.MonkeyPatch) -> None:
    """What some chunks have gets a receipt as if all had it."""
    report = OrphanedPushes.report

    def generous(self: OrphanedPushes, shard: str, orphans: Any) -> Any:
        for one in orphans.pushes:
            one.applied = orphans.chunks if one.applied else 0
        return report(self, shard, orphans)

    patch.setattr(OrphanedPushes, "report", generous)


def found(plant: Plant, seeds: range, **changes: Any) -> Iterator[TokenAudit]:
    """Audits of the scenarios in which a planted fault shows, one after the other."""
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            audit = once(replace(Scenario.of(seed), stop_s=None, **changes)).audit
        if not audit.exact:
            yield audit


def test_an_audit_shows_every_planted_fault() -> None:
    """Each in the first scenario of some that can show it."""
    assert any(found(without_estates, range(4))), "handed out again without a question"
    assert any(audit.doubled for audit in found(no_deduplication, range(110, 118), bad=True))
    assert any(audit.torn for audit in found(new_identity, range(110, 118), bad=True))
    assert any(audit.torn and audit.lost for audit in found(torn_as_whole, range(111, 118), bad=True))
    assert any(audit.torn for audit in found(misrouted, range(2), strategy=gs.Downpour(), kills=()))


def cut_off(seed: int) -> TokenAudit:
    """A run in which a worker no longer hears the coordinator, counts as lost, and lives: it goes on pushing."""
    plan = FaultPlan([Cut("worker-1", "coordinator", 0.5, 60.0)])
    slow = replace(UNSTEADY, costs={"gradient": Cost(base_s=0.5, jitter=Exponential())})
    run = count_tokens(
        strategy=gs.Downpour(),
        batch_size=1,
        epochs=1,
        seed=seed,
        script=plan,
        config=plan.config(slow, ["coordinator", "worker-1"]),
    )
    assert run.summary["workers_lost"] == ["worker-1"]
    return TokenAudit.of(run, NUM_SAMPLES, 1)


def test_a_worker_that_counts_as_lost_and_lives_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_off(3).exact
    no_fence(monkeypatch)
    assert any(cut_off(seed).doubled for seed in range(3, 8))
