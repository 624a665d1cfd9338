"""The optimizer that a session gives back: torch's face, the servers' update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gradstream.errors import ConfigError
from gradstream.session.rules import ServerRule, options_of

__all__ = ["DistributedOptimizer"]

Step = Callable[[float, float], None]


class DistributedOptimizer(torch.optim.Optimizer):
    """Looks like the optimizer it stands for, and shares its `param_groups`.

    `step` hands the gradients over and returns when the parameters are those of the next step. The
    learning rate is read from `param_groups` at each step, so schedulers work, on this optimizer or
    on the one it stands for. What the rule remembers (momentum) lives on the servers: `state` is empty.

    Args:
        inner: the user's optimizer. It is not stepped any more.
        rule: what the servers do for it.
        step: called with the learning rate and the loss, NaN where unknown.
    """

    def __init__(self, inner: torch.optim.Optimizer, rule: ServerRule, step: Step) -> None:
        if inner.state:
            raise ConfigError(
                f"{type(inner).__name__} has made steps already, or loaded the state of some: what it "
                "remembers cannot be taken over by the servers; wrap it before its first step"
            )
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        self.inner = inner
        self.param_groups = inner.param_groups  # the very list: schedulers of either see one another
        self._rule = rule
        self._step = step
        self._options = options_of(inner.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all workers' run. Returns what the closure returned.

        Raises:
            ConfigError: options besides the learning rate have changed, or those of groups by different
                factors.
            PeerLostError, UserCodeError, ...: what has ended the run, on this worker or another.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, (now, then) in enumerate(zip(options_of(self.param_groups), self._options, strict=True)):
            if now != then:
                changed = {name: value for name, value in now.items() if value != then.get(name)}
                raise ConfigError(
                    f"parameter group {index}: {changed} was changed on the way; only lr may be"
                )
        self.passed()
        self._step(self._rule.rate(self.param_groups), math.nan if loss is None else float(loss))
        return loss

    def passed(self) -> None:
        """What torch's schedulers look at: a step was made, now or before the run was resumed."""
        for optimizer in (self, self.inner):
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigError once wrapped: the servers know the parameters that there were."""
        if hasattr(self, "_options"):
            raise ConfigError("add_param_group: add all parameters before session.wrap")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads `param_groups`: learning rates.

        Raises:
            ConfigError: the state holds more than that, momentum for one: it is the servers'.
        """
        if state_dict["state"]:
            raise ConfigError(
                "load_state_dict: what the rule remembers lives on the servers and cannot be loaded here"
            )
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = self.inner.param_groups = groups
