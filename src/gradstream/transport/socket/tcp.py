"""The `tcp` carrier: frames over TCP, for bulk data; with TLS on a run with certificates.

Without certificates a connection is authenticated when it is made, but not encrypted, and off loopback the
user must ask for it explicitly.

The death of a process breaks its connections at once. The loss of a machine or a cable shows as silence to
the streams that wait for it; the system ends a connection after `Deadlines.connection_s` of silence, and not
before.

The system chooses the congestion control, with one exception. BBR (Cardwell et al., 2016) sends at its
estimate of the path's rate, which is good over long paths that lose packets. Between near machines that
send in turns the estimate is too low: a ring at 100 Mbit/s got 86 to 90 % of the network with BBR, and
95.5 %, the maximum, with CUBIC. So connections to near peers do not use BBR. Not even one connection of a run
may use it: CUBIC connections keep queues full, the one with BBR gets a third of its share,
and its worker waits for it. A connection made while a queue is full measures too long a round trip.
So the bound of "near" includes a full queue, and each connection is checked again later, with the shortest
round trip measured by then.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Sequence
from functools import partial

from gradstream.errors import ConfigError
from gradstream.runtime.base import Runtime
from gradstream.transport.base import Identity
from gradstream.transport.endpoint import CONNECTION_S, WINDOW
from gradstream.transport.offers import host_and_port, is_loopback
from gradstream.transport.security import Tls
from gradstream.transport.socket.endpoint import SocketEndpoint

BACKLOG = 512
NEAR_S = 0.1  # round trip on one continent, or in one room with queues of 50 ms each way
LOOK_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # pauses between checks of the round trip

_SHORTEST_AT = 148  # offset of `tcpi_min_rtt`, in microseconds, in Linux's `tcp_info`; it is older than BBR


class TcpEndpoint(SocketEndpoint):
    """An endpoint on TCP.

    Args:
        runtime: a real runtime.
        listen: host:port; port 0 takes a free port, see `address` after `start`.
        insecure: whether it may listen on other interfaces than loopback in plain text.
        security, connections, window: see `SocketEndpoint`.
        connection_s: silence in seconds after which the system ends a connection.

    Raises:
        ConfigError: `listen` is not host:port, or not loopback without `security` or `insecure`.
    """

    has_data_sockets = True

    def __init__(
        self,
        identity: Identity,
        runtime: Runtime,
        *,
        listen: str = "127.0.0.1:0",
        security: Tls | None = None,
        insecure: bool = False,
        connections: int = 1,
        window: int = WINDOW,
        connection_s: float = CONNECTION_S,
    ) -> None:
        super().__init__(identity, runtime, connections=connections, window=window, security=security)
        self._connection_s = connection_s
        self._host, self._port = host_and_port(listen)
        if not (security or insecure or is_loopback(self._host)):
            raise ConfigError(
                f"listen = {listen!r} can be reached from other machines, and without certificates connections "
                "are neither encrypted nor authenticated: listen on 127.0.0.1, give it `security`, or say "
                "insecure=True on a network that you trust"
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

    def _target(self, address: str) -> tuple[socket.socket, tuple[str, int]]:
        host, port = host_and_port(address)
        return socket.socket(_family(host), socket.SOCK_STREAM), (host.strip("[]"), port)

    def _admit(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        half_s = math.ceil(self._connection_s / 2)  # until a probe, and then for its answer
        for name, value in (
            ("TCP_KEEPIDLE", half_s),
            ("TCP_KEEPINTVL", half_s),
            ("TCP_KEEPCNT", 1),
            ("TCP_USER_TIMEOUT", math.ceil(1e3 * self._connection_s)),
        ):
            if hasattr(socket, name):  # not all systems have all of these options
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._choose(connected, LOOK_AGAIN_S)

    def _choose(self, connected: socket.socket, pauses_s: Sequence[float]) -> None:
        """Chooses the congestion control now, and again after each pause while the connection uses BBR."""
        if choose_congestion_control(connected) and pauses_s:
            self.runtime.call_later(pauses_s[0], partial(self._choose, connected, pauses_s[1:]))


def choose_congestion_control(connected: socket.socket) -> bool:
    """Replaces BBR on a connection to a near peer. Returns whether the connection still uses BBR."""
    if not (hasattr(socket, "TCP_CONGESTION") and hasattr(socket, "TCP_INFO")):
        return False
    try:
        used = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if not used.startswith(b"bbr"):
            return False
        if _shortest_round_trip_s(connected) > NEAR_S:
            return True
    except OSError:
        return False  # the connection is lost already
    for name in (b"cubic", b"reno"):  # not every user may choose CUBIC; every user may choose Reno
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return False
        except OSError:
            continue
    return True


def _shortest_round_trip_s(connected: socket.socket) -> float:
    """The shortest round trip that the system has measured on a connection, in seconds."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST_AT + 4)
    return float(struct.unpack_from("=I", info, _SHORTEST_AT)[0]) / 1e6


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
