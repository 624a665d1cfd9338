"""The session of one of several workers: the user's loop on one side, the worker's node on the other."""

from __future__ import annotations

import dataclasses
import json
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradstream.errors import ClosedError, ConfigError, UserCodeError
from gradstream.job.registry import find_strategy, text_of_optimizer
from gradstream.model.tree import Tree
from gradstream.optim.base import Optimizer
from gradstream.session.arrays import ArrayLoop, rate_of
from gradstream.session.binding import ArrayBinding, ParameterBinding
from gradstream.session.bridge import LoopBridge
from gradstream.session.forward import BeforeForward
from gradstream.session.gradients import JointGradients
from gradstream.session.host import Host
from gradstream.session.joint import JointReplica, layout_of
from gradstream.session.loaders_takeover import Takeover
from gradstream.session.log import SessionLog
from gradstream.session.node import LoopNode
from gradstream.session.optimizer import DistributedOptimizer, take_over
from gradstream.session.place import WorkerPlacement
from gradstream.session.replica import LoopState
from gradstream.session.rules import options_of
from gradstream.session.samples import SampleCount
from gradstream.session.session import M, O, Session
from gradstream.session.shards import LoaderPart, part_of
from gradstream.session.worker_steps import WorkerSteps
from gradstream.strategies.base import Strategy

__all__ = ["WorkerSession", "enter", "running"]

K = TypeVar("K")

_running: WorkerSession | None = None


def running() -> WorkerSession | None:
    """The session of this process, where it is a worker and has joined."""
    return _running


def enter(session: WorkerSession) -> WorkerSession:
    """Makes a session that of this process."""
    global _running
    _running = session
    return session


class WorkerSession(Session):
    """The session of one of several workers.

    Args:
        place: which one.
        seed: of the order in which `shard` deals.
        host: what this process runs for all workers, to be waited for at the end; or None.
    """

    def __init__(self, place: WorkerPlacement, seed: int, host: Host | None = None) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self._place = place
        self._seed = seed
        self._host = host
        self._held: ParameterBinding | None = None
        self._handover: LoopBridge | None = None
        self._node: LoopNode | None = None
        self._rule: Optimizer | None = None
        self._arrays: ArrayLoop | None = None
        self._optimizer: DistributedOptimizer | WorkerSteps | None = None
        self._stepped: Sequence[torch.optim.Optimizer] = ()  # by the loop itself
        self._samples = SampleCount()
        self._takeover = Takeover(self._steps_behind)
        self._gradients: JointGradients | None = None
        self._guard: RemovableHandle | None = None
        self._closed = False
        self._steps_before = place.steps_before()  # None where the run begins
        self._skipped = 0
        self._log = SessionLog(place.rank, self._steps_made)
        self._looked = False  # the script has asked where the run goes on

    @property
    def step(self) -> int:
        """See `Session.step`."""
        self._looked = True
        return self._steps_made()

    def _steps_behind(self) -> int | None:
        """Steps since the run was resumed; below 0 while the script passes by those of before.

        None while there is nothing that makes steps, or it cannot be known whether the script passes by.
        """
        made = None if self._handover is None else self._handover.batches
        before = self._steps_before or 0
        if made is None or (before and not made and not self._skipped):
            return None
        return made + (self._skipped - before if self._skipped else 0)

    def _steps_made(self) -> int:
        made = 0 if self._handover is None else self._handover.steps
        return (self._steps_before or 0) + made

    @property
    def resumed(self) -> bool:
        """See `Session.resumed`."""
        self._looked = True
        return self._steps_before is not None

    def skip(self) -> bool:
        """See `Session.skip`."""
        self._looked = True
        if self._skipped == (self._steps_before or 0):
            if self._handover is not None:
                self._handover.iterations += 1
            return False
        self._skipped += 1
        if self._optimizer is not None:
            self._optimizer.passed()
        for optimizer in self._stepped:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        self._samples.clear()
        return True

    @property
    def aborted(self) -> bool:
        """Whether the run has ended because of another node: that one tells why."""
        return self._node is not None and self._node.aborted

    def wrap(self, model: M, optimizer: O, *, fused: bool = True) -> tuple[M, O]:
        """See `Session.wrap`."""
        modules, optimizers = _several(model, nn.Module), _several(optimizer, torch.optim.Optimizer)
        self._check_unused()
        if self._joint:
            self._wrap_jointly(modules, optimizers)
            return model, optimizer
        if len(modules) != 1 or len(optimizers) != 1:
            raise ConfigError(
                f"wrap: got {len(modules)} models and {len(optimizers)} optimizers; a strategy that "
                'exchanges parameters trains one with one: use "synchronous" or "allreduce"'
            )
        (module,), (one,) = modules, optimizers
        wrapped, held, rule = take_over(
            module, one, self._strategy, self.world_size, self._step, self._where, fused=fused
        )
        self._optimizer = wrapped
        self._begin(held, rule)
        module.register_forward_pre_hook(BeforeForward(self._samples.forward), with_kwargs=True)
        mine = wrapped if isinstance(wrapped, DistributedOptimizer) else one
        return model, cast(O, mine if isinstance(optimizer, torch.optim.Optimizer) else [mine])

    def _wrap_jointly(
        self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        for one in optimizers:
            if isinstance(one, torch.optim.LBFGS):
                raise ConfigError(
                    "wrap: LBFGS searches along a line by the loss that its closure returns, which is of "
                    "this worker's samples alone: workers would take different steps. Use SGD, Adam or an "
                    "other optimizer that makes its step of the gradient"
                )
        self._stepped = optimizers
        replica = LoopState(modules, optimizers)
        names, vector = layout_of(replica)
        self._begin(JointReplica(replica, vector), _named(*optimizers))
        assert self._handover is not None
        parameters = [replica.parameters[name] for name in names]
        joint = self._gradients = JointGradients(
            names,
            parameters,
            optimizers,
            vector,
            self._handover,
            self._taken_samples,
            self._samples.clear,
            self._log.step,
        )
        joint.hello()
        hook = BeforeForward(self._samples.forward)
        for module in modules:
            module.register_forward_pre_hook(hook, with_kwargs=True)
        self._guard = register_optimizer_step_pre_hook(joint.before_other_step)
        for one in optimizers:
            one.register_step_pre_hook(joint.before_step)
            one.register_step_post_hook(joint.after_step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Session.no_sync`."""
        if self._gradients is None:
            yield
            return
        with self._gradients.no_sync(nothing=self._samples.is_repeat):
            yield
        self._samples.use()

    def barrier(self) -> None:
        """See `Session.barrier`."""
        if self._gradients is not None and not self._closed:
            self._gradients.hello()

    def shard(self, data: Any, *, split: bool = False) -> Any:
        """See `Session.shard`."""
        if isinstance(data, tuple):
            return tuple(self.shard(one, split=split) for one in data)
        mine = object()
        note, over = (partial(call, loader=mine) for call in (self._samples.note, self._samples.over))
        strategy = self._strategy
        takeover = (
            self._takeover if strategy.survives_worker_loss and strategy.partitioning != "rounds" else None
        )
        return part_of(
            data, LoaderPart(self.rank, self.world_size, self._seed, split, note, self._joint, over, takeover)
        )

    def exchange(
        self, parameters: Tree, gradients: Tree, rule: Optimizer, samples: int | None = None
    ) -> Tree:
        """See `Session.exchange`."""
        if samples is not None:
            self.samples(samples)
        if self._joint:
            if self._gradients is not None:
                raise ConfigError(
                    "exchange: this session has a PyTorch module already; make steps with its optimizer"
                )
            if self._arrays is None:
                self._arrays = ArrayLoop(parameters)
                self._begin(self._arrays.held, _named(rule))
                assert self._handover is not None
                self._arrays.hello(self._handover)
            assert self._handover is not None
            return self._arrays.step(self._handover, parameters, gradients, rule, self._taken_samples())
        if self._held is None:
            self._rule = rule
            self._begin(ArrayBinding(parameters), text_of_optimizer(dataclasses.replace(rule, lr=1.0)))  # type: ignore[type-var]
        held = self._held
        if not isinstance(held, ArrayBinding):
            raise ConfigError(
                "exchange: this session has a PyTorch module already; make steps with its optimizer"
            )
        if type(rule) is not type(self._rule) or _without_lr(rule) != _without_lr(self._rule):
            raise ConfigError(f"exchange: the rule was {self._rule}, now it is {rule}; only lr may change")
        held.check(parameters)
        self._unchanged()
        held.give(gradients)
        self._step(rate_of(rule), math.nan)
        return parameters

    def samples(self, count: int) -> None:
        """See `Session.samples`."""
        if count < 1:
            raise ConfigError(f"samples({count}): expected at least 1")
        self._samples.say(count)

    def log(self, /, **values: Any) -> None:
        """See `Session.log`."""
        self._log.log(**values)

    def total(self, steps: int) -> None:
        """See `Session.total`."""
        self._log.total(steps)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """See `Session.evaluation`."""
        held, handover = self._held, self._handover
        if held is None or handover is None or self._closed or self._joint:
            yield
            return
        self._unchanged()
        own = handover.shown
        held.show(handover.fetch())
        try:
            yield
        finally:
            if own is not None:
                held.show(own)

    def close(self) -> None:
        """See `Session.close`. Raises what the run has ended with, if not well.

        Raises:
            ConfigError: the script has changed parameters since its last step. The model is kept as the
                servers have it, and `gradstream train` ends with status 1.
        """
        changed = None
        try:
            self._unchanged()
        except ConfigError as error:
            changed = error
        self.finish()
        if changed is not None:
            raise changed

    def finish(self) -> None:
        """Ends the session of a script that has ended: nobody looks at its parameters any more."""
        if self._closed:
            return
        self._closed = True
        self._leave()
        if self._handover is not None and self._node is not None:
            assert self._held is not None
            self._held.let_go()
            self._handover.end()
            self._node.join()
            if self._host is not None:
                self._host.join()
            error = self._handover.error or (self._host.error if self._host is not None else None)
            if error is not None:
                raise error

    def fail(self, error: BaseException) -> None:
        """The script has ended with an exception: the run ends for all, with its traceback. Never raises."""
        if self._closed or self._handover is None or self._node is None:
            return
        self._closed = True
        self._leave()
        if self._handover.error is None:
            text = "".join(traceback.format_exception(error))
            message = f"worker-{self.rank}: the script raised {type(error).__name__}: {error}"
            failure = error if isinstance(error, UserCodeError) else UserCodeError(message, text)
            self._handover.end(failure)
            self._node.join(FAREWELL_S)
        if self._host is not None:
            self._host.join(FAREWELL_S)

    def _check_unused(self) -> None:
        if self._handover is not None:
            raise ConfigError("wrap: this session has parameters already; one run trains one model")
        if self._closed:
            raise ClosedError("the session was closed: it trains one model, once")

    def _where(self) -> str:
        made = 0 if self._handover is None else self._handover.batches
        return f"worker-{self.rank}, step {(self._steps_before or 0) + made}"

    def _unchanged(self) -> None:
        """Raises ConfigError where the script has changed what the exchange would overwrite."""
        over = self._handover is None or self._closed or self._handover.error is not None
        if self._held is not None and not over:
            self._held.unchanged(self._where())

    def _leave(self) -> None:
        self._log.close()
        if self._guard is not None:
            self._guard.remove()

    def _begin(self, held: ParameterBinding, rule: str) -> None:
        self._check_unused()
        self._held = held
        self._handover = LoopBridge(held, self._log, joint=self._joint, on_step=held.keep)
        self._takeover.handover = self._handover
        self._node = LoopNode(self._place, held, self._handover, rule)
        self._node.start()
        self._handover.first()
        self._log.open()

    def _step(self, lr: float, loss: float) -> None:
        assert self._handover is not None
        self._handover.step(self._taken_samples(), lr, self._log.step(loss))

    def _taken_samples(self) -> int:
        """Samples behind the gradient that leaves now."""
        self._has_looked()
        return self._samples.take()

    def _has_looked(self) -> None:
        if self._steps_before and not self._looked:
            raise ConfigError(
                f"this run goes on from step {self._steps_before}, but the script begins its loop again: "
                "skip what it has done, `if session.skip(): continue`, or look at session.step"
            )

    @cached_property
    def _joint(self) -> bool:
        """Whether gradients alone are exchanged, and the loop's own optimizer makes each step."""
        return self._strategy.gives_mean

    @cached_property
    def _strategy(self) -> Strategy:
        job = self._place.job()
        return find_strategy(job.strategy, job.strategy_options)


def _named(*optimizers: object) -> str:
    """What the run is told of the optimizers, alike on all workers: names, and options but the rate."""
    options = [options_of(one.param_groups) for one in optimizers if isinstance(one, torch.optim.Optimizer)]
    kinds = "+".join(sorted({type(one).__name__ for one in optimizers}))
    return json.dumps({"class": kinds, "fields": {"options": repr(options)}})


def _several(given: Any, kind: type[K]) -> list[K]:
    several = list(given) if isinstance(given, list | tuple) else [given]
    for one in several:
        if not isinstance(one, kind):
            raise ConfigError(
                f"wrap: got {type(one).__name__}, expected a torch {kind.__name__}, or a list of them; "
                "for numpy arrays there is session.exchange"
            )
    if not several:
        raise ConfigError(f"wrap: got no {kind.__name__}; expected at least one")
    return several


FAREWELL_S = 15.0
"""For a script that has failed to tell the others."""


def _without_lr(rule: Any) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in rule.__dataclass_fields__ if name != "lr"}
