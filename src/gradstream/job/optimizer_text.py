"""The update rule of a worker as text, which servers read: built-in rules only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gradstream.errors import ConfigError
from gradstream.job.descriptions import describe
from gradstream.job.registry import OPTIMIZERS, find_optimizer
from gradstream.optim.base import ByShape, Optimizer
from gradstream.optim.groups import GroupedRule, groups_of
from gradstream.untrusted import check_record, parse_json

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
    """Reads the update rule of a worker; the second value also has the settings of groups, or is None.

    Raises:
        ConfigError: the rule is not built in: no code is loaded because a peer names it.
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
    """An update rule as a text has it; the text calls `place` "class"."""

    place: str
    fields: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]] = ()
    ranges: Sequence[tuple[str, int, int]] = ()


def _check_plain(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that is a table: it would be made into an object of a class that it names."""
    for name, value in fields.items():
        if isinstance(value, Mapping) or (
            isinstance(value, list | tuple) and any(isinstance(one, Mapping | list) for one in value)
        ):
            raise ValueError(f"{name[:80]!r} is a table: no peer may name a place of code")
