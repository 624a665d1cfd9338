"""Carries out one rank's plan: everything at once that need not wait, piece by piece.

For each peer there is a task that sends and one that receives. Before it takes a piece in hand, a step
waits until earlier steps have passed the same elements. So a long vector is sent on while it still
arrives, in both directions at once, and what is added in which order depends on the schedule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradstream.collectives.plan import Plan
from gradstream.collectives.schedule import Recv
from gradstream.errors import ConfigError, PeerLostError
from gradstream.runtime.base import Progress, Runtime, Work
from gradstream.transport.base import Received, Stream
from gradstream.wire import v1
from gradstream.wire.dtypes import to_wire

__all__ = ["Operation", "Player"]

BRIEF_ELEMS = 1 << 14
"""Sums of so few elements are made on the event loop: another thread would take longer to wake."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What the ranks do together, for all of them to agree on.

    Args:
        number: of the operation in its group.
        digest: of what it is; chunks of another one are refused.
        text: the same for people.
    """

    number: int
    digest: int
    text: str


class Player:
    """One operation, while it lasts.

    Args:
        runtime: of this node.
        operation: what it is.
        plan: of this rank.
        tensor: the elements, borrowed for writing.
        piece_elems: the most that goes in one chunk.
        stream: that with a rank.
    """

    def __init__(
        self,
        runtime: Runtime,
        operation: Operation,
        plan: Plan,
        tensor: torch.Tensor,
        piece_elems: int,
        stream: Callable[[int], Stream],
    ) -> None:
        self._runtime = runtime
        self._operation = operation
        self._plan = plan
        self._tensor = tensor
        self._piece_elems = piece_elems
        self._stream = stream
        self._passed = [Progress(step.start) for step in plan.steps]  # elements below are done with
        self._dtype = to_wire(tensor.dtype)

    async def play(self) -> None:
        """Returns when this rank has sent and received all that it is to.

        Raises:
            PeerLostError, ClosedError: a stream failed.
            ConfigError: another rank does something else.
        """
        sends = (self._send_all(peer, numbers) for peer, numbers in self._plan.sends.items())
        recvs = (self._recv_all(peer, numbers) for peer, numbers in self._plan.recvs.items())
        await self._runtime.gather(*sends, *recvs)

    async def _turn(self, number: int, stop: int) -> None:
        """Waits until earlier steps have passed this one's elements below `stop`."""
        for earlier in self._plan.after[number]:
            await self._passed[earlier].reached(min(stop, self._plan.steps[earlier].stop))

    async def _send_all(self, peer: int, numbers: Sequence[int]) -> None:
        stream, operation, index = self._stream(peer), self._operation, 0
        for number in numbers:
            step = self._plan.steps[number]
            for start in range(step.start, step.stop, self._piece_elems):
                stop = min(start + self._piece_elems, step.stop)
                await self._turn(number, stop)
                chunk = v1.Chunk(
                    index=index,
                    sequence=operation.number,
                    elems=stop - start,
                    dtype=self._dtype,
                    version=operation.digest,
                )
                await stream.send(v1.Frame(chunk=chunk), self._tensor[start:stop])
                self._passed[number].advance(stop)
                index += 1

    async def _recv_all(self, peer: int, numbers: Sequence[int]) -> None:
        stream, index = self._stream(peer), 0
        for number in numbers:
            step = self._plan.steps[number]
            assert isinstance(step, Recv)
            start = step.start
            while start < step.stop:
                received = await stream.recv()
                payload = self._checked(stream.peer, received, index, step.stop - start)
                stop = start + payload.numel()
                await self._turn(number, stop)
                target = self._tensor[start:stop]
                if step.add:
                    await self._add(target, payload)
                else:
                    _copy(target, payload)
                self._passed[number].advance(stop)
                start, index = stop, index + 1

    async def _add(self, target: torch.Tensor, payload: torch.Tensor) -> None:
        # The group has borrowed all of it, so nothing is lent here.
        elems = payload.numel()
        work = Work("reduce", elems=elems, brief=elems <= BRIEF_ELEMS)
        await self._runtime.compute(lambda _: _add(target, payload), work=work, lane="exchange")

    def _checked(self, peer: str, received: Received | None, index: int, room_elems: int) -> torch.Tensor:
        """The payload of a chunk that is the one expected."""
        operation = self._operation
        if received is None:
            raise PeerLostError(peer, f"left the group before {operation.text} was done")
        chunk, payload = received.frame.chunk, received.payload
        if (chunk.sequence, chunk.version) != (operation.number, operation.digest):
            raise ConfigError(
                f"{operation.text} is this rank's operation {operation.number} of the group, but {peer} does "
                f"another (its number {chunk.sequence}): all ranks must call the same operations in the same "
                "order, with as many elements"
            )
        if payload is None or chunk.index != index or not 0 < payload.numel() <= room_elems:
            raise ConfigError(
                f"{operation.text}: chunk {chunk.index} of {chunk.elems} elements came from {peer}, expected "
                f"chunk {index} of at most {room_elems}; all ranks must have the same version"
            )
        return payload


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """On this thread alone: torch would wake its others for a mere megabyte."""
    if not target.is_meta:
        target.numpy()[...] = source.numpy()


def _add(target: torch.Tensor, source: torch.Tensor) -> None:
    np.add(target.numpy(), source.numpy(), out=target.numpy())
