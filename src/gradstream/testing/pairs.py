"""Pairs of endpoints for `check_endpoint`, one maker for each built-in carrier."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from gradstream.memory.segments import SharedMemory
from gradstream.runtime import Link, Network, RealRuntime, SimulationConfig, VirtualCluster
from gradstream.runtime.base import Runtime
from gradstream.testing.pieces import MakePair, Pair
from gradstream.transport.base import Endpoint, Identity, Stream
from gradstream.transport.carriers import ShmEndpoint
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.limits import METHODS, Method
from gradstream.transport.security import Tls
from gradstream.transport.simulated import MemoryEndpoint, MemoryNetwork
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.wire import v1

SECRET = b"the secret of a test's run"

_METHODS = {
    name: Method(callers=frozenset({"near", "far"}), members=name == "tensor", chunks=True)
    for name in (
        *("early", "echo", "failing", "flood", "held", "join", "late", "leave", "ping", "refusing", "reply"),
        *("sink", "slow", "tensor"),
    )
}

Run = Callable[[Coroutine[Any, Any, None]], None]
"""Runs a coroutine to its end, in real or virtual time."""

QUIET = SimulationConfig(
    network=Network(bandwidth_bytes_s=1.25e9, link=Link(latency_s=100e-6, jitter_s=20e-6))
)
"""Two machines in a rack: 10 Gbit/s cards, a tenth of a millisecond between them."""


class Known(Endpoint, Protocol):
    """An endpoint of a pair."""

    runtime: Runtime

    async def abort(self) -> None:
        """Ends as a killed process would."""
        ...

    def dial(self, peer: str, opened: v1.Open) -> Stream:
        """Opens a stream with any Open."""
        ...


def _know(near: Known, far: Known) -> None:
    near.serve_tensors()
    far.serve_tensors()
    near.know("far", far.address)
    far.know("near", near.address)


def memory_pairs(seed: int = 0, config: SimulationConfig = QUIET) -> tuple[Run, MakePair]:
    """Makes pairs on a virtual network, and a function that runs checks on them in virtual time."""
    cluster = VirtualCluster(seed, config)

    @asynccontextmanager
    async def make_pair() -> AsyncIterator[Pair]:
        network = MemoryNetwork(cluster)
        near = MemoryEndpoint(Identity("job", "near", 1), cluster.runtime("near"), network)
        far = MemoryEndpoint(Identity("job", "far", 2), cluster.runtime("far"), network)
        near.methods = far.methods = {**METHODS, **_METHODS}
        await near.start()
        await far.start()
        _know(near, far)
        try:
            yield Pair(near, far, near.runtime, far.runtime, far.abort, near.dial)
        finally:
            await near.close()
            await far.close()

    return cluster.run, make_pair


def grpc_pairs(security: Callable[[str], Tls] | None = None, *, connections: int = 1) -> tuple[Run, MakePair]:
    """Makes pairs over gRPC on loopback, and a function that runs checks on them in real time.

    Args:
        security: returns the TLS settings of an endpoint by its name; None is plain text.
        connections: see `GrpcEndpoint`.
    """

    def make(identity: Identity, runtime: RealRuntime) -> GrpcEndpoint:
        tls = security(identity.name) if security else None
        endpoint = GrpcEndpoint(identity, runtime, security=tls, connections=connections)
        endpoint.methods = {**METHODS, **_METHODS}
        return endpoint

    return real_pairs(make)


def tcp_pairs(connections: int = 1, security: Callable[[str], Tls] | None = None) -> tuple[Run, MakePair]:
    """As `grpc_pairs`, over TCP; see `SocketEndpoint` for `connections`."""

    def make(identity: Identity, runtime: RealRuntime) -> TcpEndpoint:
        tls = security(identity.name) if security else None
        endpoint = TcpEndpoint(identity, runtime, security=tls, connections=connections)
        endpoint.methods = {**METHODS, **_METHODS}
        return endpoint

    return real_pairs(make)


def shm_pairs() -> tuple[Run, MakePair]:
    """As `grpc_pairs`, over shared memory, with the vectors of each node in it."""

    def make(identity: Identity, runtime: RealRuntime) -> ShmEndpoint:
        runtime.memory = SharedMemory()
        return ShmEndpoint(identity, runtime)

    return real_pairs(make)


def real_pairs(make: Callable[[Identity, RealRuntime], Known]) -> tuple[Run, MakePair]:
    """Makes pairs in real time from a function that makes one endpoint."""

    @asynccontextmanager
    async def make_pair() -> AsyncIterator[Pair]:
        runtimes = [RealRuntime("near"), RealRuntime("far")]
        near, far = (
            make(Identity("job", "near", 1, secret=SECRET), runtimes[0]),
            make(Identity("job", "far", 2, secret=SECRET), runtimes[1]),
        )
        await near.start()
        await far.start()
        _know(near, far)
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(2e-4)  # as nodes have it: gRPC's own thread shall not wait for ours
        try:
            yield Pair(near, far, near.runtime, far.runtime, far.abort, near.dial)
        finally:
            sys.setswitchinterval(interval_s)
            await near.close()
            await far.close()
            for runtime in runtimes:
                runtime.close()

    return asyncio.run, make_pair
