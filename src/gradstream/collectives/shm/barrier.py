"""The barrier between ranks of one host, and what is found out there: who is dead, silent or gone.

A rank comes to the barrier by counting up a word on its board; it may pass once the words of all others
have got there. It looks for some microseconds, and then sleeps on the sockets to the others until one
rings, or a socket ends. The last one to come, who finds all others there, rings for those who sleep.

To wake takes longer than to look. So a rank looks longer where others can be expected soon: between the two
barriers of an operation; and after a sleep, its own or another's, until it has slept for long itself. Else
one would sleep when the other comes, and the other when it is awake, in turns for ever.

Whoever finds the group broken says so on its board and rings for all, so that every survivor names the
same rank, also where the survivors end one after the other.
"""

from __future__ import annotations

import enum
import errno
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock

from gradstream.collectives.shm.assembly import (
    COUNT,
    DONE,
    LOOKS,
    LOOKS_NS,
    NOT_DONE,
    PATIENT,
    RING,
    SPREAD,
)
from gradstream.collectives.shm.control_block import (
    ARRIVED,
    ASLEEP,
    BEATS,
    CORE,
    TROUBLE,
    ControlBlock,
    fence,
)
from gradstream.collectives.shm.native import State, native
from gradstream.collectives.shm.rendezvous import MESSAGE_BYTES
from gradstream.collectives.shm.steps import Steps
from gradstream.errors import ClosedError, DeadlineError, GradstreamError, InternalError, PeerLostError
from gradstream.transport.socket.unix import recv_descriptors

__all__ = ["HostBarrier", "Peer", "PeerFailure"]

WITH_CORES = 1 << 20, 20_000
"""How often a rank looks at most whether others have come, and for how many ns, before it goes to sleep."""
CROWDED = 40, 500_000
"""The same where ranks are more than cores: each look yields the core, which the others may then use."""
EXPECTED = 1000, 250_000
"""The same for those who are expected soon. They may need this very core: each look yields it."""

SPREAD_S = 1e-3
"""Between two moves to another core."""
SHORT_S = 5e-4
"""A sleep that was not worth it."""

_NAP_S = 0.5  # between two looks at the beats of those who are awaited
_RING = b"\0"
_STALL_S = 0.25  # later than it wanted to be: this process stood still
_RETRY_MS = 5.0  # a letter for which there was no room


class PeerFailure(enum.IntEnum):
    """Why a group is broken."""

    LOST = 1
    SILENT = 2
    LEFT = 3


class Peer:
    """Another rank, as this one sees it.

    Args:
        rank: its number.
        name: of its node.
        connection: to it.
        board: its own.
    """

    def __init__(self, rank: int, name: str, connection: socket.socket, board: ControlBlock) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.name = name
        self.connection = connection
        self.board = board
        self.words = board.words
        self.gone = False
        self.beats = 0  # of its own that were seen last
        self.on_letter: Callable[[bytes, list[int]], None] = _unexpected  # what is not a ring
        self._hearing = Lock()

    def ring(self) -> None:
        """Wakes it. One that is gone, or that has not heard hundreds of rings, needs none."""
        try:
            self.connection.send(_RING)
        except OSError:
            pass

    def write(self, letter: bytes, descriptors: Sequence[int]) -> bool:
        """Sends what is not a ring; False while there is no room. To one that is gone, nothing is sent."""
        try:
            socket.send_fds(self.connection, [letter], list(descriptors))
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS)
        return True

    def hear(self) -> None:
        """Takes what has come from it: rings, letters, or its end. From any thread."""
        with self._hearing:
            while not self.gone:
                try:
                    message, descriptors = recv_descriptors(self.connection, MESSAGE_BYTES, 1)
                except BlockingIOError:
                    return
                except OSError:
                    message, descriptors = b"", []
                if not message:
                    self.gone = True
                elif message != _RING:
                    self.on_letter(message, descriptors)

    def close(self) -> None:
        """Hangs up."""
        self.gone = True
        self.connection.close()


def _unexpected(letter: bytes, descriptors: list[int]) -> None:
    raise InternalError(f"a letter that nobody opens: {letter!r}")


class HostBarrier:
    """Where all ranks wait for each other.

    Args:
        rank: this one.
        names: of all, by rank.
        board: this rank's.
        peers: all others.
        deadline_s: how long a rank that is awaited may show no sign of life: neither come nor beat.
        stop: a descriptor; once it can be read, a rank that waits gives up.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        board: ControlBlock,
        peers: Sequence[Peer],
        deadline_s: float,
        stop: int,
    ) -> None:
        self._rank = rank
        self._names = names
        self._words = board.words
        self._peers = peers
        boards = {peer.rank: peer.board.address for peer in peers} | {rank: board.address}
        cores = len(os.sched_getaffinity(0))
        crowded = len(names) > cores
        looks = CROWDED if crowded else WITH_CORES
        share = -(-len(names) // cores)
        self._expected = EXPECTED[0], EXPECTED[1] * share
        self.state = State(rank, [boards[rank] for rank in range(len(names))], looks, crowded, share)
        self._native = native()
        self._deadline_s = deadline_s
        self._looked_at = 0.0
        self._spread_at = 0.0
        self._stop = stop
        self._lock = Lock()
        self._poll = select.poll()
        self._poll.register(stop, select.POLLIN)
        for peer in peers:
            self._poll.register(peer.connection.fileno(), select.POLLIN)
        self._by_fd = {peer.connection.fileno(): peer for peer in peers}

    def wait(self, doing: object, *, soon: bool = False) -> Steps[None]:
        """Comes to the barrier; done once all others have.

        Args:
            doing: what for, in messages.
            soon: the others do just what this rank has done.

        Raises:
            PeerLostError, DeadlineError: naming the rank that is dead or silent; the same at all ranks.
            ClosedError: this rank was closed meanwhile.
        """
        status = self._come() if self._native is None else self._native.come(self.state.address)
        if status != DONE:
            yield from self.finish(status, doing, soon=soon)

    def finish(self, status: int, doing: object, *, soon: bool = False) -> Steps[None]:
        """What `come` leaves of a `wait`: to ring for others, or to look longer, or to sleep."""
        if status == NOT_DONE and (soon or self.state.words[PATIENT]):
            status = self._look(*self._expected)
        if status == RING:
            self._ring()
        elif status == SPREAD:
            self._spread()
        elif status == NOT_DONE:
            yield
            self._sleep(doing)

    def _come(self) -> int:
        """Machine code's `come`, without it."""
        self.state.words[COUNT] += 1
        self._words[ARRIVED] = self.state.words[COUNT]
        fence(self._lock)
        return self._look(self.state.words[LOOKS], self.state.words[LOOKS_NS])

    def _look(self, looks: int, ns: int) -> int:
        """Whether all have come, as DONE, NOT_DONE or RING; looks so often, and for so long, at most."""
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
        return RING if sleepers and not until_ns else DONE

    def _ring(self) -> None:
        for peer in self._peers:
            if peer.words[ASLEEP]:
                peer.ring()

    def _spread(self) -> None:
        """Moves this thread to the core with the fewest ranks; the system may move it again as it likes.

        Who rings draws the other onto its own core, and two that never sleep are left there for long.
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

    def give_up(self, trouble: PeerFailure, culprit: int) -> None:
        """Says on the board why the group is broken, and wakes all; the first reason stands."""
        if not self._words[TROUBLE]:
            self._words[TROUBLE] = trouble + 8 * culprit
        fence(self._lock)
        self._ring()

    def receive(self, peer: Peer, ready: Callable[[], bool], doing: object) -> None:
        """Hears a rank until `ready()`; waits for its letters as for its coming. Raises as `wait`."""
        heard_at = self._looked_at = time.monotonic()
        while True:
            peer.hear()
            if ready():
                return
            self._raise_trouble(doing, [peer])
            heard_at = self._nap({peer.rank: heard_at}, doing)[peer.rank]

    def send(self, peer: Peer, letter: bytes, descriptors: Sequence[int]) -> None:
        """Writes a letter to a rank; hears all while it takes none, since it may have as many to write.

        Raises:
            DeadlineError: it has taken nothing until the deadline.
            PeerLostError: it is gone, or has broken the group.
        """
        begun = time.monotonic()
        room = select.poll()
        room.register(peer.connection.fileno(), select.POLLOUT)
        while not peer.write(letter, descriptors):
            for other in self._peers:
                other.hear()
            self._raise_trouble("for it to read letters", [peer])
            if time.monotonic() - begun > self._deadline_s:
                self._raise_silence("for it to read letters", [peer.rank])
            room.poll(_RETRY_MS)

    def _sleep(self, doing: object) -> None:
        count = self.state.words[COUNT]
        begun = self._looked_at = time.monotonic()
        heard_at = dict.fromkeys((peer.rank for peer in self._peers), begun)
        self._words[ASLEEP] = 1
        try:
            while True:
                fence(self._lock)
                # Troubles first: who has passed this barrier and then left leaves no trouble in it.
                troubles = [peer.words[TROUBLE] for peer in self._peers]
                missing = [peer for peer in self._peers if peer.words[ARRIVED] < count]
                if not missing:
                    return
                if any(troubles) or any(peer.gone for peer in missing):
                    self._raise_trouble(doing, missing)
                awaited = {peer.rank: heard_at[peer.rank] for peer in missing}
                heard_at.update(self._nap(awaited, doing))
        finally:
            self._words[ASLEEP] = 0
            self.state.words[PATIENT] = time.monotonic() - begun < SHORT_S

    def _nap(self, awaited: dict[int, float], doing: object) -> dict[int, float]:
        """Sleeps until something is heard, or for a while; when each awaited rank was heard last, by rank."""
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
                raise ClosedError(f"{self._names[self._rank]}: its group was closed while it waited {doing}")
            peer = self._by_fd[fd]
            peer.hear()
            if peer.gone:
                self._poll.unregister(fd)  # its end has been heard
        now = time.monotonic()
        for peer in self._peers:
            if peer.rank in awaited and peer.words[BEATS] != peer.beats:
                peer.beats = peer.words[BEATS]
                awaited[peer.rank] = now
        return awaited

    def _raise_trouble(self, doing: object, awaited: Sequence[Peer]) -> None:
        """Raises what others have found out, or that an awaited rank is gone."""
        for peer in self._peers:
            if trouble := peer.words[TROUBLE]:
                kind, culprit = PeerFailure(trouble % 8), trouble // 8
                if culprit == self._rank:  # they take this one for dead or silent, and have gone on
                    culprit = peer.rank
                    kind = PeerFailure.LEFT
                raise self.failure(kind, culprit, doing)
        for peer in awaited:
            if peer.gone:
                raise self.failure(PeerFailure.LOST, peer.rank, doing)

    def _raise_silence(self, doing: object, ranks: Sequence[int]) -> None:
        raise self.failure(PeerFailure.SILENT, ranks[0], doing, ranks)

    def failure(
        self, trouble: PeerFailure, culprit: int, doing: object, ranks: Sequence[int] = ()
    ) -> GradstreamError:
        """Breaks the group; the error to raise."""
        self.give_up(trouble, culprit)
        name, me = self._names[culprit], self._names[self._rank]
        where = f"(rank {culprit} of {len(self._names)}) while {me} waited {doing}"
        remedy = "the group is broken; nothing of this operation may be used"
        if trouble is PeerFailure.SILENT:
            others = f"; silent: {', '.join(self._names[rank] for rank in ranks)}" if len(ranks) > 1 else ""
            return DeadlineError(
                name, f"gave no sign of life for {self._deadline_s:g} s {where}{others}; {remedy}"
            )
        what = "left the group" if trouble is PeerFailure.LEFT else "its process ended"
        return PeerLostError(name, f"{what} {where}; {remedy}")
