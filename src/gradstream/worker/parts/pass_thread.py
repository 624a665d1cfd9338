"""`PassThread`: a part's passes one after the other in its thread of arithmetic, which waits for the other parts there.

The event loop meanwhile asks parts that are silent for long whether they are there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import torch

from gradstream.memory import Span
from gradstream.pipeline.executor import TensorTransfer
from gradstream.runtime.base import Report, Runtime, Work
from gradstream.runtime.tasks import interrupt_on_cancel
from gradstream.worker.parts.channel import PartChannel
from gradstream.worker.parts.sockets import PartSockets
from gradstream.worker.parts.value_forms import as_it_was, as_sent, decoded, encoded


async def pass_thread(runtime: Runtime, channel: PartChannel) -> PassThread | None:
    """The thread of a part; None where its passes need the event loop, since there are no sockets to all parts.

    All parts call it at once.
    """
    sockets = channel.sockets
    if sockets is None or not await sockets.connect(channel.agree):
        return None
    return PassThread(runtime, channel, sockets)


class PassThread:
    """Carries out passes. Implements `pipeline.executor.TensorChannel` for them.

    Args:
        runtime: of the process.
        channel: to the other parts.
        sockets: of the channel.
    """

    def __init__(self, runtime: Runtime, channel: PartChannel, sockets: PartSockets) -> None:
        self._runtime = runtime
        self._channel = channel
        self._sockets = sockets

    async def run(
        self,
        passes: Callable[[Report], None],
        *,
        work: Work,
        reads: Sequence[Span],
        writes: Sequence[Span],
        on_progress: Report | None = None,
    ) -> None:
        """Carries out `passes` in the thread; see `Runtime.compute`. If it is cancelled, the sockets are closed first.

        Raises:
            PeerLostError, DeadlineError: another part was lost.
            BaseException: whatever a pass raises.
        """
        computing = self._runtime.compute(
            passes, work=work, reads=reads, writes=writes, on_progress=on_progress
        )
        watching = self._runtime.spawn(self._watch(), name=f"{self._runtime.node}-watches-parts")
        try:
            await interrupt_on_cancel(asyncio.ensure_future(computing), self._sockets.close)
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """Asks a part for which the thread has waited all the time whether it is there."""
        before = None
        while True:
            await self._runtime.sleep(self._channel.silence_s)
            awaited = self._sockets.awaited
            if awaited is not None and awaited is before:
                try:
                    await self._channel.ask(*awaited)
                except Exception as error:
                    self._sockets.fail(error)
            before = awaited

    async def send(self, transfer: TensorTransfer, tensor: torch.Tensor) -> None:
        """See `TensorChannel`: the tensor must not change any more."""
        form = self._channel.form(transfer)
        flat = as_sent(tensor if form.codec is None else encoded(form.codec, tensor))
        if len(flat):
            self._sockets.send(transfer.target, form.tag, flat)

    async def receive(self, transfer: TensorTransfer) -> torch.Tensor:
        """See `TensorChannel`: waits in the thread."""
        form = self._channel.form(transfer)
        if not math.prod(form.shape):
            return torch.empty(form.shape, dtype=form.dtype)
        came = self._sockets.receive(transfer.source, form.tag, form.size_bytes, form.what)
        if form.codec is not None:
            return decoded(form.codec, came, form.shape, form.dtype)
        return as_it_was(came, form.shape, form.dtype)
