"""The shards of a run change while it goes on: every chunk has every sample exactly once, whoever dies meanwhile.

A scenario is a seed: strategy, kind of backup, network, checkpoints, one to three changes, and a death at a moment of
one of them. RESHARD_SEEDS=600 makes that many. Faults that are planted must show in the counts.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.coordinator.durable import StateStore
from gradstream.errors import ConfigError, GradstreamError
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Link
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.shard import copies
from gradstream.server.shard.executor import ShardExecutor
from gradstream.testing import TokenAudit, Tokens, numbered
from gradstream.testing.runs import QUICK, UNSTEADY, count_tokens, least_squares
from gradstream.testing.trials import Record, bad_world, observed
from kit.faults import FaultPlan, Kill

SAMPLES, EPOCHS, WORKERS = 24, 6, 3
SEEDS = range(int(os.environ["RESHARD_SEEDS"])) if "RESHARD_SEEDS" in os.environ else range(8, 16)
"""Eight have each strategy once; of these, all kinds of backup."""

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

MOMENTS = ("preparing", "holding", "switched")


@dataclass(frozen=True)
class Death:
    """A node dies so long after the first change has come to a state.

    Args:
        state: state of the change.
        after_s: seconds after it.
        who: "new" and "old" are shards.
        back_s: seconds until a new process of it; None for none.
    """

    state: str
    after_s: float
    who: str
    back_s: float | None


@dataclass(frozen=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    acknowledge: Any
    strategy: gs.strategies.ServerStrategy
    shards: int
    changes: tuple[tuple[float, int], ...]  # when, and to how many shards
    death: Death | None
    checkpoints: int | None
    bad: bool  # the network loses, delays and doubles frames

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(f"reshards/{seed}")
        acknowledge = rng.choice(("applied", "applied", "logged", "replicated"))
        fewest = 2 if acknowledge == "replicated" else 1
        shards = rng.randint(fewest, 4)
        changes, at_s = [], rng.uniform(0.02, 0.4)
        for _ in range(rng.randint(1, 3)):
            changes.append((at_s, rng.randint(fewest, 6)))
            at_s += rng.uniform(0.1, 0.4)
        return cls(
            seed,
            acknowledge,
            STRATEGIES[seed % len(STRATEGIES)],
            shards,
            tuple(changes),
            _death(rng, acknowledge),
            rng.choice((None, None, 5)),
            rng.random() < 0.3,
        )


def _death(rng: random.Random, acknowledge: str) -> Death | None:
    if rng.random() < 0.15:
        return None
    state = rng.choice((*MOMENTS, "holding"))
    kept = acknowledge != "applied"  # a shard that has parameters may die
    who = ["worker", "coordinator"]
    who += ["new", "new"] if kept or state != "switched" else []
    who += ["old"] if kept and state != "switched" else []
    chosen = rng.choice(who)
    back_s: float | None = rng.choice((0.0, 0.02, 0.2))
    if chosen == "worker" and rng.random() < 0.3:
        back_s = None
    if chosen == "new" and state != "switched":
        back_s = None
    return Death(state, rng.choice((0.0, rng.uniform(0.0, 0.02))), chosen, back_s)


@dataclass
class Changes:
    """Asks for the changes of a scenario, and kills a node at its moment: the script of a simulation."""

    changes: tuple[tuple[float, int], ...]
    death: Death | None = None
    events: list[Mapping[str, Any]] = field(default_factory=list)
    struck: str = ""  # the state in which the node died
    fatal: bool = False  # it had parameters without a backup
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    def store(self, job: str) -> StateStore:
        return StateStore(":memory:", job)

    def on_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "reshard":
            self.events.append(event)
            self._told.set()

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        director.spawn(self._strike(cluster), name="death")
        for at_s, servers in self.changes:
            await director.sleep(max(0.0, at_s - director.now() / 1e9))
            while not cluster.is_running("coordinator"):
                if cluster.over:
                    return
                await director.sleep(1e-3)
            try:
                cluster.reshard(servers)
            except ConfigError:
                pass  # the change before is under way, or the run is at its end

    async def _strike(self, cluster: SimulatedCluster) -> None:
        if self.death is None:
            return
        director = cluster.virtual.runtime("director")
        while not any(event["state"] == self.death.state for event in self.events):
            self._told.clear()
            await self._told.wait()
        await director.sleep(self.death.after_s)
        first = next(event for event in self.events if event["shards"])
        node = {"worker": "worker-1", "new": first["shards"][-1], "old": "shard-0"}.get(
            self.death.who, "coordinator"
        )
        while node not in cluster._tasks:
            await director.sleep(1e-3)
        coordinator = cluster.coordinator
        assert coordinator is not None
        # Events come a moment after the state: it is made durable first.
        holds = node in coordinator.membership.nodes.placement.names and self.death.who == "new"
        if (holds and self.death.back_s is None) or not cluster.is_running(node):
            return
        self.struck = self.events[-1]["state"]
        cluster.kill(node)
        back_s = self.death.back_s
        if self.death.who == "new" and back_s is None:
            # It may have said that it is ready just before: then it holds parameters, and a launcher starts it again.
            while coordinator.membership.nodes.get(node) is not None:
                await director.sleep(1e-3)
            if node in coordinator.membership.nodes.placement.names:
                back_s, self.fatal = 0.0, cluster.plan.job.acknowledge == "applied"
        if back_s is not None:
            cluster.successor_due |= node == "coordinator"
            await FaultPlan()._bring_back(cluster, Kill(node, 0.0, back_s))


def run_of(scenario: Scenario) -> tuple[gs.Run, Changes]:
    config, script = UNSTEADY, Changes(scenario.changes, scenario.death)
    if scenario.bad:
        config = bad_world(WORKERS, 24)
        names = [f"shard-{rank}" for rank in range(24)]
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
        script=script,
        on_event=script.on_event,
    )
    return run, script


def audit_of(scenario: Scenario) -> TokenAudit:
    return TokenAudit.of(run_of(scenario)[0], SAMPLES, EPOCHS)


@pytest.mark.limit_s(60 + 2 * len(SEEDS))
def test_every_chunk_has_every_sample_once_while_the_shards_change() -> None:
    states, deaths = Counter[str](), Counter[tuple[str, str]]()
    for seed in SEEDS:
        scenario = Scenario.of(seed)
        run, script = run_of(scenario)
        audit = TokenAudit.of(run, SAMPLES, EPOCHS)
        assert audit.exact, f"{scenario}: {audit}"
        states.update(event["state"] for event in script.events)
        if script.death is not None and script.struck:
            deaths[script.death.who, script.struck] += 1
    assert states["switched"] > len(SEEDS) // 2 and states["failed"]
    assert {who for who, _ in deaths} >= {"worker", "coordinator", "new"}
    assert {state for _, state in deaths} >= {"preparing", "holding", "switched"}


@pytest.mark.parametrize(
    ("state", "acknowledge", "seed"),
    [
        ("preparing", "logged", 0),
        ("preparing", "replicated", 1),
        ("holding", "logged", 1),
        ("holding", "replicated", 0),
    ],
)
def test_a_present_shard_dies_and_comes_back(state: str, acknowledge: Any, seed: int) -> None:
    """Seed 0 is a run without rounds, seed 1 one in rounds."""
    death = Death(state, 0.0, "old", 0.02)
    drawn = replace(Scenario.of(seed), acknowledge=acknowledge, shards=2, death=death)
    run, script = run_of(replace(drawn, changes=((0.1, 3),)))
    assert TokenAudit.of(run, SAMPLES, EPOCHS).exact
    assert script.struck
    assert script.events[-1]["state"] in ("failed", "switched")


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (gs.Synchronous(), gs.optim.Adam(lr=0.01)),
        (gs.Synchronous(aggregate="median"), gs.optim.Momentum(lr=0.01)),
        (gs.SSP(bound=0), gs.optim.Adagrad(lr=0.01)),
    ],
    ids=["adam", "median", "ssp"],
)
def test_in_rounds_a_change_changes_no_bit(strategy: Any, optimizer: Any) -> None:
    """Optimizer state, sums and rounds go on as if nothing had happened."""
    model, data = least_squares(48, 400, whole=False)

    def run(script: Any) -> Any:
        return simulate(
            model, data, strategy=strategy, optimizer=optimizer, workers=3, servers=2, batch_size=4, epochs=4,
            chunk_elems=64, deadlines=QUICK, config=UNSTEADY, script=script,
            on_event=None if script is None else script.on_event,
        ).parameters["w"]  # fmt: skip

    expected, script = run(None), Changes(((0.05, 3), (0.25, 1)))
    got = run(script)
    assert [event["state"] for event in script.events].count("switched") == 2
    # Under SSP a round of 0 sums in the order of arrival.
    assert np.array_equal(got, expected) or (
        isinstance(strategy, gs.SSP) and np.allclose(got, expected, 1e-12)
    )


def test_a_run_that_has_changed_its_shards_is_resumed_with_the_first_number() -> None:
    storage, script = MemoryStorage(), Changes(((0.1, 3),))
    options: Any = {
        "strategy": "downpour",
        "servers": 2,
        "epochs": 4,
        "checkpoint_every": 4,
        "storage": storage,
    }

    async def stopped(cluster: SimulatedCluster) -> None:
        await script(cluster)
        await cluster.virtual.runtime("director").sleep(0.2)
        cluster.stop()

    with pytest.raises(gs.errors.Interrupted):
        count_tokens(script=stopped, on_event=script.on_event, **options)
    assert script.events[-1]["state"] == "switched"
    again = Changes(((0.02, 1),))
    run = count_tokens(resume=True, script=again, on_event=again.on_event, **options)
    assert again.events[-1]["state"] == "switched"
    assert TokenAudit.of(run, SAMPLES, 4).exact


# ---- what leaves the shards as they are -------------------------------------------------------


def test_shards_that_nobody_starts_leave_the_run_as_it_is() -> None:
    script = Changes(())

    async def ask(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.1)
        assert cluster.coordinator is not None
        cluster.coordinator.reshard(3)

    deadlines = replace(QUICK, join_s=0.3)
    run = count_tokens(
        strategy="downpour", epochs=8, script=ask, on_event=script.on_event, deadlines=deadlines
    )
    assert TokenAudit.of(run, SAMPLES, 8).exact
    failed = script.events[-1]
    assert failed["state"] == "failed"
    assert failed["who"] == "shard-2, shard-3, shard-4"
    assert failed["message"] == "was not ready within 0.3 s"


@pytest.mark.parametrize(
    ("options", "servers", "message"),
    [
        ({"strategy": "allreduce", "servers": None}, 2, "its workers exchange without shards"),
        (
            {"strategy": gs.Synchronous(backup=1)},
            3,
            "a quorum decides over all shards at once.*resume it with",
        ),
        ({"strategy": "dc-asgd"}, 3, "corrects pushes by what each worker has read.*resume it with"),
        (
            {"strategy": "downpour", "record": True},
            3,
            "a recording has one file for each shard.*resume it with",
        ),
        ({"strategy": "downpour"}, 2, "the run has this number of shards already"),
        ({"strategy": "downpour"}, 0, "servers=0: expected 1 to 1024"),
        ({"strategy": "downpour", "acknowledge": "replicated"}, 1, "servers=1: expected 2 to 1024"),
    ],
)
def test_what_cannot_be_made_right_is_refused(options: Any, servers: int, message: str) -> None:
    async def ask(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.1)
        with pytest.raises(ConfigError, match=message):
            cluster.reshard(servers)

    script = Changes(())
    count_tokens(epochs=2, script=ask, on_event=script.on_event, storage=MemoryStorage(), **options)
    assert [event["state"] for event in script.events] == ["failed"]


# ---- planted faults ---------------------------------------------------------------------------


def without_windows(patch: pytest.MonkeyPatch) -> None:
    """Copies do not have the numbers of the pushes that they hold."""
    patch.setattr(copies, "_windows", lambda state: [])


def not_held(patch: pytest.MonkeyPatch) -> None:
    """The shards go on while they hand over."""
    patch.setattr(ShardExecutor, "hold", lambda self: None)


def half_copied(patch: pytest.MonkeyPatch) -> None:
    """One element in each copy is lost."""
    restore = copies.ChunkCopies.restore

    async def some(self: copies.ChunkCopies, load: Any, members: Any) -> None:
        async def forgetful(destination: Callable[[Any], Any]) -> None:
            tensors: list[Any] = []

            def noted(backup: Any) -> Any:
                tensors.extend(found := destination(backup))
                return found

            await load(noted)
            for one in tensors[:1]:
                one.zero_()

        await restore(self, forgetful, members)

    patch.setattr(copies.ChunkCopies, "restore", some)


def torn_network(seed: int, **changed: Any) -> Scenario:
    """Downpour over a bad network, with changes and without a death."""
    changes = tuple((0.05 + 0.2 * number, 2 + number % 3) for number in range(5))
    return replace(
        Scenario.of(seed),
        strategy=gs.Downpour(),
        acknowledge="applied",
        shards=4,
        changes=changes,
        death=None,
        bad=True,
        checkpoints=None,
        **changed,
    )


@pytest.mark.parametrize(("plant", "seeds"), [(without_windows, 6), (not_held, 6), (half_copied, 1)])
def test_an_audit_shows_every_planted_fault(plant: Any, seeds: int) -> None:
    scenarios = [torn_network(seed) for seed in range(seeds)]
    assert audit_of(scenarios[0]).exact
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            exact = all(audit_of(scenario).exact for scenario in scenarios)
        except GradstreamError:  # parameters are older than a worker has read, or never come
            exact = False
        assert not exact
