"""Releases the resources of a node in the processes that a data loader forks from it.

A forked process inherits every connection of its parent. If it kept them open after the parent was killed, peers would
take the parent for alive.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import stat
from collections.abc import Callable

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
