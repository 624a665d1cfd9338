"""Executes the schedules of all parts without tensors: each is whole, never blocks, and keeps its bound.

A pass takes no time here, and a part takes its passes in order as soon as those that they need are done. So a schedule
that blocks here would block with any times, and one that ends depends on nothing but the order of each part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from gradstream.errors import InternalError
from gradstream.pipeline.schedule import KINDS, Schedule, StagePass
from gradstream.split.plan import DATA, SplitPlan


def check_pipeline(
    plan: SplitPlan, schedules: Sequence[Schedule], micro_batches: int, bounds: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Executes the schedules of one pipeline, and counts the micro-batches in flight.

    Args:
        plan: plan of the split model.
        schedules: schedule of each part.
        micro_batches: their number.
        bounds: for each stage, the most micro-batches in flight: `pipeline.schedule.in_flight`.

    Returns:
        For each stage, the most micro-batches whose forward was done, and whose backward was not.

    Raises:
        InternalError: a pass is missing, comes twice or is on a wrong part; parts wait for each other for ever; or
            more micro-batches are in flight than `bounds` allows.
    """
    _check_whole(plan, schedules, micro_batches)
    reads = set(schedules[0]) - {step for step in schedules[0] if step.stage != DATA}
    done: set[StagePass] = set()
    at, flying, most = [0] * len(schedules), Counter[int](), Counter[int]()
    while True:
        before = len(done)
        for part, schedule in enumerate(schedules):
            while at[part] < len(schedule) and done.issuperset(_needs(plan, schedule[at[part]], bool(reads))):
                step = schedule[at[part]]
                done.add(step)
                at[part] += 1
                if step.stage != DATA and step.kind != "weights":
                    flying[step.stage] += 1 if step.kind == "forward" else -1
                    most[step.stage] = max(most[step.stage], flying[step.stage])
        if len(done) == before:
            break
    waiting = [
        f"part {part} at pass {at[part]}, {schedule[at[part]]}, for {need}"
        for part, schedule in enumerate(schedules)
        if at[part] < len(schedule)
        for need in _needs(plan, schedule[at[part]], bool(reads))
        if need not in done
    ]
    if waiting:
        raise InternalError(f"parts wait for each other for ever: {'; '.join(waiting)}")
    for number, bound in enumerate(bounds or ()):
        if most[number] > bound:
            raise InternalError(
                f"stage {number} has {most[number]} micro-batches in flight: at most {bound} expected"
            )
    return tuple(most[stage.number] for stage in plan.stages)


def _check_whole(plan: SplitPlan, schedules: Sequence[Schedule], micro_batches: int) -> None:
    """Each part has each pass of its stages once. Either every backward has its weights' pass or none has."""
    late = any(step.kind == "weights" for schedule in schedules for step in schedule)
    kinds = KINDS if late else KINDS[:2]
    travels = any(value.source == DATA and plan.parts_using(value) for value in plan.values)
    for part, schedule in enumerate(schedules):
        expected = {
            StagePass(kind, stage.number, number)
            for stage in plan.stages_of(part)
            for kind in kinds
            for number in range(micro_batches)
        }
        if travels and part == 0:
            expected |= {StagePass("forward", DATA, number) for number in range(micro_batches)}
        if absent := expected - set(schedule):
            raise InternalError(f"part {part} lacks {len(absent)} passes: {min(absent, key=repr)} is one")
        if strange := set(schedule) - expected:
            raise InternalError(f"part {part} has {min(strange, key=repr)}, which is not its pass")
        if len(schedule) > len(expected):
            twice = Counter(schedule).most_common(1)[0][0]
            raise InternalError(f"part {part} has {twice} twice")


def _needs(plan: SplitPlan, step: StagePass, reads: bool) -> Iterator[StagePass]:
    """The passes that must be done before this one."""
    if step.stage == DATA:
        return
    stage, number = plan.stages[step.stage], step.micro_batch
    if step.kind == "weights":
        yield StagePass("backward", step.stage, number)
    elif step.kind == "forward":
        for source in {plan.value(name).source for name in stage.inputs}:
            if source != DATA or (reads and stage.part != 0):
                yield StagePass("forward", source, number)
    else:
        yield StagePass("forward", step.stage, number)
        for user in plan.stages:
            if any(name in user.inputs and plan.value(name).has_gradient for name in stage.outputs):
                yield StagePass("backward", user.number, number)
