"""Carriers end a silent connection after `Deadlines.connection_s`, and not before."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from gradstream.runtime import RealRuntime
from gradstream.runtime.deadlines import Deadlines
from gradstream.testing.pairs import SECRET
from gradstream.transport.base import Identity
from gradstream.transport.carriers import make_endpoint
from gradstream.transport.grpc.connection import CLIENT_OPTIONS, SERVER_OPTIONS, patience_options
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1

ODD = Deadlines(silence_s=7.0, lease_s=3.0, coordinator_s=11.0)


def test_every_carrier_of_a_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, float] = {}
    for kind in (GrpcEndpoint, TcpEndpoint):
        begin = kind.__init__

        def note(self: Any, *given: Any, begin: Any = begin, **options: Any) -> None:
            told[type(self).__name__] = options["connection_s"]
            begin(self, *given, **options)

        monkeypatch.setattr(kind, "__init__", note)
    runtime = RealRuntime("node")
    make_endpoint(Identity("job", "node", 1, secret=SECRET), runtime, connection_s=ODD.connection_s)
    runtime.close()
    assert told == {"GrpcEndpoint": 33.0, "TcpEndpoint": 33.0}


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
def test_the_system_keeps_a_silent_tcp_connection_for_so_long() -> None:
    runtime = RealRuntime("node")
    endpoint = TcpEndpoint(Identity("job", "node", 1, secret=SECRET), runtime, connection_s=ODD.connection_s)

    async def admit(one: socket.socket) -> None:
        endpoint._admit(one)

    with socket.socket() as one:
        asyncio.run(admit(one))
        read = {
            name: one.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        }
    runtime.close()
    assert read["TCP_USER_TIMEOUT"] == 33_000
    assert read["TCP_KEEPIDLE"] + read["TCP_KEEPINTVL"] * read["TCP_KEEPCNT"] == 34  # whole seconds


def test_grpc_pings_after_half_of_it_and_waits_for_the_other_half() -> None:
    options = dict(patience_options(22.0))
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] == 22_000
    assert options["grpc.http2.ping_timeout_ms"] == 11_000
    for fixed in (CLIENT_OPTIONS, SERVER_OPTIONS):
        assert not {name for name, _ in fixed} & set(options), "said twice"


def test_a_call_over_a_new_connection_leaves_the_old_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And closes its own: the server sees one more, and then it is gone."""

    async def main() -> list[int]:
        runtime = RealRuntime("node")
        server = GrpcEndpoint(Identity("job", "server", 1, secret=SECRET), runtime)
        caller = GrpcEndpoint(Identity("job", "caller", 1, secret=SECRET), runtime)
        peers: list[str] = []

        async def answer(stream: Any) -> None:
            await stream.send(v1.Frame(body=v1.Body()))

        server.serve("ping", answer, model=False)
        listen = server.answer

        async def noting(request: object, context: Any) -> None:
            peers.append(context.peer())
            await listen(request, context)

        monkeypatch.setattr(server, "answer", noting)
        await server.start()
        caller.know("server", server.address)
        for anew in (False, True, True, False):
            await caller.call("server", "ping", v1.Body(), v1.Body, new_connection=anew)
        await caller.close()
        await server.close()
        runtime.close()
        return [peers.index(peer) for peer in peers]

    assert asyncio.run(main()) == [0, 1, 2, 0]
