"""Unix sockets between processes of one user on one host, and descriptors passed over them.

Names are abstract: they lie in no folder, and disappear with their socket, however its process ended. Any
user of the host can connect to one, so both sides check that the other process belongs to the same user.
Each network namespace has its own names; processes in different namespaces cannot connect, as on different
hosts.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct

from gradstream.errors import ConfigError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def host_id() -> str:
    """An id that processes must share to share memory: boot of the kernel, network namespace, user.

    Raises:
        ConfigError: this system does not provide one.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}:{os.getuid()}"
    except OSError as error:
        raise ConfigError(f"cannot tell which host this is ({error}); use the carrier 'tcp'") from None


def address_of(job: str, node: str, incarnation: int) -> str:
    """The abstract name at which a node listens: a digest, since every user of the machine can read names."""
    digest = hashlib.sha256(f"{job}/{node}/{incarnation:x}".encode()).hexdigest()
    return f"\0gradstream/{digest}"


def listen(address: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A non-blocking listening socket. Raises ConfigError if the name is in use.

    Args:
        address: abstract name.
        kind: SOCK_SEQPACKET keeps messages apart.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at Unix socket {address[1:]!r}: {error}") from None
    return listener


def check_peer(connection: socket.socket) -> None:
    """Raises ConfigError unless the process at the other end belongs to the same user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise ConfigError(f"process {pid} of user {uid} at a Unix socket: expected user {os.getuid()}")


def send_descriptors(connection: socket.socket, data: bytes, descriptors: list[int]) -> None:
    """Sends `data`, and these file descriptors with it. BlockingIOError if a non-blocking socket is full."""
    sent = socket.send_fds(connection, [data], descriptors)
    if sent < len(data):
        connection.sendall(data[sent:])


def recv_descriptors(connection: socket.socket, size_bytes: int, count: int) -> tuple[bytes, list[int]]:
    """Up to `size_bytes` of data, and the descriptors that came with it. The descriptors close on exec.

    Args:
        connection: connected Unix socket.
        size_bytes: the most bytes to read.
        count: the most descriptors to receive; the kernel closes any more.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, size_bytes, count, socket.MSG_CMSG_CLOEXEC)
    return data, list(descriptors)
