"""Breaks the connections of endpoints in processes that a node forks, such as those of a DataLoader.

A forked process has copies of the node's sockets. While it lives, no peer would see that the node has died: torch's
processes look for their parent every 5 s only. So the child puts /dev/null in the place of its copies. Their numbers
stay in use: the libraries that hold them will close them.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Set
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
    ends, names = set[tuple[str | None, str]](), set[str]()
    for endpoint, addresses in list(_addresses.items()):
        for address in (getattr(endpoint, "address", ""), *addresses.values()):
            host, _, port = address.rpartition(":")
            ends.add((_host(host), port))
            names.add(address.strip("\0"))
    ends.discard((None, ""))
    if not ends:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for number in _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copied:
            sides = [copied.getsockname()]
            with suppress(OSError):  # it listens
                sides.append(copied.getpeername())
            if any(_is_one_of(side, ends, names) for side in sides):
                os.dup2(null, number, inheritable=False)
    os.close(null)


def _sockets() -> Iterable[int]:
    with suppress(OSError):  # a system without /proc
        for entry in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                    yield int(entry.name)


def _is_one_of(side: object, ends: Set[tuple[str | None, str]], names: Set[str]) -> bool:
    """Whether a side of a socket is an address of a node. A host may be given by its name: then the port decides."""
    if isinstance(side, bytes):  # of a Unix socket: the node's name, or one that has it as a part
        text = "/" + side.decode(errors="replace").strip("\0") + "/"
        return any(f"/{name}/" in text for name in names if name)
    if not isinstance(side, tuple):
        return False
    return any((host, str(side[1])) in ends for host in (_host(side[0]), None, *EVERY))


def _host(text: str) -> str | None:
    """An IP address in one form, whether of a socket for IPv4 or for both; None for a host's name."""
    with suppress(ValueError):
        address = ip_address(text.strip("[]"))
        return str(getattr(address, "ipv4_mapped", None) or address)
    return None


os.register_at_fork(after_in_child=_break)
