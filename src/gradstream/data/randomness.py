"""Seeds the global random generators for users' data code.

A data set that augments its samples draws from Python's `random`, or from the global generators of numpy or torch.
Without seeds these differ from run to run and from worker to worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def mixed(*words: int) -> int:
    """A seed of 63 bits, as a function of several numbers."""
    low, high = np.random.SeedSequence(words).generate_state(2, np.uint32).tolist()
    return int(low | (high & 0x7FFFFFFF) << 32)


class Generators:
    """A context with its own states of the three global generators, which last from one `with` to the next.

    Args:
        words: numbers from which the first states are seeded.
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
    """A context in which the global generators are seeded from `words`. Their states are restored afterwards."""
    with Generators(*words):
        yield


def seeded_iterator(make: Callable[[], Iterable[Any]], *words: int) -> Iterator[Any]:
    """The items of `make()`, which runs with generators seeded from `words`, also between two items."""
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
