"""The generators that users' data code draws from, under seeds of ours.

A data set that augments its samples draws from Python's `random`, numpy's global generator or
torch's, wherever it was written. Left alone these differ from run to run and from worker to worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["Generators", "mixed", "seeded", "seeded_iterator"]


def mixed(*words: int) -> int:
    """One seed of 63 bits out of several numbers."""
    low, high = np.random.SeedSequence(words).generate_state(2, np.uint32).tolist()
    return int(low | (high & 0x7FFFFFFF) << 32)


class Generators:
    """States of the three global generators, in force inside a `with` and kept between two of them.

    Args:
        words: what the states begin as a function of.
    """

    def __init__(self, *words: int) -> None:
        self._seed: int | None = mixed(*words)
        self._mine: Any = None
        self._outside: Any = None

    def __enter__(self) -> Generators:
        self._outside = _states()
        if self._seed is not None:
            _seed(self._seed)
            self._seed = None
        else:
            _restore(self._mine)
        return self

    def __exit__(self, *exception: object) -> None:
        self._mine = _states()
        _restore(self._outside)


@contextmanager
def seeded(*words: int) -> Iterator[None]:
    """The global generators begin as a function of `words`, and are put back afterwards."""
    with Generators(*words):
        yield


def seeded_iterator(make: Callable[[], Iterable[Any]], *words: int) -> Iterator[Any]:
    """What `make()` yields; neither making it nor what it draws between two items sees other seeds."""
    generators = Generators(*words)
    with generators:
        items = iter(make())
    while True:
        with generators:
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  what users' code may draw from
    torch.default_generator.manual_seed(seed)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
