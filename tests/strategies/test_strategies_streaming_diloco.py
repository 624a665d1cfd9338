"""Streaming DiLoCo: one fragment travels at a time, behind computing; beside numpy's arithmetic and beside DiLoCo."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.data.base import BatchRef
from gradstream.data.plan import PartitionPlan
from gradstream.errors import ConfigError
from gradstream.job.descriptions import describe
from gradstream.job.files import load_job
from gradstream.job.registry import find_strategy
from gradstream.run.simulated import SimulatedCluster
from gradstream.runtime.simulation import Cost, Exponential, Link, Network, SimulationConfig
from gradstream.runtime.storage import MemoryStorage
from gradstream.server.client.links import ShardLinks
from gradstream.server.client.push import Update
from gradstream.strategies.api import ServerWorker
from gradstream.strategies.streaming_diloco import StreamingDiLoCo, turn
from gradstream.testing import check_strategy
from gradstream.testing.runs import QUICK, UNSTEADY, Sized, kill_at, least_squares, numbered, replace_at
from gradstream.worker.server.replica import ServerReplica

Array = np.ndarray[Any, Any]

LR, MOMENTUM, FEATURES, STEPS = 2.0**-5, 0.5, 300, 13  # 5 chunks of 64 elements
JOB = Path(__file__).resolve().parents[2] / "examples" / "linear_regression.py"
UNEVEN = SimulationConfig(
    costs={"gradient": Cost(base_s=0.01, jitter=Exponential())},
    network=Network(link=Link(latency_s=1e-3, jitter_s=1e-3)),
)
FAR = SimulationConfig(costs={"gradient": Cost(base_s=0.1)}, network=Network(link=Link(latency_s=0.04)))


@pytest.mark.usefixtures("few_seeds")
def test_it_obeys_the_laws() -> None:
    """With τ = 0 and α = 0: all else forgets a part of what workers have moved, as the paper says."""
    assert not check_strategy(StreamingDiLoCo(every=4, fragments=2, delay=0, mixing=0.0)).broken


def trained(strategy: gs.Strategy, workers: int = 1, steps: int = STEPS, **options: Any) -> gs.Run:
    """A run of minibatches of 4 samples."""
    model, data = least_squares(4 * steps * workers, FEATURES, whole=False, reduction="mean")
    given = {"optimizer": gs.optim.SGD(lr=LR, momentum=MOMENTUM), "config": UNEVEN, "servers": 2, **options}
    return simulate(
        model, data, strategy=strategy, workers=workers, batch_size=4, epochs=1, seed=3, chunk_elems=64, **given
    )  # fmt: skip


# ---- the formula ------------------------------------------------------------------------------------


def reference(strategy: StreamingDiLoCo, workers: int, fault: str = "") -> Array:
    """The paper's Algorithm 2 in numpy.

    Args:
        fault: a planted one: all fragments leave "at once"; α and 1 - α are "swapped"; a fragment is there "early".
    """
    data = least_squares(4 * STEPS * workers, FEATURES, whole=False, reduction="mean")[1]
    plan = PartitionPlan(data.num_samples, 4, workers, seed=3)
    chunks = np.arange(FEATURES) // 64
    parts = [np.flatnonzero(np.isin(chunks, part)) for part in strategy.divided(5)]
    count, every, delay = len(parts), strategy.every, strategy.delay
    if fault == "early":
        delay = 0
    alpha = 1 - strategy.mixing if fault == "swapped" else strategy.mixing
    outer, v = np.zeros(FEATURES), np.zeros(FEATURES)
    own, velocity, start = (np.zeros((workers, FEATURES)) for _ in range(3))
    arriving: list[Any] = []  # at which minibatch, which elements

    def step(part: Array) -> None:
        delta = np.mean(start[:, part] - own[:, part], 0)
        v[part] = strategy.outer_momentum * v[part] + delta
        outer[part] -= strategy.outer_lr * (delta + strategy.outer_momentum * v[part])

    def take_in(at: float) -> None:
        while arriving and arriving[0][0] <= at:
            part = arriving.pop(0)[1]
            own[:, part] = alpha * own[:, part] + (1 - alpha) * outer[part]
            start[:, part] = outer[part]

    for at in range(STEPS):
        for rank in range(workers):
            batch = data.batch(plan.ids(BatchRef(0, rank, at)))
            x, y = np.asarray(batch.inputs), np.asarray(batch.targets)
            velocity[rank] = MOMENTUM * velocity[rank] + (x @ own[rank] - y) @ x / 4
            own[rank] -= LR * velocity[rank]
        done = at + 1
        take_in(done)
        leaving = [p for p in range(count) if done % every == (p + 1) * every // count % every]
        if fault == "at once":
            leaving = [*range(count)] if done % every == 0 else []
        for p in leaving:
            step(parts[p])
            arriving.append((done + delay, parts[p]))
        take_in(done)
    take_in(np.inf)
    if count > 1 or STEPS % every:
        step(np.arange(FEATURES))
    return outer


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"every": 3, "fragments": 1, "delay": 2},
        {"every": 4, "fragments": 2, "delay": 0, "mixing": 0.25},
        {"every": 4, "fragments": 2, "delay": 2, "mixing": 0.25},
        {"every": 4, "fragments": 2, "delay": 1, "mixing": 0.0, "pattern": "strided"},
        {"every": 5, "fragments": 3, "delay": 1, "mixing": 0.25, "pattern": "strided"},
        {"every": 6, "fragments": 5, "delay": 1, "mixing": 1.0},
    ],
    ids=str,
)
def test_it_is_the_papers_algorithm(workers: int, options: Any) -> None:
    strategy = StreamingDiLoCo(**options)
    run = trained(strategy, workers)
    found = run.parameters["w"]
    assert run.summary["staleness_max"] == 0
    assert np.allclose(found, reference(strategy, workers), rtol=0, atol=1e-12)
    faults = {
        "at once": strategy.fragments > 1,
        "swapped": strategy.mixing != 0.5,
        "early": strategy.delay > 0 and strategy.mixing < 1,
    }
    for fault in (name for name, seen in faults.items() if seen):
        assert np.abs(found - reference(strategy, workers, fault)).max() > 1e-4, fault


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("every", [1, 4])
def test_one_fragment_taken_whole_at_once_is_diloco_bit_for_bit(every: int, workers: int) -> None:
    """Also its times, its bytes and its events: the same messages go the same ways."""
    plain = trained(gs.DiLoCo(every=every), workers)
    same = trained(StreamingDiLoCo(every=every, fragments=1, delay=0, mixing=0.0), workers)
    assert same.parameters["w"].tobytes() == plain.parameters["w"].tobytes()
    assert same.history == plain.history
    for figure in ("pushes", "updates", "pushed_bytes", "fetched_bytes", "train_s"):
        assert same.summary[figure] == plain.summary[figure], figure
    other = trained(StreamingDiLoCo(every=every, fragments=1, delay=0), workers)
    assert other.parameters["w"].tobytes() != plain.parameters["w"].tobytes()


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.0), (0, 0.5), (2, 1.0)])
def test_without_an_outer_optimizer_one_worker_is_its_inner_optimizer(delay: int, mixing: float) -> None:
    strategy = StreamingDiLoCo(
        every=4, fragments=2, delay=delay, mixing=mixing, outer_lr=1.0, outer_momentum=0.0
    )
    plain = trained(gs.Synchronous())
    assert np.abs(trained(strategy).parameters["w"] - plain.parameters["w"]).max() < 1e-15


# ---- bytes and time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["sequential", "strided"])
def test_each_exchange_is_of_one_fragment(pattern: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[str, int]] = []
    report = ShardLinks.report

    def noted(self: ShardLinks, kind: Any, begun_ns: int, size_bytes: int) -> None:
        sizes.append((kind, size_bytes))
        report(self, kind, begun_ns, size_bytes)

    monkeypatch.setattr(ShardLinks, "report", noted)
    elems, config = 1 << 20, SimulationConfig(shape_only=True, costs=FAR.costs, network=UNEVEN.network)
    run = simulate(
        Sized([elems]), numbered(160), strategy=StreamingDiLoCo(every=8, fragments=4, pattern=pattern),
        workers=2, batch_size=4, steps=20, config=config, assignment="partitions",
    )  # fmt: skip
    whole, part = 4 * elems, elems
    exchanges = 2 * 20 // 2
    # The initial parameters, and at the end a push of all that has moved since; to begin with, and the result.
    assert sizes.count(("push", part)) == sizes.count(("fetch", part)) == exchanges
    assert sorted(one for one in sizes if one[1] != part) == [("fetch", whole)] * 3 + [("push", whole)] * 3
    assert run.summary["pushed_bytes"] == part * exchanges + 3 * whole


def test_float4_makes_a_push_a_seventh() -> None:
    """Blocks of 64 numbers of half a byte, with a float32 each; error feedback keeps what is lost."""
    strategy, sizes = StreamingDiLoCo(every=4, fragments=2), []
    for codec in (None, gs.codecs.ErrorFeedback(gs.codecs.Blocks("float4", 64))):
        model, data = least_squares(96, 256, whole=False, reduction="mean", dtype="float32")
        run = gs.simulate(
            model, data, strategy=strategy, optimizer=gs.optim.SGD(0.01), workers=2, batch_size=4, epochs=2,
            chunk_elems=64, codec=codec,
        )  # fmt: skip
        sizes.append(run.summary["pushed_bytes"] - 4 * 256)  # without the initial parameters
    assert sizes[0] / sizes[1] == 4 / (0.5 + 4 / 64)


def test_an_exchange_goes_on_while_the_worker_computes() -> None:
    """An exchange takes 0.24 s. Four minibatches of 0.1 s follow."""
    seconds = [
        trained(StreamingDiLoCo(every=8, fragments=2, delay=delay), steps=80, config=FAR).summary["train_s"]
        for delay in (0, 3)
    ]
    assert seconds[0] > 80 * 0.1 + 20 * 0.16
    assert seconds[1] < 80 * 0.1 + 3 * 0.3


# ---- absent workers ---------------------------------------------------------------------------------


def drawn(rng: random.Random) -> StreamingDiLoCo:
    fragments = rng.choice([1, 2, 3, 5])
    every = rng.choice([fragments, 2 * fragments, 2 * fragments + 1])
    return StreamingDiLoCo(
        every=every, fragments=fragments, delay=rng.randint(0, every // fragments),
        pattern=rng.choice(["sequential", "strided"]), mixing=rng.choice([0.0, 0.5, 1.0]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [*range(8), 35])
def test_whoever_dies_or_joins_and_whenever_nobody_waits_for_ever(seed: int) -> None:
    """Deaths, replacements and checkpoints at drawn instants: workers must agree which fragment is next.

    Seeds 5, 7 and 35 wait for ever where each counts for itself, and 35 where the rule does not drop a push from an
    older w_start.
    """
    rng = random.Random(seed)
    strategy, name, at_s = drawn(rng), f"worker-{rng.randrange(3)}", rng.uniform(0.02, 0.5)
    after_s = rng.choice([0.0, 1e-3, 0.02, 0.1])
    goes = replace_at(name, at_s, after_s) if seed % 3 else kill_at(name, at_s)

    async def script(cluster: SimulatedCluster) -> None:
        await goes(cluster)
        await cluster.virtual.runtime("director").sleep(60)
        cluster.kill("coordinator")  # a run that waits for ever ends with an error

    model, data = least_squares(96, FEATURES, whole=False, reduction="mean")
    run = simulate(
        model, data, strategy=strategy, optimizer=gs.optim.SGD(lr=2**-8), workers=3, servers=rng.choice([1, 2, 3]),
        batch_size=4, epochs=3, seed=seed, chunk_elems=64, config=UNSTEADY, deadlines=QUICK, script=script,
        checkpoint_every=rng.choice([None, 7]), storage=MemoryStorage(),
    )  # fmt: skip
    assert run.summary["samples_accounted"] == 3 * 96
    assert run.summary["staleness_max"] == 0


def test_a_worker_that_has_nothing_left_keeps_nobody_waiting() -> None:
    model, data = least_squares(250, FEATURES, whole=False, reduction="mean")
    run = simulate(
        model, data, strategy=StreamingDiLoCo(every=4, fragments=4), optimizer=gs.optim.SGD(lr=2**-8), workers=3,
        batch_size=5, shares=[3, 1, 1], epochs=2, config=UNEVEN, chunk_elems=64,
    )  # fmt: skip
    assert run.summary["samples_accounted"] == 500


@pytest.mark.parametrize("seconds", [0.03, 0.055, 0.08])
def test_a_checkpoint_has_all_that_was_computed(seconds: float) -> None:
    """A run that is stopped and resumed is still the inner optimizer alone: nothing is lost or counted twice."""

    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(seconds)
        cluster.stop()

    storage, sgd = MemoryStorage(), gs.optim.SGD(lr=LR)
    strategy = StreamingDiLoCo(every=6, fragments=3, delay=2, mixing=1.0, outer_lr=1.0, outer_momentum=0.0)
    with pytest.raises(gs.errors.Interrupted) as stopped:
        trained(strategy, optimizer=sgd, storage=storage, script=stop)
    assert "optimizer-momentum_buffer.safetensors" not in storage.names(str(stopped.value.checkpoint))
    found = trained(strategy, optimizer=sgd, storage=storage, resume=True)
    assert found.summary["samples_accounted"] == 4 * STEPS
    plain = trained(gs.Synchronous(), optimizer=sgd)
    assert np.abs(found.parameters["w"] - plain.parameters["w"]).max() < 1e-14


def test_a_resumed_run_has_its_velocities() -> None:
    async def stop(cluster: SimulatedCluster) -> None:
        await cluster.virtual.runtime("director").sleep(0.08)
        cluster.stop()

    storage, strategy = MemoryStorage(), StreamingDiLoCo(every=4, fragments=2)
    with pytest.raises(gs.errors.Interrupted) as stopped:
        trained(strategy, workers=3, storage=storage, script=stop)
    assert "optimizer-momentum_buffer.safetensors" in storage.names(str(stopped.value.checkpoint))
    run = trained(strategy, workers=3, storage=storage, resume=True)
    assert run.summary["samples_accounted"] == 3 * 4 * STEPS
    assert run.summary["staleness_max"] == 0


def test_real_processes() -> None:
    options = {"every": 4, "fragments": 1, "delay": 2, "outer_momentum": 0.5}
    run = gs.train(
        load_job(str(JOB)), strategy="streaming-diloco", strategy_options=options, epochs=8, workers=2
    )
    assert np.allclose(run.parameters["weights"], [2.0, -1.0, 0.5], atol=0.2)


# ---- the seam: pushes and fetches of some chunks ----------------------------------------------------------


def test_a_minibatch_counts_once_every_fragment_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[int, Sequence[int] | None]] = []
    take = ServerReplica.take_outer_gradient

    async def noted(
        self: ServerReplica, chunks: Sequence[int] | None = None, *, goes_on: bool = False
    ) -> Update:
        update = await take(self, chunks, goes_on=goes_on)
        pushed.append((len(update.refs), update.chunks))
        return update

    monkeypatch.setattr(ServerReplica, "take_outer_gradient", noted)
    trained(StreamingDiLoCo(every=4, fragments=2), steps=7)
    assert pushed == [(0, [0, 1]), (2, [2, 3, 4]), (2, [0, 1]), (3, None)]


class FetchesAll(StreamingDiLoCo):
    """Pushes two chunks after each minibatch, and fetches all."""

    async def train(self, worker: ServerWorker) -> None:
        steps = 0

        async def flush() -> None:
            await worker.server.push_soon(await worker.take_outer_gradient())
            await worker.server.flush()

        await worker.start_from(worker.server.fetch_soon())
        async for batch in worker.batches(flush, waited_for=True):
            await worker.optimize(await worker.gradient(batch))
            await worker.server.push_soon(await worker.take_outer_gradient([0, 3]))
            await worker.start_from(worker.server.fetch_soon())
            steps += 1
            assert list(worker.versions) == [steps, 0, 0, steps, 0]


def test_a_fetch_of_all_waits_for_a_push_of_some() -> None:
    """It has that push, and waits for it on no chunk that never gets it."""
    assert trained(FetchesAll()).summary["samples_accounted"] == 4 * STEPS


# ---- options, fragments and turns -------------------------------------------------------------------------


def test_fragments_have_all_chunks_once() -> None:
    for pattern in ("sequential", "strided"):
        for count in range(1, 12):
            parts = StreamingDiLoCo(every=12, fragments=4, pattern=pattern).divided(count)
            assert sorted(chunk for part in parts for chunk in part) == [*range(count)]
            assert len(parts) == min(4, count)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [[*part] for part in StreamingDiLoCo(pattern="strided").divided(5)] == [[0, 4], [1], [2], [3]]


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        ((0, 0, 0, 0), [0, 1]),
        ((1, 1, 0, 0), [2, 3]),
        ((2, 2, 1, 1), [2, 3]),
        ((1, 0, 0, 0), [1]),  # a part of the first fragment went by without the worker
        ((2, 2, 1, 2), [2]),
        ((5, 5, 3, 3), [2, 3]),
    ],
)
def test_whose_turn_it_is_follows_from_the_versions(versions: Any, wanted: list[int]) -> None:
    assert turn(versions, [[0, 1], [2, 3]]) == wanted


def test_a_model_in_too_few_chunks_gets_smaller_ones() -> None:
    sizes: list[int] = []
    for elems in (1000, 10):
        run = gs.simulate(
            Sized([elems]), numbered(16), strategy=StreamingDiLoCo(), workers=1, batch_size=4, steps=2,
            config=SimulationConfig(shape_only=True),
        )  # fmt: skip
        sizes.append(run.summary["chunk_elems"])
    assert sizes == [256, 64]


def test_options_travel() -> None:
    strategy = StreamingDiLoCo(every=50, fragments=5, pattern="strided", delay=7, mixing=0.25, outer_lr=0.4)
    assert find_strategy("streaming-diloco", describe(strategy)["fields"]) == strategy


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"outer_lr": 0.0}, r"outer_lr=0\.0.*a finite number > 0"),
        ({"every": 3}, r"every=3, fragments=4\): expected at most 3"),
        ({"delay": 3}, r"every=10, fragments=4, delay=3\): expected a delay of 0 to 2"),
        ({"mixing": 1.5}, r"mixing=1\.5\): expected a number in \[0, 1\]"),
        ({"pattern": "random"}, r"pattern.*random"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        StreamingDiLoCo(**options)
