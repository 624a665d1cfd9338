"""Vectors that all ranks of a host can read in place: which rank made which, and where a part of it lies.

A rank numbers the vectors that it makes. It sends every other rank a message with the descriptor before it posts
a call that names the vector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch

from gradstream.collectives.shm.barrier import HostBarrier, Peer
from gradstream.collectives.shm.rendezvous import DTYPES, Call
from gradstream.errors import ConfigError
from gradstream.memory import ALIGNMENT_BYTES, Span, Vector
from gradstream.memory.segments import Segment

NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True, eq=False)
class _Mapped:
    """A vector in shared memory, as this process sees it.

    Args:
        vector: its elements.
        sums: its sums over all ranks, range by range; only rank 0's vectors have them.
        common: whether all ranks have it as their own.
    """

    vector: Vector
    sums: Vector | None
    common: bool


class Vectors:
    """The vectors of a group, as one of its ranks sees them.

    Args:
        names: names of all nodes, by rank.
        peers: the other ranks, by rank.
        barrier: waits for messages of other ranks.
    """

    def __init__(self, rank: int, names: Sequence[str], peers: dict[int, Peer], barrier: HostBarrier) -> None:
        self._rank = rank
        self._names = names
        self._peers = peers
        self._barrier = barrier
        self._tables: list[list[_Mapped | None]] = [[] for _ in names]  # by owner
        self._places: dict[Vector, tuple[int, int]] = {}  # owner and number
        self._staging: dict[torch.dtype, Vector] = {}
        self._common: set[Vector] = set()
        self._made: list[Vector] = []  # common vectors, in the order in which rank 0 has made them
        self._num_common = 0  # common vectors that this rank has asked for
        for owner, peer in peers.items():
            peer.on_message = partial(self._receive, owner)
        self._making = Lock()  # two threads may make vectors: the loop's, and an operation's, which stages

    def make(
        self, elems: int, dtype: torch.dtype, name: str, *, common: bool = False, lead_bytes: int = 0
    ) -> Vector:
        """Makes a vector of this rank, and tells the others."""
        number = number_of(dtype)
        message = {"elems": elems, "dtype": number, "name": name, "common": common, "lead": lead_bytes}
        size_bytes = _size_bytes(lead_bytes, elems, dtype, sums=self._rank == 0 and not common)
        with (
            self._making,
            Segment.create(size_bytes, f"gradstream {self._names[self._rank]} {name}") as segment,
        ):
            self._tell(message, [segment.fd])
            return self._add(self._rank, segment, lead_bytes, elems, dtype, name, common=common)

    def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """The next vector that all ranks have as their own; rank 0 makes it."""
        if self._rank == 0:
            return self.make(elems, dtype, name, common=True)
        wanted = self._num_common
        self._num_common += 1
        self._barrier.receive(
            self._peers[0], lambda: len(self._made) > wanted, f"for the common vector {name!r}"
        )
        vector = self._made[wanted]
        got, expected = (len(vector), vector.tensor.dtype, vector.name), (elems, dtype, name)
        if got != expected:
            raise ConfigError(
                f"{self._names[self._rank]} asks for the common vector {expected}, {self._names[0]} has made "
                f"{got}: all ranks ask for the same ones, in the same order"
            )
        return vector

    def is_common(self, vector: Vector) -> bool:
        """Whether all ranks have this vector as their own."""
        return vector in self._common

    def is_own(self, vector: Vector) -> bool:
        """Whether the group has made this vector."""
        return vector in self._places

    def place(self, span: Span, start: int, stop: int) -> tuple[int, int, int]:
        """Where others find a span: owner and number of a vector, and the element at which the span begins.

        If the group has not made the vector, [start, stop) of the span is copied to where others can read it.
        """
        place = self._places.get(span.vector)
        if place is not None:
            return *place, span.start
        dtype, elems = span.vector.tensor.dtype, len(span)
        staging = self._staging.get(dtype)
        if staging is None or len(staging) < elems:
            if staging is not None:
                self._drop(staging)
            staging = self._staging[dtype] = self.make(elems, dtype, "staging")
        staging.tensor[start:stop].copy_(span.tensor[start:stop])
        return *self._places[staging], 0

    def elements(self, call: Call) -> torch.Tensor:
        """The part of the rank that has posted this call, in place."""
        return self._mapped(call).vector.tensor.narrow(0, call.start, call.elems)

    def sums(self, call: Call) -> Span:
        """Memory for the sum, if rank 0 has posted this call."""
        sums = self._mapped(call).sums
        assert sums is not None
        return sums[call.start : call.start + call.elems]

    def clear(self) -> None:
        """Forgets all vectors. The system frees memory that nobody else holds."""
        for table in self._tables:
            table.clear()
        self._places.clear()
        self._staging.clear()
        self._common.clear()
        self._made.clear()

    def _mapped(self, call: Call) -> _Mapped:
        table = self._tables[call.owner]
        if len(table) <= call.item:
            self._barrier.receive(self._peers[call.owner], lambda: len(table) > call.item, call)
        mapped = table[call.item]
        assert mapped is not None
        return mapped

    def _add(
        self,
        owner: int,
        segment: Segment,
        lead_bytes: int,
        elems: int,
        dtype: torch.dtype,
        name: str,
        *,
        common: bool,
    ) -> Vector:
        vector = segment.vector(lead_bytes, elems, dtype, name)
        sums = None
        if owner == 0 and not common:  # sums begin at a multiple of 64 bytes, as stores past the cache need
            behind_bytes = _padded_bytes(lead_bytes, elems, dtype)
            sums = segment.vector(behind_bytes, elems, dtype, f"{name}, summed up")
        if owner == self._rank or common:
            self._places[vector] = owner, len(self._tables[owner])
        if common:
            self._common.add(vector)
            self._made.append(vector)
        self._tables[owner].append(_Mapped(vector, sums, common))
        return vector

    def _receive(self, owner: int, data: bytes, descriptors: list[int]) -> None:
        message = json.loads(data)
        if "drop" in message:
            self._tables[owner][message["drop"]] = None
            return
        dtype, common = DTYPES[message["dtype"]], bool(message["common"])
        elems, lead_bytes = message["elems"], message["lead"]
        size_bytes = _size_bytes(lead_bytes, elems, dtype, sums=owner == 0 and not common)
        with Segment.attach(descriptors[0], size_bytes) as segment:
            self._add(owner, segment, lead_bytes, elems, dtype, message["name"], common=common)

    def _drop(self, vector: Vector) -> None:
        with self._making:
            _, number = self._places.pop(vector)
            self._tables[self._rank][number] = None
            self._tell({"drop": number}, [])

    def _tell(self, message: dict[str, Any], descriptors: list[int]) -> None:
        for peer in self._peers.values():
            self._barrier.send(peer, json.dumps(message).encode(), descriptors)


def number_of(dtype: torch.dtype) -> int:
    """Number of a dtype in a call. Raises ConfigError for a dtype that is not exchanged."""
    if dtype not in NUMBERS:
        raise ConfigError(
            f"got a vector of {dtype}, expected {', '.join(map(str, DTYPES))}: convert it first"
        )
    return NUMBERS[dtype]


def _padded_bytes(lead_bytes: int, elems: int, dtype: torch.dtype) -> int:
    used_bytes = lead_bytes + elems * dtype.itemsize
    return max(1, -(-used_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _size_bytes(lead_bytes: int, elems: int, dtype: torch.dtype, *, sums: bool) -> int:
    return _padded_bytes(lead_bytes, elems, dtype) * (2 if sums else 1)
