"""`PeerStates`: what a worker with parameters of its own gives to others, by the method "replica".

    no request     all that it has, as a file: to the coordinator for a checkpoint, and to a worker that joins
    a `v1.Tensor`  a range of its parameters: to each worker that makes the mean of all, for a checkpoint or at the end

It answers between two rounds, when all of this is of the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from gradstream.checkpoint.own_state import receive_file, send_file
from gradstream.checkpoint.own_tensors import MOST_BYTES
from gradstream.errors import DataError, RefusedError
from gradstream.runtime.base import Runtime, Work
from gradstream.transport.base import Endpoint, Stream
from gradstream.wire import v1
from gradstream.worker.replica.peer import PeerReplica

METHOD = "replica"

SIGNS = 4
"""How often whoever waits for the end of a round hears within its patience that this worker lives."""

COUNTS = "counts"
"""Name of the tensor with the numbers of rounds, and of inner steps."""


class PeerStates:
    """Answers for one worker.

    Args:
        runtime: runtime of the worker's node.
        replica: the worker.
        silence_s: seconds of silence after which others give this worker up.

    Attributes:
        ended: the worker goes through no more rounds.
    """

    def __init__(self, runtime: Runtime, replica: PeerReplica, silence_s: float) -> None:
        self.ended = False
        self._runtime = runtime
        self._replica = replica
        self._silence_s = silence_s

    def serve(self, endpoint: Endpoint) -> None:
        """Answers from now on."""
        endpoint.serve(METHOD, self._answer, model=False)

    def end(self) -> None:
        """The worker goes through no more rounds."""
        self.ended = True
        self._replica.changed.ring()

    # ---- answers --------------------------------------------------------------------------

    async def _answer(self, stream: Stream) -> None:
        asked = v1.Body.FromString(stream.opened.body).data
        if asked:
            await self._answer_range(stream, v1.Tensor.FromString(asked))
            return
        await self._until(stream, last=False)
        replica = self._replica
        counts = {COUNTS: torch.tensor([replica.version, replica.steps.updates])}

        def copied(_: object) -> bytes:
            return safetensors.torch.save(
                {**{name: one.tensor for name, one in replica.own.items()}, **counts}
            )

        await send_file(stream, await self._copy(copied, safetensors.torch.save(counts)))

    async def _answer_range(self, stream: Stream, asked: v1.Tensor) -> None:
        start, stop = asked.tag, asked.tag + asked.elems
        if stop > len(self._replica.parameters):
            raise RefusedError(
                self._runtime.node, "BAD_REQUEST", f"the model has no elements {start} to {stop}"
            )
        await self._until(stream, last=bool(asked.sequence))
        parameters = self._replica.parameters
        await send_file(stream, await self._copy(lambda _: parameters.tensor[start:stop].numpy().tobytes()))

    async def _until(self, stream: Stream, *, last: bool) -> None:
        """Returns when the worker has begun, or, if `last`, has gone through its last round; and between two rounds.

        The worker begins no further round until `_copy` has released it.
        """
        for wait in (partial(self._ready, last), self._replica.still.acquire):
            while True:
                try:
                    await self._runtime.within(self._silence_s / SIGNS, wait())
                    break
                except TimeoutError:
                    await stream.waiting([f"{self._runtime.node}: in the middle of a round"])

    async def _ready(self, last: bool) -> None:
        while self._replica.version < 0 or (last and not self.ended):
            await self._replica.changed.wait()

    async def _copy(self, copy: Callable[[object], bytes], shape_only: bytes = b"") -> bytes:
        replica = self._replica
        try:
            work = Work("copy", elems=sum(map(len, replica.own.values())))
            reads = [one.all for one in replica.own.values()]
            return await self._runtime.compute(copy, work=work, reads=reads, shape_only=shape_only)
        finally:
            replica.still.release()


# ---- the other side -----------------------------------------------------------------------


async def copy_of(endpoint: Endpoint, worker: str, silence_s: float) -> Mapping[str, torch.Tensor]:
    """All that another worker has of its own, by name.

    Raises:
        PeerLostError, DeadlineError: it is gone, or silent.
        RefusedError: it does not answer with a state.
    """
    data = await receive_file(endpoint, worker, METHOD, b"", MOST_BYTES, silence_s)
    try:
        found: Mapping[str, torch.Tensor] = safetensors.torch.load(data)
    except SafetensorError as error:
        raise RefusedError(worker, "BAD_REQUEST", f"its state cannot be read: {error}") from error
    return found


async def elements_of(
    endpoint: Endpoint, worker: str, start: int, like: torch.Tensor, silence_s: float, *, last: bool
) -> torch.Tensor:
    """Elements of another worker's parameters, from `start` on, as many as there are in `like`.

    Args:
        endpoint: endpoint of the caller.
        worker: name of the worker.
        start: number of the first.
        like: of the same shape and dtype.
        silence_s: seconds of silence after which it is given up.
        last: asks for those after its last round, which it may still be about to finish.

    Raises:
        PeerLostError, DeadlineError: it is gone, or silent.
        RefusedError: it does not answer with as many elements.
    """
    request = v1.Tensor(tag=start, elems=len(like), sequence=int(last)).SerializeToString()
    size_bytes = like.nbytes
    data = await receive_file(endpoint, worker, METHOD, request, size_bytes, silence_s)
    if len(data) != size_bytes:
        raise RefusedError(
            worker, "BAD_REQUEST", f"{len(data)} bytes of its parameters; expected {size_bytes}"
        )
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(like.dtype)


def take_over(replica: PeerReplica, found: Mapping[str, torch.Tensor], where: str) -> None:
    """Takes the vectors of a state that `copy_of` or a checkpoint has given.

    Raises:
        DataError: it is of another model, strategy or update rule.
    """
    own = replica.own
    form = {name: (vector.tensor.shape, vector.tensor.dtype) for name, vector in own.items()}
    counts = found.get(COUNTS)
    if (
        form != {name: (one.shape, one.dtype) for name, one in found.items() if name != COUNTS}
        or counts is None
    ):
        raise DataError(
            f"worker-{replica.rank}: the state in {where} does not fit this model, strategy and update rule: it has "
            f"{', '.join(found)}; resume from another checkpoint, or with the options that the run had"
        )
    for name, vector in own.items():
        vector.tensor.copy_(found[name])


def go_on_after(replica: PeerReplica, found: Mapping[str, torch.Tensor]) -> None:
    """Goes on with the round after those of a state whose vectors were taken over."""
    replica.version, replica.steps.updates = (int(count) for count in found[COUNTS])
