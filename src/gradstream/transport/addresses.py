"""Addresses of the form host:port."""

from __future__ import annotations

import ipaddress

from gradstream.errors import ConfigError


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of host:port; an IPv6 host keeps its brackets. Raises ConfigError for other text."""
    host, colon, port = address.rpartition(":")
    if (
        not colon
        or not host
        or not (port.isascii() and port.isdigit() and len(port) <= 5)
        or int(port) > 65535
    ):
        raise ConfigError(f"listen = {address[:80]!r}: expected host:port, 127.0.0.1:0 for example")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def leaves_machine(own: str, peer: str) -> bool:
    """Whether a connection between two hosts leaves this machine; if in doubt, it does."""
    return not (is_loopback(peer) or own == peer)
