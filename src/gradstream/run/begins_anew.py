"""What a resumed run does not take over from its checkpoint: what single processes have of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradstream.checkpoint.manifest import Resume
from gradstream.job.plan import RunPlan, worker_name
from gradstream.run.node_spec import NodeSpec

# ---- begins anew -------------------------------------------------------------------------


def begins_anew(plan: RunPlan) -> str:
    """A sentence on what begins anew; "" if the run takes over all, or is not resumed."""
    return "; ".join(_begun(plan, plan.resume)) if plan.resume is not None else ""


def _begun(plan: RunPlan, resume: Resume) -> Iterator[str]:
    workers = list(map(worker_name, range(plan.workers)))
    new = ", ".join(name for name in workers if name not in resume.steps)
    if kept := _on_workers(plan):
        yield f"{kept} begins anew: it is in no checkpoint"
    if resume.remainders and plan.remainders != resume.remainders:
        now = f"this run has {plan.remainders or 'nothing of that kind'}"
        yield f"what workers had not sent yet is dropped: it was {resume.remainders}; {now}"
    elif resume.remainders:
        if new:
            yield f"new workers begin with nothing left to send: {new}"
        if gone := ", ".join(name for name in resume.steps if name not in workers):
            yield f"what workers that are no more had not sent yet is dropped: {gone}"
    if resume.replicas and plan.replicas != resume.replicas:
        now = plan.replicas or f"this run has {type(plan.strategy).__name__}"
        yield f"workers begin with the mean of all: the checkpoint has {resume.replicas} on each; {now}"
    elif resume.replicas and new:
        yield f"new workers begin with the mean of all: {new}"
    if resume.predictors and plan.predictors != resume.predictors:
        now = plan.predictors or "this run has none"
        yield f"predictors of the checkpoint are not used: they were of {resume.predictors}; {now}"
    elif resume.predictors and new:
        yield f"predictors of new workers begin at zero: {new}"


def _on_workers(plan: RunPlan) -> str:
    """Names the optimizers' state that no checkpoint has: of workers that make steps of their own; "" if none."""
    if not plan.trains_locally:
        return ""
    if plan.open_ended:
        return "the state of each loop's own optimizer, unless the script saves and loads it,"
    names = ", ".join(plan.optimizer.state_names)
    return names and f"{names} of each worker's own {type(plan.optimizer).__name__}"


# ---- changes -----------------------------------------------------------------------------
# What a job asks for now that is not what its run had before.

_NOT_ASKED = frozenset({"run_dir", "name", "chunk_elems", "cwd"})
"""Fields that say where a run is kept and was started, what it is called, and one that a checkpoint has."""


def changes(before: NodeSpec, now: NodeSpec) -> str:
    """Names each value of a run that is another one now: "epochs = 20, before 10"; "" if none is.

    Args:
        before: the description of the run as it was begun, or resumed the last time.
        now: that of the plan by which it goes on.
    """
    old, new = dict(_values(before)), dict(_values(now))
    return "; ".join(
        f"{key} = {new.get(key)}, before {old.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    )


def _values(spec: NodeSpec) -> Iterator[tuple[str, Any]]:
    for name, value in spec.plain.items():
        if name == "argv":
            yield "arguments of the job file", list(value or ())[1:]
        elif name not in _NOT_ASKED:
            yield from _flat(name, value)
    for name, described in (("strategy", spec.strategy), ("optimizer", spec.optimizer)):
        yield name, str(described.get("class", "")).rpartition(":")[2]
        yield from _flat(name, described.get("fields", {}))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, list(value) if isinstance(value, tuple) else value
