"""Writes a job's plain values as JSON for other processes, and puts them into a job again."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradstream.coordinator.stopping import Until
from gradstream.errors import ConfigError
from gradstream.job.code import place_of
from gradstream.job.descriptions import describe, described, plain, revived
from gradstream.job.job import Job
from gradstream.job.metrics import Metric
from gradstream.job.phases import Phase, described_phase, phase_of
from gradstream.job.registry import OPTIMIZERS, find_optimizer
from gradstream.optim.base import ByShape, Optimizer
from gradstream.optim.groups import GroupedRule, groups_of
from gradstream.pipeline.hybrid import Hybrid
from gradstream.pipeline.synthetic import SyntheticGradients
from gradstream.runtime.deadlines import Deadlines
from gradstream.untrusted import MismatchError, check_record, check_value, parse_json

# ---- overrides ---------------------------------------------------------------------------

# Model and data come from the job file; strategy and optimizer travel as class and fields.
_NOT_PLAIN = ("model", "data", "callbacks", "strategy", "strategy_options", "optimizer", "spec", "origins")


def overrides(job: Job) -> dict[str, Any]:
    """The fields of a job that are plain values, in the form in which JSON holds them."""
    names = [entry.name for entry in dataclasses.fields(job) if entry.name not in _NOT_PLAIN]
    fields = {name: plain(getattr(job, name)) for name in names}
    fields["phases"] = list(map(described_phase, job.phases))
    fields["codec"] = job.codec if isinstance(job.codec, str) else described(job.codec)
    return {**fields, "metrics": {name: _place_of(metric) for name, metric in job.metrics.items()}}


def _place_of(metric: Any) -> str:
    """The place of a metric; "" if other processes have to take the metric from the job file."""
    try:
        return metric if isinstance(metric, str) else place_of(metric)
    except ConfigError:
        return ""


def with_overrides(job: Job, fields: Mapping[str, Any]) -> Job:
    """The job with the fields that `overrides` wrote.

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
    """Raises MismatchError for an unknown field, or a value of a wrong type."""
    hints = {**typing.get_type_hints(Job), "run_dir": str | None, "metrics": Mapping[str, str]}
    hints["codec"] = str | Mapping[str, Any] | None
    hints["phases"] = Sequence[Mapping[str, Any]]
    for name, value in values.items():
        if name in _NOT_PLAIN or name not in hints:
            raise MismatchError(f"{name[:80]!r} is no field of a job that a description of a run has")
        check_value(value, hints[name], name)


def _phases(job: Job, records: Sequence[Mapping[str, Any]]) -> Sequence[Phase]:
    """The phases that were written; or those of the job file, if they are the same."""
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


# ---- optimizer text ----------------------------------------------------------------------
# The update rule of a worker as text, which servers read: built-in rules only.

MAX_RULE_BYTES = 1 << 20


def text_of_optimizer(
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]] = (),
    ranges: Sequence[tuple[str, int, int]] = (),
) -> str:
    """Writes a built-in update rule as text, the same for equal rules; `optimizer_of_text` reads it.

    Args:
        optimizer: the update rule.
        groups: parameter groups as in `Job.groups`, by the names in `ranges`.
        ranges: (name, start, stop) of parts of the flat vector, where there are groups.
    """
    described = describe(optimizer)
    text = {key: described[key] for key in ("class", "fields")}
    if groups:
        text |= {"groups": list(groups), "ranges": list(ranges)}
    return json.dumps(text, sort_keys=True)


def optimizer_of_text(text: str) -> tuple[Optimizer, GroupedRule | None]:
    """Reads the update rule of a worker. The second value includes the settings of groups, or is None.

    Raises:
        ConfigError: the rule is not built in: a peer cannot make this process load code.
    """
    try:
        described = parse_json(text, max_bytes=MAX_RULE_BYTES)
        described["place"] = described.pop("class")
        check_record(_Rule, described)
        rule = _Rule(**described)
        _check_plain(rule.fields)
        for group in rule.groups:
            _check_plain(group)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"this node cannot read the update rule that another one has sent: {text[:80]!r}: {error}"
        ) from error
    if rule.place not in OPTIMIZERS.values():
        raise ConfigError(
            f"update rule {rule.place[:80]!r} is not built in; expected one of {', '.join(sorted(OPTIMIZERS))}"
        )
    try:
        optimizer = find_optimizer(rule.place, rule.fields)
        if not rule.groups and not isinstance(optimizer, ByShape):
            return optimizer, None
        return optimizer, GroupedRule(optimizer, groups_of(rule.groups, optimizer), rule.ranges)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this node cannot make the update rule that another one has sent: {text[:80]!r}: {error}"
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """An update rule as it stands in a text, which calls `place` "class"."""

    place: str
    fields: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]] = ()
    ranges: Sequence[tuple[str, int, int]] = ()


def _check_plain(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that is a table: it would become an object of the class that it names."""
    for name, value in fields.items():
        if isinstance(value, Mapping) or (
            isinstance(value, list | tuple) and any(isinstance(entry, Mapping | list) for entry in value)
        ):
            raise ValueError(f"{name[:80]!r} is a table: no peer may name a place of code")
