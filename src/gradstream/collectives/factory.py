"""Forms groups: knows their kinds and chooses among them.

All ranks meet and say where they are. Ranks of one host that can share memory sum in place. On several hosts
with equally many ranks they do so inside each host and send messages between hosts. All others send messages,
by the algorithm that is named, or by the one that measured figures make the cheapest for a size.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.autotune import Choice, measure
from gradstream.collectives.communicator import Communicator
from gradstream.collectives.group import Group, GroupMembers
from gradstream.collectives.message_group import PIECE_BYTES, HierarchicalGroup, MessageGroup
from gradstream.collectives.shm.group import SharedGroup
from gradstream.collectives.shm.rendezvous import RendezvousMembers, available
from gradstream.collectives.torch_backend.group import TorchGroup
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.memory import Memory, Vector
from gradstream.runtime.base import Runtime
from gradstream.runtime.real import RealRuntime
from gradstream.telemetry.events import Event, GroupEvent
from gradstream.transport.base import Endpoint
from gradstream.transport.socket.unix import host_id

# ---- factory -----------------------------------------------------------------------------

TORCH = {"torch": "auto", "gloo": "gloo", "nccl": "nccl", "mpi": "mpi"}
"""Kinds of group that use torch.distributed, and the backend of each."""

KINDS = ("auto", "shared", "hierarchical", "messages", *ALGORITHMS, *TORCH)
"""Kinds of group. "auto" chooses a kind, "messages" an algorithm; each other name stands for itself."""


async def form_group(
    runtime: Runtime,
    endpoint: Endpoint,
    members: GroupMembers,
    how: str = "auto",
    *,
    host: str = "",
    piece_bytes: int = PIECE_BYTES,
    on_event: Callable[[Event], None] | None = None,
) -> Group:
    """Forms the group of all ranks. Each rank calls this at about the same time.

    Args:
        endpoint: a started endpoint that knows the addresses of all ranks.
        members: the ranks, and which of them this node is.
        how: one of `KINDS`, the same at all ranks.
        host: a name that ranks close to each other have in common; "" derives one from the system.
        piece_bytes: size of the pieces in which messages go.
        on_event: called at rank 0 with an event that says what was chosen.

    Raises:
        UnknownNameError: there is no such kind.
        ConfigError: the ranks cannot share memory as `how` says, or torch.distributed cannot work here
            (see `TorchGroup.form`).
        DeadlineError, PeerLostError: names a rank that has not come within `silence_s`, or is gone.
        RefusedError: the ranks do not agree on the members of the group.
    """
    if how not in KINDS:
        raise UnknownNameError("kind of group", how, KINDS)
    group: Group
    if how in TORCH:
        group = by_torch = await TorchGroup.form(runtime, endpoint, members, backend=TORCH[how])
        event = GroupEvent(
            kind="torch",
            ranks=list(members.names),
            epoch=members.epoch,
            hosts=by_torch.hosts,
            algorithm=by_torch.backend,
        )
    else:
        communicator = Communicator(runtime, endpoint, members)
        place = _Place.here(runtime, endpoint, host)
        group, event = await _form_on(communicator, place, endpoint.identity.job, how, piece_bytes)
    if on_event is not None and members.rank == 0:
        on_event(event)
    return group


async def _form_on(
    communicator: Communicator, place: _Place, job: str, how: str, piece_bytes: int
) -> tuple[Group, GroupEvent]:
    """Lets the ranks meet and say where they are, and forms their group. Closes the communicator on an error."""
    await communicator.meet()
    try:
        words = await communicator.all_gather_bytes(json.dumps(asdict(place)).encode())
        places = [_Place(**json.loads(word)) for word in words]
        return await _GroupFactory(communicator, job, places, piece_bytes).form(how)
    except BaseException:
        await communicator.close()
        raise


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank is.

    Args:
        host: a name that ranks close to each other have in common.
        memory: a name that ranks which can share memory have in common; "" for a rank that shares with none.
        connections: see `Endpoint.connections`.
    """

    host: str
    memory: str
    connections: int

    @classmethod
    def here(cls, runtime: Runtime, endpoint: Endpoint, host: str) -> _Place:
        memory = ""
        if isinstance(runtime, RealRuntime) and available():
            try:
                memory = host_id()
            except ConfigError:
                pass  # this system does not name its host: the rank shares memory with none
        return cls(host or memory or endpoint.identity.name, memory, endpoint.connections)


class _GroupFactory:
    """Forms a group of ranks that have met and know where all of them are."""

    def __init__(
        self, communicator: Communicator, job: str, places: Sequence[_Place], piece_bytes: int
    ) -> None:
        self._communicator = communicator
        self._job = job
        self._places = places
        self._piece_bytes = piece_bytes
        by_host: dict[str, list[int]] = {}
        for rank, place in enumerate(places):
            by_host.setdefault(place.host, []).append(rank)
        self._hosts = list(by_host.values())

    async def form(self, how: str) -> tuple[Group, GroupEvent]:
        """Forms the same kind at every rank: it follows from `how` and the places alone."""
        shared = all(self._shares(ranks) for ranks in self._hosts)
        even = len({len(ranks) for ranks in self._hosts}) == 1
        several = self._communicator.size > len(self._hosts)  # some host has several ranks
        if how == "shared" or (how == "auto" and shared and several and len(self._hosts) == 1):
            return await self._shared(shared)
        if how in ("auto", "hierarchical") and shared and even and several and len(self._hosts) > 1:
            return await self._hierarchical()
        if how == "auto" and several and len(self._hosts) > 1:
            how = "hierarchical"
        return await self._messages("auto" if how == "messages" else how)

    def _shares(self, ranks: Sequence[int]) -> bool:
        memories = {self._places[rank].memory for rank in ranks}
        return len(memories) == 1 and "" not in memories

    async def _shared(self, possible: bool) -> tuple[Group, GroupEvent]:
        communicator = self._communicator
        if not possible or len(self._hosts) > 1:
            where = ", ".join(
                f"{name} at {p.host}" for name, p in zip(communicator.names, self._places, strict=True)
            )
            raise ConfigError(
                f"algorithm='shared': ranks cannot share memory ({where}); take algorithm='auto', or another by name"
            )
        group = await self._join(list(range(communicator.size)), "all")
        try:
            await communicator.close()
        except BaseException:
            await group.close()
            raise
        return group, self._event("shared", "in place")

    async def _join(self, ranks: Sequence[int], purpose: str) -> SharedGroup:
        communicator = self._communicator
        members = RendezvousMembers(
            self._job,
            [communicator.names[rank] for rank in ranks],
            ranks.index(communicator.rank),
            communicator.members.epoch,
            purpose,
        )
        return await SharedGroup.join(
            communicator.runtime, members, deadline_s=communicator.members.silence_s
        )

    async def _hierarchical(self) -> tuple[Group, GroupEvent]:
        communicator = self._communicator
        number, own = next((i, ranks) for i, ranks in enumerate(self._hosts) if communicator.rank in ranks)
        inside = await communicator.guarded(self._join(own, f"host-{number}"))
        across = [ranks[own.index(communicator.rank)] for ranks in self._hosts]
        await self._connect(across)
        figures = await measure(communicator)
        choice, everybody = Choice(len(across), figures), Choice(communicator.size, figures)
        piece_bytes = self._piece_bytes
        between = MessageGroup(
            communicator, algorithm="auto", choice=choice, ranks=across, piece_bytes=piece_bytes
        )
        whole = MessageGroup(communicator, algorithm="auto", choice=everybody, piece_bytes=piece_bytes)
        group = HierarchicalGroup(communicator, inside, between, whole)
        return group, self._event("hierarchical", "in place inside hosts", choice)

    async def _messages(self, algorithm: str) -> tuple[MessageGroup, GroupEvent]:
        communicator = self._communicator
        await self._connect(range(communicator.size))
        choice = Choice(communicator.size, await measure(communicator)) if algorithm == "auto" else None
        group = MessageGroup(
            communicator, algorithm=algorithm, choice=choice, hosts=self._hosts, piece_bytes=self._piece_bytes
        )
        return group, self._event("messages", algorithm, choice)

    async def _connect(self, ranks: Sequence[int]) -> None:
        if isinstance(self._communicator.runtime, RealRuntime):  # virtual nodes have streams alone
            count = min(place.connections for place in self._places)
            await self._communicator.connect_data_sockets(ranks, count)

    def _event(self, kind: str, algorithm: str, choice: Choice | None = None) -> GroupEvent:
        figures = {} if choice is None else asdict(choice.figures)
        table = {} if choice is None else choice.table()
        return GroupEvent(
            kind=kind,
            ranks=list(self._communicator.names),
            epoch=self._communicator.members.epoch,
            hosts=len(self._hosts),
            algorithm=algorithm,
            choices={str(num_bytes): name for num_bytes, name in table.items()},
            **figures,
        )


# ---- shared window -----------------------------------------------------------------------
# The shared window: memory that all workers of a machine read and write without coordination.
#
# Processes meet as an in-place group (`SharedGroup`) and use nothing of it but its `common` vectors, which outlive
# any of the processes. The nodes of a simulation are in one process, where a vector is one object anyway.


class SharedWindow(Protocol):
    """Makes vectors that all ranks have."""

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """One vector of zeros for all ranks. Every rank asks for the same vectors, in the same order.

        Raises:
            PeerLostError, DeadlineError: the rank that makes the vector is gone or silent.
        """
        ...

    async def close(self) -> None:
        """Closes the window. Vectors stay for as long as somebody holds them. Idempotent."""
        ...


async def open_shared_window(
    runtime: Runtime, endpoint: Endpoint, members: GroupMembers, *, on_event: Callable[[Event], None]
) -> SharedWindow:
    """Opens the window that all ranks share. `form_group` describes the arguments and further errors.

    Raises:
        ConfigError: the ranks are not on one machine.
    """
    if not isinstance(runtime, RealRuntime):
        return _OneProcess(endpoint.identity.job, runtime.memory)
    return await form_group(runtime, endpoint, members, "shared", on_event=on_event)


_MADE: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""Vectors that the nodes of an event loop share, by job and name."""


class _OneProcess:
    """The shared window of nodes that run on one event loop.

    Args:
        job: job id; other jobs on this loop have vectors of their own.
        memory: memory of this node, which says whether vectors are shape-only.
    """

    def __init__(self, job: str, memory: Memory) -> None:
        self._job = job
        self._memory = memory

    async def common(self, elems: int, dtype: torch.dtype, name: str) -> Vector:
        """See `SharedWindow`. Each node keeps its own loans, since nodes may write the vector at the same time."""
        made = _MADE.setdefault(asyncio.get_running_loop(), {})
        # A shape-only simulation needs the values of its words, too.
        memory = self._memory if dtype.is_floating_point else Memory()
        tensor = made.get((self._job, name))
        if tensor is None:
            tensor = made[self._job, name] = memory.allocate(elems, dtype, name).tensor
        assert (len(tensor), tensor.dtype) == (elems, dtype)
        return Vector(name, tensor)

    async def close(self) -> None:
        """See `SharedWindow`."""
