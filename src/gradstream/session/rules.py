"""Finds the shards' update rule that is equivalent to an optimizer of `torch.optim`.

Without an equivalent rule, the optimizer runs on each worker, which pushes the difference that each step makes, and
the shards' rule is `STEPS`. Some strategies cannot use such pushes (`objection`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradstream.errors import ConfigError
from gradstream.job.overrides import text_of_optimizer
from gradstream.job.traits import traits_of_strategy
from gradstream.optim import SGD, Adagrad, Adam, AdamW
from gradstream.optim.base import Optimizer, skips_zeros
from gradstream.optim.groups import groups_of
from gradstream.session.watch import INSTEAD
from gradstream.strategies.base import ServerStrategy, Strategy
from gradstream.traits import STRATEGY, obstacle

Group = Mapping[str, Any]
Range = tuple[str, int, int]


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


# Each push brings its learning rate, so it is not part of a rule, which has 1.0 instead.
_RULES: dict[type[torch.optim.Optimizer], Callable[[Group], Optimizer]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.Adagrad: _adagrad,
}

_MUST_BE_OFF = ("maximize", "amsgrad", "lr_decay", "differentiable", "capturable")

# Options that do not change the result of a step: any value is accepted.
_NOT_OPTIONS = frozenset({"params", "lr", "initial_lr", "foreach", "fused", "name", "param_names"})

RATIO_TOLERANCE = 1e-6

SMALL_ELEMS = 64
"""Tensors of at most this many elements are described by all of their elements."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

ON_WORKERS = "Or call session.wrap(model, optimizer, fused=False), which runs the optimizer on each worker"

STEPS = SGD(lr=1.0)
"""The shards' rule where workers push the steps of their own optimizers."""


@dataclass(frozen=True, slots=True)
class ServerRule:
    """The servers' update rule in place of an optimizer.

    Args:
        optimizer: rule of the first group. Each push brings the learning rate that replaces its `lr`.
        groups: for each group, the fields of the rule that differ from the first group's, and "lr_scale", its
            learning rate divided by the first group's.
    """

    optimizer: Optimizer
    groups: tuple[Mapping[str, Any], ...] = ({},)

    def text(self, ranges: Sequence[Range]) -> str:
        """The rule as text, for sending.

        Args:
            ranges: (group, start, stop) of each part of the flat vector.
        """
        own = [{"match": str(index), **group} for index, group in enumerate(self.groups) if group]
        return text_of_optimizer(self.optimizer, own, ranges if own else ())

    def moves(self, index: int) -> bool:
        """Whether a step may change parameters of this group that have no gradient."""
        return not skips_zeros(self._of(index))

    def takes_sparse(self, index: int) -> bool:
        """Whether torch's optimizer accepts sparse gradients for this group."""
        rule = self._of(index)
        return isinstance(rule, SGD | Adagrad) and not rule.weight_decay

    def _of(self, index: int) -> Optimizer:
        own = {name: value for name, value in self.groups[index].items() if name != "lr_scale"}
        rule: Optimizer = dataclasses.replace(self.optimizer, **own)  # type: ignore[type-var]
        return rule

    def rate(self, groups: Sequence[Group]) -> float:
        """The first group's learning rate, which is sent.

        Raises:
            ConfigError: the ratio of another group's rate to it has changed.
        """
        first = float(groups[0]["lr"])
        for index, (group, own) in enumerate(zip(groups, self.groups, strict=True)):
            expected = first * own.get("lr_scale", 1.0)
            if not math.isclose(float(group["lr"]), expected, rel_tol=RATIO_TOLERANCE):
                got, ratio = float(group["lr"]), own.get("lr_scale", 1.0)
                raise ConfigError(
                    f"optimizer.step: parameter group {index} has lr={got!r}, group 0 has lr={first!r}; expected "
                    f"{ratio:g} times the rate of group 0, as at session.wrap: scale the rates of all groups by "
                    f"the same factor. {ON_WORKERS}"
                )
        return first


def rule_of(optimizer: torch.optim.Optimizer) -> ServerRule:
    """The update rule that is equivalent to an optimizer.

    Raises:
        ConfigError: there is none, or the optimizer has options that the shards do not know, or its groups
            differ in an option that must be the same for all.
    """
    make = _RULES.get(type(optimizer))
    if make is None:
        known = ", ".join(f"torch.optim.{kind.__name__}" for kind in _RULES)
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: the servers, which make the updates, have no rule that "
            f"does the same; use one of {known}"
        )
    for group in optimizer.param_groups:
        for name in _MUST_BE_OFF:
            if group.get(name):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__}({name}={group[name]!r}): the servers, which make the "
                    f"updates, do not have this option: leave {name} out"
                )
    rules = [make(group) for group in optimizer.param_groups]
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    groups = []
    for rule, rate in zip(rules, rates, strict=True):
        own = {name: value for name, value in _fields(rule).items() if value != _fields(rules[0])[name]}
        if rate != rates[0]:
            if not rates[0]:
                raise ConfigError(
                    "session.wrap: parameter group 0 has lr=0, and the rates of the other groups are sent as "
                    "multiples of it: put a group with another rate first"
                )
            own["lr_scale"] = rate / rates[0]
        groups.append(own)
    groups_of(
        [{"match": "*", **own} for own in groups if own], rules[0]
    )  # raises if options must be the same
    return ServerRule(rules[0], tuple(groups))


def rule_for(
    optimizer: torch.optim.Optimizer, strategy: Strategy, workers: int, *, fused: bool = True
) -> ServerRule | None:
    """The shards' update rule for an optimizer; None if the optimizer runs on each worker.

    Args:
        optimizer: the user's optimizer.
        strategy: strategy of the run.
        workers: number of workers.
        fused: let the shards make the updates if they have an equivalent rule.

    Raises:
        ConfigError: neither is possible; the message says why.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"optimizer {kind}: it evaluates the loss several times a step, on this worker's samples alone, "
            "while other workers move the parameters. Use SGD, Adam or another optimizer that computes its step "
            "from the gradient"
        )
    why = f"optimizer {kind}: fused=False"
    if fused:
        try:
            return rule_of(optimizer)
        except ConfigError as error:
            why = str(error)
    against = objection(strategy, workers)
    if against:
        raise ConfigError(
            f"{why}. Under this strategy, the optimizer cannot run on the workers either (they would push its "
            f"steps instead of gradients): {against}; or {INSTEAD}"
        )
    return None


def objection(strategy: Strategy, workers: int) -> str:
    """The reason why workers cannot push steps of their own optimizers under a strategy; "" if they can."""
    traits = traits_of_strategy(strategy, workers)
    if isinstance(strategy, ServerStrategy) and strategy.pushes != "gradients":
        if set(strategy.outer_optimizer(Adam()).state_names) & set(Adam().state_names):
            traits["averaged state"] = traits[STRATEGY]
    elif isinstance(strategy, ServerStrategy):
        for option, off in (("local_lr", None), ("local_momentum", 0.0)):
            if getattr(strategy, option, off) != off:
                traits["local rate"] = f"{option}={getattr(strategy, option)}"
        from gradstream.server.aggregation import PushHeader  # here: runs without servers do not import it

        late, early = (
            PushHeader(f"worker-{r}", r, 1, 1, samples=1 + r, base_version=r * 8) for r in range(2)
        )
        if any(weight != 1.0 for weight in strategy.rule(workers, "mean").weights(8, [late, early])):
            traits["weighed pushes"] = traits[STRATEGY]
    return obstacle("pushed steps", traits)


def is_fresh(optimizer: torch.optim.Optimizer, rule: Optimizer) -> bool:
    """True if the optimizer has no accumulated state."""
    for state in optimizer.state.values():  # Adagrad fills it before the first step
        if float(state.get("step", 1)) != 0:
            return False
        if any(bool((state[name] != rule.state_init).any()) for name in rule.state_names if name in state):
            return False
    return True


def options_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """For each group, the options that change an update, without the learning rate."""
    return [{name: value for name, value in group.items() if name not in _NOT_OPTIONS} for group in groups]


def description_of(*optimizers: object) -> str:
    """Class and options of the optimizers (without the rate) as text, to compare between workers."""
    options = [
        options_of(optimizer.param_groups)
        for optimizer in optimizers
        if isinstance(optimizer, torch.optim.Optimizer)
    ]
    kinds = "+".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
    return json.dumps({"class": kinds, "fields": {"options": _described(options)}})


def _described(value: Any) -> str:
    """The value as text that is equal in every process: free of addresses and hash order."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_described(key)}: {_described(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_described, value)) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_described, value))) + "}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.tolist() if value.numel() <= SMALL_ELEMS else tuple(value.shape)}"
    if isinstance(value, functools.partial):
        return f"{_described(value.func)}{_described([value.args, value.keywords])}"
    return _ADDRESS.sub("", repr(value))


def _fields(rule: Any) -> dict[str, Any]:
    return {entry.name: getattr(rule, entry.name) for entry in dataclasses.fields(rule)}
