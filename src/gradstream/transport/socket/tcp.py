"""The `tcp` carrier: frames over plain TCP, for bulk on loopback and on networks that one trusts.

It is authenticated when a connection is made, and not encrypted, so off loopback it has to be asked
for in so many words; where a run has certificates, `grpc` carries what leaves the host.

The death of a process breaks its connections at once. That of a machine or a cable is noticed by whoever
waits for it; the system ends a connection after `Deadlines.connection_s` of silence, and not before.

How much the system puts on the network at once is its own choice, but for one case. BBR (Cardwell et al.,
2016) sends at the rate that it believes the path to have, which is good over long paths that lose packets.
Between near machines that send in turns it believes too little: a ring at 100 Mbit/s got 86 to 90 % of the
network by it, and 95.5 %, which is all, by CUBIC. So connections to near peers do not use it. Nor may one
of a run alone: others by CUBIC keep queues full, it gets a third of its share, and all that its worker does
waits for it. A connection that is made while a queue is full takes its peer for a farther one. So near is
all that is nearer than a full queue makes it seem, and each connection is looked at again, for the shortest
way that it has found by then.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Sequence
from functools import partial

from gradstream.errors import ConfigError
from gradstream.runtime.base import Runtime
from gradstream.transport.addresses import host_and_port, is_loopback
from gradstream.transport.base import Identity
from gradstream.transport.endpoint import CONNECTION_S, WINDOW
from gradstream.transport.socket.endpoint import SocketEndpoint

__all__ = ["TcpEndpoint", "choose_congestion_control"]

BACKLOG = 512
NEAR_S = 0.1  # there and back; on one continent, or in one room behind queues of 50 ms each way
LOOK_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # after one another: how near a peer is

_SHORTEST_AT = 148  # `tcpi_min_rtt` in Linux's `tcp_info`, which is older than BBR: microseconds


class TcpEndpoint(SocketEndpoint):
    """An endpoint on TCP.

    Args:
        identity: who it is.
        runtime: a real one.
        listen: host:port; port 0 takes a free one, see `address` after `start`.
        insecure: listen on other interfaces than loopback.
        connections, window: see `SocketEndpoint`.
        connection_s: silence after which the system ends a connection; see `Deadlines.connection_s`.

    Raises:
        ConfigError: `listen` is not host:port, or not loopback without `insecure`.
    """

    has_lines = True

    def __init__(
        self,
        identity: Identity,
        runtime: Runtime,
        *,
        listen: str = "127.0.0.1:0",
        insecure: bool = False,
        connections: int = 1,
        window: int = WINDOW,
        connection_s: float = CONNECTION_S,
    ) -> None:
        super().__init__(identity, runtime, connections=connections, window=window)
        self._connection_s = connection_s
        self._host, self._port = host_and_port(listen)
        if not (insecure or is_loopback(self._host)):
            raise ConfigError(
                f"listen = {listen!r} can be reached from other machines, and TCP connections are neither "
                "encrypted nor authenticated: listen on 127.0.0.1, use the carrier 'grpc' with certificates, "
                "or say insecure=True on a network that you trust"
            )

    def _listen(self) -> tuple[socket.socket, str]:
        listener = socket.socket(_family(self._host), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host.strip("[]"), self._port))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            where = f"{self._host}:{self._port} ({error.strerror})"
            raise ConfigError(
                f"{self.identity.name} cannot listen on {where}: the port is in use, or the address is not "
                "this machine's; give another one, or port 0 for any free port"
            ) from None
        return listener, f"{self._host}:{listener.getsockname()[1]}"

    async def _connect(self, address: str) -> socket.socket:
        host, port = host_and_port(address)
        connected = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            connected.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connected, (host.strip("[]"), port))
            self._admit(connected)
        except BaseException:
            connected.close()
            raise
        return connected

    def _admit(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        half_s = math.ceil(self._connection_s / 2)  # a probe after half of it, half of it for the answer
        for name, value in (
            ("TCP_KEEPIDLE", half_s),
            ("TCP_KEEPINTVL", half_s),
            ("TCP_KEEPCNT", 1),
            ("TCP_USER_TIMEOUT", math.ceil(1e3 * self._connection_s)),
        ):
            if hasattr(socket, name):  # not all systems have all of them
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._choose(connected, LOOK_AGAIN_S)

    def _choose(self, connected: socket.socket, pauses_s: Sequence[float]) -> None:
        """How a connection is sent over: now, and after each pause while it uses BBR."""
        if choose_congestion_control(connected) and pauses_s:
            self.runtime.call_later(pauses_s[0], partial(self._choose, connected, pauses_s[1:]))


def choose_congestion_control(connected: socket.socket) -> bool:
    """Takes a near peer's connection off BBR, where the system would use that. Whether it is on BBR still."""
    if not (hasattr(socket, "TCP_CONGESTION") and hasattr(socket, "TCP_INFO")):
        return False
    try:
        used = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if not used.startswith(b"bbr"):
            return False
        if _shortest_round_trip_s(connected) > NEAR_S:
            return True
    except OSError:
        return False  # already gone again
    for name in (b"cubic", b"reno"):  # not every user may choose the first one; the second one is everybody's
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return False
        except OSError:
            continue
    return True


def _shortest_round_trip_s(connected: socket.socket) -> float:
    """Of those that the system has measured, the first of them when the connection was made."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST_AT + 4)
    return float(struct.unpack_from("=I", info, _SHORTEST_AT)[0]) / 1e6


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
