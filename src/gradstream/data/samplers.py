"""What samplers draw: the same on every node, as a function of the run's seed and the data epoch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, SequentialSampler

from gradstream.data.base import Ids
from gradstream.data.plan import Order
from gradstream.data.randomness import mixed, seeded
from gradstream.errors import DataError

__all__ = ["drawn_by", "order_of"]


def order_of(loader: DataLoader[Any], num_samples: int, seed: int, name: str) -> Order:
    """What the loader's sampler draws in each data epoch; the last two epochs are remembered."""
    if type(loader.sampler) is SequentialSampler:
        ids = np.arange(num_samples)
        return lambda epoch: ids
    num_drawn = len(loader.sampler)  # type: ignore[arg-type]  # a sampler with a batch size has one

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> Ids:
        drawn = np.array(drawn_by(loader.sampler, seed, epoch), dtype=np.int64)
        if drawn.shape != (num_drawn,):
            raise DataError(
                f"the sampler of {name!r} drew {drawn.shape} in data epoch {epoch}, expected ({num_drawn},): "
                "as many sample numbers as its len() says"
            )
        return drawn

    return order


def drawn_by(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """Everything that a sampler draws in a data epoch, as a function of (seed, epoch)."""
    parts: list[Any] = [sampler, getattr(sampler, "sampler", None)]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(mixed(seed, epoch))
    with seeded(seed, epoch):
        return list(sampler)
