"""A worker's part of a checkpoint beside the common vectors, and the method "state" that sends it.

Each worker has its own buffers of the model, such as the running means of BatchNorm. A node that needs them, for
a checkpoint or an evaluation, calls the worker's method "state". The worker answers with Body frames that
together are one safetensors file. Its metadata say how many samples and minibatches the worker has gone
through. On request the worker sends the frozen parameters of its model instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from gradstream.checkpoint.format import TensorSpec
from gradstream.errors import DataError, RefusedError
from gradstream.model.buffers import Buffers, average_buffers
from gradstream.runtime.base import Storage
from gradstream.transport.base import Endpoint, Priority, Stream
from gradstream.untrusted import parse_json
from gradstream.wire import v1

# ---- own state ---------------------------------------------------------------------------

METHOD = "state"

PIECE_BYTES = 1 << 20
"""Bytes of the file in one frame."""

FIXED, LAST, ENTRY = b"fixed", b"last", b"entry"
"""The requests for frozen parameters, for the state after the worker's last minibatch, and for all that a newcomer to
users' own loops needs."""

STEP_DIGITS = 18
"""The most digits of a step in a request."""

EXTRA, EXTRA_FILE = "loop.", "loop"
"""Prefix of the tensors that a user's loop has besides its model, and their file in a checkpoint. They
are not registered: the loop's optimizer makes them at its first step."""

FIRST = f"{EXTRA}first."
"""Prefix of the parameters with which local steps begin, on their way to a loop."""

STATES = EXTRA + "registered"
"""Name of the array with the states of a loop's registered objects, without their tensors, as JSON."""

PLACES = "place in the data"
"""Name of the loop's own place among these objects; no name that a script could give."""

SESSION = EXTRA + "session"
"""Name of the array with a session's own state for a newcomer, as JSON."""

CHECK = EXTRA + "check"
"""Name of the numbers that an exchanged vector has behind the gradients of a loop. They are not parameters."""

EXTRA_FACTOR = 8
"""The tensors of a user's loop may have at most this many times the bytes of the model."""

GROWTH_BYTES = 64 << 20
"""Most bytes by which buffers that a worker's model has recreated may exceed those with which it began."""

HEADER_BYTES = 1 << 24
"""The most bytes of the file's header."""


def worker_file(worker: str) -> str:
    """The name of the file with a worker's own state."""
    return f"{worker}.safetensors"


@dataclass(frozen=True, slots=True)
class OwnState:
    """The state that differs between workers: the buffers of a worker's model, and how far the worker is.

    Args:
        samples: number of samples that the worker has gone through, including samples before the run was resumed.
        buffers: buffers of the worker's model, by name.
        steps: number of minibatches that the worker has gone through, including those before the run was resumed.
    """

    samples: int
    buffers: Buffers
    steps: int = 0

    def encode(self) -> bytes:
        """Returns the bytes of a safetensors file."""
        arrays = {name: np.asarray(array, order="C") for name, array in self.buffers.items()}
        metadata = {"samples": str(self.samples), "steps": str(self.steps)}
        return safetensors.numpy.save(arrays, metadata=metadata)

    @classmethod
    def decode(cls, data: bytes, expected: Sequence[TensorSpec] | None = None) -> OwnState:
        """Parses the result of `encode`.

        Args:
            expected: the tensors that it must have; None allows any. Others must have the prefix `EXTRA`.

        Raises:
            DataError: it is malformed, or has other tensors.
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
    """Returns the averaged buffers of several workers; {} for none."""
    return average_buffers([(state.samples, state.buffers) for state in states]) if states else {}


def serve(
    endpoint: Endpoint,
    state: Callable[[int | None], Awaitable[OwnState]],
    fixed: Callable[[], Awaitable[OwnState]],
    last: Callable[[], Awaitable[OwnState]],
    entry: Callable[[], Awaitable[bytes]],
) -> None:
    """Serves the worker's own state.

    Args:
        state: `state(step)` returns the state after this many steps, if the worker still has it; `state(None)`
            returns the current one.
        fixed: returns the frozen parameters in place of buffers.
        last: returns the state after the worker's last minibatch, once it is done.
        entry: returns what a newcomer needs, as the bytes of a file: encoding may take long.
    """
    named = {FIXED: fixed, LAST: last}

    async def answer(stream: Stream) -> None:
        asked = v1.Body.FromString(stream.opened.body).data
        if asked not in (b"", ENTRY, *named) and not (asked.isdigit() and len(asked) <= STEP_DIGITS):
            raise RefusedError(
                endpoint.identity.name,
                "BAD_REQUEST",
                "the request for a state has no valid step: expected a number",
            )
        if asked == ENTRY:
            await send_file(stream, await entry())
            return
        answered = named[asked]() if asked in named else state(int(asked) if asked.isdigit() else None)
        await send_file(stream, (await answered).encode())

    endpoint.serve(METHOD, answer, model=False)


async def send_file(stream: Stream, data: bytes) -> None:
    """Answers a call with the bytes of a file, in pieces."""
    for start in range(0, len(data), PIECE_BYTES):
        await stream.send(v1.Frame(body=v1.Body(data=data[start : start + PIECE_BYTES])))


async def receive_file(
    endpoint: Endpoint, node: str, method: str, request: bytes, limit_bytes: int, silence_s: float
) -> bytes:
    """Calls a method that answers by `send_file`.

    Raises:
        PeerLostError, DeadlineError: the node is gone, or silent for `silence_s` seconds.
        RefusedError: the answer has more than `limit_bytes`.
    """
    stream = await endpoint.open(node, method, v1.Body(data=request), priority=Priority.CONTROL)
    parts: list[bytes] = []
    size_bytes = 0
    try:
        await stream.end()
        while (received := await stream.recv(silence_s)) is not None:
            parts.append(received.frame.body.data)
            size_bytes += len(parts[-1])
            if size_bytes > limit_bytes:
                raise RefusedError(node, "BAD_REQUEST", f"its {method} has more than {limit_bytes} bytes")
    finally:
        stream.cancel("done")
    return b"".join(parts)


async def ask(
    endpoint: Endpoint,
    worker: str,
    expected: Sequence[TensorSpec],
    *,
    step: int | None = None,
    fixed: bool = False,
    last: bool = False,
    entry: bool = False,
    besides_bytes: int = 0,
    silence_s: float = 30.0,
) -> OwnState:
    """Asks a worker for its own state, or for the frozen parameters of its model.

    Args:
        endpoint: endpoint of the caller.
        expected: the worker's buffers, or frozen parameters, as it registered them. They bound the answer;
            buffers may have other shapes by now.
        step: asks for the state after this many steps, if the worker still has it; None for the current one.
        fixed: whether to ask for the frozen parameters.
        entry: whether to ask for what a newcomer needs, which has the frozen parameters too.
        last: whether to ask for the state after the worker's last minibatch, which it may still be about to finish.
        besides_bytes: size of what the caller holds besides `expected`, such as the parameters that a loop begins with.
        silence_s: seconds of silence of the worker after which DeadlineError is raised.

    Raises:
        PeerLostError, DeadlineError: the worker is gone, or silent.
        RefusedError: the answer has other frozen parameters, or too many bytes.
    """
    known_bytes = besides_bytes + sum(spec.size_bytes for spec in expected)
    fixed |= entry
    limit_bytes = HEADER_BYTES + (known_bytes * EXTRA_FACTOR if fixed else known_bytes + GROWTH_BYTES)
    limit_bytes += (
        GROWTH_BYTES if entry else 0
    )  # what the script has registered is known to the other worker alone
    request = (
        ENTRY if entry else FIXED if fixed else LAST if last else b"" if step is None else str(step).encode()
    )
    data = await receive_file(endpoint, worker, METHOD, request, limit_bytes, silence_s)
    try:
        return OwnState.decode(data, expected if fixed else None)  # a model may make its buffers anew
    except DataError as error:
        raise RefusedError(worker, "BAD_REQUEST", str(error)) from error


# ---- own tensors -------------------------------------------------------------------------
# Tensors that belong to one process, in checkpoints: a file for each process.
#
#     predictors   of independently trained parts
#     remainders   what a worker has not sent yet: its codec dropped it, or its exchange had begun before
#     replica      everything of a worker that has its own parameters, which no other worker and no shard has
#     loop         what a user's loop has besides its model: what it has registered, and its place in the data. Large
#                  arrays are left out where the first worker has the same
#
# No shard has them. The coordinator calls the method of this name on each process while the run stands still, and
# writes the answers as `<kind>-<node>.safetensors`. A process that continues under the same name, with tensors of the
# same form, reads the file again.

Kind = Literal["predictors", "remainders", "replica", "loop"]

MOST_BYTES = 1 << 34
"""The most bytes that the coordinator takes from a process: predictors may be larger than their part of the model."""

LARGE_BYTES = 1 << 16
"""Bytes from which an array of a loop is large."""

DIGESTS_BYTES = 1 << 24
"""The most bytes of a request with digests."""


def file_of_own(kind: Kind, node: str) -> str:
    """The name of a process in a checkpoint, to which `worker_file` adds the file name extension."""
    return f"{kind}-{node}"


def answering(
    state: Callable[[], Awaitable[Mapping[str, torch.Tensor]]],
) -> Callable[[Stream], Awaitable[None]]:
    """Serves a process's own tensors, by name: for `Endpoint.serve`, under the name of their kind."""

    async def answer(stream: Stream) -> None:
        await send_file(stream, safetensors.torch.save(dict(await state())))

    return answer


def serve_loop(
    endpoint: Endpoint, state: Callable[[Mapping[str, str]], Awaitable[Mapping[str, np.ndarray[Any, Any]]]]
) -> None:
    """Serves what a user's loop has besides its model.

    Args:
        state: returns the arrays without those that have the same digests: see `without`.
    """

    async def answer(stream: Stream) -> None:
        asked = v1.Body.FromString(stream.opened.body).data
        known = parse_json(asked, max_bytes=DIGESTS_BYTES) if asked else {}
        await send_file(stream, safetensors.numpy.save(dict(await state(known))))

    endpoint.serve("loop", answer, model=False)


def digests_of(file: bytes) -> bytes:
    """The digests of the large arrays in a worker's file, for `ask_own`. Raises DataError."""
    try:
        arrays = safetensors.numpy.load(file)
    except SafetensorError as error:
        raise DataError(f"not the state of a loop: {error}") from error
    known = {name: _digest(array) for name, array in arrays.items() if array.nbytes >= LARGE_BYTES}
    return json.dumps(known).encode()


def without(
    arrays: Mapping[str, np.ndarray[Any, Any]], known: Mapping[str, str]
) -> Mapping[str, np.ndarray[Any, Any]]:
    """The arrays without large ones whose digests are known."""
    return {
        name: array
        for name, array in arrays.items()
        if array.nbytes < LARGE_BYTES or name not in known or _digest(array) != known[name]
    }


def _digest(array: np.ndarray[Any, Any]) -> str:
    form = f"{array.dtype.str} {array.shape}".encode()
    return hashlib.blake2b(form + array.tobytes(), digest_size=16).hexdigest()


def read_loop(
    storage: Storage, folder: str, node: str, workers: Iterable[str]
) -> Mapping[str, np.ndarray[Any, Any]]:
    """Reads what a worker's loop had besides its model, or that of the first worker; {} if there is none.

    Args:
        workers: names of the workers that the checkpoint has.

    Raises:
        DataError: a file is damaged.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name in dict.fromkeys([*sorted(workers, key=lambda name: (len(name), name))[:1], node]):
        path = f"{folder}/{worker_file(file_of_own('loop', name))}"
        try:
            arrays.update(safetensors.numpy.load(storage.read(path)))
        except FileNotFoundError:
            continue
        except SafetensorError as error:
            raise DataError(f"{path}: {error}; resume from another checkpoint") from error
    return arrays


def is_for_any_size(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    """Whether another number of workers can continue with the data of a loop that had this besides its model."""
    states: dict[str, Any] = json.loads(arrays[STATES].tobytes())[0] if STATES in arrays else {}
    _, pairs = states.get(PLACES, ("dict", []))
    return bool(dict(pairs).get("any_size"))


async def ask_own(endpoint: Endpoint, kind: Kind, node: str, silence_s: float, request: bytes = b"") -> bytes:
    """Asks a process for its own tensors, and returns the bytes of a file.

    Args:
        request: for a loop, what `digests_of` the first worker's file returns.

    Raises:
        PeerLostError, DeadlineError: the process is gone, or silent.
        RefusedError: the answer has too many bytes.
    """
    return await receive_file(endpoint, node, kind, request, MOST_BYTES, silence_s)


def read_own(storage: Storage, folder: str, kind: Kind, node: str) -> Mapping[str, torch.Tensor] | None:
    """Reads a process's own tensors from a checkpoint; None if there are none. Raises DataError."""
    path = f"{folder}/{worker_file(file_of_own(kind, node))}"
    try:
        tensors: Mapping[str, torch.Tensor] = safetensors.torch.load(storage.read(path))
    except FileNotFoundError:
        return None
    except SafetensorError as error:
        raise DataError(f"{path} has no {kind}: {error}; resume from another checkpoint") from error
    return tensors
