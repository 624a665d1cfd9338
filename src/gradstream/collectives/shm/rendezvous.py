"""How the ranks of one host meet: a Unix socket for each pair, over which each rank sends its control block.

Each rank listens under its own name, connects to all ranks below it, and waits for those above it. The sockets
stay open: they end with the process that holds them, however it ends, and wake sleeping ranks. They keep messages
apart (SOCK_SEQPACKET), since descriptors come with some.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradstream.collectives.shm.control_block import BLOCK_BYTES
from gradstream.errors import ClosedError, ConfigError, DeadlineError, PeerLostError
from gradstream.memory.segments import Segment
from gradstream.transport.socket.unix import (
    address_of,
    check_peer,
    listen,
    recv_descriptors,
    send_descriptors,
)

MESSAGE_BYTES = 1 << 16
_PROTOCOL = 1
_RETRY_MS = 5.0  # before a rank that does not listen yet is called again


@dataclass(frozen=True, slots=True)
class RendezvousMembers:
    """The ranks that are to meet.

    Args:
        job: job id.
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
