"""Sets the environment of a script: its rank, and the address at which torch.distributed meets.

The variables are those of torchrun, so that the script's own `init_process_group` and libraries work alike.
"""

from __future__ import annotations

import os
import socket

from gradstream.errors import ConfigError
from gradstream.machine.description import interfaces
from gradstream.transport.addresses import is_loopback


def hold_port(host: str, port: int = 0) -> socket.socket:
    """Reserves a port for the process group of a script for as long as the returned socket is open.

    The socket does not listen, so worker 0 can listen there: torch reuses addresses, as servers do.

    Args:
        host: an address of this machine.
        port: the port; 0 takes a free one.

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
            f"port {port} of {host} cannot be reserved for the script's own torch.distributed "
            f"({error.strerror}): name another port with --listen, or give --listen no port"
        ) from None
    return held


def set_environment(rank: int, size: int, per_machine: int, master: tuple[str, int], own: str) -> None:
    """Sets the variables of one worker, in its process.

    Args:
        rank: rank of the worker.
        size: number of workers.
        per_machine: number of workers on each machine; the first machine has the lowest ranks.
        master: host and port at which rank 0 listens where the script makes a process group.
        own: host at which the others reach this worker.
    """
    machine, local = divmod(rank, per_machine)
    values = {
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
    os.environ.update({name: str(value) for name, value in values.items()})
    # A torchrun that has started the launcher sets it, but its store is not at MASTER_ADDR.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    names = [name for name, address in interfaces().items() if address == own and not is_loopback(own)]
    if names:
        # Without it gloo takes the address of the host name, which on many systems no other machine reaches.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
