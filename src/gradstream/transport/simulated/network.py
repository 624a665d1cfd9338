"""The virtual network: cards that share their bandwidth, and links that delay, lose and duplicate frames.

A frame of n bytes from a to b passes three stages::

    a's sending card        n / bandwidth(a)            one frame at a time
    the link                latency + U(0, jitter)      any number of frames at once
    b's receiving card      n / bandwidth(b)            one frame at a time

Cards are cut-through: the receiving card takes in a frame while it still arrives, so a lone frame needs
latency + n / bandwidth in all, and p senders of n bytes to one receiver need p·n / bandwidth. A card takes
CONTROL frames before BULK frames, serves the streams of each priority in turn, frame by frame, and does not
interrupt a frame. Nodes of one machine share its cards, and use none for frames to each other.

A `StreamQueue` is one direction of one stream and keeps the order of its frames at every stage. A queue that
has lost a frame (`Link.loss`, a partition) is silent from there on, and neither side is told.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gradstream.runtime.simulation import Link, Network, Partition
from gradstream.runtime.virtual import Clock, VirtualCluster
from gradstream.transport.base import Priority

_FLAWS = {"loss": "loss", "corrupt": "corrupt", "duplicate": "duplicates"}
"""The flaws of a `Link` that have a probability, with the random streams that draw them."""


@dataclass(slots=True)
class Packet:
    """A frame in the network.

    Args:
        size_bytes: length of payload and header.
        deliver: called on arrival.
        droppable: whether a cancel removes the frame while it waits for its card.
    """

    size_bytes: int
    deliver: Callable[[], None]
    droppable: bool = False
    tail_ns: int = 0  # when its last byte reaches the receiving card


class _Card:
    """One direction of a machine's network card: it serves the packets of each stream queue in order.

    Args:
        bandwidth_bytes_s: bytes per second; math.inf for memory.
        done: called when a frame was served.
        begun: called when the service of a frame begins, with the time of its end in ns.
    """

    def __init__(
        self,
        clock: Clock,
        bandwidth_bytes_s: float,
        done: Callable[[StreamQueue, Packet], None],
        begun: Callable[[StreamQueue, Packet, int], None] | None = None,
    ) -> None:
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self._clock = clock
        self._done, self._begun = done, begun
        self._turns: dict[Priority, deque[StreamQueue]] = {priority: deque() for priority in Priority}
        self._queues: dict[StreamQueue, deque[Packet]] = {}
        self._busy = False

    def service_ns(self, size_bytes: int) -> int:
        """Time in which a frame occupies the card."""
        return math.ceil(size_bytes / self.bandwidth_bytes_s * 1e9)

    def put(self, stream_queue: StreamQueue, packet: Packet) -> None:
        """Queues a frame behind the others of its stream queue."""
        queue = self._queues.get(stream_queue)
        if queue is None:
            queue = self._queues[stream_queue] = deque()
            self._turns[stream_queue.priority].append(stream_queue)
        queue.append(packet)
        if not self._busy:
            self._serve_next()

    def drop(self, stream_queue: StreamQueue, *, everything: bool) -> None:
        """Removes the waiting frames of a stream queue: all, or the droppable ones."""
        queue = self._queues.get(stream_queue)
        if queue is not None:
            kept = [] if everything else [packet for packet in queue if not packet.droppable]
            queue.clear()
            queue.extend(kept)

    def _serve_next(self) -> None:
        for turns in self._turns.values():  # CONTROL first
            while turns:
                stream_queue = turns.popleft()
                queue = self._queues[stream_queue]
                packet = queue.popleft() if queue else None
                if queue:
                    turns.append(stream_queue)
                else:
                    del self._queues[stream_queue]
                if packet is not None:
                    self._serve(stream_queue, packet)
                    return

    def _serve(self, stream_queue: StreamQueue, packet: Packet) -> None:
        self._busy = True
        end_ns = max(self._clock.now_ns + self.service_ns(packet.size_bytes), packet.tail_ns)
        if self._begun is not None:
            self._begun(stream_queue, packet, end_ns)

        def served() -> None:
            self._busy = False
            self._done(stream_queue, packet)
            if not self._busy:
                self._serve_next()

        self._clock.call_at(end_ns, served)


class StreamQueue:
    """One direction of one stream: frames in order from `source` to `target`."""

    def __init__(self, network: VirtualNetwork, source: str, target: str, priority: Priority) -> None:
        self.source = source
        self.target = target
        self.priority = priority
        self.header_bytes = network.config.header_bytes
        self._network = network
        self.link = network.config.link_between(source, target)
        network.struck.add(("latency_s", source, target))
        self._flying: deque[Packet] = deque()
        self._landed_ns = 0  # when the last of them reaches the receiving card
        self._silent = False
        self._shut = False
        self._sending, self._receiving = network.cards(source, target)

    def send(self, packet: Packet) -> None:
        """Queues a frame at the sending card."""
        if not (self._silent or self._shut):
            self._sending.put(self, packet)

    def drop(self) -> None:
        """Removes droppable frames that have not begun to leave."""
        self._sending.drop(self, everything=False)

    def halt(self) -> None:
        """Removes all frames that have not begun to leave: the source is gone."""
        self._sending.drop(self, everything=True)

    def shut(self) -> None:
        """Ends the queue: frames in the network are lost."""
        self._shut = True
        self._sending.drop(self, everything=True)
        self._receiving.drop(self, everything=True)
        self._flying.clear()

    def leaving(self, packet: Packet, end_ns: int) -> None:
        """Sends a frame over the link, or loses it. Its first byte leaves now, its last byte at `end_ns`."""
        if self._silent or self._shut:
            return
        network, clock, link = self._network, self._network.clock, self.link
        ends = self.source, self.target
        if network.cut(*ends) or network.drawn("loss", link, *ends):
            self._silent = True
            self._sending.drop(self, everything=True)
            return
        delay_ns = network.delay_ns(link)
        packet.tail_ns = end_ns + delay_ns
        # The receiving card can work on it at full speed from here on.
        full_ns = packet.tail_ns - self._receiving.service_ns(packet.size_bytes)
        self._landed_ns = max(self._landed_ns, clock.now_ns + delay_ns, full_ns)
        if link.jitter_s:
            network.note_order(*ends, self._landed_ns)
        self._flying.append(packet)
        clock.call_at(self._landed_ns, self._land)

    def _land(self) -> None:
        # Landings at the same instant fire in a random order; any of them may deliver the head.
        if self._flying:
            self._receiving.put(self, self._flying.popleft())

    def arrive(self, packet: Packet) -> None:
        """Delivers a frame that the receiving card has received whole, to a node that reads."""
        self._network.hand(self.target, partial(self._deliver, packet))

    def _deliver(self, packet: Packet) -> None:
        if not self._shut:
            packet.deliver()


class VirtualNetwork:
    """All cards and links of a cluster.

    Args:
        cluster: supplies clock, network configuration, and random numbers ("network/...").

    Attributes:
        struck: what has gone wrong: partitions that lost something, and each flaw of a link that showed
            (its name, source, target). "jitter_s" shows when a frame overtakes another, "latency_s" when
            there was a stream.
        hand: delivers something to a node when it reads.
    """

    def __init__(self, cluster: VirtualCluster) -> None:
        self.clock = cluster.clock
        self.config: Network = cluster.config.network
        self.sent_bytes: dict[str, int] = {}  # by node: bytes that have left its card
        self.struck: set[Partition | tuple[str, str, str]] = set()
        self.hand = cluster.hand
        self._draws = {flaw: cluster.random(f"network/{name}") for flaw, name in _FLAWS.items()}
        self._jitter = cluster.random("network/jitter")
        self._newest_ns: dict[tuple[str, str], int] = {}  # by link: the latest landing of any frame
        self._cards: dict[str, tuple[_Card, _Card]] = {}

    def cards(self, source: str, target: str) -> tuple[_Card, _Card]:
        """The sending card of one node and the receiving card of another."""
        if self.config.on_one_machine(source, target):
            return self._made(math.inf)  # memory
        return self._of(source)[0], self._of(target)[1]

    def _of(self, node: str) -> tuple[_Card, _Card]:
        """The cards of a node's machine, (sending, receiving)."""
        machine = self.config.machine(node)
        if machine not in self._cards:
            self._cards[machine] = self._made(self.config.card_bytes_s(machine))
        return self._cards[machine]

    def _made(self, bandwidth_bytes_s: float) -> tuple[_Card, _Card]:
        sending = _Card(self.clock, bandwidth_bytes_s, self._left, StreamQueue.leaving)
        return sending, _Card(self.clock, bandwidth_bytes_s, StreamQueue.arrive)

    def _left(self, stream_queue: StreamQueue, packet: Packet) -> None:
        self.sent_bytes[stream_queue.source] = self.sent_bytes.get(stream_queue.source, 0) + packet.size_bytes

    def cut(self, source: str, target: str) -> bool:
        """Whether a partition currently loses what passes from one node to another."""
        cuts = self.config.partitions and self.config.cuts(source, target, self.clock.now_ns / 1e9)
        self.struck.update(cuts)
        return bool(cuts)

    def drawn(self, flaw: str, link: Link, source: str, target: str) -> bool:
        """Draws whether a frame or a stream is hit by a flaw of its link: "loss", "corrupt" or "duplicate"."""
        probability: float = getattr(link, flaw)
        hit = probability > 0 and self._draws[flaw].random() < probability
        if hit:
            self.struck.add((flaw, source, target))
        return hit

    def note_order(self, source: str, target: str, landed_ns: int) -> None:
        """Notes when a frame will land: if that is before an earlier frame, it has overtaken it."""
        newest_ns = self._newest_ns.get((source, target), 0)
        self._newest_ns[source, target] = max(newest_ns, landed_ns)
        if landed_ns < newest_ns:
            self.struck.add(("jitter_s", source, target))

    def delay_ns(self, link: Link) -> int:
        """Draws a frame's time on the link."""
        jitter_s = self._jitter.uniform(0, link.jitter_s) if link.jitter_s > 0 else 0.0
        return round((link.latency_s + jitter_s) * 1e9)

    def duplicate(self, source: str, target: str) -> random.Random | None:
        """Draws whether a stream is delivered twice; if so, returns the generator of the duplicate's delays."""
        if not self.drawn("duplicate", self.config.link_between(source, target), source, target):
            return None
        return random.Random(self._draws["duplicate"].random())
