"""What is pushed is looked at before it is used: sizes, types, rows, and whether every element is finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container

import torch

from gradstream.errors import ConfigError, RefusedError
from gradstream.server.aggregation import rank_of
from gradstream.server.rows import RowPart, unpack
from gradstream.server.shard.row_store import ChangedRows, Part, elements_of
from gradstream.transport.base import Received
from gradstream.wire import v1
from gradstream.wire.chunks import ChunkMap
from gradstream.wire.frames import ABSENT

__all__ = ["Inspection"]

MAX_COUNT = 1 << 53
"""No run counts further."""


class Inspection:
    """The registered model's sizes, against which every push is held.

    Args:
        shard: node name of the shard.
        chunks: the chunk map.
        here: the chunks of this shard.
        dtype: of the elements.
        changed: which rows there are; None where whole chunks are exchanged.
        counters: counts what is "refused".
        workers: how many there are; 0 where nobody has said.
        states: names of the update rule's state vectors.
    """

    def __init__(
        self,
        shard: str,
        chunks: ChunkMap,
        here: Container[int],
        dtype: torch.dtype,
        changed: ChangedRows | None,
        counters: Counter[str],
        *,
        workers: int = 0,
        states: Container[str] = (),
    ) -> None:
        self._shard = shard
        self._counters = counters
        self._chunks = chunks
        self._here = here
        self._dtype = dtype
        self._changed = changed
        self._workers = workers
        self._states = states

    def rank(self, sender: str) -> int:
        """The rank of a sender, who must be a worker of this run. Raises RefusedError."""
        try:
            rank = rank_of(sender)
        except ConfigError as error:
            raise self.bad(sender, str(error)) from None
        if self._workers and not rank < self._workers:
            raise self.bad(sender, f"there are {self._workers} workers, of ranks from 0")
        return rank

    def push(self, sender: str, request: v1.Push) -> None:
        """Raises RefusedError for a push whose header says what cannot be."""
        self.rank(sender)
        if request.command not in (v1.Push.APPLY, v1.Push.ASSIGN):
            raise self.bad(sender, f"push command {request.command}; expected APPLY or ASSIGN")
        if request.vector and request.vector not in self._states:
            raise self.bad(
                sender, f"a push to {request.vector[:64]!r}, which is no vector of the update rule"
            )
        if not 0 < request.sequence < MAX_COUNT:
            raise self.bad(sender, f"push number {request.sequence}; expected 1 or more")
        if max(request.samples, request.round, request.clock, request.base_version) > MAX_COUNT:
            raise self.bad(sender, "a count of more than 2^53")
        if not math.isfinite(request.lr) or math.isinf(request.loss):
            raise self._refused(
                "NON_FINITE",
                f"request of {sender}: learning rate {request.lr}, loss {request.loss}; expected "
                "finite numbers",
            )

    def base_version(self, sender: str, chunk: int, base_version: int, version: int) -> None:
        """Raises RefusedError where a push was computed on a version that the chunk does not have yet."""
        if base_version > max(version, 0):
            raise self.bad(sender, f"chunk {chunk}: computed on version {base_version}, it is at {version}")

    def fetch(self, sender: str, request: v1.Fetch, here: Container[int]) -> None:
        """Raises RefusedError for a fetch of what is not here."""
        self.rank(sender)
        chunks = list(request.chunks)
        if not all(chunk in here for chunk in chunks):
            raise self.bad(sender, f"asks for chunks {chunks[:8]}... that live elsewhere")
        if len(set(chunks)) < len(chunks):
            raise self.bad(sender, f"asks for a chunk twice, among {chunks[:8]}...")
        if request.known and self._changed is None:
            raise self.bad(sender, "asks for what has changed, where whole chunks are exchanged")
        if len(request.known) not in (0, len(chunks)) or max(request.known, default=0) > MAX_COUNT:
            raise self.bad(sender, f"knows versions of {len(request.known)} of {len(chunks)} chunks")

    def command(self, sender: str, request: v1.Command) -> None:
        """Raises RefusedError for a command that there is not."""
        if request.kind not in v1.Command.Kind.values():
            raise self.bad(sender, f"command {request.kind}, which is unknown")
        if not math.isfinite(request.alpha):
            raise self.bad(sender, f"a command with alpha = {request.alpha}; expected a finite number")
        if request.clock > MAX_COUNT or request.sequence > MAX_COUNT:
            raise self.bad(sender, "a count of more than 2^53")
        if request.kind in (v1.Command.LEAVE, v1.Command.ENTER):
            self.rank(sender)

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
