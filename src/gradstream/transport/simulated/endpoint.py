"""The simulated carrier: endpoints of one process on a virtual network, in virtual time.

Streams behave as over every carrier; `network.VirtualNetwork` decides when a frame arrives. A payload is
copied when it is sent, so that the sender may write its memory again; a shape-only payload (torch's meta
device) has nothing to copy and costs the same bytes.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from typing_extensions import override

from gradstream.errors import ConfigError
from gradstream.runtime.base import Runtime
from gradstream.runtime.virtual import VirtualCluster
from gradstream.transport.base import Identity, NullCarrier, Priority
from gradstream.transport.endpoint import WINDOW, EndpointCore
from gradstream.transport.simulated.network import Packet, StreamQueue, VirtualNetwork
from gradstream.transport.stream import StreamCore
from gradstream.wire import v1
from gradstream.wire.frames import ABSENT, FrameError, check_chunk, from_wire

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
