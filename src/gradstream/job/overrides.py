"""Writes a job's plain values as JSON for other processes, and puts them into a job again."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstream.coordinator.stopping import Until
from gradstream.errors import ConfigError
from gradstream.job.descriptions import described, plain, revived
from gradstream.job.job import Job
from gradstream.job.phases import Phase, described_phase, phase_of
from gradstream.job.places import place_of
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.runtime.deadlines import Deadlines
from gradstream.untrusted import MismatchError, check_value
from gradstream.worker.metrics import Metric

# Model and data come from the job file; strategy and optimizer travel as class and fields.
_NOT_PLAIN = ("model", "data", "callbacks", "strategy", "strategy_options", "optimizer", "spec", "origins")


def overrides(job: Job) -> dict[str, Any]:
    """The fields of a job that are plain values, as JSON holds them."""
    names = [entry.name for entry in dataclasses.fields(job) if entry.name not in _NOT_PLAIN]
    fields = {name: plain(getattr(job, name)) for name in names}
    fields["phases"] = list(map(described_phase, job.phases))
    fields["codec"] = job.codec if isinstance(job.codec, str) else described(job.codec)
    return {**fields, "metrics": {name: _place_of(metric) for name, metric in job.metrics.items()}}


def _place_of(metric: Any) -> str:
    """The place of a metric; "" if other processes have to take it from the job file."""
    try:
        return metric if isinstance(metric, str) else place_of(metric)
    except ConfigError:
        return ""


def with_overrides(job: Job, fields: Mapping[str, Any]) -> Job:
    """The job with the fields that `overrides` has written.

    Raises:
        ConfigError: a field is unknown, or its value has a wrong type.
    """
    values = dict(fields)
    try:
        _check(values)
        values["deadlines"] = Deadlines(**values["deadlines"])
        if values.get("until") is not None:
            values["until"] = Until(**values["until"])
        if isinstance(values["pipeline"], Mapping):
            kind = Hybrid if "turns" in values["pipeline"] else SyntheticGradients
            values["pipeline"] = kind(**values["pipeline"])
        values["codec"] = revived(values.get("codec"))
        if values["run_dir"] is not None:
            values["run_dir"] = Path(values["run_dir"])
        values["phases"] = _phases(job, values.get("phases", ()))
        values["metrics"] = {
            name: place or _own_metric(job, name) for name, place in values.get("metrics", {}).items()
        }
        return dataclasses.replace(job, **values)
    except (KeyError, TypeError, MismatchError) as error:
        raise ConfigError(
            f"the fields of the job in the description of the run are wrong: {error}"
        ) from error


def _check(values: Mapping[str, Any]) -> None:
    """Raises MismatchError for a field that a job does not have, or a value of a wrong type."""
    hints = {**typing.get_type_hints(Job), "run_dir": str | None, "metrics": Mapping[str, str]}
    hints["codec"] = str | Mapping[str, Any] | None
    hints["phases"] = Sequence[Mapping[str, Any]]
    for name, value in values.items():
        if name in _NOT_PLAIN or name not in hints:
            raise MismatchError(f"{name[:80]!r} is no field of a job that a description of a run has")
        check_value(value, hints[name], name)


def _phases(job: Job, records: Sequence[Mapping[str, Any]]) -> Sequence[Phase]:
    """The phases that were written; those of the job file, where these are the same."""
    if records == list(map(described_phase, job.phases)):
        return job.phases
    return list(map(phase_of, records))


def _own_metric(job: Job, name: str) -> str | Metric:
    if name not in job.metrics:
        raise ConfigError(
            f"metrics[{name!r}] is not in the job file, and other processes cannot find it: define it at the "
            "top level of a file"
        )
    return job.metrics[name]
