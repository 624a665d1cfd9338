"""The steps of a loop whose own optimizers make them, and their exchange.

    joint steps   `allreduce`, `synchronous`    backward: p.grad ← its mean over all workers ──▶ step()
    local steps   `local-sgd`, pairs            step(), H times, then the parameters are exchanged
    own steps     `diloco` and its kin          step(); the worker hears of it, and exchanges when it likes

A run with phases has joint steps first and local ones after them. The session goes from one to the other at the end of
a step, in place: no line of the script runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradstream.errors import ConfigError
from gradstream.job.overrides import text_of_optimizer
from gradstream.job.plan import RunPlan
from gradstream.session.binding import ModuleBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.gradient_states import WrappedParameters
from gradstream.session.gradients import GradientReducer
from gradstream.session.local import LocalModule, LocalRound
from gradstream.session.log import SessionLog
from gradstream.session.node import RunConnection
from gradstream.session.optimizer import around_each_step
from gradstream.session.progress import LoopProgress
from gradstream.session.replica import ReplicaBinding
from gradstream.session.rules import STEPS, description_of, objection
from gradstream.session.samples import whole
from gradstream.strategies.base import PeerStrategy, ServerStrategy, Strategy

SLOW_STEPS = 3
"""Steps of strategy "auto" that measure links over which a sum takes long."""


def loop_makes_steps(strategy: Strategy, workers: int) -> bool:
    """Whether the loop's own optimizers make its steps under this strategy."""
    if strategy.gives_mean or strategy.local_rounds:
        return True
    # The servers merge parameters that each worker trains, without optimizers' states.
    merges = isinstance(strategy, ServerStrategy) and strategy.pushes != "gradients"
    return merges and not objection(strategy, workers)


class LoopSteps:
    """The steps of a loop's models by its own optimizers.

    Args:
        connection: the run.
        progress: where the loop is.
        log: receives the losses of the steps.
        modules: the script's models.
        optimizers: the script's optimizers.

    Attributes:
        rule: what the run's description says of the optimizers.

    Raises:
        ConfigError: the models or optimizers cannot be used, in this phase or a later one.
    """

    def __init__(
        self,
        connection: RunConnection,
        progress: LoopProgress,
        log: SessionLog,
        modules: Sequence[nn.Module],
        optimizers: Sequence[TorchOptimizer],
    ) -> None:
        strategy = connection.strategy
        has_rounds = strategy.gives_mean or strategy.local_rounds
        self.rule = description_of(*optimizers) if has_rounds else text_of_optimizer(STEPS)
        self._connection = connection
        self._progress = progress
        self._log = log
        self._modules = modules
        self._optimizers = optimizers
        self._binding: ReplicaBinding | LocalModule | None = None
        self._last: int | None = None  # step of the present phase
        self._reducer: GradientReducer | None = None
        self._round: LocalRound | None = None
        self._hooks: Sequence[RemovableHandle] = ()  # for the steps of all optimizers of this process
        if connection.job.phases:
            self._check_phases()
        else:
            self._bound(strategy)

    @property
    def _bridge(self) -> LoopBridge:
        bridge = self._connection.bridge
        assert bridge is not None
        return bridge

    def bind(self, plan: RunPlan) -> ReplicaBinding | LocalModule:
        """The binding for a plan of the run. The node's thread calls it, while the loop's own one waits."""
        if self._connection.job.phases:
            local_steps = plan.strategy.local_steps if plan.strategy.local_rounds else 1
            self._progress.takeover.steps_a_round, self._last = local_steps, plan.loop_steps
        return self._bound(plan.strategy)

    def _bound(self, strategy: Strategy) -> ReplicaBinding | LocalModule:
        if strategy.gives_mean:
            self._binding = self._binding or ReplicaBinding(self._modules, self._optimizers)
        elif not isinstance(self._binding, LocalModule):
            states = None if self._binding is None else self._binding.states
            self._binding = LocalModule(
                *_joined(self._modules, self._optimizers),
                in_pairs=isinstance(strategy, PeerStrategy),
                counted=self._progress.samples,
                states=self._progress.keep_states(self._optimizers, states),
                is_first=states is None,
            )
        return self._binding

    def begin(self) -> None:
        """The loop has joined its run."""
        if self._connection.job.phases:
            for optimizer in self._optimizers:
                around_each_step(optimizer, lambda: None, lambda _: self._after_joint_step())
        self._begin_steps()

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The loop calls a model."""
        if self._round is not None:
            self._round.called(module, args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Session.no_sync`."""
        if self._reducer is None:
            yield
            return
        with self._reducer.no_sync():
            yield
        self._progress.samples.use()

    def synchronize(self) -> None:
        """Waits for all workers, where they make their steps together."""
        if self._reducer is not None:
            self._reducer.synchronize()

    def remove_hooks(self) -> None:
        """The loop makes no further step."""
        for hook in self._hooks:
            hook.remove()

    def end(self) -> None:
        """The loop has ended: exchanges what is left."""
        if self._reducer is not None:
            self._reducer.end()
        elif self._round is not None:
            self._round.end()

    # ---- phases -------------------------------------------------------------------------

    def _check_phases(self) -> None:
        """Raises ConfigError if a later phase could not begin."""
        if len(self._optimizers) > 1:
            raise ConfigError(
                f"session.wrap: got {len(self._optimizers)} optimizers, expected one: this run has phases, whose steps "
                "are those of one optimizer. Give it the parameters of all models, in groups; or leave the phases out"
            )
        ModuleBinding(*_joined(self._modules, self._optimizers))  # raises

    def _begin_steps(self) -> None:
        """The loop goes on with the binding of the present plan."""
        if isinstance(self._binding, LocalModule):
            self._begin_local(self._binding)
        elif self._binding is not None:
            self._begin_joint(self._binding)

    @property
    def _is_phase_over(self) -> bool:
        if self._last is None:
            return False
        return self._progress.made >= (min(self._last, SLOW_STEPS) if self._bridge.is_slow else self._last)

    def _next_phase(self) -> None:
        self._bridge.end_phase()
        self._progress.takeover.first_of_phase = self._bridge.before[0]

    # ---- joint steps --------------------------------------------------------------------

    def _begin_joint(self, binding: ReplicaBinding) -> None:
        progress, entry = self._progress, self._progress.entry
        parameters = [binding.parameters[name] for name in binding.names]
        reducer = self._reducer = GradientReducer(
            WrappedParameters(binding.names, parameters, self._optimizers),
            binding.vector,
            self._bridge,
            progress.take,
            progress.samples,
            self._log.step,
        )
        if entry.came is None:
            reducer.synchronize()
        else:
            reducer.rounds.load(entry.came["rounds"])
        entry.rounds = reducer.rounds.saved
        binding.states.watch(check=self._connection.keeps)
        self._hooks = [register_optimizer_step_pre_hook(reducer.before_other_step)]
        for optimizer in self._optimizers:
            self._hooks += [
                optimizer.register_step_pre_hook(reducer.before_step),
                optimizer.register_step_post_hook(reducer.after_step),
            ]

    def _after_joint_step(self) -> None:
        """The loop has made a step of which all workers have the same parameters."""
        reducer = self._reducer
        if reducer is None or reducer.is_open or not self._is_phase_over:
            return
        reducer.end()
        self._next_phase()
        if not self._connection.strategy.gives_mean:
            reducer.release()
            self.remove_hooks()
            self._reducer, self._progress.entry.rounds = None, lambda: None
            self._begin_steps()

    # ---- local steps --------------------------------------------------------------------

    def _begin_local(self, binding: LocalModule) -> None:
        bridge, progress, strategy = self._bridge, self._progress, self._connection.strategy
        optimizers, is_again = self._optimizers, self._round is not None
        is_new = progress.entry.came is not None and not bridge.goes_on
        steps = strategy.local_steps if strategy.local_rounds else 1
        self._round = LocalRound(bridge, steps, binding, len(optimizers), is_new=is_new)
        if is_again:
            return

        first_evaluation = list[float]()  # its samples: LBFGS makes several in a step, of the same ones

        def evaluated() -> None:
            first_evaluation.append(progress.take())

        def made(optimizer: TorchOptimizer, loss: float) -> None:
            if progress.is_in_model():
                first_evaluation.clear()
                return
            binding.watch.check_groups(progress.where, optimizer.param_groups)
            one_round = self._round
            assert one_round is not None
            take = partial(progress.take, is_new=not one_round.is_further(optimizer))
            samples, _ = whole(first_evaluation[0] if first_evaluation else take())
            first_evaluation.clear()
            one_round.stepped(samples, self._log.step(loss), optimizer)
            if self._is_phase_over:
                one_round.end()
                self._next_phase()
                self._begin_steps()

        def before() -> None:
            bridge.check_open()
            self._connection.check_unchanged(progress.where)

        for optimizer in optimizers:
            around_each_step(optimizer, before, partial(made, optimizer), evaluated)


def _joined(
    modules: Sequence[nn.Module], optimizers: Sequence[TorchOptimizer]
) -> tuple[nn.Module, list[nn.Parameter]]:
    """All models as one, and the parameters that are trained."""
    groups = [group["params"] for torch_optimizer in optimizers for group in torch_optimizer.param_groups]
    trained = {id(p): p for group in groups for p in group if p.requires_grad}
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules), list(trained.values())
