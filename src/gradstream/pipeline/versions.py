"""The version of the weights that each pass reads, where successive minibatches are in the pipeline at once: as data.

A stage's weights have version v after v updates. It makes update t after its last backward of minibatch t, from
gradients that may belong to older versions. N is the number of stages, w_s stage s's weights, η the learning rate:

* pipedream (Narayanan et al., 2019). A forward reads the newest version, and its backward the same, which the part
  keeps (weight stashing): on a chain of K stages w^{t+1} = w^t - η ∇f(w_1^{t-K+1}, …, w_K^t), and stage s keeps
  K - s + 1 versions. With vertical synchronization all stages read the version of the oldest, w^{t-K+1}.
* 2bw (Narayanan et al., 2021). All M micro-batches of minibatch t read version t - 1, for which none of them waits if
  M >= K - 1: w^{t+1} = w^t - η ∇f(w^{t-1}). Each stage keeps two versions.
* delayed (Chen, Eversole, Li, Yu and Seide, 2012). Each pass reads the newest version; so a backward combines
  activations of version t - 2 (K - s) with weights of version t. Nothing is kept.

The first minibatches of a stream read version 0. At the end of a stream all updates are made, and the next stream
begins with the newest weights: a clean state for a snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gradstream.errors import ConfigError, UnknownNameError
from gradstream.pipeline.schedule import STREAMING, Schedule, StagePass, depths
from gradstream.split.plan import DATA, SplitPlan

__all__ = ["check_streaming", "weight_versions"]


def weight_versions(
    name: str,
    plan: SplitPlan,
    schedules: Sequence[Schedule],
    *,
    micro_batches: int = 1,
    vertical_sync: bool = False,
) -> dict[StagePass, int]:
    """The version that each forward and backward of a stream reads.

    Args:
        name: "pipedream", "2bw" or "delayed".
        plan: plan of the split model.
        schedules: the schedules of all parts for the whole stream.
        micro_batches: micro-batches of a minibatch, M: 1, but for "2bw".
        vertical_sync: "pipedream" only: all stages read the same version for one minibatch.

    Raises:
        UnknownNameError, ConfigError: the arguments do not go together.
    """
    check_streaming(name, plan, micro_batches, vertical_sync)
    passes = [step for schedule in schedules for step in schedule if step.stage != DATA]
    if name == "2bw":
        return {step: max(0, step.micro_batch // micro_batches - 1) for step in passes}
    newest: dict[StagePass, int] = {}
    updates = Counter[int]()
    for step in passes:
        newest[step] = updates[step.stage]
        updates[step.stage] += step.kind == "backward"
    if name == "delayed":
        return newest
    forwards = {step: version for step, version in newest.items() if step.kind == "forward"}
    oldest: dict[int, int] = {}
    for step, version in forwards.items():
        oldest[step.micro_batch] = min(version, oldest.get(step.micro_batch, version))
    return {
        step: oldest[step.micro_batch]
        if vertical_sync
        else forwards[StagePass("forward", step.stage, step.micro_batch)]
        for step in passes
    }


def check_streaming(name: str, plan: SplitPlan, micro_batches: int, vertical_sync: bool) -> None:
    """Raises UnknownNameError or ConfigError if a stream cannot be trained so."""
    if name not in STREAMING:
        raise UnknownNameError("schedule of a stream", name, STREAMING)
    if vertical_sync and name != "pipedream":
        raise ConfigError(
            f'vertical_sync goes with "pipedream": "{name}" reads the same version or keeps none'
        )
    if name != "2bw" and micro_batches != 1:
        raise ConfigError(
            f'"{name}" makes an update after every micro-batch: got {micro_batches} of a minibatch, expected 1. '
            'Take "2bw" to make one update from several'
        )
    if name == "2bw" and micro_batches < (least := max(depths(plan)) - 1):
        raise ConfigError(
            f'"2bw" needs at least {least} micro-batches in a minibatch, one fewer than the pipeline is deep: got '
            f"{micro_batches}. A minibatch would have to wait for the update of the last but one"
        )
