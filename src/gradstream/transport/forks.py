"""Breaks the connections of endpoints in processes that a node forks, such as those of a DataLoader.

A forked process has copies of the node's sockets. While it lives, no peer would see that the node has died: torch's
processes look for their parent every 5 s only. So the child puts /dev/null in the place of its copies. Their numbers
stay in use: the libraries that hold them will close them.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from weakref import WeakKeyDictionary

EVERY = ("0.0.0.0", "::")
"""Where a node listens on all of its machine's addresses."""

_addresses: WeakKeyDictionary[object, dict[str, str]] = WeakKeyDictionary()
"""By endpoint, the addresses of its peers by name."""


def break_in_forks(endpoint: object, addresses: dict[str, str]) -> None:
    """Breaks the connections of an endpoint in every process that is forked while it lives.

    Args:
        endpoint: has an `address`: host:port, or the abstract name of a Unix socket.
        addresses: those of its peers by name; the caller changes them.
    """
    _addresses[endpoint] = addresses


def _break() -> None:
    own, peers = set[str](), set[str]()
    for endpoint, addresses in list(_addresses.items()):
        own.add(getattr(endpoint, "address", ""))
        peers.update(addresses.values())
    if not own:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for number in _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copied:
            name, peer = copied.getsockname(), None
            with suppress(OSError):  # it listens
                peer = copied.getpeername()
            if _is_one_of(name, own) or _is_one_of(peer, peers):
                os.dup2(null, number, inheritable=False)
    os.close(null)


def _sockets() -> Iterable[int]:
    with suppress(OSError):  # a system without /proc
        for entry in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                    yield int(entry.name)


def _is_one_of(name: object, addresses: set[str]) -> bool:
    """Whether the name of a socket is one of these addresses. A host may be given by name: then its port decides."""
    if isinstance(name, bytes):
        return name.decode(errors="replace") in addresses
    if not isinstance(name, tuple):
        return False
    for address in addresses:
        host, _, port = address.rpartition(":")
        if port == str(name[1]) and _host(host) in (None, _host(name[0]), *EVERY):
            return True
    return False


def _host(text: str) -> str | None:
    """An IP address in one form, whether of a socket for IPv4 or for both; None for a host's name."""
    with suppress(ValueError):
        address = ip_address(text.strip("[]"))
        return str(getattr(address, "ipv4_mapped", None) or address)
    return None


os.register_at_fork(after_in_child=_break)
