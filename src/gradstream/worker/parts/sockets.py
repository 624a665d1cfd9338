"""Values of the model between the parts of one machine, over sockets, without an event loop.

    thread of passes ── header, bytes ──▶ socket ──▶ reader of the other part ──▶ its thread of passes

A pass whose input is there begins as soon as the one before it has ended. Over an event loop each pass would wait for
two changes of thread, and each value for two more. A reader is a thread that takes in all that comes, so a part that
sends does not wait for one that computes.

Everything else that parts tell each other, heartbeats too, stays with `PartChannel`. A lost part breaks its
sockets. A part that gives up a gradient shuts its own down, which ends what its thread waits for.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from gradstream.errors import InternalError, PeerLostError
from gradstream.runtime.base import Runtime
from gradstream.runtime.real import RealRuntime
from gradstream.transport.base import Endpoint, PeerSocket

_HEADER = struct.Struct("<QQ")
"""Tag of a tensor, and its bytes."""

_ROOM_BYTES = 4 << 20
"""The system is asked to hold so much of what a part sends. It may grant less."""


class PartSockets:
    """The sockets of one part to all other parts of its replica. It has none before `connect`.

    Args:
        runtime, endpoint: of the process.
        names: node names of the replica's processes, by part.
        part: this part.
        room: number of bytes of the largest tensor that may come under a tag. A part that announces more breaks its
            socket before memory is taken.

    Attributes:
        awaited: (part, text) of the tensor for which the thread of passes waits; None if for none.
    """

    def __init__(
        self, runtime: Runtime, endpoint: Endpoint, names: list[str], part: int, room: Callable[[int], int]
    ) -> None:
        self.awaited: tuple[int, str] | None = None
        self._runtime = runtime
        self._endpoint = endpoint
        self._names = names
        self._part = part
        self._room = room
        self._connected: bool | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._writers: dict[int, _Writer] = {}
        self._arrived: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None

    async def connect(self, agree: Callable[[bool], Awaitable[bool]]) -> bool:
        """Connects the parts, at the first call. All parts call it, and wait for one another before one dials.

        Args:
            agree: whether all parts say yes, the same in all of them.

        Returns:
            Whether there are sockets: all parts are on one machine, each with a thread of its own.
        """
        if not isinstance(self._runtime, RealRuntime):
            return False
        if self._connected is None:
            others = [part for part in range(len(self._names)) if part != self._part]
            await agree(True)  # all are here: whoever does not answer a dial now has no socket
            found = await self._runtime.gather(*map(self._dial, others))
            # Off this machine a socket has checksums, or TLS.
            near = [
                one.socket
                for one in found
                if one and not one.checked and isinstance(one.socket, socket.socket)
            ]
            mine = not self._runtime.shares_thread and len(near) == len(others)
            self._connected = await agree(mine)
            if self._connected:
                self._sockets = dict(zip(others, near, strict=True))
                self._start()
            else:
                for one in filter(None, found):
                    one.socket.close()
        return self._connected

    async def _dial(self, other: int) -> PeerSocket | None:
        dials, name = self._part < other, self._names[other]
        return await self._endpoint.data_socket(name, "parts", dial=dials, copies=True)

    def _start(self) -> None:
        for part, one in self._sockets.items():
            one.setblocking(True)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
            self._writers[part] = _Writer(one)
            name = f"{self._names[self._part]}-from-{part}"
            threading.Thread(target=self._read_all, args=(part,), name=name, daemon=True).start()

    # ---- for the thread of passes ---------------------------------------------------------

    def send(self, part: int, tag: int, flat: torch.Tensor) -> None:
        """Sends a tensor, which must not change any more. What the system does not take at once leaves later.

        Args:
            part: the part that receives it.
            tag: of the tensor.
            flat: (elems,) contiguous.

        Raises:
            PeerLostError: a part was lost, or the sockets are shut down.
        """
        if self._failure is not None:
            raise self._failure
        data = memoryview(flat.numpy()).cast("B")  # type: ignore[arg-type]  # numpy's stubs lack Buffer
        try:
            self._writers[part].send(_HEADER.pack(tag, flat.nbytes), data)
        except OSError as error:
            raise self._broken(part, error.strerror or str(error)) from error

    def receive(self, part: int, tag: int, size_bytes: int, what: str) -> torch.Tensor:
        """The bytes of the next tensor of this tag from a part. Waits for it in the calling thread.

        Args:
            size_bytes: number of bytes that it must have.
            what: the tensor, for messages.

        Raises:
            PeerLostError: a part was lost or sends something else, or the sockets are shut down.
        """
        key = part, tag
        with self._changed:
            self.awaited = part, what
            self._changed.wait_for(lambda: key in self._arrived or self._failure is not None)
            self.awaited = None
            if key not in self._arrived:
                assert self._failure is not None
                raise self._failure
            came = self._take(key)
        if len(came) != size_bytes:
            raise self._broken(part, f"{len(came)} bytes came for {what}, expected {size_bytes}")
        return came

    def _take(self, key: tuple[int, int]) -> torch.Tensor:
        arrived = self._arrived[key]
        tensor = arrived.popleft()
        if not arrived:
            del self._arrived[key]
        return tensor

    # ---- readers --------------------------------------------------------------------------

    def _read_all(self, part: int) -> None:
        with self._sockets[part] as connected:
            try:
                for tag, tensor in _tensors(connected, self._room):
                    with self._changed:
                        self._arrived.setdefault((part, tag), deque()).append(tensor)
                        self._changed.notify()
                text = "the connection was closed"
            except Exception as error:  # whatever it is, nobody else would end the wait
                text = str(error)
            self.fail(self._broken(part, text))

    def _broken(self, part: int, text: str) -> PeerLostError:
        return PeerLostError(self._names[part], f"its socket to {self._names[self._part]} broke: {text}")

    # ---- the end --------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Nothing is sent any more, and the thread of passes gets this error where it would have to wait."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()

    def close(self) -> None:
        """Ends what the thread of passes waits for, here and in the other parts. Idempotent."""
        for one in self._sockets.values():
            with suppress(OSError):  # the other end was faster
                one.shutdown(socket.SHUT_RDWR)
        for writer in self._writers.values():
            writer.close()


class _Writer:
    """Sends to one part: at once as far as the system takes it, and the rest in a thread, which may wait."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="to-part")
        self._waiting = deque[memoryview]()
        self._failure: OSError | None = None

    def send(self, *pieces: bytes | memoryview) -> None:
        """Sends the pieces after those before. Raises OSError if those, or these, cannot be sent."""
        if self._failure is not None:
            raise self._failure
        sent = 0
        if not self._waiting:
            with suppress(BlockingIOError):
                sent = self._socket.sendmsg(pieces, [], socket.MSG_DONTWAIT)
        for piece in pieces:
            if sent < len(piece):
                self._waiting.append(memoryview(piece)[sent:])
                self._thread.submit(self._send_next)
            sent = max(0, sent - len(piece))

    def _send_next(self) -> None:
        try:
            self._socket.sendall(self._waiting[0])
        except OSError as error:
            self._failure = error
        self._waiting.popleft()  # last: until now, others may not overtake it

    def close(self) -> None:
        """Waits for nothing."""
        self._thread.shutdown(wait=False)


def _tensors(connected: socket.socket, room: Callable[[int], int]) -> Iterator[tuple[int, torch.Tensor]]:
    """(tag, bytes) of each tensor that comes, until the other end is closed.

    Raises:
        OSError: the connection breaks.
        InternalError: a tensor is announced that is too large for its tag.
    """
    head = bytearray(_HEADER.size)
    while _fill(connected, memoryview(head)):
        tag, size_bytes = _HEADER.unpack(head)
        if size_bytes > (most_bytes := room(tag)):
            raise InternalError(
                f"it announces {size_bytes} bytes under tag {tag}, expected at most {most_bytes}"
            )
        tensor = torch.empty(size_bytes, dtype=torch.uint8)
        if size_bytes and not _fill(connected, memoryview(tensor.numpy())):  # type: ignore[arg-type]
            return
        yield tag, tensor


def _fill(connected: socket.socket, into: memoryview) -> bool:
    """Reads until `into` is full; False if the other end is closed before."""
    while into:
        came = connected.recv_into(into, 0, socket.MSG_WAITALL)
        if not came:
            return False
        into = into[came:]
    return True
