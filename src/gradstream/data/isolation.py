"""Releases the resources of a node in the processes that a data loader forks from it.

A forked process inherits every connection of its parent. If it kept them open after the parent was killed, peers would
take the parent for alive.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# ---- isolation ---------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1


class Isolated:
    """A `worker_init_fn` that releases resources of the node and then calls the user's function.

    Args:
        own: the user's `worker_init_fn`, or None.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self.own = own

    def __call__(self, worker: int) -> None:
        """Torch calls this in the new process, with the number of the process."""
        gc.freeze()  # finalizers of the node's objects expect the node's threads
        _die_with_parent()
        _close_sockets()
        if self.own is not None:
            self.own(worker)


def _die_with_parent() -> None:
    """Ends this process as soon as the node is killed; torch would notice it seconds later."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        pass  # not Linux: torch's own check remains


def _close_sockets() -> None:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        descriptor = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
        except OSError:
            pass  # the descriptor that listed the folder


# ---- randomness --------------------------------------------------------------------------
# Seeds the global random generators for users' data code.
#
# A data set that augments its samples draws from Python's `random`, or from the global generators of numpy or torch.
# Without seeds these differ from run to run and from worker to worker.


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
