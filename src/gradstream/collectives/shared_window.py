"""Memory that all workers of a machine have in common, in which each writes as it likes.

Processes meet as an in-place group does (`SharedGroup`), and take nothing from it but `common` vectors: these
outlive any of them. The nodes of a simulation are in one process: there a vector is one object anyway.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gradstream.collectives.factory import form_group
from gradstream.memory import Memory, Vector
from gradstream.runtime.base import Runtime
from gradstream.runtime.real import RealRuntime
from gradstream.telemetry.events import Event
from gradstream.transport.base import Endpoint

__all__ = ["SharedWindow", "form_commons"]


class SharedWindow(Protocol):
    """Where vectors come from that all ranks have."""

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """A vector of zeros, one for all. Every rank asks for the same ones, in the same order.

        Raises:
            PeerLostError, DeadlineError: the rank that has to make it is gone or silent.
        """
        ...

    async def close(self) -> None:
        """Nothing more is asked for. Vectors stay for as long as somebody holds them. Idempotent."""
        ...


async def form_commons(
    runtime: Runtime,
    endpoint: Endpoint,
    names: Sequence[str],
    rank: int,
    epoch: int,
    *,
    silence_s: float,
    on_event: Callable[[Event], None],
) -> SharedWindow:
    """All ranks come together; see `form_group`, which says what the arguments are and what it raises.

    Raises:
        ConfigError: they are not on one machine.
    """
    if not isinstance(runtime, RealRuntime):
        return _OneProcess(endpoint.identity.job, runtime.memory)
    return await form_group(
        runtime, endpoint, names, rank, epoch, "shared", silence_s=silence_s, on_event=on_event
    )


_MADE: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""What nodes of one event loop have in common, by job and name."""


class _OneProcess:
    """The commons of nodes that run on one event loop.

    Args:
        job: runs of other jobs on this loop have vectors of their own.
        memory: of this node: whether it is shape-only.
    """

    def __init__(self, job: str, memory: Memory) -> None:
        self._job = job
        self._memory = memory

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `SharedWindow`. Each node has a book of loans of its own: to collide is what the vector is for."""
        made = _MADE.setdefault(asyncio.get_running_loop(), {})
        memory = self._memory if dtype.is_floating_point else Memory()  # words are there in a shape-only, too
        tensor = made.get((self._job, name))
        if tensor is None:
            tensor = made[self._job, name] = memory.allocate(elems, dtype, name).tensor
        assert (len(tensor), tensor.dtype) == (elems, dtype)
        return Vector(name, tensor)

    async def close(self) -> None:
        """See `SharedWindow`."""
