"""When buckets leave and how long a step takes, on virtual time: every figure can be computed on paper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

import gradstream as gs
from gradstream._simulate import simulate
from gradstream.report.figures import figures_of
from gradstream.report.reason import reason_of
from gradstream.runtime.simulation import Cost, Link, Network, SimulationConfig
from gradstream.strategies import AllReduce
from gradstream.testing.runs import Sized, numbered

BUCKET_ELEMS = 1 << 18  # 1 MiB
GRADIENT_S, APPLY_S = 0.4, 0.03
LAYERS = [BUCKET_ELEMS] * 6 + [BUCKET_ELEMS // 4]  # one bucket each, in backward order
OFFSETS = [0.30, 0.35, 0.40, 0.80, 0.85, 0.90, 1.0]  # some come faster than they can leave, some do not


def config(offsets: Sequence[float]) -> SimulationConfig:
    return SimulationConfig(
        costs={
            "gradient": Cost(base_s=GRADIENT_S),
            "apply": Cost(base_s=APPLY_S),
            "reduce": Cost(per_elem_s=1e-7),
        },
        offsets=offsets,
        # What takes time is latency and sums: a card's time is shared with signs of life.
        network=Network(bandwidth_bytes_s=math.inf, link=Link(latency_s=1e-3)),
        shape_only=True,
    )


def step_s(layers: Sequence[int], offsets: Sequence[float], workers: int = 2, **options: Any) -> float:
    """Virtual seconds of a step, without the first: with two workers each step takes the same."""
    run = simulate(
        Sized(layers), numbered(64), strategy=AllReduce(algorithm="ring", bucket_mib=1.0, **options),
        workers=workers, batch_size=1, steps=5, optimizer=gs.optim.SGD(lr=0.1), config=config(offsets),
    )  # fmt: skip
    steps = [e["compute_s"] + e["wait_s"] for e in run.events if e["event"] == "step" and e["rank"] == 0]
    assert workers > 2 or steps[1:] == pytest.approx(steps[1:2] * 4, abs=1e-8)
    return float(sum(steps[1:])) / 4


def exchange_s(elems: int, workers: int) -> float:
    """Virtual seconds of one bucket alone: of a model that is nothing but this bucket."""
    return step_s([elems], [1.0], workers) - GRADIENT_S - APPLY_S


@pytest.mark.parametrize(("workers", "error_s"), [(2, 1e-8), (5, 4e-3)])
def test_a_step_takes_what_the_recursion_of_wait_free_backprop_says(workers: int, error_s: float) -> None:
    """s_l = max(r_l, e_{l+1}), e_l = s_l + a_l, T = e_1 + t_update; in turn t_gradient + Σ a_l + t_update.

    Exact with two workers. In a longer ring some begin the next round before others have ended this one.
    """
    times = {elems: exchange_s(elems, workers) for elems in set(LAYERS)}
    assert times[BUCKET_ELEMS] > 2 * times[BUCKET_ELEMS // 4] > 0
    end_s = 0.0
    for elems, offset in zip(LAYERS, OFFSETS, strict=True):
        end_s = max(offset * GRADIENT_S, end_s) + times[elems]
    overlapped = step_s(LAYERS, OFFSETS, workers)
    assert overlapped == pytest.approx(end_s + APPLY_S, abs=error_s)
    serial = step_s(LAYERS, OFFSETS, workers, overlap=False)
    assert serial == pytest.approx(GRADIENT_S + sum(map(times.__getitem__, LAYERS)) + APPLY_S, abs=error_s)
    assert overlapped < 0.75 * serial


def test_many_workers_in_a_shape_only_world() -> None:
    """A ring's time with so many is latency: 2 (W - 1) messages one after the other, for each bucket."""
    run = simulate(
        Sized([1000, 1000]), numbered(640), strategy=AllReduce(algorithm="ring"), workers=32,
        batch_size=1, steps=1, config=config([0.5, 1.0]),
    )  # fmt: skip
    assert run.summary["steps"] == 32
    per_step_s = GRADIENT_S + APPLY_S + 2 * 31 * 1e-3
    assert run.summary["train_s"] == pytest.approx(per_step_s, rel=0.03)


def test_a_round_is_told_of_as_one_transfer_of_the_whole_gradient() -> None:
    run = simulate(
        Sized(LAYERS), numbered(8), strategy=AllReduce(bucket_mib=1.0), workers=2, batch_size=1, steps=3,
        config=config(OFFSETS),
    )  # fmt: skip
    transfers = [event for event in run.events if event["event"] == "transfer"]
    assert [event["size_bytes"] for event in transfers] == [4 * sum(LAYERS)] * 2 * 3


def test_waiting_is_due_to_the_slowest_worker_and_what_is_left_to_the_exchange() -> None:
    """Worker 2 takes twice as long: the others wait 0.4 s for it, and all for the exchange that follows."""
    slow = SimulationConfig(
        costs={"gradient": Cost(base_s=GRADIENT_S)},
        speeds={"worker-2": 0.5},
        network=Network(bandwidth_bytes_s=math.inf, link=Link(latency_s=1e-2)),
        shape_only=True,
    )
    run = simulate(
        Sized([1000]), numbered(64), strategy=AllReduce(algorithm="ring"), workers=3, batch_size=1, steps=8,
        config=slow,
    )  # fmt: skip
    figures = figures_of(run.events)
    for worker in figures.workers:
        waited = worker.waited_for
        assert waited.get("worker-2", 0.0) == pytest.approx(
            8 * GRADIENT_S * (worker.name != "worker-2"), rel=0.1
        )
        assert waited["group"] == pytest.approx(8 * 4 * 1e-2, rel=0.4)
        assert sum(waited.values()) == pytest.approx(worker.wait_s, rel=0.05)
    reason = reason_of(figures)
    assert (reason.kind, reason.culprit) == ("slow worker", "worker-2")
    fast = dataclasses.replace(slow, speeds={}, network=Network(link=Link(latency_s=0.1)))
    run = simulate(
        Sized([1000]), numbered(64), strategy=AllReduce(algorithm="ring"), workers=3, batch_size=1, steps=8,
        config=fast,
    )  # fmt: skip
    assert reason_of(figures_of(run.events)).kind == "network"
