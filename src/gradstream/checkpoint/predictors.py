"""The predictors of parts that train apart, in checkpoints: a file for each process of a replica.

They are neither parameters of the model nor exchanged, so no shard has them. The coordinator calls the method
"predictors" of each process while the run stands still, and writes what it answers as `predictors-<node>.safetensors`.
A process that goes on under the same name, with predictors of the same form, reads the file again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError

from gradstream.checkpoint.folder import worker_file
from gradstream.checkpoint.own_state import receive_file, send_file
from gradstream.errors import DataError
from gradstream.runtime.base import Storage
from gradstream.transport.base import Endpoint, Stream

METHOD = "predictors"

MOST_BYTES = 1 << 34
"""The most bytes that the coordinator takes from a process: predictors may be larger than their part of the model."""


def file_of_predictors(node: str) -> str:
    """The name of a process in a checkpoint, to which `worker_file` adds the ending of the file."""
    return f"predictors-{node}"


def serve_predictors(endpoint: Endpoint, state: Callable[[], Awaitable[Mapping[str, torch.Tensor]]]) -> None:
    """Serves what a process has of its own, by name."""

    async def answer(stream: Stream) -> None:
        await send_file(stream, safetensors.torch.save(dict(await state())))

    endpoint.serve(METHOD, answer, model=False)


async def ask_predictors(endpoint: Endpoint, node: str, silence_s: float) -> bytes:
    """Asks a process for its predictors, and returns the bytes of a file.

    Raises:
        PeerLostError, DeadlineError: the process is gone, or silent.
        RefusedError: the answer has too many bytes.
    """
    return await receive_file(endpoint, node, METHOD, b"", MOST_BYTES, silence_s)


def read_predictors(storage: Storage, folder: str, node: str) -> Mapping[str, torch.Tensor] | None:
    """Reads the predictors of a process from a checkpoint; None if there are none of it. Raises DataError."""
    path = f"{folder}/{worker_file(file_of_predictors(node))}"
    try:
        found: Mapping[str, torch.Tensor] = safetensors.torch.load(storage.read(path))
    except FileNotFoundError:
        return None
    except SafetensorError as error:
        raise DataError(f"{path} has no predictors: {error}; resume from another checkpoint") from error
    return found
