"""What a process of a data loader's lets go of when it is forked from a node.

A forked process holds every connection of its parent. Were the parent killed, its peers would see
connections that live on, and take it for alive.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import stat
from collections.abc import Callable

__all__ = ["Isolated"]

_PR_SET_PDEATHSIG = 1


class Isolated:
    """A `worker_init_fn`: lets go of what is the node's, then calls the user's own.

    Args:
        own: the user's, or None.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self.own = own

    def __call__(self, worker: int) -> None:
        """Called by torch in the new process, with its number among the loader's."""
        gc.freeze()  # nothing of the node's is to be collected here: its finalizers expect its threads
        _die_with_parent()
        _close_sockets()
        if self.own is not None:
            self.own(worker)


def _die_with_parent() -> None:
    """Not to outlive a node that is killed, not even for the seconds in which torch would notice."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        pass  # not Linux: torch's own watch has to do


def _close_sockets() -> None:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        descriptor = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
        except OSError:
            pass  # the one that listed the folder
