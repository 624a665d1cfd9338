"""`join()`: a training loop of the user's own, on many workers.

    session = gradstream.join()
    model, optimizer = session.wrap(model, optimizer)

The loop stays as it is. `optimizer.step()` hands the gradients to a worker in another thread of the
same process, which does with them what its strategy says, and returns with the parameters of the next
step. Run by plain `python`, a session does nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from gradstream.model.tree import Tree
from gradstream.optim.base import Optimizer
from gradstream.session.arrays import LoneArrays

__all__ = ["LoneSession", "Session"]

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])
O = TypeVar("O", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])  # noqa: E741


class Session:
    """A training loop's part in a run. Made by `gradstream.join`; also a context manager.

    Attributes:
        rank: of this worker, from 0.
        world_size: how many workers there are.
        step: how many steps this worker has made, those before the run was resumed included. Alone, where
            nobody counts, 0.
        resumed: whether the run goes on from a checkpoint.
        is_main: whether this is the worker that should print and write files.

    Example:
        >>> with gs.join("synchronous") as session:  # `python` alone starts it: one worker
        ...     session.rank, session.world_size, session.is_main
        (0, 1, True)
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

    def wrap(self, model: M, optimizer: O, *, fused: bool = True) -> tuple[M, O]:
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
            optimizer: any but LBFGS, or a list or tuple. Under other strategies than these two, and of
                `torch.optim.SGD`, `Adam`, `AdamW` and `Adagrad`, the servers make the update, with the
                learning rate that `param_groups` has at each step; such a one is wrapped before its first
                step. Any other runs on each worker: its step is what is pushed; some strategies cannot do
                with that.
            fused: False has any optimizer run on each worker.

        Under strategies that exchange parameters, what a script does to them besides the exchange would undo:
        the step after it is refused.

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

    def barrier(self) -> None:
        """Waits until all workers have come here. Call it between steps, where gradients are joined.

        Other strategies do not wait; nor does a session before `wrap`.
        """

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
            rule: `gradstream.optim.SGD(lr)` or another update rule. Only its `lr` may change on the way.
            samples: behind the gradients; None takes the length of the minibatches that `shard`
                has given since the last step, or 1.

        Returns:
            `parameters`.
        """
        del samples
        return self._alone.step(parameters, gradients, rule)

    def samples(self, count: int) -> None:
        """Says how many samples are behind the next step, where that cannot be seen.

        Otherwise it is the samples of the minibatches that were taken from `shard`'s loaders since the last
        step, with gradients on; or else the length of the first tensor that the model was called with, in
        training mode and with gradients on, added up likewise.
        """

    def log(self, /, **values: Any) -> None:
        """Takes figures of the loop, `session.log(loss=loss, accuracy=0.9)`, at any time.

        They are shown while the run goes on and at its end, with the curves of the report and by trackers. Of
        what comes within a tenth of a second the mean is kept; of more than 64 names, the first 64. Alone,
        nothing is done.

        Args:
            values: numbers or tensors of one element, by name. NaN is shown as such.

        Raises:
            ConfigError: a value is no number.
        """

    def total(self, steps: int) -> None:
        """Says how many steps this worker makes in the whole run, such as `epochs * len(loader)`.

        The time that is left can be shown then; else the time that has passed is.
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
