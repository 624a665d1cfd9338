"""`Intake`: what one peer uses of this node: open streams, bytes that nobody has taken yet, refusals.

Each sender that is a member has its own; all others share one, so that many names gain no more than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gradstream.transport.base import Caller, Identity
from gradstream.transport.limits import LIMITS

_CHUNK_BYTES = 1 << 20  # where no model is registered; also the length of pieces of tagged tensors
_STREAMS = 4  # concurrent pushes or fetches of one peer, each with a window of chunks
_OTHERS = Caller("", 0)


class Intake:
    """Counts the streams, unread bytes and refusals of one peer, to hold them within this node's limits.

    Args:
        allowed_bytes: returns the most bytes of received chunks and bodies that may wait to be read.
        more_streams: number of streams that the peer may open beyond `Limits.streams`.
    """

    def __init__(self, allowed_bytes: Callable[[], int], more_streams: int = 0) -> None:
        self.num_streams = 0
        self.more_streams = more_streams
        self.unread_bytes = 0
        self._allowed_bytes = allowed_bytes
        self._refusals_ns: deque[int] = deque(maxlen=LIMITS.refusals)
        self._closed_until_ns = 0

    @property
    def is_blank(self) -> bool:
        """Whether all counts are zero, so that this object may be dropped."""
        return not (self.num_streams or self.unread_bytes or self._refusals_ns or self._closed_until_ns)

    def has_room(self, num_bytes: int) -> bool:
        """Whether this many more bytes may wait to be read."""
        return self.unread_bytes + num_bytes <= self._allowed_bytes()

    def refused(self, now_ns: int) -> bool:
        """Counts a refusal. Returns True after too many: then close the peer's connections."""
        self._refusals_ns.append(now_ns)
        period_ns = round(LIMITS.refusals_s * 1e9)
        if len(self._refusals_ns) < LIMITS.refusals or now_ns - self._refusals_ns[0] > period_ns:
            return False
        self._refusals_ns.clear()
        self._closed_until_ns = now_ns + period_ns
        return True

    def is_closed(self, now_ns: int) -> bool:
        """Whether the peer was refused too often lately to connect."""
        return now_ns < self._closed_until_ns


class Intakes:
    """The intakes of all peers of one endpoint.

    Args:
        identity: identity of the endpoint.
        window: chunks that the endpoint holds for each stream.
    """

    def __init__(self, identity: Identity, window: int) -> None:
        self._identity = identity
        self._window = window
        self._of: dict[Caller, Intake] = {}
        self.takes_tensors = False

    def of(self, caller: Caller) -> Intake:
        """The intake of a caller."""
        members = self._identity.members
        if members is not None and members.get(caller.name) != caller.incarnation:
            caller = _OTHERS  # not a member, no longer one, or another node with the name of one
        elif caller not in self._of and len(self._of) > LIMITS.sessions:
            self._of = {name: one for name, one in self._of.items() if not one.is_blank}
            if members is None and len(self._of) > LIMITS.sessions:
                caller = _OTHERS  # many names gain nothing before the members are known
        if caller not in self._of:
            if caller == _OTHERS:  # all joining nodes wait at the same time until the last one has joined
                self._of[caller] = Intake(self._others_bytes, self._identity.nodes)
            else:
                self._of[caller] = Intake(self._members_bytes)
        return self._of[caller]

    def _members_bytes(self) -> int:
        pieces_bytes = _CHUNK_BYTES if self.takes_tensors else 0
        chunk_bytes = self._identity.chunk_bytes or _CHUNK_BYTES
        return LIMITS.unread_bytes + self._window * (_STREAMS * chunk_bytes + pieces_bytes)

    def _others_bytes(self) -> int:
        return LIMITS.others_unread_bytes
