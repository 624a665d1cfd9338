"""`losses_of`: what becomes of a run when a worker dies, decided in one place.

the others go on without it        as the strategy says; in rounds only where others stand in for it, or where workers
                                   exchange in pairs: its part is left out then, until a new process takes its place
a new process takes its place      unless one of `_obstacles` holds
until then others stand in for it  in rounds, where a new process may come
its torn pushes are redone         elsewhere, where it pushed gradients to servers and a new process may come;
                                   not in passes, where each chunk knows the portions that it has

The reasons are ends of a sentence, for messages. docs/assumptions.md says the same in words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gradstream.coordinator.phases import LossTolerance
from gradstream.job.plan import RunPlan
from gradstream.optim.base import PerTensor
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.schedule import FLUSHING
from gradstream.strategies.base import GroupStrategy, PeerStrategy, SharedMemoryStrategy


def losses_of(plan: RunPlan, *, spread: bool = False) -> LossTolerance:
    """Which losses of workers the run of a plan survives, and how.

    Args:
        plan: plan of the run.
        spread: whether nodes may be on several machines.
    """
    served, rounds = plan.served, plan.strategy.partitioning == "rounds"
    pairs = isinstance(plan.strategy, PeerStrategy)
    obstacle = next(_obstacles(plan, rounds=rounds), "")
    redoes = (
        served is not None
        and served.pushes == "gradients"
        and not (rounds or served.in_passes)
        and plan.workers > 1
    )
    return LossTolerance(
        survives_worker_loss=not obstacle if rounds and not pairs else plan.strategy.survives_worker_loss,
        quorum=None if served is None else served.quorum(plan.workers),
        allow_lost=plan.job.allow_lost,
        # A trial of a line search may lie where the loss has no value, with all portions of a worker.
        quarantine_after=sys.maxsize if plan.strategy.in_passes else plan.job.quarantine_after,
        obstacle=obstacle,
        redoes=redoes and not obstacle,
        stands_in=rounds and not obstacle and not pairs,
        skips_lost=pairs,
        keeps_shards=why_shards_stay(plan, spread=spread),
        acknowledge=plan.job.acknowledge,
        regroups=isinstance(plan.strategy, GroupStrategy),
    )


def losses_of_all(plan: RunPlan) -> LossTolerance:
    """The losses that some phase of the run survives: where the present one does not, the coordinator ends the run."""
    losses = [losses_of(one) for one in plan.every or (plan,)]
    return next((one for one in losses if one.replaces), losses[0])


def _obstacles(plan: RunPlan, *, rounds: bool) -> Iterator[str]:
    """Why no new process can take the place of a lost worker."""
    served, strategy, job = plan.served, plan.strategy, plan.job
    if isinstance(strategy, SharedMemoryStrategy):
        yield "its workers exchange through one vector in shared memory"
        return
    if served is not None and served.quorum(plan.workers) is not None:
        yield "a quorum of workers makes each update"
    if plan.open_ended:
        yield "the training loop is the user's own"
    if job.record:
        yield "a recording has one file for each worker, from its first minibatch on"
    if not rounds and not strategy.survives_worker_loss:
        yield "it does not survive the loss of one"
    if rounds and not strategy.stands_in and not isinstance(strategy, PeerStrategy):
        yield (
            "no other worker can compute the part of a lost one"
            if served is None
            else "what a worker pushes is more than the gradient of its minibatch"
        )
    if rounds and plan.parts > 1 and job.pipeline not in FLUSHING and not isinstance(job.pipeline, Hybrid):
        yield "its parts have more than their parameters from one minibatch to the next"
    if rounds and plan.balanced and plan.parts > 1:
        yield "shares follow measured speeds, which the parts of a new process do not know"
    if rounds and served is not None and served.rows(tables=True) is not None:
        yield "rounds exchange rows"
    if rounds and job.data.num_samples is None:
        yield "only reading a minibatch of a stream tells its size"


def why_shards_stay(plan: RunPlan, *, spread: bool) -> str:
    """Why a run cannot change its number of shards while it goes on, with the remedy; "" if it can.

    Args:
        plan: plan of the run.
        spread: whether nodes may be on several machines.
    """
    served, name = plan.served, type(plan.strategy).__name__
    if served is None:
        return f"the workers of {name} exchange without shards; take a strategy with servers"
    if plan.whole is not None:
        return "each phase of the job says how many shards it has; give phases servers=, or leave phases out"
    if plan.job.record:
        why = "a recording has one file for each shard, from its first push on"
    elif served.quorum(plan.workers) is not None:
        why = "a quorum decides over all shards at once which pushes count, and new shards lack its decisions"
    elif isinstance(plan.optimizer, PerTensor):
        why = f"the norms of {type(plan.optimizer).__name__} are sums over all shards, and new shards are in none"
    elif served.correction() is not None:
        why = f"{name} corrects pushes by what each worker has read, which new shards lack"
    elif plan.parts > 1:
        why = "each part of a split model has shards of its own, and their numbers have to stay equal"
    elif spread:
        why = "the run may have nodes on several machines, and the new shards would have no certificates"
    else:
        return ""
    return f"{why}: stop the run, and resume it with this number of servers"
