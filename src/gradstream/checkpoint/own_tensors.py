"""Tensors that one process has of its own, in checkpoints: a file for each process.

    predictors   of parts that train apart
    remainders   what a worker has not sent yet: its codec has left it out, or its exchange had begun before
    replica      all of a worker that has parameters of its own, which no other worker and no shard has

No shard has them. The coordinator calls the method of this
name of each process while the run stands still, and writes what it answers as `<kind>-<node>.safetensors`. A process
that goes on under the same name, with tensors of the same form, reads the file again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import safetensors.torch
import torch
from safetensors import SafetensorError

from gradstream.checkpoint.folder import worker_file
from gradstream.checkpoint.own_state import receive_file, send_file
from gradstream.errors import DataError
from gradstream.runtime.base import Storage
from gradstream.transport.base import Endpoint, Stream

Kind = Literal["predictors", "remainders", "replica"]

MOST_BYTES = 1 << 34
"""The most bytes that the coordinator takes from a process: predictors may be larger than their part of the model."""


def file_of_own(kind: Kind, node: str) -> str:
    """The name of a process in a checkpoint, to which `worker_file` adds the ending of the file."""
    return f"{kind}-{node}"


def answering(
    state: Callable[[], Awaitable[Mapping[str, torch.Tensor]]],
) -> Callable[[Stream], Awaitable[None]]:
    """Serves what a process has of its own, by name: for `Endpoint.serve`, under the name of its kind."""

    async def answer(stream: Stream) -> None:
        await send_file(stream, safetensors.torch.save(dict(await state())))

    return answer


async def ask_own(endpoint: Endpoint, kind: Kind, node: str, silence_s: float) -> bytes:
    """Asks a process for what it has of its own, and returns the bytes of a file.

    Raises:
        PeerLostError, DeadlineError: the process is gone, or silent.
        RefusedError: the answer has too many bytes.
    """
    return await receive_file(endpoint, node, kind, b"", MOST_BYTES, silence_s)


def read_own(storage: Storage, folder: str, kind: Kind, node: str) -> Mapping[str, torch.Tensor] | None:
    """Reads what a process had of its own from a checkpoint; None if there is nothing of it. Raises DataError."""
    path = f"{folder}/{worker_file(file_of_own(kind, node))}"
    try:
        found: Mapping[str, torch.Tensor] = safetensors.torch.load(storage.read(path))
    except FileNotFoundError:
        return None
    except SafetensorError as error:
        raise DataError(f"{path} has no {kind}: {error}; resume from another checkpoint") from error
    return found
