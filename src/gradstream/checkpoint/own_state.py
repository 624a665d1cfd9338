"""What a worker has of its own: the service "state", and its few bytes as safetensors.

A model's buffers (a BatchNorm's running means) are each worker's own. Whoever needs them, for a
checkpoint or for an evaluation, asks the worker: method "state", answered by Body frames that
together are one safetensors file, whose metadata tells how many samples and minibatches the worker
has gone through. Asked for what is fixed, it gives the frozen parameters of its model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy

from gradstream.checkpoint.format import TensorSpec
from gradstream.errors import DataError, RefusedError
from gradstream.model.buffers import Buffers, average_buffers
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.untrusted import parse_json
from gradstream.wire import v1

__all__ = ["CHECK", "EXTRA", "EXTRA_FILE", "METHOD", "OwnState", "ask", "averaged", "serve"]

METHOD = "state"
PIECE_BYTES = 1 << 20
FIXED = b"fixed"
STEP_DIGITS = 18
EXTRA, EXTRA_FILE = "loop.", "loop"
"""How names begin of what a loop of the user's has besides its model, which nobody can register beforehand:
its optimizer makes it at its first step. And the name of its own file in a checkpoint."""
CHECK = EXTRA + "check"
"""Name of what an exchanged vector has behind a loop's gradients: numbers that are no parameters."""
EXTRA_FACTOR = 8
"""Times the size of the model: as much of that is taken."""
HEADER_BYTES = 1 << 20
"""More than any header that describes buffers in this bound is refused."""


@dataclass(frozen=True, slots=True)
class OwnState:
    """A worker's own state.

    Args:
        samples: it has gone through so many, those before the run was resumed included.
        buffers: of its model, by name.
        steps: its own minibatches, counted likewise.
    """

    samples: int
    buffers: Buffers
    steps: int = 0

    def encode(self) -> bytes:
        """As the bytes of a safetensors file."""
        arrays = {name: np.asarray(array, order="C") for name, array in self.buffers.items()}
        told = {"samples": str(self.samples), "steps": str(self.steps)}
        return safetensors.numpy.save(arrays, metadata=told)

    @classmethod
    def decode(cls, data: bytes, expected: Sequence[TensorSpec] | None = None) -> OwnState:
        """What `encode` has made.

        Args:
            expected: the tensors that must be there, and no others but those of `EXTRA`.

        Raises:
            DataError: it is not that.
        """
        try:
            buffers = safetensors.numpy.load(data)
            length = int.from_bytes(data[:8], "little")
            metadata = parse_json(data[8 : 8 + length], max_bytes=HEADER_BYTES)["__metadata__"]
            samples, steps = int(metadata["samples"]), int(metadata.get("steps", 0))
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"not a worker's state: {error!r}") from error
        if expected is not None:
            wanted = {spec.name: spec.shape for spec in expected}
            got = {name: array.shape for name, array in buffers.items() if not name.startswith(EXTRA)}
            if wanted != got:
                raise DataError(f"a worker's state has {got}, expected {wanted}")
        return cls(samples, buffers, steps)


def averaged(states: Sequence[OwnState]) -> dict[str, np.ndarray[Any, Any]]:
    """One set of buffers of several workers'; {} of none."""
    return average_buffers([(state.samples, state.buffers) for state in states]) if states else {}


def serve(
    endpoint: Endpoint,
    state: Callable[[int | None], Awaitable[OwnState]],
    fixed: Callable[[], Awaitable[OwnState]],
) -> None:
    """Answers whoever asks for this worker's own state, with what `state(step)` gives at that moment.

    `step` is None for the state as it is; else the one after so many steps is meant, if it is known.
    `fixed()` gives the frozen parameters in the place of buffers.
    """

    async def answer(stream: Stream) -> None:
        asked = v1.Body.FromString(stream.opened.body).data
        if asked not in (b"", FIXED) and not (asked.isdigit() and len(asked) <= STEP_DIGITS):
            raise RefusedError(
                endpoint.identity.name, "BAD_REQUEST", "a state is asked for of no step: expected a number"
            )
        found = await (fixed() if asked == FIXED else state(int(asked) if asked.isdigit() else None))
        data = found.encode()
        for start in range(0, len(data), PIECE_BYTES):
            await stream.send(v1.Frame(body=v1.Body(data=data[start : start + PIECE_BYTES])))

    endpoint.serve(METHOD, answer, model=False)


async def ask(
    endpoint: Endpoint,
    worker: str,
    expected: Sequence[TensorSpec],
    *,
    step: int | None = None,
    fixed: bool = False,
    silence_s: float = 30.0,
) -> OwnState:
    """A worker's own state, or its model's frozen parameters.

    Args:
        expected: its buffers, or frozen parameters, as it has registered them: they bound what is taken.
        step: as it was after so many steps, where that is known; None as it is.
        fixed: frozen parameters are asked for.

    Raises:
        PeerLostError, DeadlineError: it is gone, or says nothing.
        RefusedError: it said what does not fit.
    """
    limit_bytes = HEADER_BYTES + sum(spec.size_bytes for spec in expected) * (EXTRA_FACTOR if fixed else 1)
    request = v1.Body(data=FIXED if fixed else b"" if step is None else str(step).encode())
    stream = await endpoint.open(worker, METHOD, request, priority=Priority.CONTROL)
    parts: list[bytes] = []
    try:
        await stream.end()
        while (received := await stream.recv(silence_s)) is not None:
            parts.append(received.frame.body.data)
            if sum(map(len, parts)) > limit_bytes:
                raise RefusedError(worker, "BAD_REQUEST", f"its state has more than {limit_bytes} bytes")
    finally:
        stream.cancel("done")
    try:
        return OwnState.decode(b"".join(parts), expected)
    except DataError as error:
        raise RefusedError(worker, "BAD_REQUEST", str(error)) from error
