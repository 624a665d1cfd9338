"""The optimizer that a session gives back: torch's face, the servers' update.

fused           DistributedOptimizer    step: gradients ──▶ the shards' rule ──▶ parameters
on the workers  the user's own          step: its own, then before - after ──▶ SGD(1) ──▶ parameters
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradstream.errors import ConfigError
from gradstream.job.registry import text_of_optimizer
from gradstream.session.binding import ModuleBinding
from gradstream.session.rules import ON_WORKERS, STEPS, ServerRule, is_fresh, options_of, rule_for
from gradstream.session.watch import ShownParameters
from gradstream.session.worker_steps import BoundSteps, Step, WorkerSteps, loss_of
from gradstream.strategies.base import Strategy

__all__ = ["DistributedOptimizer", "take_over"]


def take_over(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    workers: int,
    step: Step,
    where: Callable[[], str],
    *,
    fused: bool = True,
) -> tuple[DistributedOptimizer | WorkerSteps, ModuleBinding, str]:
    """(what is stepped, what holds the parameters, the shards' rule as text) of an optimizer.

    Args:
        step: see `DistributedOptimizer`.
        where: names worker and step, for messages.
        fused: see `rule_for`.

    Raises:
        ConfigError: it cannot be taken over under this strategy; says what to use.
    """
    rule = rule_for(optimizer, strategy, workers, fused=fused)
    groups = [group["params"] for group in optimizer.param_groups]
    trained = [parameter for group in groups for parameter in group if parameter.requires_grad]
    if rule is None:
        steps = BoundSteps(model, trained)
        return WorkerSteps(optimizer, steps, step, where), steps, text_of_optimizer(STEPS)
    held = ModuleBinding(model, trained)
    moves = bool(getattr(strategy, "local_momentum", 0.0))  # whatever the rule does without a gradient
    wrapped = DistributedOptimizer(optimizer, rule, step, held.watch, where, moves=moves)
    return wrapped, held, rule.text(held.ranges(groups))


class DistributedOptimizer(torch.optim.Optimizer):
    """Looks like the optimizer it stands for, and shares its `param_groups`.

    `step` hands the gradients over and returns when the parameters are those of the next step. The
    learning rate is read from `param_groups` at each step, so schedulers work, on this optimizer or
    on the one it stands for. What the rule remembers (momentum) lives on the servers: `state` is empty.

    Args:
        inner: the user's optimizer. It is not stepped any more.
        rule: what the servers do for it.
        step: called with the learning rate and the loss, NaN where unknown.
        watch: knows the parameters that are exchanged; None looks at nothing.
        where: names worker and step, for messages.
        moves: parameters may move in a step without a gradient, whatever the rule is.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        rule: ServerRule,
        step: Step,
        watch: ShownParameters | None = None,
        where: Callable[[], str] = str,
        *,
        moves: bool = False,
    ) -> None:
        if not is_fresh(inner, rule.optimizer):
            raise ConfigError(
                f"{type(inner).__name__} has made steps already, or loaded the state of some: what it "
                f"remembers cannot be taken over by the servers; wrap it before its first step. {ON_WORKERS}"
            )
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        self.inner = inner
        self.param_groups = inner.param_groups  # the very list: schedulers of either see one another
        self._rule = rule
        self._step = step
        self._watch = watch
        self._where = where
        numbers = range(len(rule.groups))
        self._moved = [moves or rule.moves(number) for number in numbers]
        self._sparse = [rule.takes_sparse(number) for number in numbers]
        self._options = options_of(inner.param_groups)
        self._members = _members(inner)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all workers' run. Returns what the closure returned.

        Raises:
            ConfigError: options besides the learning rate have changed, or those of groups by different
                factors; or the script has done with parameters, gradients or groups what the servers could
                not follow. Nothing of the step was made.
            PeerLostError, UserCodeError, ...: what has ended the run, on this worker or another.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        self.passed()
        self._step(self._rule.rate(self.param_groups), loss_of(loss))
        return loss

    def _check(self) -> None:
        inner, where = self.inner, self._where()
        if self._watch is not None:
            self._watch.check(where)
            self._watch.check_groups(where, self.param_groups)
        if _members(inner) != self._members:
            raise ConfigError(
                f"{where}: the groups of the optimizer have other parameters than at session.wrap, where the "
                f"servers were told which rule is whose: leave them as they are. {ON_WORKERS}"
            )
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
            raise ConfigError(
                f"{where}: a hook was registered for the steps of your {type(inner).__name__}, which makes "
                f"none: the servers do. Call what it does before or after step(). {ON_WORKERS}"
            )
        for index, (now, then) in enumerate(zip(options_of(self.param_groups), self._options, strict=True)):
            if now != then:
                changed = {name: value for name, value in now.items() if value != then.get(name)}
                raise ConfigError(
                    f"parameter group {index}: {changed} was changed on the way; only lr may be. {ON_WORKERS}"
                )
            if self._watch is not None:
                if self._moved[index]:
                    self._watch.check_gradients(where, self.param_groups[index], type(inner).__name__)
                if not self._sparse[index]:
                    self._watch.check_layouts(where, self.param_groups[index], type(inner).__name__)

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


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
