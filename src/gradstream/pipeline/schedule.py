"""Schedules of pipelines: the passes of each part, in order, as data.

A minibatch, or a stream of them, comes as micro-batches. A *pass* computes one stage for one micro-batch. A
schedule is one part's list of passes, which it computes one after the other. A pass depends on passes of other
stages: a forward on those that make its inputs, a backward on those that use its outputs.

All schedules but "interleaved", which is a formula, come from one list scheduling. Time goes in ticks, in which
each part computes the best pass that may begin: every pass takes one tick, and transfers take none. What
distinguishes the methods is the order in which passes are preferred, and how many forwards may be ahead of their
backwards (`in_flight`). On a chain of stages the results are the orders of the papers. On any other plan no
schedule can block: a stage takes micro-batches in order, so that nothing limits the oldest unfinished one.

==============  ========================================  =====================================================
name            forwards ahead of backwards, at stage s   source
==============  ========================================  =====================================================
gpipe           M: all, then backwards, the last first    GPipe, Huang et al., 2019
1f1b            d                                         PipeDream-Flush, Narayanan et al., 2021
interleaved     a part: 2 (K - p) - 1 + (v - 1) K         Megatron-LM, Narayanan et al., 2021
zero-bubble     d; ahead of the weights' gradients, K     ZB-H1, Qi et al., 2023
pipedream       d                                         PipeDream, Narayanan et al., 2019
2bw             d                                         PipeDream-2BW, Narayanan et al., 2021
delayed         2 d - 1                                   Chen, Eversole, Li, Yu and Seide, 2012
==============  ========================================  =====================================================

M is the number of micro-batches, K of parts, v of stages of each part, p the part, from 0. d, the depth, is the
number of parts from stage s to the loss: K - s on a chain of one stage a part. The last three do not flush: they
are for micro-batches of successive minibatches, and read weights of several versions (see "versions" below). There
a part finishes one micro-batch in all of its stages before it goes back through the next, so that it can make one
update for all of them. "pipedream-vertical" has the order of "pipedream".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeAlias

from gradstream.errors import ConfigError, InternalError, UnknownNameError
from gradstream.split.plan import DATA, SplitPlan, Stage

# ---- schedule ----------------------------------------------------------------------------

Kind: TypeAlias = Literal["forward", "backward", "weights"]

KINDS: tuple[Kind, ...] = ("forward", "backward", "weights")
"""All kinds of passes."""

FLUSHING = ("gpipe", "1f1b", "interleaved", "zero-bubble")
"""Schedules of one minibatch: their gradient is that of the whole model at one version of the weights."""

STREAMING = ("pipedream", "pipedream-vertical", "2bw", "delayed")
"""Schedules of successive minibatches, which are in the pipeline at once: see "versions" below."""

SCHEDULES = (*FLUSHING, *STREAMING)
"""All names."""


@dataclass(frozen=True, slots=True)
class StagePass:
    """What a part computes at once.

    Args:
        kind: "backward" includes the gradient of the weights, unless the schedule has "weights" for it: then
            the one gives the gradients of the inputs, and the other, later, those of the weights.
        stage: number of the stage. The forward of DATA reads a micro-batch and sends it to the parts that use it.
        micro_batch: number of the micro-batch, from 0.
    """

    kind: Kind
    stage: int
    micro_batch: int


Schedule: TypeAlias = Sequence[StagePass]
"""The passes of one part, in order."""


def make_schedule(name: str, plan: SplitPlan, micro_batches: int) -> tuple[Schedule, ...]:
    """The schedule of each part.

    Args:
        name: one of SCHEDULES.
        plan: plan of the split model.
        micro_batches: their number, M: of one minibatch, or of a whole stream where the schedule does not flush.

    Raises:
        UnknownNameError: there is no such schedule.
        ConfigError: M is below 1, or "interleaved" does not fit the plan or M.
    """
    if name not in SCHEDULES:
        raise UnknownNameError("schedule", name, SCHEDULES)
    if micro_batches < 1:
        raise ConfigError(f"micro_batches is {micro_batches}: a schedule needs at least 1")
    if name == "interleaved":
        return _interleaved(plan, micro_batches)
    schedules: tuple[list[StagePass], ...] = tuple([] for _ in range(plan.parts))
    for part, step in _ListScheduling(name, plan, micro_batches).passes():
        schedules[part].append(step)
    return schedules


def endless_schedule(name: str, plan: SplitPlan, part: int) -> Iterator[StagePass]:
    """The passes of one part for a stream without end.

    A stream of M micro-batches may take from it the passes of these: a pass needs none of later ones.

    Args:
        name: one of STREAMING.
        plan: plan of the split model.
        part: number of the part.
    """
    return (step for its, step in _ListScheduling(name, plan, sys.maxsize).passes() if its == part)


def depths(plan: SplitPlan) -> tuple[int, ...]:
    """For each stage, the number of parts on the longest way to the loss, each as often as it is entered."""
    result = [1] * len(plan.stages)
    for stage in reversed(plan.stages):
        for user in _users(plan, stage):
            result[stage.number] = max(result[stage.number], result[user.number] + (user.part != stage.part))
    return tuple(result)


def in_flight(name: str, plan: SplitPlan, micro_batches: int) -> tuple[int, ...]:
    """For each stage, the most micro-batches whose forward is done and whose backward is not.

    Each takes the memory of a stage's activations. The arguments are those of `make_schedule`.
    """
    if name == "interleaved":
        flying, most = [0] * len(plan.stages), [0] * len(plan.stages)
        for step in (step for schedule in _interleaved(plan, micro_batches) for step in schedule):
            if step.stage != DATA:
                flying[step.stage] += 1 if step.kind == "forward" else -1
                most[step.stage] = max(most[step.stage], flying[step.stage])
        return tuple(most)
    if name == "gpipe":
        return (micro_batches,) * len(plan.stages)
    limits = [2 * depth - 1 if name == "delayed" else depth for depth in depths(plan)]
    return tuple(min(limit, micro_batches) for limit in limits)


def _users(plan: SplitPlan, stage: Stage) -> tuple[Stage, ...]:
    return tuple(other for other in plan.stages if not set(stage.outputs).isdisjoint(other.inputs))


def _interleaved(plan: SplitPlan, micro_batches: int) -> tuple[Schedule, ...]:
    """Megatron's order: micro-batches go through the stages of a part in groups of K.

    Raises:
        ConfigError: the stages do not go round the parts, or M is no multiple of K.
    """
    parts, stages = plan.parts, len(plan.stages)
    if (where := [stage.part for stage in plan.stages]) != [number % parts for number in range(stages)]:
        raise ConfigError(
            f'"interleaved" needs stages that go round the parts, as 0, 1, …, {parts - 1}, 0, …: the parts of '
            f'these stages are {where}. Divide the model so, or take "1f1b", which takes every plan'
        )
    if micro_batches % parts or stages % parts:
        raise ConfigError(
            f'"interleaved" needs multiples of the number of parts, {parts}: got {micro_batches} micro-batches '
            f"and {stages} stages"
        )
    schedules: list[list[StagePass]] = []
    for part in range(parts):
        pairs = [(number, batch) for number in range(part, stages, parts) for batch in range(micro_batches)]
        pairs.sort(key=lambda pair: (pair[1] // parts, pair[0]))
        forwards = [StagePass("forward", *pair) for pair in pairs]
        pairs.sort(key=lambda pair: (pair[1] // parts, -pair[0]))
        ahead = min(2 * (parts - part - 1) + stages - parts, len(pairs))
        schedule = forwards[:ahead]
        for forward, pair in zip_longest(forwards[ahead:], pairs):
            schedule += [forward] if forward else []
            schedule.append(StagePass("backward", *pair))
        schedules.append(schedule)
    reads = _Reads(plan, micro_batches)
    schedules[0] = [step for after in schedules[0] for step in (*reads.before([after]), after)]
    return tuple(schedules)


class _Reads:
    """Has part 0 read one micro-batch ahead of all passes, so that no part waits while data travel."""

    def __init__(self, plan: SplitPlan, micro_batches: int) -> None:
        travels = any(value.source == DATA and plan.parts_using(value) for value in plan.values)
        self._next, self._count = 0, micro_batches if travels else 0

    def before(self, steps: Iterable[StagePass]) -> Iterator[StagePass]:
        """The reads of part 0 before these passes of any parts."""
        last = max(step.micro_batch for step in steps) + 1
        while self._next <= min(last, self._count - 1):
            yield StagePass("forward", DATA, self._next)
            self._next += 1


class _ListScheduling:
    """The passes done so far, as counts: per stage, those of one kind go in a fixed order of micro-batches."""

    def __init__(self, name: str, plan: SplitPlan, micro_batches: int) -> None:
        self._plan, self._count, self._flushes = plan, micro_batches, name == "gpipe"
        self._streams = name in STREAMING
        self._limits, self._depths = in_flight(name, plan, micro_batches), depths(plan)
        self._users = [_users(plan, stage) for stage in plan.stages]
        self._sources = [
            tuple({plan.value(name).source for name in stage.inputs} - {DATA}) for stage in plan.stages
        ]
        self._done = {kind: [0] * len(plan.stages) for kind in KINDS[: 3 if name == "zero-bubble" else 2]}
        self._reads = _Reads(plan, micro_batches)

    def passes(self) -> Iterator[tuple[int, StagePass]]:
        """The passes of all parts, tick by tick, each after the number of its part."""
        left = self._count * len(self._plan.stages) * len(self._done)
        while left:
            ready = [self._best(part) for part in range(self._plan.parts)]
            chosen = [(part, step) for part, step in enumerate(ready) if step]
            if not chosen:
                raise InternalError(f"no pass may begin, and {left} are left, after {self._done}")
            yield from ((0, step) for step in self._reads.before(step for _, step in chosen))
            for part, step in chosen:
                yield part, step
                self._done[step.kind][step.stage] += 1
            left -= len(chosen)

    def _best(self, part: int) -> StagePass | None:
        """The pass that a part computes in this tick."""
        steps = [step for stage in self._plan.stages_of(part) for step in self._ready(stage)]
        return min(steps, key=self._rank, default=None)

    def _rank(self, step: StagePass) -> tuple[int, ...]:
        """Forwards first, as far as they are admitted, since other parts wait for them."""
        if step.kind == "forward":
            return 1, step.micro_batch, step.stage
        if step.kind == "backward":
            return 2, self._order(step.micro_batch), -step.stage
        return 0 if self._due(step.stage) else 3, step.micro_batch, -step.stage

    def _order(self, number: int) -> int:
        """The micro-batch whose backward is this one in order, and the other way round."""
        return self._count - 1 - number if self._flushes else number

    def _ready(self, stage: Stage) -> Iterator[StagePass]:
        """The passes of a stage that may begin."""
        number, done = stage.number, self._done
        forward, backward = done["forward"][number], done["backward"][number]
        admitted = forward < self._count and forward - backward < self._limits[number]
        if admitted and all(done["forward"][source] > forward for source in self._sources[number]):
            yield StagePass("forward", number, forward)
        if backward < self._count and self._may_turn(stage):
            after = all(done["backward"][user.number] > backward for user in self._users[number])
            if after and forward > self._order(backward):
                yield StagePass("backward", number, self._order(backward))
        if "weights" in done and done["weights"][number] < backward:
            yield StagePass("weights", number, done["weights"][number])

    def _may_turn(self, stage: Stage) -> bool:
        """Whether the next backward may begin.

        With GPipe, a part computes all forwards first; in a stream, all backwards of the micro-batch before.
        """
        own, done = self._plan.stages_of(stage.part), self._done
        if self._flushes:
            return all(done["forward"][other.number] == self._count for other in own)
        before = done["backward"][stage.number]
        return not self._streams or all(done["backward"][other.number] >= before for other in own)

    def _due(self, number: int) -> bool:
        """Whether weights' gradients cannot wait: no stage holds more micro-batches than the first does."""
        late = self._done["backward"][number] - self._done["weights"][number]
        return late > max(self._depths) - self._depths[number]


# ---- versions ----------------------------------------------------------------------------
# The version of the weights that each pass reads, where successive minibatches are in the pipeline at once: as data.
#
# A part's weights have version v after v updates. It makes update t after its last backward of minibatch t, from
# gradients that may belong to older versions. w_s are stage s's weights, η is the learning rate:
#
# * pipedream (Narayanan et al., 2019). A forward reads the newest version, and its backward the same, which the part
#   keeps (weight stashing): on a chain of K stages w^{t+1} = w^t - η ∇f(w_1^{t-K+1}, …, w_K^t), and stage s keeps
#   K - s + 1 versions. With vertical synchronization ("pipedream-vertical") all stages read w^{t-K+1}.
# * 2bw (Narayanan et al., 2021). All M micro-batches of minibatch t read version t - 1, for which none of them waits if
#   M >= K - 1: w^{t+1} = w^t - η ∇f(w^{t-1}). Each stage keeps two versions.
# * delayed (Chen, Eversole, Li, Yu and Seide, 2012). Each pass reads the newest version; so a backward combines
#   activations of version t - 2 (K - s) with weights of version t. Nothing is kept.
#
# The first minibatches of a stream read version 0. At the end of a stream all updates are made, and the next stream
# begins with the newest weights: a clean state for a snapshot.


def version_read(name: str, plan: SplitPlan, minibatch: int, newest: int) -> int:
    """The version that the forward of a minibatch reads in a part with this many updates.

    Its backward reads the same, except for "delayed", where it reads the newest of its own time.
    """
    if name == "2bw":
        return max(0, minibatch - 1)
    if name == "pipedream-vertical":
        return max(0, minibatch - max(depths(plan)) + 1)
    return newest


def versions_held(name: str, plan: SplitPlan, part: int) -> int:
    """How many versions a part holds at most: v, v + 1, …, where passes still read v."""
    if name == "pipedream":
        return max(
            depth for depth, stage in zip(depths(plan), plan.stages, strict=True) if stage.part == part
        )
    return {"pipedream-vertical": max(depths(plan)), "2bw": 2, "delayed": 1}[name]


def check_streaming(name: str, plan: SplitPlan, micro_batches: int) -> None:
    """Raises UnknownNameError or ConfigError if a stream cannot be trained so."""
    if name not in STREAMING:
        raise UnknownNameError("schedule of a stream", name, STREAMING)
    if name != "2bw" and micro_batches != 1:
        raise ConfigError(
            f"micro_batches={micro_batches} with pipeline={name!r}: expected 1, since it makes an update after every "
            "micro-batch. Take pipeline='2bw' to make one update from several"
        )
    if name == "2bw" and micro_batches < (least := max(depths(plan)) - 1):
        raise ConfigError(
            f"micro_batches={micro_batches} with pipeline='2bw': expected at least {least}, one fewer than the parts "
            "that a sample passes through; with fewer, a minibatch would wait for the update of the last but one"
        )
