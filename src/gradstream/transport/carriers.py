"""The endpoint of a node: which carriers it has, by what the job asks for and the network allows."""

from __future__ import annotations

from gradstream.errors import ConfigError
from gradstream.memory import Memory
from gradstream.memory.segments import SharedMemory
from gradstream.runtime.base import Runtime
from gradstream.transport.addresses import host_and_port, is_loopback
from gradstream.transport.base import Identity
from gradstream.transport.endpoint import CONNECTION_S, EndpointCore
from gradstream.transport.grpc.endpoint import GrpcEndpoint
from gradstream.transport.offers import CHOICES, Choice, shares_memory
from gradstream.transport.routed import RoutedEndpoint
from gradstream.transport.security import Tls
from gradstream.transport.shm.endpoint import ShmEndpoint
from gradstream.transport.socket.tcp import TcpEndpoint
from gradstream.transport.socket.unix import host_id

__all__ = ["make_endpoint", "make_memory"]


def make_memory(carrier: Choice, listen: str) -> Memory:
    """Where the vectors of a node come from: memory that others can map, where that is of use.

    A node that others reach over the network has its memory for itself: huge pages are for such alone on
    most systems. What it sends to its own host is copied through shared memory then.
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
    """An endpoint that has not started.

    gRPC is always there: membership goes over it, and it works wherever anything does.

    Args:
        carrier: "auto" offers all that may be used here; "grpc" that alone; another one besides.
        listen, security, insecure: see `GrpcEndpoint`.
        connections: see `SocketEndpoint`.
        connection_s: see `Deadlines.connection_s`.

    Raises:
        ConfigError: `listen` is none, or may not be listened on in plain text; the carrier cannot be had.
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
            connection_s=connection_s,
        )
    }
    host, port = host_and_port(listen)
    shares = shares_memory(carrier)
    host_name = host_id() if shares else ""
    if shares:
        carriers["shm"] = ShmEndpoint(identity, runtime)
    if carrier == "tcp" and security is not None:
        raise ConfigError(
            "carrier='tcp' is neither encrypted nor authenticated, and this run has certificates: use "
            "carrier='auto', or start the run with --insecure on a network that you trust"
        )
    # Who gives a port of its own has opened that one in a firewall: gRPC alone can do with one.
    may = security is None and (is_loopback(host) or (insecure and not port))
    if carrier == "tcp" or (carrier == "auto" and may):
        carriers["tcp"] = TcpEndpoint(
            identity,
            runtime,
            listen=f"{host}:0",
            insecure=insecure,
            connections=connections,
            connection_s=connection_s,
        )
    return RoutedEndpoint(carriers, host=host_name)
