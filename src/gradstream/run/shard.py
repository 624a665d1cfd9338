"""Builds the shards of a run. Only a run with servers imports this module, and with it the code of a server."""

from __future__ import annotations

from dataclasses import replace

from gradstream.codec.low_rank import PowerSGD
from gradstream.coordinator.relay import RunClock
from gradstream.job.losses import losses_of
from gradstream.job.overrides import optimizer_of_text
from gradstream.job.plan import RunPlan
from gradstream.model.base import Model
from gradstream.run.nodes import grouped_rule, member_of, recording_of
from gradstream.runtime.base import Runtime
from gradstream.server.shard.config import ShardConfig
from gradstream.server.shard.event_schedule import ShardRecorder
from gradstream.server.shard.node import ShardNode
from gradstream.transport.base import Endpoint


def build_shard(
    plan: RunPlan,
    runtime: Runtime,
    endpoint: Endpoint,
    rank: int,
    model: Model,
    *,
    clock: RunClock | None = None,
) -> ShardNode:
    """Builds one shard of the parameter server; its endpoint has started and knows the coordinator.

    Args:
        plan: of a run with servers.
        runtime, endpoint: of this node.
        rank: rank of the shard.
        model: provides its reduction, and the names of its parameters if some have settings of their own.
        clock: the clock of the shard's events, if it has one already.
    """
    config = shard_config(plan, rank, model)
    if plan.job.record:
        config = replace(config, schedule=ShardRecorder(recording_of(plan, runtime)))
    member = member_of(plan, runtime, endpoint, "shard", rank, clock=clock)
    return ShardNode(runtime, endpoint, member, config)


def shard_config(plan: RunPlan, rank: int, model: Model) -> ShardConfig:
    """The part of the plan that a shard needs; see `build_shard`."""
    strategy = plan.served
    assert strategy is not None
    part = rank // plan.servers_of_part if plan.parts > 1 else 0
    return ShardConfig(
        rank=rank,
        num_shards=plan.servers_of_part,
        first=part * plan.servers_of_part,
        part=part,
        rule=strategy.rule(plan.workers, model.reduction),
        optimizer=plan.shards_optimizer,
        grouped=None if plan.workers_optimize else grouped_rule(plan, model, part),
        decayed=strategy.decays_gradients,
        silence_s=plan.job.deadlines.silence_s,
        find_optimizer=optimizer_of_text,
        resume_from="" if plan.resume is None else plan.resume.folder,
        restores_state=plan.restores_state,
        renumbered=plan.renumbered,
        quorum=strategy.quorum(plan.workers),
        correction=strategy.correction(),
        workers=plan.workers,
        grows=losses_of(plan).grows,
        acknowledge=plan.acknowledge,
        retry_s=plan.job.deadlines.retry_s,
        in_passes=strategy.in_passes,
        noise_scale=plan.job.noise_scale,
        codec=None if isinstance(plan.codec, PowerSGD) else plan.codec,
        fetch_codec=plan.fetch_codec,
    )
