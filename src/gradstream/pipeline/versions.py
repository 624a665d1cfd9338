"""The version of the weights that each pass reads, where successive minibatches are in the pipeline at once: as data.

A part's weights have version v after v updates. It makes update t after its last backward of minibatch t, from
gradients that may belong to older versions. w_s are stage s's weights, η is the learning rate:

* pipedream (Narayanan et al., 2019). A forward reads the newest version, and its backward the same, which the part
  keeps (weight stashing): on a chain of K stages w^{t+1} = w^t - η ∇f(w_1^{t-K+1}, …, w_K^t), and stage s keeps
  K - s + 1 versions. With vertical synchronization ("pipedream-vertical") all stages read w^{t-K+1}.
* 2bw (Narayanan et al., 2021). All M micro-batches of minibatch t read version t - 1, for which none of them waits if
  M >= K - 1: w^{t+1} = w^t - η ∇f(w^{t-1}). Each stage keeps two versions.
* delayed (Chen, Eversole, Li, Yu and Seide, 2012). Each pass reads the newest version; so a backward combines
  activations of version t - 2 (K - s) with weights of version t. Nothing is kept.

The first minibatches of a stream read version 0. At the end of a stream all updates are made, and the next stream
begins with the newest weights: a clean state for a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.pipeline.schedule import STREAMING, Schedule, StagePass, depths
from gradstream.split.plan import DATA, SplitPlan


def version_read(name: str, plan: SplitPlan, minibatch: int, newest: int) -> int:
    """The version that the forward of a minibatch reads in a part with so many updates.

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


def weight_versions(
    name: str, plan: SplitPlan, schedules: Sequence[Schedule], *, micro_batches: int = 1
) -> dict[StagePass, int]:
    """The version that each forward and backward of a stream reads.

    Args:
        name: one of STREAMING.
        plan: plan of the split model.
        schedules: the schedules of all parts for the whole stream.
        micro_batches: micro-batches of a minibatch, M: 1, but for "2bw".

    Raises:
        UnknownNameError, ConfigError: the arguments do not go together.
    """
    check_streaming(name, plan, micro_batches)
    versions: dict[StagePass, int] = {}
    for part, schedule in enumerate(schedules):
        done = {stage.number: 0 for stage in plan.stages_of(part)}  # backwards
        for step in (step for step in schedule if step.stage != DATA):
            newest = min(done.values()) // micro_batches
            if step.kind == "forward":
                versions[step] = version_read(name, plan, step.micro_batch // micro_batches, newest)
            else:
                forward = StagePass("forward", step.stage, step.micro_batch)
                versions[step] = newest if name == "delayed" else versions[forward]
                done[step.stage] += 1
    return versions


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
