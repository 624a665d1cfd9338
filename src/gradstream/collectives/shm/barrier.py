"""The barrier between ranks of one host, where a rank also determines which other one is dead, silent or gone.

A rank arrives at the barrier by counting up a word of its control block. It may pass once the words of all others
have got there. It looks for some microseconds, and then sleeps on the sockets to the others until one wakes it,
or a socket ends. The rank that arrives last wakes those that sleep.

To wake takes longer than to look. So a rank looks longer where it can expect others soon: between the two barriers
of an operation, and once any rank has slept, until this rank has slept for long itself. Otherwise two ranks could
sleep in turn without end, each just before the other arrives.

A rank that finds the group broken says so in its control block and wakes all. So every survivor names the same
rank, also if the survivors end one after the other.
"""

from __future__ import annotations

import enum
import errno
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from threading import Lock
from typing import TypeVar

from gradstream.collectives.shm.native import (
    COUNT,
    DONE,
    LOOKS,
    LOOKS_NS,
    NOT_DONE,
    PATIENT,
    SPREAD,
    WAKE,
    State,
    native,
)
from gradstream.collectives.shm.rendezvous import (
    ARRIVED,
    ASLEEP,
    BEATS,
    CORE,
    FAILURE,
    MESSAGE_BYTES,
    ControlBlock,
    fence,
)
from gradstream.errors import ClosedError, DeadlineError, GradstreamError, InternalError, PeerLostError
from gradstream.transport.socket.unix import recv_descriptors

# ---- steps -------------------------------------------------------------------------------
# Operations that can stop where they would have to wait, and continue in another thread.
#
# An operation is a generator. It yields if the other ranks have not arrived within some microseconds; the rest of
# it blocks. So the caller carries it out at once if all ranks arrive at about the same time, and needs a thread only
# if they do not.

T = TypeVar("T")

Steps = Generator[None, None, T]
"""An operation that returns T. After a yield it blocks until others arrive, or a deadline is over."""


def finish(steps: Steps[T]) -> T:
    """Carries out the rest of an operation; blocks this thread if it has to wait."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


# ---- barrier -----------------------------------------------------------------------------

WITH_CORES = 1 << 20, 20_000
"""How often a rank looks for others before it sleeps, and for how many nanoseconds, if each has a core."""
CROWDED = 40, 500_000
"""The same if there are more ranks than cores: each look yields the core, which the others may then use."""
EXPECTED = 1000, 250_000
"""The same for ranks that are expected soon. They may need this core, so each look yields it."""

SPREAD_S = 1e-3
"""Shortest time between two moves to another core."""
SHORT_S = 5e-4
"""A shorter sleep takes longer to wake from than it lasts."""

_NAP_S = 0.5  # between two looks at the beats of awaited ranks
_WAKE = b"\0"
_STALL_S = 0.25  # delay of a wake-up after which this process counts as stopped meanwhile
_RETRY_MS = 5.0  # before a message for which there was no room is sent again


class PeerFailure(enum.IntEnum):
    """Why a group is broken."""

    LOST = 1
    SILENT = 2
    LEFT = 3


class Peer:
    """Another rank, as this one sees it.

    Args:
        rank: its number.
        name: name of its node.
        connection: the socket to it.
        block: its control block.
    """

    def __init__(self, rank: int, name: str, connection: socket.socket, block: ControlBlock) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.name = name
        self.connection = connection
        self.block = block
        self.words = block.words
        self.gone = False
        self.beats = 0  # its word BEATS when it was last read
        self.on_message: Callable[[bytes, list[int]], None] = _unexpected
        self._receiving = Lock()

    def wake(self) -> None:
        """Wakes it. A rank that is gone, or has not read hundreds of wake-ups, needs none."""
        try:
            self.connection.send(_WAKE)
        except OSError:
            pass

    def send(self, message: bytes, descriptors: Sequence[int]) -> bool:
        """Sends a message; returns False if there is no room. Sends nothing to a rank that is gone."""
        try:
            socket.send_fds(self.connection, [message], list(descriptors))
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS)
        return True

    def receive(self) -> None:
        """Takes what it has sent: wake-ups, messages, or the end. May be called on any thread."""
        with self._receiving:
            while not self.gone:
                try:
                    message, descriptors = recv_descriptors(self.connection, MESSAGE_BYTES, 1)
                except BlockingIOError:
                    return
                except OSError:
                    message, descriptors = b"", []
                if not message:
                    self.gone = True
                elif message != _WAKE:
                    self.on_message(message, descriptors)

    def close(self) -> None:
        """Closes the connection."""
        self.gone = True
        self.connection.close()


def _unexpected(message: bytes, descriptors: list[int]) -> None:
    raise InternalError(f"no receiver is set for the message {message!r}")


class HostBarrier:
    """Lets all ranks wait for each other.

    Args:
        names: names of all nodes, by rank.
        peers: all other ranks.
        deadline_s: how long an awaited rank may give no heartbeat, in seconds: neither arrive nor beat.
        stop: a descriptor. Once it can be read, a rank that waits gives up.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        block: ControlBlock,
        peers: Sequence[Peer],
        deadline_s: float,
        stop: int,
    ) -> None:
        self._rank = rank
        self._names = names
        self._words = block.words
        self._peers = peers
        blocks = {peer.rank: peer.block.address for peer in peers} | {rank: block.address}
        cores = len(os.sched_getaffinity(0))
        crowded = len(names) > cores
        looks = CROWDED if crowded else WITH_CORES
        share = -(-len(names) // cores)
        self._expected = EXPECTED[0], EXPECTED[1] * share
        self.state = State(rank, [blocks[rank] for rank in range(len(names))], looks, crowded, share)
        self._native = native()
        self._deadline_s = deadline_s
        self._looked_at = 0.0
        self._spread_at = 0.0
        self._stop = stop
        self._lock = Lock()
        self._poll = select.poll()
        self._poll.register(stop, select.POLLIN)
        self._by_fd = {peer.connection.fileno(): peer for peer in peers}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def wait(self, doing: object, *, soon: bool = False) -> Steps[None]:
        """Arrives at the barrier; done once all other ranks have arrived.

        Args:
            doing: what this rank waits for or in, for messages.
            soon: the others do at this moment what this rank has done.

        Raises:
            PeerLostError, DeadlineError: names the rank that is dead or silent; the same at all ranks.
            ClosedError: this rank was closed meanwhile.
        """
        status = self._arrive() if self._native is None else self._native.arrive(self.state.address)
        if status != DONE:
            yield from self.finish(status, doing, soon=soon)

    def finish(self, status: int, doing: object, *, soon: bool = False) -> Steps[None]:
        """Does the rest of a `wait` after `arrive` has returned `status`: wakes others, looks longer, or sleeps."""
        if status == NOT_DONE and (soon or self.state.words[PATIENT]):
            status = self._look(*self._expected)
        if status == WAKE:
            self._wake_sleepers()
        elif status == SPREAD:
            self._spread()
        elif status == NOT_DONE:
            yield
            self._sleep(doing)

    def _arrive(self) -> int:
        """The twin of machine code's `arrive`."""
        self.state.words[COUNT] += 1
        self._words[ARRIVED] = self.state.words[COUNT]
        fence(self._lock)
        return self._look(self.state.words[LOOKS], self.state.words[LOOKS_NS])

    def _look(self, looks: int, ns: int) -> int:
        """Looks whether all have arrived, at most `looks` times and for `ns` nanoseconds: DONE, NOT_DONE or WAKE."""
        if self._native is not None:
            return self._native.look(self.state.address, looks, ns, True)
        count, until_ns = self.state.words[COUNT], 0
        for peer in self._peers:
            while peer.words[ARRIVED] < count:
                until_ns = until_ns or time.monotonic_ns() + ns
                if not looks or time.monotonic_ns() > until_ns:
                    return NOT_DONE
                looks -= 1
                os.sched_yield()
        sleepers = any(peer.words[ASLEEP] for peer in self._peers)
        self.state.words[PATIENT] |= sleepers
        return WAKE if sleepers and not until_ns else DONE

    def _wake_sleepers(self) -> None:
        for peer in self._peers:
            if peer.words[ASLEEP]:
                peer.wake()

    def _spread(self) -> None:
        """Moves this thread to the core with the fewest ranks; the system may move it again as it likes.

        A rank that wakes another draws it onto its own core, and the system leaves two that never sleep there
        for long.
        """
        now = time.monotonic()
        if now - self._spread_at < SPREAD_S:
            return
        self._spread_at, mine = now, self._words[CORE]
        ranks = Counter([mine, *(peer.words[CORE] for peer in self._peers)])
        cores = os.sched_getaffinity(0)
        best = min(sorted(cores), key=lambda core: ranks[core])
        if ranks[best] + 1 < ranks[mine]:
            os.sched_setaffinity(0, [best])
            os.sched_setaffinity(0, cores)

    def give_up(self, kind: PeerFailure, culprit: int) -> None:
        """Writes into the control block why the group is broken, and wakes all. The first reason stands."""
        if not self._words[FAILURE]:
            self._words[FAILURE] = kind + 8 * culprit
        fence(self._lock)
        self._wake_sleepers()

    def receive(self, peer: Peer, ready: Callable[[], bool], doing: object) -> None:
        """Receives messages of a rank until `ready()` returns True. Raises what `wait` raises, after the same time."""
        heard_at = self._looked_at = time.monotonic()
        while True:
            peer.receive()
            if ready():
                return
            self._raise_failure(doing, [peer])
            heard_at = self._nap({peer.rank: heard_at}, doing)[peer.rank]

    def send(self, peer: Peer, message: bytes, descriptors: Sequence[int]) -> None:
        """Sends a message to a rank.

        While the rank does not read, this rank reads the messages of all others: both may be sending.

        Raises:
            DeadlineError: the rank has not read until the deadline.
            PeerLostError: the rank is gone, or has broken the group.
        """
        begun = time.monotonic()
        room = select.poll()
        room.register(peer.connection.fileno(), select.POLLOUT)
        while not peer.send(message, descriptors):
            for other in self._peers:
                other.receive()
            self._raise_failure("for it to read messages", [peer])
            if time.monotonic() - begun > self._deadline_s:
                self._raise_silence("for it to read messages", [peer.rank])
            room.poll(_RETRY_MS)

    def _sleep(self, doing: object) -> None:
        count = self.state.words[COUNT]
        begun = self._looked_at = time.monotonic()
        heard_at = dict.fromkeys((peer.rank for peer in self._peers), begun)
        self._words[ASLEEP] = 1
        try:
            while True:
                fence(self._lock)
                # Failures are read before arrivals: a rank that has passed this barrier and then left breaks a
                # later one alone.
                failures = [peer.words[FAILURE] for peer in self._peers]
                missing = [peer for peer in self._peers if peer.words[ARRIVED] < count]
                if not missing:
                    return
                if any(failures) or any(peer.gone for peer in missing):
                    self._raise_failure(doing, missing)
                awaited = {peer.rank: heard_at[peer.rank] for peer in missing}
                heard_at.update(self._nap(awaited, doing))
        finally:
            self._words[ASLEEP] = 0
            self.state.words[PATIENT] = time.monotonic() - begun < SHORT_S

    def _nap(self, awaited: dict[int, float], doing: object) -> dict[int, float]:
        """Sleeps until another rank sends something, or for a while. Updates when each awaited rank was heard."""
        now = time.monotonic()
        if now - self._looked_at > _NAP_S + _STALL_S:
            awaited = dict.fromkeys(awaited, now)  # this rank was stopped: it has to look first
        self._looked_at = now
        left_s = self._deadline_s + min(awaited.values()) - now
        if left_s <= 0:
            self._raise_silence(doing, [rank for rank in awaited if awaited[rank] + self._deadline_s <= now])
        for fd, _ in self._poll.poll(1e3 * min(left_s, _NAP_S) + 1):
            if fd == self._stop:
                self.give_up(PeerFailure.LEFT, self._rank)
                raise ClosedError(
                    f"{self._names[self._rank]} has left its group while it waited {doing}; await operations "
                    "before close()"
                )
            peer = self._by_fd[fd]
            peer.receive()
            if peer.gone:
                self._poll.unregister(fd)  # its end has been received
        now = time.monotonic()
        for peer in self._peers:
            if peer.rank in awaited and peer.words[BEATS] != peer.beats:
                peer.beats = peer.words[BEATS]
                awaited[peer.rank] = now
        return awaited

    def _raise_failure(self, doing: object, awaited: Sequence[Peer]) -> None:
        """Raises the failure that another rank has reported, or that an awaited rank is gone."""
        for peer in self._peers:
            if word := peer.words[FAILURE]:
                kind, culprit = PeerFailure(word % 8), word // 8
                if culprit == self._rank:  # others take this rank for dead or silent, and have gone on
                    culprit = peer.rank
                    kind = PeerFailure.LEFT
                raise self.failure(kind, culprit, doing)
        for peer in awaited:
            if peer.gone:
                raise self.failure(PeerFailure.LOST, peer.rank, doing)

    def _raise_silence(self, doing: object, ranks: Sequence[int]) -> None:
        raise self.failure(PeerFailure.SILENT, ranks[0], doing, ranks)

    def failure(
        self, kind: PeerFailure, culprit: int, doing: object, ranks: Sequence[int] = ()
    ) -> GradstreamError:
        """Breaks the group; returns the error to raise.

        Args:
            kind: why.
            culprit: rank to name in the error.
            doing: the wait of this rank, in words: "for ...".
            ranks: all silent ranks.
        """
        self.give_up(kind, culprit)
        name, me = self._names[culprit], self._names[self._rank]
        where = f"(rank {culprit} of {len(self._names)}) while {me} waited {doing}"
        remedy = "the group is broken; nothing of this operation may be used"
        if kind is PeerFailure.SILENT:
            others = f"; silent: {', '.join(self._names[rank] for rank in ranks)}" if len(ranks) > 1 else ""
            return DeadlineError(
                name, f"gave no sign of life for {self._deadline_s:g} s {where}{others}; {remedy}"
            )
        what = "left the group" if kind is PeerFailure.LEFT else "its process ended"
        return PeerLostError(name, f"{what} {where}; {remedy}")
