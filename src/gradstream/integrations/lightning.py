"""Makes a session the strategy of a `lightning.Trainer`.

    session = gradstream.join()
    trainer = Trainer(strategy=GradstreamStrategy(session))
    trainer.fit(module, loader)

`Session.shard` divides the loaders of training. Each worker validates and tests on all of the data, so metrics
are equal on all workers, and so are decisions that depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from gradstream.errors import ConfigError
from gradstream.integrations import MANY, is_joined, process_index, wrap
from gradstream.session.session import Session


class GradstreamStrategy(ParallelStrategy):
    """Joins a trainer's steps with those of the other workers of a session. Worker r takes GPU r modulo their number.

    `reduce` and `broadcast` return their argument unchanged: a training metric that is logged is that of this
    worker's minibatches, even with `sync_dist=True`.

    Args:
        session: session of this worker.
        options: arguments of lightning's `ParallelStrategy`.
    """

    strategy_name = "gradstream"

    def __init__(self, session: Session, **options: Any) -> None:
        super().__init__(**options)
        self._session = session
        self._loads_training = False
        self._shown = ExitStack()
        rank_zero_only.rank = self.global_rank

    @property
    def global_rank(self) -> int:
        """Number of this worker: 0 for the main one, which saves and logs."""
        return process_index(self._session)

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
        session = self._session
        if trainer.state.fn == TrainerFn.FITTING and is_joined(session):
            schedulers = {f"scheduler.{i}": one.scheduler for i, one in enumerate(self.lr_scheduler_configs)}
            wrap(session, [self.lightning_module], self.optimizers, **schedulers, trainer=_Progress(trainer))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """See `Strategy`."""
        if self.lightning_module.trainer.accumulate_grad_batches > 1:  # the last minibatch makes a step
            self._follow()

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """See `Strategy`."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._follow()
        return result

    def _follow(self) -> None:
        """Lets the epoch end with the loader: it has more minibatches if workers are lost, fewer if some come."""
        rank_zero_only.rank = self.global_rank
        trainer: Any = self.lightning_module.trainer
        loop, fetcher = trainer.fit_loop, trainer.fit_loop._data_fetcher
        combined, used = loop._combined_loader, fetcher.fetched
        ours = all(isinstance(loader, _TrainingLoader) for loader in combined.flattened)
        if not ours or trainer.limit_train_batches != 1.0:
            return
        combined.limits = None  # how many there were
        of_all = min if combined._mode == "min_size" else max
        rest = of_all(loader.loader.rest for loader in combined.flattened)
        planned = of_all(map(len, combined.flattened)) - used
        loop.max_batches = fetcher.length = used + (max(rest, planned) if rest else 0)
        loop.epoch_loop.batch_progress.is_last_batch = fetcher.done = fetcher.fetched >= fetcher.length
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))

    def on_validation_start(self) -> None:
        """Validates the parameters that all workers share."""
        self._shown.enter_context(self._session.evaluation())

    def on_validation_end(self) -> None:
        """See `Strategy`."""
        self._shown.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The parameters that all workers share, for a checkpoint."""
        with self._session.evaluation():
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]

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
        if not self._loads_training or not isinstance(dataloader, DataLoader) or not is_joined(self._session):
            return dataloader
        part = self._session.shard(dataloader)
        if not hasattr(part, "rest"):
            return part
        epochs = self.lightning_module.trainer.max_epochs
        return _TrainingLoader(part, self._session.epochs(MANY if epochs in (None, -1) else epochs))

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


class _TrainingLoader:
    """A worker's part of a loader. An iteration begins with its first minibatch: lightning makes more iterators."""

    def __init__(self, loader: Any, epochs: Iterator[int]) -> None:
        self.loader = loader
        self.epochs = epochs  # the session hears when one begins

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        next(self.epochs, None)
        yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of lightning, whose next epoch begins when the last minibatch of this one is used."""
        state: dict[str, Any] = self.loader.state_dict()
        if not state["taken"] or self.loader.rest:
            return state
        states = [one.get_state() for one in self.loader.batch_sampler.generators]
        return {**state, "epoch": state["epoch"] + 1, "taken": 0, "generators": states}

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class _Progress:
    """How far a trainer is, with the states of its callbacks and scaler: a newcomer and a resumed run begin with it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """The state as lightning keeps it in a checkpoint."""
        loops = self._trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # the session has it
        callbacks = call._call_callbacks_state_dict(self._trainer)
        return {
            "loops": loops,
            "callbacks": callbacks,
            "precision": self._trainer.precision_plugin.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` has returned, before the trainer begins."""
        if not self._is_loaded:
            self._is_loaded = True
            self._trainer.fit_loop.load_state_dict(state["loops"])
            call._call_callbacks_load_state_dict(self._trainer, {"callbacks": state["callbacks"]})
            self._trainer.precision_plugin.load_state_dict(state["precision"])
