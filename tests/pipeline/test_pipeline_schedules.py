"""Schedules of pipelines: the orders of the papers on chains, and whole, free of deadlocks and bounded on any plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate, islice

import pytest

from gradstream.errors import ConfigError, InternalError
from gradstream.pipeline.schedule import (
    SCHEDULES,
    STREAMING,
    Schedule,
    StagePass,
    endless_schedule,
    in_flight,
    make_schedule,
)
from gradstream.split.plan import DATA, SplitPlan
from kit.pipeline_checks import check_pipeline
from pipeline_plans import chain, drawn_plan

ON_ANY_PLAN = [name for name in SCHEDULES if name != "interleaved"]


def written(schedule: Schedule) -> str:
    """As f0 f1 b0 w0, without reads."""
    return " ".join(f"{step.kind[0]}{step.micro_batch}" for step in schedule if step.stage != DATA)


def gpipe(part: int, parts: int, count: int) -> list[str]:
    return [f"f{n}" for n in range(count)] + [f"b{n}" for n in reversed(range(count))]


def alternately(ahead: int, count: int) -> list[str]:
    """`ahead` forwards, then one forward and one backward, then the other backwards."""
    steps = [f"f{n}" for n in range(min(ahead, count))]
    for number in range(count):
        steps += [f"f{number + ahead}"] * (number + ahead < count) + [f"b{number}"]
    return steps


def zero_bubble(part: int, parts: int, count: int) -> list[str]:
    """As 1F1B; the gradient of the weights comes `part` backwards later."""
    steps, order = list[str](), alternately(parts - part - 1, count)
    for step in order:
        number = int(step[1:]) - part
        steps += [step] + [f"w{number}"] * (step[0] == "b" and number >= 0)
    return steps + [f"w{number}" for number in range(max(0, count - part), count)]


PAPERS: dict[str, Callable[[int, int, int], list[str]]] = {
    "gpipe": gpipe,
    "1f1b": lambda part, parts, count: alternately(parts - part - 1, count),
    "pipedream": lambda part, parts, count: alternately(parts - part - 1, count),
    "2bw": lambda part, parts, count: alternately(parts - part - 1, count),
    "delayed": lambda part, parts, count: alternately(2 * (parts - part - 1), count),
    "zero-bubble": zero_bubble,
}


@pytest.mark.parametrize("name", PAPERS)
def test_on_a_chain_the_order_is_that_of_the_paper(name: str) -> None:
    for parts in range(1, 7):
        # The order of zero-bubble is given for as many micro-batches as parts. With fewer, idle time takes weights.
        for count in (*range(parts if name == "zero-bubble" else 1, 10), 24):
            for part, schedule in enumerate(make_schedule(name, chain(parts), count)):
                assert written(schedule) == " ".join(PAPERS[name](part, parts, count)), (parts, count, part)


def test_the_zero_bubble_order_is_that_of_the_figure() -> None:
    """Qi et al., 2023, figure 2, above."""
    first, *_, last = make_schedule("zero-bubble", chain(4), 8)
    assert written(first) == ("f0 f1 f2 f3 b0 w0 f4 b1 w1 f5 b2 w2 f6 b3 w3 f7 b4 w4 b5 w5 b6 w6 b7 w7")
    assert written(last) == "f0 b0 f1 b1 f2 b2 f3 b3 w0 f4 b4 w1 f5 b5 w2 f6 b6 w3 f7 b7 w4 w5 w6 w7"


def test_the_interleaved_order_is_that_of_the_paper() -> None:
    """Narayanan et al., 2021, figure 4, below: each device has two stages, here of 2 devices and 4 micro-batches."""
    schedules = make_schedule("interleaved", chain(2, 2), 4)
    orders = [
        " ".join(
            f"{'fb'[s.kind == 'backward']}{s.stage // 2}.{s.micro_batch}" for s in each if s.stage != DATA
        )
        for each in schedules
    ]
    assert orders == [
        "f0.0 f0.1 f1.0 f1.1 f0.2 b1.0 f0.3 b1.1 f1.2 b0.0 f1.3 b0.1 b1.2 b1.3 b0.2 b0.3",
        "f0.0 f0.1 f1.0 b1.0 f1.1 b1.1 f0.2 b0.0 f0.3 b0.1 f1.2 b1.2 f1.3 b1.3 b0.2 b0.3",
    ]


@pytest.mark.parametrize("name", ON_ANY_PLAN)
def test_on_any_plan_a_schedule_is_whole_never_blocks_and_keeps_its_bound(name: str) -> None:
    for seed in range(60):
        parts, count = 1 + seed % 4, 1 + seed % 9
        plan = drawn_plan(parts, 1 + seed % 11, seed)
        bounds = in_flight(name, plan, count)
        check_pipeline(plan, make_schedule(name, plan, count), count, bounds)


@pytest.mark.parametrize("name", STREAMING)
def test_a_stream_without_end_has_the_passes_of_one_with_an_end(name: str) -> None:
    for seed in range(20):
        plan = drawn_plan(1 + seed % 3, 6 + seed % 7, seed)
        if not all(plan.stages_of(part) for part in range(plan.parts)):
            continue
        taken = []
        for part in range(plan.parts):
            endless = list(islice(endless_schedule(name, plan, part), 300))
            taken.append([step for step in endless if step.micro_batch < 6])
            backwards = [step.micro_batch for step in endless if step.kind == "backward"]
            assert backwards == sorted(backwards), "a part can make one update for all of its stages"
        check_pipeline(plan, taken, 6, in_flight(name, plan, 6))


def test_interleaved_schedules_are_whole_never_block_and_keep_the_bound_of_a_part() -> None:
    for parts in range(1, 6):
        for rounds in range(1, 4):
            for groups in range(1, 4):
                plan, count = chain(parts, rounds), groups * parts
                schedules = make_schedule("interleaved", plan, count)
                check_pipeline(plan, schedules, count, in_flight("interleaved", plan, count))
                for part, schedule in enumerate(schedules):
                    signs = [2 * (s.kind == "forward") - 1 for s in schedule if s.stage != DATA]
                    bound = min(2 * (parts - part) - 1 + (rounds - 1) * parts, rounds * count)
                    assert max(accumulate(signs)) == bound


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_a_function_of_its_arguments(name: str) -> None:
    plan = chain(4, 2)
    assert make_schedule(name, plan, 8) == make_schedule(name, plan, 8)


def test_as_many_micro_batches_are_in_flight_as_the_formulas_say() -> None:
    for name, expected in (("gpipe", (9,) * 4), ("1f1b", (4, 3, 2, 1)), ("delayed", (7, 5, 3, 1))):
        plan = chain(4)
        assert in_flight(name, plan, 9) == expected
        assert check_pipeline(plan, make_schedule(name, plan, 9), 9) == expected


def test_data_are_read_before_any_part_needs_them() -> None:
    """A checker that finds them late is shown the reads of part 0 at its end."""
    plan = chain(3)
    schedules = [list(schedule) for schedule in make_schedule("1f1b", plan, 4)]
    schedules[0].sort(key=lambda step: step.stage == DATA)
    with pytest.raises(InternalError, match=r"part 0 at pass 3.*part 2 at pass 0.*'forward', stage=-1"):
        check_pipeline(plan, schedules, 4)


def faulty(plan: SplitPlan, fault: str) -> tuple[list[list[StagePass]], str]:
    """The schedules of a plan with a planted fault, and what the checker says."""
    schedules = [list(schedule) for schedule in make_schedule("1f1b", plan, 4)]
    one = schedules[1]
    if fault == "missing":
        one.remove(StagePass("backward", 1, 2))
        return schedules, "part 1 lacks 1 passes: StagePass(kind='backward', stage=1, micro_batch=2)"
    if fault == "twice":
        one.append(StagePass("backward", 1, 2))
        return schedules, "part 1 has StagePass(kind='backward', stage=1, micro_batch=2) twice"
    if fault == "elsewhere":
        one.append(StagePass("forward", 0, 2))
        return (
            schedules,
            "part 1 has StagePass(kind='forward', stage=0, micro_batch=2), which is not its pass",
        )
    if fault == "blocks":
        one.insert(0, one.pop(one.index(StagePass("backward", 1, 0))))
        return schedules, "part 1 at pass 0, StagePass(kind='backward', stage=1, micro_batch=0), for Stage"
    last = schedules[2]
    last[1], last[2] = last[2], last[1]
    return schedules, "stage 2 has 2 micro-batches in flight: at most 1 expected"


@pytest.mark.parametrize("fault", ["missing", "twice", "elsewhere", "blocks", "too many in flight"])
def test_the_checker_finds_a_planted_fault(fault: str) -> None:
    plan = chain(3)
    schedules, message = faulty(plan, fault)
    with pytest.raises(InternalError, match=re.escape(message)):
        check_pipeline(plan, schedules, 4, in_flight("1f1b", plan, 4))


def test_what_has_no_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown schedule '1b1f'"):
        make_schedule("1b1f", chain(2), 4)
    with pytest.raises(ConfigError, match="micro_batches is 0"):
        make_schedule("1f1b", chain(2), 0)
    with pytest.raises(
        ConfigError, match="multiples of the number of parts, 2: got 3 micro-batches and 4 stages"
    ):
        make_schedule("interleaved", chain(2, 2), 3)
    with pytest.raises(ConfigError, match=r"these stages are \[.*take \"1f1b\""):
        make_schedule("interleaved", drawn_plan(2, 4, 1), 4)
