"""A part of a hybrid is killed: its replica leaves and comes back whole. A run of one replica ends, and is resumed."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

import gradstream as gs
from gradstream.coordinator.lost_work import OrphanedPushes
from gradstream.data.base import Feed
from gradstream.errors import PeerLostError
from gradstream.run.result import Run
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.testing import TokenAudit, numbered
from gradstream.testing.runs import QUICK
from gradstream.worker.parts.hybrid import HybridGradients
from split_jobs import difference, run
from token_hybrid import audit_of, token_hybrid

HYBRID = gs.pipeline.Hybrid("slices", ("2", "6"))
SLOW = SimulationConfig(costs={"forward": Cost(base_s=5e-3), "backward": Cost(base_s=5e-3)})
SAMPLES, EPOCHS = 36, 3


class Killed:
    """A script that kills a process, and starts its replica again once all of it has ended, if it `comes_back`."""

    def __init__(self, name: str, at_s: float, replica: tuple[str, ...], *, comes_back: bool = True) -> None:
        self.name, self.at_s, self.replica, self.comes_back = name, at_s, replica, comes_back
        self.struck = False

    async def __call__(self, cluster: SimulatedCluster) -> None:
        director = cluster.virtual.runtime("director")
        await director.sleep(self.at_s)
        self.struck = all(map(cluster.is_running, self.replica))
        cluster.kill(self.name)
        while self.comes_back and any(map(cluster.is_running, self.replica)):
            await director.sleep(0.01)
        for one in self.replica if self.comes_back else ():
            await cluster.restart(one)


def tokens(script: Any, turns: Any = "assemble") -> Run:
    return gs.simulate(
        token_hybrid(),
        numbered(SAMPLES),
        strategy="downpour",
        optimizer=gs.optim.SGD(lr=2.0),
        workers=2,
        split=2,
        pipeline=gs.pipeline.Hybrid(turns),
        batch_size=2,
        epochs=EPOCHS,
        chunk_elems=64,
        deadlines=QUICK,
        config=SLOW,
        script=script,
    )


@pytest.mark.parametrize(
    ("victim", "turns"), [("worker-1", "assemble"), ("part1-1", "broadcast"), ("part1-1", "slices")]
)
def test_a_replica_comes_back_whole_and_every_sample_counts_once(victim: str, turns: Any) -> None:
    killed = Killed(victim, 0.2, ("worker-1", "part1-1"))
    done = tokens(killed, turns)
    joined = [event["who"] for event in done.events if event["event"] == "joined"]
    assert killed.struck and set(joined[-2:]) == set(killed.replica)
    came_back_s = max(event["time_s"] for event in done.events if event["event"] == "joined")
    assert any(row["rank"] == 1 and row["time_s"] > came_back_s for row in done.history), (
        "it takes part again"
    )
    assert audit_of(done, SAMPLES, EPOCHS) == TokenAudit(0, 0, 0)


def test_the_audit_shows_a_push_that_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost replica had without a receipt gets one, as if it were in the model."""

    def receipts(self: OrphanedPushes, orphans: Any) -> Any:
        self._receipt(orphans, sorted(orphans.held))
        self._close(orphans)
        return []

    monkeypatch.setattr(OrphanedPushes, "_decide", receipts)
    assert audit_of(tokens(Killed("part1-1", 0.2, ("worker-1", "part1-1"))), SAMPLES, EPOCHS).lost


@functools.cache
def in_rounds(strategy: str) -> Run:
    """A run in which nobody dies."""
    return run(strategy=strategy, split=2, pipeline=HYBRID, epochs=3, config=SLOW)


@pytest.mark.parametrize(("strategy", "victim"), [("synchronous", "part1-1"), ("allreduce", "worker-1")])
def test_in_rounds_another_replica_computes_its_minibatches_to_the_same_result(
    strategy: str, victim: str
) -> None:
    killed = Killed(victim, 0.15, ("worker-1", "part1-1"))
    given: dict[str, Any] = {
        "strategy": strategy,
        "split": 2,
        "pipeline": HYBRID,
        "epochs": 3,
        "config": SLOW,
    }
    done = run(script=killed, **given)
    lost = [event["who"] for event in done.events if event["event"] == "left" and event["lost"]]
    assert killed.struck and "worker-1" in lost
    assert difference(in_rounds(strategy), done) <= (0.0 if strategy == "synchronous" else 1e-12)


def test_another_minibatch_in_the_place_of_the_lost_one_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = HybridGradients.of_rank

    def own(self: HybridGradients, rank: int, feed: Feed | None) -> HybridGradients:
        other = of_rank(self, rank, feed)
        other._own_samples = lambda ref, *rows: self._own_samples(replace(ref, partition=0), *rows)  # type: ignore[method-assign]
        return other

    undisturbed = in_rounds("synchronous")
    monkeypatch.setattr(HybridGradients, "of_rank", own)
    given: dict[str, Any] = {
        "strategy": "synchronous",
        "split": 2,
        "pipeline": HYBRID,
        "epochs": 3,
        "config": SLOW,
    }
    killed = Killed("part1-1", 0.15, ("worker-1", "part1-1"))
    assert difference(undisturbed, run(script=killed, **given)) > 1e-9


def test_the_run_of_the_only_replica_ends_and_is_resumed_to_the_same_result() -> None:
    given: dict[str, Any] = {
        "strategy": gs.Downpour(overlap=False),
        "workers": 1,
        "pipeline": HYBRID,
        "epochs": 3,
    }
    storage, killed = MemoryStorage(), Killed("part1-0", 1.15, ("worker-0", "part1-0"), comes_back=False)
    with pytest.raises(PeerLostError):
        run(storage=storage, checkpoint_every=4, split=2, config=SLOW, script=killed, **given)
    assert killed.struck and any(name.startswith("step-") for name in storage.names("checkpoints"))
    resumed = run(storage=storage, resume=True, checkpoint_every=None, split=2, **given)
    assert difference(run(split=2, **given), resumed) < 1e-12
