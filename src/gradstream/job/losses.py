"""`losses_of`: what becomes of a run when a worker dies, decided in one place.

the others go on without it        as the strategy says; in rounds only where others stand in for it, or where workers
                                   exchange in pairs: its part is skipped until a new process takes its place.
                                   In a group, the user's own loops redo the round without it, and share out what its
                                   loaders had left
a new process takes its place      unless a rule of `traits.txt` forbids a replacement
until then others stand in for it  in rounds, where a new process may come
its torn pushes are redone         otherwise, where it pushed gradients of a job to servers and a new process may come;
                                   not in passes, where each chunk knows which portions it has

The reasons are clauses that end the sentence of a message. docs/assumptions.md has the same table in words.
"""

from __future__ import annotations

import sys

from gradstream.coordinator.lifecycle import LossTolerance
from gradstream.job.plan import RunPlan
from gradstream.job.registry import name_of
from gradstream.strategies.base import GroupStrategy, PeerStrategy
from gradstream.traits import obstacle


def losses_of(plan: RunPlan, *, spread: bool = False) -> LossTolerance:
    """Which losses of workers the run of a plan survives, and how.

    Args:
        plan: plan of the run.
        spread: whether nodes may be on several machines.
    """
    served, rounds = plan.served, plan.strategy.partitioning == "rounds"
    pairs = isinstance(plan.strategy, PeerStrategy)
    why_not = obstacle("replacement", plan.traits)
    grouped = isinstance(plan.strategy, GroupStrategy)
    theirs = {name: text for name, text in plan.traits.items() if name != "own loop"}
    loops_go_on = grouped and plan.traits != theirs and not obstacle("replacement", theirs)
    redoes = (
        served is not None
        and served.pushes == "gradients"
        and not (rounds or served.in_passes)
        and plan.workers > 1
        and not plan.open_ended  # nobody else can compute what a user's own loop has pushed
    )
    return LossTolerance(
        survives_worker_loss=not why_not or loops_go_on
        if rounds and not pairs
        else plan.strategy.survives_worker_loss,
        quorum=None if served is None else served.quorum(plan.workers),
        allow_lost=plan.job.allow_lost,
        # A trial of a line search may land where the loss has no value, on all portions of a worker.
        quarantine_after=sys.maxsize if plan.strategy.in_passes else plan.job.quarantine_after,
        obstacle=why_not,
        redoes=redoes and not why_not,
        stands_in=rounds and not why_not and not pairs and not loops_go_on,
        skips_lost=pairs or loops_go_on,
        keeps_shards=why_shards_stay(plan, spread=spread),
        acknowledge=plan.acknowledge,
        regroups=grouped,
        stays=why_not or _why_stays(plan, loops_go_on or pairs or not rounds),
    )


def _why_stays(plan: RunPlan, has_work: bool) -> str:
    """Why no more workers may come than the run had at its beginning; "" if they may.

    Args:
        plan: plan of the run.
        has_work: the coordinator, or the loops, can give minibatches to more of them.
    """
    served, workers = plan.served, "workers of its beginning"
    if not plan.open_ended and (served is None or served.in_passes or not plan.has_queue):
        queue = plan.strategy.partitioning == "queue" and plan.job.assignment != "partitions"
        queued = queue and not (served is None or served.in_passes)
        whose = (
            f"{plan.job.data.name!r} is read ahead, or as a stream,"
            if queued
            else "the data of a job is divided"
        )
        return (
            f"under {name_of(plan.strategy)!r} {whose} by the {workers}. gradstream resume takes another number; a "
            "loop of your own takes more while it runs"
        )
    if not plan.open_ended and plan.workers == 1:
        return "one worker goes through the data of a job by itself. Begin with two: --wait 2"
    if not plan.open_ended and not isinstance(plan.job.batch_size, int):
        return f"batch_size={plan.job.batch_size} has the minibatch of each worker. Give one number for all"
    if plan.whole:
        return "its next phase begins with the number of workers that the job names. Leave the phases out"
    return "" if has_work else f"{name_of(plan.strategy)!r} needs the {workers} in each round"


def losses_of_all(plan: RunPlan) -> LossTolerance:
    """The losses that some phase of the run survives: if the present phase does not, the coordinator ends the run."""
    losses = [losses_of(phase_plan) for phase_plan in plan.every or (plan,)]
    return next((loss for loss in losses if loss.replaces), losses[0])


def why_shards_stay(plan: RunPlan, *, spread: bool) -> str:
    """Why a run cannot change its number of shards while it goes on, with the remedy; "" if it can.

    Args:
        plan: plan of the run.
        spread: whether nodes may be on several machines.
    """
    also = {"phases": plan.whole is not None, "several machines": spread}
    return obstacle("resharding", {**plan.traits, **{name: name for name, there in also.items() if there}})
