"""Advice on slow links: the first way of exchange that is quick enough, by formulas that simulations confirm."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  its usual name

import gradstream as gs
from gradstream.cli.report import figures
from gradstream.codec import named
from gradstream.coordinator.link_choice import COMPRESSIONS, Compression, Links
from gradstream.report.summary import links_of

MB = Links(
    workers=4, elems=10_000_000, alpha_s=1e-3, beta_s_byte=8e-8, compute_s=0.1, wait_s=2.3
)  # 100 Mbit/s


NONE, INT8, FLOAT4, ONE_BIT, FEW = COMPRESSIONS


def test_seconds_are_those_of_slices_of_numbers_or_of_encoded_ones() -> None:
    assert MB.exchange_s(NONE) == MB.sum_s == pytest.approx(2e-3 + 1.5 * 40e6 * 8e-8)
    encoded = named.int8().encoded_bytes(10_000_000)
    assert MB.exchange_s(INT8) == pytest.approx(2e-3 + 1.5 * encoded * 8e-8)
    assert dataclasses.replace(MB, workers=2).exchange_s(INT8) == pytest.approx(1e-3 + encoded * 8e-8)
    few = named.chunk_top_k().encoded_bytes(10_000_000)
    for workers, messages in ((2, 1), (4, 2), (5, 3)):  # all parts go to all
        seconds = dataclasses.replace(MB, workers=workers).exchange_s(FEW)
        assert seconds == pytest.approx(messages * 1e-3 + (workers - 1) * few * 8e-8)


def test_the_slower_the_links_the_fewer_bytes() -> None:
    speeds = [
        dataclasses.replace(MB, beta_s_byte=8 / 1e6 / mbit).advice() for mbit in (10, 50, 100, 1000, 10_000)
    ]
    assert [one.codec for one in speeds] == ["chunk-top-k", "one-bit", "float4", "int8", None]
    assert max(one.every for one in speeds) < 30
    assert [one.outer_momentum for one in speeds] == [0.5, 0, 0, 0, 0]
    assert speeds[0].options == (
        "--strategy local-sgd --set strategy.every=12 --set strategy.delay=3 --set strategy.outer_momentum=0.5 "
        "--codec chunk-top-k"
    )


def test_what_is_advised_costs_least_by_the_formula() -> None:
    """Beside each other period and delay, up to those that cost alike."""
    slow = dataclasses.replace(MB, beta_s_byte=8e-7)
    advice = slow.advice()

    def cost_s(way: Compression, every: int, delay: int) -> float:
        wait_s = max(0.0, slow.exchange_s(way) - delay * 0.1) / every
        return (0.1 + wait_s) * way.needed(every, delay)

    assert advice.cost_s == pytest.approx(cost_s(FEW, advice.every, advice.delay))
    least = min(
        cost_s(way, every, delay)
        for way in COMPRESSIONS
        for every in range(2, 501)
        for delay in {0, min(every // 4, 17)}
    )
    assert advice.cost_s <= 1.05 * 1.01 * least  # not each period is tried
    assert advice.wait_s == pytest.approx((advice.exchange_s - 0.1 * advice.delay) / advice.every)


def test_rounds_of_an_epoch_are_alike_and_no_longer_than_it() -> None:
    slow = dataclasses.replace(MB, beta_s_byte=8e-6, compute_s=0.01)
    every = slow.advice().every
    assert every > 20
    for epoch in (every + 5, 2 * every - 1, 7 * every + 3, 2, 1):
        advice = dataclasses.replace(slow, epoch=epoch).advice()
        assert advice.every <= max(2, epoch) and advice.delay <= advice.every // 4
        rounds = -(-epoch // advice.every)
        assert (
            epoch > rounds * advice.every - rounds
        )  # none is shorter than the others by more than a minibatch each


def test_among_many_workers_not_all_parts_go_to_all() -> None:
    slow = dataclasses.replace(MB, beta_s_byte=8e-7)
    assert slow.advice().codec == "chunk-top-k"
    assert dataclasses.replace(slow, workers=32).advice().codec == "one-bit"


def test_no_codec_is_advised_where_messages_take_long_and_bytes_do_not() -> None:
    """Of 1,100 elements even the whole vector is little beside two messages of 25 ms."""
    small = dataclasses.replace(
        MB, workers=3, elems=1100, alpha_s=0.025, beta_s_byte=8e-7, compute_s=0.0032, wait_s=0.055
    )
    assert small.exchange_s(ONE_BIT) > small.sum_s / 1.25
    assert small.advice().codec is None


@pytest.mark.parametrize(("spread", "says"), [(1.4, False), (10.0, True)])
def test_it_says_when_a_worker_is_slow(spread: float, says: bool) -> None:
    measured = dataclasses.replace(MB, spread=spread).measured
    assert ('on the slowest worker (10 times the fastest\'s: see shares="measured")' in measured) is says


def test_an_epochs_minibatches_are_read_from_the_run() -> None:
    links = links_of(run_of(1, "allreduce").events)
    assert links is not None and links.epoch == 1280 // 4 // 16
    slower = dataclasses.replace(links, compute_s=1e-5)
    assert slower.advice().every <= 20 < dataclasses.replace(slower, epoch=None).advice().every


def test_no_codec_is_advised_where_all_would_be_refused() -> None:
    double = dataclasses.replace(MB, itemsize=8)
    assert {double.exchange_s(way) for way in COMPRESSIONS[1:]} == {float("inf")}
    assert double.advice().codec is None


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def run_of(bandwidth_mbit_s: float, strategy: Any, codec: str | None = None) -> gs.Run:
    config = gs.sim.SimulationConfig(
        costs={"gradient": gs.sim.Cost(per_sample_s=1e-3)},
        network=gs.sim.Network(bandwidth_bytes_s=bandwidth_mbit_s / 8e-6, link=gs.sim.Link(latency_s=1e-3)),
    )
    images = torch.rand(1280, 1, 28, 28).numpy()
    data = gs.from_arrays(images, (images.sum((1, 2, 3)) % 10).astype("int64"))
    return gs.simulate(
        gs.from_torch(mlp, F.cross_entropy),
        data,
        strategy=strategy,
        codec=codec,
        optimizer=gs.optim.SGD(lr=0.01),
        workers=4,
        batch_size=16,
        epochs=2,
        config=config,
    )


def seconds_a_minibatch(run: gs.Run) -> float:
    """Between the first and the last step: what happens once is not in it."""
    times = [event["time_s"] for event in run.events if event["event"] == "step" and event["rank"] == 0]
    minibatches = int(run.summary["samples"]) / 4 / 16
    return float(times[-1] - times[0]) / minibatches * len(times) / (len(times) - 1)


def test_a_simulated_run_that_follows_the_advice_is_as_quick_as_it_says() -> None:
    slow = run_of(100, "allreduce")
    links = links_of(slow.events)
    assert links is not None
    assert links.wait_s == pytest.approx(links.sum_s, rel=0.25)
    assert seconds_a_minibatch(slow) == pytest.approx(links.compute_s + links.wait_s, rel=0.1)
    advice = links.advice()
    assert advice.delay
    followed = run_of(100, gs.strategies.LocalSGD(every=advice.every, delay=advice.delay), advice.codec)
    expected_s = links.compute_s + advice.wait_s
    assert seconds_a_minibatch(followed) == pytest.approx(expected_s, rel=0.1)
    at_once = run_of(100, gs.strategies.LocalSGD(every=advice.every), advice.codec)
    waits_s = links.compute_s + advice.exchange_s / advice.every
    assert seconds_a_minibatch(at_once) == pytest.approx(waits_s, rel=0.1)
    assert seconds_a_minibatch(slow) > 2 * expected_s
    rows = dict(figures(slow.summary))
    assert (
        f"{advice.options} would wait" in rows["links"] and f"strategy.delay={advice.delay}" in advice.options
    )
    rows = dict(figures(followed.summary))
    assert not rows.get("links")
    assert rows["samples"].endswith("rounds, all workers together")


def test_on_quick_links_nothing_is_to_be_changed() -> None:
    assert run_of(10_000, "allreduce").summary["links"].endswith("of waiting for each minibatch")


def test_other_runs_have_no_advice() -> None:
    assert run_of(100, "synchronous").summary["links"] is None
    events = [dict(event) for event in run_of(100, "allreduce").events]
    assert links_of(events) is not None

    def changed(name: str, **fields: Any) -> list[dict[str, Any]]:
        return [{**event, **fields} if event["event"] == name else event for event in events]

    assert links_of(changed("started", num_samples=0)) is None  # a user's own loop
    assert links_of([*events, {"event": "part"}]) is None
    float64 = next(event for event in events if event["event"] == "exchange")["whole_pushed_bytes"] * 2
    assert links_of(changed("exchange", whole_pushed_bytes=float64)) is None
