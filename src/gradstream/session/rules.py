"""The update rule on the shards that does what an optimizer of `torch.optim` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradstream.errors import ConfigError
from gradstream.optim import SGD, Adagrad, Adam, AdamW
from gradstream.optim.base import Optimizer

__all__ = ["options_of", "rule_of"]

Group = Mapping[str, Any]


def _sgd(group: Group) -> Optimizer:
    return SGD(
        lr=1.0,
        momentum=group["momentum"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
    )


def _adam(group: Group) -> Optimizer:
    kind = AdamW if group.get("decoupled_weight_decay") else Adam
    beta1, beta2 = group["betas"]
    return kind(1.0, beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"])


def _adamw(group: Group) -> Optimizer:
    beta1, beta2 = group["betas"]
    return AdamW(1.0, beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"])


def _adagrad(group: Group) -> Optimizer:
    start = group["initial_accumulator_value"]
    return Adagrad(1.0, eps=group["eps"], initial_accumulator=start, weight_decay=group["weight_decay"])


# The learning rate travels with each push, so it is not part of a rule: 1.0 stands in its place.
_RULES: dict[type[torch.optim.Optimizer], Callable[[Group], Optimizer]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.Adagrad: _adagrad,
}

_MUST_BE_OFF = ("maximize", "amsgrad", "lr_decay", "differentiable", "capturable")

# What says where or how fast, not what: any value will do.
_NOT_OPTIONS = frozenset({"params", "lr", "initial_lr", "foreach", "fused", "name", "param_names"})


def rule_of(optimizer: torch.optim.Optimizer) -> Optimizer:
    """The update rule of an optimizer; its `lr` is to be ignored.

    Raises:
        ConfigError: there is none like it, or it has options that the shards do not know, or groups
            of parameters that differ in more than what they hold.
    """
    make = _RULES.get(type(optimizer))
    if make is None:
        known = ", ".join(f"torch.optim.{kind.__name__}" for kind in _RULES)
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: the servers, which make the updates, have no rule that "
            f"does the same; use one of {known}"
        )
    options_of(optimizer.param_groups)
    group = optimizer.param_groups[0]
    for name in _MUST_BE_OFF:
        if group.get(name):
            raise ConfigError(f"optimizer {type(optimizer).__name__}({name}={group[name]!r}): leave it out")
    return make(group)


def options_of(groups: Sequence[Group]) -> dict[str, Any]:
    """What an update depends on besides the learning rate, the same for all groups.

    Raises:
        ConfigError: the groups differ, also in their learning rates.
    """
    first, *others = ({k: v for k, v in group.items() if k not in _NOT_OPTIONS} for group in groups)
    for index, other in enumerate(others, 1):
        for name, value in (*first.items(), ("lr", groups[0]["lr"])):
            got = groups[index]["lr"] if name == "lr" else other.get(name)
            if got != value:
                raise ConfigError(
                    f"parameter group {index} has {name}={got!r}, group 0 has {value!r}: the servers treat "
                    "all parameters alike; give all groups the same options"
                )
    return first
