"""`LinkProxy`: carries all connections between the nodes of a run on this machine, and disturbs them like a network.

    worker-0 ──▶ 127.0.0.1:p ──▶ shard-0          one port p for each caller, called node and carrier

A node that runs under `proxied_node` asks the proxy for the address at which it reaches a peer. The faults:

Cut        holds what passes, including new connections and the ends of old ones, until it is over; then it arrives, as
           over TCP. Neither side is told. Systems go on acknowledging bytes, unlike over a cut cable.
SlowLink   delays all bytes
Lose       with its probability, a piece is lost, and its connection breaks at once: the caller does not know whether
           its request arrived
Corrupt    changes one bit of a piece; TLS or a checksum finds it, since nodes act as if their peers were far away
Duplicate  delivers a stream a second time, later, and drops the answers, as if the caller had tried again
Reorder    delays each frame by another time, so that streams overtake one another

Duplicate and Reorder need frames, and so the carrier `tcp`. A piece is a frame there, and up to 64 KiB elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, TypeAlias
from unittest import mock

from typing_extensions import override

from gradstream.run.local import NODE, LocalCluster
from gradstream.transport.carriers import RoutedEndpoint
from gradstream.transport.endpoint import EndpointCore
from gradstream.transport.offers import CarrierOffer, host_and_port
from gradstream.transport.socket.framing import GREETING, PREFIX
from gradstream.wire.frames import CHECKSUM, checksum, decode
from kit.faults import Corrupt, Cut, Duplicate, Flaw, Lose, Reorder, SlowLink

# ---- proxy -------------------------------------------------------------------------------

PIECE_BYTES = 64 << 10
SEALED_BYTES = PREFIX.size + 3 * CHECKSUM.size
"""A prefix with its checksums."""
COPY = 1 << 31
"""Added to the number of a stream in its second delivery."""
LAG_S = 0.05
"""Mean time from a stream to its second delivery, in seconds."""
STEP_S = 1e-6
"""Time between pieces that are due at once, so that they keep their order."""
LinkFault: TypeAlias = Cut | Flaw


class _HangUp(Exception):
    """A piece was lost, and its connection breaks."""


@dataclass(eq=False)
class _Connection:
    """A caller's connection, and the proxy's own to the called node."""

    caller: str
    called: str
    framed: bool
    copied: dict[int, float] = field(default_factory=dict)  # by stream: after how many seconds it comes again
    is_data: bool = False  # whether it is a data socket: no frames follow the greeting
    checked: bool = False  # whether frames after the greeting have checksums


class _Direction:
    """One direction of a connection: delivers pieces when they are due, and those of one stream in their order."""

    def __init__(self, source: str, target: str, writer: asyncio.StreamWriter) -> None:
        self.source = source
        self.target = target
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._due_s: dict[int, float] = {}  # by stream: when its newest piece is due
        self._newest_s = 0.0
        self._num_waiting = 0

    async def deliver(self, stream: int, piece: bytes, delay_s: float) -> bool:
        """Writes a piece, now or later. Returns whether it overtakes an earlier one."""
        if not (delay_s or self._num_waiting):
            self._write(piece)
            await self._writer.drain()
            return False
        due_s = max(self._loop.time() + delay_s, self._due_s.get(stream, 0.0) + STEP_S)
        overtakes, self._newest_s = due_s < self._newest_s, max(self._newest_s, due_s)
        self._due_s[stream] = due_s
        self._num_waiting += 1
        self._loop.call_at(due_s, self._write_late, piece)
        return overtakes

    async def end(self) -> None:
        """Ends this direction after the pieces that are under way."""
        await asyncio.sleep(max(0.0, self._newest_s + STEP_S - self._loop.time()))
        if not self._writer.is_closing():
            self._writer.write_eof()

    def _write_late(self, piece: bytes) -> None:
        self._num_waiting -= 1
        self._write(piece)

    def _write(self, piece: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(piece)


class LinkProxy:
    """The proxy, on its own thread, for as long as its context lasts.

    Args:
        seed: seed of the choice of what is hit.

    Attributes:
        address: where nodes ask for addresses.
        hits: how often each fault had an effect: number of pieces, streams, or new connections.
    """

    def __init__(self, seed: int = 0) -> None:
        self.address = ""
        self.hits = Counter[LinkFault]()
        self._rng = random.Random(seed)
        self._active: dict[LinkFault, None] = {}
        self._ports: dict[tuple[str, ...], asyncio.Task[str]] = {}
        self._servers: list[asyncio.Server] = []
        # asyncio holds a task whose connection is lost only by weak references: it may vanish with its other direction.
        self._serving: set[asyncio.Task[Any] | None] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._changed = asyncio.Event()
        self.address = self._do(self._listen(self._tell))
        return self

    def __exit__(self, *exception: object) -> None:
        self._do(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def begin(self, fault: LinkFault) -> None:
        """Disturbs a link from now on."""
        self._do(self._change(fault, on=True))

    def end(self, fault: LinkFault) -> None:
        """Repairs a link."""
        self._do(self._change(fault, on=False))

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _change(self, fault: LinkFault, *, on: bool) -> None:
        self._active.pop(fault, None)
        if on:
            self._active[fault] = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def _shut(self) -> None:
        for server in self._servers:
            server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # one may have been accepted meanwhile
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- addresses ----------------------------------------------------------------------

    async def _listen(self, serve: Any) -> str:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=512)
        self._servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tells a node the address of a peer: a request has the caller, the peer, the carrier and its own address."""
        key = tuple(map(str, json.loads(await reader.readline())))
        caller, called, carrier, address = key
        if key not in self._ports:  # a task, since two connections may ask for the same
            serve = partial(self._serve, caller, called, carrier == "tcp", address)
            self._ports[key] = asyncio.create_task(self._listen(serve))
        writer.write(json.dumps(await self._ports[key]).encode() + b"\n")
        writer.close()

    # ---- connections --------------------------------------------------------------------

    async def _serve(
        self,
        caller: str,
        called: str,
        framed: bool,
        address: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Carries one connection to its end."""
        host, port = host_and_port(address)
        writers, task = [writer], asyncio.current_task()
        self._serving.add(task)
        try:
            await self._pass_cuts(caller, called)
            await self._pass_cuts(called, caller)
            far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), port)
            writers.append(far_writer)
            connection = _Connection(caller, called, framed)
            there, back = _Direction(caller, called, far_writer), _Direction(called, caller, writer)
            both = self._carry(connection, there, reader), self._carry(connection, back, far_reader)
            await asyncio.gather(*both)
        except (OSError, _HangUp):
            for end in writers:
                end.transport.abort()
        finally:
            self._serving.discard(task)
            for end in writers:
                end.close()

    async def _carry(
        self, connection: _Connection, direction: _Direction, reader: asyncio.StreamReader
    ) -> None:
        """Carries one direction: frame by frame if there are frames, else as it comes."""
        framed, prefix_bytes = connection.framed, PREFIX.size
        try:
            while framed:
                prefix = await reader.readexactly(prefix_bytes)
                stream, _, header_bytes, payload_bytes = PREFIX.unpack_from(prefix)
                rest = await reader.readexactly(header_bytes + payload_bytes)
                await self._pass(connection, direction, stream, prefix, rest)
                if stream == GREETING and _ends_greeting(connection, rest):
                    framed = not connection.is_data
                    prefix_bytes = SEALED_BYTES if connection.checked else PREFIX.size
            while piece := await reader.read(PIECE_BYTES):
                await self._pass(connection, direction, GREETING, b"", piece)
        except asyncio.IncompleteReadError:
            pass
        except OSError:
            await self._pass_cuts(direction.source, direction.target)
            raise
        await self._pass_cuts(direction.source, direction.target)
        await direction.end()

    async def _pass(
        self, connection: _Connection, direction: _Direction, stream: int, prefix: bytes, rest: bytes
    ) -> None:
        """Passes on a piece; for a frame, `prefix` holds its numbers."""
        await self._pass_cuts(direction.source, direction.target)
        if stream >= COPY:
            return  # an answer to a second delivery
        await self._copy(connection, direction, stream, prefix, rest)
        piece, delay_s, reorders = prefix + rest, 0.0, None
        for fault in [
            fault
            for fault in self._active
            if (fault.source, fault.target) == (direction.source, direction.target)
        ]:
            if isinstance(fault, SlowLink):
                delay_s += fault.amount
                self.hits[fault] += 1
            elif isinstance(fault, Reorder):
                delay_s += self._rng.uniform(0.0, fault.amount)
                reorders = fault
            elif isinstance(fault, Lose | Corrupt) and self._rng.random() < fault.amount:
                self.hits[fault] += 1
                if isinstance(fault, Lose):
                    raise _HangUp
                at = self._rng.randrange(len(piece))
                piece = piece[:at] + bytes([piece[at] ^ 1 << self._rng.randrange(8)]) + piece[at + 1 :]
        if await direction.deliver(stream, piece, delay_s) and reorders is not None:
            self.hits[reorders] += 1

    async def _copy(
        self, connection: _Connection, direction: _Direction, stream: int, prefix: bytes, rest: bytes
    ) -> None:
        """Delivers a frame of a caller again, later, where its stream is drawn to come twice."""
        if not prefix or direction.source != connection.caller or stream == GREETING:
            return
        is_first = PREFIX.unpack_from(prefix)[1] == 0
        for fault in [fault for fault in self._active if isinstance(fault, Duplicate) and is_first]:
            ends = fault.source, fault.target
            if ends == (direction.source, direction.target) and self._rng.random() < fault.amount:
                connection.copied[stream] = self._rng.expovariate(1 / LAG_S)
                self.hits[fault] += 1
        if stream in connection.copied:
            again = _numbered(prefix, stream + COPY) + rest
            await direction.deliver(stream + COPY, again, connection.copied[stream] + STEP_S)

    async def _pass_cuts(self, source: str, target: str) -> None:
        """Returns once no cut holds traffic from one node to another."""
        while cuts := [cut for cut in self._active if isinstance(cut, Cut) and _cuts(cut, source, target)]:
            self.hits.update(cuts)
            await self._changed.wait()


def _cuts(cut: Cut, source: str, target: str) -> bool:
    directions = [(cut.source, cut.target), (cut.target, cut.source)][: 1 + cut.both]
    return any(start in ("*", source) and other in ("*", target) for start, other in directions)


def _ends_greeting(connection: _Connection, frame_bytes: bytes) -> bool:
    """Whether this frame ends the greeting in its direction; notes what the caller says of the connection."""
    frame, _ = decode(frame_bytes)
    if frame.HasField("greeting"):
        connection.is_data, connection.checked = bool(frame.greeting.line), frame.greeting.checked
    return frame.HasField("greeting") or frame.HasField("proven")


def _numbered(prefix: bytes, stream: int) -> bytes:
    """The prefix of a frame with the number of another stream."""
    made = PREFIX.pack(stream, *PREFIX.unpack_from(prefix)[1:])
    if len(prefix) > PREFIX.size:
        made += prefix[PREFIX.size : -CHECKSUM.size]
        made += CHECKSUM.pack(checksum(made))
    return made


# ---- proxied node ------------------------------------------------------------------------
# Nodes that reach one another through a `LinkProxy`, and the cluster that starts them.

ANSWER_S = 10.0


class ProxiedCluster(LocalCluster):
    """The processes of a run, whose connections go through a proxy.

    Args:
        proxy: a running proxy; None for none.
        logs, environment, shards: see `LocalCluster`.
    """

    def __init__(
        self, proxy: LinkProxy | None, logs: Path, environment: Mapping[str, str], *, shards: bool
    ) -> None:
        self._proxy = proxy
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, PYTHONPATH=path):  # nodes find `main` below
            super().__init__(logs, environment, shards=shards)

    @override
    def start(self, name: str, argv: Sequence[str], *, main: str = NODE) -> None:
        if self._proxy is not None:
            argv, main = [self._proxy.address, main, *argv], f"{__name__}:main"
        super().start(name, argv, main=main)


def main(argv: list[str]) -> int:
    """Runs a node; first come the proxy's address and the node's own main function."""
    via, place, *rest = argv
    know = RoutedEndpoint.know

    def know_proxied(self: RoutedEndpoint, peer: str, address: str) -> None:
        offer = CarrierOffer.parse(address)
        addresses = {
            name: _ask(via, self.identity.name, peer, name, address)
            for name, address in offer.addresses.items()
        }
        know(self, peer, str(CarrierOffer(addresses)))

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
