"""Carries packets between two ends of a link, late and with losses: for kernels without `netem`.

    machine ──eth0── near │ relay │ far ── port ── bridge

    python tests/kit/link_relay.py '{"links": [["near0", "far0"]], "delay_s": 0.025, "loss": 0.01}'

runs in the network namespace of all these devices. It writes "ready", and at SIGTERM how many packets it has carried
and dropped. Packets of one direction keep their order. What the kernel has not cut into segments yet stays whole: the
relay takes up to 64 kB at once, and passes on where they are to be cut.
"""

from __future__ import annotations

import heapq
import json
import random
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import cast

from gradstream.errors import ConfigError

ALL_PROTOCOLS = 3
# Of Linux; Python has no names for them.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_RCVBUFFORCE = 263, 15, 23, 33
MOST_BYTES = 1 << 17
ROOM_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """What a relay does.

    Args:
        links: (near, far) device of each.
        delay_s: seconds for which each packet is held, in each direction, at least 0.
        loss: probability with which a packet from near to far is dropped, in [0, 1).
        seed: of the drops.

    Raises:
        ConfigError: a value is out of its range.
    """

    links: list[list[str]]
    delay_s: float = 0.0
    loss: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0.0 <= self.delay_s < 60.0 and 0.0 <= self.loss < 1.0):
            raise ConfigError(
                f"a link with a delay of {self.delay_s} s and a loss of {self.loss}: expected 0 s or more, below a "
                "minute, and a probability of 0 or more, below 1"
            )


@dataclass(order=True, slots=True)
class _Held:
    due_s: float
    number: int  # equal times keep their order
    data: bytes = field(compare=False)
    out: socket.socket = field(compare=False)


class LinkRelay:
    """The relay.

    Args:
        settings: what it does.

    Attributes:
        num_carried, num_lost: packets that were passed on, and dropped.

    Raises:
        OSError: there is no such device, or this process is not root.
    """

    def __init__(self, settings: RelaySettings) -> None:
        self.num_carried = self.num_lost = 0
        self._settings = settings
        self._chance = random.Random(settings.seed)
        self._held: list[_Held] = []
        self._ends = selectors.DefaultSelector()
        for link in settings.links:
            near, far = map(_opened, link)
            self._ends.register(near, selectors.EVENT_READ, (far, settings.loss))
            self._ends.register(far, selectors.EVENT_READ, (near, 0.0))

    def run(self) -> None:
        """Relays for ever."""
        held = self._held
        while True:
            wait_s = max(0.0, held[0].due_s - time.monotonic()) if held else None
            for key, _ in self._ends.select(wait_s):
                self._take_in(cast(socket.socket, key.fileobj), *key.data)
            now_s = time.monotonic()
            while held and held[0].due_s <= now_s:
                packet = heapq.heappop(held)
                _send(packet.out, packet.data)

    def _take_in(self, packets: socket.socket, out: socket.socket, loss: float) -> None:
        due_s = time.monotonic() + self._settings.delay_s
        for data in _all_from(packets):
            if loss and self._chance.random() < loss:
                self.num_lost += 1
            else:
                self.num_carried += 1
                heapq.heappush(self._held, _Held(due_s, self.num_carried, data, out))


def _opened(device: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM_BYTES)
    opened.setblocking(False)
    opened.bind((device, ALL_PROTOCOLS))
    return opened


def _all_from(packets: socket.socket) -> list[bytes]:
    found = list[bytes]()
    while len(found) < 64:
        try:
            found.append(packets.recv(MOST_BYTES))
        except BlockingIOError:
            break
    return found


def _send(out: socket.socket, data: bytes) -> None:
    try:
        out.send(data)
    except OSError:
        pass  # its queue is full, as a router's may be, or the device is going down: a loss


def main() -> None:
    """Runs a relay, by the settings in JSON on the command line, until SIGTERM."""
    relay = LinkRelay(RelaySettings(**json.loads(sys.argv[1])))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print("ready", flush=True)
    try:
        relay.run()
    finally:
        print(json.dumps({"carried": relay.num_carried, "lost": relay.num_lost}))


if __name__ == "__main__":
    main()
