"""Runs a session as the strategy of a `lightning.Trainer`.

    session = gradstream.join()
    trainer = Trainer(strategy=GradstreamStrategy(session))
    trainer.fit(module, loader)

`Session.shard` divides the loaders of training. Each worker validates and tests on all of the data, so metrics
are equal on all workers, and so are decisions that depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from gradstream.errors import ConfigError
from gradstream.integrations import wrap
from gradstream.session.session import Session


class GradstreamStrategy(ParallelStrategy):
    """Averages gradients over the workers of a session. Worker r takes GPU r modulo their number.

    `reduce` and `broadcast` return their argument unchanged: a training metric that is logged is that of this
    worker's minibatches, even with `sync_dist=True`.

    Args:
        session: session of this worker, with the strategy `synchronous` or `allreduce`.
        options: arguments of lightning's `ParallelStrategy`.
    """

    strategy_name = "gradstream"

    def __init__(self, session: Session, **options: Any) -> None:
        super().__init__(**options)
        self._session = session
        self._loads_training = False
        rank_zero_only.rank = session.rank

    @property
    def global_rank(self) -> int:
        """Rank of this worker."""
        return self._session.rank

    @property
    def local_rank(self) -> int:
        """Rank of this worker in the run, since sessions do not number the workers of a machine."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._session.world_size

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        devices: list[torch.device] = self.parallel_devices
        return devices[self._session.rank % len(devices)]

    def model_to_device(self) -> None:
        """Moves the module to the device of this worker."""
        self.model.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Wraps model and optimizers when they are ready."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            wrap(self._session, [self.lightning_module], self.optimizers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module itself, so that the session sees each pass and its samples."""
        module = self.lightning_module
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated on each worker."""
        with self._session.no_sync():
            yield

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divides a loader of training."""
        if not self._loads_training or not isinstance(dataloader, DataLoader):
            return dataloader
        return self._session.shard(dataloader)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all workers, if the trainer fits a model."""
        if name is not None and name.endswith("_dataloader()"):
            # Only this name tells which loaders Lightning prepares next.
            self._loads_training = name == "train_dataloader()"
        else:
            self._session.barrier()

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns its argument unchanged."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  # its name
        """Returns its argument unchanged."""
        return decision

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns its argument unchanged."""
        return obj

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Raises ConfigError if there are other workers."""
        if self._session.world_size == 1:
            return tensor
        raise ConfigError(
            "GradstreamStrategy: all_gather is not supported, since sessions exchange only gradients. Each worker "
            "validates on all of the data, so its metrics are complete: leave the call out"
        )
