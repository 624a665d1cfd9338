"""`join()`: a training loop of the user's own, on many workers.

    session = gradstream.join()
    model, optimizer = session.wrap(model, optimizer)

The loop stays as it is. `optimizer.step()` hands the gradients to a worker in another thread of the
same process, which does with them what its strategy says, and returns with the parameters of the next
step. Run by plain `python`, a session does nothing at all.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from gradstream.errors import ClosedError, ConfigError, UserCodeError
from gradstream.model.tree import Tree
from gradstream.optim.base import Optimizer
from gradstream.registry import find_strategy, text_of_optimizer
from gradstream.session.handover import Handover
from gradstream.session.held import Held, HeldArrays
from gradstream.session.host import Host
from gradstream.session.node import LoopNode
from gradstream.session.optimizer import DistributedOptimizer, take_over
from gradstream.session.place import Assignment
from gradstream.session.shards import Part, length_of, part_of
from gradstream.session.worker_steps import WorkerSteps

__all__ = ["LoneSession", "Session", "WorkerSession", "enter", "running"]

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

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, fused: bool = True
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module and an optimizer to use in the place of yours. Once per session.

        The module is the same object, with the parameters of worker 0 from here on. Trained are those
        that the optimizer has and that require a gradient; all else (buffers, frozen parameters) stays each
        worker's own; a saved model has the mean of the buffers, and worker 0's of the rest. Waits until all
        workers are there.

        Args:
            model: in main memory, of float32 or float64 parameters.
            optimizer: any but LBFGS. Of `torch.optim.SGD`, `Adam`, `AdamW` and `Adagrad` the servers make
                the update, with the learning rate that `param_groups` has at each step; such a one is wrapped
                before its first step. Any other runs on each worker: its step is what is pushed, and it is
                given back as it is, with state and options of its own. Some strategies cannot do with that.
            fused: False has any optimizer run on each worker.

        What a script does to its parameters besides, the exchange would undo: the step after it is refused.

        Raises:
            ConfigError: an optimizer or a model that cannot be taken over; says what to use.
            RefusedError, DeadlineError, PeerLostError: the run did not come about; says who is missing.
        """
        return model, optimizer

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
    def _alone(self) -> _Alone:
        alone: _Alone = self.__dict__.setdefault("_alone_arrays", _Alone())
        return alone


class LoneSession(Session):
    """The session of a process that is alone: gives everything back as it is."""


class _Alone:
    """Update rules on numpy arrays, without anybody else."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}
        self._steps = 0

    def step(self, parameters: Tree, gradients: Tree, rule: Optimizer) -> Tree:
        held = HeldArrays(parameters)
        held.give(gradients)
        flat, gradient = (torch.empty(held.layout.elems, dtype=held.layout.dtype) for _ in range(2))
        held.init(0, flat)
        held.take(gradient)
        if not self._state:
            self._state = {name: torch.full_like(flat, rule.state_init) for name in rule.state_names}
        self._steps += 1
        rule.apply(flat, gradient, self._state, lr=_rate_of(rule), step=self._steps)
        held.show(flat)
        return parameters


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
        self._optimizer: DistributedOptimizer | WorkerSteps | None = None
        self._counted = self._dealt = 0
        self._closed = False
        self._steps_before = place.steps_before()  # None where the run begins
        self._skipped = 0
        self._looked = False  # the script has asked where the run goes on

    @property
    def step(self) -> int:
        """See `Session.step`."""
        self._looked = True
        made = 0 if self._handover is None else self._handover.batches
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
            return False
        self._skipped += 1
        if self._optimizer is not None:
            self._optimizer.passed()
        self._counted = self._dealt = 0
        return True

    @property
    def aborted(self) -> bool:
        """Whether the run has ended because of another node: that one tells why."""
        return self._node is not None and self._node.aborted

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, fused: bool = True
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """See `Session.wrap`."""
        for given, kind in ((model, nn.Module), (optimizer, torch.optim.Optimizer)):
            if not isinstance(given, kind):
                raise ConfigError(
                    f"wrap: got {type(given).__name__}, expected a torch {kind.__name__}; "
                    "for numpy arrays there is session.exchange"
                )
        self._check_unused()
        job = self._place.job()
        self._optimizer, held, rule = take_over(
            model,
            optimizer,
            find_strategy(job.strategy, job.strategy_options),
            self.world_size,
            self._step,
            self._where,
            fused=fused,
        )
        self._begin(held, rule)
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        return model, self._optimizer if isinstance(self._optimizer, DistributedOptimizer) else optimizer

    def shard(self, data: Any, *, split: bool = False) -> Any:
        """See `Session.shard`."""
        if isinstance(data, tuple):
            return tuple(self.shard(one, split=split) for one in data)
        return part_of(data, Part(self.rank, self.world_size, self._seed, split, self._note_dealt))

    def exchange(
        self, parameters: Tree, gradients: Tree, rule: Optimizer, samples: int | None = None
    ) -> Tree:
        """See `Session.exchange`."""
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
        self._unchanged()
        held.give(gradients)
        if samples is not None:
            self.samples(samples)
        self._step(_rate_of(rule), math.nan)
        return parameters

    def samples(self, count: int) -> None:
        """See `Session.samples`."""
        if count < 1:
            raise ConfigError(f"samples({count}): expected at least 1")
        self._counted, self._dealt = count, 0

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """See `Session.evaluation`."""
        held, handover = self._held, self._handover
        if held is None or handover is None or self._closed:
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
            ConfigError: the script has changed parameters since its last step. The run has ended well.
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
        if self._handover is not None and self._node is not None:
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

    def _check_unused(self) -> None:
        if self._handover is not None:
            raise ConfigError("wrap: this session has parameters already; one run trains one model")
        if self._closed:
            raise ClosedError("the session was closed")

    def _where(self) -> str:
        made = 0 if self._handover is None else self._handover.batches
        return f"worker-{self.rank}, step {(self._steps_before or 0) + made}"

    def _unchanged(self) -> None:
        """Raises ConfigError where the script has changed what the exchange would overwrite."""
        over = self._handover is None or self._closed or self._handover.error is not None
        if self._held is not None and not over:
            self._held.unchanged(self._where())

    def _begin(self, held: Held, rule: str) -> None:
        self._check_unused()
        self._held, self._handover = held, Handover(held)
        self._node = LoopNode(self._place, held, self._handover, rule)
        self._node.start()
        self._handover.first()

    def _step(self, lr: float, loss: float) -> None:
        assert self._handover is not None
        if self._steps_before and not self._looked:
            raise ConfigError(
                f"this run goes on from step {self._steps_before}, but the script begins its loop again: "
                "skip what it has done, `if session.skip(): continue`, or look at session.step"
            )
        samples = self._counted or self._dealt or 1
        self._counted = self._dealt = 0
        self._handover.step(samples, lr, loss)

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            self._counted += length_of((*args, *kwargs.values())) or 0

    def _note_dealt(self, batch: Any) -> None:
        self._dealt += length_of((batch,)) or 0


FAREWELL_S = 15.0
"""For a script that has failed to tell the others."""


def _rate_of(rule: Optimizer) -> float:
    if callable(rule.lr):
        raise ConfigError(
            f"exchange: lr is {rule.lr!r}: a loop of your own gives the rate of each step itself"
        )
    return rule.lr


def _without_lr(rule: Any) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in rule.__dataclass_fields__ if name != "lr"}
