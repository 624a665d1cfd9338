"""Random numbers that are the same on all workers, while the order of a DataLoader is drawn.

Workers deal the minibatches of one order among themselves without a word, so each must draw that same
order, whatever else its process has drawn before.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

__all__ = ["EqualDraws"]

_swapping = threading.RLock()
"""Several workers may be threads of one process, which has one of each generator."""


class EqualDraws:
    """Iterates while the global generators of torch, `random` and numpy stand as on all workers.

    Between two elements the generators are those of the process again: nothing of it is disturbed.

    Args:
        seed: the same on all workers.

    Attributes:
        epoch: the number of the next iteration, from 0. Each iteration adds 1 when its first element is
            asked for: torch makes iterators that it never uses.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.epoch = 0

    def over(self, begin: Callable[[], Iterator[Any]], at_once: int) -> Iterator[Any]:
        """The elements of the iterator that `begin` makes, of which so many are drawn at once."""
        states, source = _seeded((self._seed << 20) + self.epoch), None
        self.epoch += 1
        while True:
            with _swapping:
                outside = _swap(states)
                try:
                    source = begin() if source is None else source
                    elements = list(islice(source, at_once))
                finally:
                    states = _swap(outside)
            yield from elements
            if len(elements) < at_once:
                return


_States = tuple[torch.Tensor, Any, Any]


def _seeded(seed: int) -> _States:
    return (
        torch.Generator().manual_seed(seed).get_state(),
        random.Random(seed).getstate(),
        np.random.RandomState(seed % 2**32).get_state(),
    )


def _swap(states: _States) -> _States:
    """Sets the generators, and returns how they stood."""
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002  # the user's samplers draw from it
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    return before
