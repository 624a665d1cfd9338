"""The promises of the paper's algorithm: each holds, and each check fails on a planted fault."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.server.aggregation import AggregationRule, EveryPush, PushHeader
from gradstream.server.client.fetch import Arrival
from gradstream.server.shard.state import ShardState
from gradstream.strategies import ServerWorker
from gradstream.testing.runs import QUICK, Tokens, least_squares, numbered, token_counts

LR, GRID = 2.0**-7, 2.0**-10
LATE = SimulationConfig(  # the network is slower than the gradients, and each chunk goes its own way
    costs={"gradient": Cost(base_s=1e-3), "apply": Cost(base_s=1e-3, jitter=Exponential())},
    network=Network(link=Link(latency_s=5e-3, jitter_s=2e-2)),
)

# ---- one worker: k local steps ------------------------------------------------------------------


@dataclass(frozen=True)
class Watched(gs.Downpour):
    """Records, at each boundary, the worker's own parameters and the server's."""

    boundaries: ClassVar[list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = []

    async def fetch(self, worker: Any, pending: Arrival | None, *, overlap: bool) -> Arrival | None:
        own = worker.parameters.tensor.numpy().copy()
        found = await super().fetch(worker, pending, overlap=overlap)
        if worker.step:
            self.boundaries.append((own, worker.parameters.tensor.numpy().copy()))
        return found


def boundaries_differ(k: int) -> list[bool]:
    """Of one worker that pushes and fetches every k steps: at each boundary, whether the two differ."""
    Watched.boundaries.clear()
    model, data = least_squares(64, 300, grid=GRID)
    simulate(
        model, data, strategy=Watched(push_every=k, fetch_every=k, overlap=False), optimizer=gs.optim.SGD(lr=LR),
        workers=1, servers=2, batch_size=4, steps=24, chunk_elems=64, seed=3, config=LATE,
    )  # fmt: skip
    assert len({own.tobytes() for own, _ in Watched.boundaries}) > 3  # it moves
    return [own.tobytes() != server.tobytes() for own, server in Watched.boundaries]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_at_each_boundary_the_server_has_what_k_local_steps_made(k: int) -> None:
    assert boundaries_differ(k) == [False] * ((24 - 1) // k)


def test_a_fetch_that_overtakes_the_push_before_it_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def satisfied(self: ShardState, state: Any, terms: Any) -> bool:
        return bool(state.version >= max(terms.min_version, 0))

    monkeypatch.setattr(ShardState, "_satisfied", satisfied)
    assert any(boundaries_differ(3))


# ---- several workers: every push is applied ------------------------------------------------------


def pushed_and_applied(strategy: gs.Strategy, seed: int) -> tuple[int, int, int]:
    """Chunks pushed and chunk updates applied; and by how much samples are wrong, over all chunks."""
    run = simulate(
        Tokens(num_chunks=5), numbered(50), strategy=strategy, optimizer=gs.optim.SGD(lr=1.0), workers=4, servers=2,
        batch_size=3, epochs=3, chunk_elems=64, seed=seed, config=LATE, deadlines=QUICK,
    )  # fmt: skip
    wrong = int(np.abs(token_counts(run, 50) - 3).sum())
    return run.summary["pushes"] * 5, run.summary["updates"], wrong  # initial parameters are one of both


@pytest.mark.parametrize("seed", range(4))
def test_the_sum_of_what_is_pushed_is_the_sum_of_what_is_applied(seed: int) -> None:
    pushed, applied, wrong = pushed_and_applied(gs.Downpour(push_every=2, fetch_every=3), seed)
    assert (applied, wrong) == (pushed, 0)
    assert pushed >= 5 * 3 * 50 / 3 / 2


@dataclass(frozen=True)
class Doubling(gs.Downpour):
    """Takes the accumulated sum a second time: the swap with zero is not atomic."""

    async def train(self, worker: Any) -> None:
        async for batch in worker.batches():
            await worker.pull()
            await worker.accumulate(await worker.gradient(batch))
            update = worker.take_accumulated()
            await worker.server.push_soon(update)
            if worker.step == 4:
                await worker.server.flush()
                update.on_done = None
                await worker.server.push_soon(update)


@dataclass(frozen=True)
class Halved(EveryPush):
    """A server that applies a part."""

    def weights(self, version: int, update: Sequence[PushHeader]) -> Sequence[float]:
        return [0.0 if one.sequence == 3 else 1.0 for one in update]


@dataclass(frozen=True)
class Losing(gs.Downpour):
    """Its server loses the third push."""

    def rule(self, num_workers: int, reduction: Any) -> AggregationRule:
        return Halved()


def test_a_gradient_that_is_doubled_or_lost_would_be_noticed() -> None:
    assert pushed_and_applied(Doubling(), 0)[2] > 0
    assert pushed_and_applied(Losing(), 0)[2] > 0


# ---- bytes ----------------------------------------------------------------------------------------


def upstream_bytes(strategy: gs.Strategy) -> int:
    """Bytes that two workers send to the server in 20 steps each, without initial parameters."""
    model, data = least_squares(64, 300)
    run = simulate(
        model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=LR), workers=2, servers=2, batch_size=4, steps=20,
        chunk_elems=64,
    )  # fmt: skip
    return int(run.summary["pushed_bytes"]) - 300 * 8


@dataclass(frozen=True)
class Hasty(gs.Downpour):
    """Pushes before step 0, too."""

    async def train(self, worker: ServerWorker) -> None:
        async for batch in worker.batches():
            await worker.pull()
            await worker.accumulate(await worker.gradient(batch))
            if worker.step % self.push_every == 0:
                await worker.server.push_soon(worker.take_accumulated())


def test_a_period_of_5_sends_a_fifth_of_the_bytes() -> None:
    each = upstream_bytes(gs.Downpour())
    assert each == 2 * 20 * 300 * 8
    assert upstream_bytes(gs.Downpour(push_every=5)) * 5 == each
    assert upstream_bytes(Hasty(push_every=5)) * 5 != each  # the planted fault


# ---- deaths ---------------------------------------------------------------------------------------


async def kill_one(cluster: Any) -> None:
    """Kills a worker; and the run, if it does not come to its end."""
    director = cluster.virtual.runtime("director")
    await director.sleep(0.75)
    cluster.kill("worker-1")
    await director.sleep(60.0)
    cluster.kill("coordinator")


def longest_step_s(strategy: gs.Strategy) -> float:
    """Of those that are left when worker 1 of 3 is killed. Raises if the run does not come to its end."""
    config = SimulationConfig(costs={"gradient": Cost(base_s=0.1)}, network=Network(bandwidth_bytes_s=1e9))
    run = simulate(
        Tokens(num_chunks=2), numbered(60), strategy=strategy, optimizer=gs.optim.SGD(lr=1.0), workers=3,
        batch_size=1, epochs=2, chunk_elems=64, config=config, deadlines=QUICK, script=kill_one,
    )  # fmt: skip
    assert run.summary["workers_lost"] == ["worker-1"]
    ends: dict[str, list[float]] = {}
    for event in run.events:
        if event["event"] == "step" and event["node"] != "worker-1" and event["time_s"] < 2.0:
            ends.setdefault(event["node"], []).append(event["time_s"])
    return max(after - before for times in ends.values() for before, after in itertools.pairwise(times))


@dataclass(frozen=True)
class OfAll(EveryPush):
    """A server that makes each update of one contribution of every worker."""

    def due(self, version: int, parked: Sequence[PushHeader]) -> Sequence[PushHeader]:
        return parked[:1] if len({one.rank for one in parked}) == 3 else ()


@dataclass(frozen=True)
class Waiting(gs.Downpour):
    """Its server waits for a dead worker."""

    def rule(self, num_workers: int, reduction: Any) -> AggregationRule:
        return OfAll()


def test_a_dead_replica_stalls_nobody() -> None:
    assert longest_step_s(gs.Downpour()) < 0.11
    assert longest_step_s(gs.Downpour(overlap=False)) < 0.11
    with pytest.raises(
        gs.errors.PeerLostError, match="coordinator"
    ):  # the planted fault: it goes on for ever
        longest_step_s(Waiting())
