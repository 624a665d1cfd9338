"""Random numbers that are equal on all workers while a DataLoader draws its order.

The workers divide the minibatches of one order without exchanging messages, so each must draw the same order,
whatever else its process has drawn before.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

_swapping = threading.RLock()
"""Several workers may be threads of one process, which share its generators."""


class CommonRandomState:
    """Iterates with the same state of the global generators of torch, `random` and numpy on all workers.

    Between two elements the generators have the state of the process again, which is not disturbed.

    Args:
        seed: seed of the states, the same on all workers.

    Attributes:
        epoch: number of the next iteration, from 0. An iteration adds 1 when its first element is taken:
            torch also makes iterators that it never uses.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.epoch = 0

    def iterate(self, begin: Callable[[], Iterator[Any]], at_once: int) -> Iterator[Any]:
        """The elements of the iterator that `begin` returns, drawn `at_once` at a time."""
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
    """Sets the states of the generators, and returns those before."""
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002  # the user's samplers use them
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    return before
