"""Vectors that ranks of one host read where they lie: who made which, and where a part of it is found.

Each rank numbers the vectors that it makes, and sends every other one a letter with the descriptor, before it
posts a call that names the vector.
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
from gradstream.collectives.shm.control_block import DTYPES, Call
from gradstream.errors import ConfigError
from gradstream.memory import ALIGNMENT_BYTES, Span, Vector
from gradstream.memory.segments import Segment

__all__ = ["NUMBERS", "Vectors", "number_of"]

NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A vector in shared memory, as this process sees it.

    Args:
        vector: its elements.
        sums: what is summed up over all ranks, range by range; beside rank 0's vectors only.
        common: whether all ranks have it as their own.
    """

    vector: Vector
    sums: Vector | None
    common: bool


class Vectors:
    """The vectors of a group, from one of its ranks.

    Args:
        rank: this one.
        names: of all, by rank.
        peers: the others, by rank.
        barrier: to wait for a letter at.
    """

    def __init__(self, rank: int, names: Sequence[str], peers: dict[int, Peer], barrier: HostBarrier) -> None:
        self._rank = rank
        self._names = names
        self._peers = peers
        self._barrier = barrier
        self._tables: list[list[_Held | None]] = [[] for _ in names]  # by owner
        self._places: dict[Vector, tuple[int, int]] = {}  # owner and number
        self._staging: dict[torch.dtype, Vector] = {}
        self._common: set[Vector] = set()
        self._made: list[Vector] = []  # common ones, in the order in which rank 0 has made them
        self._num_common = 0  # of those that this rank has asked for
        for owner, peer in peers.items():
            peer.on_letter = partial(self._open_letter, owner)
        self._making = Lock()  # at the same time on the loop's thread, and as staging on that of an operation

    def make(
        self, elems: int, dtype: torch.dtype, name: str, *, common: bool = False, lead_bytes: int = 0
    ) -> Vector:
        """A vector of this rank's; the others are told."""
        number = number_of(dtype)
        letter = {"elems": elems, "dtype": number, "name": name, "common": common, "lead": lead_bytes}
        size_bytes = _size_bytes(lead_bytes, elems, dtype, sums=self._rank == 0 and not common)
        with (
            self._making,
            Segment.create(size_bytes, f"gradstream {self._names[self._rank]} {name}") as segment,
        ):
            self._tell(letter, [segment.fd])
            return self._hold(self._rank, segment, lead_bytes, elems, dtype, name, common=common)

    def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """The next vector that all ranks have; rank 0 makes it."""
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
        """Whether all ranks have it."""
        return vector in self._common

    def is_own(self, vector: Vector) -> bool:
        """Whether it is the group's, and not somebody else's."""
        return vector in self._places

    def place(self, span: Span, start: int, stop: int) -> tuple[int, int, int]:
        """Where others find a span: owner and number of a vector, and the element at which it begins.

        Of the span of a foreign vector [start, stop) is copied to where they can read it.
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
        """The part of the rank whose call this is, where it lies."""
        return self._held(call).vector.tensor.narrow(0, call.start, call.elems)

    def sums(self, call: Call) -> Span:
        """Where the sum is to lie, if this is the call of rank 0."""
        sums = self._held(call).sums
        assert sums is not None
        return sums[call.start : call.start + call.elems]

    def clear(self) -> None:
        """Lets go of everything; memory that nobody else holds is gone."""
        for table in self._tables:
            table.clear()
        self._places.clear()
        self._staging.clear()
        self._common.clear()
        self._made.clear()

    def _held(self, call: Call) -> _Held:
        table = self._tables[call.owner]
        if len(table) <= call.item:
            self._barrier.receive(self._peers[call.owner], lambda: len(table) > call.item, call)
        held = table[call.item]
        assert held is not None
        return held

    def _hold(
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
        if owner == 0 and not common:  # at a multiple of 64 bytes: stores past the cache need that
            behind_bytes = _padded_bytes(lead_bytes, elems, dtype)
            sums = segment.vector(behind_bytes, elems, dtype, f"{name}, summed up")
        if owner == self._rank or common:
            self._places[vector] = owner, len(self._tables[owner])
        if common:
            self._common.add(vector)
            self._made.append(vector)
        self._tables[owner].append(_Held(vector, sums, common))
        return vector

    def _open_letter(self, owner: int, data: bytes, descriptors: list[int]) -> None:
        letter = json.loads(data)
        if "drop" in letter:
            self._tables[owner][letter["drop"]] = None
            return
        dtype, common = DTYPES[letter["dtype"]], bool(letter["common"])
        elems, lead_bytes = letter["elems"], letter["lead"]
        size_bytes = _size_bytes(lead_bytes, elems, dtype, sums=owner == 0 and not common)
        with Segment.attach(descriptors[0], size_bytes) as segment:
            self._hold(owner, segment, lead_bytes, elems, dtype, letter["name"], common=common)

    def _drop(self, vector: Vector) -> None:
        with self._making:
            _, number = self._places.pop(vector)
            self._tables[self._rank][number] = None
            self._tell({"drop": number}, [])

    def _tell(self, letter: dict[str, Any], descriptors: list[int]) -> None:
        for peer in self._peers.values():
            self._barrier.send(peer, json.dumps(letter).encode(), descriptors)


def number_of(dtype: torch.dtype) -> int:
    """As which a dtype goes over a board. Raises ConfigError for one that is not exchanged."""
    if dtype not in NUMBERS:
        raise ConfigError(f"vectors of {dtype} are not exchanged; known: {', '.join(map(str, DTYPES))}")
    return NUMBERS[dtype]


def _padded_bytes(lead_bytes: int, elems: int, dtype: torch.dtype) -> int:
    used_bytes = lead_bytes + elems * dtype.itemsize
    return max(1, -(-used_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def _size_bytes(lead_bytes: int, elems: int, dtype: torch.dtype, *, sums: bool) -> int:
    return _padded_bytes(lead_bytes, elems, dtype) * (2 if sums else 1)
