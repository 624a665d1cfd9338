"""A server of gRPC at one address, which goes on where gRPC's own ends by what a stranger has sent.

grpc.aio takes the method of a call as UTF-8, and ends the whole server where it is not (`_server_main_loop`, seen in
1.85.1). One call by anybody who reaches the port does that, before any code of ours sees it, and so does one damaged
bit. gRPC tells only who asks, so this asks every `CHECK_S`, and begins a new server with the same handlers on the same
port. Calls that were under way have `FLUSH_S` to end, and are then lost: callers try again, as after a lost connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from gradstream.runtime.base import Runtime

CHECK_S = 0.1
FLUSH_S = 1.0
"""Seconds that calls which are under way get where their server ends."""

_log = logging.getLogger(__name__)


class Listener:
    """A server of gRPC, or the one that has followed it.

    Args:
        runtime: runtime of the node.
        make: makes a server with its handlers.
        listen: has a server listen on an address, and returns the port.
    """

    def __init__(
        self,
        runtime: Runtime,
        make: Callable[[], grpc.aio.Server],
        listen: Callable[[grpc.aio.Server, str], int],
    ) -> None:
        self._runtime = runtime
        self._make = make
        self._listen = listen
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listens from now on. Returns the port, which is a free one for 0; returns 0 where that cannot be."""
        port = await self._begin(f"{host}:{port}")
        if port:
            self._watching = self._runtime.spawn(self._watch(f"{host}:{port}"), name=f"server on port {port}")
        return port

    async def stop(self, grace_s: float | None) -> None:
        """Ends all calls, after `grace_s` seconds if some are given, and listens no more."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, *self._ending, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _begin(self, address: str) -> int:
        server = self._make()
        try:
            port = self._listen(server, address)
        except RuntimeError:
            return 0
        if port:
            await server.start()
            self._server = server
        return port

    async def _watch(self, address: str) -> None:
        while (server := self._server) is not None and (failure := await _failure(server)) is not None:
            _log.warning("gRPC's server on %s has ended: %s; a new one begins", address, failure)
            while not await self._begin(address):
                await self._runtime.sleep(CHECK_S)
            ending = self._runtime.spawn(server.stop(FLUSH_S), name=f"end of a server on {address}")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


async def _failure(server: grpc.aio.Server) -> Exception | None:
    """Returns once a server has ended, by what; None if it was stopped."""
    while True:
        try:
            if not await server.wait_for_termination(CHECK_S):
                return None
        except Exception as error:  # of any kind: it is what its loop has raised
            return error
