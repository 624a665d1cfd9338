"""The endpoint of a node: its carriers, by the job's choice and the network, and the route to each peer."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from google.protobuf.message import Message
from typing_extensions import override

from gradstream.errors import ConfigError
from gradstream.memory import Memory, Span
from gradstream.memory.segments import SharedMemory
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Endpoint, Handler, Identity, PeerSocket, Priority
from gradstream.transport.detours import Detours
from gradstream.transport.endpoint import CONNECTION_S, WINDOW, EndpointCore
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.offers import (
    CHOICES,
    CarrierOffer,
    Choice,
    choose,
    host_and_port,
    is_loopback,
    shares_memory,
)
from gradstream.transport.security import Tls
from gradstream.transport.socket.endpoint import SocketEndpoint
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.transport.socket.unix import check_peer, host_id, listen
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1

# ---- endpoint ----------------------------------------------------------------------------
# The `shm` carrier: processes of one host read each other's payloads in place.
#
# Frames go over a Unix socket as they do over TCP; their payloads stay in shared memory (see `channel`), or are
# copied through it. Only processes of the same user in the same network namespace can connect.


class ShmEndpoint(SocketEndpoint):
    """An endpoint on Unix sockets and shared memory. Vectors in `SharedMemory` are sent without a copy.

    Args:
        identity, runtime, window: see `SocketEndpoint`.
    """

    @override
    async def start(self) -> None:
        await super().start()
        self.share_memory()

    def _listen(self) -> tuple[socket.socket, str]:
        address = f"gradstream/{secrets.token_hex(16)}"  # every user can read the names of sockets
        return listen("\0" + address), address

    def _target(self, address: str) -> tuple[socket.socket, str]:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "\0" + address

    def _admit(self, connected: socket.socket) -> None:
        try:
            check_peer(connected)
        except ConfigError as error:
            raise OSError(str(error)) from error


# ---- carriers ----------------------------------------------------------------------------

M = TypeVar("M", bound=Message)


def make_memory(carrier: Choice, listen: str) -> Memory:
    """The memory for the vectors of a node: memory that other processes can map, if that is useful.

    A node that listens on the network gets private memory: most systems have huge pages only for that.
    Payloads to its own host are then copied through shared memory.
    """
    shares = carrier == "shm" or (shares_memory(carrier) and is_loopback(host_and_port(listen)[0]))
    return SharedMemory() if shares else Memory()


def make_endpoint(
    identity: Identity,
    runtime: Runtime,
    carrier: Choice = "auto",
    *,
    listen: str = "127.0.0.1:0",
    security: Tls | None = None,
    insecure: bool = False,
    connections: int = 1,
    connection_s: float = CONNECTION_S,
) -> RoutedEndpoint:
    """Makes an endpoint that has not started.

    gRPC is always among its carriers: membership goes over it, and it works on every network.

    Args:
        carrier: "auto" offers all carriers that may be used here; "grpc" offers gRPC alone; any other name
            offers that carrier and gRPC.
        listen, security, insecure: see `GrpcEndpoint`.
        connections: see `SocketEndpoint`.
        connection_s: see `Deadlines.connection_s`.

    Raises:
        ConfigError: `listen` is not host:port, or needs encryption; or the carrier cannot be used here.
    """
    if carrier not in CHOICES:
        raise ConfigError(f"carrier={carrier!r}: expected one of {', '.join(CHOICES)}")
    carriers: dict[str, EndpointCore] = {
        "grpc": GrpcEndpoint(
            identity,
            runtime,
            listen=listen,
            security=security,
            insecure=insecure,
            connections=connections,
            connection_s=connection_s,
        )
    }
    host, _ = host_and_port(listen)
    host_name = ""
    if shares_memory(carrier):
        host_name = host_id()
        carriers["shm"] = ShmEndpoint(identity, runtime)
    # Where a firewall leaves one port, that of gRPC, peers find out: see `Detours.find`.
    if carrier == "tcp" or (carrier == "auto" and (is_loopback(host) or security or insecure)):
        carriers["tcp"] = TcpEndpoint(
            identity,
            runtime,
            listen=f"{host}:0",
            security=security,
            insecure=insecure,
            connections=connections,
            connection_s=connection_s,
        )
    return RoutedEndpoint(carriers, host=host_name)


class RoutedEndpoint(Endpoint):
    """One node's endpoint over all of its carriers; implements `transport.base.Endpoint`.

    It reaches each peer by the best carrier that both sides have. Handlers and tagged tensors belong to the
    node, not to one of its carriers.

    Args:
        carriers: endpoints by the name of the carrier, at least one, all of one identity. The first one
            reaches peers that `know` has not named.
        host: see `CarrierOffer`.
    """

    def __init__(self, carriers: Mapping[str, EndpointCore], *, host: str = "") -> None:
        self._carriers = dict(carriers)
        self._main, *others = self._carriers.values()
        for other in others:
            other.share(self._main)
        self._host = host
        self._offer = CarrierOffer()
        self.address = ""
        self._routes: dict[str, str] = {}
        self._offers: dict[str, CarrierOffer] = {}
        self._detours: Detours | None = None
        self.identity = self._main.identity
        self.connections = max(carrier.connections for carrier in carriers.values())
        self.protected = self._main.protected
        self.runtime = self._main.runtime

    @property
    def offered(self) -> tuple[str, ...]:
        """Names of the carriers that this endpoint offers."""
        return tuple(self._carriers)

    @property
    def routes(self) -> Mapping[str, str]:
        """Name of the carrier by which each known peer is reached."""
        return self._routes

    @property
    @override
    def on_damage(self) -> Callable[[str, int], None]:
        return self._main.on_damage

    @on_damage.setter
    def on_damage(self, report: Callable[[str, int], None]) -> None:
        """Tells every carrier."""
        for carrier in self._carriers.values():
            carrier.on_damage = report

    @override
    async def start(self) -> None:
        for carrier in self._carriers.values():
            await carrier.start()
        self._offer = CarrierOffer(
            {name: endpoint.address for name, endpoint in self._carriers.items()}, self._host
        )
        self.address = str(self._offer)

    @override
    def serve(self, method: str, handler: Handler, *, model: bool = True) -> None:
        self._main.serve(method, handler, model=model)

    @override
    def serve_tensors(self) -> None:
        self._main.serve_tensors()

    @override
    def members_changed(self, members: Mapping[str, int], revoked: Iterable[bytes] = ()) -> None:
        self._main.members_changed(members, revoked)

    def know(self, peer: str, address: str) -> None:
        """See `Endpoint.know`.

        Raises:
            ConfigError: this node and the peer have no carrier in common.
        """
        if not address:
            return  # it serves nothing, like workers in other languages
        offer = CarrierOffer.parse(address)
        chosen, before = choose(self._offer, offer), self._routes.get(peer)
        self._offers[peer] = offer
        if self._detours is not None and chosen != "shm":
            self._detours.know(peer, offer.addresses["grpc"])
            if self._detours.entry(peer) is not None:
                return
        self._take(peer, chosen, offer.addresses[chosen], before)

    def _take(self, peer: str, chosen: str, address: str, before: str | None) -> None:
        if before is not None and before != chosen:
            self._carriers[before].forget(peer)
        self._routes[peer] = chosen
        self._carriers[chosen].know(peer, address)

    async def take_detours(self, silence_s: float) -> None:
        """From now on reaches peers that cannot be dialled through the coordinator: see `Detours`."""
        assert isinstance(self._main, GrpcEndpoint)
        self._detours = Detours(self.runtime, self._main, silence_s=silence_s)
        await self._detours.start()

    async def _by_any_way(self, peer: str) -> EndpointCore:
        """The carrier to a peer, once it is known whether the peer can be dialled."""
        route = self._routes.get(peer)
        if self._detours is not None and route is not None and route != "shm":
            addresses = self._offers[peer].addresses
            others = [addresses[route]] if route != "grpc" else []
            entry = await self._detours.find(peer, addresses["grpc"], others)
            if entry is not None:
                self._take(peer, "grpc", entry, self._routes.get(peer))
        return self._to(peer)

    @override
    def redial(self, peer: str, silent_s: float) -> None:
        self._to(peer).redial(peer, silent_s)

    @override
    async def open(
        self,
        peer: str,
        method: str,
        request: Message,
        *,
        priority: Priority = Priority.BULK,
        window: int = WINDOW,
        new_connection: bool = False,
    ) -> StreamCore:
        return await (await self._by_any_way(peer)).open(
            peer, method, request, priority=priority, window=window, new_connection=new_connection
        )

    @override
    async def data_socket(
        self, peer: str, name: str, *, dial: bool, copies: bool = False
    ) -> PeerSocket | None:
        if self._routes.get(peer) == "grpc":
            return None  # even for a detour: nobody has to look for one
        return await (await self._by_any_way(peer)).data_socket(peer, name, dial=dial, copies=copies)

    @override
    async def send(self, peer: str, tag: int, tensor: Span, *, silence_s: float = 30.0) -> None:
        await (await self._by_any_way(peer)).send(peer, tag, tensor, silence_s=silence_s)

    async def recv(self, peer: str, tag: int, into: Span, *, silence_s: float = 30.0) -> None:
        """See `Endpoint.recv`. The tensor may come over any carrier."""
        await self._main.recv(peer, tag, into, silence_s=silence_s)

    @override
    async def close(self) -> None:
        try:
            if self._detours is not None:
                await self._detours.close()
            for carrier in list(self._carriers.values())[1:]:
                await carrier.close()
        finally:
            await self._main.close()

    async def abort(self) -> None:
        """See `EndpointCore.abort`."""
        for carrier in self._carriers.values():
            await carrier.abort()

    def dial(self, peer: str, opened: v1.Open, priority: Priority = Priority.BULK) -> StreamCore:
        """See `EndpointCore.dial`."""
        return self._to(peer).dial(peer, opened, priority)

    def _to(self, peer: str) -> EndpointCore:
        route = self._routes.get(peer)
        return self._main if route is None else self._carriers[route]
