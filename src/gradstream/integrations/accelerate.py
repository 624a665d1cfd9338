"""Makes loops on an `accelerate.Accelerator` those of a session, in place of torch.distributed.

    session = gradstream.join()
    set_process(session)
    accelerator = Accelerator()
    model, optimizer, loader = prepare(session, accelerator, model, optimizer, loader)

accelerate then has a number of processes of 1, so it wraps no module in DistributedDataParallel and divides no data;
and its process 0 is the session's main worker. `prepare` has the session divide the training data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, send_to_device
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from gradstream.integrations import is_joined, process_index, wrap
from gradstream.model.devices import seeded
from gradstream.session.session import Session


def set_process(session: Session) -> None:
    """Keeps accelerate from starting torch.distributed, and gives the worker a GPU of its own.

    Call it before the first `Accelerator`, `PartialState` or `TrainingArguments`. It removes RANK, WORLD_SIZE,
    LOCAL_RANK and LOCAL_WORLD_SIZE from the environment. If the machine has several GPUs, it sets
    CUDA_VISIBLE_DEVICES to one of them.
    """
    if not is_joined(session):
        return
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if (devices := torch.cuda.device_count()) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[session.rank % devices]


def prepare(session: Session, accelerator: Any, *objects: Any, seed: int = 0) -> Any:
    """Calls `accelerator.prepare` for training, and `Session.wrap` for models and optimizers. Call it once per session.

    The session divides the loaders among the workers, so pass only those of training. Pass those of an evaluation
    to `accelerator.prepare`: every worker then iterates over all of the data. `accelerator.no_sync`,
    `accumulate` and `wait_for_everyone` work across workers; `gather`, `reduce` and `broadcast` return their
    argument unchanged. Schedulers and the scaler are registered: see `Session.register`.

    Args:
        session: session of this worker.
        accelerator: an `Accelerator`.
        objects: models, optimizers, loaders and schedulers.
        seed: seed of the order of loaders that shuffle and have no generator of their own.

    Returns:
        What `accelerator.prepare` returns.

    Raises:
        ConfigError: see `Session.wrap`.
    """
    if not is_joined(session):
        return accelerator.prepare(*objects)
    set_rank(session, accelerator)
    with seeded(seed):  # accelerate may seed a sampler from here
        loaders = {
            id(one): sharded(session, accelerator, one) for one in objects if isinstance(one, DataLoader)
        }
        others = [one for one in objects if not isinstance(one, DataLoader)]
        made = accelerator.prepare(*others) if others else ()
    several = made if isinstance(made, tuple) else (made,)
    schedulers = [one for one in several if isinstance(one, AcceleratedScheduler)]
    for one in schedulers:
        one.step = _called_as_one_of(session, one.step)  # it makes one step for each process
    registered = {f"accelerate.scheduler.{index}": one.scheduler for index, one in enumerate(schedulers)}
    if accelerator.scaler is not None:
        registered["accelerate.scaler"] = accelerator.scaler
    models = [one for one in several if isinstance(one, nn.Module)]
    optimizers = [one.optimizer for one in several if isinstance(one, AcceleratedOptimizer)]
    wrap(session, models, optimizers, **registered)
    rest = iter(several)
    prepared = tuple(loaders[id(one)] if id(one) in loaders else next(rest) for one in objects)
    return prepared if len(prepared) > 1 else prepared[0]


def set_rank(session: Session, accelerator: Any) -> None:
    """Sets the worker's number in accelerate, and the functions by which an accelerator accumulates and waits."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"], state["num_processes"] = DistributedType.NO, 1
    follow(session)
    accelerator.dataloader_config.dispatch_batches = False  # worker 0 cannot send others its minibatches
    accelerator.no_sync = lambda model: session.no_sync()
    accelerator.wait_for_everyone = session.barrier


def follow(session: Session) -> None:
    """Makes accelerate's process 0 the session's main worker, which may have changed."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["process_index"] = state["local_process_index"] = process_index(session)


@contextmanager
def one_of(session: Session) -> Iterator[None]:
    """Inside, accelerate has the session's number of processes, and divides data by it."""
    states = (PartialState._shared_state, AcceleratorState._shared_state)
    for state in states:
        state["num_processes"], state["process_index"] = session.world_size, session.rank
    try:
        yield
    finally:
        for state in states:
            state["num_processes"] = 1
        follow(session)


def sharded(session: Session, accelerator: Any, loader: DataLoader[Any]) -> Any:
    """A worker's part of a loader, as a loader of accelerate.

    The session divides a data set that is read by number. A stream is divided by accelerate as under DDP, and the
    session cannot deal out the rest of a lost worker's.
    """
    if isinstance(loader.dataset, IterableDataset):
        with one_of(session):
            return accelerator.prepare(loader)
    return SessionLoader.of(session, accelerator.prepare(loader))


class SessionLoader(DataLoaderShard):
    """A loader of accelerate over one of a session.

    accelerate's own takes a minibatch ahead to see whether it has come to the end. This one asks the session, whose
    loaders know, and get more where workers are lost.
    """

    base_dataloader: Any
    session: Session

    @classmethod
    def of(cls, session: Session, prepared: DataLoaderShard) -> SessionLoader:
        """The worker's part of a prepared loader of all data."""
        made: SessionLoader = object.__new__(cls)
        made.__dict__.update(prepared.__dict__)  # `vars` asks for the class that it says it has
        made.session, made.base_dataloader = session, session.shard(prepared.base_dataloader)
        return made

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        self.remainder = -1  # no samples are added
        for batch in self.base_dataloader:
            # Asked only where it matters: the answer may have to come from the coordinator.
            self.end_of_dataloader = self.gradient_state.num_steps > 1 and not self.base_dataloader.rest
            follow(self.session)
            yield batch if self.device is None else send_to_device(batch, self.device, self._non_blocking)
        self.iteration += 1
        self.end()

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next iteration. Its order is the session's."""
        self.iteration = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def _called_as_one_of(session: Session, called: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        with one_of(session):
            return called(*args, **kwargs)

    return call
