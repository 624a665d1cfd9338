"""Carries out one rank's plan: everything at once that need not wait, piece by piece.

For each peer there is a task that sends and one that receives. Before it takes a piece in hand, a step
waits until earlier steps have passed the same elements. So a long vector is sent on while it still
arrives, in both directions at once, and what is added in which order depends on the schedule alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gradstream.collectives.communicator import Communicator
from gradstream.collectives.operation import Operation
from gradstream.collectives.plan import DependencyPlan
from gradstream.collectives.schedule import Recv, Send, Step
from gradstream.collectives.socket_executor import SocketExecutor
from gradstream.collectives.socket_io import PlanProgress
from gradstream.errors import ClosedError, ConfigError, PeerLostError, RefusedError
from gradstream.runtime.base import ComputeProgress, Runtime, Work
from gradstream.transport.base import Received, Stream
from gradstream.wire import v1
from gradstream.wire.dtypes import to_wire

__all__ = ["ScheduleExecutor", "carry_out"]

BRIEF_ELEMS = 1 << 14
"""Sums of so few elements are made on the event loop, and such messages sent one after the other: another
thread, or a task, would take longer to wake."""


async def carry_out(
    mesh: Communicator,
    ranks: Sequence[int],
    operation: Operation,
    plan: DependencyPlan,
    tensor: torch.Tensor,
    piece_elems: int,
) -> None:
    """By the mesh's lines, where it has them to all of `ranks`, else by its streams.

    Args:
        mesh: of ranks that have met.
        ranks: those of it that take part, as the plan numbers them.
        operation: what they do.
        plan: of this rank.
        tensor: the elements, borrowed for writing.
        piece_elems: the most that goes at once.

    Raises:
        PeerLostError, ConfigError: see `ScheduleExecutor.play`.
    """
    lines, others = mesh.lines, {number: rank for number, rank in enumerate(ranks) if rank != mesh.rank}
    if lines is not None and lines.join(others.values()):
        by_number = {number: lines.line(rank) for number, rank in others.items()}
        passage = PlanProgress(operation, plan, tensor, piece_elems * tensor.element_size())
        await lines.play(SocketExecutor(passage, plan, by_number, mesh.runtime.now))
    else:
        streams = {number: mesh.stream(rank) for number, rank in others.items()}
        await ScheduleExecutor(mesh.runtime, operation, plan, tensor, piece_elems, streams).play()


class ScheduleExecutor:
    """One operation, while it lasts.

    Args:
        runtime: of this node.
        operation: what it is.
        plan: of this rank.
        tensor: the elements, borrowed for writing.
        piece_elems: the most that goes in one chunk.
        streams: by rank.
    """

    def __init__(
        self,
        runtime: Runtime,
        operation: Operation,
        plan: DependencyPlan,
        tensor: torch.Tensor,
        piece_elems: int,
        streams: Mapping[int, Stream],
    ) -> None:
        self._runtime = runtime
        self._operation = operation
        self._plan = plan
        self._tensor = tensor
        self._piece_elems = piece_elems
        self._streams = streams
        self._passed: list[ComputeProgress] = []  # of each step: elements below are done with
        self._dtype = to_wire(tensor.dtype)

    async def play(self) -> None:
        """Returns when this rank has sent and received all that it is to.

        Raises:
            PeerLostError: a rank is gone, or has left before it was done.
            ConfigError: another rank does something else.
        """
        if all(step.stop - step.start <= min(BRIEF_ELEMS, self._piece_elems) for step in self._plan.steps):
            await self._in_order()
            return
        self._passed = [ComputeProgress(step.start) for step in self._plan.steps]
        sends = (self._with(peer, self._send_all(peer, own)) for peer, own in self._plan.sends.items())
        recvs = (self._with(peer, self._recv_all(peer, own)) for peer, own in self._plan.recvs.items())
        await self._runtime.gather(*sends, *recvs)

    async def _in_order(self) -> None:
        """Short messages, one step after the other: tasks would take longer than they save."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for step in self._plan.steps:
            counts, one = (sent, self._send_step) if isinstance(step, Send) else (received, self._recv_step)
            await self._with(step.peer, one(step, counts[step.peer]))
            counts[step.peer] += 1

    async def _send_step(self, step: Step, index: int) -> None:
        await self._streams[step.peer].send(
            self._frame(index, step.stop - step.start), self._tensor[step.start : step.stop]
        )

    async def _recv_step(self, step: Step, index: int) -> None:
        stream = self._streams[step.peer]
        payload = self._checked(stream.peer, await stream.recv(), index, step.stop - step.start)
        await self._take(step, self._tensor[step.start : step.stop], payload)

    async def _with(self, peer: int, lane: Coroutine[Any, Any, None]) -> None:
        try:
            await lane
        except (ClosedError, RefusedError) as error:
            message = f"left the group before {self._operation.text} was done"
            raise PeerLostError(self._streams[peer].peer, message) from error

    async def _turn(self, number: int, stop: int) -> None:
        """Waits until earlier steps have passed this one's elements below `stop`."""
        for earlier in self._plan.after[number]:
            await self._passed[earlier].reached(min(stop, self._plan.steps[earlier].stop))

    async def _send_all(self, peer: int, numbers: Sequence[int]) -> None:
        stream = self._streams[peer]
        for index, (number, start, stop) in enumerate(self._pieces(numbers)):
            await self._turn(number, stop)
            await stream.send(self._frame(index, stop - start), self._tensor[start:stop])
            self._passed[number].advance(stop)

    def _frame(self, index: int, elems: int) -> v1.Frame:
        operation = self._operation
        chunk = v1.Chunk(
            index=index,
            sequence=operation.number,
            elems=elems,
            dtype=self._dtype,
            version=operation.digest,
        )
        return v1.Frame(chunk=chunk)

    async def _recv_all(self, peer: int, numbers: Sequence[int]) -> None:
        stream, pieces = self._streams[peer], list(self._pieces(numbers))
        stream.land(partial(self._place, pieces))
        for index, (number, start, stop) in enumerate(pieces):
            received = await stream.recv()
            payload = self._checked(stream.peer, received, index, stop - start)
            if received is not None and not received.landed:
                await self._turn(number, stop)
                await self._take(self._plan.steps[number], self._tensor[start:stop], payload)
            self._passed[number].advance(stop)
        stream.land(None)

    def _pieces(self, numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(step, start, stop) of what goes in one chunk each; both sides cut alike."""
        for number in numbers:
            step = self._plan.steps[number]
            for start in range(step.start, step.stop, self._piece_elems):
                yield number, start, min(start + self._piece_elems, step.stop)

    def _place(self, pieces: Sequence[tuple[int, int, int]], chunk: v1.Chunk) -> torch.Tensor | None:
        """Where the payload of a chunk that is about to arrive can be received into at once.

        Not where it is added, nor where an earlier step still needs what is there.
        """
        operation = self._operation
        if (chunk.sequence, chunk.version) != (operation.number, operation.digest) or chunk.index >= len(
            pieces
        ):
            return None
        number, start, stop = pieces[chunk.index]
        step = self._plan.steps[number]
        if (
            not isinstance(step, Recv)
            or step.add
            or (chunk.elems, chunk.dtype) != (stop - start, self._dtype)
        ):
            return None
        return self._tensor[start:stop] if self._is_turn(number, stop) else None

    def _is_turn(self, number: int, stop: int) -> bool:
        steps, passed = self._plan.steps, self._passed
        return all(passed[other].value >= min(stop, steps[other].stop) for other in self._plan.after[number])

    async def _take(self, step: Step, target: torch.Tensor, payload: torch.Tensor) -> None:
        if isinstance(step, Recv) and step.add:
            await self._add(target, payload)
        else:
            _copy(target, payload)

    async def _add(self, target: torch.Tensor, payload: torch.Tensor) -> None:
        # The group has borrowed all of it, so nothing is lent here.
        elems = payload.numel()
        work = Work("reduce", elems=elems, brief=elems <= BRIEF_ELEMS)
        await self._runtime.compute(lambda _: _add(target, payload), work=work, lane="exchange")

    def _checked(self, peer: str, received: Received | None, index: int, elems: int) -> torch.Tensor:
        """The payload of a chunk that is the one expected."""
        operation = self._operation
        if received is None:
            raise PeerLostError(peer, f"left the group before {operation.text} was done")
        chunk, payload = received.frame.chunk, received.payload
        if (chunk.sequence, chunk.version) != (operation.number, operation.digest):
            raise operation.mismatch(peer, chunk.sequence)
        if payload is None or (chunk.index, chunk.elems, chunk.dtype) != (index, elems, self._dtype):
            raise ConfigError(
                f"{operation.text}: chunk {chunk.index} of {chunk.elems} elements came from {peer}, expected "
                f"chunk {index} of {elems}; all ranks must have the same version"
            )
        return payload


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """On this thread alone: torch would wake its others for a mere megabyte."""
    if not target.is_meta:
        target.numpy()[...] = source.numpy()


def _add(target: torch.Tensor, source: torch.Tensor) -> None:
    np.add(target.numpy(), source.numpy(), out=target.numpy())
