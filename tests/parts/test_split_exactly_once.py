"""Processes of split replicas die at any instant, and every chunk of every part has every sample exactly once.

A scenario is a seed: replicas, parts, shards, strategy, checkpoints, deaths. A replica may come back, and a process of
the substitute may die while its replica redoes a push. Faults that are planted must show in the counts.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.job.losses import losses_of
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.server.client.client import ServerClient
from gradstream.server.client.push import PendingPushRequest
from gradstream.testing import TokenAudit, numbered
from gradstream.testing.runs import QUICK, token_layers
from gradstream.wire.chunks import member_name, part_of, replica_of
from gradstream.worker.computed import SampleBatch
from gradstream.worker.parts.decoupled import DecoupledGradients
from gradstream.worker.parts.sources import RedoneGradients

SAMPLES, EPOCHS = 36, 2
SEEDS = range(int(os.environ["ONCE_SEEDS"])) if "ONCE_SEEDS" in os.environ else (4, 10, 11)
"""Without the variable a few, with torn pushes and several deaths."""

STREAM_SEEDS = SEEDS if "ONCE_SEEDS" in os.environ else (25, 31, 40)
"""Without the variable three of different pipelines, with torn pushes."""

STRATEGIES: tuple[gs.strategies.ServerStrategy, ...] = (
    gs.Downpour(),
    gs.SSP(bound=1),
    gs.Downpour(overlap=False),
    gs.SSP(bound=0),
    gs.Downpour(push_every=3, fetch_every=2),
    gs.strategies.AsySG(gradients=2),
)

PIPELINED = [strategy for strategy in STRATEGIES if strategy.pipelined]
STREAMS: tuple[tuple[Any, gs.strategies.ServerStrategy], ...] = (
    *product(("pipedream", "2bw", "delayed", "pipedream-vertical"), PIPELINED),
    *product([gs.pipeline.SyntheticGradients()], STRATEGIES),
)


@pytest.fixture(autouse=True)
def _sums_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss that counts samples is a sum, whose pieces have weights that the rate makes up for."""
    monkeypatch.setattr("gradstream.worker.parts.pipelined.is_due", lambda step: False)


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    strategy: gs.strategies.ServerStrategy
    workers: int
    split: int
    servers: int
    micro_batches: int
    slow: int | None  # the part whose pushes take longer than those of the others
    deaths: tuple[tuple[float, int, int, bool], ...]  # seconds, rank, part, whether it comes back
    follows: bool  # a process of the substitute dies, too
    checkpoints: int | None
    pipeline: Any = "1f1b"

    @classmethod
    def streaming(cls, seed: int) -> Scenario:
        """The same, of replicas whose pipelines are never empty, or whose parts train apart."""
        pipeline, strategy = STREAMS[seed % len(STREAMS)]
        micro_batches = 2 if pipeline == "2bw" else 1
        return replace(cls.of(seed), strategy=strategy, pipeline=pipeline, micro_batches=micro_batches)

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(seed)
        workers, split = rng.randint(2, 3), rng.randint(2, 3)
        deaths = [
            (rng.uniform(0.05, 0.6), rng.randrange(workers), rng.randrange(split), rng.random() < 0.5)
            for _ in range(rng.randint(1, 3))
        ]
        return cls(
            seed,
            STRATEGIES[seed % len(STRATEGIES)],
            workers,
            split,
            rng.randint(1, 2),
            rng.choice((1, 2)),
            rng.choice((None, *range(split))),
            tuple(sorted(deaths)),
            rng.random() < 0.4,
            rng.choice((None, None, 5)),
        )


class Deaths:
    """The script of a scenario. The last replica is spared."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = random.Random(scenario.seed)
        self.count = 0

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director, now = cluster.virtual.runtime("director"), 0.0
        for at_s, rank, part, comes_back in self._scenario.deaths:
            await director.sleep(at_s - now)
            now = at_s
            self._kill(cluster, rank, part, comes_back)
        while self._scenario.follows and cluster.coordinator is not None:
            if redos := cluster.coordinator.membership.lead(OrphanedPushes).redos:
                substitute = redos[0].substitute
                await director.sleep(self._rng.uniform(0.0, 0.05))
                self._kill(cluster, substitute, self._rng.randrange(self._scenario.split), True)
                return
            await director.sleep(5e-4)

    def _kill(self, cluster: SimulatedCluster, rank: int, part: int, comes_back: bool) -> None:
        assert cluster.coordinator is not None
        replica = replica_of(rank, self._scenario.split)
        active = cluster.coordinator.membership.nodes.active_workers
        whole = [
            name
            for name in active
            if all(map(cluster.is_running, replica_of(int(name.split("-")[1]), self._scenario.split)))
        ]
        if len(whole) < 2 or replica[0] not in whole:
            return
        self.count += 1
        cluster.kill(replica[part])
        if comes_back:
            director = cluster.virtual.runtime("director")
            director.spawn(self._again(cluster, replica), name=f"{replica[0]} again")

    async def _again(self, cluster: SimulatedCluster, replica: list[str]) -> None:
        director = cluster.virtual.runtime("director")
        while any(cluster.is_running(one) for one in replica):
            await director.sleep(0.01)
        await director.sleep(self._rng.uniform(0.0, 0.1))
        for one in replica:
            await cluster.restart(one)


@dataclass
class Outcome:
    """What became of a scenario."""

    audit: TokenAudit
    deaths: int
    minibatches: Counter[str]


def once(scenario: Scenario) -> Outcome:
    """Simulates a scenario."""
    jitter = Exponential()
    costs = {"forward": Cost(base_s=4e-3, jitter=jitter), "backward": Cost(base_s=4e-3, jitter=jitter)}
    links = dict[tuple[str, str], Link]()
    if (part := scenario.slow) is not None:
        shards = range(part * scenario.servers, (part + 1) * scenario.servers)
        for rank, shard in product(range(scenario.workers), shards):
            links[member_name(part, rank), f"shard-{shard}"] = Link(latency_s=0.02, jitter_s=0.02)
    link = Link(latency_s=1e-3, jitter_s=4e-3)
    network = Network(bandwidth_bytes_s=3e5, link=link, links=links)
    deaths = Deaths(scenario)
    run = simulate(
        token_layers(2 * scenario.split, 2),
        numbered(SAMPLES),
        strategy=scenario.strategy,
        optimizer=gs.optim.SGD(lr=float(scenario.micro_batches)),
        workers=scenario.workers,
        split=scenario.split,
        servers=scenario.servers,
        micro_batches=scenario.micro_batches,
        pipeline=scenario.pipeline,
        batch_size=2,
        epochs=EPOCHS,
        chunk_elems=64,
        seed=scenario.seed,
        deadlines=QUICK,
        config=SimulationConfig(costs={**costs, "apply": Cost(base_s=3e-3, jitter=jitter)}, network=network),
        checkpoint_every=scenario.checkpoints,
        script=deaths,
    )
    minibatches: Counter[str] = Counter()
    for event in (event for event in run.events if event["event"] == "settled"):
        minibatches.update({what: event[what] for what in ("in_model", "torn", "again")})
    return Outcome(TokenAudit.of(run, SAMPLES, EPOCHS), deaths.count, minibatches)


def true_gradients(patch: pytest.MonkeyPatch) -> None:
    """Parts that train apart predict the true gradient: that of the last column, which alone reaches parameters."""

    async def guess(self: DecoupledGradients, value: Any, seen: torch.Tensor, *_: Any) -> torch.Tensor:
        gradient = torch.zeros_like(seen)
        gradient[:, -1] = -1.0
        return gradient

    patch.setattr(DecoupledGradients, "_guess", guess)


def all_exact(scenarios: Sequence[Scenario]) -> None:
    """Every chunk of every part has every sample once, whenever processes die."""
    total, deaths = Counter[str](), 0
    for scenario in scenarios:
        outcome = once(scenario)
        assert outcome.audit.exact, (scenario, outcome)
        total += outcome.minibatches
        deaths += outcome.deaths
    print(f"{len(scenarios)} seeds, {deaths} deaths: {dict(total)}")
    assert deaths > len(scenarios) // 2
    assert total["torn"] > len(scenarios) // 6  # the hard case did happen


@pytest.mark.limit_s(60 + 10 * len(SEEDS))
def test_every_chunk_of_every_part_has_every_sample_once_whenever_processes_die() -> None:
    all_exact([Scenario.of(seed) for seed in SEEDS])


@pytest.mark.limit_s(60 + 10 * len(STREAM_SEEDS))
def test_the_same_of_pipelines_that_are_never_empty_and_of_parts_that_train_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true_gradients(monkeypatch)
    all_exact([Scenario.streaming(seed) for seed in STREAM_SEEDS])


# ---- planted faults -------------------------------------------------------------------------


def handed_out_again(patch: pytest.MonkeyPatch) -> None:
    """What a lost replica had without a receipt is handed out again, without a question: as it was before."""
    inner = losses_of
    for place in ("run.nodes", "worker.config"):
        patch.setattr(
            f"gradstream.{place}.losses_of",
            lambda plan, **options: replace(inner(plan, **options), redoes=False),
        )


def not_redone(patch: pytest.MonkeyPatch) -> None:
    """What some chunks have gets a receipt as if all had it."""
    decide = OrphanedPushes._decide

    def generous(self: OrphanedPushes, orphans: Any) -> Any:
        for push in orphans.pushes.values():
            push.applied = orphans.chunks if push.applied else 0
        return decide(self, orphans)

    patch.setattr(OrphanedPushes, "_decide", generous)


def new_identity(patch: pytest.MonkeyPatch) -> None:
    """The substitute redoes a torn push as a push of its own."""

    async def redo(self: ServerClient, update: Any, behalf: Any, sequence: int) -> None:
        self._sequence += 1
        await PendingPushRequest(self._links, update, self._sequence, None).run()

    patch.setattr(ServerClient, "redo", redo)


def one_part_decides(patch: pytest.MonkeyPatch) -> None:
    """What a lost replica had is decided over the shards of its worker alone."""
    report = OrphanedPushes.report

    def of_workers(self: OrphanedPushes, shard: str, orphans: Any) -> Any:
        if part_of(orphans.sender):
            orphans.chunks = 0
            del orphans.pushes[:]
        return report(self, shard, orphans)

    patch.setattr(OrphanedPushes, "report", of_workers)


def only_parts_redo(patch: pytest.MonkeyPatch) -> None:
    """The substitute's worker says that it has redone its part of a push, and has not."""
    redo = ServerClient.redo

    async def spared(self: ServerClient, update: Any, behalf: Any, sequence: int) -> None:
        if part_of(behalf.sender):
            await redo(self, update, behalf, sequence)

    patch.setattr(ServerClient, "redo", spared)


def on_the_stream(patch: pytest.MonkeyPatch) -> None:
    """The minibatch that is redone is the one that the substitute's stream computes just then."""
    compute = RedoneGradients._compute

    async def of_another(self: RedoneGradients, parameters: Any, gradient: Any) -> Any:
        other = replace(gradient.batch.ref, batch=gradient.batch.ref.batch ^ 1)
        batch = SampleBatch(other, gradient.batch.num_samples)
        return await compute(self, parameters, replace(gradient, batch=batch))

    patch.setattr(RedoneGradients, "_compute", of_another)


Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[Plant, str] = {
    handed_out_again: "doubled",
    not_redone: "lost",
    new_identity: "doubled",
    one_part_decides: "torn",
}


@pytest.mark.limit_s(120)
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_an_audit_shows_every_planted_fault(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of some scenarios."""
    plant(monkeypatch)
    audits = (once(Scenario.of(seed)).audit for seed in (4, 11, 2))
    assert any(getattr(audit, FAULTS[plant]) for audit in audits)


STREAM_FAULTS: dict[Plant, str] = {only_parts_redo: "lost", on_the_stream: "doubled"}


@pytest.mark.limit_s(120)
@pytest.mark.parametrize("plant", STREAM_FAULTS, ids=lambda plant: plant.__name__)
def test_an_audit_of_streams_shows_every_planted_fault(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    audits = (once(Scenario.streaming(seed)).audit for seed in (25, 37))
    assert any(getattr(audit, STREAM_FAULTS[plant]) for audit in audits)
