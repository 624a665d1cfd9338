"""What a script finds in its environment: which worker it is, and where torch.distributed meets.

As torchrun sets them, so that a script's own `init_process_group`, and libraries that look, work as there.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from gradstream.errors import ConfigError
from gradstream.transport.addresses import is_loopback

__all__ = ["hold_port", "set_environment"]

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


def hold_port(host: str, port: int = 0) -> socket.socket:
    """Keeps a port for the process group of a script: as long as the socket is open, nobody is given it.

    The socket does not listen, so worker 0 can listen there: torch reuses addresses, as servers do.

    Args:
        host: of this machine.
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is in use.
    """
    family, kind, proto, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, kind, proto)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(place)
    except OSError as error:
        held.close()
        raise ConfigError(
            f"port {port} of {host} cannot be kept for the script's own torch.distributed "
            f"({error.strerror}): name another port with --listen, or none"
        ) from None
    return held


def set_environment(rank: int, size: int, per_machine: int, master: tuple[str, int], own: str) -> None:
    """Sets the variables of one worker, in its process.

    Args:
        rank: of the worker.
        size: how many workers there are.
        per_machine: how many of them each machine has: the first machine has the first ones.
        master: host and port at which rank 0 listens, should the script make a process group.
        own: the host at which others reach this worker.
    """
    machine, local = divmod(rank, per_machine)
    said = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": per_machine,
        "GROUP_RANK": machine,
        "GROUP_WORLD_SIZE": size // per_machine,
        "NODE_RANK": machine,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }
    os.environ.update({name: str(value) for name, value in said.items()})
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of a torchrun around us, whose store is not there
    device = None if is_loopback(own) else _interface_of(own)
    if device is not None:
        # Without it gloo takes the address of the machine's name: on many systems, one that no other reaches.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)


def _interface_of(host: str) -> str | None:
    """The network interface that has an IPv4 address; None where the system names none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == host:
                return name
    return None
