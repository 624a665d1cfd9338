"""Makes a `transformers.Trainer` the training loop of a session.

    session = gradstream.join()
    set_process(session)
    trainer = GradstreamTrainer(model, TrainingArguments(...), train_dataset=data, session=session)
    trainer.train()

Each worker evaluates on all of the data. The main worker saves and logs; the loss that it logs is that of its own
minibatches.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl

from gradstream.errors import ConfigError
from gradstream.integrations import MANY, is_joined, wrap
from gradstream.integrations.accelerate import (
    SessionLoader,
    follow,
    one_of,
    set_process,
    set_rank,
)
from gradstream.session.loaders_part import Ahead
from gradstream.session.session import Session
from gradstream.session.worker_session import WorkerSession

__all__ = ["GradstreamTrainer", "set_process"]


class GradstreamTrainer(Trainer):
    """A `Trainer` whose steps are joined with those of the other workers of a session.

    For a trainer derived from `Trainer`, derive from both, this one first:
    `class GradstreamSFTTrainer(GradstreamTrainer, SFTTrainer)`.

    Without `max_steps` it trains for `num_train_epochs`, in more steps where workers are lost, and in fewer where some
    come. The schedule goes with the data: see `Pace`.

    Args:
        args, kwargs: arguments of `Trainer`.
        session: session of this worker.
    """

    def __init__(self, *args: Any, session: Session, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session = session
        self._loader: SessionLoader | None = None  # of training
        if is_joined(session):
            set_rank(session, self.accelerator)
            self._progress = _Progress(self)
            self.add_callback(_WrapCallback(self, session))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """See `Trainer`. Returns this worker's part of the loader."""
        is_stream = isinstance(self.train_dataset, torch.utils.data.IterableDataset)
        divides = is_joined(self._session) and is_stream  # accelerate does, as under DDP
        with one_of(self._session) if divides else contextlib.nullcontext():
            loader: DataLoader[Any] = super().get_train_dataloader()
        if is_joined(self._session) and not is_stream:
            loader = self._loader = SessionLoader.of(self._session, loader)
        return loader

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """See `Trainer`. The number of steps is that of as many workers as there are now."""
        created = getattr(self, "lr_scheduler", None) is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if is_joined(self._session) and created:
            self._progress.plan(num_training_steps)
            if self.args.max_steps <= 0 and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
                scheduler = self.lr_scheduler = Pace(scheduler, lambda: self._progress.pace)
        return scheduler

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """See `Trainer`. With `max_steps` it goes through the data as often as it takes."""
        epochs, *others = super().set_initial_training_values(args, dataloader)
        endless = is_joined(self._session) and args.max_steps > 0
        return (sys.maxsize if endless else epochs, *others)

    lr_scheduler: Any

    def _run_epoch(self, **kwargs: Any) -> None:
        if not is_joined(self._session):
            super()._run_epoch(**kwargs)
        elif (
            kwargs["epoch"] >= self._progress.epoch
        ):  # else it was over when this worker came, or was resumed
            self._progress.begin(kwargs["epoch"])
            if self._loader is not None:
                self._length = _Length(len(self._loader), self._progress.fraction)
                kwargs |= {"steps_in_epoch": self._length, "num_update_steps_per_epoch": sys.maxsize}
                if (
                    kwargs["resume_from_checkpoint"] is not None
                    and kwargs["epoch"] == kwargs["epochs_trained"]
                ):
                    taken, kwargs["steps_trained_in_current_epoch"] = (
                        kwargs["steps_trained_in_current_epoch"],
                        0,
                    )
                    base = self._loader.base_dataloader
                    base.load_state_dict({**base.state_dict(), "epoch": kwargs["epoch"], "taken": taken})
            super()._run_epoch(**kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """See `Trainer`. Takes the minibatches of a whole step, which `training_step` uses one by one."""
        if is_joined(self._session) and self._loader is not None:
            epoch_iterator = self._taken(epoch_iterator, num_batches, self._session.ahead)
        taken = super().get_batch_samples(epoch_iterator, num_batches, device)
        if isinstance(self._loader, SessionLoader):
            self._length.used += len(taken[0])
            self._length.is_whole = len(taken[0]) < num_batches
            self.control.should_epoch_stop |= not taken[0]
        return taken

    def _taken(self, batches: Iterator[Any], most: int, ahead: Ahead) -> Iterator[Any]:
        """Takes minibatches ahead, as long as there are some: their loader ends when all of them are used."""
        assert self._loader is not None
        for number in range(most):
            if number and self._loader.base_dataloader.rest <= number:
                return
            ahead.is_taking = True
            try:
                batch = next(batches, None)
            finally:
                ahead.is_taking = False
            if batch is None:
                return
            yield batch

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if is_joined(self._session):  # repeated minibatches count nothing
            counts = self._session.ahead.counts
            own = [batch for batch, count in zip(batch_samples, counts, strict=False) if count != 0]
            batch_samples = own or batch_samples
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """See `Trainer`. If the loss is a mean over tokens, means over workers are weighted by tokens."""
        if is_joined(self._session):
            self._session.ahead.use()
            follow(self._session)
            self.state.is_world_process_zero = self.state.is_local_process_zero = self._session.is_main
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            self._session.samples(int(num_items_in_batch))
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`. Evaluates the parameters that all workers share."""
        with self._session.evaluation():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """See `Trainer`. The others wait for the main worker's files: `Trainer` looks whether the best are there."""
        is_main = self._session.is_main
        if not is_main:
            self._session.barrier()
        with self._session.evaluation():
            super()._save_checkpoint(*args, **kwargs)
        if is_main:
            self._session.barrier()


class _Length(int):
    """Number of minibatches of an epoch, with which the trainer compares how many it has used. It is not known before.

    Args:
        length: number of minibatches, if the number of workers stays.
        fraction: returns how much of the epoch is over.

    Attributes:
        used: number of minibatches that were taken.
        is_whole: there are no more.
    """

    used = 0
    is_whole = False
    fraction: Callable[[], float]

    def __new__(cls, length: int, fraction: Callable[[], float]) -> _Length:
        made = super().__new__(cls, length)
        made.fraction = fraction
        return made

    def __eq__(self, used: object) -> bool:
        return self.is_whole and used == self.used

    def __rtruediv__(self, used: float) -> float:
        return self.fraction()

    __hash__ = int.__hash__


class Pace:
    """A schedule that was made for all epochs. It goes with the data, whatever the number of workers.

    With one of three workers gone it makes two steps in three of the trainer's. So it comes to its end with the data.

    Args:
        scheduler: the schedule.
        pace: returns how many of its steps belong to one of the trainer's.
    """

    def __init__(self, scheduler: Any, pace: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self._pace = pace
        self._due = 0.0

    def step(self) -> None:
        """The trainer makes a step."""
        self._due += self._pace()
        while self._due >= 1 - 1e-9:
            self._due -= 1
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """That of the schedule, and what is due of its next step."""
        return {**self.scheduler.state_dict(), "due": self._due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` has returned."""
        self._due = state["due"]
        self.scheduler.load_state_dict({key: value for key, value in state.items() if key != "due"})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


class _Progress:
    """How far a trainer is: a newcomer and a resumed run begin with it.

    Args:
        trainer: the trainer.

    Attributes:
        epoch: number of the present epoch.
        steps, workers: number of steps for which the schedule was made, and of workers at that time.
    """

    _FIELDS = (
        "epoch",
        "global_step",
        "max_steps",
        "num_input_tokens_seen",
        "best_metric",
        "best_global_step",
        "best_model_checkpoint",
    )

    def __init__(self, trainer: GradstreamTrainer) -> None:
        self.epoch = self.steps = 0
        self.epochs: Iterator[int] = iter(())  # the session hears when one begins
        self.workers = 1
        self._trainer = trainer

    def plan(self, steps: int) -> None:
        """The schedule is made for so many steps."""
        self.steps, self.workers = steps, self._trainer._session.world_size

    def begin(self, epoch: int) -> None:
        """An epoch begins."""
        self.epoch = epoch
        next(self.epochs, None)

    @property
    def pace(self) -> float:
        """Steps of the schedule for a step of this many workers."""
        return float(self._trainer._session.world_size / self.workers)

    @property
    def left(self) -> int:
        """Minibatches of this worker that are left of the present epoch, if the number of workers stays."""
        assert self._trainer._loader is not None
        base, used = self._trainer._loader.base_dataloader, self._trainer._length.used
        rest: int = base.rest
        return max(rest, len(base) - used) if rest else 0

    def fraction(self) -> float:
        """How much of the present epoch is over."""
        assert self._trainer._loader is not None
        total = self._trainer._loader.base_dataloader.total
        return float(max(0, total - self.left * self._trainer._session.world_size) / total)

    def max_steps(self) -> int:
        """Number of steps in the whole run, if the number of workers stays; call it before a step is counted."""
        args, loader = self._trainer.args, self._trainer._loader
        assert loader is not None
        accumulated, total = args.gradient_accumulation_steps, loader.base_dataloader.total
        own = math.ceil(total / self._trainer._session.world_size)  # of a whole epoch
        later = math.ceil((args.num_train_epochs - self.epoch - 1) * math.ceil(own / accumulated))
        return int(self._trainer.state.global_step + 1 + math.ceil(self.left / accumulated) + later)

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [
            one
            for one in callbacks
            if isinstance(one, ExportableState) and not isinstance(one, TrainerControl)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "epoch": self.epoch,
            "plan": [self.steps, self.workers],
            "state": {name: getattr(self._trainer.state, name) for name in self._FIELDS},
            "callbacks": [dict(one.state()["attributes"]) for one in self._callbacks()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` has returned."""
        self.epoch = state["epoch"]
        self.steps, self.workers = state["plan"]
        for name, value in state["state"].items():
            setattr(self._trainer.state, name, value)
        for callback, attributes in zip(self._callbacks(), state["callbacks"], strict=False):
            vars(callback).update(attributes)


class _WrapCallback(TrainerCallback):
    """Wraps model and optimizer when they are ready, and tells how many steps are left."""

    def __init__(self, trainer: GradstreamTrainer, session: WorkerSession) -> None:
        self._trainer = trainer
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, session, progress = self._trainer, self._session, self._trainer._progress
        if args.load_best_model_at_end and not session.has_replicas:
            raise ConfigError(
                "GradstreamTrainer: load_best_model_at_end under a strategy whose workers have parameters of their own "
                "would be one more change that they exchange. Leave it out, and load the best checkpoint after "
                "session.close()"
            )
        planned = progress.steps
        wrap(session, [kwargs["model"]], [kwargs["optimizer"].optimizer], trainer=progress)
        if (
            progress.steps != planned and trainer._created_lr_scheduler
        ):  # of other workers, or before a resume
            steps, workers = progress.steps, progress.workers
            trainer.lr_scheduler = None
            trainer.callback_handler.lr_scheduler = trainer.create_scheduler(steps)
            progress.workers = workers
            state.compute_steps(args, steps)
        session.register(**{"trainer.scheduler": trainer.lr_scheduler})
        if trainer.accelerator.scaler is not None:
            session.register(**{"trainer.scaler": trainer.accelerator.scaler})
        epochs = session.epochs(math.ceil(args.num_train_epochs) if args.max_steps <= 0 else MANY)
        progress.epochs = itertools.chain([next(epochs)], epochs)  # the trainer begins with the present one
        trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.max_steps <= 0 and self._trainer._loader is not None:
            state.max_steps = self._trainer._progress.max_steps()
