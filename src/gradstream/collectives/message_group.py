"""`MessageGroup`: the `Group` that sends messages, over any carrier, by any algorithm."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from gradstream.collectives.algorithms import ALGORITHMS, binomial_tree, ring
from gradstream.collectives.group import slice_of
from gradstream.collectives.mesh import Mesh
from gradstream.collectives.plan import Plan
from gradstream.collectives.player import Operation, Player
from gradstream.collectives.schedule import Schedule
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Work

__all__ = ["PIECE_BYTES", "MessageGroup"]

PIECE_BYTES = 1 << 20
"""A message goes in pieces of this size: the next step begins with the first of them."""


class MessageGroup:
    """Implements `Group` on the links of a mesh.

    Operations go one after the other, in the order of their calls; one may be called before the last
    has returned.

    Args:
        mesh: of all ranks, which have met. Closed with this group.
        algorithm: of `ALGORITHMS`, for allreduce.
        piece_bytes: see `PIECE_BYTES`.

    Raises:
        UnknownNameError: there is no such algorithm.
    """

    shares_memory = False

    def __init__(self, mesh: Mesh, *, algorithm: str = "ring", piece_bytes: int = PIECE_BYTES) -> None:
        self.rank, self.size = mesh.rank, mesh.size
        self.names: Sequence[str] = mesh.names
        self._mesh = mesh
        self._runtime = mesh.runtime
        self._algorithm = _known(algorithm)
        self._piece_bytes = piece_bytes
        self._turn = asyncio.Lock()  # serves in the order of coming
        self._count = 0

    def allocate(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `Group.allocate`: any memory does."""
        return self._runtime.memory.allocate(elems, dtype, name)

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `Group.common`: each rank has its own."""
        return self.allocate(elems, dtype, name)

    async def allreduce(self, span: Span, *, weight: float = 1.0, algorithm: str = "") -> Span:
        """See `Group.allreduce`: the sum lies in `span`.

        Args:
            span: as there.
            weight: as there.
            algorithm: another one for this time, the same at all ranks.
        """
        name = _known(algorithm or self._algorithm)
        await self._carry_out(f"allreduce by {name}", _allreduce, name, span, weight=weight)
        return span

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.reduce_scatter`: the slice lies in its place of `span`."""
        await self._carry_out("reduce_scatter", _reduce_scatter, "", span, weight=weight)
        start, stop = slice_of(len(span), self.rank, self.size)
        return Span(span.vector, span.start + start, span.start + stop)

    async def all_gather(self, span: Span) -> None:
        """See `Group.all_gather`."""
        await self._carry_out("all_gather", _all_gather, "", span)

    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        """See `Group.broadcast`."""
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast from rank {root} of a group of {self.size}")
        await self._carry_out(f"broadcast from rank {root}", _broadcast, str(root), span)

    async def close(self) -> None:
        """See `Group.close`."""
        await self._mesh.close()

    # ---- inside -------------------------------------------------------------------------

    async def _carry_out(self, text: str, make: _Make, how: str, span: Span, *, weight: float = 1.0) -> None:
        self._count += 1
        dtype = str(span.vector.tensor.dtype).removeprefix("torch.")
        text = f"{text} of {len(span)} {dtype}"
        operation = Operation(self._count, zlib.crc32(text.encode()), text)
        with span.borrowed(write=True, to=f"{self.names[self.rank]}: {text}") as tensor:
            async with self._turn:
                plan = _plan(make, how, self.rank, self.size, len(span))
                await self._mesh.guarded(self._play(operation, plan, tensor, weight))

    async def _play(self, operation: Operation, plan: Plan, tensor: torch.Tensor, weight: float) -> None:
        if weight != 1.0:
            work = Work("reduce", elems=len(tensor))
            await self._runtime.compute(lambda _: _scale(tensor, weight), work=work, lane="exchange")
        piece_elems = max(1, self._piece_bytes // tensor.element_size())
        player = Player(self._runtime, operation, plan, tensor, piece_elems, self._mesh.stream)
        await player.play()


def _known(algorithm: str) -> str:
    if algorithm not in ALGORITHMS:
        raise UnknownNameError("algorithm", algorithm, ALGORITHMS)
    return algorithm


def _scale(tensor: torch.Tensor, weight: float) -> None:
    values = tensor.numpy()
    values *= values.dtype.type(weight)


# ---- which schedule: pure ---------------------------------------------------------------

_Make = Callable[[str, int, int, int], Schedule]
"""(how, rank, size, elems)"""


def _allreduce(algorithm: str, rank: int, size: int, elems: int) -> Schedule:
    return ALGORITHMS[algorithm].schedule(rank, size, elems)


def _reduce_scatter(_: str, rank: int, size: int, elems: int) -> Schedule:
    return ring.reduce_scatter(rank, _slices(elems, size))


def _all_gather(_: str, rank: int, size: int, elems: int) -> Schedule:
    return ring.all_gather(rank, _slices(elems, size))


def _broadcast(root: str, rank: int, size: int, elems: int) -> Schedule:
    return binomial_tree.broadcast(rank, size, elems, int(root))


def _slices(elems: int, size: int) -> list[int]:
    """The edges of all ranks' `slice_of`."""
    return [slice_of(elems, rank, size)[0] for rank in range(size)] + [elems]


@lru_cache(maxsize=1024)
def _plan(make: _Make, how: str, rank: int, size: int, elems: int) -> Plan:
    return Plan.of(make(how, rank, size, elems))
