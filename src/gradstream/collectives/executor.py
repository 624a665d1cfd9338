"""Carries out one rank's plan: everything that need not wait runs at the same time, piece by piece.

`PlanProgress` says which steps may go on. A driver moves the bytes: `SocketDriver` over data sockets, on a
thread, and `StreamDriver` over the streams of the communicator, on the event loop. Before a step touches
elements it waits until earlier steps are done with them. So a long vector is sent on while it still arrives,
in both directions at once. The order of additions depends on the schedule alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gradstream.collectives.communicator import Communicator
from gradstream.collectives.schedule import DependencyPlan, Operation, PlanProgress
from gradstream.collectives.socket_driver import SocketDriver
from gradstream.collectives.stream_driver import StreamDriver


class ScheduleDriver(Protocol):
    """Moves the bytes of one operation."""

    async def run(self) -> None:
        """Returns when this rank has sent and received everything that its plan says.

        Raises:
            PeerLostError: a rank is gone, or has left before the operation was done.
            ConfigError: another rank carries out another operation.
        """
        ...


async def carry_out(
    communicator: Communicator,
    ranks: Sequence[int],
    operation: Operation,
    plan: DependencyPlan,
    tensor: torch.Tensor,
    piece_elems: int,
) -> None:
    """Runs an operation over data sockets if they lead to all of `ranks`, else over streams.

    Args:
        communicator: its ranks have met.
        ranks: the ranks that take part, in the order in which the plan numbers them.
        operation: what the ranks do.
        plan: plan of this rank.
        tensor: (elems,), borrowed for writing.
        piece_elems: the most elements that are moved or added at once.

    Raises:
        PeerLostError, ConfigError: see `ScheduleDriver.run`.
    """
    runtime, data_sockets = communicator.runtime, communicator.data_sockets
    others = {number: rank for number, rank in enumerate(ranks) if rank != communicator.rank}
    driver: ScheduleDriver
    if data_sockets is not None and data_sockets.reach(others.values()):
        sockets = {number: data_sockets.to(rank) for number, rank in others.items()}
        progress = PlanProgress(plan, piece_elems, tensor.element_size())
        driver = SocketDriver(progress, operation, tensor, sockets, data_sockets.in_thread, runtime.now)
    else:
        streams = {number: communicator.stream(rank) for number, rank in others.items()}
        driver = StreamDriver(PlanProgress(plan, piece_elems), operation, tensor, streams, runtime)
    await driver.run()
