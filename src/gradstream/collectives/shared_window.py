"""The shared window: memory that all workers of a machine read and write without coordination.

Processes meet as an in-place group (`SharedGroup`) and use nothing of it but its `common` vectors, which outlive
any of the processes. The nodes of a simulation are in one process, where a vector is one object anyway.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from gradstream.collectives.factory import form_group
from gradstream.collectives.group import GroupMembers
from gradstream.memory import Memory, Vector
from gradstream.runtime.base import Runtime
from gradstream.runtime.real import RealRuntime
from gradstream.telemetry.events import Event
from gradstream.transport.base import Endpoint


class SharedWindow(Protocol):
    """Makes vectors that all ranks have."""

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """One vector of zeros for all ranks. Every rank asks for the same vectors, in the same order.

        Raises:
            PeerLostError, DeadlineError: the rank that makes the vector is gone or silent.
        """
        ...

    async def close(self) -> None:
        """Closes the window. Vectors stay for as long as somebody holds them. Idempotent."""
        ...


async def open_shared_window(
    runtime: Runtime, endpoint: Endpoint, members: GroupMembers, *, on_event: Callable[[Event], None]
) -> SharedWindow:
    """Opens the window that all ranks share. `form_group` describes the arguments and further errors.

    Raises:
        ConfigError: the ranks are not on one machine.
    """
    if not isinstance(runtime, RealRuntime):
        return _OneProcess(endpoint.identity.job, runtime.memory)
    return await form_group(runtime, endpoint, members, "shared", on_event=on_event)


_MADE: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""Vectors that the nodes of an event loop share, by job and name."""


class _OneProcess:
    """The shared window of nodes that run on one event loop.

    Args:
        job: job id; other jobs on this loop have vectors of their own.
        memory: memory of this node, which says whether vectors are shape-only.
    """

    def __init__(self, job: str, memory: Memory) -> None:
        self._job = job
        self._memory = memory

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `SharedWindow`. Each node keeps its own loans, since nodes may write the vector at the same time."""
        made = _MADE.setdefault(asyncio.get_running_loop(), {})
        # A shape-only simulation needs the values of its words, too.
        memory = self._memory if dtype.is_floating_point else Memory()
        tensor = made.get((self._job, name))
        if tensor is None:
            tensor = made[self._job, name] = memory.allocate(elems, dtype, name).tensor
        assert (len(tensor), tensor.dtype) == (elems, dtype)
        return Vector(name, tensor)

    async def close(self) -> None:
        """See `SharedWindow`."""
