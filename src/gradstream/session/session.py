"""`join()`: runs a user's training loop on many workers.

    session = gradstream.join()
    model, optimizer = session.wrap(model, optimizer)

The loop stays as it is. A worker in another thread of the same process exchanges gradients or parameters, depending
on the strategy: `synchronous` and `allreduce` average the gradients at the end of each backward; under `local-sgd`,
`gossip`, `push-sum`, `noloco`, `diloco` and its kin the script's optimizer makes H steps, the last of which returns
with the parameters of the next round; the other strategies take gradients at `optimizer.step()`, which returns with the
parameters of the next step. In a script run by plain `python`, a session does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from gradstream.model.buffers import Tree
from gradstream.optim.base import Optimizer
from gradstream.session.arrays import LocalUpdates
from gradstream.session.registered import Registered

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])
O = TypeVar("O", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])  # noqa: E741


class Session:
    """A training loop's part in a run. Made by `gradstream.join`; also a context manager.

    Attributes:
        rank: number of this worker, from 0.
        world_size: number of workers.
        step: number of steps of this worker, including those before the run was resumed. Always 0 in a
            session of a single process, which does not count them.
        resumed: whether the run was resumed from a checkpoint.
        is_main: whether this is the worker that should print and write files.

    Example:
        >>> with gs.join() as session:  # `python` alone starts it: one worker
        ...     session.rank, session.world_size, session.is_main
        (0, 1, True)
    """

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, or in a group the first worker that is left."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Number of steps of this worker, including those before the run was resumed."""
        return 0

    @property
    def resumed(self) -> bool:
        """Whether the run was resumed from a checkpoint."""
        return False

    def skip(self) -> bool:
        """Whether the next step was made before the run was resumed.

        Only loops need it whose minibatches do not all come from DataLoaders of `shard`, which find their place
        themselves. In a resumed run, the first calls return True, one for each step that this worker has made; later
        calls return False. In a new run all calls return False:

            for inputs, targets in batches:
                if session.skip():
                    continue

        So the loop runs through its data to where it was, without computing. If it updates anything else in each step,
        it has to do so before `continue` too, unless that is registered.
        """
        return False

    def epochs(self, number: int) -> Iterator[int]:
        """Yields the numbers of the epochs, as `range(number)`; in a resumed run, from the one in which the run was.

            for epoch in session.epochs(10):
                for inputs, targets in loader:
                    ...

        With `range` the script goes through the earlier epochs too, in which loaders of `shard` yield nothing.
        """
        yield from range(number)

    def wrap(self, model: M, optimizer: O, *, fused: bool = True) -> tuple[M, O]:
        """Returns the model and the optimizer to use instead of yours. Call it once per session.

        `synchronous` and `allreduce` return both unchanged. The model's state is copied from worker 0. After each
        backward, `p.grad` is the mean over the samples of all workers, and every worker's optimizer makes the step.

        `local-sgd`, `gossip`, `push-sum`, `noloco`, `diloco` and its kin, elastic and parameter averaging return both
        unchanged too: your optimizer makes every step on this worker's own parameters, which are exchanged after every
        H steps, with any changes that the script has made in between. All workers begin with worker 0's parameters.

        Other strategies return an optimizer that exchanges parameters. They train your optimizer's parameters that
        require a gradient. Buffers and frozen parameters remain separate on each worker; a saved model has the mean
        of the buffers, and worker 0's frozen parameters. These strategies overwrite parameters at each step, so a step
        raises an error if the script has changed a parameter itself since the last one.

        Waits until all workers have called it.

        Args:
            model: a module. Under strategies that return the optimizer unchanged also a list or tuple of modules;
                under all but `synchronous` and `allreduce` in main memory, with float32 or float64 parameters.
            optimizer: any optimizer, or a list or tuple of them. Under strategies that return another
                optimizer, the servers make the updates of `torch.optim.SGD`, `Adam`, `AdamW` and `Adagrad`, with the
                current learning rate of `param_groups`; wrap such an optimizer before its first step. Any other
                optimizer runs on each worker, which pushes its steps; not every strategy can use those.
            fused: False runs any optimizer on each worker.

        Raises:
            ConfigError: the strategy cannot train this model or optimizer; the message says what to use.
            RefusedError, DeadlineError, PeerLostError: the run could not start; the message says which worker is
                missing.
        """
        return model, optimizer

    def register(self, **objects: Any) -> None:
        """Makes the state of further objects part of the run's, each under a name of its own.

            session.register(scheduler=scheduler, ema=ema, scaler=scaler, counts=counts, rng=True)

        Call it after `wrap` and before the first step, for what the loop changes besides its models and optimizers.
        Checkpoints have the states, and a resumed run continues with them. Under strategies other than `synchronous`
        and `allreduce` a resumed loop goes through its last minibatch once more, in a step that changes nothing, so
        that what follows the step in the loop's body is not left out.

        Args:
            objects: objects with `state_dict` and `load_state_dict` (schedulers, modules such as an average of the
                weights, a GradScaler), dicts, which are restored in place, and generators of random numbers (of torch,
                `random` or numpy). True stands for the generators of this process: those of torch, `random` and
                numpy. The state of a scheduler includes the options of its optimizer's groups. States consist of
                tensors, arrays, numbers, text, and lists and dicts of these.

        Raises:
            ConfigError: an object has no state that can be saved; the message names the part that cannot.
        """
        self._registered.add(objects)

    def split(
        self, build: Callable[[], nn.Module], example: Any, *, into: int, pipeline_dtype: str | None = None
    ) -> nn.Module:
        """Returns this process's part of a module that is too large for one; use it as the whole module.

            model = session.split(lambda: Net(), torch.zeros(2, 784), into=2)
            optimizer = torch.optim.Adam(model.parameters())

        Every process runs the whole loop on the same minibatches: call it before `shard`. A call of the model gives
        each process the whole model's output, so `loss.backward()`, accumulation and evaluation stay as they are. The
        module has only the parameters and buffers of its part, under their usual names and with the initial values of
        the whole module. At the end, the run directory has the whole model.

        Call it instead of `wrap`, once per session, under "synchronous" or "allreduce", with `checkpoint_every=None`.
        A session of a single process returns `build()`.

        Args:
            build: builds the module; it runs without memory for the tensors of other parts.
            example: an example minibatch of inputs: a tensor, a tuple of arguments, or a dict of keyword arguments. In
                later minibatches only the number of samples may differ.
            into: number of parts, equal to the number of processes.
            pipeline_dtype: "float16" or "bfloat16" sends float32 activations of training passes, and their
                gradients, between parts in two bytes a number. None sends them as they are.

        Raises:
            ConfigError: the module cannot be divided (the message names the line), or the session cannot split one.
        """
        del example, into, pipeline_dtype
        return build()

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`; for a model from `split`, by the norm over all parts.

        Args:
            parameters: `model.parameters()`.
            max_norm: largest norm of the gradient, > 0.

        Returns:
            The norm before clipping.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates this worker's own gradients; the next backward outside averages the sum.

        Use it to accumulate several minibatches for a single exchange. It matters only under `synchronous` and
        `allreduce`; other strategies exchange at each step in any case.
        """
        yield

    def barrier(self) -> None:
        """Waits until all workers have called it. Call it between steps, or before `wrap`.

        After `wrap` it waits only under `synchronous` and `allreduce`.

        Raises:
            ConfigError: it is called before `wrap`, and the workers are on several machines.
            DeadlineError: before `wrap`, a worker has not called it within `Deadlines.join_s`.
        """

    def shard(self, data: Any, *, split: bool = False) -> Any:
        """This worker's part of data that was made for one process.

        Args:
            data: a `DataLoader` or any iterable of minibatches: minibatch k goes to worker k mod W, in the order of
                one process, which must be the same on all workers (shard ensures this for a DataLoader that
                shuffles). A map-style `Dataset`, an array or a tensor: sample i goes to worker i mod W. A tuple of
                these: the part of each.
            split: splits each minibatch instead: its sample i goes to worker i mod W. The number of steps is that of
                one process, and a synchronous step uses the samples of one minibatch.
        """
        return data

    def exchange(
        self, parameters: Tree, gradients: Tree, rule: Optimizer, samples: float | None = None
    ) -> Tree:
        """Makes one step of numpy parameters, in place: use it instead of `w -= lr * gradient`.

        Args:
            parameters: an array of float32 or float64, or a dict, list or tuple of arrays. They are updated in place:
                pass the same arrays at each call. All workers must begin with the same values.
            gradients: arrays of the same shapes, each a mean over this worker's samples.
            rule: `gradstream.optim.SGD(lr)` or another update rule. Only its `lr` may change between calls.
            samples: number of samples in the gradients; None takes the length of the minibatches from loaders of
                `shard` since the last step, or 1.

        Returns:
            `parameters`.
        """
        del samples
        return self._updates.step(parameters, gradients, rule)

    def samples(self, count: float) -> None:
        """Sets the number of samples of the next step, its weight, if the session's own count does not fit.

        It is this worker's weight in the mean over workers: the number of tokens, or the sum of class weights, that the
        loss is a mean over. 0 ignores this worker's gradient: a mean over nothing is often NaN.

        Without this call, the session counts the samples of minibatches taken from loaders of `shard` since the last
        step, with gradients on. If there are none, it adds up the lengths of the model's first input tensor in calls in
        training mode and with gradients on.
        """

    def log(self, /, **values: Any) -> None:
        """Logs figures of the loop, `session.log(loss=loss, accuracy=0.9)`. Call it at any time.

        They are shown during the run and at its end, in the report's curves and by trackers. Figures of one name within
        a tenth of a second are averaged; only the first 64 names are kept. A session of a single process ignores them.

        Args:
            values: numbers or tensors of one element, by name. NaN is shown as NaN.

        Raises:
            ConfigError: a value is not a number.
        """

    def total(self, steps: int) -> None:
        """Sets this worker's number of steps in the whole run, such as `epochs * len(loader)`.

        The run then shows the remaining time; otherwise the elapsed time.
        """

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside this context, the model has the parameters that all workers share: the servers' current ones.

        Under a strategy whose workers differ between steps, these are the common model. Each worker gets the parameters
        of the moment at which it enters the context; under `local-sgd`, those at the beginning of the round. Under
        `gossip`, `push-sum` and `noloco` there is no common model, and each worker sees its own.
        """
        yield

    def close(self) -> None:
        """Ends training on this worker: call it after the last step.

        Waits until all workers have made their last steps. Then the wrapped model has the final parameters, equal on
        all workers. A step after `close` raises ClosedError; a second `close` does nothing. The end of the script
        closes the session if the script has not.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    @cached_property
    def _registered(self) -> Registered:
        return Registered()

    @property
    def _updates(self) -> LocalUpdates:
        updates: LocalUpdates = self.__dict__.setdefault("_local_updates", LocalUpdates())
        return updates


class SingleProcessSession(Session):
    """The session of a process that is not a worker of a run: returns everything unchanged."""
