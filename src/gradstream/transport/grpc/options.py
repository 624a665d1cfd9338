"""Options of gRPC channels and servers."""

from __future__ import annotations

from gradstream.transport.limits import LIMITS
from gradstream.wire.frames import MAX_FRAME_BYTES

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + (1 << 20)  # so that too long a frame is refused with a message

_LOOKAHEAD_BYTES = 1 << 20  # of each call that a caller may send before they are read

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_allowed_incoming_connections", LIMITS.connections),
    ("grpc.max_concurrent_streams", LIMITS.streams + 8),  # one too many is refused with a message
    ("grpc.max_connection_idle_ms", int(LIMITS.handshake_s * 1e3)),  # of strangers: a node has a session open
    ("grpc.server_handshake_timeout_ms", int(LIMITS.handshake_s * 1e3)),
    # A sender's window for each call is fixed, not measured: gRPC would let it grow to 100 MB and more.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
    ("grpc.so_reuseport", 0),  # otherwise two servers could share a port, and get each other's calls
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # peers may have other deadlines
    ("grpc.http2.max_ping_strikes", 0),
]
CLIENT_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_CONNECT_MS = "grpc.min_reconnect_backoff_ms"  # the time that gRPC gives one attempt to connect
SHARED_CONNECTION_OPTIONS = [(_CONNECT_MS, 3000)]  # round trips of 0.6 s: TCP and TLS take three
# Other connections are tried beside a new one, so a slow handshake may take its time.
NEW_CONNECTION_OPTIONS = [(_CONNECT_MS, 5000)]


def patience_options(connection_s: float) -> list[tuple[str, int]]:
    """Options that have gRPC end a silent connection after `connection_s` seconds, and not earlier.

    gRPC sends a ping after half of the time, and waits for the answer during the other half. The last option
    bounds pings that gRPC sends to measure the connection; with its default, gRPC ends a connection whose
    peer was stopped for a minute.
    """
    half_ms = int(500 * connection_s)
    names = ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms")
    return [(f"grpc.{name}", half_ms) for name in names]
