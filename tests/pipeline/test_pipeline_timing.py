"""Times of pipelines on virtual time, against the formulas and figures of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from gradstream.pipeline.executor import TensorTransfer
from gradstream.pipeline.schedule import Schedule, StagePass, make_schedule
from gradstream.split.plan import DATA, SplitPlan, Stage, Value
from kit.pipeline_timing import PipelineTimes, pipeline_times
from pipeline_plans import chain


def unit_s(step: StagePass) -> float:
    """A forward takes 1 s, a backward twice as long, each half of a backward as long as a forward."""
    return 2.0 if step.kind == "backward" else 1.0


def half_s(step: StagePass) -> float:
    """As `unit_s` where the gradients of the weights have their own passes."""
    return 1.0


def idle(name: str, parts: int, count: int, rounds: int = 1) -> tuple[float, ...]:
    plan = chain(parts, rounds)
    return pipeline_times(
        plan, make_schedule(name, plan, count), half_s if name == "zero-bubble" else unit_s
    ).idle


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("parts", "count"), [(1, 4), (2, 2), (2, 8), (4, 4), (4, 8), (4, 32), (8, 16)])
def test_the_idle_fraction_is_that_of_the_formula(name: str, parts: int, count: int) -> None:
    formula = (parts - 1) / (count + parts - 1)
    assert idle(name, parts, count) == pytest.approx((formula,) * parts, rel=0.05)


def test_a_schedule_that_is_not_a_pipeline_has_another_idle_fraction() -> None:
    """One micro-batch after the other: what the check above would find."""
    plan = chain(4)
    one_by_one = [
        [step for n in range(8) for step in (StagePass("forward", p, n), StagePass("backward", p, n))]
        for p in range(4)
    ]
    one_by_one[0] = [
        step for n in range(8) for step in (StagePass("forward", DATA, n), *one_by_one[0][2 * n :][:2])
    ]
    assert min(pipeline_times(plan, one_by_one, unit_s).idle) == pytest.approx(0.75)


def test_interleaving_divides_the_bubble_by_the_rounds() -> None:
    """Megatron-LM, 2021: the bubble is (K - 1) / (v M) of the ideal time."""
    for rounds in (1, 2, 4):
        bubble = [idle("interleaved", 4, 8, rounds)[part] for part in range(4)]
        ideal = 3 / (rounds * 8)
        assert bubble == pytest.approx([ideal / (1 + ideal)] * 4)


def test_zero_bubble_idles_a_third_of_1f1b() -> None:
    """Qi et al., 2023, table 1: (K - 1)(T_F + T_B - T_W) in place of (K - 1)(T_F + T_B + T_W)."""
    plan, count = chain(4), 12
    total_s = {
        name: pipeline_times(plan, make_schedule(name, plan, count), seconds).total_s
        for name, seconds in (("1f1b", unit_s), ("zero-bubble", half_s))
    }
    assert total_s == {"1f1b": 3 * count + 9, "zero-bubble": 3 * count + 3}


def test_transfers_overlap_with_computation_and_one_another() -> None:
    """A transfer that is quicker than a pass costs its time once for each cut and direction."""
    plan, count = chain(3), 64
    schedules = make_schedule("gpipe", plan, count)
    without_s = pipeline_times(plan, schedules, unit_s).total_s
    with_s = pipeline_times(plan, schedules, unit_s, lambda transfer: 0.0 if data(transfer) else 0.5).total_s
    assert with_s - without_s == pytest.approx(4 * 0.5)


def data(transfer: TensorTransfer) -> bool:
    return transfer.value in ("inputs", "targets")


# ---- CD-DNN-HMM, Chen et al., 2012 -------------------------------------------------------

SIZES = [429, *[2048] * 7, 9304]  # 11 frames of 39 features, 7 hidden layers, senones
ELEMS = [a * b for a, b in pairwise(SIZES)]
FRAMES = 512
FLOP_S = 1e12
BYTES_S = 3e9  # of a link between two cards of that time


def speech(hidden: Sequence[int], top: Sequence[int]) -> tuple[SplitPlan, list[int]]:
    """The plan and each stage's weights, from the parts of the hidden layers, and of equal columns of the top layer."""
    runs = sorted(set(hidden))
    weights = [sum(e for e, p in zip(ELEMS[:-1], hidden, strict=True) if p == part) for part in runs]
    stages = [
        Stage(number, part, (f"h{number - 1}" if number else "inputs",), (f"h{number}",))
        for number, part in enumerate(runs)
    ]
    pieces = tuple(f"z{number}" for number in range(len(top)))
    for name, part in zip(pieces, top, strict=True):
        stages.append(Stage(len(stages), part, stages[len(runs) - 1].outputs, (name,)))
        weights.append(ELEMS[-1] // len(top))
    stages.append(Stage(len(stages), top[-1], (*pieces, "targets"), ()))
    made = [(name, stage.number) for stage in stages for name in stage.outputs]
    values = [
        Value(name, number, (SIZES[-1] // len(top) if name in pieces else 2048,), torch.float32)
        for name, number in made
    ]
    values += [Value("inputs", DATA, (429,), torch.float32), Value("targets", DATA, (), torch.int64)]
    return SplitPlan(top[-1] + 1, tuple(stages), tuple(values), 0), [*weights, 0]


def trained(plan: SplitPlan, weights: Sequence[int], count: int = 150) -> tuple[float, PipelineTimes]:
    """How many times as fast as on one card, of a long stream with delayed gradients; and the times."""

    def pass_s(step: StagePass) -> float:
        return weights[step.stage] * FRAMES * (4 if step.kind == "backward" else 2) / FLOP_S

    def transfer_s(transfer: TensorTransfer) -> float:
        return plan.value(transfer.value).bytes_of(FRAMES) / BYTES_S

    schedules: tuple[Schedule, ...] = make_schedule("delayed", plan, count)
    times = pipeline_times(plan, schedules, pass_s, transfer_s)
    return count * sum(ELEMS) * FRAMES * 6 / FLOP_S / times.total_s, times


def test_two_cards_are_nearly_twice_as_fast() -> None:
    speedup, _ = trained(*speech([0] * 6 + [1], [1]))
    assert speedup == pytest.approx(1.9, rel=0.1)


def test_four_cards_with_the_top_layer_in_columns_are_as_fast_as_the_paper_says() -> None:
    speedup, times = trained(*speech([0] * 4 + [1] * 3, [2, 3]))
    assert speedup == pytest.approx(3.3, rel=0.1)
    assert times.bottleneck == 0


def test_without_columns_the_top_layer_is_the_bottleneck() -> None:
    speedup, times = trained(*speech([0] * 3 + [1] * 2 + [2] * 2, [3]))
    assert speedup < 2.5
    assert times.bottleneck == 3
    assert times.idle[3] < 0.05 < 0.5 < times.idle[1]
