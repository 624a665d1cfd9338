"""`MessageGroup`: the `Group` that sends messages, over any carrier, by any algorithm."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from gradstream.collectives.algorithms import ALGORITHMS, PARTS, binomial_tree, hierarchical
from gradstream.collectives.autotune import Choice, MeasuredCosts
from gradstream.collectives.communicator import Communicator
from gradstream.collectives.executor import carry_out
from gradstream.collectives.group import slice_of
from gradstream.collectives.measuring import measure
from gradstream.collectives.operation import Operation
from gradstream.collectives.plan import DependencyPlan
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
        mesh: of ranks that have met. Closed with this group.
        algorithm: of `ALGORITHMS`, "hierarchical", or "auto", which takes what `choice` says.
        choice: what to take for how many bytes.
        hosts: the ranks of each host, for "hierarchical".
        ranks: those of the mesh that are in this group; all by default. Groups on one mesh that share
            two ranks are used by turns.
        piece_bytes: see `PIECE_BYTES`.

    Attributes:
        choice: see there.
        algorithm: see there.

    Raises:
        UnknownNameError: there is no such algorithm.
    """

    shares_memory = False

    def __init__(
        self,
        mesh: Communicator,
        *,
        algorithm: str = "ring",
        choice: Choice | None = None,
        hosts: Sequence[Sequence[int]] = (),
        ranks: Sequence[int] = (),
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._ranks = tuple(ranks) or tuple(range(mesh.size))
        self.rank, self.size = self._ranks.index(mesh.rank), len(self._ranks)
        self.names: Sequence[str] = [mesh.names[rank] for rank in self._ranks]
        self.choice = choice
        self._mesh = mesh
        self._runtime = mesh.runtime
        self._hosts = tuple(map(tuple, hosts)) or tuple((rank,) for rank in range(self.size))
        self.algorithm = self._known(algorithm)
        self._piece_bytes = piece_bytes
        self._turn = asyncio.Lock()  # serves in the order of coming
        self._count = 0

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """See `Group.allocate`: any memory does."""
        return self._runtime.memory.allocate(elems, dtype, name, lead_bytes=lead_bytes)

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
        name = self._known(algorithm or self.algorithm)
        if name == "auto":
            name = "ring" if self.choice is None else self.choice.allreduce(_size_bytes(span))
        await self._carry_out(f"allreduce by {name}", name, span, weight=weight)
        return span

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.reduce_scatter`: the slice lies in its place of `span`."""
        await self._carry_out(
            f"reduce_scatter by {self._parts(span)}", self._parts(span), span, weight=weight
        )
        start, stop = slice_of(len(span), self.rank, self.size)
        return Span(span.vector, span.start + start, span.start + stop)

    async def all_gather(self, span: Span) -> None:
        """See `Group.all_gather`."""
        await self._carry_out(f"all_gather by {self._parts(span)}", self._parts(span), span)

    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        """See `Group.broadcast`."""
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast from rank {root} of a group of {self.size}")
        await self._carry_out(f"broadcast from rank {root}", str(root), span)

    async def measure(self, elems: int) -> MeasuredCosts:
        """What messages and sums cost now, on the very links of this group. All ranks call it at once.

        Args:
            elems: float32 of a long message; it goes in pieces, as those of operations do.
        """
        async with self._turn:
            return await measure(self._mesh, elems, max(1, self._piece_bytes // 4))

    async def close(self) -> None:
        """See `Group.close`."""
        await self._mesh.close()

    # ---- inside -------------------------------------------------------------------------

    def _known(self, algorithm: str) -> str:
        known = ("auto", *ALGORITHMS, "hierarchical")
        if algorithm not in known:
            raise UnknownNameError("algorithm", algorithm, known)
        return algorithm

    def _parts(self, span: Span) -> str:
        """The algorithm of a half of allreduce."""
        if self.algorithm == "auto" and self.choice is not None:
            return self.choice.parts(_size_bytes(span))
        fits = self.algorithm in PARTS and PARTS[self.algorithm].fits(self.size)
        return self.algorithm if fits else "ring"

    async def _carry_out(self, text: str, how: str, span: Span, *, weight: float = 1.0) -> None:
        self._count += 1
        dtype = str(span.vector.tensor.dtype).removeprefix("torch.")
        verb, text = text.partition(" ")[0], f"{text} of {len(span)} {dtype}"
        operation = Operation(self._count, zlib.crc32(text.encode()), text)
        with span.borrowed(write=True, to=f"{self.names[self.rank]}: {text}") as tensor:
            async with self._turn:
                plan = _plan(verb, how, self.rank, self.size, len(span), self._hosts)
                await self._mesh.guarded(self._play(operation, plan, tensor, weight), streams_alone=True)

    async def _play(
        self, operation: Operation, plan: DependencyPlan, tensor: torch.Tensor, weight: float
    ) -> None:
        if weight != 1.0:
            work = Work("reduce", elems=len(tensor))
            await self._runtime.compute(lambda _: _scale(tensor, weight), work=work, lane="exchange")
        piece_elems = max(1, self._piece_bytes // tensor.element_size())
        await carry_out(self._mesh, self._ranks, operation, plan, tensor, piece_elems)


def _size_bytes(span: Span) -> int:
    return len(span) * span.vector.tensor.element_size()


def _scale(tensor: torch.Tensor, weight: float) -> None:
    values = tensor.numpy()
    values *= values.dtype.type(weight)


@lru_cache(maxsize=1024)
def _plan(
    verb: str, how: str, rank: int, size: int, elems: int, hosts: tuple[tuple[int, ...], ...]
) -> DependencyPlan:
    return DependencyPlan.of(_schedule(verb, how, rank, size, elems, hosts))


def _schedule(
    verb: str, how: str, rank: int, size: int, elems: int, hosts: Sequence[Sequence[int]]
) -> Schedule:
    if verb == "broadcast":
        return binomial_tree.broadcast(rank, size, elems, int(how))
    if verb != "allreduce":
        cuts = [slice_of(elems, owner, size)[0] for owner in range(size)] + [elems]
        return (PARTS[how].all_gather if verb == "all_gather" else PARTS[how].reduce_scatter)(rank, cuts)
    if how == "hierarchical":
        return hierarchical.allreduce(rank, hosts, elems)
    return ALGORITHMS[how].schedule(rank, size, elems)
