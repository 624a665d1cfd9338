"""The members of the run as a shard knows them, so that it can refuse streams of all other nodes."""

from __future__ import annotations

from collections.abc import Collection

from gradstream.errors import RefusedError
from gradstream.server.shard.state import Sender
from gradstream.transport.base import Identity
from gradstream.wire import v1

__all__ = ["KnownMembers"]


class KnownMembers:
    """The members by the newest notice. Until there is one, every node is let in.

    A shard frees the sequence numbers of a sender that has left. So it must accept nothing of that sender from then
    on, not on an older stream either: a retry would count as new.

    Args:
        identity: identity of the shard; has the epoch of that notice.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._members: frozenset[Sender] | None = None

    def keep(self, members: Collection[Sender]) -> None:
        """Sets the members."""
        self._members = frozenset(members)

    def check(self, opened: v1.Open) -> None:
        """Raises RefusedError if the sender of a stream is no member any more.

        A sender of a later epoch is let in: it may have joined before this shard was told.
        """
        mine, sender = self._identity, (opened.sender, opened.incarnation)
        if self._members is None or sender in self._members or opened.epoch > mine.epoch:
            return
        who = f"{opened.sender} (incarnation {opened.incarnation:x})"
        text = f"{who} has left the run: its {opened.method} is not taken at epoch {mine.epoch}; join again"
        raise RefusedError(mine.name, "NOT_MEMBER", text)
