"""Virtual time: one seed is one history, and a step takes what paper says it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.run.result import Run
from gradstream.runtime import Report, VirtualCluster, Work
from gradstream.runtime.simulation import Cost, Exponential, Link, LogNormal, Network, SimulationConfig, Trace
from gradstream.strategies import Strategy
from gradstream.testing.runs import QUICK, Sized, least_squares, numbered

CHUNK = 4096
CHUNK_BYTES = 4 * CHUNK
BETA = 1e-7  # seconds a byte: 10 MB/s, so that headers and latency are small beside a chunk


# ---- one seed, one history --------------------------------------------------------------

POOR = Link(latency_s=1e-3, jitter_s=1e-3, loss=0.01, duplicate=0.05)
PAIRS = [(f"worker-{worker}", f"shard-{shard}") for worker in range(3) for shard in range(2)]
JITTERY = SimulationConfig(
    costs={"gradient": Cost(base_s=1e-2, jitter=LogNormal(0.3)), "apply": Cost(base_s=1e-3)},
    network=Network(
        link=Link(jitter_s=1e-3), links={pair: POOR for a, b in PAIRS for pair in ((a, b), (b, a))}
    ),
)


def history(
    seed: int, config: SimulationConfig, strategy: Strategy, *, alike: bool = False
) -> tuple[bytes, bytes]:
    """The events and the parameters of a run, as bytes."""
    model, data = least_squares(48, 100, whole=False, reduction="sum")
    if alike:
        # The order of samples, which is the seed's as well, makes no difference then; that of
        # workers does, if their sums are taken as they are.
        data = gs.from_arrays(np.repeat(data.inputs[:1], 48, axis=0), np.repeat(data.targets[:1], 48))
        model.reduction = "mean"
    options: dict[str, Any] = {"workers": 3, "servers": 2, "steps": 6, "chunk_elems": 64}
    run = simulate(
        model, data, strategy=strategy, optimizer=gs.optim.Adam(lr=0.05), config=config, seed=seed,
        batch_size=[1, 2, 4], deadlines=QUICK, **options,
    )  # fmt: skip
    lines = b"".join(json.dumps(event).encode() for event in run.events)
    return lines, run.parameters["w"].tobytes()


@pytest.mark.parametrize("strategy", [gs.Synchronous(), gs.Downpour(push_every=2)], ids=["sync", "downpour"])
def test_one_seed_is_one_history(strategy: Strategy) -> None:
    first = history(7, JITTERY, strategy)
    assert history(7, JITTERY, strategy) == first
    assert history(8, JITTERY, strategy) != first


def test_the_seed_orders_what_happens_at_the_same_instant() -> None:
    """Three workers alike on a network without jitter, going through the same sample again and again."""
    even = SimulationConfig(costs={"gradient": Cost(base_s=1e-2), "apply": Cost(base_s=1e-3)})
    seeds = range(12)
    downpour = [history(seed, even, gs.Downpour(), alike=True) for seed in seeds]
    assert len({events for events, _ in downpour}) > len(seeds) // 2
    assert len({parameters for _, parameters in downpour}) > 1
    synchronous = [history(seed, even, gs.Synchronous(), alike=True) for seed in seeds]
    assert len({events for events, _ in synchronous}) > 1
    assert len({parameters for _, parameters in synchronous}) == 1


# ---- how long things take ---------------------------------------------------------------


def shape_only_world(gradient: Cost | None = None, **options: Any) -> SimulationConfig:
    """Cards of 1/BETA, no latency, no arithmetic."""
    costs = {"gradient": gradient} if gradient else {}
    network = Network(bandwidth_bytes_s=1 / BETA, link=Link(latency_s=0.0))
    return SimulationConfig(costs=costs, network=network, shape_only=True, **options)


def step_times(run: Run, rank: int = 0) -> list[float]:
    steps = [e for e in run.events if e["event"] == "step" and e["rank"] == rank]
    return [event["compute_s"] + event["wait_s"] for event in steps]


def shape_only_run(num_chunks: int, config: SimulationConfig, strategy: Strategy, **options: Any) -> Run:
    options = {"workers": 1, "batch_size": 1, "steps": 8, **options}
    model = Sized([CHUNK] * num_chunks)
    data = numbered(64)
    return simulate(model, data, config=config, strategy=strategy, chunk_elems=CHUNK, **options)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_share_the_one_servers_card(workers: int) -> None:
    """p workers that push n bytes to one server take p·n·β, and as long again to fetch them."""
    num_chunks = 16
    run = shape_only_run(num_chunks, shape_only_world(), gs.Synchronous(overlap=False), workers=workers)
    expected = 2 * workers * num_chunks * CHUNK_BYTES * BETA
    for rank in range(workers):
        assert step_times(run, rank)[1:] == pytest.approx([expected] * 7, rel=0.03)


def test_shards_have_cards_of_their_own() -> None:
    num_chunks = 16
    run = shape_only_run(num_chunks, shape_only_world(), gs.Synchronous(overlap=False), workers=4, servers=4)
    one_card = 4 * num_chunks // 4 * CHUNK_BYTES * BETA  # a shard's, and as busy a worker's
    assert step_times(run)[1:] == pytest.approx([2 * one_card] * 7, rel=0.25)


def test_both_directions_of_a_card_work_at_once() -> None:
    """With overlap a chunk comes back while the next is on its way: max, and not sum."""
    num_chunks = 32
    one_way = num_chunks * CHUNK_BYTES * BETA
    apart = shape_only_run(num_chunks, shape_only_world(), gs.Synchronous(overlap=False))
    at_once = shape_only_run(num_chunks, shape_only_world(), gs.Synchronous(overlap=True))
    assert step_times(apart)[1:] == pytest.approx([2 * one_way] * 7, rel=0.02)
    assert step_times(at_once)[1:] == pytest.approx([one_way * (1 + 1 / num_chunks)] * 7, rel=0.02)


def recursion(ready: list[float], exchange: list[float]) -> float:
    """Wait-free backprop: s_l = max(r_l, e of the layer before), e_l = s_l + a_l; then back again."""
    sent = landed = 0.0
    for ready_s, exchange_s in zip(ready, exchange, strict=True):
        sent = max(ready_s, sent) + exchange_s
        landed = max(sent, landed) + exchange_s
    return landed


LAYERS = {  # in chunks, the layer that backprop finishes first at the front
    "small first": [1, 1, 2, 4, 8],
    "large first": [8, 4, 2, 1, 1],
    "even": [3, 3, 3, 3],
}
SMALL_S = 4e-5  # per frame: a header of 64 bytes, and what is sent around it, events among it


@pytest.mark.parametrize("gradient_s", [0.005, 0.02, 0.1])
@pytest.mark.parametrize("layers", LAYERS)
def test_backprop_and_exchange_overlap_as_on_paper(layers: str, gradient_s: float) -> None:
    sizes = LAYERS[layers]
    forward = 0.25
    config = shape_only_world(Cost(base_s=gradient_s), backprop=forward)
    model = Sized([CHUNK * size for size in sizes])
    total = sum(sizes)
    ready: list[float] = []
    exchange: list[float] = []
    for size in sizes:
        end = len(ready) + size
        ready += [gradient_s * (forward + (1 - forward) * end / total)] * size
        exchange += [CHUNK_BYTES * BETA] * size

    def steps(*, overlap: bool) -> list[float]:
        strategy = gs.Synchronous(overlap=overlap)
        options: dict[str, Any] = {"workers": 1, "batch_size": 1, "steps": 6, "chunk_elems": CHUNK}
        return step_times(simulate(model, numbered(64), config=config, strategy=strategy, **options))[1:]

    small_s = SMALL_S * total
    assert steps(overlap=True) == pytest.approx([recursion(ready, exchange)] * 5, abs=small_s)
    assert steps(overlap=False) == pytest.approx([gradient_s + 2 * sum(exchange)] * 5, abs=small_s)


def test_buckets_become_ready_at_the_offsets_of_the_world() -> None:
    cluster = VirtualCluster(
        0, SimulationConfig(costs={"gradient": Cost(base_s=1.0)}, offsets=(0.5, 0.5, 0.9))
    )
    runtime = cluster.runtime("worker-0")
    told: list[tuple[int, float]] = []

    def backprop(report: Report) -> None:
        for elems in (10, 30, 40):  # one tensor came out of order
            report(elems)

    async def main() -> None:
        await runtime.compute(
            backprop,
            work=Work("gradient"),
            milestones=(10, 20, 30, 40),
            on_progress=lambda elems: told.append((elems, round(runtime.now() / 1e9, 6))),
        )

    cluster.run(main())
    assert told == [(10, 0.5), (30, 0.9), (40, 1.0)]


def test_downpour_hides_the_exchange_behind_computing() -> None:
    """overlap=True: a step takes max(compute, exchange); without, their sum."""
    num_chunks = 16
    one_way = num_chunks * CHUNK_BYTES * BETA  # 26 ms
    for gradient_s in (0.1, 0.005):
        config = shape_only_world(Cost(base_s=gradient_s))
        hidden = shape_only_run(num_chunks, config, gs.Downpour(overlap=True), steps=12)
        bare = shape_only_run(num_chunks, config, gs.Downpour(overlap=False), steps=12)
        mean_hidden = float(np.mean(step_times(hidden)[4:]))
        mean_bare = float(np.mean(step_times(bare)[4:]))
        longest = max(gradient_s, one_way)
        assert longest <= mean_hidden <= longest + 2.1 * one_way / num_chunks  # a chunk out, a chunk back
        assert mean_bare == pytest.approx(gradient_s + one_way * (1 + 1 / num_chunks), rel=0.05)


def test_the_slowest_worker_sets_the_pace_of_rounds() -> None:
    """Synchronous: a step takes E[max of W]; of exponential times with mean c that is c·Σ 1/i."""
    workers, steps = 4, 150
    config = SimulationConfig(costs={"gradient": Cost(base_s=1.0, jitter=Exponential())}, shape_only=True)
    run = simulate(
        Sized([64]), numbered(64), config=config, strategy="synchronous", workers=workers, batch_size=1,
        steps=steps, chunk_elems=64, seed=2,
    )  # fmt: skip
    expected = sum(1 / i for i in range(1, workers + 1))
    assert float(np.mean(step_times(run))) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Cost(base_s=-1.0),
        lambda: Cost(per_elem_s=float("nan")),
        lambda: LogNormal(-1.0),
        lambda: Link(latency_s=-1e-3),
        lambda: Network(bandwidth_bytes_s=0.0),
        lambda: Network(cards={"shard-0": -1.0}),
    ],
)
def test_no_world_is_of_less_than_nothing(made: Callable[[], object]) -> None:
    with pytest.raises(gs.errors.ConfigError, match="expected a"):
        made()


def test_traces_and_speeds_are_kept_to() -> None:
    gradient = Cost(base_s=1.0, jitter=Trace((1.0, 3.0)))
    config = shape_only_world(gradient, speeds={"worker-1": 0.5})
    run = shape_only_run(1, config, gs.Downpour(), workers=2, steps=4)
    computed = {
        rank: [e["compute_s"] for e in run.events if e["event"] == "step" and e["rank"] == rank]
        for rank in (0, 1)
    }
    assert sum(map(len, computed.values())) == 8
    assert computed[0] == ([1.0, 3.0] * 4)[: len(computed[0])]
    assert computed[1] == ([2.0, 6.0] * 4)[: len(computed[1])]
    assert len(computed[0]) > len(computed[1]) > 0


def test_shape_only_takes_as_long_as_the_real_thing() -> None:
    """Durations and bytes do not depend on whether arithmetic is done."""

    def story(*, shape_only: bool) -> list[Any]:
        config = SimulationConfig(costs={"gradient": Cost(base_s=0.01)}, shape_only=shape_only)
        run = simulate(
            Sized([3 * CHUNK, 100, CHUNK, 2 * CHUNK]), numbered(64), config=config, strategy="synchronous",
            workers=3, servers=2, batch_size=2, steps=4, chunk_elems=CHUNK, seed=3,
        )  # fmt: skip
        return [event for event in run.events if event["event"] in ("step", "exchange", "applied")]

    assert story(shape_only=False) == story(shape_only=True)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (lambda: SimulationConfig(costs={"gradients": Cost()}), "did you mean 'gradient'"),
        (
            lambda: SimulationConfig(speeds={"worker_1": 0.5}),
            "SimulationConfig.speeds 'worker_1' (did you mean 'worker-1'?)",
        ),
        (lambda: SimulationConfig(speeds={"worker-3": 0.5}), "SimulationConfig.speeds 'worker-3'"),
        (
            lambda: SimulationConfig(network=Network(cards={"worker_1": 1e6})),
            "Network.cards 'worker_1' (did you mean",
        ),
        (
            lambda: SimulationConfig(network=Network(links={("worker-1", "shard0"): Link()})),
            "did you mean 'shard-0'",
        ),
    ],
)
def test_names_that_a_run_does_not_have_are_refused(
    config: Callable[[], SimulationConfig], told: str
) -> None:
    with pytest.raises(gs.errors.ConfigError, match=re.escape(told)):
        simulate(Sized([64]), numbered(64), config=config(), workers=2, batch_size=1, steps=1)
