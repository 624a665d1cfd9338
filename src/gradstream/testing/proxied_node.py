"""Nodes that reach one another through a `LinkProxy`, and the cluster that starts them."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gradstream.run.local import NODE, LocalCluster
from gradstream.testing.proxy import LinkProxy
from gradstream.transport.addresses import host_and_port
from gradstream.transport.carriers import RoutedEndpoint
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.offers import CarrierOffer

ANSWER_S = 10.0


class ProxiedCluster(LocalCluster):
    """The processes of a run, whose connections go through a proxy.

    Args:
        proxy: a running one; None for none.
        logs, environment, shards: see `LocalCluster`.
    """

    def __init__(
        self, proxy: LinkProxy | None, logs: Path, environment: Mapping[str, str], *, shards: bool
    ) -> None:
        self._proxy = proxy
        super().__init__(logs, environment, shards=shards)

    def start(self, name: str, argv: Sequence[str], *, main: str = NODE) -> None:
        """See `Cluster.start`."""
        if self._proxy is not None:
            argv, main = [self._proxy.address, main, *argv], f"{__name__}:main"
        super().start(name, argv, main=main)


def main(argv: list[str]) -> int:
    """Runs a node; first come the proxy's address and the node's own main function."""
    via, place, *rest = argv
    know = RoutedEndpoint.know

    def know_proxied(self: RoutedEndpoint, peer: str, address: str) -> None:
        offer = CarrierOffer.parse(address)
        ways = {name: _ask(via, self.identity.name, peer, name, one) for name, one in offer.addresses.items()}
        know(self, peer, str(CarrierOffer(ways)))

    EndpointCore.leaves_machine = staticmethod(lambda own, peer: True)  # so that there are checksums
    RoutedEndpoint.know = know_proxied  # type: ignore[method-assign]
    module, _, function = place.partition(":")
    return int(getattr(importlib.import_module(module), function)(rest) or 0)


@cache
def _ask(via: str, *asked: str) -> str:
    """The proxy's address in place of a peer's own; `asked` as `LinkProxy` expects it."""
    with (
        socket.create_connection(host_and_port(via), timeout=ANSWER_S) as proxy,
        proxy.makefile("rw") as lines,
    ):
        lines.write(json.dumps(asked) + "\n")
        lines.flush()
        return str(json.loads(lines.readline()))
