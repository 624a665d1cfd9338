"""Frames are lost, streams come twice, pushes overtake one another: every push counts once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.errors import LentMemoryError
from gradstream.memory import Vector
from gradstream.run.result import Run
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.server.client.push import PendingPushRequest
from gradstream.server.shard.state import ShardState
from gradstream.strategies import Downpour, ServerWorker, Strategy
from gradstream.testing.runs import QUICK, Tokens, check_exactly_once, numbered
from gradstream.wire.frames import SequenceWindow
from gradstream.worker.server.replica import ServerReplica

NUM_SAMPLES = 24
WORKERS, SERVERS = 2, 2
NUM_SEEDS = 30  # 10 of each strategy: a planted fault shows in fewer

# The time between a push and its duplicate is like that between pushes, so that they get mixed up.
BAD = Link(latency_s=1e-3, jitter_s=4e-3, loss=0.02, duplicate=0.5)


def bad_world() -> SimulationConfig:
    """Between workers and shards nothing can be relied upon; membership is left in peace."""
    workers = [f"worker-{rank}" for rank in range(WORKERS)]
    shards = [f"shard-{rank}" for rank in range(SERVERS)]
    pairs = [(one, other) for one in workers for other in shards]
    links = {pair: BAD for one, other in pairs for pair in ((one, other), (other, one))}
    costs = {"gradient": Cost(base_s=3e-3, jitter=Exponential()), "apply": Cost(base_s=1e-4)}
    return SimulationConfig(costs=costs, network=Network(links=links))


@dataclasses.dataclass(frozen=True, slots=True)
class Impatient(Downpour):
    """Pushes each gradient without waiting for the push before: several are under way at once."""

    async def train(self, worker: ServerWorker) -> None:
        assert isinstance(worker, ServerReplica)
        client, runtime = worker.server, worker._runtime
        await worker.swap_in(client.fetch_soon())
        pushes = []
        async for batch in worker.batches():
            gradient = await worker.gradient(batch)
            update = worker.update(gradient)
            update.vector = Vector("copy", gradient.vector.tensor.clone())
            client._sequence += 1
            push = PendingPushRequest(client._links, update, client._sequence, None)
            pushes.append(runtime.spawn(push.run(), name=f"push-{client._sequence}"))
        await runtime.gather(*pushes)


def tokens_run(seed: int, strategy: Strategy, **options: Any) -> Run:
    options = {"config": bad_world(), **options}
    return simulate(
        Tokens(num_chunks=4),
        numbered(NUM_SAMPLES),
        strategy=strategy,
        optimizer=gs.optim.SGD(lr=1.0),
        workers=WORKERS,
        servers=SERVERS,
        batch_size=3,
        epochs=2,
        chunk_elems=64,
        seed=seed,
        deadlines=QUICK,
        **options,
    )


def faults_of(run: Run) -> Counter[str]:
    """What the injector did, as the nodes have noticed it."""
    totals: Counter[str] = Counter()
    for event in run.events:
        if event["event"] == "exchange":
            totals["retries"] += event["retries"]
        if event["event"] == "applied":
            totals.update({key: event[key] for key in ("updates", "duplicates", "dropped", "refused")})
    return totals


STRATEGIES: tuple[Strategy, ...] = (gs.Downpour(overlap=False), gs.Downpour(push_every=2), Impatient())


def test_all_that_is_pushed_is_applied_once_on_a_bad_network() -> None:
    totals: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        run = tokens_run(seed, STRATEGIES[seed % len(STRATEGIES)])
        check_exactly_once(run, NUM_SAMPLES, epochs=2)
        totals += faults_of(run)
    print(totals)
    assert totals["retries"] > NUM_SEEDS
    assert totals["duplicates"] > NUM_SEEDS
    assert not totals["dropped"]
    assert not totals["refused"]


class HighestOnly(SequenceWindow):
    """Planted: all numbers up to the highest seen count as applied."""

    def add(self, number: int) -> bool:
        new = number not in self
        self.low = max(self.low, number)
        return new


class LastOnly(SequenceWindow):
    """Planted: a number is a duplicate if it is that of the push applied last."""

    def __contains__(self, number: int) -> bool:
        return number == self.low

    def add(self, number: int) -> bool:
        new = number not in self
        self.low = number
        return new


def with_window(monkeypatch: pytest.MonkeyPatch, window: type[SequenceWindow]) -> None:
    monkeypatch.setattr("gradstream.server.shard.service.ShardState", partial(ShardState, window=window))


def check_seeds(strategy: Strategy) -> None:
    """A fetch may wait for ever for a push that the fault has lost count of: that shows in other seeds."""
    for seed in range(20):
        with suppress(gs.errors.DeadlineError):
            check_exactly_once(tokens_run(seed, strategy), NUM_SAMPLES, epochs=2)


@pytest.mark.parametrize(
    ("window", "strategy", "message"),
    [
        (HighestOnly, Impatient(), "applied [01] times"),  # refuses what was overtaken
        (LastOnly, gs.Downpour(overlap=False), "applied [3-9] times"),  # takes late duplicates in
    ],
)
def test_last_seen_instead_of_a_window_is_caught(
    monkeypatch: pytest.MonkeyPatch, window: type[SequenceWindow], strategy: Strategy, message: str
) -> None:
    with_window(monkeypatch, window)
    with pytest.raises(AssertionError, match=message):
        check_seeds(strategy)


def test_a_silent_network_ends_the_run_within_its_deadlines() -> None:
    """Everything between one worker and one shard is lost: a typed error, naming the shard."""
    dead = Link(loss=1.0)
    links = {("worker-1", "shard-0"): dead, ("shard-0", "worker-1"): dead}
    deadlines = dataclasses.replace(QUICK, retry_s=5.0)
    events: list[Any] = []
    with pytest.raises(gs.errors.DeadlineError, match="shard-0"):
        simulate(
            Tokens(num_chunks=2),
            numbered(NUM_SAMPLES),
            config=SimulationConfig(network=Network(links=links)),
            on_event=events.append,
            optimizer=gs.optim.SGD(lr=1.0),
            steps=5,
            chunk_elems=64,
            deadlines=deadlines,
        )
    (failed,) = [event for event in events if event["event"] == "failed"]
    assert failed["time_s"] < 5 + 2 * QUICK.lease_s


# ---- lent memory ------------------------------------------------------------------------


class Racing(gs.Synchronous):
    """Planted: fetches straight into the parameters that are being differentiated."""

    async def train(self, worker: ServerWorker) -> None:
        assert isinstance(worker, ServerReplica)
        await worker.swap_in(worker.server.fetch_soon())
        async for batch in worker.batches():
            gradient = worker.gradient_soon(batch)
            worker.server.back_buffer = worker.parameters
            arrival = worker.server.fetch_soon()
            await gradient.done()
            await worker.swap_in(arrival)
            await worker.server.push_soon(worker.update(gradient))
            await worker.server.flush()


class Overwriting(gs.Synchronous):
    """Planted: computes the next gradient into the vector whose push is still under way."""

    async def train(self, worker: ServerWorker) -> None:
        assert isinstance(worker, ServerReplica)
        await worker.swap_in(worker.server.fetch_soon())
        async for batch in worker.batches():
            gradient = await worker.gradient(batch)
            update = worker.update(gradient)
            update.ready = None
            await worker.server.push_soon(update)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("strategy", [Racing(), Overwriting()], ids=["fetch", "gradient"])
def test_a_planted_race_is_caught(strategy: Strategy, seed: int) -> None:
    with pytest.raises(LentMemoryError, match=r"worker-.*(parameters|gradient)") as caught:
        simulate(
            Tokens(num_chunks=2),
            numbered(NUM_SAMPLES),
            strategy=strategy,
            config=SimulationConfig(network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3))),
            optimizer=gs.optim.SGD(lr=1.0),
            steps=4,
            chunk_elems=64,
            seed=seed,
        )
    assert "being" in str(caught.value)
