"""The groups that send messages: `MessageGroup` between all ranks, `HierarchicalGroup` between hosts alone."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from typing_extensions import override

from gradstream.collectives.algorithms import ALGORITHMS, PARTS, binomial_tree, hierarchical
from gradstream.collectives.algorithms.direct import all_to_all
from gradstream.collectives.autotune import Choice, MeasuredCosts, measure
from gradstream.collectives.communicator import Communicator, CommunicatorGroup
from gradstream.collectives.executor import carry_out
from gradstream.collectives.group import Group, own_slice, slice_of
from gradstream.collectives.schedule import DependencyPlan, Operation, Schedule
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.memory import Span, Vector
from gradstream.runtime.base import Work
from gradstream.transport.base import copy_elements

PIECE_BYTES = 1 << 20
"""Messages go in pieces of this size, so that the next step can begin when the first piece has arrived."""


class MessageGroup(CommunicatorGroup):
    """A `Group` that sends messages, over any carrier, by any algorithm.

    Operations run one after the other, in the order of their calls. A caller need not wait for one before it
    calls the next.

    Args:
        communicator: its ranks have met. The group closes it.
        algorithm: one of `ALGORITHMS`, "hierarchical", or "auto", which asks `choice`.
        choice: chooses an algorithm by the number of bytes.
        hosts: the ranks of each host, for "hierarchical".
        ranks: ranks of the communicator that are in this group; all by default. Groups that have two ranks
            in common must not run operations at the same time.
        piece_bytes: see `PIECE_BYTES`.

    Raises:
        UnknownNameError: there is no such algorithm.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        algorithm: str = "ring",
        choice: Choice | None = None,
        hosts: Sequence[Sequence[int]] = (),
        ranks: Sequence[int] = (),
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(communicator)
        self._ranks = tuple(ranks) or tuple(range(communicator.size))
        self.rank, self.size = self._ranks.index(communicator.rank), len(self._ranks)
        self.names = [communicator.names[rank] for rank in self._ranks]
        self.choice = choice
        self._hosts = tuple(map(tuple, hosts)) or tuple((rank,) for rank in range(self.size))
        self.algorithm = self._known(algorithm)
        self._piece_bytes = piece_bytes
        self._lock = asyncio.Lock()  # first come, first served
        self._count = 0

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """See `Group.allocate`: takes memory of the node."""
        return self._runtime.memory.allocate(elems, dtype, name, lead_bytes=lead_bytes)

    async def allreduce(self, span: Span, *, weight: float = 1.0, algorithm: str = "") -> Span:
        """See `Group.allreduce`: the sum lies in `span`.

        Args:
            span: see `Group.allreduce`.
            weight: see `Group.allreduce`.
            algorithm: replaces the group's algorithm in this call; the same at all ranks.
        """
        name = self._known(algorithm or self.algorithm)
        if name == "auto":
            name = "ring" if self.choice is None else self.choice.allreduce(_size_bytes(span))
        await self._carry_out(f"allreduce by {name}", name, span, weight=weight)
        return span

    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.reduce_scatter`: the slice lies at its place in `span`."""
        await self._carry_out(
            f"reduce_scatter by {self._parts(span)}", self._parts(span), span, weight=weight
        )
        return own_slice(span, self.rank, self.size)

    @override
    async def all_gather(self, span: Span) -> None:
        await self._carry_out(f"all_gather by {self._parts(span)}", self._parts(span), span)

    async def all_to_all(self, span: Span) -> None:
        """See `SwappingGroup`."""
        await self._carry_out("all_to_all", "", span)

    @override
    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast(root={root}): expected a rank from 0 to {self.size - 1}")
        await self._carry_out(f"broadcast from rank {root}", str(root), span)

    async def measure(self, elems: int) -> MeasuredCosts:
        """Measures what messages and sums cost now, between the ranks of this group. All ranks call it at once.

        Args:
            elems: float32 elements of a long message, which goes in pieces as an operation's does.
        """
        async with self._lock:
            return await measure(self._communicator, elems, max(1, self._piece_bytes // 4))

    # ---- inside -------------------------------------------------------------------------

    def _known(self, algorithm: str) -> str:
        known = ("auto", *ALGORITHMS, "hierarchical")
        if algorithm not in known:
            raise UnknownNameError("algorithm", algorithm, known)
        return algorithm

    def _parts(self, span: Span) -> str:
        """The algorithm for a reduce-scatter or an all-gather."""
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
            async with self._lock:
                plan = _plan(verb, how, self.rank, self.size, len(span), self._hosts)
                await self._communicator.guarded(
                    self._run(operation, plan, tensor, weight), streams_only=True
                )

    async def _run(
        self, operation: Operation, plan: DependencyPlan, tensor: torch.Tensor, weight: float
    ) -> None:
        if weight != 1.0:
            work = Work("reduce", elems=len(tensor))
            await self._runtime.compute(lambda _: _scale(tensor, weight), work=work, lane="exchange")
        piece_elems = max(1, self._piece_bytes // tensor.element_size())
        await carry_out(self._communicator, self._ranks, operation, plan, tensor, piece_elems)


class HierarchicalGroup(CommunicatorGroup):
    """A `Group` of several hosts with equally many ranks: in place inside each host, by messages between hosts.

    An allreduce is a reduce-scatter inside the host, an allreduce of the slice among the ranks of the
    same place on all hosts, and an all-gather inside the host. The loss of any rank breaks the whole group,
    and every rank learns its name.

    Args:
        communicator: its ranks, all of the group, have met. The group closes it.
        inside: the ranks of this host.
        between: the ranks of the same place on each host.
        whole: all ranks, for the operations that do not divide in this way.
    """

    def __init__(
        self, communicator: Communicator, inside: Group, between: MessageGroup, whole: MessageGroup
    ) -> None:
        super().__init__(communicator)
        self._inside = inside
        self._between = between
        self._whole = whole
        self._lock = asyncio.Lock()  # first come, first served

    def allocate(self, elems: int, dtype: torch.dtype, name: str, *, lead_bytes: int = 0) -> Vector:
        """See `Group.allocate`: memory in which the ranks of the host work in place."""
        return self._inside.allocate(elems, dtype, name, lead_bytes=lead_bytes)

    async def allreduce(self, span: Span, *, weight: float = 1.0) -> Span:
        """See `Group.allreduce`: the sum lies in `span`."""
        async with self._lock:
            await self._communicator.guarded(self._allreduce(span, weight))
        return span

    async def _allreduce(self, span: Span, weight: float) -> None:
        own = await self._inside.reduce_scatter(span, weight=weight)
        place = own_slice(span, self._inside.rank, self._inside.size)
        if (own.vector, own.start) != (place.vector, place.start):
            await self._communicator.runtime.compute(
                lambda _: copy_elements(place.tensor, own.tensor),
                work=Work("copy", elems=len(own)),
                reads=[own],
                writes=[place],
                lane="exchange",
            )
        await self._between.allreduce(place)
        await self._inside.all_gather(span)

    @override
    async def reduce_scatter(self, span: Span, *, weight: float = 1.0) -> Span:
        async with self._lock:
            return await self._whole.reduce_scatter(span, weight=weight)

    @override
    async def all_gather(self, span: Span) -> None:
        async with self._lock:
            await self._whole.all_gather(span)

    async def all_to_all(self, span: Span) -> None:
        """See `SwappingGroup`."""
        async with self._lock:
            await self._whole.all_to_all(span)

    @override
    async def broadcast(self, span: Span, *, root: int = 0) -> None:
        async with self._lock:
            await self._whole.broadcast(span, root=root)

    @override
    async def close(self) -> None:
        await self._inside.close()
        await super().close()


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
        if verb == "all_to_all":
            return all_to_all(rank, cuts)
        return (PARTS[how].all_gather if verb == "all_gather" else PARTS[how].reduce_scatter)(rank, cuts)
    if how == "hierarchical":
        return hierarchical.allreduce(rank, hosts, elems)
    return ALGORITHMS[how].schedule(rank, size, elems)
