"""How the ranks of one host meet: a Unix socket for each pair, over which each hands out its board.

Each rank listens under its own name, connects to all ranks below it, and waits for those above it. The
sockets stay open: they end with the process that holds them, however it ends, and a sleeping rank is
rung for over them. Messages are kept apart (SOCK_SEQPACKET), since descriptors come with some.
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

from gradstream.collectives.shm.control_block import BOARD_BYTES
from gradstream.errors import ClosedError, ConfigError, DeadlineError, PeerLostError
from gradstream.memory.segments import Segment
from gradstream.transport.socket.unix import (
    address_of,
    check_peer,
    listen,
    recv_descriptors,
    send_descriptors,
)

__all__ = ["MESSAGE_BYTES", "RendezvousMembers", "meet"]

MESSAGE_BYTES = 1 << 16
_PROTOCOL = 1
_RETRY_MS = 5.0  # a rank that does not listen yet


@dataclass(frozen=True, slots=True)
class RendezvousMembers:
    """Who is to meet.

    Args:
        job: job id.
        names: of the nodes, by rank; all are processes of one user on this host.
        rank: this process's.
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
        """Where a rank listens while they meet."""
        return address_of(self.job, f"{self.names[rank]}/{self.purpose}", self.epoch)


def meet(
    party: RendezvousMembers, board: Segment, deadline_s: float, stop: int
) -> dict[int, tuple[socket.socket, Segment]]:
    """Connects this rank to all others: the socket and the board of each, by rank.

    Args:
        board: this rank's, handed out.
        deadline_s: for all of it.
        stop: a descriptor; once it can be read the meeting is given up.

    Raises:
        DeadlineError: names a rank that did not come.
        PeerLostError: a rank came, and ended.
        ConfigError: a rank means other ranks than this one, or the name is taken.
        ClosedError: it was stopped. After any error all sockets and boards are closed.
    """
    meeting = _HostRendezvous(party, board, deadline_s, stop)
    try:
        for rank in range(party.rank):
            meeting.visit(rank)
        meeting.receive_all()
    except BaseException:
        meeting.abandon()
        raise
    finally:
        meeting.listener.close()
    return meeting.met


class _HostRendezvous:
    def __init__(self, party: RendezvousMembers, board: Segment, deadline_s: float, stop: int) -> None:
        self.met: dict[int, tuple[socket.socket, Segment]] = {}
        self._party = party
        self._board = board
        self._deadline_s = deadline_s
        self._ends_at = time.monotonic() + deadline_s
        self._stop = stop
        self._visited: dict[socket.socket, int] = {}
        self._guests: list[socket.socket] = []  # who they are is not known yet
        self.listener = listen(party.address(party.rank), socket.SOCK_SEQPACKET)

    def visit(self, rank: int) -> None:
        """Connects to a rank below, as soon as it listens."""
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(self._party.address(rank))
                check_peer(connection)  # before anything is said to it
                break
            except (ConnectionRefusedError, BlockingIOError):
                connection.close()
                self._wait([], min(_RETRY_MS, self._left_ms(rank)))
            except BaseException:
                connection.close()
                raise
        self._visited[connection] = rank
        self._greet(connection)

    def receive_all(self) -> None:
        """Takes the greetings of all others."""
        while missing := [rank for rank in range(len(self._party.names)) if not self._has_met(rank)]:
            known = [connection for connection, rank in self._visited.items() if rank in missing]
            sources = [self.listener, *self._guests, *known]
            for source in self._wait(sources, self._left_ms(*missing)):
                if source is self.listener:
                    self._accept()
                else:
                    self._take_greeting(source)

    def abandon(self) -> None:
        """Closes everything."""
        for connection in (*self._visited, *self._guests):
            connection.close()
        for connection, segment in self.met.values():
            connection.close()
            segment.close()

    def _has_met(self, rank: int) -> bool:
        return rank == self._party.rank or rank in self.met

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        try:
            check_peer(connection)
            self._greet(connection)
        except (ConfigError, OSError):  # a stranger, or gone again
            connection.close()
        else:
            self._guests.append(connection)

    def _greet(self, connection: socket.socket) -> None:
        party = self._party
        hello = {
            "protocol": _PROTOCOL,
            "job": party.job,
            "epoch": party.epoch,
            "purpose": party.purpose,
            "names": list(party.names),
            "rank": party.rank,
        }
        send_descriptors(connection, json.dumps(hello).encode(), [self._board.fd])

    def _take_greeting(self, connection: socket.socket) -> None:
        try:
            data, descriptors = recv_descriptors(connection, MESSAGE_BYTES, 1)
        except ConnectionError:
            data, descriptors = b"", []
        visited = self._visited.get(connection)
        try:
            hello = _parsed(data)
            rank = self._rank_of(hello, visited) if hello else None
        except BaseException:
            _close_all(descriptors)
            raise
        if rank is None or not descriptors:
            _close_all(descriptors)
            connection.close()
            if visited is not None:
                raise PeerLostError(self._party.names[visited], "ended while the ranks of this host met")
            self._guests.remove(connection)  # a stranger
            return
        self.met[rank] = connection, Segment.attach(descriptors[0], BOARD_BYTES)
        if visited is None:
            self._guests.remove(connection)

    def _rank_of(self, hello: dict[str, Any], visited: int | None) -> int | None:
        """Who says so; None for somebody who means another group."""
        party = self._party
        mine = (_PROTOCOL, party.job, party.epoch, party.purpose)
        if tuple(hello.get(key) for key in ("protocol", "job", "epoch", "purpose")) != mine:
            return None
        if hello.get("names") != list(party.names):
            raise ConfigError(
                f"{party.me} expects the ranks {list(party.names)}, rank {hello.get('rank')} of the same "
                f"group {hello.get('names')}: all ranks must be given the same names, in the same order"
            )
        rank = hello.get("rank")
        expected = range(party.rank + 1, len(party.names)) if visited is None else (visited,)
        if not isinstance(rank, int) or rank not in expected or rank in self.met:
            raise ConfigError(f"{party.me}: a second process came as rank {rank}: each rank is one process")
        return rank

    def _left_ms(self, *missing: int) -> float:
        left_ms = 1e3 * (self._ends_at - time.monotonic())
        if left_ms <= 0:
            names = [self._party.names[rank] for rank in missing]
            raise DeadlineError(
                names[0],
                f"has not come to meet {self._party.me} within {self._deadline_s:g} s (missing: "
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
            raise ClosedError(f"{self._party.me}: the group was closed while its ranks met")
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
