"""How the ranks of one host meet: a Unix socket for each pair, over which each rank sends its control block.

Each rank listens under its own name, connects to all ranks below it, and waits for those above it. The sockets
stay open: they end with the process that holds them, however it ends, and wake sleeping ranks. They keep messages
apart (SOCK_SEQPACKET), since descriptors come with some.
"""

from __future__ import annotations

import enum
import json
import os
import platform
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch

from gradstream.errors import ClosedError, ConfigError, DeadlineError, PeerLostError
from gradstream.memory.segments import Segment, supported
from gradstream.transport.socket.unix import (
    address_of,
    check_peer,
    listen,
    recv_descriptors,
    send_descriptors,
)

# ---- control block -----------------------------------------------------------------------
# The control block: a page of shared memory through which a rank tells the others of its host how far it is.
#
# Only its own rank writes a block. A word has eight bytes, lies in a cache line that no other rank writes, and is
# stored whole. A rank that reads a word also sees everything that was written before it, since x86-64 keeps the order
# of stores. Between storing its own word and loading another's a rank needs a `fence`, since a load may overtake a
# store.

ARRIVED = 0
"""Number of barriers that this rank has arrived at."""
CORE = 1
"""The core of the processor on which it arrived last; machine code writes it."""
ASLEEP = 8
"""Whether it sleeps and has to be woken."""
BEATS = 16
"""Grows while the rank's process lives, however long its arithmetic takes."""
FAILURE = 17
"""Why the group is broken: kind + 8 · (rank of the culprit). 0 while this rank takes the group for whole."""

SLOT_BYTES = 1 << 16
"""Vectors up to this size are copied into the control block. Each rank adds up all of them by itself."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
"""Types of vectors in shared memory; a type's number is its index."""

CALLS_AT = 256
SLOTS_AT = 4096
BLOCK_BYTES = SLOTS_AT + 2 * SLOT_BYTES

_CALL = struct.Struct("7qd")
CALL_BYTES = _CALL.size


def available() -> bool:
    """Whether ranks can share memory here: it takes sealed segments and a processor that keeps stores in order."""
    return supported() and platform.machine() in ("x86_64", "AMD64")


class OperationCode(enum.IntEnum):
    """The collective operations. On a common vector, ranks only wait for each other, and copy nothing."""

    BARRIER = 0
    ALLREDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALL_GATHER_COMMON = 5
    BROADCAST_COMMON = 6


class Call(NamedTuple):
    """What a rank asks for; it lies in its control block before the rank arrives at the first barrier."""

    operation: int
    dtype: int
    elems: int
    root: int = 0
    owner: int = -1
    """The rank that made the vector of its part. -1 if the others need no part, or find it in the slot."""
    item: int = -1
    """Number of that vector among those of its owner."""
    start: int = 0
    """Element at which the part begins."""
    weight: float = 1.0

    @property
    def matter(self) -> tuple[int, int, int, int]:
        """The fields that must be the same at all ranks: operation, dtype, length, root."""
        return self[:4]

    def __str__(self) -> str:
        name = OperationCode(self.operation).name.lower()
        return f"in {name} of {self.elems} elements of {str(DTYPES[self.dtype]).removeprefix('torch.')}"


class ControlBlock:
    """One rank's page: that rank writes it, all read it.

    There are two places for a call and two for a small vector, used in turn. A rank reaches its next call but
    one only when all ranks have arrived at the next one, and so are done with this one.

    Args:
        segment: BLOCK_BYTES of shared memory.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._bytes = segment.bytes
        self.address = segment.tensor(0, 1, torch.uint8).data_ptr()
        self.words: memoryview[int] = self._bytes[:CALLS_AT].cast("Q")

    def write(self, turn: int, call: Call) -> None:
        """Posts a call in place `turn`, 0 or 1."""
        _CALL.pack_into(self._bytes, CALLS_AT + _CALL.size * turn, *call)

    def read(self, turn: int) -> Call:
        """The call that was posted last in this place."""
        return Call._make(_CALL.unpack_from(self._bytes, CALLS_AT + _CALL.size * turn))

    def slot(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements that a small vector of this type can take in this place."""
        return self._segment.tensor(SLOTS_AT + SLOT_BYTES * turn, SLOT_BYTES // dtype.itemsize, dtype)


def fence(lock: Lock) -> None:
    """A full memory fence: other processes see this thread's earlier stores before its later loads.

    Taking a lock is an atomic operation, which is a full fence on x86-64.
    """
    with lock:
        pass


# ---- rendezvous --------------------------------------------------------------------------

MESSAGE_BYTES = 1 << 16
_PROTOCOL = 1
_RETRY_MS = 5.0  # before a rank that does not listen yet is called again


@dataclass(frozen=True, slots=True)
class RendezvousMembers:
    """The ranks that are to meet.

    Args:
        names: names of the nodes, by rank. All are processes of one user on this host.
        rank: rank of this process.
        epoch: membership epoch; another group of the same nodes has another one.
        purpose: tells groups of one epoch apart.
    """

    job: str
    names: Sequence[str]
    rank: int
    epoch: int = 0
    purpose: str = "all"

    @property
    def me(self) -> str:
        """This rank's name."""
        return self.names[self.rank]

    def address(self, rank: int) -> str:
        """Address at which a rank listens while the ranks meet."""
        return address_of(self.job, f"{self.names[rank]}/{self.purpose}", self.epoch)


def meet(
    members: RendezvousMembers, block: Segment, deadline_s: float, stop: int
) -> dict[int, tuple[socket.socket, Segment]]:
    """Connects this rank to all others. Returns the socket to each and its control block, by rank.

    After any error all sockets and segments are closed.

    Args:
        members: the ranks that are to meet.
        block: control block of this rank, sent to the others.
        deadline_s: longest time for the whole rendezvous, in seconds.
        stop: a descriptor. Once it can be read, this rank gives up.

    Raises:
        DeadlineError: names a rank that did not come.
        PeerLostError: a rank came, and ended.
        ConfigError: a rank was given other names than this one, or the name is taken.
        ClosedError: this rank was stopped.
    """
    rendezvous = _HostRendezvous(members, block, deadline_s, stop)
    try:
        for rank in range(members.rank):
            rendezvous.connect(rank)
        rendezvous.receive_all()
    except BaseException:
        rendezvous.abandon()
        raise
    finally:
        rendezvous.listener.close()
    return rendezvous.met


class _HostRendezvous:
    def __init__(self, members: RendezvousMembers, block: Segment, deadline_s: float, stop: int) -> None:
        self.met: dict[int, tuple[socket.socket, Segment]] = {}
        self._members = members
        self._block = block
        self._deadline_s = deadline_s
        self._ends_at = time.monotonic() + deadline_s
        self._stop = stop
        self._connected: dict[socket.socket, int] = {}
        self._pending: list[socket.socket] = []  # connections whose rank is not known yet
        self.listener = listen(members.address(members.rank), socket.SOCK_SEQPACKET)

    def connect(self, rank: int) -> None:
        """Connects to a rank below, as soon as it listens."""
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(self._members.address(rank))
                check_peer(connection)  # before anything is sent
                break
            except (ConnectionRefusedError, BlockingIOError):
                connection.close()
                self._wait([], min(_RETRY_MS, self._left_ms(rank)))
            except BaseException:
                connection.close()
                raise
        self._connected[connection] = rank
        self._greet(connection)

    def receive_all(self) -> None:
        """Takes the greetings of all other ranks."""
        while missing := [rank for rank in range(len(self._members.names)) if not self._has_met(rank)]:
            known = [connection for connection, rank in self._connected.items() if rank in missing]
            sources = [self.listener, *self._pending, *known]
            for source in self._wait(sources, self._left_ms(*missing)):
                if source is self.listener:
                    self._accept()
                else:
                    self._take_greeting(source)

    def abandon(self) -> None:
        """Closes everything."""
        for connection in (*self._connected, *self._pending):
            connection.close()
        for connection, segment in self.met.values():
            connection.close()
            segment.close()

    def _has_met(self, rank: int) -> bool:
        return rank == self._members.rank or rank in self.met

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        try:
            check_peer(connection)
            self._greet(connection)
        except (ConfigError, OSError):  # a process of another user, or one that has ended
            connection.close()
        else:
            self._pending.append(connection)

    def _greet(self, connection: socket.socket) -> None:
        members = self._members
        hello = {
            "protocol": _PROTOCOL,
            "job": members.job,
            "epoch": members.epoch,
            "purpose": members.purpose,
            "names": list(members.names),
            "rank": members.rank,
        }
        send_descriptors(connection, json.dumps(hello).encode(), [self._block.fd])

    def _take_greeting(self, connection: socket.socket) -> None:
        try:
            data, descriptors = recv_descriptors(connection, MESSAGE_BYTES, 1)
        except ConnectionError:
            data, descriptors = b"", []
        connected = self._connected.get(connection)
        try:
            hello = _parsed(data)
            rank = self._rank_of(hello, connected) if hello else None
        except BaseException:
            _close_all(descriptors)
            raise
        if rank is None or not descriptors:
            _close_all(descriptors)
            connection.close()
            if connected is not None:
                raise PeerLostError(self._members.names[connected], "ended while the ranks of this host met")
            self._pending.remove(connection)  # not a member of this group
            return
        self.met[rank] = connection, Segment.attach(descriptors[0], BLOCK_BYTES)
        if connected is None:
            self._pending.remove(connection)

    def _rank_of(self, hello: dict[str, Any], connected: int | None) -> int | None:
        """Rank of the sender of a greeting; None if it belongs to another group."""
        members = self._members
        mine = (_PROTOCOL, members.job, members.epoch, members.purpose)
        if tuple(hello.get(key) for key in ("protocol", "job", "epoch", "purpose")) != mine:
            return None
        if hello.get("names") != list(members.names):
            raise ConfigError(
                f"{members.me} expects the ranks {list(members.names)}, rank {hello.get('rank')} of the same "
                f"group {hello.get('names')}: all ranks must be given the same names, in the same order"
            )
        rank = hello.get("rank")
        expected = range(members.rank + 1, len(members.names)) if connected is None else (connected,)
        if not isinstance(rank, int) or rank not in expected or rank in self.met:
            raise ConfigError(
                f"{members.me}: a process came as rank {rank!r}, expected one of {list(expected)} that has not come "
                "yet: start one process for each rank"
            )
        return rank

    def _left_ms(self, *missing: int) -> float:
        left_ms = 1e3 * (self._ends_at - time.monotonic())
        if left_ms <= 0:
            names = [self._members.names[rank] for rank in missing]
            raise DeadlineError(
                names[0],
                f"has not come to meet {self._members.me} within {self._deadline_s:g} s (missing: "
                f"{', '.join(names)}); look at its log, and see that it is on the same host",
            )
        return left_ms

    def _wait(self, sources: Sequence[socket.socket], timeout_ms: float) -> list[socket.socket]:
        poll = select.poll()
        by_fd = {source.fileno(): source for source in sources}
        for fd in (*by_fd, self._stop):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(timeout_ms)]
        if self._stop in ready:
            raise ClosedError(
                f"{self._members.me} has left its group while it waited for other ranks to come"
            )
        return [by_fd[fd] for fd in ready]


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        hello = json.loads(data)
    except ValueError:
        return {}
    return hello if isinstance(hello, dict) else {}


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
