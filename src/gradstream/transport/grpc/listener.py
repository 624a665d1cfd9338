"""A gRPC server at one address, which survives input of strangers that ends gRPC's own server.

grpc.aio decodes the method of a call as UTF-8, and ends the whole server if that fails (`_server_main_loop`, seen in
1.85.1). One call by anybody who reaches the port does that, before any code of ours sees it, and so does one damaged
bit. gRPC reports it only on request, so this asks every `CHECK_S`, and starts a new server with the same handlers on
the same port. If members have sessions on the old server, its calls go on: they show the coordinator who lives. New
calls use new connections. An old server without members is freed, after `FLUSH_S`, with the stranger's call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from gradstream.runtime.base import Runtime

CHECK_S = 0.1
FLUSH_S = 1.0
"""Seconds that the calls of a server without members have to end."""

_log = logging.getLogger(__name__)


class Listener:
    """A gRPC server, or the one that has replaced it.

    Args:
        make: makes a server with its handlers, and a function that says whether members have sessions on it.
        listen: makes a server listen on an address, and returns the port.
    """

    def __init__(
        self,
        runtime: Runtime,
        make: Callable[[], tuple[grpc.aio.Server, Callable[[], bool]]],
        listen: Callable[[grpc.aio.Server, str], int],
    ) -> None:
        self._runtime = runtime
        self._make = make
        self._listen = listen
        self._server: grpc.aio.Server | None = None
        self._in_use: Callable[[], bool] = bool
        self._watching: asyncio.Task[None] | None = None
        self._ended: dict[grpc.aio.Server, asyncio.Task[None]] = {}  # those that are not freed yet

    async def start(self, host: str, port: int) -> int:
        """Listens from now on. Returns the port, a free one for 0; returns 0 if it cannot listen."""
        port = await self._begin(f"{host}:{port}")
        if port:
            self._watching = self._runtime.spawn(self._watch(f"{host}:{port}"), name=f"server on port {port}")
        return port

    async def stop(self, grace_s: float | None) -> None:
        """Ends all calls, after `grace_s` seconds if it is not None, and stops listening."""
        tasks = [*self._ended.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        servers = {*self._ended, *([self._server] if self._server else [])}
        await asyncio.gather(*(server.stop(grace_s) for server in servers))

    async def _begin(self, address: str) -> int:
        server, in_use = self._make()
        try:
            port = self._listen(server, address)
        except RuntimeError:
            return 0
        if port:
            self._server, self._in_use = server, in_use
            await server.start()
        return port

    async def _watch(self, address: str) -> None:
        while (server := self._server) is not None and (failure := await _failure(server)) is not None:
            _log.warning("gRPC's server on %s has ended: %s; a new one begins", address, failure)
            freeing = self._free(server, self._in_use)
            self._ended[server] = self._runtime.spawn(freeing, name=f"a server on {address} that has ended")
            if not await self._begin(address):
                _log.error(
                    "%s is taken by another program; until it is free, nobody reaches this node", address
                )
                while not await self._begin(address):
                    await self._runtime.sleep(FLUSH_S)

    async def _free(self, server: grpc.aio.Server, in_use: Callable[[], bool]) -> None:
        while in_use():
            await self._runtime.sleep(FLUSH_S)
        await server.stop(FLUSH_S)
        del self._ended[server]


async def _failure(server: grpc.aio.Server) -> Exception | None:
    """Returns once a server has ended, with the cause; None if it was stopped."""
    while True:
        try:
            if not await server.wait_for_termination(CHECK_S):
                return None
        except Exception as error:  # whatever its loop raised
            return error
