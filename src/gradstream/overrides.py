"""A job's plain values: as other processes are told of them, and put into a job again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstream.config import Deadlines, Job
from gradstream.errors import ConfigError
from gradstream.membership.goal import Until
from gradstream.registry import place_of
from gradstream.worker.evaluation import Metric

__all__ = ["overrides", "plain", "with_overrides"]

# Model and data come from the job file; strategy and optimizer travel as class and fields.
_NOT_PLAIN = ("model", "data", "callbacks", "strategy", "strategy_options", "optimizer", "spec", "origins")


def overrides(job: Job) -> dict[str, Any]:
    """The fields of a job that are plain values, as JSON holds them."""
    names = [entry.name for entry in dataclasses.fields(job) if entry.name not in _NOT_PLAIN]
    fields = {name: plain(getattr(job, name)) for name in names}
    return {**fields, "metrics": {name: _place_of(metric) for name, metric in job.metrics.items()}}


def _place_of(metric: str | Metric) -> str:
    """Where to find it; "" if only running the job file again brings it forth."""
    try:
        return metric if isinstance(metric, str) else place_of(metric)
    except ConfigError:
        return ""


def with_overrides(job: Job, fields: Mapping[str, Any]) -> Job:
    """The job with the fields that `overrides` has made of another."""
    values = dict(fields)
    values["deadlines"] = Deadlines(**values["deadlines"])
    if values.get("until") is not None:
        values["until"] = Until(**values["until"])
    if values["run_dir"] is not None:
        values["run_dir"] = Path(values["run_dir"])
    values["metrics"] = {
        name: place or _own_metric(job, name) for name, place in values.get("metrics", {}).items()
    }
    return dataclasses.replace(job, **values)


def _own_metric(job: Job, name: str) -> str | Metric:
    if name not in job.metrics:
        raise ConfigError(
            f"metrics[{name!r}] is not in the job file, and has no place that other processes find it by: "
            "define it at the top level of a file"
        )
    return job.metrics[name]


def plain(value: Any) -> Any:
    """A value of a field, as JSON holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Sequence):
        return list(value)
    return value
