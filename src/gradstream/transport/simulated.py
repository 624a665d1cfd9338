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

import torch
from typing_extensions import override

from gradstream.errors import ConfigError
from gradstream.runtime.base import Runtime
from gradstream.runtime.simulation import Link, Network, Partition
from gradstream.runtime.virtual import Clock, VirtualCluster
from gradstream.transport.base import Identity, NullCarrier, Priority
from gradstream.transport.endpoint import WINDOW, EndpointCore
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import ABSENT, FrameError, check_chunk, from_wire

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


# ---- endpoint ----------------------------------------------------------------------------
# The simulated carrier: endpoints of one process on a virtual network, in virtual time.
#
# Streams behave as over every carrier; `network.VirtualNetwork` decides when a frame arrives. A payload is
# copied when it is sent, so that the sender may write its memory again; a shape-only payload (torch's meta
# device) has nothing to copy and costs the same bytes.

KIBIBYTE = 1024
SMALL_BYTES = 64
"""The network counts messages up to a KiB as this size, and larger ones as whole KiB."""

_LAG = 20  # mean delay of a duplicate, in delays of the link


class MemoryNetwork(VirtualNetwork):
    """The virtual network and the endpoints on it.

    Args:
        cluster: supplies clock, network configuration and random numbers.

    Attributes:
        endpoints: by address.
    """

    def __init__(self, cluster: VirtualCluster) -> None:
        super().__init__(cluster)
        self.endpoints: dict[str, MemoryEndpoint] = {}
        self._pipes: dict[_Pipe, None] = {}

    def attach(self, endpoint: MemoryEndpoint) -> None:
        """Puts an endpoint on the network, under its address.

        Raises:
            ConfigError: another endpoint has the address.
        """
        if endpoint.address in self.endpoints:
            raise ConfigError(f"{endpoint.address} is in use: stop the node that has it first")
        self.endpoints[endpoint.address] = endpoint

    def detach(self, endpoint: MemoryEndpoint) -> None:
        """Takes an endpoint off the network; connecting to its address fails from now on."""
        if self.endpoints.get(endpoint.address) is endpoint:
            del self.endpoints[endpoint.address]

    def kill(self, node: str) -> None:
        """Ends a node as if its process had died: it sends nothing more, and its peers notice one latency later.

        The caller cancels the tasks of the node afterwards, with `VirtualRuntime.kill`.
        """
        for endpoint in [e for e in self.endpoints.values() if e.identity.name == node]:
            endpoint.die()
        for pipe in [p for p in self._pipes if node in (p.caller, p.called)]:
            pipe.lose(node)

    def disconnect_from(self, node: str, peer: str) -> None:
        """Breaks the streams that `node` has opened to `peer`."""
        for pipe in [p for p in self._pipes if (p.caller, p.called) == (node, peer)]:
            stream = pipe.near.stream
            pipe.lose(node)
            if stream is not None:
                stream.broken("its address has changed")

    def connect(self, pipe: _Pipe) -> None:
        """Adds a stream."""
        self._pipes[pipe] = None

    def disconnect(self, pipe: _Pipe) -> None:
        """Removes a stream that is over at both ends."""
        self._pipes.pop(pipe, None)


class _End:
    """The carrier of one side of a stream."""

    def __init__(self, out: StreamQueue) -> None:
        self.stream: StreamCore | None = None
        self.is_over = False
        self.out = out
        self.far: _End | None = None
        self.pipe: _Pipe | None = None
        self.copy: _Copy | None = None

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """See `OutgoingCarrier.connect`."""
        assert self.pipe is not None
        self.pipe.connect(stream, opened)

    def transmit(self, frame: v1.Frame, payload: torch.Tensor | None) -> None:
        """See `Carrier.transmit`."""
        if self.is_over or self.far is None:
            return
        header = v1.Frame()
        header.CopyFrom(frame)
        taken = None if payload is None else _snapshot(payload)
        size_bytes = self.out.header_bytes + _control_bytes(len(frame.body.data) + len(frame.open.body))
        size_bytes += 0 if taken is None else taken.nbytes
        droppable = frame.HasField("chunk") or frame.HasField("body")
        self.out.send(Packet(size_bytes, partial(self.far.take, header, taken), droppable))

    async def drained(self) -> None:
        """See `Carrier.drained`: credit bounds what waits for the card."""

    def drop(self) -> None:
        """See `Carrier.drop`."""
        self.out.drop()

    def over(self) -> None:
        """See `Carrier.over`."""
        self.is_over = True
        if self.pipe is not None:
            self.pipe.settle()

    def take(self, frame: v1.Frame, payload: torch.Tensor | None) -> None:
        """Takes a frame that has arrived at this side."""
        assert self.pipe is not None and self.far is not None
        if self.pipe.damages(self):
            return
        if self.far.copy is not None:
            self.far.copy.again(frame, payload)
        if frame.HasField("open"):
            self.pipe.answer(frame.open)
        elif self.stream is not None:
            feed(self.stream, frame, payload)

    def broken(self, message: str) -> None:
        """Breaks the stream of this side: the other side is gone."""
        if self.stream is not None:
            self.stream.broken(message)


def _control_bytes(actual: int) -> int:
    """What a message of this size costs: an additional text or field changes no simulated time."""
    return SMALL_BYTES * bool(actual) if actual <= KIBIBYTE else -(-actual // KIBIBYTE) * KIBIBYTE


def _snapshot(payload: torch.Tensor) -> torch.Tensor:
    """A copy, made on this thread alone; a shape-only payload is returned itself."""
    return payload if payload.is_meta else torch.from_numpy(payload.detach().numpy().copy())


def feed(stream: StreamCore, frame: v1.Frame, payload: torch.Tensor | None) -> None:
    """Checks a frame as a receiver of bytes does, and hands it to its stream."""
    if frame.HasField("chunk"):
        chunk = frame.chunk
        try:
            check_chunk(chunk, payload.nbytes if payload is not None else 0)
        except FrameError as error:
            stream.reject(error)
            return
        if payload is None and not chunk.flags & ABSENT:
            payload = torch.empty(0, dtype=from_wire(chunk.dtype))
        if payload is not None and (dtype := from_wire(chunk.dtype)) not in (None, payload.dtype):
            payload = payload.view(dtype)  # as a receiver of bytes would read it
    stream.arrived(frame, payload)


class _Pipe:
    """The two stream queues and two ends of a stream; `near` is the end of the caller."""

    def __init__(self, network: MemoryNetwork, caller: str, called: str, to: str, priority: Priority) -> None:
        self.caller = caller
        self.called = called
        self._network = network
        self._to = to
        self.near = _End(StreamQueue(network, caller, called, priority))
        self.far = _End(StreamQueue(network, called, caller, priority))
        self.near.far, self.far.far = self.far, self.near
        self.near.pipe = self.far.pipe = self

    def connect(self, stream: StreamCore, opened: v1.Open) -> None:
        """Sends the caller's Open."""
        self.near.stream = stream
        self._network.connect(self)
        rng = self._network.duplicate(self.caller, self.called)
        if rng is not None:
            self.near.copy = _Copy(self._network, rng, self.caller, self.called, self._to)
        self.near.transmit(v1.Frame(open=opened), None)

    def answer(self, opened: v1.Open) -> None:
        """Hands the Open to the called endpoint, or tells the caller that nobody listens."""
        endpoint = self._network.endpoints.get(self._to)
        if endpoint is not None:
            self.far.stream = endpoint.incoming(opened, self.far)
            return
        self.far.is_over = True
        self._notice(self.near, self.called, self.caller, f"nobody listens at {self._to}")

    def lose(self, node: str) -> None:
        """Ends one side; the network tells the other side one latency later."""
        gone, left = (self.near, self.far) if node == self.caller else (self.far, self.near)
        gone.is_over = True
        gone.stream = None
        gone.out.halt()
        if gone.copy is not None:
            gone.copy.lose()
        other = self.called if node == self.caller else self.caller
        self._notice(left, node, other, f"the connection to {node} was lost")

    def damages(self, end: _End) -> bool:
        """Draws whether a frame has arrived damaged. If so, this side hangs up: it cannot read on."""
        mine, other = (self.caller, self.called) if end is self.near else (self.called, self.caller)
        assert end.far is not None
        if end.is_over or not self._network.drawn("corrupt", end.far.out.link, other, mine):
            return False
        end.is_over = True
        end.broken(f"{other} has sent what is no frame")
        self._notice(end.far, mine, other, f"{mine} has hung up")
        return True

    def _notice(self, end: _End, source: str, target: str, message: str) -> None:
        network = self._network
        if network.cut(source, target):
            return  # the partition also swallows the notice
        link = network.config.link_between(source, target)

        def notice() -> None:
            self.near.out.shut()
            self.far.out.shut()
            end.broken(message)
            network.disconnect(self)

        ready = partial(network.hand, target, notice)
        network.clock.call_at(network.clock.now_ns + network.delay_ns(link), ready)

    def settle(self) -> None:
        """Removes the pipe once both sides are over."""
        if self.near.is_over and self.far.is_over:
            self._network.disconnect(self)


class _Copy:
    """The second delivery of a stream: its frames arrive again, later, and answers are dropped."""

    def __init__(self, network: MemoryNetwork, rng: random.Random, caller: str, called: str, to: str) -> None:
        self._network = network
        self._rng = rng
        self._ends = caller, called
        self._link = network.config.link_between(caller, called)
        self._to = to
        self._stream: StreamCore | None = None
        self._frames: list[tuple[v1.Frame, torch.Tensor | None]] = []
        mean_s = _LAG * max(1e-6, self._link.latency_s + self._link.jitter_s)
        self._lag_ns = round(rng.expovariate(1 / mean_s) * 1e9)
        self._due_ns = 0

    def again(self, frame: v1.Frame, payload: torch.Tensor | None) -> None:
        """Schedules a second delivery of a frame."""
        clock = self._network.clock
        extra_s = self._link.latency_s + self._rng.uniform(0, self._link.jitter_s)
        self._due_ns = max(self._due_ns, clock.now_ns + self._lag_ns + round(extra_s * 1e9))
        self._frames.append((frame, payload))
        clock.call_at(self._due_ns, partial(self._network.hand, self._ends[1], self._deliver))

    def lose(self) -> None:
        """Breaks the copy after its last frame: the caller is gone."""
        self._network.clock.call_at(self._due_ns, self._break)

    def _break(self) -> None:
        if self._stream is not None:
            self._stream.broken("the connection was lost")

    def _deliver(self) -> None:
        frame, payload = self._frames.pop(0)
        endpoint = self._network.endpoints.get(self._to)
        if endpoint is None:
            return
        if frame.HasField("open"):
            self._stream = endpoint.incoming(frame.open, NullCarrier(), window=1 << 30)
        elif self._stream is not None:
            feed(self._stream, frame, payload)


class MemoryEndpoint(EndpointCore):
    """An endpoint on a virtual network.

    Args:
        identity: identity of the node; its name makes the address.
        network: network that the endpoint joins when it starts.
        window: chunks held for each incoming stream.
    """

    def __init__(
        self, identity: Identity, runtime: Runtime, network: MemoryNetwork, *, window: int = WINDOW
    ) -> None:
        super().__init__(identity, runtime, window=window)
        self._network = network

    @override
    async def start(self) -> None:
        self.address = f"memory:{self.identity.name}"
        self._network.attach(self)

    def die(self) -> None:
        """Takes the endpoint of a killed node off the network, so that its clean-up code reaches no peer."""
        self._closed = True
        self._network.detach(self)

    def _dial(self, peer: str, address: str, priority: Priority) -> _End:
        return _Pipe(self._network, self.identity.name, peer, address, priority).near

    def _disconnect(self, peer: str) -> None:
        self._network.disconnect_from(self.identity.name, peer)

    async def _shut(self, *, abruptly: bool) -> None:
        self._network.detach(self)
        if abruptly:
            self._network.kill(self.identity.name)
