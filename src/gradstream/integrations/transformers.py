"""Runs a `transformers.Trainer` as the training loop of a session.

    session = gradstream.join()
    set_process(session)
    trainer = GradstreamTrainer(model, TrainingArguments(...), train_dataset=data, session=session)
    trainer.train()

Data are divided, and steps and schedules are counted, as under `DistributedDataParallel`. Each worker evaluates
on all of the data. Worker 0 saves and logs; the loss that it logs is that of its own minibatches.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from gradstream.integrations import wrap
from gradstream.integrations.accelerate import one_of, set_process, set_rank
from gradstream.session.session import Session

__all__ = ["GradstreamTrainer", "set_process"]


class GradstreamTrainer(Trainer):
    """A `Trainer` whose gradients are averaged over the workers of a session.

    For a trainer derived from `Trainer`, derive from both, this one first:
    `class GradstreamSFTTrainer(GradstreamTrainer, SFTTrainer)`.

    Args:
        args, kwargs: arguments of `Trainer`.
        session: session of this worker, with the strategy `synchronous` or `allreduce`.
    """

    def __init__(self, *args: Any, session: Session, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session = session
        if session.world_size > 1:
            set_rank(session, self.accelerator)
            self.state.is_world_process_zero = self.state.is_local_process_zero = session.is_main
            self.add_callback(_WrapCallback(session))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """See `Trainer`. Returns this worker's part of the loader."""
        many = self._session.world_size > 1
        with one_of(self._session) if many else contextlib.nullcontext():
            loader: DataLoader[Any] = super().get_train_dataloader()
        return loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """See `Trainer`. If the loss is a mean over tokens, means over workers are weighted by tokens."""
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            self._session.samples(int(num_items_in_batch))
        return super().training_step(model, inputs, num_items_in_batch)


class _WrapCallback(TrainerCallback):
    """Wraps model and optimizer when they are ready, and has all workers wait while worker 0 saves."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrap(self._session, [kwargs["model"]], [kwargs["optimizer"].optimizer])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.barrier()
