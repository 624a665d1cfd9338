"""Averages the gradients of loops on an `accelerate.Accelerator`, in place of torch.distributed.

    session = gradstream.join()
    set_process(session)
    accelerator = Accelerator()
    model, optimizer, loader = prepare(session, accelerator, model, optimizer, loader)

accelerate then has the worker's rank, so only worker 0 is its main process, but a number of processes of 1. So it
wraps no module in DistributedDataParallel, and divides no data. `prepare` has it divide the training data, as
it would among its own processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn

from gradstream.integrations import wrap
from gradstream.model.devices import seeded
from gradstream.session.session import Session


def set_process(session: Session) -> None:
    """Keeps accelerate from starting torch.distributed, and gives the worker a GPU of its own.

    Call it before the first `Accelerator`, `PartialState` or `TrainingArguments`. It removes RANK, WORLD_SIZE,
    LOCAL_RANK and LOCAL_WORLD_SIZE from the environment. If the machine has several GPUs, it sets
    CUDA_VISIBLE_DEVICES to one of them.
    """
    if session.world_size == 1:
        return
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if (devices := torch.cuda.device_count()) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[session.rank % devices]


def prepare(session: Session, accelerator: Any, *objects: Any, seed: int = 0) -> Any:
    """Calls `accelerator.prepare` for training, and averages the gradients. Call it once per session.

    accelerate divides the loaders among the workers, so pass only those of training. Pass those of an evaluation
    to `accelerator.prepare`: every worker then iterates over all of the data. `accelerator.no_sync`,
    `accumulate` and `wait_for_everyone` work across workers; `gather`, `reduce` and `broadcast` return their
    argument unchanged.

    Args:
        session: session of this worker.
        accelerator: an `Accelerator`.
        objects: models, optimizers, loaders and schedulers.
        seed: seed of the order of loaders that shuffle and have no generator of their own.

    Returns:
        What `accelerator.prepare` returns.

    Raises:
        ConfigError: see `Session.wrap`; or the strategy does not average gradients.
    """
    if session.world_size == 1:
        return accelerator.prepare(*objects)
    set_rank(session, accelerator)
    with one_of(session), seeded(seed):  # accelerate seeds the generator of a sampler without one from here
        prepared = accelerator.prepare(*objects)
    several = prepared if isinstance(prepared, tuple) else (prepared,)
    for thing in several:
        if isinstance(thing, AcceleratedScheduler):
            thing.step = _called_as_one_of(session, thing.step)  # it makes one step for each process
    models = [thing for thing in several if isinstance(thing, nn.Module)]
    wrap(session, models, [thing.optimizer for thing in several if isinstance(thing, AcceleratedOptimizer)])
    return prepared


def set_rank(session: Session, accelerator: Any) -> None:
    """Sets the worker's rank in accelerate, and the functions by which an accelerator accumulates and waits."""
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"], state["num_processes"] = DistributedType.NO, 1
        state["process_index"] = state["local_process_index"] = session.rank
    accelerator.dataloader_config.dispatch_batches = False  # worker 0 cannot send others its minibatches
    accelerator.no_sync = lambda model: session.no_sync()
    accelerator.wait_for_everyone = session.barrier


@contextmanager
def one_of(session: Session) -> Iterator[None]:
    """Inside, accelerate has the session's number of processes, and divides data by it."""
    states = (PartialState._shared_state, AcceleratorState._shared_state)
    for state in states:
        state["num_processes"] = session.world_size
    try:
        yield
    finally:
        for state in states:
            state["num_processes"] = 1


def _called_as_one_of(session: Session, called: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        with one_of(session):
            return called(*args, **kwargs)

    return call
