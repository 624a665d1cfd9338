"""The optimizer that `Session.wrap` returns under strategies that exchange parameters.

fused           DistributedOptimizer    step: gradients ──▶ the shards' rule ──▶ parameters
on the workers  the user's own          step: its own, then before - after ──▶ SGD(1) ──▶ parameters
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import override

from gradstream.errors import ConfigError
from gradstream.job.overrides import text_of_optimizer
from gradstream.session.binding import ModuleBinding
from gradstream.session.rules import ON_WORKERS, STEPS, ServerRule, is_fresh, options_of, rule_for
from gradstream.session.watch import ParameterWatch
from gradstream.strategies.base import Strategy

K = TypeVar("K")

Step = Callable[[float, float], None]
"""Submits a step with its learning rate and loss, and waits for the parameters of the next step."""


def take_over(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    workers: int,
    step: Step,
    where: Callable[[], str],
    *,
    fused: bool = True,
) -> tuple[torch.optim.Optimizer, ModuleBinding, str]:
    """Prepares a model and its optimizer for a strategy that exchanges parameters.

    Args:
        model: the user's module.
        optimizer: the user's optimizer.
        strategy: strategy of the run.
        workers: number of workers.
        step: submits a step; see `Step`.
        where: returns the worker and step, for messages.
        fused: see `rule_for`.

    Returns:
        (the optimizer for the loop, the binding of the parameters, the shards' update rule as text).

    Raises:
        ConfigError: the optimizer cannot be used under this strategy.
    """
    rule = rule_for(optimizer, strategy, workers, fused=fused)
    groups = [group["params"] for group in optimizer.param_groups]
    trained = [parameter for group in groups for parameter in group if parameter.requires_grad]
    if rule is None:
        steps = StepBinding(model, trained)

        def before() -> None:
            steps.check_unchanged(where())
            steps.begin_step()

        def after(loss: float) -> None:
            steps.watch.check_groups(where(), optimizer.param_groups)
            step(STEPS.lr, loss)  # type: ignore[arg-type]  # a number, never a schedule

        around_each_step(optimizer, before, after)
        return optimizer, steps, text_of_optimizer(STEPS)
    binding = ModuleBinding(model, trained)
    moves = bool(getattr(strategy, "local_momentum", 0.0))  # the worker's momentum, whatever the rule is
    wrapped = DistributedOptimizer(optimizer, rule, step, binding.watch, where, moves=moves)
    return wrapped, binding, rule.text(binding.ranges(groups))


def as_list(argument: Any, kind: type[K]) -> list[K]:
    """The arguments of `Session.wrap` as a list. Raises ConfigError unless all are of that type."""
    items = list(argument) if isinstance(argument, list | tuple) else [argument]
    for item in items:
        if not isinstance(item, kind):
            raise ConfigError(
                f"session.wrap: got {type(item).__name__}, expected a torch {kind.__name__}, or a list of "
                "them; for numpy arrays there is session.exchange"
            )
        if isinstance(item, nn.Module):
            _check_made(item)
    if not items:
        raise ConfigError(f"session.wrap: got an empty list, expected at least one torch {kind.__name__}")
    return items


def _check_made(module: nn.Module) -> None:
    """Raises ConfigError for a module with lazy layers, whose shapes are not known yet."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"session.wrap: {name!r} is lazy: it has no shape until the model is called, and the workers must have "
                "the same model now: call the model on a minibatch before session.wrap, or give its layers their sizes"
            )


class DistributedOptimizer(torch.optim.Optimizer):
    """Replaces a user's optimizer in the loop, while the servers make its updates.

    `step` pushes the gradients, and returns when the model has the parameters of the next step. Each step reads the
    learning rate from `param_groups`, which both optimizers share, so a scheduler works on either. `state` is empty:
    the servers hold the state of the update rule (momentum).

    Args:
        inner: the user's optimizer, whose `step` is no longer called.
        rule: the update rule that the servers apply instead.
        step: submits a step to the worker; see `Step`.
        watch: checks the exchanged parameters; None checks nothing.
        where: returns the worker and step, for messages.
        moves: whether a step may change parameters without a gradient, whatever the rule.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        rule: ServerRule,
        step: Step,
        watch: ParameterWatch | None = None,
        where: Callable[[], str] = str,
        *,
        moves: bool = False,
    ) -> None:
        if not is_fresh(inner, rule.optimizer):
            raise ConfigError(
                f"session.wrap: {type(inner).__name__} has made steps already, or loaded the state of earlier "
                "ones (load_state_dict); the servers begin with a fresh state: wrap it before its first step. "
                f"{ON_WORKERS}"
            )
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        self.inner = inner
        self.param_groups = inner.param_groups  # the same list: schedulers of both optimizers change it
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
        """Makes one step of the run. Returns what the closure returned.

        Raises:
            ConfigError: an option besides the learning rate has changed, or the rates of groups have changed
                by different factors; or the script has changed parameters, gradients or groups in a way
                that the servers do not see. The step is not made.
            GradstreamError: the error that ended the run, on any worker.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        for optimizer in (self, self.inner):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look at it
        self._step(self._rule.rate(self.param_groups), _loss_of(loss))
        return loss

    def _check(self) -> None:
        inner, where = self.inner, self._where()
        if self._watch is not None:
            self._watch.check(where)
            self._watch.check_groups(where, self.param_groups)
        if _members(inner) != self._members:
            raise ConfigError(
                f"{where}: the parameter groups of your {type(inner).__name__} have other parameters than at "
                "session.wrap, where the servers learned which rule updates which parameter: do not move "
                f"parameters between groups. {ON_WORKERS}"
            )
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
            raise ConfigError(
                f"{where}: your {type(inner).__name__} has a step hook, which is never called: the servers "
                f"make the steps. Call the hook's function before or after step() yourself. {ON_WORKERS}"
            )
        for index, (now, then) in enumerate(zip(options_of(self.param_groups), self._options, strict=True)):
            if now != then:
                changed = {name: value for name, value in now.items() if value != then.get(name)}
                raise ConfigError(
                    f"{where}: parameter group {index} was changed after session.wrap: {changed}; only lr may "
                    f"change. {ON_WORKERS}"
                )
            if self._watch is not None:
                if self._moved[index]:
                    self._watch.check_gradients(where, self.param_groups[index], type(inner).__name__)
                if not self._sparse[index]:
                    self._watch.check_layouts(where, self.param_groups[index], type(inner).__name__)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ConfigError: the servers have only the parameters that the optimizer had at `wrap`."""
        if hasattr(self, "_options"):
            raise ConfigError(
                "add_param_group: the optimizer is wrapped already, and the servers know only the parameters "
                f"that it had: add all parameters before session.wrap. {ON_WORKERS}"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads `param_groups`, with their learning rates.

        Raises:
            ConfigError: the dict also has a state (momentum), which the servers hold.
        """
        if state_dict["state"]:
            raise ConfigError(
                "load_state_dict: the dict has a state (momentum, running means), but the servers hold the "
                "state of this optimizer, and it cannot be loaded here: resume the run from its checkpoint "
                f"(gradstream resume). {ON_WORKERS}"
            )
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = self.inner.param_groups = groups


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


class StepBinding(ModuleBinding):
    """A `ModuleBinding` for an optimizer that steps on the worker: it submits the difference of each step.

    SGD at rate 1 with the gradient before - after makes the same step, up to the rounding of w - (w - w').
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(module, parameters)
        self._shown = self._before = torch.empty(0)

    def begin_step(self) -> None:
        """Saves the parameters before the optimizer's step. Called from the user's thread."""
        if len(self._before) != len(self._shown):
            self._before = torch.empty_like(self._shown)
        self._before.copy_(self._shown)

    @override
    def set_parameters(self, parameters: torch.Tensor) -> None:
        super().set_parameters(parameters)
        self._shown = parameters

    def copy_gradient(self, gradient: torch.Tensor) -> None:
        """Writes before - after, and restores the parameters from before the step."""
        before = self.layout.views(self._before)
        for parameter, (_, was), (_, view) in zip(
            self._parameters, before, self.layout.views(gradient), strict=True
        ):
            torch.sub(was, parameter.detach(), out=view)
        self._shown.copy_(self._before)  # the worker makes the step, together with the other workers' steps


def around_each_step(
    optimizer: torch.optim.Optimizer,
    before: Callable[[], None],
    after: Callable[[float], None],
    evaluated: Callable[[], None] = lambda: None,
) -> None:
    """Calls functions before and after each step of an optimizer, which keeps its state and hooks.

    Its `step` is wrapped, so closures, hooks and skipped parameters work for any optimizer, and the script may change
    its options and drop or load its state.

    Args:
        optimizer: the user's optimizer.
        before: called before each step.
        after: called after each step with the loss that the step returned, or NaN.
        evaluated: called after each call of a step's closure.
    """
    original = optimizer.step

    @functools.wraps(original)  # keeps the mark of a scheduler that was made before
    def stepped(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before()
        closure = args[0] if args else kwargs.get("closure")

        def evaluate() -> Any:
            assert closure is not None
            loss = closure()
            evaluated()
            return loss

        if closure is not None and args:
            args = (evaluate, *args[1:])
        elif closure is not None:
            kwargs["closure"] = evaluate
        result = original(*args, **kwargs)
        after(_loss_of(result))
        return result

    optimizer.step = types.MethodType(stepped, optimizer)  # type: ignore[method-assign]


def _loss_of(result: Any) -> float:
    """The loss that a step has returned; NaN if it returned something else."""
    try:
        return float(result.detach() if isinstance(result, torch.Tensor) else result)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
