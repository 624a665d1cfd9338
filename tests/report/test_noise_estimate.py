"""The estimator of the gradient noise scale, on draws of a known normal distribution, and on events of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gradstream.report.summary import NoiseScale, noise_scale_of, rounds_of, surviving
from gradstream.telemetry import meters
from gradstream.telemetry.meters import Contribution, NoiseMeter

ELEMS, DRAWS = 20, 10_000


def squares(sizes: Sequence[int], fault: str = "") -> tuple[list[Any], float]:
    """(b, m, s, J) of each draw of minibatches with gradients of N(G, Σ), Σ diagonal; and tr Σ/|G|²."""
    rng = np.random.default_rng(3)
    mean, deviation = rng.standard_normal(ELEMS), rng.uniform(0.5, 3.0, ELEMS)
    found, total = [], sum(sizes)
    own = [mean + deviation / size**0.5 * rng.standard_normal((DRAWS, ELEMS)) for size in sizes]
    joined = sum(size * one for size, one in zip(sizes, own, strict=True)) / (1 if fault == "sum" else total)
    counted = own[:1] if fault == "one worker" else own
    small = sum((one**2).sum(1) for one in counted) / len(counted)
    inverse = (1 / np.mean(sizes)) if fault == "mean of sizes" else np.mean([1 / size for size in sizes])
    for one, big in zip(small, (joined**2).sum(1), strict=True):
        found.append((total, float(inverse), float(one), float(big)))
    return found, float((deviation**2).sum() / (mean**2).sum())


def estimated(sizes: Sequence[int], fault: str = "") -> tuple[float, float]:
    estimate = NoiseScale(decay=1.0)
    draws, truth = squares(sizes, fault)
    for draw in draws:
        estimate.add(*draw)
    return estimate.value or 0.0, truth


EQUAL, UNEVEN = (4, 4, 4), (1, 2, 30)


@pytest.mark.parametrize("sizes", [EQUAL, UNEVEN, (16, 16)], ids=str)
def test_it_is_within_5_percent_after_ten_thousand_draws(sizes: Sequence[int]) -> None:
    value, truth = estimated(sizes)
    assert value == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("each", [20, 49, 85])
def test_minibatches_of_an_epoch_have_no_sample_twice(each: int) -> None:
    """Three workers of 256 samples, whose means vary less than of samples drawn anew."""
    rng = np.random.default_rng(4)
    samples = rng.standard_normal((256, 5)) * 3.0
    samples += 0.247 - samples.mean(0)  # B = 147
    truth = samples.var(0, ddof=1).sum() / (samples.mean(0) ** 2).sum()
    corrected, anew = NoiseScale(decay=1.0, population=256), NoiseScale(decay=1.0)
    for _ in range(4000):
        drawn = rng.permutation(256)[: 3 * each].reshape(3, each)
        means = samples[drawn].mean(1)
        draw = 3 * each, 1 / each, float((means**2).sum(1).mean()), float((means.mean(0) ** 2).sum())
        corrected.add(*draw)
        anew.add(*draw)
    assert corrected.value == pytest.approx(truth, rel=0.15)
    assert anew.value is None or anew.value > 2 * truth


def test_the_number_of_samples_is_that_of_the_run() -> None:
    started = {"event": "started", "num_samples": 4}
    value, _, _ = noise_scale_of([started, *WHOLE])
    assert value == 4.0 / (3.0 - 4.0 * (1 / 2 - 1 / 4))


@pytest.mark.parametrize(
    ("sizes", "fault"), [(EQUAL, "sum"), (UNEVEN, "one worker"), (UNEVEN, "mean of sizes")]
)
def test_a_wrong_square_or_size_would_be_noticed(sizes: Sequence[int], fault: str) -> None:
    value, truth = estimated(sizes, fault)
    assert value != pytest.approx(truth, rel=0.05)


def test_the_means_forget_old_rounds_and_count_the_first_ones_equally() -> None:
    estimate = NoiseScale(decay=0.75)
    for trace in (2.0, 6.0, 1.0, 3.0, 8.0, 0.0):  # |G|² = 1, b = 2, bᵢ = 1
        estimate.add(2, 1.0, 1 + trace, 1 + trace / 2)
    assert estimate.square == pytest.approx(1.0)
    assert estimate.value == pytest.approx(0.75 * (0.75 * 3.0 + 0.25 * 8.0))


def event(node: str, number: int, small: float, big: float, **fields: Any) -> dict[str, Any]:
    sizes = {"nodes": 2, "contributions": 2, "samples": 2, "inverse_samples": 1.0}
    own = {"contribution_square": small, "joined_square": big, "time_s": float(number)}
    return {"event": "noise", "node": node, "round": number, **sizes, **own, **fields}


WHOLE = [event("shard-0", 1, 3.0, 2.0), event("shard-1", 1, 2.0, 1.0)]


def test_the_nodes_of_a_round_add_up() -> None:
    value, why, points = noise_scale_of([*WHOLE, event("shard-0", 9, 3.0, 2.0)])
    assert (value, why, points) == (4.0, "", [(1, 1.0, 4.0)])
    assert [one["contribution_square"] for one in rounds_of(WHOLE)] == [5.0]


@pytest.mark.parametrize(
    "events",
    [WHOLE[:1], [WHOLE[0], {**WHOLE[1], "nodes": 3}], [WHOLE[0], {**WHOLE[1], "samples": 3}]],
    ids=["a shard is missing", "another number of shards", "other contributions"],
)
def test_a_round_that_is_not_whole_gives_no_value(events: list[dict[str, Any]]) -> None:
    assert noise_scale_of(events) == (None, "", [])


def test_where_there_is_no_value_the_reason_is_named() -> None:
    alone = [{**one, "contributions": 1, "inverse_samples": 0.5} for one in WHOLE]
    assert "take workers=2" in noise_scale_of(alone)[1]
    noisy = [{**one, "joined_square": 0.5} for one in WHOLE]
    value, why, points = noise_scale_of(noisy)
    assert value is None and "after 1 measured rounds |G|² is not above its noise" in why and not points


def test_rounds_that_a_resumed_run_computes_again_count_once() -> None:
    started = {"event": "started", "time_s": 0.0}
    resumed = {"event": "resumed", "steps": {"worker-0": 8}, "time_s": 9.5}
    again = [{**one, "round": 9, "contribution_square": 4.0} for one in WHOLE]
    events = [started, *WHOLE, *(event(f"shard-{rank}", 9, 9.0, 9.0) for rank in range(3)), started, resumed]
    assert [one["round"] for one in rounds_of(surviving([*events, *again]))] == [1, 9]
    assert [one["contribution_square"] for one in rounds_of(surviving([*events, *again]))] == [5.0, 8.0]


def test_a_round_without_a_piece_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(meters, "EVERY", 8)
    meter = NoiseMeter(0, 1, 2, seen.append)
    here = [Contribution(1, 0.25, 16.0), Contribution(3, 0.75, 16.0)]
    meter.add(1, [1, 3], here, 1.0)
    meter.add(9, [1, 3], here, 1.0)
    meter.add(9, [1, 2], here, 1.0)  # a worker's last chunk is missing
    meter.add(9, [1, 3], here, 1.0)
    assert not seen
    meter.add(17, [1, 3], here, 1.0)
    meter.add(17, [1, 3], here, 2.0)
    assert [(one.round, one.contribution_square, one.joined_square) for one in seen] == [(17, 32.0, 3.0)]
    meter.add(25, [1, 3], here, float("nan"))
    meter.add(25, [1, 3], here, 1.0)
    assert len(seen) == 1
    assert [step for step in range(1, 30) if meter.due(step)] == [1, 9, 17, 25]
