"""`join()`: a training loop of the user's own, on many workers.

    session = gradstream.join()
    model, optimizer = session.wrap(model, optimizer)

The loop stays as it is. `optimizer.step()` hands the gradients to a worker in another thread of the
same process, which does with them what its strategy says, and returns with the parameters of the next
step. Run by plain `python`, a session does nothing at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from gradstream.errors import ClosedError, ConfigError, UserCodeError
from gradstream.model.tree import Tree
from gradstream.optim.base import Optimizer
from gradstream.registry import find_strategy, text_of_optimizer
from gradstream.session.arrays import ArrayLoop, LoneArrays, rate_of
from gradstream.session.gradients import JointGradients
from gradstream.session.handover import Handover
from gradstream.session.held import Held, HeldArrays, HeldModule
from gradstream.session.host import Host
from gradstream.session.joint import JointReplica, layout_of
from gradstream.session.node import LoopNode
from gradstream.session.optimizer import DistributedOptimizer
from gradstream.session.place import Assignment
from gradstream.session.replica import Replica
from gradstream.session.rules import options_of, rule_of
from gradstream.session.samples import Samples
from gradstream.session.shards import Part, part_of

__all__ = ["LoneSession", "Session", "WorkerSession", "enter", "running"]

K = TypeVar("K")
M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])
O = TypeVar("O", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])  # noqa: E741

_running: WorkerSession | None = None


def running() -> WorkerSession | None:
    """The session of this process, where it is a worker and has joined."""
    return _running


def enter(session: WorkerSession) -> WorkerSession:
    """Makes a session that of this process."""
    global _running
    _running = session
    return session


class Session:
    """A training loop's part in a run. Made by `gradstream.join`; also a context manager.

    Attributes:
        rank: of this worker, from 0.
        world_size: how many workers there are.
        step: how many steps this worker has made, those before the run was resumed included. Alone, where
            nobody counts, 0.
        resumed: whether the run goes on from a checkpoint.
        is_main: whether this is the worker that should print and write files.
    """

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """How many steps this worker has made, those before the run was resumed included."""
        return 0

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return False

    def skip(self) -> bool:
        """Whether the step that the loop comes to was made before the run was resumed.

        In a resumed run it is True for as many calls as this worker has made steps, then False, as it
        always is in a run that begins:

            for inputs, targets in loader:
                if session.skip():
                    continue

        So the loop runs through its data to where it was, without computing. What it keeps by step besides,
        a scheduler for one, it steps there as well.
        """
        return False

    def wrap(self, model: M, optimizer: O) -> tuple[M, O]:
        """The model and the optimizer to use in the place of yours. Once per session.

        `synchronous` and `allreduce` give both back as they are. From here on everything that the model holds
        is as on worker 0, and at the end of each backward `p.grad` is the mean over the samples of all
        workers; the step is your optimizer's, on every worker.

        Other strategies give an optimizer back that exchanges parameters. Trained are those that it has and
        that require a gradient; all else (buffers, frozen parameters) stays each worker's own; a saved model
        has the mean of the buffers, and worker 0's of the rest.

        Waits until all workers are there.

        Args:
            model: a module. Under `synchronous` and `allreduce` also a list or tuple of modules; else in main
                memory, of float32 or float64 parameters.
            optimizer: of `torch.optim`, or a list or tuple. Under `synchronous` and `allreduce` any but
                LBFGS; else `SGD`, `Adam`, `AdamW` or `Adagrad`, before its first step: the update is made on
                the servers, with the learning rate that `param_groups` has at each step.

        Raises:
            ConfigError: an optimizer or a model that cannot be taken over; says what to use.
            RefusedError, DeadlineError, PeerLostError: the run did not come about; says who is missing.
        """
        return model, optimizer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds up this worker's own gradients; the next backward outside joins their sum.

        For minibatches that are accumulated: one exchange for all of them. Only where gradients are joined;
        other strategies exchange at each step in any case.
        """
        yield

    def shard(self, data: Any, *, split: bool = False) -> Any:
        """This worker's part of data that was made for one process.

        Args:
            data: a `DataLoader` or any iterable of minibatches: minibatch k goes to worker k mod W, in
                the order of one process, which must be the same on all workers (that of a DataLoader
                that shuffles is). A map-style `Dataset`, an array or a tensor: sample i goes to worker
                i mod W. A tuple of these: the part of each.
            split: minibatches are not dealt, but each is split: sample i of it goes to worker i mod W.
                So there are as many steps as alone; a synchronous step has the samples of one alone.
        """
        return data

    def exchange(
        self, parameters: Tree, gradients: Tree, rule: Optimizer, samples: int | None = None
    ) -> Tree:
        """One step of numpy parameters, in place: what stands where `w -= lr * gradient` stood.

        Args:
            parameters: arrays of float32 or float64: one, or a dict, list or tuple. The same
                arrays at each call; they are written. All workers must begin with the same values.
            gradients: likewise, means over this worker's samples.
            rule: `gradstream.SGD(lr)` or another update rule. Only its `lr` may change on the way.
            samples: behind the gradients; None takes the length of the minibatches that `shard`
                has given since the last step, or 1.

        Returns:
            `parameters`.
        """
        del samples
        return self._alone.step(parameters, gradients, rule)

    def samples(self, count: int) -> None:
        """Says how many samples are behind the next step, where that cannot be seen.

        Otherwise it is the length of the first tensor that the model was called with, in training mode
        and with gradients on, added up since the last step.
        """

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, the model has the parameters that are on the servers now.

        In between steps of a strategy whose workers differ that is the common model. Each worker gets
        the parameters of the moment at which it asks.
        """
        yield

    def close(self) -> None:
        """Ends this worker's part. Waits for the others; then the model is final, the same on all workers.

        No step can follow. Calling it twice changes nothing; a script that ends without it is closed then.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    @property
    def _alone(self) -> LoneArrays:
        alone: LoneArrays = self.__dict__.setdefault("_alone_arrays", LoneArrays())
        return alone


class LoneSession(Session):
    """The session of a process that is alone: gives everything back as it is."""


class WorkerSession(Session):
    """The session of one of several workers.

    Args:
        place: which one.
        seed: of the order in which `shard` deals.
        host: what this process runs for all workers, to be waited for at the end; or None.
    """

    def __init__(self, place: Assignment, seed: int, host: Host | None = None) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self._place = place
        self._seed = seed
        self._host = host
        self._held: Held | None = None
        self._handover: Handover | None = None
        self._node: LoopNode | None = None
        self._rule: Optimizer | None = None
        self._arrays: ArrayLoop | None = None
        self._optimizer: DistributedOptimizer | None = None
        self._samples = Samples()
        self._gradients: JointGradients | None = None
        self._closed = False
        self._steps_before = place.steps_before()  # None where the run begins
        self._skipped = 0
        self._looked = False  # the script has asked where the run goes on

    @property
    def step(self) -> int:
        """See `Session.step`."""
        self._looked = True
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
        self._samples.taken()
        return True

    @property
    def aborted(self) -> bool:
        """Whether the run has ended because of another node: that one tells why."""
        return self._node is not None and self._node.aborted

    def wrap(self, model: M, optimizer: O) -> tuple[M, O]:
        """See `Session.wrap`."""
        modules, optimizers = _several(model, nn.Module), _several(optimizer, torch.optim.Optimizer)
        if self._joint:
            self._wrap_jointly(modules, optimizers)
            return model, optimizer
        if len(modules) != 1 or len(optimizers) != 1:
            raise ConfigError(
                f"wrap: got {len(modules)} models and {len(optimizers)} optimizers; a strategy that "
                'exchanges parameters trains one with one: use "synchronous" or "allreduce"'
            )
        (module,), (one,) = modules, optimizers
        rule = rule_of(one)
        groups = one.param_groups
        trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        wrapped = self._optimizer = DistributedOptimizer(one, rule, self._step)
        held = HeldModule(module, trained)
        self._begin(held, rule.text(held.ranges([group["params"] for group in groups])))
        module.register_forward_pre_hook(self._samples.forward, with_kwargs=True)
        return model, cast(O, wrapped if isinstance(optimizer, torch.optim.Optimizer) else [wrapped])

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
        replica = Replica(modules, optimizers)
        names, vector = layout_of(replica)
        self._begin(JointReplica(replica, vector), _named(*optimizers))
        assert self._handover is not None
        parameters = [replica.parameters[name] for name in names]
        joint = self._gradients = JointGradients(
            names,
            parameters,
            vector,
            self._handover,
            self._taken_samples,
            self._samples.taken,
            lambda: math.nan,
        )
        joint.hello()
        for module in modules:
            module.register_forward_pre_hook(self._samples.forward, with_kwargs=True)
        for one in optimizers:
            one.register_step_pre_hook(joint.before_step)
            one.register_step_post_hook(joint.after_step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Session.no_sync`."""
        if self._gradients is None:
            yield
            return
        with self._gradients.no_sync():
            yield

    def shard(self, data: Any, *, split: bool = False) -> Any:
        """See `Session.shard`."""
        if isinstance(data, tuple):
            return tuple(self.shard(one, split=split) for one in data)
        return part_of(data, Part(self.rank, self.world_size, self._seed, split, self._samples.dealt))

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
            self._begin(HeldArrays(parameters), text_of_optimizer(dataclasses.replace(rule, lr=1.0)))  # type: ignore[type-var]
        held = self._held
        if not isinstance(held, HeldArrays):
            raise ConfigError(
                "exchange: this session has a PyTorch module already; make steps with its optimizer"
            )
        if type(rule) is not type(self._rule) or _without_lr(rule) != _without_lr(self._rule):
            raise ConfigError(f"exchange: the rule was {self._rule}, now it is {rule}; only lr may change")
        held.check(parameters)
        held.give(gradients)
        self._step(rate_of(rule), math.nan)
        return parameters

    def samples(self, count: int) -> None:
        """See `Session.samples`."""
        if count < 1:
            raise ConfigError(f"samples({count}): expected at least 1")
        self._samples.said = count

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """See `Session.evaluation`."""
        held, handover = self._held, self._handover
        if held is None or handover is None or self._closed or self._joint:
            yield
            return
        own = handover.shown
        held.show(handover.fetch())
        try:
            yield
        finally:
            if own is not None:
                held.show(own)

    def close(self) -> None:
        """See `Session.close`. Raises what the run has ended with, if not well."""
        if self._closed:
            return
        self._closed = True
        if self._handover is not None and self._node is not None:
            assert self._held is not None
            self._held.let_go()
            self._handover.end()
            self._node.join()
            if self._host is not None:
                self._host.join()
            error = self._handover.error
            if error is not None:
                raise error

    def fail(self, error: BaseException) -> None:
        """The script has ended with an exception: the run ends for all, with its traceback. Never raises."""
        if self._closed or self._handover is None or self._node is None:
            return
        self._closed = True
        if self._handover.error is None:
            text = "".join(traceback.format_exception(error))
            message = f"worker-{self.rank}: the script raised {type(error).__name__}: {error}"
            failure = error if isinstance(error, UserCodeError) else UserCodeError(message, text)
            self._handover.end(failure)
            self._node.join(FAREWELL_S)
        if self._host is not None:
            self._host.join(FAREWELL_S)

    def _begin(self, held: Held, rule: str) -> None:
        if self._handover is not None:
            raise ConfigError("wrap: this session has parameters already; one run trains one model")
        if self._closed:
            raise ClosedError("the session was closed")
        self._held = held
        self._handover = Handover(held, joint=self._joint, on_step=held.keep)
        self._node = LoopNode(self._place, held, self._handover, rule)
        self._node.start()
        self._handover.first()

    def _step(self, lr: float, loss: float) -> None:
        assert self._handover is not None
        self._handover.step(self._taken_samples(), lr, loss)

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
        job = self._place.job()
        return find_strategy(job.strategy, job.strategy_options).gives_mean


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
