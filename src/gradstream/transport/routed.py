"""An endpoint over several carriers: each peer is reached by the best that both sides have.

Who uses it sees one endpoint: handlers, tagged tensors and their numbers belong to the node, and not
to one of its carriers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import TypeVar

from google.protobuf.message import Message

from gradstream.memory import Span
from gradstream.transport.base import Handler, Priority
from gradstream.transport.endpoint import WINDOW, EndpointCore
from gradstream.transport.offers import CarrierOffer, choose
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1

__all__ = ["RoutedEndpoint"]

M = TypeVar("M", bound=Message)


class RoutedEndpoint:
    """One node's endpoint over all of its carriers; implements `transport.base.Endpoint`.

    Args:
        carriers: by name, at least one; all of one identity. Peers that are not known yet are those of
            the first.
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
        self.identity = self._main.identity
        self.protected = self._main.protected
        self.runtime = self._main.runtime

    @property
    def offered(self) -> tuple[str, ...]:
        """Names of its carriers."""
        return tuple(self._carriers)

    @property
    def routes(self) -> Mapping[str, str]:
        """Name of the carrier by which each known peer is reached."""
        return self._routes

    async def start(self) -> None:
        """See `Endpoint.start`."""
        for carrier in self._carriers.values():
            await carrier.start()
        self._offer = CarrierOffer({name: one.address for name, one in self._carriers.items()}, self._host)
        self.address = str(self._offer)

    def serve(self, method: str, handler: Handler, *, model: bool = True) -> None:
        """See `Endpoint.serve`."""
        self._main.serve(method, handler, model=model)

    def serve_tensors(self) -> None:
        """See `Endpoint.serve_tensors`."""
        self._main.serve_tensors()

    def members_changed(self, members: Mapping[str, int], revoked: Iterable[bytes] = ()) -> None:
        """See `Endpoint.members_changed`."""
        self._main.members_changed(members, revoked)

    def know(self, peer: str, address: str) -> None:
        """See `Endpoint.know`.

        Raises:
            ConfigError: this node and the peer have no carrier in common.
        """
        theirs = CarrierOffer.parse(address)
        chosen = choose(self._offer, theirs)
        before = self._routes.get(peer)
        if before is not None and before != chosen:
            self._carriers[before].forget(peer)
        self._routes[peer] = chosen
        self._carriers[chosen].know(peer, theirs.addresses[chosen])

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
        """See `Endpoint.open`."""
        return await self._to(peer).open(
            peer, method, request, priority=priority, window=window, new_connection=new_connection
        )

    async def line(self, peer: str, name: str, *, dial: bool) -> socket.socket | None:
        """See `Endpoint.line`."""
        return await self._to(peer).line(peer, name, dial=dial)

    async def call(
        self,
        peer: str,
        method: str,
        request: Message,
        reply: type[M],
        *,
        priority: Priority = Priority.CONTROL,
        silence_s: float = 30.0,
        new_connection: bool = False,
    ) -> M:
        """See `Endpoint.call`."""
        return await self._to(peer).call(
            peer,
            method,
            request,
            reply,
            priority=priority,
            silence_s=silence_s,
            new_connection=new_connection,
        )

    async def send(self, peer: str, tag: int, tensor: Span, *, silence_s: float = 30.0) -> None:
        """See `Endpoint.send`."""
        await self._to(peer).send(peer, tag, tensor, silence_s=silence_s)

    async def recv(self, peer: str, tag: int, into: Span, *, silence_s: float = 30.0) -> None:
        """See `Endpoint.recv`. By whichever carrier it comes."""
        await self._main.recv(peer, tag, into, silence_s=silence_s)

    async def close(self) -> None:
        """See `Endpoint.close`."""
        try:
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
