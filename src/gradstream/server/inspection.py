"""What is pushed is looked at before it is used: sizes, types, rows, and whether every element is finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container

import torch

from gradstream.errors import RefusedError
from gradstream.server.chunks import ChunkMap
from gradstream.server.row_store import ChangedRows, Part, elements_of
from gradstream.server.rows import RowPart, unpack
from gradstream.transport.base import Received
from gradstream.wire import v1
from gradstream.wire.frames import ABSENT

__all__ = ["Inspection"]


class Inspection:
    """The registered model's sizes, against which every push is held.

    Args:
        shard: node name of the shard.
        chunks: the chunk map.
        here: the chunks of this shard.
        dtype: of the elements.
        changed: which rows there are; None where whole chunks are exchanged.
        counters: counts what is "refused".
    """

    def __init__(
        self,
        shard: str,
        chunks: ChunkMap,
        here: Container[int],
        dtype: torch.dtype,
        changed: ChangedRows | None,
        counters: Counter[str],
    ) -> None:
        self._shard = shard
        self._counters = counters
        self._chunks = chunks
        self._here = here
        self._dtype = dtype
        self._changed = changed

    def part(self, sender: str, received: Received) -> Part | None:
        """What was pushed of a chunk; None where it is absent.

        Raises:
            RefusedError: BAD_REQUEST where it does not fit the model, NON_FINITE where it holds a NaN or an
                infinity.
        """
        chunk, elements = received.frame.chunk, received.payload
        if chunk.index not in self._here:
            raise self.bad(sender, f"chunk {chunk.index} does not live on this shard")
        if chunk.flags & ABSENT:
            return None
        start, stop = self._chunks.bounds(chunk.index)
        part: Part | None = elements
        if chunk.rows and elements is not None and elements.dtype == self._dtype:
            part = self._rows(sender, chunk, elements)
        elif elements is None or len(elements) != stop - start or elements.dtype != self._dtype:
            got = "nothing" if elements is None else f"{len(elements)} elements of {elements.dtype}"
            raise self.bad(
                sender,
                f"chunk {chunk.index}: got {got}, expected {stop - start} of {self._dtype} "
                "(every node must run the same job file)",
            )
        assert part is not None
        if not _finite(elements_of(part)):
            raise self._refused(
                "NON_FINITE",
                f"chunk {chunk.index} of {sender} holds a NaN or an infinity; lower the learning "
                "rate or clip the gradient",
            )
        return part

    def _rows(self, sender: str, chunk: v1.Chunk, payload: torch.Tensor) -> RowPart:
        """The rows in a payload. Who sends them names each once, and only rows that there are."""
        if self._changed is None:
            raise self.bad(sender, f"chunk {chunk.index}: got rows, expected whole chunks in this run")
        try:
            return unpack(self._changed.rows, chunk.index, chunk.rows, payload)
        except ValueError as error:
            raise self.bad(sender, f"chunk {chunk.index}: got {error}") from error

    def bad(self, sender: str, message: str) -> RefusedError:
        """What a sender is told whose request does not fit."""
        return self._refused("BAD_REQUEST", f"request of {sender}: {message}")

    def _refused(self, code: str, message: str) -> RefusedError:
        self._counters["refused"] += 1
        return RefusedError(self._shard, code, message)


def _finite(elements: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. A sum says so in one pass, unless it overflows itself."""
    if elements.is_meta or math.isfinite(elements.sum().item()):
        return True
    return bool(torch.isfinite(elements).all())
