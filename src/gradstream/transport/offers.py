"""`CarrierOffer`: the carriers by which a node can be reached, and the choice between two nodes.

An offer travels as the node's address: the address of gRPC, which every node has, and after it words such
as `tcp=127.0.0.1:4000`. Both nodes of a pair know both offers and choose alike, without a message.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from gradstream.errors import ConfigError
from gradstream.memory.segments import supported

# ---- offers ------------------------------------------------------------------------------

CarrierName = Literal["shm", "tcp", "grpc"]
CARRIERS: tuple[CarrierName, ...] = get_args(CarrierName)
"""All carriers, the best one first."""

Choice = Literal["auto", "grpc", "tcp", "shm"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
"""The values of a job's `carrier`."""

_HOST = "host"


def shares_memory(carrier: Choice) -> bool:
    """Whether two nodes of one host with this choice exchange through shared memory."""
    return carrier == "shm" or (carrier == "auto" and supported())


@dataclass(frozen=True, slots=True)
class CarrierOffer:
    """The addresses of one node.

    Args:
        addresses: address by carrier.
        host: id that is the same for nodes that can share memory; "" if unknown.
    """

    addresses: Mapping[str, str] = field(default_factory=dict)
    host: str = ""

    def __str__(self) -> str:
        others = {**self.addresses, _HOST: self.host}
        first = others.pop("grpc", "")
        return " ".join([first, *(f"{name}={value}" for name, value in others.items() if value)])

    @classmethod
    def parse(cls, text: str) -> CarrierOffer:
        """Reads the text that `str` makes. Ignores carriers that this side does not know."""
        first, *words = text.split(" ")
        named = dict(word.split("=", 1) for word in words if "=" in word)
        host = named.pop(_HOST, "")
        known = {name: value for name, value in named.items() if name in CARRIERS}
        return cls(({"grpc": first} if first else {}) | known, host)


def choose(mine: CarrierOffer, theirs: CarrierOffer) -> CarrierName:
    """The best carrier that both nodes have: shared memory on one host, then plain TCP, then gRPC.

    A node offers plain TCP only if it may be used, so every carrier that both offer is allowed.

    Raises:
        ConfigError: they have no carrier in common.
    """
    for carrier in CARRIERS:
        near = carrier != "shm" or (mine.host != "" and mine.host == theirs.host)
        if near and carrier in mine.addresses and carrier in theirs.addresses:
            return carrier
    raise ConfigError(
        f"two nodes have no carrier in common: one offers {', '.join(mine.addresses) or 'none'}, the other "
        f"{', '.join(theirs.addresses) or 'none'}; shared memory needs one host: use carrier='auto'"
    )


# ---- addresses ---------------------------------------------------------------------------
# Addresses of the form host:port.


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
