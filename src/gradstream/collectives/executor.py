"""Carries out one rank's plan: everything that need not wait runs at the same time, piece by piece.

`PlanProgress` says which steps may continue. A driver moves the bytes: `SocketDriver` over data sockets, on a
thread, and `StreamDriver` over the streams of the communicator, on the event loop. Before a step touches
elements it waits until earlier steps are done with them. So a long vector is sent on while it still arrives,
in both directions at once. The order of additions depends on the schedule alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from gradstream.collectives.communicator import Communicator
from gradstream.collectives.schedule import DependencyPlan, Operation, PlanProgress, Recv, Send, Step
from gradstream.collectives.socket_driver import SocketDriver
from gradstream.errors import ClosedError, ConfigError, PeerLostError, RefusedError
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Received, Stream, copy_elements
from gradstream.wire import v1
from gradstream.wire.frames import to_wire

# ---- stream driver -----------------------------------------------------------------------
# Carries out one rank's plan over streams: tasks on the event loop, one for each peer and direction.
#
# Virtual nodes exchange in this way, and so do real ones between which there are no data sockets.

BRIEF_ELEMS = 1 << 14
"""The event loop itself adds up to this many elements, and sends such messages one after the other. To wake another
thread or task would take longer."""


class StreamDriver:
    """Implements `ScheduleDriver`: carries out one collective operation over streams.

    Args:
        progress: progress of this rank's plan, in elements.
        operation: the operation that all ranks carry out.
        tensor: (elems,) the vector, borrowed for writing.
        streams: the stream to each peer, by the peer's number in the plan.
    """

    def __init__(
        self,
        progress: PlanProgress,
        operation: Operation,
        tensor: torch.Tensor,
        streams: Mapping[int, Stream],
        runtime: Runtime,
    ) -> None:
        self._progress = progress
        self._steps = progress.plan.steps
        self._operation = operation
        self._tensor = tensor
        self._streams = streams
        self._runtime = runtime
        self._dtype = to_wire(tensor.dtype)
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []  # (step, position) that must be free

    async def run(self) -> None:
        """See `ScheduleDriver.run`."""
        brief_elems = min(BRIEF_ELEMS, self._progress.piece)
        if all(step.stop - step.start <= brief_elems for step in self._steps):
            await self._one_by_one()
            return
        plan = self._progress.plan
        sends = (self._blame(peer, self._send_all(peer, numbers)) for peer, numbers in plan.sends.items())
        recvs = (self._blame(peer, self._recv_all(peer, numbers)) for peer, numbers in plan.recvs.items())
        await self._runtime.gather(*sends, *recvs)

    async def _one_by_one(self) -> None:
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for step in self._steps:
            counts, move = (sent, self._send_step) if isinstance(step, Send) else (received, self._recv_step)
            await self._blame(step.peer, move(step, counts[step.peer]))
            counts[step.peer] += 1

    async def _send_step(self, step: Step, index: int) -> None:
        frame = self._frame(index, step.stop - step.start)
        await self._streams[step.peer].send(frame, self._tensor[step.start : step.stop])

    async def _recv_step(self, step: Step, index: int) -> None:
        stream = self._streams[step.peer]
        payload = self._checked(stream.peer, await stream.recv(), index, step.stop - step.start)
        await self._take(step, self._tensor[step.start : step.stop], payload)

    async def _blame(self, peer: int, work: Coroutine[Any, Any, None]) -> None:
        """Names the peer whose stream ends while `work` uses it."""
        try:
            await work
        except (ClosedError, RefusedError) as error:
            raise self._left(self._streams[peer].peer) from error

    async def _send_all(self, peer: int, numbers: Sequence[int]) -> None:
        stream = self._streams[peer]
        for index, (number, start, stop) in enumerate(self._progress.pieces(numbers)):
            await self._until_free(number, stop)
            await stream.send(self._frame(index, stop - start), self._tensor[start:stop])
            self._advance(number, stop)

    async def _recv_all(self, peer: int, numbers: Sequence[int]) -> None:
        stream, pieces = self._streams[peer], list(self._progress.pieces(numbers))
        stream.land(partial(self._place, pieces))
        for index, (number, start, stop) in enumerate(pieces):
            received = await stream.recv()
            payload = self._checked(stream.peer, received, index, stop - start)
            if received is not None and not received.landed:
                await self._until_free(number, stop)
                await self._take(self._steps[number], self._tensor[start:stop], payload)
            self._advance(number, stop)
        stream.land(None)

    async def _until_free(self, number: int, stop: int) -> None:
        """Waits until earlier steps are done with a step's elements below `stop`."""
        if self._progress.limit(number) < stop:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((number, stop, future))
            await future

    def _advance(self, number: int, stop: int) -> None:
        self._progress.passed[number] = stop
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if self._progress.limit(waiter[0]) < waiter[1]:
                self._waiters.append(waiter)
            elif not waiter[2].done():
                waiter[2].set_result(None)

    def _place(self, pieces: Sequence[tuple[int, int, int]], chunk: v1.Chunk) -> torch.Tensor | None:
        """Memory that can receive the payload of an arriving chunk directly.

        None if the payload is to be added, or an earlier step still needs the old elements.
        """
        operation = self._operation
        if (chunk.sequence, chunk.version) != (operation.number, operation.digest):
            return None
        if chunk.index >= len(pieces):
            return None
        number, start, stop = pieces[chunk.index]
        if _adds(self._steps[number]) or (chunk.elems, chunk.dtype) != (stop - start, self._dtype):
            return None
        return self._tensor[start:stop] if self._progress.limit(number) >= stop else None

    async def _take(self, step: Step, target: torch.Tensor, payload: torch.Tensor) -> None:
        if not _adds(step):
            copy_elements(target, payload)
            return
        # The group has borrowed the whole vector, so nothing is lent here.
        elems = payload.numel()
        work = Work("reduce", elems=elems, brief=elems <= BRIEF_ELEMS)
        await self._runtime.compute(lambda _: _add(target, payload), work=work, lane="exchange")

    def _frame(self, index: int, elems: int) -> v1.Frame:
        operation = self._operation
        chunk = v1.Chunk(
            index=index, sequence=operation.number, elems=elems, dtype=self._dtype, version=operation.digest
        )
        return v1.Frame(chunk=chunk)

    def _checked(self, peer: str, received: Received | None, index: int, elems: int) -> torch.Tensor:
        """The payload of the chunk that is expected next."""
        operation = self._operation
        if received is None:
            raise self._left(peer)
        chunk, payload = received.frame.chunk, received.payload
        if (chunk.sequence, chunk.version) != (operation.number, operation.digest):
            raise operation.mismatch(peer, chunk.sequence)
        if payload is None or (chunk.index, chunk.elems, chunk.dtype) != (index, elems, self._dtype):
            raise ConfigError(
                f"{operation.text}: chunk {chunk.index} of {chunk.elems} elements came from {peer}, expected "
                f"chunk {index} of {elems}; all ranks must have the same version"
            )
        return payload

    def _left(self, peer: str) -> PeerLostError:
        return PeerLostError(peer, f"left the group before {self._operation.text} was done")


def _adds(step: Step) -> bool:
    return isinstance(step, Recv) and step.add


def _add(target: torch.Tensor, source: torch.Tensor) -> None:
    np.add(target.numpy(), source.numpy(), out=target.numpy())


# ---- executor ----------------------------------------------------------------------------


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
