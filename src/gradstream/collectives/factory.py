"""Groups are formed here: the one place that knows their kinds, and chooses among them.

All ranks meet in a mesh and say where they are. Ranks of one host that can share memory sum in place;
of several hosts with as many ranks each, they do so inside each, and send messages between; all others
send messages, by the algorithm that is named, or by the cheapest for each size, as measured once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from gradstream.collectives.algorithms import ALGORITHMS
from gradstream.collectives.autotune import Choice
from gradstream.collectives.communicator import Communicator
from gradstream.collectives.group import Group
from gradstream.collectives.hierarchical_group import HierarchicalGroup
from gradstream.collectives.measuring import measure
from gradstream.collectives.message_group import PIECE_BYTES, MessageGroup
from gradstream.collectives.shm.control_block import available
from gradstream.collectives.shm.group import SharedGroup
from gradstream.collectives.shm.rendezvous import RendezvousMembers
from gradstream.collectives.torch_backend.group import TorchGroup
from gradstream.errors import ConfigError, UnknownNameError
from gradstream.runtime.base import Runtime
from gradstream.runtime.real import RealRuntime
from gradstream.telemetry.events import Event, GroupEvent
from gradstream.transport.base import Endpoint
from gradstream.transport.socket.unix import host_id

__all__ = ["KINDS", "TORCH", "form_group"]

TORCH = {"torch": "auto", "gloo": "gloo", "nccl": "nccl", "mpi": "mpi"}
"""Kinds that torch.distributed carries out, and the backend that each asks for."""

KINDS = ("auto", "shared", "hierarchical", "messages", *ALGORITHMS, *TORCH)
"""What `form_group` knows. "auto" chooses, "messages" only among algorithms, all others are by name."""


async def form_group(
    runtime: Runtime,
    endpoint: Endpoint,
    names: Sequence[str],
    rank: int,
    epoch: int,
    how: str = "auto",
    *,
    silence_s: float = 30.0,
    host: str = "",
    piece_bytes: int = PIECE_BYTES,
    on_event: Callable[[Event], None] | None = None,
) -> Group:
    """All ranks come together; each calls this at about the same time.

    Args:
        runtime: of this node.
        endpoint: started, and told the addresses of all of `names`.
        names: of all nodes, by rank.
        rank: of this one.
        epoch: membership epoch of the group: ranks of different ones do not meet.
        how: one of `KINDS`; the same at all ranks.
        silence_s: how long a rank may be silent, now and later, before it counts as lost.
        host: names what ranks have in common that are close to each other; "" finds out.
        piece_bytes: messages go in pieces of this size.
        on_event: hears at rank 0 what was chosen.

    Raises:
        UnknownNameError: there is no such kind.
        ConfigError: memory is to be shared by ranks that cannot; torch.distributed cannot do it here, see
            `TorchGroup.form`.
        DeadlineError, PeerLostError: a rank has not come within `silence_s`, or is gone.
        RefusedError: ranks do not agree on who they are.
    """
    if how not in KINDS:
        raise UnknownNameError("kind of group", how, KINDS)
    group: Group
    if how in TORCH:
        group = by_torch = await TorchGroup.form(
            runtime, endpoint, names, rank, epoch, silence_s=silence_s, backend=TORCH[how]
        )
        event = GroupEvent(
            kind="torch", ranks=list(names), epoch=epoch, hosts=by_torch.hosts, algorithm=by_torch.backend
        )
    else:
        mesh = Communicator(runtime, endpoint, names, rank, epoch=epoch, silence_s=silence_s)
        place = _Place.here(runtime, endpoint.identity.name, host)
        group, event = await _on(mesh, place, endpoint.identity.job, epoch, how, piece_bytes)
    if on_event is not None and rank == 0:
        on_event(event)
    return group


async def _on(
    mesh: Communicator, place: _Place, job: str, epoch: int, how: str, piece_bytes: int
) -> tuple[Group, GroupEvent]:
    """Of ranks that meet first, and say where they are; after an error the mesh is closed."""
    await mesh.meet()
    try:
        places = [_Place(**json.loads(word)) for word in await mesh.swap(json.dumps(asdict(place)).encode())]
        return await _Former(mesh, job, epoch, places, piece_bytes).form(how)
    except BaseException:
        await mesh.close()
        raise


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank is.

    Args:
        host: what it has in common with ranks that are close.
        memory: what it has in common with those that it can share memory with; "" with none.
    """

    host: str
    memory: str

    @classmethod
    def here(cls, runtime: Runtime, name: str, host: str) -> _Place:
        memory = ""
        if isinstance(runtime, RealRuntime) and available():
            try:
                memory = host_id()
            except ConfigError:
                pass  # this system does not say: as if it were alone
        return cls(host or memory or name, memory)


class _Former:
    """Forms a group of ranks that have met, and know where all are."""

    def __init__(
        self, mesh: Communicator, job: str, epoch: int, places: Sequence[_Place], piece_bytes: int
    ) -> None:
        self._mesh = mesh
        self._job = job
        self._epoch = epoch
        self._places = places
        self._piece_bytes = piece_bytes
        by_host: dict[str, list[int]] = {}
        for rank, place in enumerate(places):
            by_host.setdefault(place.host, []).append(rank)
        self._hosts = list(by_host.values())

    async def form(self, how: str) -> tuple[Group, GroupEvent]:
        """The same kind at every rank: it follows from `how` and the places alone."""
        shared = all(self._shares(ranks) for ranks in self._hosts)
        even = len({len(ranks) for ranks in self._hosts}) == 1
        several = self._mesh.size > len(self._hosts)  # ranks on one host
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
        mesh = self._mesh
        if not possible or len(self._hosts) > 1:
            where = ", ".join(f"{name} at {p.host}" for name, p in zip(mesh.names, self._places, strict=True))
            raise ConfigError(
                f"ranks cannot share memory ({where}): use the algorithm 'auto', or one by name"
            )
        group = await self._join(list(range(mesh.size)), "all")
        await mesh.close()
        return group, self._event("shared", "in place")

    async def _join(self, ranks: Sequence[int], purpose: str) -> SharedGroup:
        mesh = self._mesh
        party = RendezvousMembers(
            self._job, [mesh.names[rank] for rank in ranks], ranks.index(mesh.rank), self._epoch, purpose
        )
        return await SharedGroup.join(mesh.runtime, party, deadline_s=mesh.silence_s)

    async def _hierarchical(self) -> tuple[Group, GroupEvent]:
        mesh = self._mesh
        number, own = next((i, ranks) for i, ranks in enumerate(self._hosts) if mesh.rank in ranks)
        inside = await mesh.guarded(self._join(own, f"host-{number}"))
        lane = [ranks[own.index(mesh.rank)] for ranks in self._hosts]
        await self._string(lane)
        figures = await measure(mesh)
        choice, everybody = Choice(len(lane), figures), Choice(mesh.size, figures)
        piece_bytes = self._piece_bytes
        between = MessageGroup(mesh, algorithm="auto", choice=choice, ranks=lane, piece_bytes=piece_bytes)
        whole = MessageGroup(mesh, algorithm="auto", choice=everybody, piece_bytes=piece_bytes)
        group = HierarchicalGroup(mesh, inside, between, whole)
        return group, self._event("hierarchical", "in place inside hosts", choice)

    async def _messages(self, algorithm: str) -> tuple[MessageGroup, GroupEvent]:
        mesh = self._mesh
        await self._string(range(mesh.size))
        choice = Choice(mesh.size, await measure(mesh)) if algorithm == "auto" else None
        group = MessageGroup(
            mesh, algorithm=algorithm, choice=choice, hosts=self._hosts, piece_bytes=self._piece_bytes
        )
        return group, self._event("messages", algorithm, choice)

    async def _string(self, ranks: Sequence[int]) -> None:
        if isinstance(self._mesh.runtime, RealRuntime):  # virtual nodes have streams alone
            await self._mesh.string(ranks)

    def _event(self, kind: str, algorithm: str, choice: Choice | None = None) -> GroupEvent:
        figures = {} if choice is None else asdict(choice.figures)
        table = {} if choice is None else choice.table()
        return GroupEvent(
            kind=kind,
            ranks=list(self._mesh.names),
            epoch=self._epoch,
            hosts=len(self._hosts),
            algorithm=algorithm,
            choices={str(num_bytes): name for num_bytes, name in table.items()},
            **figures,
        )
